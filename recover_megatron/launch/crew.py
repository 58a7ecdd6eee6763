"""The workers of one node: their records, streams and handles; how one is started, signalled and put out.

The keeping half of ``Supervisor``, which decides. Everything runs in the main thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from recover_megatron.launch import messages, newcomers
from recover_megatron.launch.candidates import local_address
from recover_megatron.launch.control_plane import ControlPlane
from recover_megatron.launch.exit_codes import Outcome
from recover_megatron.launch.folder_lock import BEAT_SECONDS, FolderLock
from recover_megatron.launch.interfaces import LOOPBACK, variables_for
from recover_megatron.launch.loop import EventLoop
from recover_megatron.launch.output import Console, LogFile, Stream
from recover_megatron.launch.peers import Peers
from recover_megatron.launch.plan import LaunchPlan, launch_environment, worker_variables
from recover_megatron.launch.processes import spawn
from recover_megatron.launch.secret_file import SecretFile
from recover_megatron.launch.states import Worker, WorkerState
from recover_megatron.launch.warden import Warden
from recover_megatron.launch.workers_file import WorkersFile
from recover_megatron.log_writer import Aside, LogWriter, flush_all
from recover_megatron.membership.auth import SECRET_FILE_VARIABLE, SECRET_VARIABLE
from recover_megatron.membership.worker import HOST_VARIABLE

ASK_SECONDS = 2.0
"""How long the coordinator may take to say whether there is a plan."""


class Crew:
    """All workers that this launcher has started or is about to start, by worker id."""

    def __init__(self, plan: LaunchPlan, inherited: Mapping[str, str], lock: FolderLock | None = None) -> None:
        self._plan = plan
        self._folder_lock = lock
        self._beats = Aside("", lambda text: None)  # in the lock file, of no interest where the disk fails
        self._inherited = inherited
        self._environment = launch_environment(plan, inherited)
        self._loop = EventLoop()
        self._console = Console(self._loop, plan.world_size - 1, plan.log_dir)
        self._control: ControlPlane | None = None
        self._workers = {worker.worker_id: worker for worker in newcomers.launched(plan)}
        self._replacements = newcomers.Replacements(plan)
        self._over = False
        """Whether the run is over, so that no newcomer can be admitted any more."""
        self._changed = True
        """Whether workers.json is to be written."""
        self._orphans = False
        """Whether there may be descendants to reap that have become ours."""
        self._warden: Warden
        self._peers: Peers
        self._network: dict[str, str] | None = None
        self._pidfds: dict[int, int] = {}
        self._streams: dict[int, list[Stream]] = {}
        self._logs: dict[int, LogFile] = {}
        self._written: list[LogWriter | Aside] = []
        """Files on their way to the disk."""
        self._workers_file = WorkersFile(plan.log_dir, self._say_later) if plan.log_dir else None
        self._secret_file = SecretFile(plan.log_dir, self._say_later) if plan.log_dir else None

    def _start_worker(self, worker: Worker, run_id: str) -> int:
        """Start its process.  Returns the pid; raises OSError if it cannot be started."""
        log = self._plan.log_file(worker.worker_id)
        log_file = self._open_log(log) if log else None
        if log_file:
            self._logs[worker.worker_id] = log_file
        streams, stdout, stderr = self._console.attach(str(worker.worker_id), worker.worker_id, log_file)
        self._streams[worker.worker_id] = streams
        if self._network is None:
            self._network = self._choose_interface()
        environment = {**self._environment, **worker_variables(self._plan, worker, run_id), **self._network}
        try:
            return spawn(self._plan.command, environment, stdout, stderr)
        finally:
            os.close(stdout)
            os.close(stderr)

    def _close_streams(self, worker_id: int) -> str:
        """Take what a worker that is gone has written.  Returns its last line on stderr."""
        streams = self._streams.pop(worker_id)
        for stream in streams:
            stream.drain_and_close()
        if log := self._logs.pop(worker_id, None):
            log.close()
        return streams[-1].last_line

    def _choose_interface(self) -> dict[str, str]:
        """The variables that have the workers talk over the interface by which this host and the others reach."""
        plan = self._plan
        alone = plan.nnodes == 1 and not plan.joins
        host = LOOPBACK if alone else plan.node_address or plan.master_addr
        if not alone and self._control:
            host = self._control.variables[HOST_VARIABLE]
        elif plan.node_rank > 0 and not plan.node_address:
            with contextlib.suppress(OSError):  # then no interface has the address, which is said
                host = local_address((plan.master_addr, plan.master_port))
        variables, about = variables_for(host, self._inherited)
        if about and not alone:
            self._console.say(about)
        return variables

    def _open_log(self, path: Path) -> LogFile:
        log = LogFile(path, self._say_later)
        self._written = [file for file in self._written if not file.finished]
        self._written.append(log.file)
        return log

    def _share_folder(self, run_id: str) -> str | None:
        """Make sure that the log folder is this run's; why not, if another holds it."""
        return self._folder_lock.share(run_id) if self._folder_lock else None

    @property
    def _owns_folder(self) -> bool:
        return self._folder_lock is None or self._folder_lock.held

    def _beat(self) -> None:
        """Touch the lock of the log folder, from now on."""
        if self._folder_lock:
            if not self._beats.left:
                self._beats.submit(self._folder_lock.beat, 1)
            self._loop.call_later(BEAT_SECONDS, self._beat)

    def _keep_secret(self, made_up: str | None) -> None:
        """Leave the secret that this launch has made up to its owner's recover-status; None: it made up none."""
        if self._secret_file is None:
            return
        if made_up is not None:
            self._secret_file.write(made_up)
        elif not self._plan.joins and SECRET_FILE_VARIABLE not in self._inherited:
            self._secret_file.remove()  # of an earlier launch

    def _finish_files(self) -> None:
        """All that is left goes to the disk, as long as that takes it."""
        files: list[LogWriter | Aside] = list(self._written)
        if self._workers_file:
            files.append(self._workers_file.writing)
        if self._secret_file:
            if self._control and SECRET_VARIABLE in self._control.variables:
                self._secret_file.remove()
            files.append(self._secret_file.writing)
        if self._folder_lock:
            self._beats.submit(self._folder_lock.end, 1)
            files.append(self._beats)
        flush_all(files)

    def _say_later(self, text: str) -> None:
        """From any thread: say ``text`` on the console."""
        self._loop.call_from_thread(lambda: self._console.say(text))

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.state is WorkerState.RUNNING]

    def _signal_worker(self, worker: Worker, number: int) -> None:
        try:
            signal.pidfd_send_signal(self._pidfds[worker.worker_id], number)
        except ProcessLookupError:
            return  # it has ended: its pidfd says so in a moment

    def _launched(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.worker_id < self._plan.world_size]

    def _never_planned(self) -> bool:
        """Whether the run has not had its first plan."""
        return self._control is None or not self._control.planned

    def _successor_of(self, worker: Worker) -> Worker | None:
        """The worker that is to take the place of one that has ended; it is among the workers from now on."""
        if self._control is None or not self._control.under_way:
            return None
        successor = self._replacements.of(worker, min(self._workers))
        if successor is not None:
            self._workers[successor.worker_id] = successor
        return successor

    def _on_run_over(self) -> None:
        """Newcomers that no plan has had are told by nobody that the run is over."""
        self._over = True
        self._end_late_ones()

    def _end_late_ones(self) -> None:
        planned = self._control.planned if self._control else frozenset()
        for worker in self._running():
            if worker.worker_id >= self._plan.world_size and worker.worker_id not in planned:
                self._console.say(messages.late(worker))
                self._signal_worker(worker, signal.SIGKILL)

    # --- being told ---

    def _outcomes(self) -> list[Outcome]:
        return [worker.outcome for worker in self._workers.values()]

    def _on_told(self, text: str) -> None:
        """What the coordinator has to say to people.  Called in another thread."""
        self._loop.call_from_thread(lambda: self._console.say(text))

    def _on_kill_order(self, worker_id: int, reason: str) -> None:
        """The coordinator has put a worker out.  Called in another thread."""
        self._loop.call_from_thread(lambda: self._put_out(worker_id, reason))

    def _on_note(self, worker_id: int, text: str) -> None:
        """A worker has something to say of itself.  Called in another thread."""
        self._loop.call_from_thread(lambda: self._write_down(worker_id, text))

    def _write_down(self, worker_id: int, text: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.note, self._changed = text, True

    def _put_out(self, worker_id: int, reason: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None and worker.state is WorkerState.RUNNING:
            self._replacements.put_out.add(worker_id)
            self._console.say(f"worker {worker_id} is out of the run ({reason}): killing it")
            self._signal_worker(worker, signal.SIGKILL)

    # --- processes and files ---

    def _ask_coordinator(self, then: Callable[[], None]) -> None:
        if self._control is None:
            then()
        else:
            self._control.when_up_to_date(ASK_SECONDS, lambda: self._loop.call_from_thread(then))

    def _spared(self) -> tuple[int, ...]:
        return (os.getpid(), self._warden.pid)

    def _reap_orphans(self) -> None:
        """Reap descendants that lost their parent and became ours; ours by birth are reaped where they are watched."""
        if not self._orphans:
            return
        self._orphans = False
        own = self._control.pids if self._control else set()
        own.add(self._warden.pid)
        own |= {worker.pid for worker in self._workers.values() if worker.pid is not None and worker.live}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in own:
                self._orphans = True  # it hides other zombies; once it is reaped, after its event, look again
                return
            os.waitpid(ended.si_pid, 0)

    def _write_workers(self) -> None:
        """Bring workers.json up to date, once for all changes of a round."""
        if self._workers_file is None or not self._peers.joined or not self._changed or not self._owns_folder:
            return
        self._changed = False
        self._workers_file.put(self._peers.run_id, list(self._workers.values()))
