"""A run by its log folder instead of by addresses: what the candidates' own logs there tell.

``events-<n>.jsonl`` begins, for each launch into the folder, with the address at which candidate n listens, and the
one that led ends with how the run ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recover_megatron.membership.errors import EXIT_LOST_MAJORITY
from recover_megatron.status.model import Status, read


def candidates(folder: Path) -> str:
    """``HOST:PORT,HOST:PORT...`` of the last launch into ``folder``; ValueError if there was none."""
    listening = [launch[0]["address"] for launch in _launches(folder) if "address" in launch[0]]
    if not listening:
        raise ValueError(f"{folder} has no events-<n>.jsonl of a coordinator: was it the --log-dir of a launch here?")
    return ",".join(listening)


def ending(folder: Path) -> Status | None:
    """How the last launch into ``folder`` ended; None if no candidate has told (it may go on, or was killed)."""
    stops = [record for launch in _launches(folder) for record in launch if record["event"] == "stop"]
    if not stops:
        return None
    # Of two sides of a partition, the one that stopped for it is not the run.
    stop = max(stops, key=lambda record: (record.get("code") != EXIT_LOST_MAJORITY, record.get("time", 0.0)))
    return read({"type": "stop", "code": stop.get("code"), "reason": stop.get("reason")}, str(folder))


def _launches(folder: Path) -> list[list[Mapping[str, Any]]]:
    """Of each candidate, in order: its records of its last launch."""
    paths = [path for path in folder.glob("events-*.jsonl") if path.stem.removeprefix("events-").isdecimal()]
    launches = []
    for path in sorted(paths, key=lambda path: int(path.stem.removeprefix("events-"))):
        launch: list[Mapping[str, Any]] = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the line that is being written
            if isinstance(record, dict) and "event" in record:
                if record["event"] == "listening":
                    launch = []
                launch.append(record)
        launches += [launch] if launch else []
    return launches
