"""Reading of training data: a source of microbatches by number, and the processes that prefetch microbatches."""
