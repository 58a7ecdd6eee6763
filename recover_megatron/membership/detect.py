"""Who hangs: a pure judgement over progress marks.

A worker is *waiting* while it says so in its mark, has reported its step done, or has joined a rendezvous. A worker
that does not wait and has not made a new mark for ``hang_timeout`` (plus what its mark allows) while another has been
waiting just as long is *hung*: it holds up the run. When all wait for each other and nobody has made a mark for so
long, no single worker is to blame: the epoch is *stuck*.

A worker that makes marks is never hung, however slow it is; a worker that nobody waits for is never hung either.

What a mark allows (a checkpoint, compilation) holds only while the worker is heard: its session has a thread of its
own, which goes on while the main thread writes or compiles, and falls silent when the process is stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Progress:
    """What is known of one worker's progress. Times by the coordinator's clock."""

    worker: int
    count: int = -1
    """The worker's own number of its last mark."""
    marked: float = 0.0
    """When that number last changed."""
    waiting_since: float | None = None
    allow: float = 0.0
    heard: float | None = None
    """When anything was last heard of it; None: not known."""
    iteration: int = 0
    phase: str = ""
    microbatch: int | None = None
    place: list[int] | None = None
    """Replica, position, quota, as it says itself: for people."""


@dataclass(frozen=True)
class Judgement:
    """The hung workers, or ``stuck``: all wait for each other."""

    hung: list[int] = field(default_factory=list)
    stuck: bool = False


def judge(group: Iterable[Progress], now: float, hang_timeout: float) -> Judgement:
    """Judge the workers of one epoch, or of one rendezvous."""
    progress = list(group)
    waiting = [p.waiting_since for p in progress if p.waiting_since is not None]
    if not waiting:
        return Judgement()
    if len(waiting) == len(progress):
        last = max(max(p.marked + _allowed(p, now, hang_timeout) for p in progress), *waiting)
        return Judgement(stuck=now - last > hang_timeout)
    first = min(waiting)
    return Judgement(
        hung=[
            p.worker
            for p in progress
            if p.waiting_since is None and now - max(p.marked, first) > hang_timeout + _allowed(p, now, hang_timeout)
        ]
    )


def _allowed(progress: Progress, now: float, hang_timeout: float) -> float:
    """What a mark allows, unless nothing has been heard of the worker for so long that its process must be stopped."""
    silent = progress.heard is not None and now - progress.heard > hang_timeout
    return 0.0 if silent else progress.allow
