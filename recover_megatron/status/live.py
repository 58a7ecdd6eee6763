"""The live view: looks again and again until the run ends, nobody answers any more, or its user has seen enough.

LOOKING --view--> shown --interval--> LOOKING
    |  no answer: the last view stays, with the complaint, for ``patience`` seconds --> ``NoAnswer``
    '--stop: the last view with how the run ended --> over
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from recover_megatron.membership.errors import AuthenticationError
from recover_megatron.membership.observer import NoAnswer
from recover_megatron.status.model import RunStatus
from recover_megatron.status.screen import render
from recover_megatron.status.source import Source

PIPE_COLUMNS = 160
"""Width of what is printed where there is no terminal, and no ``COLUMNS`` in the environment."""


class _Console(Console):
    """One whose reader may go away (``| head``): ``BrokenPipeError``, where rich would end with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Called by rich in the handler of that exception."""
        self.quiet = True
        raise  # noqa: PLE0704 - the exception that is being handled


def _console() -> Console:
    """No markup and no highlighting of what members sent."""
    told = Console().is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return _Console(highlight=False, markup=False, width=None if told else PIPE_COLUMNS)


def show_once(status: RunStatus) -> None:
    """Print one view, all of it."""
    _console().print(render(status))


def follow(source: Source, interval: float, patience: float) -> None:
    """Show view after view. Where there is no terminal they are printed one below the other."""
    console = _console()
    last: RunStatus | None = None
    answered = time.monotonic()
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            complaint = ""
            try:
                last = _ended_as_seen(source.look(), last)
                answered = time.monotonic()
            except (NoAnswer, AuthenticationError) as error:  # our secret was right before: it ended at the proof
                silent = time.monotonic() - answered
                if last is None or silent > patience:
                    raise
                complaint = f"no coordinator answers for {silent:.0f} s: {error}"
            if console.is_terminal:
                live.update(render(last, console.height, complaint), refresh=True)
            else:
                console.print(render(last, complaint=complaint))
            if last.code is not None:
                return
            time.sleep(interval)


def _ended_as_seen(status: RunStatus, last: RunStatus | None) -> RunStatus:
    """The end of a run tells only how it ended: what was seen last stays on the screen."""
    if status.code is None or last is None:
        return status
    training = status.training or last.training
    code, reason, age = status.code, status.reason, status.ended_age
    return replace(last, state=status.state, code=code, reason=reason, ended_age=age, training=training)
