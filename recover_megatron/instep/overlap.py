"""Parameters that arrive while the next forward pass runs (--overlap-param-gather), whoever dies meanwhile.

    updated --all have agreed--> GATHERING --over the ring, all parts have come--> COMPLETE
                                     |                                                ^
                                     '-- the epoch ends --> FETCHING -----------------'
                                                            each part that is missing, from whoever holds it

A forward pass cannot meet the others to gather again: they may be anywhere in theirs, which is not interrupted.  It
need not.  Once all have agreed that the update is made, every holder of a unit (its owner and its shadows, see
`shards`) has the unit's new parameters in its own model.  There they stay until its next update, and nobody makes that
before all that live have agreed on the next step, so have run their forward pass, so have all parameters.  Until then a
part can be had from any of its holders, whatever they do and whichever epoch they are in: a thread of theirs answers
(`collectives.fetch`), for the update that it is asked about and for no other.

A unit has the same bits at all of its holders, so it does not matter who answers.  (Where another kind of processor
updates the shadows it has not; then parameters are gathered at the end of the step: `parameters`.)  A part that no
holder can give any more belongs to a state that is lost, too: the run ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from recover_megatron.collectives.board import MOST_BYTES
from recover_megatron.collectives.bucket import Bucket
from recover_megatron.collectives.errors import EpochRevoked, PeerLost
from recover_megatron.collectives.fetch import Fetcher
from recover_megatron.collectives.ledger import Span
from recover_megatron.collectives.progress import Handle
from recover_megatron.collectives.schedule import within
from recover_megatron.instep.gradients import Column, alive
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.shards import Shards

RETRY_SECONDS = 0.02
"""Before a holder that cannot be reached is asked again, until the run knows that it is lost."""


class Overlap:
    """See the module's text.  ``parts``: (column, flat tensor) of each bucket of parameters, the last needed first.

    ``lose`` is called with a unit whose parameters nobody has any more, and raises.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Column, torch.Tensor]],
        shards: Shards,
        recovery: Callable[[], Recovery],
        lose: Callable[[int], None],
    ) -> None:
        self._parts = [(column, Bucket(tensor)) for column, tensor in parts]
        self._shards = shards
        self._recovery = recovery
        self._lose = lose
        self._missing: dict[int, Handle | None] = {}
        """Bucket -> its gathering over the ring, or None: it is to be fetched.  What is complete is not in here."""
        self._update = 0
        """The number of the decision that the update was."""
        self._published: int | None = None
        self._fetchers: dict[int, Fetcher] = {}
        self._came, self._seconds = 0, 0.0
        """Bytes that were fetched since this update, and how long that took."""

    @property
    def pending(self) -> bool:
        """Whether parameters of the model may be missing."""
        return bool(self._missing)

    # ---- for the others

    def publish(self, update: int) -> None:
        """What this worker holds has been updated: from now on it is given to others.  Before it reports that."""
        self._published = update
        self._recovery().fabric.board.source = self.give

    def withdraw(self) -> None:
        """What this worker holds is going to change."""
        self._published = None

    def give(self, what: Sequence[int]) -> bytes | None:
        """In the board's thread: elements of a bucket after an update, ``what``: update, bucket, start, stop."""
        if len(what) != 4:
            return None
        update, number, start, stop = what
        if update != self._published or not 0 <= number < len(self._parts):
            return None
        flat = self._parts[number][1].flat
        if not 0 <= start < stop <= flat.numel() or (stop - start) * flat.element_size() > MOST_BYTES:
            return None
        return flat[start:stop].cpu().view(torch.uint8).numpy().tobytes()

    # ---- for this worker

    def start(self, update: int) -> None:
        """All have agreed on the update: gather over the ring, in the background, what is needed first first.

        If that was learnt from the plan of a later epoch others may be in the next step already: then the ring is not
        theirs any more, and everything is fetched.
        """
        recovery = self._recovery()
        self._update = update
        self._missing = dict.fromkeys(reversed(range(len(self._parts))))
        for _, bucket in self._parts:
            bucket.ledger.clear()
        if recovery.committed(update):
            return
        generation, live = recovery.generation, recovery.live
        try:
            for number in self._missing:
                column, bucket = self._parts[number]
                spans, _ = self._shards.cut(column, bucket.ledger.numel)
                ring = generation.ring(alive(column, live))
                self._missing[number] = ring.all_gather(bucket, spans, missing=True)
        except EpochRevoked:
            return  # the rest is fetched

    def complete(self, number: int) -> None:
        """Return when bucket ``number`` of the model has all of its parameters.

        Raises ``Orphaned`` when this worker's replica is broken, ``StateLost`` if nobody has them any more, ``Fenced``
        and ``CoordinatorLost`` when this worker is out.
        """
        if number not in self._missing:
            return
        handle = self._missing[number]
        try:
            if handle is None:
                self._fetch(number)
            elif handle.done():
                handle.wait()
            else:
                with self._recovery().waiting("param-gather"):
                    handle.wait()
        except EpochRevoked:
            self._fetch(number)
        del self._missing[number]
        if not self._missing:
            self._tell()
            self._hang_up()

    def complete_all(self) -> None:
        """As ``complete``, for all buckets: the model is that of the last update."""
        for number in list(self._missing):
            self.complete(number)

    def forget(self) -> None:
        """This worker has lost its place: what is missing stays so, and what it has is given to nobody."""
        self.withdraw()
        self._missing.clear()
        self._hang_up()

    # ---- inside

    def _fetch(self, number: int) -> None:
        recovery = self._recovery()
        column, bucket = self._parts[number]
        layout, held = self._shards.layout(column), self._shards.held(column)
        began = time.monotonic()
        with recovery.waiting("param-gather"):
            for unit in layout.units:
                (missing,) = within(bucket.ledger.local, [_spans(layout.parts(unit, bucket.ledger.numel))])
                for span in missing:
                    if unit not in held:
                        for piece in _pieces(span, MOST_BYTES // bucket.flat.element_size()):
                            self._fill(bucket, piece, self._bring(number, piece, unit, layout.holders(unit)))
                    bucket.ledger.mark(span, recovery.decision.epoch)
        self._seconds += time.monotonic() - began

    @staticmethod
    def _fill(bucket: Bucket, span: Span, data: bytes) -> None:
        values = torch.frombuffer(bytearray(data), dtype=bucket.flat.dtype)
        bucket.flat[span.start : span.stop].copy_(values)

    def _bring(self, number: int, span: Span, unit: int, holders: Sequence[int]) -> bytes:
        """Ask the holders in turn until one answers, or none ever will."""
        refused: set[int] = set()
        while True:
            for worker in holders:
                if worker in refused or self._is_gone(worker):
                    continue
                try:
                    data = self._ask(worker, (self._update, number, span.start, span.stop))
                except PeerLost:
                    if fetcher := self._fetchers.pop(worker, None):
                        fetcher.close()
                    continue
                if data is not None:
                    self._came += len(data)
                    return data
                refused.add(worker)
            self._recovery().stay()
            if all(worker in refused or self._is_gone(worker) for worker in holders):
                self._lose(unit)
            time.sleep(RETRY_SECONDS)  # it is dead, and the run does not know yet

    def _ask(self, worker: int, what: Sequence[int]) -> bytes | None:
        if worker not in self._fetchers:
            recovery = self._recovery()
            address, secret = recovery.decision.boards[worker], recovery.fabric.secret
            self._fetchers[worker] = Fetcher(address, secret, lambda: self._wait_for(worker))
        return self._fetchers[worker].fetch(what)

    def _wait_for(self, worker: int) -> None:
        self._recovery().stay()
        if self._is_gone(worker):
            raise PeerLost(f"worker {worker} is gone")

    def _is_gone(self, worker: int) -> bool:
        recovery = self._recovery()
        return worker not in recovery.session.opened_members or worker not in recovery.decision.boards

    def _tell(self) -> None:
        if self._came:
            came, seconds, whom = self._came, round(self._seconds, 6), sorted(self._fetchers)
            self._recovery().hooks.log("parameters fetched", bytes=came, seconds=seconds)
            print(
                f"recover: {came} bytes of parameters were fetched from workers {whom} in {seconds:.3f} s: "
                "an epoch had ended before they had come",
                file=sys.stderr,
                flush=True,
            )
        self._came, self._seconds = 0, 0.0

    def _hang_up(self) -> None:
        for fetcher in self._fetchers.values():
            fetcher.close()
        self._fetchers.clear()


def _spans(parts: Sequence[tuple[int, int]]) -> list[Span]:
    return [Span(*part) for part in parts]


def _pieces(span: Span, most: int) -> Iterator[Span]:
    for start in range(span.start, span.stop, most):
        yield Span(start, min(start + most, span.stop))
