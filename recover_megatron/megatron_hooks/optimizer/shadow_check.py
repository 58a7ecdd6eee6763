"""The shadows of the optimizer's state are compared with what they are shadows of, by the digests of all holders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recover_megatron.instep.gradients import Column, alive
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.shards import Shards
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.optimizer.layout_pieces import LayoutPieces
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragments

log = get_logger(__name__)


@dataclass(eq=False)
class ShadowCheck:
    """Of one worker."""

    _fragments: Sequence[ShardFragments]
    _pieces: LayoutPieces
    _shards: Shards
    _tail: Column
    """Its members tell each other what they hold."""
    _recovery: Recovery

    def run(self) -> None:
        """Compare, in a section; where one differs, all are made anew with the next repartition, by all workers."""
        recovery, mine = self._recovery, self._recovery.assignment
        held = self._digests()

        def run() -> tuple[list[int], bool]:
            recovery.progress.mark("verify", waiting=True)
            ring = mine.epoch_groups.ring(alive(self._tail, mine.live))
            found = differing(ring.exchange(held))
            return found, mine.epoch_groups.any(bool(found), tuple(sorted(mine.live)))

        different, anywhere = recovery.sections.run("verify shadows", run)
        if different:
            recovery.hooks.log("shadows differ", units=different)
            log.info(f"the shadows of workers {different} differ from what they are copies of: all are made anew")
        if anywhere:
            self._shards.distrust_shadows()

    def _digests(self) -> list[int]:
        """What this worker holds: a row for ``differing``."""
        row = []
        for optimizer, fragments in enumerate(self._fragments):
            column = self._pieces.column(fragments)
            for unit in self._shards.held(column):
                row += [optimizer, min(column), unit, fragments.digest(unit).value]
        return row


def differing(rows: Sequence[Sequence[int]]) -> list[int]:
    """The units of which two holders tell different digests.

    A row is what one worker holds, four numbers each: the optimizer, its column's first slot, the unit, the digest.  (A
    worker need not be in the column of another one's experts.)
    """
    told: dict[tuple[int, int, int], set[int]] = {}
    for row in rows:
        for optimizer, column, unit, digest in zip(*(row[at::4] for at in range(4)), strict=True):
            told.setdefault((optimizer, column, unit), set()).add(digest)
    return sorted({unit for (_, _, unit), digests in told.items() if len(digests) > 1})
