"""What a run leaves behind, and how it is read.  Stdlib only; matplotlib is used where it is installed.

    python -m recover_megatron.report RUN_DIR

steps     steps.jsonl: one line per iteration
follow    the same, while the run writes it
audit     whether every microbatch of the run was counted exactly once
run_dir   the other files of a run's log folder
summary   the run in a dozen lines of text
plot      the loss as a picture
"""
