"""The job's coordinator, hosted by the launcher, and the launcher's own session with it.

The launcher of a single-node launch starts two candidate coordinators on loopback (processes of their own; when one is
killed the workers turn to the other, and the launcher starts another in its place: hosted.py); of several launchers
each of the first three starts one (candidates.py); one that joins a running job starts none.  A launcher gives its
workers the addresses and the job's secret, and is the witness of its node: it says how its workers end, and kills those
that the coordinator puts out.  A script that never opens a session is not affected.

    RECOVER_COORDINATOR   host:port,host:port   the candidates, in the order in which the members turn to them
    RECOVER_SECRET        the job's secret: the user's own, or a random one for this launch
    RECOVER_NODE          the name under which this launcher is a witness
    RECOVER_HOST          several nodes: the address by which the others reach this one
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from recover_megatron.arguments import times_from_argv
from recover_megatron.launch.candidates import BACKLOG, Address, Candidates, join_addresses, local_address
from recover_megatron.launch.hosted import HostedCandidate
from recover_megatron.launch.loop import EventLoop
from recover_megatron.launch.plan import LAUNCH_ID_VARIABLE, LaunchPlan
from recover_megatron.launch.processes import spawn
from recover_megatron.membership.auth import SECRET_FILE_VARIABLE, SECRET_VARIABLE, find_secret
from recover_megatron.membership.errors import CoordinatorLost
from recover_megatron.membership.records import Settings
from recover_megatron.membership.witness import Witness
from recover_megatron.membership.worker import COORDINATOR_VARIABLE, HOST_VARIABLE, NODE_VARIABLE

HERE = 2
"""Candidates of a launch on one node."""
STOPPING_SECONDS = 1.0
"""How long the workers of a launch that is told to stop are kept for a coordinator that does not answer."""
LAST_WORD_SECONDS = 5.0
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from recover_megatron.membership.__main__ import main; sys.exit(main())"
)


def has_secret(environ: Mapping[str, str]) -> bool:
    """Whether the user has chosen the job's secret."""
    return SECRET_VARIABLE in environ or SECRET_FILE_VARIABLE in environ


class ControlPlane:
    """Candidates and witness of one launch.  ``on_kill(worker, reason)`` and ``on_tell(text)`` are called in another
    thread.

    So is ``on_note(worker, text)``: what a worker of this node wants to be known of it.

    Their times are those of the script's ``--recover-*`` flags: all processes of a run must use the same.

    Raises SecretError for a secret of the user's that cannot be used, OSError where no process or socket can be had.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        inherited: Mapping[str, str],
        on_kill: Callable[[int, str], None],
        loop: EventLoop,
        say: Callable[[str], None],
        on_tell: Callable[[str], None],
        candidates: Candidates | None = None,
        on_revoke: Callable[[], None] = lambda: None,
        on_note: Callable[[int, str], None] = lambda worker, text: None,
    ) -> None:
        """``candidates``: of a launch over several nodes; the listener is this object's from now on.

        ``on_revoke`` is called, in another thread, when the coordinator wants a new epoch: somebody may be ``missing``.
        ``loop``: of the main thread, which is the caller; ``say``: what people should read.
        """
        self._world = plan.world_size
        self._variables = {} if has_secret(inherited) else {SECRET_VARIABLE: secrets.token_hex(32)}
        environment = {**inherited, **self._variables, LAUNCH_ID_VARIABLE: plan.launch_id}
        secret = find_secret(environment)
        times = times_from_argv(plan.script_args)
        settings = Settings(
            heartbeat_interval=times.heartbeat_interval,
            heartbeat_timeout=times.heartbeat_timeout,
            hang_timeout=times.hang_timeout,
            stall_timeout=times.stall_timeout,
        )
        if plan.joins:
            listeners = []
            addresses: Sequence[Address] = plan.joins
            self._variables[HOST_VARIABLE] = plan.node_address or local_address(plan.joins[0])
        elif candidates is None:
            listeners = [(n, socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)) for n in range(HERE)]
            addresses = [listener.getsockname()[:2] for _, listener in listeners]
        else:
            listeners = [(plan.node_rank, candidates.listener)] if candidates.listener else []
            addresses = candidates.addresses
            self._variables[HOST_VARIABLE] = candidates.host
        self._settings = settings
        self._variables[COORDINATOR_VARIABLE] = join_addresses(addresses)
        self._variables[NODE_VARIABLE] = plan.node_name
        self._candidates: dict[int, HostedCandidate] = {}
        for number, listener in listeners:
            start = partial(self._start_candidate, plan, number, environment, settings)
            place = list(addresses).index(listener.getsockname()[:2])
            try:
                self._candidates[place] = HostedCandidate(loop, number, listener, start, lambda: self._over, say)
            except OSError:
                self.end_candidates()
                raise
        self._witness = Witness(
            addresses, self._variables[NODE_VARIABLE], secret, on_kill, settings, on_revoke, on_note, on_tell,
            late=bool(plan.joins),
        )  # fmt: skip

    @staticmethod
    def _start_candidate(
        plan: LaunchPlan, number: int, environment: Mapping[str, str], settings: Settings, listener: socket.socket
    ) -> int:
        events = plan.log_dir / f"events-{number}.jsonl" if plan.log_dir else Path(os.devnull)
        command = [sys.executable, "-I", "-c", _BOOT, _PACKAGE_ROOT, "--world", str(plan.world_size)]
        command += ["--listen-fd", str(listener.fileno()), "--events", str(events)]
        command += ["--heartbeat-interval", str(settings.heartbeat_interval)]
        command += ["--heartbeat-timeout", str(settings.heartbeat_timeout)]
        command += ["--hang-timeout", str(settings.hang_timeout), "--stall-timeout", str(settings.stall_timeout)]
        sink = os.open(os.devnull, os.O_WRONLY)
        try:
            # What it has to say on stderr (a disk that fails it, a fault of its own) is for the launcher's user.
            return spawn(command, environment, sink, sys.stderr.fileno(), inherit=[listener.fileno()], deaf=True)
        finally:
            os.close(sink)

    @property
    def _over(self) -> bool:
        return self._witness.out is not None

    @property
    def pids(self) -> set[int]:
        """Of the candidates that run here."""
        return {candidate.pid for candidate in self._candidates.values() if candidate.pid is not None}

    def end_candidates(self) -> None:
        """The launch is over: the candidates that run are killed with it, and no others are started."""
        for candidate in self._candidates.values():
            candidate.close()
        self._candidates.clear()

    @property
    def variables(self) -> dict[str, str]:
        """What the workers' environment needs."""
        return dict(self._variables)

    def spawned(self, worker: int, pid: int) -> None:
        """A worker of this node has been started."""
        self._witness.spawned(worker, pid)

    def stopping(self, signal: int) -> None:
        """Somebody has told this launcher to end its workers. Said before they end, or their ends would be losses."""
        self._witness.stopping(signal, STOPPING_SECONDS)

    def ended(self, worker: int, how: str) -> None:
        """A worker of this node has been reaped."""
        self._witness.ended(worker, how)

    @property
    def undecided(self) -> bool:
        """Whether the run is under way, for all that this launcher knows: others may go on without its workers."""
        return self._witness.led and self._witness.out is None

    @property
    def under_way(self) -> bool:
        """Whether the run has had its first plan, and goes on."""
        return self._witness.epoch > 0 and self._witness.out is None

    @property
    def planned(self) -> frozenset[int]:
        """The workers that were in any plan."""
        return self._witness.planned

    @property
    def condemned(self) -> frozenset[int]:
        """The workers that the coordinator has put out: they do not go on."""
        return self._witness.condemned

    @property
    def taken(self) -> frozenset[int]:
        """The ids that the run has used."""
        return self._witness.taken

    def when_decided(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, in another thread, when the run is over or no coordinator is reached any more."""
        self._after(self._witness.wait_out, callback)

    def when_up_to_date(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback``, in another thread, when all is known that the coordinator knows now, after ``seconds`` at
        the latest."""
        self._after(lambda: self._witness.catch_up(seconds), callback)

    @property
    def missing(self) -> frozenset[int]:
        """Whom, of the workers of the launch, the coordinator does without; nobody before it leads."""
        return self._witness.missing(self._world)

    def when_led(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback``, in another thread, when a coordinator leads, or is not reached within ``seconds``."""
        self._after(lambda: self._witness.wait_led(seconds), callback)

    @staticmethod
    def _after(wait: Callable[[], object], callback: Callable[[], None]) -> None:
        def run() -> None:
            wait()
            callback()

        threading.Thread(target=run, daemon=True, name="recover-launch-verdict").start()

    def verdict(self) -> int | None:
        """The run's exit code as the coordinator decided it: 0 when the last members left in order.

        Asked when all workers have ended.  None: it decided nothing, since no worker opened a session, or the run did
        not get as far as its first epoch; unless a worker said that the run must end.
        """
        self._witness.catch_up(LAST_WORD_SECONDS)  # the last worker may have been told first
        if not self._witness.led and self._witness.out is None:
            return None
        out = self._witness.wait_out(LAST_WORD_SECONDS)
        if not isinstance(out, CoordinatorLost) or (self._witness.epoch == 0 and out.by is None):
            return None
        return out.code

    @property
    def told(self) -> bool:
        """Whether a coordinator has said how the run ends; else what ``verdict`` says is that none was reached."""
        out = self._witness.out
        return isinstance(out, CoordinatorLost) and out.told

    def linger(self) -> None:
        """After the verdict: let the coordinator that gave it tell those, too, that are on their way back to it.

        Where it is one of this launch's own, which would be ended with it. Returns when it has ended by itself.
        """
        candidate = self._candidates.get(self._witness.candidate)
        if not self.told or candidate is None or candidate.pid is None:
            return
        try:
            ended = os.pidfd_open(candidate.pid)
        except ProcessLookupError:
            return
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.poll(1000 * (2 * self._settings.heartbeat_timeout + 1))
        os.close(ended)

    @property
    def led(self) -> bool:
        """Whether a coordinator leads, or has led."""
        return self._witness.led

    @property
    def complaint(self) -> str:
        """Why this launcher has no coordinator any more; empty: it has, or still looks for one."""
        return str(self._witness.out or "")

    @property
    def reason(self) -> str:
        """Why the run has ended, as the coordinator told; empty if it has told nothing."""
        out = self._witness.out
        return str(out) if isinstance(out, CoordinatorLost) else ""

    def close(self) -> None:
        """End the witness's session; the candidates end with the launch."""
        self._witness.close()
