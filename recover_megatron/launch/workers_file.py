"""workers.json: what became of each worker, for people and tools, current at every change.

A JSON list of objects (the fields of ``states.Worker``), sorted by worker id.  Launchers of several nodes that share
the folder merge their entries: each replaces its own and keeps the others' of the same run.  The lock file
``workers.json.lock`` orders them and names the run; entries of another, earlier run are dropped.  The file is replaced
by renaming, so no reader ever sees a partial one, and no killed launcher leaves one.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from recover_megatron.launch.states import WorkerProcess
from recover_megatron.log_writer import Aside

NAME = "workers.json"

Entries = dict[int, dict[str, object]]
"""By worker id."""


class WorkersFile:
    """The file as this launcher keeps it.  The disk neither stops nor ends the launcher (``log_writer``)."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """``say``, called in any thread, tells of trouble with the disk."""
        self._folder = folder
        self._latest: tuple[str, Entries] = ("", {})
        self.writing = Aside(str(folder / NAME), say)

    def put(self, run_id: str, workers: Sequence[WorkerProcess]) -> None:
        """Merge ``workers``, all those of this launcher, into the file.  It has them then, if the disk is well."""
        self._latest = (run_id, {worker.worker_id: dataclasses.asdict(worker) for worker in workers})
        if self.writing.left < 2:  # one that is written now, and one that will write the latest
            self.writing.submit(self._write, 1)
        self.writing.settle()

    def _write(self) -> None:
        run_id, entries = self._latest
        _merge(self._folder, run_id, entries)


def _merge(folder: Path, run_id: str, own: Entries) -> None:
    with open(folder / (NAME + ".lock"), "a+", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        same_run = lock.read() == run_id
        entries = _read_entries(folder / NAME) if same_run else {}
        entries |= own
        _replace(folder / NAME, [entries[worker_id] for worker_id in sorted(entries)])
        if same_run:
            return
        # After the file itself: whoever finds the old name here drops the entries and writes its own again.
        lock.seek(0)
        lock.truncate()
        lock.write(run_id)


def _read_entries(path: Path) -> Entries:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {int(entry["worker_id"]): entry for entry in entries}
    except (OSError, ValueError, TypeError, KeyError):
        return {}  # missing or not ours: this launcher's own entries are complete without it


def _replace(path: Path, entries: list[dict[str, object]]) -> None:
    temporary = path.with_name(path.name + ".tmp")  # one writer at a time: the lock is held
    lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
    temporary.write_text(f"[\n{lines}\n]\n" if entries else "[]\n", encoding="utf-8")
    os.replace(temporary, path)
