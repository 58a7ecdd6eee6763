"""The backend's own collectives behind the interface of a group: for fabrics where the vendor's algorithm is faster."""

from __future__ import annotations

import torch

from recover_megatron.collectives.epoch import CancelToken, Epoch
from recover_megatron.collectives.group import MOST_SPANS, BucketCollective, Group
from recover_megatron.collectives.memo import Memo
from recover_megatron.collectives.native.backend import NativeBackend
from recover_megatron.collectives.native.pipeline import NativeTask, Pipeline
from recover_megatron.collectives.native.rows import ALIGNED_BYTES, Plan, plan_rounds
from recover_megatron.collectives.ring.progress import Handle, ProgressThread
from recover_megatron.collectives.ring.schedule import even_part, frozen
from recover_megatron.collectives.transport.streams import DeviceStream, Order


class NativeGroup(Group):
    """Use ``open_group``."""

    cut_bytes = ALIGNED_BYTES

    def __init__(
        self, epoch: Epoch, cancel_token: CancelToken, backend: NativeBackend, *, device: torch.device | None = None
    ) -> None:
        super().__init__(epoch, cancel_token, device or torch.device("cpu"))
        self._backend = backend
        copies = DeviceStream(self.device) if self.device.type == "cuda" else Order()
        size = self.size  # without the group itself: no circle may keep its memory
        self._plans: Memo[tuple[Plan, ...]] = Memo(MOST_SPANS, lambda plans: 1 + len(plans) * size)
        self._pipeline = Pipeline(backend, copies, self.rank, self.size, self.device)
        self._progress: ProgressThread[NativeTask] = ProgressThread(
            self._pipeline, cancel_token, f"native group of epoch {self.epoch}"
        )

    @property
    def scratch_peak(self) -> int:
        """The most bytes of scratch that the group ever had, over all buckets."""
        return self._pipeline.scratch_peak

    def close(self) -> None:
        self._progress.close()

    def _start(self, collective: BucketCollective) -> Handle:
        its, flat = collective, collective.flat
        key = flat.numel(), flat.dtype, frozen(its.chunks), its.reduce, its.to
        plans = self._plans.get(key, lambda: self._plan(its))
        return self._progress.submit(NativeTask(its, plans, its.epoch_of or self.epoch, self._backend.submitted()))

    def _plan(self, its: BucketCollective) -> tuple[Plan, ...]:
        if self.size == 1:
            return ()
        longest = even_part(its.flat.numel(), self.size, max(1, self.cut_bytes // its.flat.element_size()))
        return plan_rounds(self.rank, its.chunks, max(1, longest), reduce=its.reduce, to=its.to)
