"""Supervisor of one node's launch: decides when workers are started, replaced and stopped.

states.py draws the states of a launch and of a worker.  All code of this module runs in the main thread, as callbacks
of one event loop, so no two callbacks overlap.  ``launch/__init__.py`` lists the modules that carry out the decisions.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
import traceback
from collections.abc import Sequence

from recover_megatron.launch import messages
from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.conclusion import START_GRACE_SECONDS, Conclusion, StartUp
from recover_megatron.launch.nodes.addresses import Candidates
from recover_megatron.launch.nodes.control_plane import ControlPlane
from recover_megatron.launch.nodes.hosted import ExporterProcess
from recover_megatron.launch.nodes.peers import Peers
from recover_megatron.launch.workers import successors
from recover_megatron.launch.workers.dying import Ending
from recover_megatron.launch.workers.environment import WorkerEnvironment, sets_omp_threads
from recover_megatron.launch.workers.log_folder import FolderLock, LogFolder
from recover_megatron.launch.workers.output import Console, flush
from recover_megatron.launch.workers.processes import START_AGAIN, Subreaper, leave_out
from recover_megatron.launch.workers.reaper import Reaper
from recover_megatron.launch.workers.signals import LaunchSignals
from recover_megatron.launch.workers.states import (
    LAUNCH_FAILED,
    NO_FAULT,
    REFUSED,
    LaunchState,
    WorkerProcess,
    WorkerState,
)
from recover_megatron.launch.workers.successors import LateNewcomers, Successors
from recover_megatron.launch.workers.worker_table import Shutdown, WorkerTable, cause_of
from recover_megatron.membership.records import SecretError
from recover_megatron.network.event_loop import EventLoop
from recover_megatron.variables import COORDINATOR_VARIABLE, FIRST_START_VARIABLE, SECRET_FILE_VARIABLE, SECRET_VARIABLE

FAULT_SECONDS = 0.2


class Supervisor:
    """State machine of a launch; ``run`` supervises the launch and returns its exit code.

    The other public methods are callbacks, most of them of ``Orders``, ``PeerEvents`` and ``SignalEvents``.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        listener: socket.socket | None,
        lock: FolderLock | None = None,
        other_locks: Sequence[FolderLock] = (),
    ) -> None:
        """Create all parts of the launch and start the reaper; no worker is started yet.

        ``listener``: the store's socket, on node 0; ``lock``: lock of the log folder; ``other_locks``: locks of the
        script's folders.  A node other than 0 takes the locks after it has received the run's id from node 0.
        """
        self._spec = spec
        self._state = LaunchState.STARTING
        self._code: int | None = None
        """Exit code if the launch was stopped (START_AGAIN before a new start); None if it was not stopped."""
        self._why = ""
        """Reason why the launch was stopped; empty if it was not stopped."""
        self._ended_by = ""
        """Log text that names the signal that stopped the launch; empty if no signal stopped it."""
        self._early: dict[int, tuple[WorkerProcess, Ending]] = {}
        """Worker id -> worker that was dying before this launcher had received a plan, and how that worker ended."""
        self._faulty = False
        """True if an unexpected exception of this launcher has been logged."""
        self._loop = EventLoop()
        self._console = Console(self._loop, spec.world_size - 1, spec.log_dir, spec.log_format, spec.node_name)
        say = self._console.say
        self._signals = LaunchSignals(self._loop, self)
        self._subreaper = Subreaper()
        self._reaper = Reaper(self._loop, spec.launch_id, say)
        self._folder = LogFolder(spec.log_dir, lock, self._loop, say, other_locks)
        self._environment = WorkerEnvironment(spec, say, lambda: self._control.variables, lambda: self._peers.run_id)
        self._table = WorkerTable(
            spec, self._loop, self._console, self._folder, self._reaper, self.worker_exited, self.worker_dying
        )
        self._successors = Successors(
            spec, self._loop, self._table, say, self._start_tested, self._left_out, self._environment.of
        )
        self._control = ControlPlane(spec, self._loop, say, self)
        self._exporter = ExporterProcess(spec, self._loop, say)
        self._late = LateNewcomers(spec, self._loop, self._table, self._control, say)
        self._start_up = StartUp(
            self._loop, spec, self._table, self._control, say, self.continue_without, self.fail_launch
        )
        secret = spec.secret() if spec.nnodes > 1 else None
        self._peers = Peers(self._loop, spec, secret, listener, self._start_up.launcher_lost, say, self)
        self._shutdown = Shutdown(self._loop, self._table, say, self._give_up)
        self._conclusion = Conclusion(spec, self._table, self._control, self._peers, self._start_up, say)

    def run(self) -> int:
        """Supervise the workers until the launch has ended; return the exit code of recover-run."""
        self._console.say(messages.opening(self._spec))
        if sets_omp_threads(self._spec):
            self._console.say("OMP_NUM_THREADS is set to 1 for each worker; set it yourself for another value")
        if not self._spec.control_plane:
            self._console.say(messages.NO_CONTROL_PLANE)
        self._successors.begin(self._environment.shared, self.start_workers_if_ready)
        self._table.add(successors.launched(self._spec))
        self._peers.join()
        if self._spec.nnodes == 1:
            self.start_control_plane(None)
        if self._state is LaunchState.STARTING:
            self.start_workers_if_ready()
            self._peers.serve_store()
        self._write_workers()
        while self._state is not LaunchState.ENDED:
            try:
                self._loop.run_once()
                self._write_workers()
                self._subreaper.reap()
            except Exception:
                if self._state not in (LaunchState.RUNNING, LaunchState.WAITING):
                    raise
                self._bear()
        return self._close()

    def _bear(self) -> None:
        """Log an unexpected exception and let the workers continue, but replace no lost worker from now on."""
        if not self._faulty:
            self._faulty = True
            self._console.say(f"{traceback.format_exc().rstrip()}\n{messages.OWN_FAULT}")
        self._successors.stop()
        self._table.abandon([worker for worker in self._table.live if worker.pid is None])
        if self._state is LaunchState.RUNNING and not self._table.live:
            self._own_workers_ended()
        time.sleep(FAULT_SECONDS)  # a callback that fails again and again must not use a full core

    def _write_workers(self) -> None:
        """Update workers.json, once for all changes of one iteration of the event loop."""
        if self._table.changed and self._peers.joined:
            self._table.changed = not self._folder.write_workers(self._peers.run_id, self._table.all)

    # --- starting ---

    def start_control_plane(self, candidates: Candidates | None) -> None:
        """Open the control plane, then start the workers.  ``candidates``: None for a launch on one node."""
        if self._state is not LaunchState.STARTING:
            return
        try:
            self._control.open(candidates)
        except SecretError as error:
            self._stop(str(error), REFUSED)
            return
        except OSError as error:
            self._stop(f"the coordinator cannot be started: {error}", LAUNCH_FAILED)
            return
        variables = self._control.variables
        self._exporter.start(variables)
        if SECRET_VARIABLE in variables:
            self._folder.keep_secret(variables[SECRET_VARIABLE])
        elif not self._spec.coordinators and SECRET_FILE_VARIABLE not in self._spec.environ:
            self._folder.forget_secret()
        if self._spec.has_newcomers:
            self._control.when_decided(self._run_over)
        if self._spec.needs_all:
            self._control.when_decided(self._start_up.run_over)
        if self._spec.coordinators:
            self._control.when_led(self._spec.rendezvous_timeout, self._join_run)
        elif self._spec.fault_tolerant and self._spec.has_secret:
            self._console.say(messages.how_to_join(self._spec, variables[COORDINATOR_VARIABLE]))
        self.start_workers_if_ready()

    def _run_over(self) -> None:
        if not self._start_up.under_way:  # during the start, StartUp stops all workers instead
            self._late.run_over()
        self._successors.run_over()

    def _join_run(self) -> None:
        """Start the workers of a launcher with --join, or stop it if the run has ended or no leader answered."""
        if self._state is not LaunchState.STARTING:
            return
        if not self._control.agent.led and (end := self._control.found_ended):
            self._stop(messages.no_run_to_join(*end), end[0])
            return
        if not self._control.agent.led:
            waited = f"no leader answered within {self._spec.rendezvous_timeout:g} s (--rendezvous-timeout)"
            self._stop(f"the run's coordinators are unreachable: {self._control.agent.out or waited}", LAUNCH_FAILED)
            return
        self._table.add(successors.joined(self._spec, self._control.agent.taken, secrets.randbelow))
        self.start_workers_if_ready()

    def start_workers_if_ready(self) -> None:
        """Start the workers if node 0 has admitted this node and the coordinators are known, else do nothing.

        Stop the launch if another run uses a folder of this run.
        """
        if self._state is not LaunchState.STARTING or not self._peers.joined:
            return
        if not self._table.all:  # this launcher joins a run, and does not know yet which worker ids are free
            return
        if self._successors.fork_server.importing or (self._spec.control_plane and not self._control.is_open):
            return
        if reason := self._folder.share(self._peers.run_id):
            self._stop(reason, REFUSED)
            return
        for worker in self._table.all:
            try:
                self._start_worker(worker)
            except OSError as error:
                self._stop(f"worker {worker.worker_id} cannot be started: {error}", LAUNCH_FAILED)
                return
        self._state = LaunchState.RUNNING
        self._peers.serve_store()

    def _start_worker(self, worker: WorkerProcess) -> None:
        """Start the process of ``worker``.  Raises OSError."""
        pid = self._table.start(worker, self._environment.of(worker), self._successors.take)
        self._control.agent.spawned(worker.worker_id, pid)
        self._late.started(worker)

    # --- a worker's end ---

    def worker_dying(self, worker: WorkerProcess, end: Ending) -> None:
        """Report the death of ``worker`` to the coordinator before its process has ended, if the training has begun.

        ``worker_exited`` is called later, when the process has ended.  The first plan may reach a worker before it
        reaches this launcher: ``epoch_formed`` reports a death that happens in between.
        """
        if not self.run_continues():
            self._early[worker.worker_id] = worker, end
            return
        try:
            how = self._table.fence(worker, end)
        except OSError:
            return  # SIGKILL could not be sent: the worker may still be running
        self._control.agent.ended(worker.worker_id, how)
        if end.writes_core or end.must_kill:
            line, note = messages.writes_core(worker, end) if end.writes_core else messages.fenced(worker)
            self._table.note(worker.worker_id, note)
            self._console.say(line)

    def worker_exited(self, worker: WorkerProcess) -> None:
        self._early.pop(worker.worker_id, None)
        left_behind = self._table.reap(worker)
        self._control.agent.ended(worker.worker_id, worker.how)
        cause = cause_of(worker, self._table.close(worker))
        if self._state is not LaunchState.STOPPING and self._start_up.ended_in_it(worker):
            self._start_up.worker_lost(worker, left_behind, cause)
        else:
            self.continue_without(worker, left_behind, cause if worker.state is WorkerState.KILLED else "")

    def continue_without(self, worker: WorkerProcess, left_behind: int, cause: str = "") -> None:
        """Log the end of ``worker`` and start its replacement, if any; finish if no worker of this node is left."""
        successor = None
        if self._state is LaunchState.RUNNING and self._control.under_way:
            had_place = worker.worker_id in self._control.agent.planned
            successor = self._successors.of(worker, had_place=had_place)
        stopping = self._state is LaunchState.STOPPING
        others = [other for other in (self._table.running if stopping else self._table.live) if other is not successor]
        if self._is_news(worker, left_behind):
            condemned = sum(
                other.live and other.worker_id in self._control.agent.condemned for other in self._table.all
            )
            ending = stopping or self._control.agent.out is not None
            tests, going_on = bool(self._spec.device_test_argv), None if ending else len(others) - condemned
            line = messages.worker_ended(worker, going_on, left_behind, successor, condemned, cause, tests_device=tests)
            self._console.say(line)
        if self._spec.elastic and "MASTER_ADDR" in self._table.last_words.get(worker.worker_id, ""):
            self._console.say(messages.NO_PROCESS_GROUP)
        if successor is not None:
            self._successors.start(successor)
        elif not others:
            self._own_workers_ended()
        elif (
            not self._spec.coordinators
            and not self._control.agent.planned
            and not any(w.live for w in self._table.launched)
        ):
            self._late.run_over()

    def _is_news(self, worker: WorkerProcess, left_behind: int) -> bool:
        """Return whether to log the end of ``worker``; usually False if it finished or this launcher stopped it."""
        if worker.state is WorkerState.FINISHED:
            return bool(left_behind) and not self._spec.fault_tolerant  # Megatron's helpers are no news
        victim = self._start_up.under_way and worker.exit_code in NO_FAULT  # the cause was logged
        ordered = self._state is LaunchState.STOPPING and (victim or worker.signal in (signal.SIGTERM, signal.SIGKILL))
        return not ordered and not self._late.already_logged(worker)

    def _start_tested(self, worker: WorkerProcess) -> None:
        """Start a replacement worker; its device has passed the test, if a test is configured.  Raises OSError."""
        if self._state is LaunchState.RUNNING:
            self._start_worker(worker)

    def _left_out(self) -> None:
        if self._state is LaunchState.RUNNING and not self._table.live:
            self._own_workers_ended()

    def evict(self, worker_id: int, reason: str) -> None:
        worker = self._table.running_worker(worker_id)
        if worker is not None:
            self._successors.evict(worker_id)
            self._table.note(worker_id, f"{messages.EVICTED}: {reason}")
            alone = "; it is not replaced: its host or device may need a check" * bool(self._spec.max_restarts)
            self._console.say(f"worker {worker_id} is evicted from the run ({reason}): killing it{alone}")
            self._table.signal([worker], signal.SIGKILL)

    def noted(self, worker_id: int, text: str) -> None:
        self._table.note(worker_id, text)

    def draining(self, stays: bool) -> None:
        if self._successors.stop(not stays):
            self._console.say(messages.STAYS if stays else messages.DRAINING)

    def epoch_formed(self) -> None:
        early, self._early = self._early, {}
        for worker, end in early.values():
            self.worker_dying(worker, end)
        if self.run_continues():
            self._successors.prepare(self._control.agent.planned)

    def epoch_wanted(self) -> None:
        self._start_up.others_lost()

    def _own_workers_ended(self) -> None:
        self._successors.end_waiting()
        self._signals.handle_pending()  # SLURM sends a signal to all processes: it may be what has ended the workers
        if self._state in (LaunchState.STOPPING, LaunchState.ENDED):
            self._end()
        elif self._spec.coordinators and all(outcome.exit_code == REFUSED for outcome in self._table.outcomes):
            self._stop("the run has refused all workers of this node", REFUSED)
        elif self._peers.own_workers_ended(self._table.outcomes):
            self._state = LaunchState.WAITING
        else:
            self.peers_ended()

    def peers_ended(self) -> None:
        """End the launch; on several nodes, first wait for the end of the run, which decides the exit code and may need
        this node's candidate."""
        if (self._spec.nnodes > 1 or self._spec.coordinators) and self._control.undecided:
            self._state = LaunchState.WAITING
            self._console.say(
                "the workers of this node have ended; waiting until the coordinator reports how the run ends"
            )
            self._control.when_decided(self._end)
        else:
            self._end()

    def _end(self) -> None:
        self._state = LaunchState.ENDED

    # --- stopping ---

    def pass_on(self, number: int) -> None:
        self._table.signal(self._table.running, number)

    def stop_asked(self, number: int) -> None:
        if self._code == START_AGAIN:
            self._code = 128 + number
        if self._state not in (LaunchState.STOPPING, LaunchState.ENDED):
            self._control.stopping(number)
            self._ended_by = f"ended by {signal.Signals(number).name}"
            self._stop(f"{signal.Signals(number).name} received", 128 + number)
            self._why = f"{self._ended_by}, which the launcher on {self._spec.node_name} received"

    def kill_asked(self) -> None:
        self._console.say("second signal: killing all workers at once")
        self._shutdown.kill()

    def fail_launch(self, reason: str, code: int, without: Sequence[int] = ()) -> None:
        if self._state not in (LaunchState.STOPPING, LaunchState.ENDED):
            without = without or self._spec.without
            self._peers.fail(reason, code, without)
            self.stop_with_peers(reason, code, without)

    def stop_with_peers(self, reason: str, code: int, without: Sequence[int] = ()) -> None:
        leave_out(without)
        self._stop(reason, code, START_GRACE_SECONDS if self._start_up.under_way else None)

    def run_continues(self) -> bool:
        return self._state is LaunchState.RUNNING and self._control.under_way

    def store_failed(self, reason: str) -> None:
        """Stop the launch because the store failed.  After the training has begun, log the failure instead."""
        if self._control.under_way:
            self._console.say(f"{reason}; the workers continue, but no new worker can join the run")
        else:
            self.stop_with_peers(reason, LAUNCH_FAILED)

    def _stop(self, reason: str, code: int, grace: float | None = None) -> None:
        """Stop all workers within ``grace`` seconds (None: --grace-seconds); only the first call has an effect."""
        if self._state in (LaunchState.STOPPING, LaunchState.ENDED):
            return
        self._state = LaunchState.STOPPING
        self._code, self._why = code, reason
        running, again = self._table.running, code == START_AGAIN
        grace = self._spec.grace_seconds if grace is None else min(grace, self._spec.grace_seconds)
        then = f": SIGTERM to {messages.count(len(running))}, SIGKILL after {grace:g} s"
        self._console.say(reason + (then if running and not again else ""))
        self._successors.end_waiting()
        self._shutdown.begin(grace, at_once=again)
        if not running:
            self._own_workers_ended()

    def _give_up(self) -> None:
        """End the launch although workers blocked in the kernel survive SIGKILL; workers.json lists them as killed."""
        if self._state is LaunchState.STOPPING:
            self._end()

    # --- the end ---

    def _close(self) -> int:
        """Stop all processes and parts of the launch, except the store, which ends with this process.

        Returns the exit code.
        """
        verdict = self._conclusion.verdict() if self._code is None else None
        if self._code is not None:
            self._control.stopped()
        # After the training has begun, other nodes may continue it, so this launcher does not know how it ends.
        known = self._code not in (None, START_AGAIN) and (self._spec.nnodes == 1 or self._start_up.under_way)
        self._exporter.end((self._code, self._why) if known else None)
        self._control.end_candidates()
        self._table.abandon(self._table.live)
        if left := self._subreaper.kill_all(self._spec.launch_id, self._reaper.spared):
            pids = [process.pid for process in left]
            self._console.say(f"these processes cannot be killed (blocked in the kernel, or of another user): {pids}")
        self._write_workers()
        code = self._conclusion.exit_code(self._code, verdict)
        self._folder.finish(None if code == START_AGAIN else code, self._why or self._conclusion.why(code, verdict))
        if code != START_AGAIN and any(worker.pid is not None for worker in self._table.all):
            self._conclusion.tell(code, verdict, self._ended_by)
        self._peers.wait_until_notified()
        self._signals.forget()  # from now on, a signal only ends the wait for the output
        flush(self._loop, self._console, lambda: self._signals.stop_asked, patient=self._code is None)
        self._folder.flush_logs()
        self._control.close()
        self._reaper.finish()
        self._signals.give_back()  # from now on a signal terminates this process, which has no workers
        if code == START_AGAIN:
            if starts := [worker.started for worker in self._table.all if worker.started is not None]:
                os.environ.setdefault(FIRST_START_VARIABLE, str(min(starts)))
            code = self._code or code  # ``stop_asked`` has changed the code if a signal has just arrived
        self._loop.close()
        return code
