"""Gathers updated parameters while the next forward pass runs (--overlap-param-gather), even if workers die.

    updated --all have agreed--> GATHERING --all parts have come over the ring---> COMPLETE
                                     |                                                ^
                                     '-- the epoch ends --> FETCHING -----------------'
                                                            all missing parts, from any holder

A forward pass is never interrupted, so during the pass a worker cannot meet other workers to repeat a gather.  Instead
it fetches missing parts from holders.  When all workers have agreed that the update is done, every holder of a unit
(the owner of a shard and its shadows, see `shards`) has the unit's new parameters in its model.  These do not change
before all live workers have agreed on the next step, for which every worker needs all parameters.  Until then a thread
of any holder answers requests for this update's parts (`collectives.peers`), whatever the holder's main thread does
and whichever epoch the holder is in.

All holders of a unit have the same bits, so any holder may answer.  (If the shadows are updated on another kind of
processor, the bits differ.  Then parameters are gathered at the end of the step: ``trainer.Parameters``.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from recover_megatron.collectives.device import beside, made_so_far, within
from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.collectives.ledger import Bucket, Span
from recover_megatron.collectives.peers import Fetcher
from recover_megatron.collectives.progress import Handle
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.state.shards import Shards
from recover_megatron.instep.trainer import alive
from recover_megatron.logger import get_logger
from recover_megatron.network.peer_store import MOST_BYTES, MOST_PARTS, Range
from recover_megatron.workload.grid import Column
from recover_megatron.workload.shards import owned

log = get_logger(__name__)

Part = tuple[int, Span]
"""(Number of a bucket, span of the bucket's elements)."""
UNREACHED_SECONDS = 5.0
"""Seconds after which a live holder counts as unreachable if no connection to it succeeds."""
RETRY_SECONDS = 0.02
"""Seconds between two requests while no holder answers, but some holders may be alive."""


class Overlap:
    """Gathers the updated parameters of one worker's model.

    ``parts``: (column, flat tensor) of each bucket; the forward pass needs the last bucket first.  ``lose``:
    function that is called with the id of a unit (`workload.shards`) if no worker has its parameters; it must raise.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Column, torch.Tensor]],
        shards: Shards,
        recovery: Recovery,
        lose: Callable[[int], None],
    ) -> None:
        self._parts = [(column, Bucket(tensor)) for column, tensor in parts]
        self._gpu = next((tensor.device for _, tensor in parts if tensor.device.type == "cuda"), None)
        self._shards = shards
        self._recovery = recovery
        self._lose = lose
        self._missing: dict[int, Handle | None] = {}
        """Incomplete bucket -> handle of the all-gather over the ring; None: the bucket must be fetched from
        holders."""
        self._update = 0
        """Number of the decision to which the update belongs: the section ``update``."""
        self._published: int | None = None
        self._made: Any = None
        """CUDA event recorded after the update (``made_so_far``); None without a GPU."""
        self._fetchers: dict[int, Fetcher] = {}

    @property
    def pending(self) -> bool:
        """True if parameters of this worker's model may be missing."""
        return bool(self._missing)

    # ---- for other workers

    def publish(self, update: int) -> None:
        """Serve this worker's parameters after ``update`` to other workers; call it before reporting the update
        done."""
        self._made = made_so_far(self._gpu)
        self._published = update
        self._recovery.comm_config.peer_store.source = self.give

    def withdraw(self) -> None:
        """Stop serving parameters to other workers, before this worker's parameters change."""
        self._published = None

    def give(self, update: int, parts: Sequence[Range]) -> bytes | None:
        """Answer another worker's request: return the requested parts, concatenated; None: refused.

        Refuses if another update or none is served, or if the answer would exceed ``MOST_BYTES``.  Raises ValueError if
        the model has no such parts.  Called by the peer store's thread.
        """
        flat = [self._flat(*part) for part in parts]
        if update != self._published or sum(part.nbytes for part in flat) > MOST_BYTES:
            return None
        with beside(self._gpu, self._made, within()):
            on_host = [_on_host(part) for part in flat]
        return b"".join(part.view(torch.uint8).numpy().tobytes() for part in on_host)

    def _flat(self, number: int, start: int, stop: int) -> torch.Tensor:
        if not 0 <= number < len(self._parts) or not 0 <= start < stop <= self._parts[number][1].ledger.numel:
            raise ValueError(f"no elements {start}:{stop} in bucket {number}")
        return self._parts[number][1].flat[start:stop]

    # ---- for this worker

    def start(self, update: int) -> None:
        """Start to gather the buckets over the ring in the background, in the order in which the forward pass needs
        them.

        Call it when all workers have agreed on ``update``.  If this worker learnt of the agreement from the plan
        of a later epoch, other workers may have begun the next step.  Then the ring is not used, and all buckets are
        fetched.
        """
        recovery = self._recovery
        self._update = update
        self._missing = dict.fromkeys(reversed(range(len(self._parts))))
        for _, bucket in self._parts:
            bucket.ledger.clear()
        if recovery.assignment.committed(update):
            return
        epoch_groups, live = recovery.assignment.epoch_groups, recovery.assignment.live
        try:
            for number in self._missing:
                column, bucket = self._parts[number]
                spans, _ = self._shards.cut(column, bucket.ledger.numel)
                ring = epoch_groups.ring(alive(column, live))
                self._missing[number] = ring.all_gather(bucket, spans, missing=True)
        except EpochRevoked:
            return  # ``complete`` fetches the other buckets

    def complete(self, number: int) -> None:
        """Wait until bucket ``number`` of the model has all parameters.

        Raises ``Orphaned`` if this worker's replica is broken, ``StateLost`` if no worker has the parameters any more,
        ``Fenced`` and ``CoordinatorLost`` if the run is over for this worker.
        """
        if number not in self._missing:
            return
        with suppress(EpochRevoked), self._recovery.progress.waiting("param-gather"):
            if self._arrived(number):
                return
        self._fetch()

    def _arrived(self, number: int) -> bool:
        """Wait until the ring has gathered bucket ``number``; return False if the bucket must be fetched.

        Raises ``EpochRevoked``.
        """
        handle = self._missing[number]
        if handle is None:
            return False
        handle.wait()
        del self._missing[number]
        return True

    def complete_all(self) -> None:
        """Wait until the model has all parameters of the last update; raises as ``complete`` does."""
        for number in list(self._missing):
            self.complete(number)

    def forget(self) -> None:
        """Stop serving and gathering parameters, because this worker has lost its place."""
        self.withdraw()
        self._missing.clear()
        self._hang_up()

    # ---- inside

    def _fetch(self) -> None:
        """Fetch all parameters that the ring has not gathered, from workers that hold them."""
        recovery, began = self._recovery, time.monotonic()
        came: dict[int, int] = {}
        with recovery.progress.waiting("param-gather"):
            for number in list(self._missing):
                with suppress(EpochRevoked):
                    self._arrived(number)
            for column in dict.fromkeys(self._parts[number][0] for number in self._missing):
                for unit, wanted in self._wanted(column).items():
                    self._fetch_unit(column, unit, wanted, came)
        self._missing.clear()
        self._hang_up()
        if came:
            self._report(came, time.monotonic() - began)

    def _fetch_unit(self, column: Column, unit: int, wanted: Sequence[Part], came: dict[int, int]) -> None:
        """Fetch the parts ``wanted`` of a unit; count the received bytes in ``came`` (worker -> bytes received from
        it)."""
        if unit not in self._shards.held(column):
            for request in _requests(wanted, lambda number: self._parts[number][1].flat.element_size()):
                worker, data = self._bring(request, unit, self._shards.layout(column).holders(unit))
                self._fill(request, data)
                came[worker] = came.get(worker, 0) + len(data)
        for number, span in wanted:
            self._parts[number][1].ledger.mark(span, self._recovery.assignment.decision.epoch)

    def _report(self, came: dict[int, int], seconds: float) -> None:
        size = sum(came.values())
        self._recovery.hooks.log("parameters fetched", bytes=size, seconds=round(seconds, 6))
        log.info(
            f"{size} bytes of parameters were fetched from workers {sorted(came)} in {seconds:.3f} s, because an epoch "
            "ended before these had arrived over the ring"
        )

    def _hang_up(self) -> None:
        for fetcher in self._fetchers.values():
            fetcher.close()
        self._fetchers.clear()

    def _wanted(self, column: Column) -> dict[int, list[Part]]:
        """Return unit -> missing parts of this unit, in all incomplete buckets of ``column``."""
        found: dict[int, list[Part]] = {}
        for number in self._missing:
            key, bucket = self._parts[number]
            if key == column:
                missing = [(span.start, span.stop) for span in bucket.ledger.local]
                for unit, parts in owned(self._shards.layout(column), missing, bucket.ledger.numel).items():
                    found.setdefault(unit, []).extend((number, Span(*part)) for part in parts)
        return found

    def _fill(self, parts: Sequence[Part], data: bytes) -> None:
        at = 0
        for number, span in parts:
            flat = self._parts[number][1].flat
            end = at + len(span) * flat.element_size()
            flat[span.start : span.stop].copy_(torch.frombuffer(bytearray(data[at:end]), dtype=flat.dtype))
            at = end

    def _bring(self, parts: Sequence[Part], unit: int, holders: Sequence[int]) -> tuple[int, bytes]:
        """Request ``parts`` from the holders in turn; return the worker that answered, and its answer.

        If no holder can answer any more, calls ``lose``.  Raises ``PeerLost`` if all live holders are unreachable.
        """
        ranges = [(bucket, span.start, span.stop) for bucket, span in parts]
        refused: set[int] = set()
        unreached: dict[int, float] = {}
        while True:
            for worker in holders:
                if worker in refused or self._is_gone(worker):
                    continue
                try:
                    data = self._ask(worker, ranges)
                except PeerLost as lost:
                    if lost.unreachable:
                        unreached.setdefault(worker, time.monotonic())
                    if fetcher := self._fetchers.pop(worker, None):
                        fetcher.close()
                    continue
                if data is not None:
                    return worker, data
                refused.add(worker)
            self._recovery.orphan.stay()
            left = [worker for worker in holders if worker not in refused and not self._is_gone(worker)]
            if not left:
                self._lose(unit)
            if all(time.monotonic() - unreached.get(worker, math.inf) > UNREACHED_SECONDS for worker in left):
                # This worker cannot reach the live holders, but other workers may: only its replica must leave.
                self._recovery.edges.suspect(left)
                raise PeerLost(
                    f"workers {left}, which hold parameters that this worker needs, are unreachable", unreachable=True
                )
            time.sleep(RETRY_SECONDS)  # retry until a holder answers or is reported dead

    def _ask(self, worker: int, ranges: Sequence[Range]) -> bytes | None:
        if worker not in self._fetchers:
            recovery = self._recovery
            address, secret = recovery.assignment.decision.peer_stores[worker], recovery.comm_config.secret
            self._fetchers[worker] = Fetcher(address, secret, lambda: self._wait_for(worker))
        return self._fetchers[worker].fetch(self._update, ranges)

    def _wait_for(self, worker: int) -> None:
        self._recovery.orphan.stay()
        if self._is_gone(worker):
            raise PeerLost(f"worker {worker} is lost")

    def _is_gone(self, worker: int) -> bool:
        recovery = self._recovery
        return worker not in recovery.session.opened_members or worker not in recovery.assignment.decision.peer_stores


def _on_host(part: torch.Tensor) -> torch.Tensor:
    """Return ``part`` on the host; a copy from a GPU is complete when the current stream is synchronized."""
    if part.device.type == "cpu":
        return part
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)


def _requests(parts: Sequence[Part], bytes_each: Callable[[int], int]) -> Iterator[list[Part]]:
    """Yield groups of ``parts``, cut where necessary, so that no answer exceeds ``MOST_BYTES``."""
    request: list[Part] = []
    room = MOST_BYTES
    for number, span in parts:
        start, each = span.start, bytes_each(number)
        while start < span.stop:
            if room < each or len(request) == MOST_PARTS:
                yield request
                request, room = [], MOST_BYTES
            stop = min(span.stop, start + room // each)
            request.append((number, Span(start, stop)))
            room -= (stop - start) * each
            start = stop
    if request:
        yield request
