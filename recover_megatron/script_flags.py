"""Comparison of the training script's flags, which must be the same for all workers of a run.

A worker with another learning rate or batch size would silently corrupt the training.  So the workers compare the
flags at every rendezvous (`instep.meeting.planner`).  In a run on several nodes the launchers compare them, too, before
any launcher starts a worker (`launch.nodes.guest`).

Flags that may differ between workers are left out: see ``OWN`` and ``--recover-may-differ``.  Of a value with a slash,
only the part after the last slash is compared, because hosts may have the data in different folders.  Numbers are
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
"""Flags that may differ between workers, because they affect only one worker, or only the coordinator uses them."""
OWN_KINDS = ("--tensorboard-", "--wandb-", "--one-logger-", "--timing-log-")
"""Prefixes of further flags that may differ between workers; they set which worker writes logs, and where."""
MOST_NAMED = 10
LONGEST = 60
"""Greatest number of characters of a flag's value in a message."""


def flags_of(argv: Sequence[str], may_differ: Collection[str] = ()) -> dict[str, str]:
    """Return flag -> its values joined to one text, for all flags that must be the same on all workers.

    ``argv``: command line without the program's name.  ``may_differ``: flags to leave out, with or without dashes.  The
    key "" has the words before the first flag.  A flag that is given several times has the values of all occurrences.
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
    """Return flag -> digest of its values, which may be sent where other users can read it."""
    return {flag: _hash(f"{flag} {value}") for flag, value in flags.items()}


def differences(own_flags: Mapping[str, str], run_flags: Mapping[str, str], *, shown: bool = True) -> list[str]:
    """Return one text for each flag whose values differ between ``own_flags`` (this worker's) and ``run_flags``.

    ``shown``: include the values in the texts.
    """
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
    """Return the first ``MOST_NAMED`` texts of ``found``, joined, and the number of further texts."""
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
