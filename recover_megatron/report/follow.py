"""Reading steps.jsonl while the run writes it."""

from __future__ import annotations

import os
from pathlib import Path

from recover_megatron.run_log.steps import StepRecord


class Follower:
    """The steps that a run adds to a file from now on; what is in it already is left out.

    A run that resumes may replace the file by one that holds the iterations before its first again: those are left out
    too.
    """

    def __init__(self, path: Path, after_iteration: int = 0) -> None:
        """``after_iteration``: the one that the run resumes from; 0 for a fresh run."""
        self._path = path
        self._after = after_iteration
        self._inode, self._offset = 0, 0
        if path.exists():
            stat = path.stat()
            self._inode, self._offset = stat.st_ino, stat.st_size

    def new_steps(self) -> list[StepRecord]:
        """The complete lines added since the last call; none while there is no file.

        Raises ValueError for a line that is no step.
        """
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset = stat.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        steps = [StepRecord.from_json(line) for line in complete.decode().splitlines()]
        return [step for step in steps if step.iteration > self._after]
