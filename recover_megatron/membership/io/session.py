"""A worker's session with the coordinator: calls for the training loop and the collectives, and ``connect``.

Every wait ends with its result, with ``EpochRevoked``, or (the worker is *out*) with ``Fenced`` or ``CoordinatorLost``.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from recover_megatron import variables
from recover_megatron.arguments import parse_addresses
from recover_megatron.membership.events import MemberEffect, Notify
from recover_megatron.membership.io.client import Address, Client
from recover_megatron.membership.messages import fields, to_coordinator, to_member
from recover_megatron.membership.messages.to_coordinator import MAX_ERROR, MAX_TRACEBACK, MAX_TRIED, ReportException
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
from recover_megatron.membership.wire import MAX_TO_COORDINATOR, Secret, find_secret
from recover_megatron.network import death_notice, handover, system

RevokeCallback = Callable[[int, str], None]
EXCEPTION_REPORT_SECONDS = 2.0
"""Maximum seconds for which a worker that fails waits until a coordinator has received its exception report."""


class Session:
    """A worker's session. Create it with ``connect``; the methods may be called from any thread.

    Use it in one process only: a forked child has no session (its copies of the sockets are closed at once).
    """

    def __init__(
        self, core: Member, addresses: Sequence[Address], secret: Secret, relay: str, on_revoke: RevokeCallback | None
    ) -> None:
        self._core = core
        self._callbacks = [on_revoke] if on_revoke is not None else []
        self._revoked_reason = ""
        self._client = Client(core, addresses, secret, self._notified, relay)
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
        relay: str = "",
    ) -> Session:
        """Start the session of ``worker`` and return at once; the first ``join`` waits for the other workers.

        ``addresses``: candidate coordinators, in the same order for all workers. ``node_agent``: the node name under
        which the worker's launcher runs a ``NodeAgent``; None: it runs none. ``newcomer``: True if the worker was not
        launched with the run; its id must be new. Before its ``join``, no worker waits for it, and it gets no message.
        ``relay``: abstract name of the socket of the node's relay (``io.relay``); empty: the node has none.
        """
        settings = settings or Settings()
        process = WorkerId(worker), secrets.token_hex(16), socket.gethostname()[:256], os.getpid()
        hello = to_coordinator.Attach(*process, fields.NOTHING, done=0, node_agent=node_agent or "", newcomer=newcomer)
        core = Member(hello, len(addresses), settings, now=time.monotonic())
        return cls(core, addresses, secret, relay, on_revoke)

    @property
    def settings(self) -> Settings:
        return self._core.settings

    # -- views --------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """Plan of the last epoch joined, revoked or not; None before the first plan."""
        return self._core.plan

    @property
    def epoch(self) -> int:
        """Number of the last epoch joined; 0 before the first epoch."""
        return self._core.plan.epoch if self._core.plan is not None else 0

    @property
    def term(self) -> int:
        """Term of the coordinator that formed the last epoch joined; equal on all members of that epoch."""
        return self._core.presentation.formed.term

    @property
    def revoked(self) -> bool:
        """True if the last epoch joined is over, none was joined, or this worker is out. Cheap: takes no lock."""
        return self._core.revoked or self._core.out is not None

    @property
    def committed(self) -> int:
        """The last iteration that this worker knows to be committed; other workers may learn it later."""
        return self._core.committed

    @property
    def fenced(self) -> bool:
        """True if this worker was evicted from the run; then its process must exit."""
        return isinstance(self._core.out, Fenced)

    @property
    def dead(self) -> Workers:
        """Workers that have ended, as reported with the last revoke. An evicted worker is not dead (yet)."""
        return self._core.presentation.dead

    @property
    def left(self) -> Workers:
        """Workers that had left normally, as reported with the last revoke."""
        return self._core.presentation.left

    @property
    def aside(self) -> Workers:
        """Live workers that were set aside as late (as of the last revoke). The run continues without these workers."""
        return self._core.presentation.aside

    @property
    def opened_members(self) -> Workers:
        """Workers that the run counts on: members of the open rendezvous, else the members of ``plan``.

        Empty if neither exists. In a callback of ``on_revoke`` this set (like ``dead`` and ``left``) belongs to the
        reported rendezvous, or a newer one: a worker of ``plan.members`` that is not in this set is missing.
        """
        opened, plan = self._core.presentation.opened, self._core.plan
        if opened is not None:
            return opened.members
        return plan.members if plan is not None else frozenset()

    def on_revoke(self, callback: RevokeCallback) -> None:
        """Call ``callback(epoch, reason)`` in the session's thread at each revoke (``epoch`` is the next one), and with
        epoch 0 when this worker is out. The callback must return soon, and must not wait for the session."""
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
        """Report progress. Makes no system call: the next heartbeat sends the latest mark.

        ``waiting``: True if this worker now waits for other workers (in a collective). ``allow``: seconds that this
        phase may take without another mark, in addition to the hang timeout (such as for a checkpoint).
        """
        self._core.mark(iteration, phase[:256], microbatch, waiting, allow)

    def show(self, place: tuple[int, int, int] | None, goes_back: bool = False) -> None:
        """Set the worker's place, which the next marks report: replica, position, quota; None: no place.

        ``goes_back``: True if the run could load a checkpoint or a snapshot in case its live workers lack some state.
        """
        self._core.place, self._core.goes_back = place, goes_back

    def show_loss(self, step: int, loss: float) -> None:
        """Set the last finished ``step`` and its loss, which the next marks report, for status and metrics."""
        self._core.loss = step, loss

    def join(self, status: Json, reason: str = "") -> Plan:
        """Join the next epoch with ``status`` and wait for its plan, even if the rendezvous restarts.

        Every member gets the same plan, whose epoch may have been revoked before this call returns. The caller must
        then apply the step of each iteration that this worker reported done, up to ``plan.committed``. If the current
        epoch was not revoked, this call requests a new one for ``reason``. Raises ``Fenced`` or ``CoordinatorLost``;
        ``ValueError`` if the status is too long or too deep, or contains NaN; ``TypeError`` for a type that JSON lacks.
        """
        try:
            text = json.dumps(status, separators=(",", ":"), allow_nan=False)
        except RecursionError as error:
            raise ValueError("the status is too deep") from error
        if len(text) > MAX_TO_COORDINATOR // 2:
            raise ValueError(f"the status has {len(text)} bytes, more than the limit of {MAX_TO_COORDINATOR // 2}")
        status = json.loads(text)  # only lists, objects and plain values
        fields.check_depth(status, fields.MAX_DEPTH)
        with self._client.condition:
            self._raise_if_out()
            before = self.epoch
            self._client.call(self._core.join, status, reason or "no reason given")
            while self.epoch == before:
                # A plan ends this join even if its epoch is over by now: the next one needs another status.
                self._raise_if_out()
                self._client.condition.wait()
            plan = self._core.plan
            assert plan is not None
            return plan

    def ask(self, reason: str, peer: int | None = None) -> None:
        """Request a new epoch, without waiting or joining it. A thread of this worker must then ``join`` it, or leave.

        ``peer``: the worker with which an operation failed, if that is the reason. Does nothing while an epoch is being
        formed, or without a coordinator (a new one forms an epoch anyway). Raises ``Fenced`` or ``CoordinatorLost``.
        """
        with self._client.condition:
            self._raise_if_out()
            self._client.call(self._core.ask, reason, peer)

    def note(self, text: str) -> None:
        """Make the launcher write to workers.json why this worker is in its current state; empty: remove the text.

        Does not wait; does nothing if this worker is out.
        """
        self._say(self._core.note, text)

    def answer_drain(self, node: str, reason: str) -> None:
        """Send the members' decision, taken in the last joined epoch, about a node of ``PlanRequest.drain``.

        ``reason``: why the drain is refused; empty: accepted. Does not wait; does nothing if this worker is out.
        """
        self._say(self._core.answer_drain, node, reason)

    def report_done(self, iteration: int) -> None:
        """Report, without waiting, that every segment of ``iteration`` is REDUCED here. Raises like ``agree``."""
        with self._client.condition:
            self._raise_if_out()
            if self._core.committed < iteration:
                self._client.call(self._core.report_done, iteration)
                self._raise_if_revoked()

    def wait_committed(self, iteration: int, epoch: int | None = None) -> None:
        """Wait until ``iteration`` is committed. Raises like ``agree``.

        ``epoch``: also raise ``EpochRevoked`` once another thread has joined an epoch other than this one.
        """
        with self._client.condition:
            while self._core.committed < iteration:
                self._raise_if_out()
                self._raise_if_revoked()
                if epoch is not None and self.epoch != epoch:
                    raise EpochRevoked(epoch, "a newer epoch was joined")
                self._client.condition.wait()

    def agree(self, iteration: int) -> None:
        """Report ``iteration`` done and wait until it is committed, that is, all members of the epoch have reported it.

        Raises ``EpochRevoked`` if the epoch ends first (the next plan shows whether the iteration was committed),
        ``Fenced`` or ``CoordinatorLost`` if this worker is out.
        """
        self.report_done(iteration)
        self.wait_committed(iteration)

    def wait_in_touch(self, *, in_epoch: bool = True) -> None:
        """Wait until the coordinator has answered a message that is less than a heartbeat timeout old.

        Call it before an action that a worker must not take if it was evicted while it was stopped or cut off. Raises
        ``Fenced`` or ``CoordinatorLost``. If ``in_epoch`` is True, also raises ``EpochRevoked`` if the epoch is over.
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
        """Report that this worker, a spare, has no part in the current epoch. Does not wait; valid until ``join``.

        ``vacant``: True if no worker has a part in the epoch, so that nothing is committed in it. All members must
        report the same value.

        No commit waits for this worker, and it need not make marks, until a rendezvous opens (``wait_revoked``
        returns); then it has the usual time to join. When all workers with a part in the epoch have left normally,
        the run is finished: calls raise ``CoordinatorLost`` with code 0. Does nothing before the first plan. Raises
        ``Fenced`` or ``CoordinatorLost`` if this worker is out.
        """
        with self._client.condition:
            self._raise_if_out()
            self._client.call(self._core.idle, vacant)

    def wait_revoked(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds until the current epoch is revoked. Return whether it is.

        Before the first epoch, return True immediately. Raises ``Fenced`` or ``CoordinatorLost`` if this worker is out.
        """
        with self._client.condition:
            self._client.condition.wait_for(lambda: self.revoked, timeout)
            self._raise_if_out()
            return self._core.revoked

    def wait_all_heard(self, epoch: int) -> None:
        """Wait until all live members of ``epoch`` know that it is over and their ``on_revoke`` callbacks are done.

        Evicted members do not count once the coordinator may form the next epoch without them. If ``epoch`` is not
        over, request a new epoch. Raises ``Fenced`` or ``CoordinatorLost`` if this worker is out. The session's thread
        must not call this method.
        """
        with self._client.condition:
            if self.epoch == epoch and not self._core.revoked:
                self.ask("operations of this epoch must be aborted")
            while 0 < epoch >= self._core.all_heard:
                self._raise_if_out()
                self._client.condition.wait()

    def wait_lost(self, workers: Collection[int], timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until the run has left out one of ``workers``. Return whether it has.

        Raises ``Fenced`` or ``CoordinatorLost`` if this worker is out.
        """
        with self._client.condition:
            self._client.condition.wait_for(
                lambda: self._core.out is not None or not self.opened_members.issuperset(workers), timeout
            )
            self._raise_if_out()
            return not self.opened_members.issuperset(workers)

    def give_up(self, code: int, reason: str) -> None:
        """Request the end of the run for all workers, with exit code ``code``; only the run's first request counts.

        Does not wait: every member's next call raises ``CoordinatorLost(reason, code)``. The request is repeated if the
        coordinator is lost. ``reason`` is cut to 2,000 characters. Does nothing if this worker is out. Raises
        ``ValueError`` if ``code`` is not between 1 and 255.
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
        """Report the exception that ends this process. Return whether a coordinator received the report in time.

        Waits at most ``EXCEPTION_REPORT_SECONDS``. ``error``: the exception's type and message, cut in the middle to
        2,000 characters. ``traceback``: likewise, 16 Ki. ``group``: the worker's replica. ``tried``: all microbatches
        of the iteration that may be the cause, with ``microbatch`` last; if empty, ``phase`` is the cause. ``own``:
        True if this worker's host or device is at fault. Reports of several replicas may end the run for all
        (``ending``). Raises ``ValueError`` for a negative number.
        """
        if min(iteration, microbatch or 0, group) < 0:
            raise ValueError(f"negative number: iteration {iteration}, microbatch {microbatch} or group {group}")
        error, traceback = cut_middle(error, MAX_ERROR), cut_middle(traceback, MAX_TRACEBACK)
        phase, last = phase[:256], sorted(tried)[-MAX_TRIED:]
        report = ReportException(iteration, error, traceback, WorkerId(group), microbatch, phase, last, own)
        with self._client.condition:
            self._say(self._core.report_exception, report)
            self._client.condition.wait_for(lambda: self._core.noted or self._core.out, EXCEPTION_REPORT_SECONDS)
            return self._core.noted

    def leave(self) -> None:
        """Leave the run normally: this worker has finished, so its end is no death. Harmless if it is out."""
        death_notice.leaving()
        self._say(self._core.leave)
        self._client.close()

    def leave_idle(self) -> None:
        """Leave normally, as a worker without a part in the current epoch; the other workers continue the run."""
        if self._core.out is None:
            self.idle()
        self.leave()

    # -- private ------------------------------------------------------------------------------------------------------

    def _say(self, method: Callable[..., list[MemberEffect]], *arguments: object) -> None:
        """Call ``method`` of the core, which sends a message, unless this worker is out."""
        with self._client.condition:
            if self._core.out is None:
                self._client.call(method, *arguments)

    def _raise_if_out(self) -> None:
        if self._core.out is not None:
            raise self._core.out

    def _raise_if_revoked(self) -> None:
        if self._core.revoked:
            raise EpochRevoked(self.epoch, self._revoked_reason)

    def _notified(self, notice: Notify) -> None:
        told = notice.message
        if isinstance(told, to_member.Revoke):
            self._revoked_reason = told.reason
            for callback in self._callbacks:
                callback(told.epoch, told.reason)
            self._say(self._core.heard, told.epoch, told.term)  # all callbacks have returned
        elif told is None:
            for callback in self._callbacks:
                callback(0, str(self._core.out))


def connect(
    settings: Settings | None = None,
    environ: Mapping[str, str] = os.environ,
    addresses: Sequence[Address] | None = None,
) -> Session:
    """Open the session of this worker (``Session.connect``) from recover-run's environment variables.

    Also raise the limit of open files, and let the launcher remove multiprocessing's leftover sockets and detect this
    process's death immediately. ``addresses``: candidates to use instead of the environment's; if the two differ, the
    session has no node agent, because the launcher attaches only to its own candidates. Raises KeyError if the launcher
    gave no coordinator or no rank, ValueError for a malformed address, SecretError without a usable secret.
    """
    if handover.is_prepared():
        raise RuntimeError(
            "this process was started in advance, and is no worker yet: before the script joins a run, it must call "
            "load() of recover_megatron.megatron_hooks.entry.program (--prepared-workers 0: no such process)"
        )
    system.use_all_descriptors()
    system.keep_sockets(environ)
    death_notice.hold(environ)
    node_agent, text = environ.get(variables.NODE_VARIABLE), environ.get(variables.COORDINATOR_VARIABLE)
    if addresses is None:
        addresses = _launchers_addresses(environ[variables.COORDINATOR_VARIABLE])
    elif text is None or list(addresses) != _launchers_addresses(text):
        node_agent = None
    worker, secret, newcomer = worker_id(environ), find_secret(environ), is_newcomer(environ)
    relay = environ.get(variables.RELAY_VARIABLE, "") if node_agent is not None else ""
    return Session.connect(addresses, worker, secret, settings, node_agent, newcomer=newcomer, relay=relay)


def worker_id(environ: Mapping[str, str] = os.environ) -> WorkerId:
    """Return this process's worker id. Raises KeyError if the launcher gave neither an id nor a rank."""
    return WorkerId(int(environ.get(variables.WORKER_ID_VARIABLE) or environ["RANK"]))


def is_newcomer(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this worker was not launched with the run."""
    return environ.get(variables.JOIN_VARIABLE) == "1"


def _launchers_addresses(text: str) -> list[Address]:
    try:
        return parse_addresses(text)
    except ValueError as error:
        raise ValueError(f"{variables.COORDINATOR_VARIABLE}={text}: {error}") from None
