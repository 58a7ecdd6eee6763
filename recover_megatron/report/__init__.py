"""Reports on a run, from its log folder.  The HTML page needs jinja2; without matplotlib there are no PNG pictures.

python -m recover_megatron.report DIR               the run in a dozen lines of text, and its loss as a picture
recover-report DIR [--reference DIR2] [--out FILE]  the complete report as an HTML page
"""
