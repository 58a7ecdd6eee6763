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
from collections.abc import Sequence
from pathlib import Path

from recover_megatron.launch.states import Worker

NAME = "workers.json"


def write_workers(folder: Path, run_id: str, workers: Sequence[Worker]) -> None:
    """Merge ``workers``, all those of this launcher, into ``folder``/workers.json.  Raises OSError."""
    own = {worker.worker_id: dataclasses.asdict(worker) for worker in workers}
    with open(folder / (NAME + ".lock"), "a+", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        entries = _read_entries(folder / NAME) if lock.read() == run_id else {}
        entries |= own
        _replace(folder / NAME, [entries[worker_id] for worker_id in sorted(entries)])
        # After the file itself: whoever finds the old name here drops the entries and writes its own again.
        lock.seek(0)
        lock.truncate()
        lock.write(run_id)


def _read_entries(path: Path) -> dict[int, dict[str, object]]:
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
