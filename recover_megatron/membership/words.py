"""Last words: what a worker that is ended by an exception tells, and when they mean that nobody can go on.

A fault that lies in the work itself (a microbatch whose loss is no number, a bug that iteration 7 meets) ends every
worker that takes the work over: the replicas would be eaten one by one. It is known by its second victim: workers of
two replicas that end with the same error at the same microbatch of the same iteration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_ERROR = 2000
"""Characters of an error's type and message."""
MAX_TRACEBACK = 16 << 10
"""Characters of a traceback."""


def cut_middle(text: str, limit: int) -> str:
    """At most ``limit`` characters of ``text``: its beginning and its end, which say most of a traceback."""
    if len(text) <= limit:
        return text
    mark = f"\n[... {len(text) - limit} or more characters cut ...]\n"
    head = (limit - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (limit - len(mark) - head) :]


@dataclass(frozen=True)
class LastWords:
    """Why a worker ends, as it says itself."""

    name: str
    """The worker and its host, for people."""
    group: int
    """Its replica: workers of one replica share their fate, and their errors."""
    iteration: int
    microbatch: int | None
    error: str

    @staticmethod
    def of(name: str, message: Mapping[str, Any]) -> LastWords:
        """Those of a checked message."""
        return LastWords(name, message["group"], message["iteration"], message.get("microbatch"), message["error"])

    def repeats(self, earlier: LastWords) -> bool:
        """Whether another replica ended in the same way at the same work."""
        ours, theirs = ((words.iteration, words.microbatch, alike(words.error)) for words in (self, earlier))
        return self.group != earlier.group and ours == theirs


def alike(error: str) -> str:
    """An error without what is the worker's: messages hold ranks, devices, process ids, addresses."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", error)


def true_cause(words: LastWords, earlier: Iterable[LastWords]) -> str | None:
    """Why the run must end: ``words`` repeat those of another replica. None: they do not."""
    before = next((other for other in earlier if words.repeats(other)), None)
    if before is None:
        return None
    work = f"iteration {words.iteration}"
    if words.microbatch is not None:
        work = f"microbatch {words.microbatch} of {work}"
    victims = f"on {before.name}, then on {words.name}"
    room = 2000 - len(work) - len(victims) - 50
    return f"{work} raises {cut_middle(words.error, room)} wherever it is run: {victims}"
