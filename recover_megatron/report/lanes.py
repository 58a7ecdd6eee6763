"""Pictures of a run over time: the role of each worker, as an SVG for the page; the recoveries as a Chrome trace.

The SVG, by ``svg``, shows the last launch.  It has a lane for each worker.  The colours in a lane show the worker's
roles (``stretches``).  Marks are lines across all lanes (recoveries, rollbacks) or ticks below the lanes (snapshots).
Colours are CSS classes of the page, so that they follow the reader's light or dark mode.

The Chrome trace, by ``trace``, is for ``recover-report --trace FILE``.  It has these lanes:

    training       the phases of each recovery, in sequence, as a worker reported them
    coordinator n  faults and revokes as instants; each rendezvous, from its revoke to its plan
    worker n       the worker's roles (``stretches``) in the last launch

Times are from the clock of the host that wrote the event, so lanes are shifted if the hosts' clocks differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from recover_megatron.run_log.events import Event

LEFT = 70
"""Width of the column with the names of the lanes, in units of the SVG."""
_WIDTH, _FOOT = 960, 26
_RIGHT = 30  # space for the right half of the axis's last label
_PARTS = 6
"""Largest number of intervals on the time axis."""


@dataclass(frozen=True)
class Key:
    """Entry of a legend: a CSS class of the page, and its meaning."""

    css: str
    text: str


@dataclass(frozen=True)
class Axis:
    """Time axis from ``begin`` to ``end``, unix seconds."""

    begin: float
    end: float

    @property
    def scale(self) -> float:
        return (_WIDTH - LEFT - _RIGHT) / max(self.end - self.begin, 1e-9)

    def x(self, time: float) -> float:
        return LEFT + (time - self.begin) * self.scale

    def picture(self, css: str, words: str, parts: Sequence[str], height: int, gap: int) -> str:
        """Return an SVG of the elements ``parts``, with labels of the time axis below: round times since ``begin``.

        ``css``: CSS class of the picture; ``words``: alternative text; ``height``: height of the parts; ``gap``:
        distance from the parts to the labels.
        """
        of, y = self.end - self.begin, height + gap
        ticks = (
            f'<text x="{self.x(self.begin + time):.1f}" y="{y}" text-anchor="middle">{since(time, of)}</text>'
            for time in round_times(of)
        )
        head = f'<svg class="{css}" role="img" aria-label="{escape(words)}" viewBox="0 0 {_WIDTH} {height + _FOOT}">'
        return "".join([head, *parts, *ticks, "</svg>"])


def round_times(of: float) -> list[float]:
    """Return times for the labels of an axis from 0 to ``of`` seconds, in steps of 1, 2 or 5 times a power of ten.

    The unit of the steps is a second, a minute or an hour, depending on ``of``.
    """
    unit = _unit(of)
    step = 10.0 ** math.floor(math.log10(max(of / unit, 1e-3) / _PARTS))
    step = next(size for size in (step, 2 * step, 5 * step, 10 * step) if size * _PARTS >= of / unit) * unit
    return [n * step for n in range(math.floor(of / step + 1e-9) + 1)]


def since(seconds: float, of: float) -> str:
    """Return ``seconds`` as text in the unit (s, min, h) of an axis that is ``of`` seconds long."""
    unit = _unit(of)
    return f"{seconds / unit:{'.0f' if of >= 6 * unit else '.1f'}} {_UNITS[unit]}"


_UNITS = {1: "s", 60: "min", 3600: "h"}


def _unit(of: float) -> int:
    return 1 if of < 600 else 60 if of < 18000 else 3600


MOST = 128
"""Largest number of lanes; if there are more workers, workers with other roles than "training" are preferred."""
MOST_TICKS = 300
"""Largest number of snapshots that are drawn; if there are more, only every n-th is drawn."""
KINDS = {
    "training": "training",
    "spare": "spare: has lost its place",
    "hot-spare": "hot spare: has joined, and has had no place yet",
    "aside": "set aside: late, may return",
    "draining": "leaving: its node is drained",
    "left": "has left in order",
    "gone": "gone",
}
"""Role of a worker (also a CSS class of the page) -> text in the legend."""
MARKS = {
    "recovery": "recovery",
    "from-memory": "rollback to a snapshot in memory",
    "from-disk": "rollback to a checkpoint",
    "snapshot": "snapshot in memory",
}
_ALWAYS = ("training", "spare", "gone")
_HEIGHT, _GAP = 14, 4


@dataclass(frozen=True)
class Stretch:
    """Role of a worker from ``begin`` to ``end``, unix seconds."""

    worker: int
    begin: float
    end: float
    kind: str
    """Role: one of ``KINDS``."""


@dataclass(frozen=True)
class Mark:
    """Moment that the picture marks, with its description."""

    time: float
    text: str
    kind: str = "recovery"
    """Kind: one of ``MARKS``."""


def stretches(events: Sequence[Event], coordinators: Sequence[Event] = (), until: float = 0.0) -> list[Stretch]:
    """Return the roles of each worker in the last launch, up to the last event or ``until``, whichever is later.

    The events must be in time order.  ``until``: unix seconds.
    """
    began = max((n for n, event in enumerate(events) if event["event"] == "start"), default=0)
    details = events[began:]
    plans = [event for event in details if event["event"] == "plan" and event.get("grid")]
    if not plans:
        return []
    end = max(until, *(event["time"] for event in details))
    changes = [e for e in coordinators if e["event"] in _CHANGES and plans[0]["time"] <= e["time"] < end]
    workers = _Workers()
    for event in sorted([*plans, *changes], key=lambda event: event["time"]):
        workers.apply(event)
    return workers.until(end)


_CHANGES = {"aside": "aside", "back": "spare", "left": "left", "fault": "gone"}
"""Name of a coordinator's event -> role of the event's worker after the event."""


class _Workers:
    """Present and past roles of all workers, computed from one event after the other."""

    def __init__(self) -> None:
        self._now: dict[int, tuple[str, float]] = {}  # worker -> (role, unix seconds at which the role began)
        self._placed: set[int] = set()  # workers that have a place, or had one
        self._past: list[Stretch] = []

    def apply(self, event: Event) -> None:
        """Update the roles after a plan or an event in ``_CHANGES``; ignore workers that have been in no plan."""
        if event["event"] == "plan":
            for worker, kind in self._by_plan(event).items():
                self._set_role(worker, kind, event["time"])
        elif event["worker"] in self._now:
            finishes = event["event"] == "left" and self._now[event["worker"]][0] == "training"
            if not finishes:  # a "training" worker that leaves has finished the run, and keeps this role
                self._set_role(event["worker"], _CHANGES[event["event"]], event["time"])

    def until(self, end: float) -> list[Stretch]:
        """Return all roles up to the time ``end``, ordered by worker and time."""
        last = [Stretch(worker, since, end, kind) for worker, (kind, since) in self._now.items()]
        return sorted([*self._past, *last], key=lambda s: (s.worker, s.begin))

    def _by_plan(self, plan: Event) -> dict[int, str]:
        """Return worker -> role after ``plan``; a worker that is not in ``plan`` is set aside, has left, or is gone."""
        kinds = {worker: kind if kind in ("aside", "left") else "gone" for worker, (kind, _) in self._now.items()}
        for worker in map(int, plan.get("spares", ())):
            if kinds.get(worker) != "left":
                kinds[worker] = "spare" if worker in self._placed else "hot-spare"
        leaving = set(map(int, plan.get("leaving", ())))
        for replica, workers in plan["grid"].items():
            self._placed |= set(map(int, workers))
            kinds |= {int(worker): "draining" if int(replica) in leaving else "training" for worker in workers}
        return kinds

    def _set_role(self, worker: int, kind: str, time: float) -> None:
        before, since = self._now.get(worker, (kind, time))
        if before != kind:
            self._past.append(Stretch(worker, since, time, before))
            since = time
        self._now[worker] = kind, since


def svg(found: Sequence[Stretch], marks: Sequence[Mark]) -> str:
    """Return the picture of the roles ``found`` and of the marks as SVG; empty if there are no roles."""
    if not found:
        return ""
    axis = Axis(*_span(found))
    begin, lanes = axis.begin, _lanes(found)
    bottom = len(lanes) * (_HEIGHT + _GAP)
    parts = []
    for row, worker in enumerate(lanes):
        top = row * (_HEIGHT + _GAP)
        parts.append(_label(f"worker {worker}", top))
        for s in (s for s in found if s.worker == worker):
            tip = f"worker {worker}: {KINDS[s.kind]}, {s.begin - begin:.1f} s to {s.end - begin:.1f} s"
            width = max((s.end - s.begin) * axis.scale, 1)
            box = f'x="{axis.x(s.begin):.1f}" y="{top}" width="{width:.1f}" height="{_HEIGHT}"'
            parts.append(f'<rect class="{s.kind}" {box}><title>{tip}</title></rect>')
    seen = _seen(found, marks)
    snapshots = [mark for mark in seen if mark.kind == "snapshot"]
    across = [mark for mark in seen if mark.kind != "snapshot"]
    parts += [_line(mark, axis.x(mark.time), 0, bottom) for mark in across]
    if snapshots:
        parts.append(_label("snapshots", bottom))
        shown = snapshots[:: -(-len(snapshots) // MOST_TICKS)]
        parts += [_line(mark, axis.x(mark.time), bottom + 1, bottom + _HEIGHT) for mark in shown]
        bottom += _HEIGHT + _GAP
    return axis.picture("lanes", in_words(found, marks), parts, bottom, 16)


def _label(text: str, top: float) -> str:
    return f'<text x="{LEFT - 6}" y="{top + 11}" text-anchor="end">{text}</text>'


def _line(mark: Mark, x: float, top: float, bottom: float) -> str:
    at = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"'
    return f'<line class="mark {mark.kind}" {at}><title>{escape(mark.text)}</title></line>'


def _span(found: Sequence[Stretch]) -> tuple[float, float]:
    return min(stretch.begin for stretch in found), max(stretch.end for stretch in found)


def _seen(found: Sequence[Stretch], marks: Sequence[Mark]) -> list[Mark]:
    begin, end = _span(found)
    return [mark for mark in marks if begin <= mark.time <= end]


def _lanes(found: Sequence[Stretch]) -> list[int]:
    struck = {stretch.worker for stretch in found if stretch.kind != "training"}
    first = sorted({stretch.worker for stretch in found}, key=lambda worker: (worker not in struck, worker))
    return sorted(first[:MOST])


def legend(found: Sequence[Stretch], marks: Sequence[Mark]) -> list[Key]:
    """Return the legend of the roles and marks that the picture shows."""
    kinds = {stretch.kind for stretch in found}
    lines = {mark.kind for mark in _seen(found, marks)} if found else set()
    return [Key(kind, text) for kind, text in KINDS.items() if kind in kinds] + [
        Key(f"mark {kind}", text) for kind, text in MARKS.items() if kind in lines
    ]


def in_words(found: Sequence[Stretch], marks: Sequence[Mark]) -> str:
    """Return the alternative text of the picture from ``svg``."""
    last = {stretch.worker: stretch.kind for stretch in found}
    ends = Counter(last.values())
    counts = [f"{ends[kind]} {_short(kind)}" for kind in KINDS if ends[kind] or kind in _ALWAYS]
    more = f"; {len(last) - MOST} lanes are left out" if len(last) > MOST else ""
    ever = [_ever(kind, found) for kind in KINDS if kind not in _ALWAYS]
    others = Counter(mark.kind for mark in _seen(found, marks))
    lines = [_count(others, kind) for kind in MARKS if others[kind] and kind != "recovery"]
    recoveries = f"{others['recovery']} recover{'y' if others['recovery'] == 1 else 'ies'}"
    details = [recoveries, *lines, *filter(None, ever)]
    lanes = f"A lane for each of {len(last)} workers over time"
    return f"{lanes}; at the end {', '.join(counts)}; {'; '.join(details)}{more}"


def _short(kind: str) -> str:
    return {"hot-spare": "hot spare", "aside": "set aside"}.get(kind, kind)


def _count(counts: Mapping[str, int], kind: str) -> str:
    first, *more = MARKS[kind].split(" ")
    return " ".join([str(counts[kind]), first if counts[kind] == 1 else f"{first}s", *more])


def _ever(kind: str, found: Sequence[Stretch]) -> str:
    workers = sorted({stretch.worker for stretch in found if stretch.kind == kind})
    more = f" and {len(workers) - 8} more" if len(workers) > 8 else ""
    return f"{_short(kind)} at some time: workers {', '.join(map(str, workers[:8]))}{more}" if workers else ""


_TRAINING = 1
_COORDINATORS = 2
"""Number of the first coordinator's lane in the trace; the other coordinators have the next numbers."""
_RUN, _WORKERS = 1, 2
"""Groups of lanes: in the trace format, a group is a process and a lane a thread.  Some viewers hide process 0."""
_MOMENTS = ("fault", "revoke", "exception", "give_up", "stalled", "lead", "stop")
Entry = Mapping[str, Any]


def trace(workers: Sequence[Event], coordinators: Sequence[Event], run: str = "run") -> dict[str, Any]:
    """Return the content of the trace file, an object for JSON; ``run``: name of the first group of lanes."""
    files = sorted({event["file"] for event in coordinators}, key=lambda name: (len(name), name))
    lanes = {name: _COORDINATORS + n for n, name in enumerate(files)}
    entries = [_named("process", _RUN, 0, run), _named("thread", _RUN, _TRAINING, "training")]
    entries += [_named("thread", _RUN, lane, _coordinator(name)) for name, lane in lanes.items()]
    entries += [*_recoveries(workers), *_coordinators(coordinators, lanes), *_lives(workers, coordinators)]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _coordinator(file: str) -> str:
    return f"coordinator {file.removeprefix('events-').removesuffix('.jsonl')}"


def _lives(workers: Sequence[Event], coordinators: Sequence[Event]) -> Iterator[Entry]:
    found = stretches(workers, coordinators)
    hosts = {event["worker"]: event["host"] for event in coordinators if "host" in event and "worker" in event}
    if found:
        yield _named("process", _WORKERS, 0, "workers")
    for worker in sorted({stretch.worker for stretch in found}):
        yield _named(
            "thread", _WORKERS, worker, f"worker {worker}" + (f" on {hosts[worker]}" if worker in hosts else "")
        )
    for stretch in found:
        if stretch.kind not in ("gone", "left"):
            yield _span_of(_WORKERS, stretch.worker, KINDS[stretch.kind], stretch.begin, stretch.end, {})


def _recoveries(workers: Sequence[Event]) -> Iterator[Entry]:
    for event in workers:
        details = {name: value for name, value in event.items() if name not in ("event", "time", "seconds", "grid")}
        if event["event"] == "recovery":
            phases = {name: float(s) for name, s in event.get("seconds", {}).items()}
            begun = event["time"] - sum(phases.values())
            name = f"recovery in iteration {event.get('iteration')}"
            recovery = _span_of(_RUN, _TRAINING, name, begun, event["time"], details)
            yield recovery
            for name, seconds in phases.items():
                phase = _span_of(_RUN, _TRAINING, name, begun, begun + seconds, {})
                # Without this limit, rounding could make a phase end after its recovery.
                yield {**phase, "dur": min(phase["dur"], recovery["ts"] + recovery["dur"] - phase["ts"])}
                begun += seconds
        elif event["event"] in ("plan", "checkpoint", "start", "end"):
            yield _moment(_TRAINING, event["event"], event["time"], details)


def _coordinators(events: Sequence[Event], lanes: Mapping[str, int]) -> Iterator[Entry]:
    opened: dict[tuple[str, Any], float] = {}
    for event in events:
        lane = lanes[event["file"]]
        details = {name: value for name, value in event.items() if name not in ("time", "mono")}
        if event["event"] == "listening":  # a new launch begins, whose epoch numbers start again
            opened = {key: begun for key, begun in opened.items() if key[0] != event["file"]}
        if event["event"] == "revoke":
            opened[event["file"], event.get("epoch")] = event["time"]
        if event["event"] == "plan":
            begun = opened.pop((event["file"], event.get("epoch")), event["time"])
            yield _span_of(_RUN, lane, f"rendezvous of epoch {event.get('epoch')}", begun, event["time"], details)
        elif event["event"] in _MOMENTS:
            name = event["event"] + (f" of worker {event['worker']}" if "worker" in event else "")
            yield _moment(lane, name, event["time"], details)


def _span_of(group: int, lane: int, name: str, begun: float, ended: float, args: Entry) -> Entry:
    micros = round(begun * 1e6)
    duration = round(ended * 1e6) - micros
    return {"ph": "X", "pid": group, "tid": lane, "name": name, "ts": micros, "dur": duration, "args": args}


def _moment(lane: int, name: str, at: float, args: Entry) -> Entry:
    return {"ph": "i", "s": "t", "pid": _RUN, "tid": lane, "name": name, "ts": round(at * 1e6), "args": args}


def _named(metadata: str, group: int, lane: int, name: str) -> Entry:
    return {"ph": "M", "pid": group, "tid": lane, "name": f"{metadata}_name", "args": {"name": name}}
