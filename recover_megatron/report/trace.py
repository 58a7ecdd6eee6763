"""``recover-report --trace FILE``: the recoveries of a run in the Chrome trace format.

    coordinators   a lane each: faults and revokes at their moment, each rendezvous from its revoke to its plan
    training       the phases of each recovery, one behind the other, by the account of the worker that wrote it

Times are of the host that wrote each file: lanes of different hosts are apart by what their clocks are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recover_megatron.run_log.events import Event

_TRAINING = 1
_MOMENTS = ("fault", "revoke", "exception", "give_up", "stalled", "lead", "stop")
Entry = Mapping[str, Any]


def trace(workers: Sequence[Event], coordinators: Sequence[Event]) -> dict[str, Any]:
    """The object that the file has; empty of events where nothing happened."""
    lanes = {name: 2 + n for n, name in enumerate(sorted({event["file"] for event in coordinators}))}
    entries = [_lane(_TRAINING, "training"), *(_lane(lane, name) for name, lane in lanes.items())]
    entries += [*_recoveries(workers), *_coordinators(coordinators, lanes)]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _recoveries(workers: Sequence[Event]) -> Iterator[Entry]:
    for event in workers:
        told = {name: value for name, value in event.items() if name not in ("event", "time", "seconds", "grid")}
        if event["event"] == "recovery":
            phases = {name: float(s) for name, s in event.get("seconds", {}).items()}
            begun = event["time"] - sum(phases.values())
            yield _span(_TRAINING, f"recovery in iteration {event.get('iteration')}", begun, event["time"], told)
            for name, seconds in phases.items():
                yield _span(_TRAINING, name, begun, begun + seconds, {})
                begun += seconds
        elif event["event"] in ("plan", "checkpoint", "start", "end"):
            yield _moment(_TRAINING, event["event"], event["time"], told)


def _coordinators(events: Sequence[Event], lanes: Mapping[str, int]) -> Iterator[Entry]:
    opened: dict[tuple[str, Any], float] = {}
    for event in events:
        lane, told = (
            lanes[event["file"]],
            {name: value for name, value in event.items() if name not in ("time", "mono")},
        )
        if event["event"] == "revoke":
            opened[event["file"], event.get("epoch")] = event["time"]
        if event["event"] == "plan":
            begun = opened.pop((event["file"], event.get("epoch")), event["time"])
            yield _span(lane, f"rendezvous of epoch {event.get('epoch')}", begun, event["time"], told)
        elif event["event"] in _MOMENTS:
            name = event["event"] + (f" of worker {event['worker']}" if "worker" in event else "")
            yield _moment(lane, name, event["time"], told)


def _span(lane: int, name: str, begun: float, ended: float, args: Entry) -> Entry:
    micros = round(begun * 1e6)
    return {
        "ph": "X",
        "pid": 0,
        "tid": lane,
        "name": name,
        "ts": micros,
        "dur": round(ended * 1e6) - micros,
        "args": args,
    }


def _moment(lane: int, name: str, at: float, args: Entry) -> Entry:
    return {"ph": "i", "s": "t", "pid": 0, "tid": lane, "name": name, "ts": round(at * 1e6), "args": args}


def _lane(lane: int, name: str) -> Entry:
    return {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}}
