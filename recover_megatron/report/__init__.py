"""What a run leaves behind, and how it is read: steps.jsonl (`steps`), the summary and the plot.  Stdlib only."""
