import time
from types import SimpleNamespace

from megatron.core.timers import Timers


class GlobalState:
    """What a run has besides its configuration."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.timers = Timers(0, "minmax")
        self.start_time = time.time()
        self.train_state = SimpleNamespace(
            step=0, consumed_train_samples=0, skipped_train_samples=0, consumed_valid_samples=0,
            floating_point_operations_so_far=0, do_train=True, do_valid=True, do_test=False,
        )  # fmt: skip
        self._flops_seqlen_sum = self._flops_seqlen_sq_sum = 0
