"""Reports on a run, from its log folder.  The page is made by jinja2; matplotlib is used where it is installed.

python -m recover_megatron.report DIR               the run in a dozen lines of text, and its loss as a picture
recover-report DIR [--reference DIR2] [--out FILE]  all of it as an HTML page
"""
