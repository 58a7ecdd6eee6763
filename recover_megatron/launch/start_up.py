"""The start of a run, which needs all of its workers: what the loss of one of them means until training has begun.

::

    a worker is lost --asked: is there a plan?--> yes: the training has begun, the others go on
                                   | no
                                   |--killed by a signal--------> the launch ends, on all nodes, at once
                                   `--ended by itself--OWN_END_SECONDS--> the same; by then the others have said theirs

With ``--max-restarts`` or spares the launch does not end where workers were only killed: all launchers make the start
again (processes.py), as often as ``LaunchPlan.starts`` says. A fault of the work would come again, and without a
launcher the launch is not complete.

Until the coordinator has made the first plan the workers wait for each other in torch's store, in barriers of gloo's
and NCCL's: for one that has died they would wait for minutes.  So whoever hears of a loss first (this launcher of a
worker's end; the coordinator of a connection's; node 0 of a launcher's) ends the launch.  Nothing was trained yet.

A training without a coordinator never begins in this sense: there, any loss at any time ends the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from recover_megatron.launch import messages
from recover_megatron.launch.control_plane import ControlPlane
from recover_megatron.launch.loop import EventLoop
from recover_megatron.launch.plan import LaunchPlan
from recover_megatron.launch.processes import START_AGAIN
from recover_megatron.launch.states import LAUNCH_FAILED, REFUSED, WorkerProcess, WorkerState, start_exit_code
from recover_megatron.launch.worker_table import WorkerTable
from recover_megatron.membership.records import EXIT_NO_REPLICA, ranges

OWN_END_SECONDS = 3.0
"""A fault of the work strikes many: so long the others may say theirs before they are ended."""
REFUSED_SECONDS = 15.0
"""The same for a refusal, which is every worker's, and each may say another reason."""
TELL_SECONDS = 3.0
"""So long the launcher of a lost worker may say better than others what became of it."""
GRACE_SECONDS = 3.0
"""From SIGTERM to SIGKILL: nothing was trained that could be saved."""
ASK_SECONDS = 2.0
"""How long the coordinator may take to say whether there is a plan."""


class StartEvents(Protocol):
    """What becomes of a loss.  Called in the main thread."""

    def go_on_without(self, worker: WorkerProcess, left_behind: int) -> None:
        """The training had begun when ``worker`` ended; it had left so many processes behind."""

    def fail_launch(self, reason: str, code: int) -> None:
        """End the launch on all nodes: the reason, and the exit code."""


@dataclass(eq=False)
class StartUp:
    """Made once per launch."""

    _loop: EventLoop
    _plan: LaunchPlan
    _table: WorkerTable
    _control: ControlPlane
    _say: Callable[[str], None]
    _events: StartEvents

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

    def launcher_lost(self, what: str) -> None:
        """Another node, or what all need of node 0, is gone."""
        if self.under_way:
            self._control.when_up_to_date(
                ASK_SECONDS, partial(self._fail, f"{what} is lost", EXIT_NO_REPLICA, again=False)
            )

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
            self._events.go_on_without(worker, left_behind)
            return
        # A refusal stands above in full, and is told once.
        text = messages.worker_lost_at_start(worker, left_behind, "" if worker.exit_code == REFUSED else cause)
        if worker.signal is not None or not any(other.live for other in self._table.launched):
            self._fail(text)
            return
        wait = REFUSED_SECONDS if worker.exit_code == REFUSED else OWN_END_SECONDS
        self._say(f"{text}; the training has not begun, and needs it: all end in {wait:g} s")
        self._loop.call_later(wait, partial(self._fail, text))

    def _fail(self, text: str, code: int | None = None, again: bool = True) -> None:
        """``again``: the launch is complete without the worker, as soon as another one has its place."""
        plan = self._plan
        if self.under_way:
            if not self._plan.fault_tolerant and code is not None:
                code = LAUNCH_FAILED
            ended = [worker.outcome for worker in self._table.launched if not worker.live]
            code = start_exit_code(ended, self._plan.fault_tolerant) if code is None else code
            needs = "the training has not begun, and needs all workers"
            if again and code == EXIT_NO_REPLICA and plan.attempt + 1 < plan.starts:
                times = f"{plan.attempt + 1} of at most {plan.starts - 1}"
                self._events.fail_launch(f"{text}; {needs}: the start is made again ({times})", START_AGAIN)
                return
            if not self._plan.fault_tolerant:
                needs = "a training without --recover needs all workers"
            self._events.fail_launch(f"{text}; {needs}: the launch ends with exit code {code}", code)
