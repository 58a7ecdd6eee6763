"""What a run did, from the files in its log folder: summary, audit of the microbatches, plot of the loss.

    python -m recover_megatron.report RUN_DIR

``steps`` reads steps.jsonl, ``run_dir`` the folder around it, ``audit`` checks the steps, ``summary`` puts the run into
words, ``plot`` draws it.  Standard library only; matplotlib is used where it is installed.
"""
