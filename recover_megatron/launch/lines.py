"""Which lines of the workers the console shows."""

from __future__ import annotations


class Voice:
    """Which lines of a process the console shows: all, or, of a newcomer that builds its model once more, its own.

    Megatron tells of its flags and its model in hundreds of lines, as all workers did at the start. They are in the
    newcomer's log; on the console it is heard from when it has a place.
    """

    OURS = b"recover: "
    PLACED = b" takes position "
    """In the line with which a newcomer begins to train."""

    def __init__(self, *, newcomer: bool) -> None:
        self._quiet = newcomer

    def is_for_people(self, line: bytes) -> bool:
        """Of the next line, whichever stream it came by."""
        ours = line.startswith(self.OURS)
        if ours and self.PLACED in line:
            self._quiet = False
        return ours or not self._quiet
