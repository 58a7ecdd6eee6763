"""What all workers of a run must be told alike: the flags of the training script.

A worker that joined with another learning rate or batch would train another model into the run, and nobody would see
it.  So all compare what they were given: the launchers of several nodes before any of them starts a worker
(`launch.nodes.guest`), the workers whenever they meet (`instep.meeting.planner`).

What may differ from worker to worker is left out: see ``OWN``, and ``--recover-may-differ``.  Of a value with a slash
in it only the part behind the last one counts (data may lie elsewhere on another host), and numbers are compared as
numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence

OWN = frozenset(
    f"--{name}"
    for name in (
        "local-rank", "num-workers", "logging-level", "data-cache-path", "profile", "profile-ranks",
        "recover-log-dir", "recover-coordinator", "recover-inject", "recover-domain", "recover-device",
        "recover-heartbeat-interval", "recover-heartbeat-timeout", "recover-hang-timeout", "recover-stall-timeout",
        "recover-grace", "recover-metrics", "recover-metrics-file", "recover-on-event", "recover-untested",
        "recover-may-differ",
    )
)  # fmt: skip
"""Flags that are one worker's own, or that only the coordinator goes by."""
OWN_KINDS = ("--tensorboard-", "--wandb-", "--one-logger-", "--timing-log-")
"""Beginnings of such: who writes logs, and where."""
MOST_NAMED = 10
LONGEST = 60
"""Characters of a value that a message shows."""


def flags_of(argv: Sequence[str], may_differ: Collection[str] = ()) -> dict[str, str]:
    """Flag -> its values, in one text, of all that must be alike; ``argv`` without the program's name.

    ``may_differ``: flags that are left out, with or without their dashes.  What stands before the first flag is that
    of ``""``.  A flag that is given more than once has all its values.
    """
    found: dict[str, list[str]] = {}
    flag = ""
    for word in argv:
        if (word.startswith("-") and word[1:2].isalpha()) or word.startswith("--"):
            flag, given, value = word.partition("=")
            flag = flag.replace("_", "-")
            found.setdefault(flag, []).extend([_value(value)] if given else [])
        else:
            found.setdefault(flag, []).append(_value(word))
    left_out = {*OWN, *(f"--{each.lstrip('-').replace('_', '-')}" for each in may_differ)}
    return {
        flag: " ".join(values)
        for flag, values in sorted(found.items())
        if flag not in left_out and not flag.startswith(OWN_KINDS)
    }


def digest(flags: Mapping[str, str]) -> str:
    """16 hexadecimal digits, the same for the same flags."""
    return _hash(json.dumps(flags, sort_keys=True))


def codes(flags: Mapping[str, str]) -> dict[str, str]:
    """Flag -> a digest of its values: to be told where others may read it."""
    return {flag: _hash(f"{flag} {value}") for flag, value in flags.items()}


def differences(mine: Mapping[str, str], theirs: Mapping[str, str], *, shown: bool = True) -> list[str]:
    """In words, where two differ; ``theirs``: the run's.  ``shown``: with the values."""
    found = []
    for flag in sorted({*mine, *theirs}):
        here, there = mine.get(flag), theirs.get(flag)
        name = flag or "the words before the first flag"
        if here == there:
            continue
        if here is None:
            found.append(f"{name} is missing" + (f" (the run: {_cut(there)})" if shown and there else ""))
        elif there is None:
            found.append(f"{name}{_given(here) if shown else ''} is not given to the run")
        else:
            found.append(f"{name}{_given(here)} (the run: {_cut(there)})" if shown else f"{name} has another value")
    return found


def listed(found: Sequence[str]) -> str:
    """What ``differences`` found, for a message: ``MOST_NAMED`` of it."""
    more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more


def _value(word: str) -> str:
    last = word.rstrip("/").rpartition("/")[2] if "/" in word else word
    try:
        return repr(float(last))
    except ValueError:
        return last


def _given(value: str) -> str:
    return f" {_cut(value)}" if value else ""


def _cut(value: str | None) -> str:
    value = value or "without a value"
    return value if len(value) <= LONGEST else f"{value[: LONGEST - 3]}..."


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
