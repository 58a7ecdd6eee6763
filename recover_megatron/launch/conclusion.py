"""What ends a launch: the loss of a worker before the training has begun (``StartUp``); and how it has ended, once none
of its workers runs: its exit code, and the last lines for people (``Conclusion``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from recover_megatron.launch import messages
from recover_megatron.launch.command_line.plan import LaunchPlan
from recover_megatron.launch.nodes.control_plane import ControlPlane
from recover_megatron.launch.nodes.peers import Peers
from recover_megatron.launch.workers.loop import EventLoop
from recover_megatron.launch.workers.processes import START_AGAIN
from recover_megatron.launch.workers.states import (
    LAUNCH_FAILED,
    NO_FAULT,
    REFUSED,
    WorkerProcess,
    WorkerState,
    exit_code_after,
    run_exit_code,
    start_exit_code,
)
from recover_megatron.launch.workers.worker_table import WorkerTable
from recover_megatron.membership.records import EXIT_NO_REPLICA, ranges

OWN_END_SECONDS = 3.0
"""A fault of the work strikes many: so long the others may say theirs before they are ended."""
REFUSED_SECONDS = 15.0
"""The same for a refusal, which is every worker's, and each may say another reason."""
TELL_SECONDS = 3.0
"""So long the launcher of a lost worker may say better than others what became of it."""
START_GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL: nothing was trained that could be saved."""
ASK_SECONDS = 2.0
"""How long the coordinator may take to say whether there is a plan."""


@dataclass(eq=False)
class StartUp:
    """The start of a run, which needs all of its workers: what the loss of one means until the training has begun.

    ::

        a worker is lost --asked: is there a plan?--> yes: the training has begun, the others go on
                                       | no
                                       |--killed by a signal--------> the launch ends, on all nodes, at once
                                       `--ended by itself--OWN_END_SECONDS--> the same; the others have said theirs

        a node is lost: its launcher has ended, or its host is silent --asked, as above--> at once

    With ``--max-restarts`` or spares the launch does not end where workers were only killed: all launchers make the
    start again (processes.py), as often as ``LaunchPlan.starts`` says; where spares have the places of its workers
    (``LaunchPlan.spared``), without a lost node, by the word of node 0. A fault of the work would come again.

    Until the coordinator has made the first plan the workers wait for each other in torch's store, in barriers of
    gloo's and NCCL's: for one that has died they would wait for minutes.  So the first to hear of a loss (this launcher
    of a worker's end; the coordinator of a connection's; node 0 of a launcher's) ends the launch.  Nothing was trained
    yet.  A training without a coordinator never begins in this sense: there, any loss at any time ends the launch.
    """

    _loop: EventLoop
    _plan: LaunchPlan
    _table: WorkerTable
    _control: ControlPlane
    _say: Callable[[str], None]
    _go_on_without: Callable[[WorkerProcess, int], None]
    """The training had begun when the worker ended; it had left so many processes behind."""
    _fail_launch: Callable[..., None]
    """End the launch on all nodes: the reason, and the exit code; START_AGAIN: without which nodes."""
    _lost: list[int] = field(default_factory=list)
    """Nodes that are gone."""

    @property
    def under_way(self) -> bool:
        """Whether the launch still needs all of its workers."""
        return self._plan.needs_all and not self._control.agent.planned

    def ended_in_it(self, worker: WorkerProcess) -> bool:
        """Whether ``worker`` was lost while it was needed, for all that is known here."""
        return self.under_way and worker.worker_id < self._plan.world_size and worker.state is not WorkerState.FINISHED

    def worker_lost(self, worker: WorkerProcess, left_behind: int, cause: str) -> None:
        """A worker of this node has ended in it; ``cause``: the last that it said, if that may be why."""
        self._control.when_up_to_date(ASK_SECONDS, partial(self._judge, worker, left_behind, cause))

    def launcher_lost(self, what: str, goes_on: str = "", node: int = 0) -> None:
        """``node`` is lost, ``what`` in words; ``goes_on``: what to say of it where the training has begun."""
        if not self.under_way:
            self._say_of(goes_on)
            return
        if node not in self._lost:
            self._lost.append(node)
        self._control.when_up_to_date(ASK_SECONDS, partial(self._without_launcher, f"{what} is lost", goes_on))

    def _without_launcher(self, text: str, goes_on: str) -> None:
        if not self.under_way:
            self._say_of(goes_on)
            return
        without = (*self._plan.without, *self._lost)
        spared = self._plan.node_rank == 0 and self._plan.spared(without)
        self._fail(text, EXIT_NO_REPLICA, again=spared, without=without)

    def _say_of(self, text: str) -> None:
        if text:
            self._say(text)

    def others_lost(self) -> None:
        """The coordinator does without some of the launch's workers, perhaps of other nodes."""
        theirs = self._control.agent.missing(self._plan.world_size) - {
            worker.worker_id for worker in self._table.launched
        }
        if theirs and self.under_way:
            what = "worker" if len(theirs) == 1 else "workers"
            text = f"{what} {ranges(sorted(theirs))} of another node lost"
            self._loop.call_later(TELL_SECONDS, partial(self._fail, text, EXIT_NO_REPLICA, again=False))

    def run_over(self) -> None:
        """The coordinator has ended the run, or none is reached."""
        if self.under_way and self._control.missed:
            text = f"the coordinator says: {self._control.reason}"
            self._loop.call_later(TELL_SECONDS, partial(self._fail, text, EXIT_NO_REPLICA, again=False))

    def _judge(self, worker: WorkerProcess, left_behind: int, cause: str) -> None:
        if not self.under_way:
            self._go_on_without(worker, left_behind)
            return
        # A refusal stands above in full, and is told once.
        text = messages.worker_lost_at_start(worker, left_behind, "" if worker.exit_code == REFUSED else cause)
        victim = worker.exit_code in NO_FAULT and self._plan.nnodes > 1  # who knows of the cause says it
        if worker.signal is not None or not (victim or any(other.live for other in self._table.launched)):
            self._fail(text)
            return
        wait = REFUSED_SECONDS if worker.exit_code == REFUSED else OWN_END_SECONDS
        if not victim:
            self._say(f"{text}; the training has not begun, and needs it: all end in {wait:g} s")
        self._loop.call_later(wait, partial(self._fail, text))

    def _fail(self, text: str, code: int | None = None, again: bool = True, without: Sequence[int] = ()) -> None:
        """``again``: the launch is complete without the lost, as soon as others have their places; ``without``: nodes
        that the start is to be made without."""
        plan = self._plan
        if not self.under_way:
            return
        if code is None:
            ended = [worker.outcome for worker in self._table.launched if not worker.live]
            code = start_exit_code(ended, plan.fault_tolerant)
        elif not plan.fault_tolerant:
            code = LAUNCH_FAILED
        needs = "the training has not begun, and needs all workers"
        if again and code == EXIT_NO_REPLICA and plan.attempt + 1 < plan.starts:
            times = f"{plan.attempt + 1} of at most {plan.starts - 1}"
            instead = messages.spared(plan, without) if without else ""
            self._fail_launch(f"{text}; {needs}: the start is made again ({times}){instead}", START_AGAIN, without)
            return
        if not plan.fault_tolerant:
            needs = "a training without --recover needs all workers"
        self._fail_launch(f"{text}; {needs}: the launch ends with exit code {code}", code)


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
    """The newest complete checkpoint on the disk of a script with these arguments, in words; None: it saves none."""
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
    """How the launch has ended; the first that there is decides::

        what has stopped the launch (a signal, a refusal, a start that is made again)
        what the coordinator says of the run, unless workers of this node have finished and it was not heard;
            of a run that was finished: what became of the workers of this node after they had left it
        what became of the workers, here and on other nodes (states.py)

    The last checkpoint is named by its files: there may be nobody left who could tell of it.
    """

    _plan: LaunchPlan
    _table: WorkerTable
    _control: ControlPlane
    _peers: Peers
    _start_up: StartUp
    _say: Callable[[str], None]

    def verdict(self) -> int | None:
        """How the coordinator says that the run has ended; None: it does not, or was not heard.

        Asked before the candidates of this launch are ended: the last worker may have told them something just now.
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
            return verdict or self._code_after_training()
        outcomes = [*self._table.outcomes, *self._peers.outcomes]
        if self._start_up.under_way and any(worker.outcome.code for worker in self._table.launched):
            return start_exit_code(outcomes, self._plan.fault_tolerant)
        code = run_exit_code(outcomes, self._plan.fault_tolerant)
        if code == 0 and self._peers.any_lost and not self._plan.fault_tolerant:
            return LAUNCH_FAILED
        return code

    def _code_after_training(self) -> int:
        left, plan = self._control.agent.left, self._plan
        outcomes = [
            outcome
            for outcome in self._table.outcomes
            # A worker that came late and was refused has left, too.
            if outcome.worker_id in left and (outcome.worker_id < plan.world_size or outcome.exit_code != REFUSED)
        ]
        return exit_code_after(outcomes, only_node=plan.nnodes == 1 and not plan.joins)

    def why(self, code: int, verdict: int | None) -> str:
        """Of a launch that was not stopped: why it has ended, in one line."""
        return self._control.reason if verdict == code else messages.ends(self._table.all)

    def tell(self, code: int, verdict: int | None, ended_by: str) -> None:
        """Say how it has ended, with which exit code, from where to go on; ``ended_by``: the signal, if any."""
        self._say(f"{ended_by}{': ' * bool(ended_by)}{messages.ends(self._table.all)}; exit code {code}")
        if verdict == 0 != code:
            self._say(
                "the training was finished; what the script does after it has failed: the logs of the workers tell"
            )
        if verdict is not None and code == verdict != 0:
            self._say(f"the run was ended: {self._control.reason}")
        if code and self._plan.fault_tolerant and (last := last_checkpoint(self._plan.script_args)):
            self._say(f"last checkpoint: {last}")
