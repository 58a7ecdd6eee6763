"""A run by its log folder instead of by addresses: what the candidates' own logs there tell.

``events-<n>.jsonl`` begins, for each launch into the folder, with the address at which candidate n listens, and the
one that led ends with how the run ended. Files of candidates that joined an earlier run there are left out.
``secret`` has the secret of a launch that made one up. ``launch.lock`` says how the launcher has ended: before the
training begins no candidate leads, so none tells.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recover_megatron.membership.records import EXIT_LOST_MAJORITY, FIRST_JOINED
from recover_megatron.membership.wire import SECRET_FILE
from recover_megatron.run_log import tail
from recover_megatron.run_log.events import COORDINATOR_FILES
from recover_megatron.run_log.steps import STEPS_FILE
from recover_megatron.status.headline import span
from recover_megatron.status.model import Gone, RunStatus
from recover_megatron.status.view_reader import printable

CLAIM_FILE = "launch.lock"
STOPPING_SECONDS = 1.0
"""A worker that ended so shortly before its launcher told that it stops was ended by it."""
SIGNALLED = 128
"""Above it are the exit codes of a run whose launchers were stopped by a signal."""


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
    """How the last launch into ``folder`` ended; None if nobody has told (it may go on, or was killed)."""
    launches = _launches(folder)
    stops = [(record, launch) for launch in launches for record in launch if record["event"] == "stop"]
    if not stops:
        return _launcher_ended(folder)
    # Of two sides of a partition, the one that stopped for it is not the run.
    stop, launch = max(stops, key=lambda told: (told[0].get("code") != EXIT_LOST_MAJORITY, told[0].get("time", 0.0)))
    return _ended(folder, stop, **_told(launch, stop))


def has_begun(folder: Path) -> bool:
    """Whether the last launch into ``folder`` has made a plan, or an iteration, if its disk was full.

    Before its first iteration steps.jsonl and events.jsonl are those of an earlier launch.
    """
    launches = _launches(folder)
    if any(record["event"] == "plan" for launch in launches for record in launch):
        return True
    begun = max((launch[0].get("time", 0.0) for launch in launches), default=0.0)
    try:
        return (folder / STEPS_FILE).stat().st_mtime > begun
    except OSError:
        return False


def last_written(folder: Path) -> str:
    """How long ago the run's own logs were written, and which iteration was the last; in words."""
    times = [path.stat().st_mtime for path in (*folder.glob(COORDINATOR_FILES), folder / STEPS_FILE) if path.exists()]
    iteration = _last_iteration(folder)
    last = f", with iteration {iteration} as the last" if iteration else ""
    return f"its logs were last written {span(_age(max(times, default=0.0)))} ago{last}"


def may_go_on(folder: Path) -> bool:
    """Whether the run may go on though a candidate has told its end: a side of a partition has stopped for the others,
    and there is another candidate, which has told no end."""
    ends = [next((r["code"] for r in launch if r["event"] == "stop"), None) for launch in _launches(folder)]
    return set(ends) == {None, EXIT_LOST_MAJORITY}


def _launcher_ended(folder: Path) -> RunStatus | None:
    """What the launcher of a run on one node has said at its end; of several nodes others may go on without it."""
    try:
        claim = json.loads((folder / CLAIM_FILE).read_bytes())
        if not claim["ended"] or claim["nnodes"] != 1 or not isinstance(claim["code"], int):
            return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return _ended(folder, claim, ended_age=_age((folder / CLAIM_FILE).stat().st_mtime))


def _ended(folder: Path, how: Mapping[str, Any], **fields: Any) -> RunStatus:
    reason = printable(how.get("reason") or "")
    return RunStatus(
        str(folder), "stopped", code=how.get("code"), reason=reason, iteration=_last_iteration(folder), **fields
    )


def _told(launch: Sequence[Mapping[str, Any]], stop: Mapping[str, Any]) -> dict[str, Any]:
    """What a launch's records say of its end: fields of ``Status``."""
    last: dict[str, Mapping[str, Any]] = {record["event"]: record for record in launch}
    workers = {record["worker"] for record in launch if record["event"] == "attached" and "worker" in record}
    gone = {}
    stopping = [record.get("time", 0.0) for record in launch if record["event"] == "stopping"]
    # A worker's end and the launcher's word come by two connections, so either may be first.
    since = min(stopping, default=math.inf) - STOPPING_SECONDS if stop.get("code", 0) > SIGNALLED else math.inf
    for record in launch:
        if record["event"] == "fault" and "worker" in record:
            kind, host, why = (str(record.get(name, "")) for name in ("kind", "host", "reason"))
            fate = "stopped" if kind == "dead" and record.get("time", 0.0) >= since else kind
            gone[record["worker"]] = Gone(record["worker"], fate, host, why, _age(record.get("time", 0.0)))
    return {
        "epoch": last.get("plan", {}).get("epoch", 0),
        "term": last.get("lead", {}).get("term", 0),
        "committed": last.get("commit", {}).get("iteration", 0),
        "world": len(workers),
        "gone": [end for _, end in sorted(gone.items())],
        "ended_age": _age(stop.get("time", 0.0)),
    }


def _age(unix_seconds: float) -> float:
    return max(0.0, time.time() - unix_seconds)


def _last_iteration(folder: Path) -> int:
    """The newest that was committed; 0: none is known, or the last launch has made none."""
    if not has_begun(folder):
        return 0
    try:
        with (folder / STEPS_FILE).open("rb") as file:
            return tail.read_last(file.fileno())
    except OSError:
        return 0


def _launches(folder: Path) -> list[list[Mapping[str, Any]]]:
    """Of each candidate, in order: its records of its last launch."""
    numbers = [path.stem.removeprefix("events-") for path in folder.glob(COORDINATOR_FILES)]
    launches: list[list[Mapping[str, Any]]] = []
    begun = math.inf  # when the last launch began
    for number in sorted(int(number) for number in numbers if number.isdecimal()):
        path = folder / f"events-{number}.jsonl"
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
        if not launch:
            continue
        if number < FIRST_JOINED:
            begun = min(begun, launch[0].get("time", 0.0))
        elif begun < math.inf and launch[-1].get("time", 0.0) < begun:
            continue  # of an earlier run
        launches.append(launch)
    return launches
