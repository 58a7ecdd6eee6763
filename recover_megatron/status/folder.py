"""What a log folder tells of the last launch into it: who is to be asked, how it ended, how its training gets on.

``events-<n>.jsonl`` begins, for each launch into the folder, with the address at which candidate n listens, and the
one that led ends with how the run ended. Files of candidates that joined an earlier run there are left out.
``launch.lock`` says how the launcher has ended: before the training begins no candidate leads, so none tells.

``History`` reads on from where it read last; a line that is being written is read when it is whole.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recover_megatron.membership.records import EXIT_LOST_MAJORITY, FIRST_JOINED
from recover_megatron.membership.wire import SECRET_FILE
from recover_megatron.run_log.events import COORDINATOR_FILES, EVENTS_FILE, Lines, line_object
from recover_megatron.run_log.steps import STEPS_FILE, read_last
from recover_megatron.status.headline import span
from recover_megatron.status.model import Gone, RunStatus, Training, printable

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
    said: dict[int, str] = {}  # by worker: the exception that it ended by
    for record in launch:
        if record["event"] == "exception" and "worker" in record:
            said[record["worker"]] = f"{printable(str(record.get('error', '')))}; "
        if record["event"] == "fault" and "worker" in record:
            kind, host, why = (printable(str(record.get(name, ""))) for name in ("kind", "host", "reason"))
            why = said.get(record["worker"], "") + why
            fate = "stopped" if record.get("time", 0.0) >= since + STOPPING_SECONDS * (kind != "dead") else kind
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
            return read_last(file.fileno())
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
        for line in path.read_bytes().split(b"\n"):
            record = line_object(line)  # none: spoiled, or being written
            if record is not None and "event" in record:
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


REPEATED = ("lead", "plan")
"""Events that a coordinator writes again into a file that was emptied or made anew."""
RECENT = 20
"""Iterations over which the pace is taken."""
Record = Mapping[str, Any]


@dataclass(frozen=True)
class RecentStep:
    """A committed iteration, without its microbatches."""

    iteration: int
    loss: float | None
    consumed_samples: int
    replicas: int
    seconds: float


class History:
    """The training of the last launch into a folder: its pace, losses, checkpoints, recoveries, goodput."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps, self._events = Lines(folder / STEPS_FILE), Lines(folder / EVENTS_FILE)
        self._coordinators: dict[Path, Lines] = {}
        self._last_of: dict[tuple[Path, str], Record] = {}
        """The last event of each kind in a coordinator's file."""
        self.start: Record | None = None
        """The event of the training's beginning."""
        self._forget_steps()
        self._forget_events()
        self.news: list[Record] = []
        """Events since ``read`` was called last, of workers and coordinators, each with the name of its ``file``."""
        self.last_time = 0.0
        """Of the newest event, in unix seconds: when a run that has ended did."""
        self._steps_written = 0.0  # when steps.jsonl was, in unix seconds
        self._step_time: float | None = None  # of the last step, by its writer's clock
        self._told = 0.0  # time of the training's newest event, by its writer's clock

    def _forget_steps(self) -> None:
        self.recent: deque[RecentStep] = deque(maxlen=RECENT + 1)
        self._first: int | None = None  # iteration of which the file tells
        self._worked: dict[int, float] = {}  # replicas -> seconds of this launch's steps with so many

    def _forget_events(self) -> None:
        self.recovered: list[tuple[float, Sequence[int]]] = []
        """Losses of replicas that were survived: when each was read (monotonic), and which workers were lost."""
        self.rerun = 0
        self.phases: list[tuple[str, float]] = []
        """(phase, seconds) of every recovery."""
        self._recovering = 0.0
        self._saved: Record | None = None

    def begin(self) -> None:
        """A launch begins: what is in the folder by now is of earlier ones."""
        self.read()
        self.news, self.start = [], None
        self._forget_steps()
        self._forget_events()

    def read(self) -> None:
        """Take in what has been written since the last call."""
        self.news = []
        for event in self._events.new()[1]:
            self._take_event(event)
        with suppress(OSError):
            self._steps_written = (self._folder / STEPS_FILE).stat().st_mtime
        for step in self._steps.new(upto=b', "microbatches"')[1]:
            self._take_step(step)
        for path in self._folder.glob(COORDINATOR_FILES):
            for event in self._coordinators.setdefault(path, Lines(path)).new()[1]:
                what = str(event.get("event"))
                if what not in REPEATED or self._last_of.get((path, what)) != event:
                    self._note(event, path)
                self._last_of[path, what] = event

    def _take_event(self, event: Record) -> None:
        if event == self.start:
            return  # told again, in a file that was emptied or made anew
        self._told = max(self._told, _number(event.get("time")) or 0.0)
        self._note(event, self._folder / EVENTS_FILE)
        match event.get("event"):
            case "start":
                self.start = event
                self._forget_events()
                self._worked = {}
            case "plan":
                if event.get("lost_replicas"):
                    self.recovered.append((time.monotonic(), event.get("lost_workers", ())))
            case "recovery":
                self.rerun += sum(map(len, event.get("reran", {}).values()))
                for phase, seconds in event.get("seconds", {}).items():
                    self.phases.append((phase, seconds))
                    self._recovering += seconds
            case "checkpoint":
                self._saved = event

    def _take_step(self, step: Record) -> None:
        try:
            known = {name: step[name] for name in RecentStep.__dataclass_fields__}
        except KeyError:
            return
        if self.recent and known["iteration"] <= self.recent[-1].iteration:
            self._forget_steps()  # the run has gone back, or was launched again
        if self._first is None:
            self._first = known["iteration"] - step.get("skipped", 0)
        self._step_time = _number(step.get("time"))
        self.recent.append(RecentStep(**known))
        if self.start is None or known["iteration"] >= self.start.get("iteration", 0):
            replicas = known["replicas"]
            self._worked[replicas] = self._worked.get(replicas, 0.0) + known["seconds"]

    def _note(self, event: Record, path: Path) -> None:
        self.news.append({"file": path.name, **event})
        self.last_time = max(self.last_time, _number(event.get("time")) or 0.0)

    def now(self, age: float | None) -> float:
        """The time by the clock of those who train, ``age`` seconds after they told of something, in unix seconds.

        The clock here, which may differ by hours, where steps tell no time (those of older versions).
        """
        return time.time() if self._step_time is None else max(self._step_time, self._told) + (age or 0.0)

    def training(self, now: float, end: float | None = None) -> Training | None:
        """How the training gets on until ``end``, ages as of ``now`` (unix seconds); None: no iteration is known."""
        if not self.recent:
            return None
        start, last = self.start or {}, self.recent[-1]
        if last.iteration >= start.get("iteration", 0) and (
            self._steps_written if self._step_time is None else self._step_time
        ) < start.get("time", 0.0):
            return None  # an earlier launch has made it; this one makes its first, and begins the file anew then
        pace = [step.seconds for step in list(self.recent)[1:]]
        samples = last.consumed_samples - self.recent[0].consumed_samples
        rate = samples / sum(pace) if pace and sum(pace) > 0 else None
        mean = sum(pace) / len(pace) if pace else None
        iters, world, flops = (_number(start.get(name)) for name in ("train_iters", "world", "flops_per_sample"))
        saved = self._saved or {}
        return Training(
            iteration=last.iteration,
            train_iters=int(iters) if iters else None,
            loss=last.loss,
            seconds_per_iteration=mean,
            samples_per_second=rate,
            tflops_per_gpu=rate * flops / world / 1e12 if rate and flops and world else None,
            eta_seconds=max(0.0, iters - last.iteration) * mean if iters and mean else None,
            goodput=self.goodput(now if end is None else end),
            checkpoint=saved.get("saved"),
            checkpoint_folder=saved.get("folder"),
            checkpoint_age=max(0.0, now - saved["time"]) if "time" in saved else None,
            recoveries=len(self.recovered),
            microbatches_rerun=self.rerun,
        )

    def goodput(self, now: float) -> float | None:
        """See ``Training``; a recovery's seconds are not counted as work.  None where steps are missing."""
        if self.start is None or now <= self.start["time"] or not self.start.get("replicas"):
            return None
        if self._first is None or self._first > self.start.get("iteration", self._first):
            return None
        of = len(self.start["replicas"])
        work = sum(min(1.0, replicas / of) * seconds for replicas, seconds in self._worked.items()) - self._recovering
        return min(1.0, max(0.0, work / (now - self.start["time"])))


def worker_processes(folder: Path) -> dict[int, dict[str, Any]]:
    """Of workers.json, by worker id; empty where there is none."""
    try:
        entries = json.loads((folder / "workers.json").read_bytes())
        return {int(entry["worker_id"]): entry for entry in entries}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
