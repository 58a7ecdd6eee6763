"""The supervisor: one launch on one node, from the first process to the last.

Its states, and those of a worker, are drawn in states.py.  Everything here runs in the main thread, as callbacks of one
event loop, so no two of them overlap.

A worker's end, step by step: its pidfd becomes readable while it is still a zombie, so that its pid, process group and
session cannot mean others yet; what is left of it is killed; only then it is reaped, its output drained, its end said.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping

from recover_megatron.arguments import COORDINATOR_VARIABLE
from recover_megatron.launch import messages, newcomers
from recover_megatron.launch.candidates import Candidates
from recover_megatron.launch.control_plane import ControlPlane, has_secret
from recover_megatron.launch.crew import Crew
from recover_megatron.launch.exit_codes import LAUNCH_FAILED, REFUSED, run_exit_code, start_exit_code
from recover_megatron.launch.folder_lock import FolderLock
from recover_megatron.launch.last_checkpoint import last_checkpoint
from recover_megatron.launch.peers import PeerEvents, Peers
from recover_megatron.launch.plan import LaunchPlan, sets_omp_threads
from recover_megatron.launch.processes import (
    become_subreaper,
    find_launch,
    find_worker,
    has_children,
    kill_found,
    kill_group,
    kill_until_none_left,
)
from recover_megatron.launch.start_up import GRACE_SECONDS as START_GRACE_SECONDS
from recover_megatron.launch.start_up import StartEvents, StartUp
from recover_megatron.launch.states import LIVE, LaunchState, Worker, WorkerState
from recover_megatron.launch.warden import Warden
from recover_megatron.log_writer import PATIENCE_SECONDS, flush_all
from recover_megatron.membership.auth import SECRET_VARIABLE, find_secret
from recover_megatron.membership.errors import SecretError

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Batch systems send these ahead of a time limit; they are meant for the workers."""
LAST_SWEEP_SECONDS = 10.0
UNKILLABLE_SECONDS = 10.0
OUTPUT_SECONDS = 5.0
"""At the end, how long to wait for a reader of our output that reads nothing."""


class Supervisor(Crew):
    """Made once per launch; ``run`` returns the exit code."""

    def __init__(
        self,
        plan: LaunchPlan,
        listener: socket.socket | None,
        inherited: Mapping[str, str],
        lock: FolderLock | None = None,
    ) -> None:
        """``lock``: of the log folder; a node that joins a launch makes sure of it when it knows the run's id."""
        super().__init__(plan, inherited, lock)
        self._state = LaunchState.STARTING
        self._code: int | None = None
        self._stop_signal_at = 0.0
        start_events = StartEvents(
            lambda: not self._never_planned(),
            self._ask_coordinator,
            self._launched,
            self._after_end,
            self._console.say,
            self._fail_launch,
        )
        self._start_up = StartUp(self._loop, plan, start_events)
        peer_events = PeerEvents(
            self._start_workers_if_ready,
            self._start_control_plane,
            self._stop_with_peers,
            self._start_up.launcher_lost,
            self._finish,
            self._console.say,
        )
        secret = find_secret(inherited) if plan.nnodes > 1 and has_secret(inherited) else None
        self._peers = Peers(self._loop, plan, secret, listener, peer_events)

    def run(self) -> int:
        """Supervise until the end.  Returns the exit code of recover-run."""
        self._loop.handle_signals(self._handled_signals(), self._on_signal)
        # Children from before (of a shell that became recover-run by exec) are none of ours; once there are any, an
        # orphan that we inherit might be theirs.
        self._owns_all_children = not has_children()
        become_subreaper()
        self._warden = Warden(self._loop, self._plan.launch_id, self._on_warden_replaced)
        self._console.say(messages.opening(self._plan))
        if sets_omp_threads(self._plan, self._inherited):
            self._console.say("OMP_NUM_THREADS is set to 1 for each worker; set it yourself to choose")
        self._beat()
        self._peers.join()
        if self._plan.nnodes == 1:
            self._start_control_plane(None)
            if self._plan.joins and self._control:
                self._control.when_led(self._plan.rendezvous_timeout, lambda: self._loop.call_from_thread(self._join))
        elif not self._plan.control_plane:
            self._console.say(messages.NO_CONTROL_PLANE)
        if self._state is LaunchState.STARTING:
            self._start_workers_if_ready()
            self._peers.serve_store()
        self._write_workers()
        while self._state is not LaunchState.ENDED:
            self._loop.run_once()
            self._write_workers()
            self._reap_orphans()
        return self._close()

    # --- starting ---

    def _start_control_plane(self, candidates: Candidates | None) -> None:
        """``candidates``: of a launch over several nodes, whose workers wait for this."""
        if self._state is not LaunchState.STARTING:
            return
        try:
            self._control = ControlPlane(
                self._plan,
                self._inherited,
                self._on_kill_order,
                self._loop,
                self._console.say,
                self._on_told,
                candidates,
                self._on_revoke,
                self._on_note,
            )
        except SecretError as error:
            self._stop(str(error), REFUSED)
        except OSError as error:
            self._stop(f"the coordinator cannot be started: {error}", LAUNCH_FAILED)
        else:
            self._environment |= self._control.variables
            self._keep_secret(self._control.variables.get(SECRET_VARIABLE))
            if self._plan.has_newcomers:
                self._control.when_decided(lambda: self._loop.call_from_thread(self._on_run_over))
            if self._plan.fault_tolerant and not self._plan.joins and has_secret(self._inherited):
                coordinators = self._control.variables[COORDINATOR_VARIABLE]
                self._console.say(messages.how_to_join(self._plan, coordinators))
            self._start_workers_if_ready()

    def _start_workers_if_ready(self) -> None:
        """Start the workers once this node takes part and has all that they need; once."""
        if not self._peers.joined or self._state is not LaunchState.STARTING:
            return
        if not self._workers:  # a launcher that joins a run does not know yet which ids are free
            return
        if self._plan.control_plane and self._control is None:
            return
        if reason := self._share_folder(self._peers.run_id):
            self._stop(reason, REFUSED)
            return
        for worker in self._workers.values():
            try:
                self._run_worker(worker)
            except OSError as error:
                self._stop(f"worker {worker.worker_id} cannot be started: {error}", LAUNCH_FAILED)
                return
        self._peers.serve_store()

    def _run_worker(self, worker: Worker) -> None:
        """Start ``worker`` and watch it.  Raises OSError if it cannot be started."""
        pid, worker_id = self._start_worker(worker, self._peers.run_id), worker.worker_id
        pidfd = os.pidfd_open(pid)
        worker.pid, worker.started, worker.state = pid, time.time(), WorkerState.RUNNING
        self._changed = True
        self._pidfds[worker_id] = pidfd
        self._warden.add_session(pid)
        if self._control:
            self._control.spawned(worker_id, pid)
        # From the next round of the loop on: whoever sees a worker's output finds it in workers.json, too.
        self._console.read(self._streams[worker_id])
        self._loop.watch(pidfd, lambda: self._on_worker_exit(worker))
        if self._state is LaunchState.STOPPING:
            self._signal_worker(worker, signal.SIGTERM)
        elif all(other.state is not WorkerState.STARTING for other in self._workers.values()):
            self._state = LaunchState.RUNNING
        if self._over:
            self._end_late_ones()

    # --- a worker's end ---

    def _on_worker_exit(self, worker: Worker) -> None:
        assert worker.pid is not None
        self._loop.unwatch(self._pidfds[worker.worker_id])
        left_behind = self._kill_remains(worker.worker_id, worker.pid)
        _, status = os.waitpid(worker.pid, 0)
        self._on_worker_reaped(worker, os.waitstatus_to_exitcode(status), left_behind)

    def _kill_remains(self, worker_id: int, pid: int) -> int:
        """Kill what is left of a worker that has ended and is not reaped yet.  Returns how many processes it was."""
        kill_group(pid)
        killed = kill_found(lambda: find_worker(self._plan.launch_id, worker_id, pid, self._spared()))
        return len({process.pid for process in killed} - {pid})

    def _on_worker_reaped(self, worker: Worker, status: int, left_behind: int) -> None:
        """It is gone: ``status`` is its exit code or minus its signal."""
        assert worker.pid is not None
        worker_id = worker.worker_id
        worker.end(status, time.time())
        self._changed = True
        if self._control:
            self._control.ended(worker_id, f"exit code {status}" if status >= 0 else signal.Signals(-status).name)
        self._warden.remove_session(worker.pid)
        os.close(self._pidfds.pop(worker_id))
        cause = self._close_streams(worker_id)
        self._orphans = True
        if self._state is not LaunchState.STOPPING and self._start_up.ended_in_it(worker):
            self._start_up.worker_lost(worker, left_behind, cause if worker.state is WorkerState.FAILED else "")
        else:
            self._after_end(worker, left_behind)

    def _after_end(self, worker: Worker, left_behind: int) -> None:
        """Say how a worker has ended, and what comes after."""
        successor = self._successor_of(worker) if self._can_start_more else None
        waited_for = (WorkerState.RUNNING,) if self._state is LaunchState.STOPPING else LIVE
        others = sum(other.state in waited_for for other in self._workers.values() if other is not successor)
        if worker.state is not WorkerState.FINISHED or left_behind:
            condemned = self._control.condemned if self._control else frozenset()
            killed = sum(other.live and other.worker_id in condemned for other in self._workers.values())
            self._console.say(messages.worker_ended(worker, others - killed, left_behind, successor, killed))
        if successor is not None:
            self._start_successor(successor)
        elif others == 0:
            self._own_workers_ended()
        elif not self._plan.joins and not any(other.live for other in self._launched()) and self._never_planned():
            self._on_run_over()

    # --- a loss before the training has begun ---

    def _on_revoke(self) -> None:
        """The coordinator wants a new epoch.  Called in another thread."""
        self._loop.call_from_thread(
            lambda: self._start_up.others_lost(self._control.missing if self._control else frozenset())
        )

    def _fail_launch(self, reason: str, code: int) -> None:
        if self._state not in (LaunchState.STOPPING, LaunchState.ENDED):
            self._peers.fail(reason, code)
            self._stop(reason, code, START_GRACE_SECONDS)

    def _stop_with_peers(self, reason: str, code: int) -> None:
        """Another launcher has ended the launch, or it cannot be made."""
        self._stop(reason, code, START_GRACE_SECONDS if self._start_up.under_way else None)

    # --- newcomers ---

    @property
    def _can_start_more(self) -> bool:
        return self._state is LaunchState.RUNNING

    def _join(self) -> None:
        """The run that this launcher joins has a coordinator, or none was reached in time."""
        if self._state is not LaunchState.STARTING:
            return
        assert self._control is not None
        if not self._control.led:
            waited = f"none answered as the leader within {self._plan.rendezvous_timeout:g} s (--rendezvous-timeout)"
            self._stop(f"the run's coordinators are not reached: {self._control.complaint or waited}", LAUNCH_FAILED)
            return
        workers = newcomers.joined(self._plan, self._control.taken, secrets.randbelow)
        self._workers = {worker.worker_id: worker for worker in workers}
        self._start_workers_if_ready()

    def _start_successor(self, worker: Worker) -> None:
        try:
            self._run_worker(worker)
        except OSError as error:
            self._console.say(f"worker {worker.worker_id} cannot be started: {error}")
            worker.end(-signal.SIGKILL, time.time())
            if not any(other.live for other in self._workers.values()):
                self._own_workers_ended()

    # --- after the last worker ---

    def _own_workers_ended(self) -> None:
        if self._state is LaunchState.STOPPING:
            self._end()
        elif self._peers.own_workers_ended(self._outcomes()):
            self._state = LaunchState.WAITING
        else:
            self._finish()

    def _finish(self) -> None:
        """Nobody waits for this launcher; its candidate and its exit code are those of the run, which may go on."""
        others = self._plan.nnodes > 1 or bool(self._plan.joins)
        if self._control and others and self._control.undecided:
            self._state = LaunchState.WAITING
            self._console.say(
                "the workers of this node have ended; staying until the coordinator says how the run ends"
            )
            self._control.when_decided(lambda: self._loop.call_from_thread(self._end))
        else:
            self._end()

    # --- stopping ---

    @staticmethod
    def _handled_signals() -> list[int]:
        signals: list[int] = [signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, *PASSED_ON]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            signals.append(signal.SIGHUP)
        return signals

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._orphans = True
            return
        if number in PASSED_ON:
            for worker in self._running():
                self._signal_worker(worker, number)
            return
        if self._state is not LaunchState.STOPPING:
            name = signal.Signals(number).name
            self._stop_signal_at = time.monotonic()
            if self._control:
                self._control.stopping(number)
            self._stop(f"{name} received", 128 + number)
        elif self._stop_signal_at == 0.0:
            self._stop_signal_at = time.monotonic()  # it was stopping for another reason: this signal is the first
        elif number != signal.SIGHUP or time.monotonic() - self._stop_signal_at > 1.0:
            # A closed terminal sends SIGHUP twice, by the kernel and by the shell: that is one wish, not two.
            self._console.say("second signal: killing at once")
            self._kill_everything()

    def _stop(self, reason: str, code: int, grace: float | None = None) -> None:
        """Ask all workers to end, and see to it that they do within ``grace`` seconds (None: --grace-seconds).

        The first code given stands.
        """
        if self._state in (LaunchState.STOPPING, LaunchState.ENDED):
            return
        self._state = LaunchState.STOPPING
        self._code = code
        running = self._running()
        grace = self._plan.grace_seconds if grace is None else min(grace, self._plan.grace_seconds)
        then = f": SIGTERM to {messages.count(len(running))}, SIGKILL after {grace:g} s"
        self._console.say(reason + (then if running else ""))
        self._loop.call_later(grace, self._kill_everything)
        for worker in running:
            self._signal_worker(worker, signal.SIGTERM)
        if not running:
            self._own_workers_ended()

    def _kill_everything(self) -> None:
        running = self._running()
        if running:
            ids = messages.ranges([worker.worker_id for worker in running])
            self._console.say(f"SIGKILL to {'worker' if len(running) == 1 else 'workers'} {ids}")
        for worker in running:
            self._signal_worker(worker, signal.SIGKILL)
        self._loop.call_later(UNKILLABLE_SECONDS, self._give_up)

    def _give_up(self) -> None:
        """A worker that SIGKILL does not end is blocked in the kernel; its log of states says "killed" all the same."""
        if self._state is LaunchState.STOPPING:
            self._end()

    def _end(self) -> None:
        self._state = LaunchState.ENDED

    # --- other processes of ours ---

    def _on_warden_replaced(self, killed: int) -> None:
        self._console.say(f"the warden (pid {killed}) was killed; a new one (pid {self._warden.pid}) took its place")

    # --- the end ---

    def _close(self) -> int:
        """Nothing of the launch is left after this but the store, which ends with the process."""
        # Before the sweep: that ends the coordinators, too, and the last worker may have told them something just now.
        verdict = self._verdict() if self._control and self._code is None else None
        if self._control:
            self._control.end_candidates()
        for worker in self._workers.values():
            if worker.live:
                worker.end(-signal.SIGKILL, time.time())
                self._changed = True
        subreaper = os.getpid() if self._owns_all_children else None
        left = kill_until_none_left(
            lambda: find_launch(self._plan.launch_id, (), self._spared(), subreaper), timeout=LAST_SWEEP_SECONDS
        )
        if left:
            self._console.say(
                f"these processes cannot be killed (blocked in the kernel): {[item.pid for item in left]}"
            )
        self._write_workers()
        self._finish_files()
        code = self._exit_code(verdict)
        if any(worker.pid is not None for worker in self._workers.values()):
            self._console.say(messages.summary(list(self._workers.values()), code))
            if self._control and verdict is not None and code == verdict != 0:
                self._console.say(f"the run was ended: {self._control.reason}")
            if code and self._plan.fault_tolerant and (last := last_checkpoint(self._plan.script_args)):
                self._console.say(f"last checkpoint: {last}")
        self._peers.settle()
        self._flush_output()
        flush_all(self._written, PATIENCE_SECONDS)  # what came in the meantime
        if self._control:
            self._control.close()
        self._warden.finish()
        self._loop.close()
        return code

    def _verdict(self) -> int | None:
        """How the coordinator says that the run has ended."""
        assert self._control is not None
        verdict = self._control.verdict()
        if (
            verdict is not None
            and not self._control.told
            and any(worker.state is WorkerState.FINISHED for worker in self._workers.values())
        ):
            self._console.say(
                f"the end was not heard from the coordinator ({self._control.reason}); workers of this node have "
                "finished the run"
            )
            return None
        if self._plan.nnodes > 1:
            self._control.linger()
        return verdict

    def _exit_code(self, verdict: int | None) -> int:
        if self._code is not None:
            return self._code
        if verdict is not None:
            return verdict
        if self._start_up.under_way and any(worker.outcome.code for worker in self._launched()):
            return start_exit_code([*self._outcomes(), *self._peers.outcomes], self._plan.fault_tolerant)
        code = run_exit_code([*self._outcomes(), *self._peers.outcomes], self._plan.fault_tolerant)
        if code == 0 and self._peers.any_lost and not self._plan.fault_tolerant:
            return LAUNCH_FAILED
        return code

    def _flush_output(self) -> None:
        """Wait until our own reader has taken everything, as long as it takes anything; after a stop, not for long."""
        given_up: list[bool] = []

        def look(before: int) -> None:
            written = self._console.written
            if written == before or self._code is not None:
                given_up.append(True)
            else:
                self._loop.call_later(OUTPUT_SECONDS, lambda: look(written))

        written = self._console.written
        self._loop.call_later(OUTPUT_SECONDS, lambda: look(written))
        self._state = LaunchState.STOPPING  # a signal from here on gives up the output
        self._stop_signal_at = 0.0
        while not self._console.flushed and not given_up and self._stop_signal_at == 0.0:
            self._loop.run_once()
