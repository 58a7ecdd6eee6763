def num_floating_point_operations(cfg, batch_size=1, seqlen_sum=None, seqlen_squared_sum=None):
    return 1000.0 * batch_size
