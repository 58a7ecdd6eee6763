"""A worker's session: what the training loop and the collectives call, and how a worker of recover-run opens it.

Every wait ends: with its result, with ``EpochRevoked``, with ``Fenced``, or with ``CoordinatorLost``.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from recover_megatron.arguments import parse_addresses
from recover_megatron.membership.events import MemberEffect, Notify
from recover_megatron.membership.io.client import Address, Client
from recover_megatron.membership.records import (
    EpochRevoked,
    Fenced,
    Json,
    Plan,
    Settings,
    WorkerId,
    Workers,
    cut_middle,
)
from recover_megatron.membership.sides.member import Member
from recover_megatron.membership.wire import (
    MAX_ERROR,
    MAX_TO_COORDINATOR,
    MAX_TRACEBACK,
    MAX_TRIED,
    Secret,
    encode,
    find_secret,
)
from recover_megatron.network import death_notice, system
from recover_megatron.variables import COORDINATOR_VARIABLE, JOIN_VARIABLE, NODE_VARIABLE, WORKER_ID_VARIABLE

RevokeCallback = Callable[[int, str], None]
EXCEPTION_REPORT_SECONDS = 2.0
"""The longest that a worker that ends waits for a coordinator to hear why."""


class Session:
    """One worker's place in the run. Create it with ``connect``; the methods may be called from any thread.

    Use it in one process only: a forked child has no session (its copies of the sockets are closed at once).
    """

    def __init__(
        self, core: Member, addresses: Sequence[Address], secret: Secret, on_revoke: RevokeCallback | None
    ) -> None:
        self._core = core
        self._callbacks = [on_revoke] if on_revoke is not None else []
        self._revoked_reason = ""
        self._client = Client(core, addresses, secret, self._notified)
        self._client.start()

    @classmethod
    def connect(
        cls,
        addresses: Sequence[Address],
        worker: int,
        secret: Secret,
        settings: Settings | None = None,
        node_agent: str | None = None,
        on_revoke: RevokeCallback | None = None,
        newcomer: bool = False,
    ) -> Session:
        """Start the session of ``worker`` and return at once; the first ``join`` waits for the others.

        ``addresses``: the candidate coordinators, in the same order for all. ``node_agent``: the node name under which
        the worker's launcher runs a ``NodeAgent``; None if there is none. ``newcomer``: the worker was not launched
        with the run, and its id never was the run's; nobody waits for it, or tells it anything, before its ``join``.
        """
        settings = settings or Settings()
        hello: dict[str, Json] = {
            "worker": worker,
            "incarnation": secrets.token_hex(16),
            "host": socket.gethostname()[:256],
            "pid": os.getpid(),
        }
        if node_agent is not None:
            hello["node_agent"] = node_agent
        if newcomer:
            hello["newcomer"] = True
        core = Member(hello, len(addresses), settings, now=time.monotonic())
        return cls(core, addresses, secret, on_revoke)

    @property
    def settings(self) -> Settings:
        return self._core.settings

    # -- views --------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan of the last epoch joined, revoked or not; None before the first."""
        return self._core.plan

    @property
    def epoch(self) -> int:
        """The number of that epoch, 0 before the first."""
        return self._core.plan.epoch if self._core.plan is not None else 0

    @property
    def term(self) -> int:
        """The term of the coordinator that formed that epoch: the same on all of its members."""
        return self._core.presentation.formed.term

    @property
    def revoked(self) -> bool:
        """Whether that epoch is over. A plain attribute read: cheap enough for every step of a loop."""
        return self._core.revoked or self._core.out is not None

    @property
    def committed(self) -> int:
        """The last iteration that this worker knows to be committed; others may not yet (see ``Plan.committed``)."""
        return self._core.committed

    @property
    def fenced(self) -> bool:
        """Whether this worker was put out of the run: end the process."""
        return isinstance(self._core.out, Fenced)

    @property
    def dead(self) -> Workers:
        """Workers that have ended, as the coordinator told with the last revoke. Put out is not dead (yet)."""
        return self._core.presentation.dead

    @property
    def left(self) -> Workers:
        """Workers that had finished and left in order, as the coordinator told with the last revoke."""
        return self._core.presentation.left

    @property
    def aside(self) -> Workers:
        """Live workers that the run goes on without, since they were late, as told with the last revoke."""
        return self._core.presentation.aside

    @property
    def opened_members(self) -> Workers:
        """The workers that the run counts on: those that the open rendezvous waits for, else the members of ``plan``.

        Empty before both. In a callback of ``on_revoke`` this (as ``dead`` and ``left``) is that of the rendezvous
        told, or a newer one: who is in ``plan.members`` but not in here is missing.
        """
        opened, plan = self._core.presentation.opened, self._core.plan
        if opened is not None:
            return opened.members
        return plan.members if plan is not None else frozenset()

    def on_revoke(self, callback: RevokeCallback) -> None:
        """Call ``callback(epoch, reason)`` in the session's thread when an epoch is revoked (``epoch``: the next one's
        number), and with epoch 0 when this worker is out. It must return soon, without waiting for the session."""
        self._callbacks.append(callback)

    def check(self) -> None:
        """Raise if the epoch is over or this worker is out; return otherwise."""
        with self._client.condition:
            self._raise_if_out()
            self._raise_if_revoked()

    # -- the protocol -------------------------------------------------------------------------------------------------

    def mark(
        self, iteration: int, phase: str, microbatch: int | None = None, waiting: bool = False, allow: float = 0.0
    ) -> None:
        """Report progress: no system call, the next heartbeat carries the latest mark.

        ``waiting``: from now on this worker waits for others (in a collective). ``allow``: seconds this phase may take
        without another mark, on top of the hang timeout (a checkpoint).
        """
        self._core.mark(iteration, phase[:256], microbatch, waiting, allow)

    def show(self, place: tuple[int, int, int] | None, goes_back: bool = False) -> None:
        """Tell with the next marks where this worker stands: replica, position, quota; None: nowhere.

        ``goes_back``: the run could go back to a checkpoint or a snapshot, should nobody who lives have its state.
        """
        self._core.place, self._core.goes_back = place, goes_back

    def show_loss(self, step: int, loss: float) -> None:
        """Tell with the next marks that ``step`` is finished, and its loss: for people and metrics."""
        self._core.loss = step, loss

    def join(self, status: Json, reason: str = "") -> Plan:
        """Join the next epoch with ``status`` and wait for its plan, through all restarts of the rendezvous.

        Every member gets the same plan; its epoch may be revoked already, as at any later time. Apply the step of an
        iteration that this worker reported done and ``plan.committed`` has reached. If the present epoch was not
        revoked, joining asks for a new one; say why in ``reason``. Raises ``Fenced`` or ``CoordinatorLost``;
        ``ValueError`` for a status that is no JSON or too long.
        """
        encode({"type": "join", "status": status}, MAX_TO_COORDINATOR // 2)
        with self._client.condition:
            self._raise_if_out()
            before = self.epoch
            self._client.call(self._core.join, status, reason or "no reason given")
            while self.epoch == before:
                # A plan ends this join even if its epoch is over by the time this thread runs: the next rendezvous
                # needs another join, with another status.
                self._raise_if_out()
                self._client.condition.wait()
            plan = self._core.plan
            assert plan is not None
            return plan

    def ask(self, reason: str, peer: int | None = None) -> None:
        """Ask for a new epoch, and do not wait: for a thread that has news while another one joins for this worker.

        ``peer``: with whom something failed, where that is the reason. Does nothing where an epoch is being made, or no
        coordinator is reached, of which the next one opens an epoch. Raises ``Fenced`` or ``CoordinatorLost``.
        """
        with self._client.condition:
            self._raise_if_out()
            self._client.call(self._core.ask, reason, peer)

    def note(self, text: str) -> None:
        """Have the launcher write down, for people, why this worker is where it is (workers.json); empty: no more.

        Does not wait; harmless when already out.
        """
        self._say(self._core.note, text)

    def answer_drain(self, node: str, reason: str) -> None:
        """Tell what the last epoch joined has decided of a node of ``PlanRequest.drain``.

        ``reason``: why it is refused; empty: it is not. Does not wait; harmless when already out.
        """
        self._say(self._core.answer_drain, node, reason)

    def report_done(self, iteration: int) -> None:
        """Report that every segment of ``iteration`` is REDUCED here; does not wait. May raise as ``agree`` does."""
        with self._client.condition:
            self._raise_if_out()
            if self._core.committed < iteration:
                self._client.call(self._core.report_done, iteration)
                self._raise_if_revoked()

    def wait_committed(self, iteration: int, epoch: int | None = None) -> None:
        """Wait until ``iteration`` is committed. May raise as ``agree`` does.

        ``epoch``: wait in this one alone, for a thread that another one of this worker may join a newer one beside.
        """
        with self._client.condition:
            while self._core.committed < iteration:
                self._raise_if_out()
                self._raise_if_revoked()
                if epoch is not None and self.epoch != epoch:
                    raise EpochRevoked(epoch, "a newer one was joined")
                self._client.condition.wait()

    def agree(self, iteration: int) -> None:
        """Report ``iteration`` done and wait until it is committed: all members of the epoch have reported it.

        Raises ``EpochRevoked`` when the epoch ends first (the next plan tells whether the iteration was committed),
        ``Fenced`` or ``CoordinatorLost`` when this worker is out.
        """
        self.report_done(iteration)
        self.wait_committed(iteration)

    def be_in_touch(self, *, in_epoch: bool = True) -> None:
        """Return when the coordinator has answered within the heartbeat timeout and the epoch goes on: mostly at once.

        Call it before what a process must not do that was stopped or cut off and put out meanwhile (it does not know
        yet). Raises ``EpochRevoked`` (unless ``in_epoch`` is False), ``Fenced`` or ``CoordinatorLost``.
        """
        with self._client.condition:
            while True:
                self._raise_if_out()
                if in_epoch:
                    self._raise_if_revoked()
                if self._core.in_touch(time.monotonic(), in_epoch=in_epoch):
                    return
                self._client.condition.wait(self._core.settings.heartbeat_interval)

    def idle(self, vacant: bool = False) -> None:
        """Have no part in the present epoch: a spare. Does not wait, and holds until the next ``join``.

        ``vacant``: nobody has a part in it, so nothing is committed there, and this worker can tell that. All members
        of the epoch must say the same.

        No commit waits for this worker, and it need not make marks, until a rendezvous is open (``wait_revoked``
        returns): then it has as long to join as any other. When all that have a part have left in order the run is
        finished: ``CoordinatorLost`` with code 0. Does nothing before the first plan. Raises ``Fenced`` or
        ``CoordinatorLost``.
        """
        with self._client.condition:
            self._raise_if_out()
            self._client.call(self._core.idle, vacant)

    def wait_revoked(self, timeout: float | None = None) -> bool:
        """Wait until the present epoch is revoked (True, at once before the first), at most ``timeout`` seconds.

        False when the time is over. Raises ``Fenced`` or ``CoordinatorLost`` when this worker is out.
        """
        with self._client.condition:
            self._client.condition.wait_for(lambda: self.revoked, timeout)
            self._raise_if_out()
            return self._core.revoked

    def wait_all_heard(self, epoch: int) -> None:
        """Wait until the end of ``epoch`` is known to all of its members that live: their callbacks have returned.

        Members that this coordinator has put out do not count: it may form the next epoch without them by then. Asks
        for a new epoch if this one goes on. Raises ``Fenced`` or ``CoordinatorLost`` when this worker is out. Not for
        the session's thread.
        """
        with self._client.condition:
            if self.epoch == epoch and not self._core.revoked:
                self.ask("operations of this epoch are to be aborted")
            while 0 < epoch >= self._core.all_heard:
                self._raise_if_out()
                self._client.condition.wait()

    def wait_lost(self, workers: Collection[int], timeout: float) -> bool:
        """Wait until the run does not count on one of ``workers`` any more (True), at most ``timeout`` seconds.

        Raises ``Fenced`` or ``CoordinatorLost`` when this worker is out.
        """
        with self._client.condition:
            self._client.condition.wait_for(
                lambda: self._core.out is not None or not self.opened_members.issuperset(workers), timeout
            )
            self._raise_if_out()
            return not self.opened_members.issuperset(workers)

    def give_up(self, code: int, reason: str) -> None:
        """Say that the run must end for all, with exit code ``code`` (1 to 255); the first to say so wins.

        Does not wait: ``CoordinatorLost(reason, code)`` comes to every member's next call, this one's too; the next
        coordinator is asked if this one is lost. ``reason`` is cut to 2,000 characters. Harmless when already out.
        Raises ``ValueError`` for another code.
        """
        if not 1 <= code <= 255:
            raise ValueError(f"exit code {code} is not between 1 and 255")
        self._say(self._core.end_run, code, cut_middle(reason, 2000))

    def report_exception(
        self,
        iteration: int,
        microbatch: int | None,
        error: str,
        traceback: str,
        group: int,
        *,
        phase: str = "",
        tried: Iterable[int] = (),
        own: bool = False,
    ) -> bool:
        """Tell that an exception ends this process, which ends right after; whether a coordinator has heard it.

        Waits for that, at most ``EXCEPTION_REPORT_SECONDS``. ``error``: the exception's type and message (cut to 2,000
        characters), ``traceback``: cut to 16 Ki, each in the middle; ``group``: the worker's replica. ``tried``: all
        microbatches of the iteration that may have raised it, ``microbatch`` is the last one; none: what ``phase``
        names did. ``own``: a fault of this worker's host or device. By what several replicas tell the coordinator may
        end the run for all (``ending``). Raises ``ValueError`` for a negative number.
        """
        if min(iteration, microbatch or 0, group) < 0:
            raise ValueError(f"negative: iteration {iteration}, microbatch {microbatch} or group {group}")
        report: dict[str, Json] = {"iteration": iteration, "group": group, "phase": phase[:256], "own": own}
        if microbatch is not None:
            report["microbatch"] = microbatch
        report["tried"] = sorted(tried)[-MAX_TRIED:]
        report["error"], report["traceback"] = cut_middle(error, MAX_ERROR), cut_middle(traceback, MAX_TRACEBACK)
        with self._client.condition:
            self._say(self._core.report_exception, report)
            self._client.condition.wait_for(lambda: self._core.noted or self._core.out, EXCEPTION_REPORT_SECONDS)
            return self._core.noted

    def leave(self) -> None:
        """Leave in order: the run is finished for this worker; its end is no death. Harmless when already out."""
        death_notice.leaving()
        self._say(self._core.leave)
        self._client.close()

    def leave_idle(self) -> None:
        """Leave in order in the middle of the run, with no part in the present epoch; the run goes on without it."""
        if self._core.out is None:
            self.idle()
        self.leave()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _say(self, said: Callable[..., list[MemberEffect]], *what: object) -> None:
        """Have a method of the core say something, unless this worker is out."""
        with self._client.condition:
            if self._core.out is None:
                self._client.call(said, *what)

    def _raise_if_out(self) -> None:
        if self._core.out is not None:
            raise self._core.out

    def _raise_if_revoked(self) -> None:
        if self._core.revoked:
            raise EpochRevoked(self.epoch, self._revoked_reason)

    def _notified(self, notice: Notify) -> None:
        if notice.kind == "revoke":
            self._revoked_reason = notice.detail["reason"]
            for callback in self._callbacks:
                callback(notice.detail["epoch"], notice.detail["reason"])
            self._say(self._core.heard, notice.detail["epoch"], notice.detail["term"])  # all that believe have stopped
        elif notice.kind == "out":
            for callback in self._callbacks:
                callback(0, str(self._core.out))


def connect(
    settings: Settings | None = None,
    environ: Mapping[str, str] = os.environ,
    addresses: Sequence[Address] | None = None,
) -> Session:
    """Open the session of this worker (``Session.connect``), as recover-run's environment variables say.

    Also raise the limit of open files, have the launcher remove what multiprocessing leaves, and have it know of this
    process's death at once. ``addresses``: the candidates, instead of the environment's; the launcher is a node agent
    with its own candidates only. Raises KeyError where the launcher gave no coordinator or no rank, ValueError for a
    malformed address, SecretError without a usable secret.
    """
    system.use_all_descriptors()
    system.keep_sockets(environ)
    death_notice.hold(environ)
    node_agent = environ.get(NODE_VARIABLE)
    if addresses is None:
        addresses = _launchers_addresses(environ[COORDINATOR_VARIABLE])
    elif COORDINATOR_VARIABLE not in environ or list(addresses) != _launchers_addresses(environ[COORDINATOR_VARIABLE]):
        node_agent = None
    worker, secret, newcomer = worker_id(environ), find_secret(environ), is_newcomer(environ)
    return Session.connect(addresses, worker, secret, settings, node_agent=node_agent, newcomer=newcomer)


def worker_id(environ: Mapping[str, str] = os.environ) -> WorkerId:
    """Which worker this process is. Raises KeyError where the launcher gave neither an id nor a rank."""
    return WorkerId(int(environ.get(WORKER_ID_VARIABLE) or environ["RANK"]))


def is_newcomer(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this worker was not launched with the run."""
    return environ.get(JOIN_VARIABLE) == "1"


def _launchers_addresses(text: str) -> list[Address]:
    try:
        return parse_addresses(text)
    except ValueError as error:
        raise ValueError(f"{COORDINATOR_VARIABLE}={text}: {error}") from None
