"""Flags of the training script, which must be the same for all workers of a run.

If a worker joined with another learning rate or batch size, it would silently corrupt the training.  So the flags are
compared: by the launchers of several nodes before any of them starts a worker (`launch.nodes.guest`), and by the
workers at every rendezvous (`instep.meeting.planner`).

Flags that may differ from worker to worker are left out: see ``OWN`` and ``--recover-may-differ``.  If a value contains
a slash, only the part behind the last slash counts (another host may have the data in another folder).  Numbers are
compared as numbers.
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
"""Flags that concern one worker only, or that only the coordinator uses."""
OWN_KINDS = ("--tensorboard-", "--wandb-", "--one-logger-", "--timing-log-")
"""Beginnings of further flags that may differ: they set which worker writes logs, and where."""
MOST_NAMED = 10
LONGEST = 60
"""Largest number of characters of a value that a message shows."""


def flags_of(argv: Sequence[str], may_differ: Collection[str] = ()) -> dict[str, str]:
    """Return flag -> its values joined to one text, for all flags that must be the same on all workers.

    ``argv``: without the program's name.  ``may_differ``: flags to leave out, with or without their dashes.  Words
    before the first flag are the values of ``""``.  A flag that is given more than once has all its values.
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
    """Return a digest of ``flags``: 16 hexadecimal digits."""
    return _hash(json.dumps(flags, sort_keys=True))


def codes(flags: Mapping[str, str]) -> dict[str, str]:
    """Return flag -> digest of its values, which may be sent where others can read it."""
    return {flag: _hash(f"{flag} {value}") for flag, value in flags.items()}


def differences(own_flags: Mapping[str, str], run_flags: Mapping[str, str], *, shown: bool = True) -> list[str]:
    """Return the differences in words, with the values if ``shown``."""
    found = []
    for flag in sorted({*own_flags, *run_flags}):
        own, run = own_flags.get(flag), run_flags.get(flag)
        name = flag or "the arguments before the first flag"
        if own == run:
            continue
        if own is None:
            found.append(f"{name} is missing" + (f" (the run: {_cut(run)})" if shown and run else ""))
        elif run is None:
            found.append(f"{name}{_given(own) if shown else ''} is not given to the run")
        else:
            found.append(f"{name}{_given(own)} (the run: {_cut(run)})" if shown else f"{name} has another value")
    return found


def listed(found: Sequence[str]) -> str:
    """Return the first ``MOST_NAMED`` differences, for a message."""
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
