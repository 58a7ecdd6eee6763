"""Goodput over wall-clock time: how a run has used the time from its start to the end of each committed iteration.

    accounts   steps and events --> seconds of each use
    svg        seconds of each use --> picture of the shares of the time

docs/monitoring.md defines the five uses.  Pure.  Iterations that a rollback or a restart discarded are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from recover_megatron.report.lanes import LEFT, Axis, Key, since
from recover_megatron.report.run_dir import lost_before
from recover_megatron.run_log.events import Event
from recover_megatron.run_log.steps import StepRecord

USES = {
    "work": "work",
    "below": "missing replicas",
    "recovering": "recovering",
    "waiting": "waiting",
    "outside": "outside committed iterations",
}
"""Use of time (also a CSS class of the page) -> text for the reader, in the picture's order from bottom to top."""
RECENT = 20
"""Number of last iterations without a recovery; the median of their times is the expected time without a recovery."""
_POINTS = 400
_HEIGHT = 160


@dataclass(frozen=True)
class Account:
    """Use of the wall-clock time from the run's start to ``time`` (unix seconds)."""

    time: float
    seconds: Mapping[str, float]
    """Use (a key of ``USES``) -> seconds; the values add up to the complete time."""

    @property
    def shares(self) -> dict[str, float]:
        """Return use -> share of the wall-clock time, 0 to 1."""
        passed = sum(self.seconds.values())
        return {use: seconds / passed if passed > 0 else 0.0 for use, seconds in self.seconds.items()}


def accounts(
    steps: Sequence[StepRecord], workers: Sequence[Event], coordinators: Sequence[Event] = ()
) -> list[Account]:
    """Return an account for each committed iteration and for the run's end; the events must be in time order.

    Return [] if a step has no time, if steps before the first are missing, or if no ``start`` event names replicas.
    """
    starts = [event for event in workers if event["event"] == "start" and event.get("replicas")]
    timed = [(step.time, step) for step in steps if step.time is not None]
    if not starts or len(timed) < len(steps):  # an older version wrote steps without a time
        return []
    if steps and lost_before(steps[0], workers):
        return []
    costs = {(e["iteration"], e["epoch"]): sum(e["seconds"].values()) for e in workers if e["event"] == "recovery"}
    stalls = _stalls(coordinators)
    launched = [start["time"] for start in starts]
    spent = dict.fromkeys(USES, 0.0)
    usual: deque[float] = deque(maxlen=RECENT)
    at, found = launched[0], []
    for time, step in sorted(timed, key=lambda pair: pair[0]):
        if time <= at:
            continue  # the step ended before the run's start, or the workers' clocks differ
        began = max(at, time - step.seconds)
        full = len(starts[bisect_right(launched, time) - 1]["replicas"])
        cost = costs.get((step.iteration, step.epoch))
        recovering = min(cost or 0.0, time - began)
        rest = time - began - recovering
        late = max(0.0, rest - median(usual)) if cost is not None and usual else 0.0
        waiting = min(rest, max(late, sum(max(0.0, min(b, time) - max(a, began)) for a, b in stalls)))
        strength = min(1.0, step.replicas / full)
        spent["outside"] += began - at
        spent["recovering"] += recovering
        spent["waiting"] += waiting
        spent["work"] += (rest - waiting) * strength
        spent["below"] += (rest - waiting) * (1 - strength)
        if cost is None:
            usual.append(rest - waiting)
        at = time
        found.append(Account(at, dict(spent)))
    last = workers[-1]["time"]
    if workers[-1]["event"] != "end":  # if all workers were killed, only a coordinator has recorded the end
        last = max([last, *(event["time"] for event in coordinators if event["event"] == "stop")])
    if found and last > at:
        found.append(Account(last, {**spent, "outside": spent["outside"] + last - at}))
    return found


def _stalls(coordinators: Sequence[Event]) -> list[tuple[float, float]]:
    """Return the periods (begin, end), in unix seconds, in which the run waited for many late replicas.

    The periods are in the order of time and do not overlap.
    """
    late_events = [event for event in coordinators if event["event"] in ("stalled", "stall_over")]
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((event["time"] - event.get("seconds", 0.0), event["time"]) for event in late_events):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


# -- the picture ------------------------------------------------------------------------------------------------------


def svg(found: Sequence[Account]) -> str:
    """Return the picture of the shares of all uses over time as SVG; empty if there are fewer than two accounts."""
    if len(found) < 2:
        return ""
    axis = Axis(found[0].time - sum(found[0].seconds.values()), found[-1].time)
    shown = [*found[:: -(-len(found) // _POINTS)], found[-1]]
    parts = []
    below = [0.0] * len(shown)
    for use, words in USES.items():
        above = [y + account.shares[use] for y, account in zip(below, shown, strict=True)]
        if any(account.seconds[use] for account in shown):
            edge = [(axis.x(a.time), y) for a, y in zip(shown, above, strict=True)]
            edge += [(axis.x(a.time), y) for a, y in zip(reversed(shown), reversed(below), strict=True)]
            points = " ".join(f"{px:.1f},{_HEIGHT * (1 - py):.1f}" for px, py in edge)
            tip = f"{words}: {found[-1].shares[use]:.1%} at the end"
            parts.append(f'<polygon class="{use}" points="{points}"><title>{tip}</title></polygon>')
        below = above
    for share in (0, 50, 100):
        y = _HEIGHT * (1 - share / 100)
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + (10 if share == 100 else 4):.0f}" text-anchor="end">{share} %</text>'
        )
    return axis.picture("lanes goodput", in_words(found), parts, _HEIGHT, 18)


def legend(found: Sequence[Account]) -> list[Key]:
    if not found:
        return []
    last = found[-1]
    return [Key(use, f"{words} {last.shares[use]:.1%}") for use, words in USES.items() if last.seconds[use]]


def in_short(account: Account) -> tuple[str, str]:
    """Return two texts: the goodput, and the shares of all other uses of the time."""
    shares = account.shares
    rest = [f"{words} {shares[use]:.1%}" for use, words in USES.items() if use != "work" and shares[use] > 0]
    return f"{shares['work']:.1%}", f"of the time since the start; {', '.join(rest) or 'nothing else'}"


def in_words(found: Sequence[Account]) -> str:
    """Return the alternative text of the picture from ``svg``."""
    passed = sum(found[-1].seconds.values())
    uses = ", ".join(key.text for key in legend(found))
    middle = found[len(found) // 2]
    return (
        f"Use of the {since(passed, passed)} since the start, as shares of the elapsed time: "
        f"at the end {uses}; up to the middle iteration, work was {middle.shares['work']:.1%}"
    )
