"""Reader of a log folder: coordinator addresses, end and training progress of the last launch into the folder.

``events-<n>.jsonl``  events of candidate n: the first has its address; the last has the run's end if the candidate led.
                      A file is ignored if its candidate joined only an earlier run in this folder.
``launch.lock``       how the launcher ended; needed if the launch ends before a candidate leads

``History`` reads the complete lines that were appended since its last call.
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
"""A worker that died at most this many seconds before the event ``stopping`` counts as stopped by the launcher."""
SIGNALLED = 128
"""Exit codes above this number mean that a signal stopped the launcher."""


def candidates(folder: Path) -> str:
    """Return the candidates' addresses of the last launch into ``folder``: HOST:PORT,...

    Raises ValueError if the folder has no launch.
    """
    listening = [launch[0]["address"] for launch in _launches(folder) if "address" in launch[0]]
    if not listening:
        raise ValueError(f"{folder} has no events-<n>.jsonl of a coordinator: give the --log-dir of a launch")
    return ",".join(listening)


def secret_file(folder: Path) -> Path | None:
    """Return the file with the last launch's secret; None if it generated none: a launch removes an older such file."""
    path = folder / SECRET_FILE
    return path if path.exists() else None


def ending(folder: Path) -> RunStatus | None:
    """Return the end of the last launch into ``folder``; None if no end is recorded: it still runs, or was killed."""
    launches = _launches(folder)
    stops = [(record, launch) for launch in launches for record in launch if record["event"] == "stop"]
    if not stops:
        return _launcher_ended(folder)
    # If a partition stopped one side of the run, the run continued on the other side: prefer that side's end.
    stop, launch = max(
        stops, key=lambda stopped: (stopped[0].get("code") != EXIT_LOST_MAJORITY, stopped[0].get("time", 0.0))
    )
    return _ended(folder, stop, **_details(launch, stop))


def has_begun(folder: Path) -> bool:
    """Return whether the last launch into ``folder`` has recorded a plan or, if a full disk prevented that, a step.

    If not, steps.jsonl and events.jsonl may still be files of an earlier launch.
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
    """Return a text with the age of the run's newest log file and the last iteration."""
    times = [path.stat().st_mtime for path in (*folder.glob(COORDINATOR_FILES), folder / STEPS_FILE) if path.exists()]
    iteration = _last_iteration(folder)
    last = f", with iteration {iteration} as the last" if iteration else ""
    return f"its logs were last written {span(_age(max(times, default=0.0)))} ago{last}"


def may_go_on(folder: Path) -> bool:
    """Return whether the run may continue although a candidate has recorded an end.

    It may continue if all recorded ends are of one side of a partition (exit code 11), and a candidate has not
    recorded an end.
    """
    ends = [next((r["code"] for r in launch if r["event"] == "stop"), None) for launch in _launches(folder)]
    return set(ends) == {None, EXIT_LOST_MAJORITY}


def _launcher_ended(folder: Path) -> RunStatus | None:
    """Return the end that the launcher recorded in ``launch.lock``; None if it still runs, or there are several nodes.

    In a run of several nodes, the launchers of the other nodes may continue.
    """
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


def _details(launch: Sequence[Mapping[str, Any]], stop: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of ``RunStatus`` for an ended launch, from a candidate's records; ``stop``: record of the end."""
    last: dict[str, Mapping[str, Any]] = {record["event"]: record for record in launch}
    workers = {record["worker"] for record in launch if record["event"] == "attached" and "worker" in record}
    gone: dict[int, Gone] = {}
    stopping = [record.get("time", 0.0) for record in launch if record["event"] == "stopping"]
    # A worker's end and the launcher's ``stopping`` arrive on two connections, and may be recorded in either order.
    since = min(stopping, default=math.inf) - STOPPING_SECONDS if stop.get("code", 0) > SIGNALLED else math.inf
    errors: dict[int, str] = {}  # worker id -> exception that ended the worker
    for record in launch:
        if record["event"] == "exception" and "worker" in record:
            errors[record["worker"]] = f"{printable(str(record.get('error', '')))}; "
        if record["event"] == "fault" and "worker" in record:
            kind, host, why = (printable(str(record.get(name, ""))) for name in ("kind", "host", "reason"))
            why = errors.get(record["worker"], "") + why
            fate = "stopped" if record.get("time", 0.0) >= since + STOPPING_SECONDS * (kind != "dead") else kind
            evicted = gone.get(record["worker"])
            if evicted is None or evicted.fate != "out":  # an evicted worker's later death is not another loss
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
    """Return the newest committed iteration; 0 if the last launch has not begun, or no iteration is recorded."""
    if not has_begun(folder):
        return 0
    try:
        with (folder / STEPS_FILE).open("rb") as file:
            return read_last(file.fileno())
    except OSError:
        return 0


def _launches(folder: Path) -> list[list[Mapping[str, Any]]]:
    """Return a list for each candidate, by number: the events that it recorded in its last launch."""
    numbers = [path.stem.removeprefix("events-") for path in folder.glob(COORDINATOR_FILES)]
    launches: list[list[Mapping[str, Any]]] = []
    begun = math.inf  # start of the last launch, unix seconds
    for number in sorted(int(number) for number in numbers if number.isdecimal()):
        path = folder / f"events-{number}.jsonl"
        launch: list[Mapping[str, Any]] = []
        for line in path.read_bytes().split(b"\n"):
            record = line_object(line)  # None for a damaged or incomplete line
            if record is not None and "event" in record:
                if record["event"] == "listening":
                    launch = []
                launch.append(record)
        if not launch:
            continue
        if number < FIRST_JOINED:
            begun = min(begun, launch[0].get("time", 0.0))
        elif begun < math.inf and launch[-1].get("time", 0.0) < begun:
            continue  # this candidate joined an earlier run
        launches.append(launch)
    return launches


REPEATED = ("lead", "plan")
"""Events that a coordinator writes a second time if its file was truncated or replaced."""
RECENT = 20
"""Number of last iterations over which iteration time and throughput are averaged."""
Record = Mapping[str, Any]


@dataclass(frozen=True)
class RecentStep:
    """Values of a committed iteration, from its line in steps.jsonl."""

    iteration: int
    loss: float | None
    consumed_samples: int
    replicas: int
    seconds: float


class History:
    """Progress of the training of the last launch into a folder: speed, losses, checkpoints, recoveries, goodput."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps, self._events = Lines(folder / STEPS_FILE), Lines(folder / EVENTS_FILE)
        self._coordinators: dict[Path, Lines] = {}
        self._last_of: dict[tuple[Path, str], Record] = {}
        """(coordinator's file, event name) -> last event of this name."""
        self.start: Record | None = None
        """Last event ``start`` of the training; None if there is none yet."""
        self._forget_steps()
        self._forget_events()
        self.news: list[Record] = []
        """Events of workers and coordinators that the last ``read`` found; field ``file``: name of the event's file."""
        self.last_time = 0.0
        """Time of the newest event, in unix seconds; in an ended run, the time of the end."""
        self._steps_written = 0.0  # modification time of steps.jsonl, unix seconds
        self._step_time: float | None = None  # unix seconds of the last step, by the clock of the worker's host
        self._event_time = 0.0  # unix seconds of the newest event in events.jsonl, by the clock of the worker's host

    def _forget_steps(self) -> None:
        self.recent: deque[RecentStep] = deque(maxlen=RECENT + 1)
        self._first: int | None = None  # first iteration in steps.jsonl
        self._worked: dict[int, float] = {}  # number of replicas -> seconds of this launch's steps with that number

    def _forget_events(self) -> None:
        self.recovered: list[tuple[float, Sequence[int]]] = []
        """Losses of replicas that the run survived: (monotonic time when the event was read, ids of lost workers)."""
        self.rerun = 0
        self.phases: list[tuple[str, float]] = []
        """(phase, seconds) for each phase of every recovery."""
        self._recovering = 0.0
        self._saved: Record | None = None

    def begin(self) -> None:
        """Skip the present contents of the folder, which are of earlier launches.  Call it when a launch begins."""
        self.read()
        self.news, self.start = [], None
        self._forget_steps()
        self._forget_events()

    def read(self) -> None:
        """Read everything written since the last call."""
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
            return  # a worker writes this event a second time if the file was truncated or replaced
        self._event_time = max(self._event_time, _number(event.get("time")) or 0.0)
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
            self._forget_steps()  # the run has rolled back, or was launched again
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
        """Return the present time by the workers' clock, in unix seconds.

        This is the time of the newest step or event, plus ``age`` seconds.  If the last step has no time (an older
        version has written it), or there is none, return the time by this host's clock, which may differ by hours.
        """
        return time.time() if self._step_time is None else max(self._step_time, self._event_time) + (age or 0.0)

    def training(self, now: float, end: float | None = None) -> Training | None:
        """Return the progress of the training; None if no iteration of this launch is known.

        ``now``: time from which ages are computed; ``end``: time until which goodput is computed (default: ``now``);
        both in unix seconds.
        """
        if not self.recent:
            return None
        start, last = self.start or {}, self.recent[-1]
        if last.iteration >= start.get("iteration", 0) and (
            self._steps_written if self._step_time is None else self._step_time
        ) < start.get("time", 0.0):
            return None  # the steps are of an earlier launch, until this launch's first step starts a new file
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
        """Return ``Training.goodput`` until ``now``; the time of recoveries does not count as work.

        None if the launch's start is unknown, or steps since then are missing in steps.jsonl.
        """
        if self.start is None or now <= self.start["time"] or not self.start.get("replicas"):
            return None
        if self._first is None or self._first > self.start.get("iteration", self._first):
            return None
        of = len(self.start["replicas"])
        work = sum(min(1.0, replicas / of) * seconds for replicas, seconds in self._worked.items()) - self._recovering
        return min(1.0, max(0.0, work / (now - self.start["time"])))


def worker_processes(folder: Path) -> dict[int, dict[str, Any]]:
    """Return worker id -> the worker's entry in workers.json; empty if the file is missing or invalid."""
    try:
        entries = json.loads((folder / "workers.json").read_bytes())
        return {int(entry["worker_id"]): entry for entry in entries}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
