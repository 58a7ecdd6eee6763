"""What a run tells of its recoveries while it goes on, in words: a follower of its events.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recover_megatron.run_log.events import EVENTS_FILE, Lines


class Recoveries:
    """The events that a run adds from now on; what is in the file already is left out."""

    def __init__(self, run: Path) -> None:
        self._events = Lines(run / EVENTS_FILE)
        self._events.new()

    def new_lines(self) -> Iterator[str]:
        """A line for each loss of workers, each recovery and each replica put together since the last call."""
        for event in self._events.new()[1]:
            if text := describe(event):
                yield f"    >>>  {text}"


def describe(event: Mapping[str, Any]) -> str | None:
    """An event of a training worker in words; None: not one to be shown."""
    if event["event"] == "plan" and event.get("lost_workers"):
        gone = _names("worker", event["lost_workers"])
        left = _names("replica", event["replicas"])
        spares = f"; without a place: {_names('worker', event['spares'])}" if event.get("spares") else ""
        return f"iteration {event['iteration']}: {gone} lost; epoch {event['epoch']} goes on with {left}{spares}"
    if event["event"] == "plan" and event.get("fresh"):
        together = (f"replica {fresh} of workers {event['grid'][str(fresh)]}" for fresh in event["fresh"])
        return f"iteration {event['iteration']}: epoch {event['epoch']} puts together {', '.join(together)}"
    if event["event"] == "recovery":
        reran = [f"{_names('microbatch', ids)} by replica {who}" for who, ids in event.get("reran", {}).items()]
        again = f"run again: {', '.join(reran)}; " if reran else ""
        times = ", ".join(f"{phase} {seconds * 1000:.0f} ms" for phase, seconds in event["seconds"].items())
        return f"iteration {event['iteration']}: {again}finished ({times})"
    return None


def _names(what: str, ids: Sequence[int]) -> str:
    plural = {"microbatch": "microbatches"}.get(what, what + "s")
    return f"{what if len(ids) == 1 else plural} {', '.join(map(str, ids))}"
