"""Reading of training data: microbatches are read by their number, and prefetched by child processes."""
