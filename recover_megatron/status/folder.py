"""A run by its log folder instead of by addresses: what the candidates' own logs there tell.

``events-<n>.jsonl`` begins, for each launch into the folder, with the address at which candidate n listens, and the
one that led ends with how the run ended.  ``secret`` has the secret of a launch that made one up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recover_megatron.membership.auth import SECRET_FILE
from recover_megatron.membership.errors import EXIT_LOST_MAJORITY
from recover_megatron.run_log import tail
from recover_megatron.run_log.events import COORDINATOR_FILES
from recover_megatron.run_log.steps import STEPS_FILE
from recover_megatron.status.model import Gone, RunStatus, read


def candidates(folder: Path) -> str:
    """``HOST:PORT,HOST:PORT...`` of the last launch into ``folder``; ValueError if there was none."""
    listening = [launch[0]["address"] for launch in _launches(folder) if "address" in launch[0]]
    if not listening:
        raise ValueError(f"{folder} has no events-<n>.jsonl of a coordinator: was it the --log-dir of a launch here?")
    return ",".join(listening)


def secret_file(folder: Path) -> Path | None:
    """The secret that the launch made up, if it did: a launch removes what an earlier one has left."""
    path = folder / SECRET_FILE
    return path if path.exists() else None


def ending(folder: Path) -> RunStatus | None:
    """How the last launch into ``folder`` ended; None if no candidate has told (it may go on, or was killed)."""
    launches = _launches(folder)
    stops = [(record, launch) for launch in launches for record in launch if record["event"] == "stop"]
    if not stops:
        return None
    # Of two sides of a partition, the one that stopped for it is not the run.
    stop, launch = max(stops, key=lambda told: (told[0].get("code") != EXIT_LOST_MAJORITY, told[0].get("time", 0.0)))
    answer = {"type": "stop", "code": stop.get("code"), "reason": stop.get("reason")}
    return replace(read(answer, str(folder)), iteration=_last_iteration(folder / STEPS_FILE), **_told(launch, stop))


def _told(launch: Sequence[Mapping[str, Any]], stop: Mapping[str, Any]) -> dict[str, Any]:
    """What a launch's records say of its end: fields of ``Status``."""
    last: dict[str, Mapping[str, Any]] = {record["event"]: record for record in launch}
    workers = {record["worker"] for record in launch if record["event"] == "attached" and "worker" in record}
    gone = {}
    for record in launch:
        if record["event"] == "fault" and "worker" in record:
            ago = max(0.0, stop.get("time", 0.0) - record.get("time", 0.0))
            kind, host, why = (str(record.get(name, "")) for name in ("kind", "host", "reason"))
            gone[record["worker"]] = Gone(record["worker"], kind, host, why, ago)
    return {
        "epoch": last.get("plan", {}).get("epoch", 0),
        "term": last.get("lead", {}).get("term", 0),
        "committed": last.get("commit", {}).get("iteration", 0),
        "world": len(workers),
        "gone": [end for _, end in sorted(gone.items())],
    }


def _last_iteration(steps: Path) -> int:
    """The newest that was committed; 0: none is known."""
    try:
        with steps.open("rb") as file:
            return tail.read_last(file.fileno())
    except OSError:
        return 0


def _launches(folder: Path) -> list[list[Mapping[str, Any]]]:
    """Of each candidate, in order: its records of its last launch."""
    paths = [path for path in folder.glob(COORDINATOR_FILES) if path.stem.removeprefix("events-").isdecimal()]
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
