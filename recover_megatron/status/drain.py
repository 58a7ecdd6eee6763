"""``recover-status ... drain NODE``: ask for a node to be drained, and tell what becomes of it until that is known.

    ask -> asked, moving: a line for each change -> drained: it may be switched off
                                               |--> refused: why; of a host: which of its nodes
                                               '--> the run ends: so it may, too

The coordinator that was asked may be lost before the run's members know of it; the next one shows nothing of the node
then, and is asked again.  Ctrl-C ends the looking and takes nothing back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum

from recover_megatron.membership.client import NoAnswer
from recover_megatron.membership.records import ranges
from recover_megatron.status.model import DrainStatus, RunStatus

PAUSE_SECONDS = 0.5
"""Between two questions."""


class DrainExit(IntEnum):
    """Exit codes."""

    DRAINED = 0
    """It may be switched off."""
    NOBODY = 1
    REFUSED = 3
    """Nothing has changed; or, of a host, some of its nodes are drained and others stay."""


def drain(node: str, look: Callable[[str | None], RunStatus], patience: float, say: Callable[[str], None]) -> DrainExit:
    """Have ``node`` (or all nodes of a host of that name) drained, and wait for it.

    ``look``: the run as it is now, after asking for a node to be drained if one is given.  Raises ``NoAnswer`` when
    nobody answers for ``patience`` seconds, and what else ``look`` raises.
    """
    told, silent_since, known = "", None, False
    while True:
        try:
            status = look(None if known else node)
        except NoAnswer:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > patience:
                raise
        else:
            silent_since = None
            if status.code is not None:
                say(f"the run has ended ({status.reason}): nothing of it runs on {node}")
                return DrainExit.DRAINED
            rows = [row for row in status.drains if node in row.names]
            known = bool(rows)
            text, end = _told(node, rows)
            if text and text != told:
                say(text)
                told = text
            if end is not None:
                return end
        time.sleep(PAUSE_SECONDS)


def _told(node: str, rows: list[DrainStatus]) -> tuple[str, DrainExit | None]:
    """What to say of a node, and how that ends the command, if it does."""
    if not rows:
        return "", None
    running = [row for row in rows if row.state in ("asked", "moving")]
    refused = [row for row in rows if row.state == "refused"]
    if running:
        workers = ranges(sorted(worker for row in running for worker in row.workers))
        doing = "is asked for" if any(row.state == "asked" for row in running) else "leaves at the next iteration"
        return f"{node}: {doing}; workers there: {workers or 'none'}", None
    if refused:
        drained = " and ".join(row.node for row in rows if row not in refused)
        if not drained:
            return f"{node} is not drained, and nothing has changed: {refused[0].reason}", DrainExit.REFUSED
        stays = ". ".join(f"{row.node} stays: {row.reason}" for row in refused)
        return f"{node} is not drained as a whole. {stays}. {drained} is drained", DrainExit.REFUSED
    return f"{node} is drained: it may be switched off", DrainExit.DRAINED
