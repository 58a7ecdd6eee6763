"""Output of a run: record files, the training log, TensorBoard and W&B writers, and dumps of layers."""
