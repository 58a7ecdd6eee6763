"""What a run leaves behind, and how it is read.  Stdlib only; matplotlib is used where it is installed.

    python -m recover_megatron.report DIR               the run in a dozen lines of text, and its loss as a picture
    recover-report DIR [--reference DIR2] [--out FILE]  all of it as an HTML page

steps       steps.jsonl: one line per iteration
events      events.jsonl: what happened, one line each
follow      steps.jsonl, while the run writes it
audit       whether every microbatch of the run was counted exactly once
run_dir     the other files of a run's log folder
history     the faults, and what each cost
compare     a run beside its reference
throughput  samples per second
summary     the run in a dozen lines of text
plot        the pictures
page        the HTML page
command     what both commands share; __main__ is the first, full the second
"""
