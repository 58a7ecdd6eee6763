"""How a launch has ended, once none of its workers runs: its exit code, and the last lines for people.

The first that there is decides::

    what has stopped the launch (a signal, a refusal, a start that is made again)
    what the coordinator says of the run, unless workers of this node have finished and it was not heard
    what became of the workers, here and on other nodes (states.py)

The last checkpoint is named by its files: there may be nobody left who could tell of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recover_megatron.launch import messages
from recover_megatron.launch.control_plane import ControlPlane
from recover_megatron.launch.peers import Peers
from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.launch.start_up import StartUp
from recover_megatron.launch.states import LAUNCH_FAILED, WorkerState, run_exit_code, start_exit_code
from recover_megatron.launch.worker_table import WorkerTable

_TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's, in the folder of --save: names an iteration when its checkpoint is complete."""


def save_folder(script_args: Sequence[str]) -> str | None:
    """The folder in which a script with these arguments saves; None: it saves none."""
    folder = None
    for at, argument in enumerate(script_args):
        if argument == "--save" and at + 1 < len(script_args):
            folder = script_args[at + 1]
        elif argument.startswith("--save="):
            folder = argument.removeprefix("--save=")
    return folder


def last_checkpoint(script_args: Sequence[str]) -> str | None:
    """The newest complete checkpoint of a script with these arguments, in words; None: it saves none.

    Looks at the disk.
    """
    folder = save_folder(script_args)
    if folder is None:
        return None
    try:
        newest = (Path(folder) / _TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        newest = ""
    return f"iteration {newest} in {folder}" if newest else f"none is complete in {folder}"


@dataclass(eq=False)
class Conclusion:
    """Made once per launch."""

    _plan: LaunchPlan
    _table: WorkerTable
    _control: ControlPlane
    _peers: Peers
    _start_up: StartUp
    _say: Callable[[str], None]

    def verdict(self) -> int | None:
        """How the coordinator says that the run has ended; None: it does not, or was not heard.

        To be asked before the candidates of this launch are ended: the last worker may have told them something just
        now.
        """
        verdict = self._control.verdict()
        finished = any(worker.state is WorkerState.FINISHED for worker in self._table.all)
        if verdict is not None and not self._control.told and finished:
            self._say(
                f"the end was not heard from the coordinator ({self._control.reason}); workers of this node have "
                "finished the run"
            )
            return None
        self._control.linger()
        return verdict

    def exit_code(self, stopped: int | None, verdict: int | None) -> int:
        """The launcher's; ``stopped``: that of a launch that was stopped, None: it was not."""
        if stopped is not None:
            return stopped
        if verdict is not None:
            return verdict
        outcomes = [*self._table.outcomes, *self._peers.outcomes]
        if self._start_up.under_way and any(worker.outcome.code for worker in self._table.launched):
            return start_exit_code(outcomes, self._plan.fault_tolerant)
        code = run_exit_code(outcomes, self._plan.fault_tolerant)
        if code == 0 and self._peers.any_lost and not self._plan.fault_tolerant:
            return LAUNCH_FAILED
        return code

    def why(self, code: int, verdict: int | None) -> str:
        """Of a launch that was not stopped: why it has ended, in one line."""
        return self._control.reason if verdict == code else messages.ends(self._table.all)

    def tell(self, code: int, verdict: int | None) -> None:
        """Say how it has ended, with which exit code, and from where it can go on."""
        self._say(messages.summary(self._table.all, code))
        if verdict is not None and code == verdict != 0:
            self._say(f"the run was ended: {self._control.reason}")
        if code and self._plan.fault_tolerant and (last := last_checkpoint(self._plan.script_args)):
            self._say(f"last checkpoint: {last}")
