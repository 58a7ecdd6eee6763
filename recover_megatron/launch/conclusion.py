"""End of a launch: ``StartUp`` handles the loss of a worker before the training has begun; ``Conclusion`` chooses the
exit code and logs the final lines after the last worker has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from recover_megatron.launch import messages
from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.nodes.control_plane import ControlPlane
from recover_megatron.launch.nodes.peers import Peers
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
from recover_megatron.network.event_loop import EventLoop

OWN_END_SECONDS = 3.0
"""Seconds between a worker's exit with an error and the stop of the others, which can report errors meanwhile."""
REFUSED_SECONDS = 15.0
"""Seconds between a worker's refusal and the stop of the others, which can report further reasons meanwhile."""
TELL_SECONDS = 3.0
"""Seconds that a launcher waits before it ends the launch because of a worker lost on another node: the launcher of
that node knows the cause and should report it first."""
START_GRACE_SECONDS = 2.0
"""Seconds from SIGTERM to SIGKILL before the training has begun; few, because the workers have nothing to save yet."""
ASK_SECONDS = 2.0
"""Longest time to wait, in seconds, until the coordinator answers whether the first plan exists."""


@dataclass(eq=False)
class StartUp:
    """Ends or repeats the launch if a worker is lost before the training has begun: until then, all are needed.

    ::

        a worker is lost --is there a plan?--> yes: the training has begun, the others continue
                                       | no
                                       |--killed by a signal-------> the launch ends, on all nodes, at once
                                       `--exited--OWN_END_SECONDS--> the launch ends, after the other workers' reports

        a node is lost: its launcher has ended, or its host is silent --no plan yet--> the launch ends at once

    If no worker shows an error of the training script (``start_exit_code``), and the launch has ``--max-restarts`` or
    spares, all launchers repeat the start (processes.py) instead of ending.  After such an error the start is not
    repeated, because the error would recur.  ``LaunchSpec.starts`` is the largest number of starts.  If spares can
    replace the workers of a lost node (``LaunchSpec.spared``), node 0 makes the next start leave that node out.

    Until the coordinator has made the first plan, the workers wait for each other in torch's store and in barriers of
    gloo and NCCL, where they would wait minutes for a dead worker.  So the first process that notices a loss ends the
    launch: a launcher notices the end of its workers, the coordinator notices a closed connection, and node 0 notices a
    lost launcher.  Nothing was trained yet, so no work is lost.  Without a coordinator there is never a plan, so any
    loss ends the launch.
    """

    _loop: EventLoop
    _spec: LaunchSpec
    _table: WorkerTable
    _control: ControlPlane
    _say: Callable[[str], None]
    _go_on_without: Callable[[WorkerProcess, int], None]
    """Callback for a worker that ended after the training began; arguments: the worker, and the number of processes
    that it left behind."""
    _fail_launch: Callable[..., None]
    """Callback that ends the launch on all nodes; arguments: reason, exit code, and for START_AGAIN the nodes to leave
    out."""
    _lost: list[int] = field(default_factory=list)
    """Ranks of the nodes lost before the training began."""

    @property
    def under_way(self) -> bool:
        """Return whether the launch needs all workers and, as far as this launcher knows, there is no plan yet."""
        return self._spec.needs_all and not self._control.agent.planned

    def ended_in_it(self, worker: WorkerProcess) -> bool:
        """Return whether ``worker``, which has ended, was lost while the launch still needed all workers."""
        return self.under_way and worker.worker_id < self._spec.world_size and worker.state is not WorkerState.FINISHED

    def worker_lost(self, worker: WorkerProcess, left_behind: int, cause: str) -> None:
        """End or repeat the launch after the loss of ``worker``, a worker of this node, unless the training has begun.

        ``left_behind``: number of processes that ``worker`` left behind; ``cause``: last line of the worker's output if
        that may explain the loss, else empty.
        """
        self._control.when_up_to_date(ASK_SECONDS, partial(self._judge, worker, left_behind, cause))

    def launcher_lost(self, what: str, notice: str = "", node: int = 0) -> None:
        """End or repeat the launch after the loss of ``node``, unless the training has begun.

        ``what`` describes the node and the cause; ``notice``: line to log if the training has begun, or empty.
        """
        if not self.under_way:
            self._say_of(notice)
            return
        if node not in self._lost:
            self._lost.append(node)
        self._control.when_up_to_date(ASK_SECONDS, partial(self._without_launcher, f"{what} is lost", notice))

    def _without_launcher(self, text: str, notice: str) -> None:
        if not self.under_way:
            self._say_of(notice)
            return
        without = (*self._spec.without, *self._lost)
        spared = self._spec.node_rank == 0 and self._spec.spared(without)
        self._fail(text, EXIT_NO_REPLICA, again=spared, without=without)

    def _say_of(self, text: str) -> None:
        if text:
            self._say(text)

    def others_lost(self) -> None:
        """End the launch if the coordinator counts workers of other nodes as missing before the training has begun."""
        missing_workers = self._control.agent.missing(self._spec.world_size) - {
            worker.worker_id for worker in self._table.launched
        }
        if missing_workers and self.under_way:
            what = "worker" if len(missing_workers) == 1 else "workers"
            text = f"{what} {ranges(sorted(missing_workers))} of another node lost"
            self._loop.call_later(TELL_SECONDS, partial(self._fail, text, EXIT_NO_REPLICA, again=False))

    def run_over(self) -> None:
        """End the launch if the coordinator ended the run before the training began, because workers are missing."""
        if self.under_way and self._control.missed:
            text = f"the coordinator reports: {self._control.reason}"
            self._loop.call_later(TELL_SECONDS, partial(self._fail, text, EXIT_NO_REPLICA, again=False))

    def _judge(self, worker: WorkerProcess, left_behind: int, cause: str) -> None:
        if not self.under_way:
            self._go_on_without(worker, left_behind)
            return
        # A refused worker has printed the reason: do not repeat it.
        text = messages.worker_lost_at_start(worker, left_behind, "" if worker.exit_code == REFUSED else cause)
        victim = worker.exit_code in NO_FAULT and self._spec.nnodes > 1  # another worker reports the cause
        if worker.signal is not None or not (victim or any(other.live for other in self._table.launched)):
            self._fail(text)
            return
        wait = REFUSED_SECONDS if worker.exit_code == REFUSED else OWN_END_SECONDS
        if not victim:
            self._say(f"{text}; the training has not begun and needs this worker: all workers stop in {wait:g} s")
        self._loop.call_later(wait, self._fail, text)

    def _fail(self, text: str, code: int | None = None, again: bool = True, without: Sequence[int] = ()) -> None:
        """End the launch, or make all launchers start again; do nothing if the training has begun meanwhile.

        ``code``: exit code; None to derive it from the ended workers.  ``again``: True if a new start may succeed.
        ``without``: nodes that a new start leaves out.
        """
        spec = self._spec
        if not self.under_way:
            return
        if code is None:
            ended = [worker.outcome for worker in self._table.launched if not worker.live]
            code = start_exit_code(ended, spec.fault_tolerant)
        elif not spec.fault_tolerant:
            code = LAUNCH_FAILED
        needs = "the training has not begun and needs all workers"
        if again and code == EXIT_NO_REPLICA and spec.attempt + 1 < spec.starts:
            times = f"{spec.attempt + 1} of at most {spec.starts - 1}"
            instead = messages.spared(spec, without) if without else ""
            self._fail_launch(f"{text}; {needs}: the launch starts again ({times}){instead}", START_AGAIN, without)
            return
        if not spec.fault_tolerant:
            needs = "a training without --recover needs all workers"
        self._fail_launch(f"{text}; {needs}: the launch ends with exit code {code}", code)


_TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file in the folder of --save, which names the last iteration with a complete checkpoint."""


def save_folder(script_args: Sequence[str]) -> str | None:
    """Return the folder in which a script with these arguments saves; None if it does not save."""
    folder = None
    for at, argument in enumerate(script_args):
        if argument == "--save" and at + 1 < len(script_args):
            folder = script_args[at + 1]
        elif argument.startswith("--save="):
            folder = argument.removeprefix("--save=")
    return folder


def last_checkpoint(script_args: Sequence[str]) -> str | None:
    """Describe the newest complete checkpoint of a script with these arguments; None if it does not save."""
    folder = save_folder(script_args)
    if folder is None:
        return None
    try:
        newest = (Path(folder) / _TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        newest = ""
    return f"iteration {newest} in {folder}" if newest else f"no complete checkpoint in {folder}"


@dataclass(eq=False)
class Conclusion:
    """Chooses the exit code of the launch and logs the final lines.  The first of these sources that exists decides.

        the event that has stopped the launch (a signal, a refusal, a new start)
        the exit code that the coordinator has decided (ignored if no coordinator was reached and workers of this node
            have finished); if it is 0, the run was finished: then the exit codes of this node's workers that had left
            the run normally decide
        the exit codes of the workers, here and on other nodes (states.py)

    The iteration of the last checkpoint is read from the disk, because no process may be left that could report it.
    """

    _spec: LaunchSpec
    _table: WorkerTable
    _control: ControlPlane
    _peers: Peers
    _start_up: StartUp
    _say: Callable[[str], None]

    def verdict(self) -> int | None:
        """Return the exit code that the coordinator has decided; None if it has decided none, or was not reached.

        Call it before this launch's candidates are stopped: the last worker may have just reported to one of them.
        """
        verdict = self._control.verdict()
        finished = any(worker.state is WorkerState.FINISHED for worker in self._table.all)
        if verdict is not None and not self._control.end_reported and finished:
            self._say(
                f"the coordinator did not report the end ({self._control.reason}); workers of this node have finished "
                "the run"
            )
            return None
        self._control.linger()
        return verdict

    def exit_code(self, stopped: int | None, verdict: int | None) -> int:
        """Return the exit code of the launcher.  ``stopped``: exit code of a launch that was stopped, else None.

        ``verdict``: result of ``self.verdict()``.
        """
        if stopped is not None:
            return stopped
        if verdict is not None:
            return verdict or self._code_after_training()
        outcomes = [*self._table.outcomes, *self._peers.outcomes]
        if self._start_up.under_way and any(worker.outcome.code for worker in self._table.launched):
            return start_exit_code(outcomes, self._spec.fault_tolerant)
        code = run_exit_code(outcomes, self._spec.fault_tolerant)
        if code == 0 and self._peers.any_lost and not self._spec.fault_tolerant:
            return LAUNCH_FAILED
        return code

    def _code_after_training(self) -> int:
        left, spec = self._control.agent.left, self._spec
        outcomes = [
            outcome
            for outcome in self._table.outcomes
            # A refused newcomer has also left the run normally, but its exit code is no error of the run.
            if outcome.worker_id in left and (outcome.worker_id < spec.world_size or outcome.exit_code != REFUSED)
        ]
        return exit_code_after(outcomes, only_node=spec.nnodes == 1 and not spec.coordinators)

    def why(self, code: int, verdict: int | None) -> str:
        """Return one line with the reason why a launch that was not stopped has ended; ``code``: its exit code."""
        return self._control.reason if verdict == code else messages.ends(self._table.all)

    def tell(self, code: int, verdict: int | None, ended_by: str) -> None:
        """Log how the workers have ended, the exit code and the last checkpoint.

        ``ended_by``: text that names the signal that stopped the launch; empty if no signal stopped it.
        """
        self._say(f"{ended_by}{': ' * bool(ended_by)}{messages.ends(self._table.all)}; exit code {code}")
        if verdict == 0 != code:
            self._say("the training was finished, but the script failed afterwards: see the logs of the workers")
        if verdict is not None and code == verdict != 0:
            self._say(f"the run was ended: {self._control.reason}")
        if code and self._spec.fault_tolerant and (last := last_checkpoint(self._spec.script.args)):
            self._say(f"last checkpoint: {last}")
