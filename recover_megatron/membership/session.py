"""A worker's session: what the training loop and the collectives call.

Every wait ends: with its result, with ``EpochRevoked``, with ``Fenced``, or with ``CoordinatorLost``.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence

from recover_megatron.membership.auth import Secret
from recover_megatron.membership.client import Address, Client
from recover_megatron.membership.errors import EXIT_FENCED, CoordinatorLost, EpochRevoked, Fenced
from recover_megatron.membership.events import Notify
from recover_megatron.membership.member import Member
from recover_megatron.membership.records import Json, Plan, Settings
from recover_megatron.membership.wire import MAX_TO_COORDINATOR, encode

RevokeCallback = Callable[[int, str], None]


class Session:
    """One worker's place in the run. Create it with ``connect``; the methods may be called from any thread.

    Use it in one process only: a forked child has no session (its copies of the sockets are closed at once).
    """

    def __init__(self, client: Client, core: Member, exit_when_out: float | None = None) -> None:
        self._client = client
        self._exit_when_out = exit_when_out
        self._core = core
        self._callbacks: list[RevokeCallback] = []
        self._revoked_reason = ""

    @classmethod
    def connect(
        cls,
        addresses: Sequence[Address],
        worker: int,
        secret: Secret,
        settings: Settings | None = None,
        witness: str | None = None,
        on_revoke: RevokeCallback | None = None,
        exit_when_out: float | None = None,
    ) -> Session:
        """Start the session of ``worker`` and return at once; the first ``join`` waits for the others.

        ``addresses``: the candidate coordinators, in the same order for all. ``witness``: the node name under which
        the worker's launcher runs a ``Witness``; None if there is none. ``exit_when_out``: seconds after which the
        session's thread ends a process that is out of the run but still there, its main thread stuck in a call that
        nothing wakes; the exit code is ``EXIT_FENCED``, or that of ``CoordinatorLost``. None: never.
        """
        settings = settings or Settings()
        hello = {
            "worker": worker,
            "incarnation": secrets.token_hex(16),
            "host": socket.gethostname()[:256],
            "pid": os.getpid(),
        }
        if witness is not None:
            hello["witness"] = witness
        core = Member(hello, len(addresses), settings, now=time.monotonic())
        session: list[Session] = []

        def notify(notice: Notify) -> None:
            if session:
                session[0]._notified(notice)

        client = Client(core, addresses, secret, notify)
        session.append(cls(client, core, exit_when_out))
        if on_revoke is not None:
            session[0].on_revoke(on_revoke)
        return session[0]

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
    def revoked(self) -> bool:
        """Whether that epoch is over. A plain attribute read: cheap enough for every step of a loop."""
        return self._core.revoked or self._core.out is not None

    @property
    def committed(self) -> int:
        """The last iteration known to be committed."""
        return self._core.committed

    @property
    def fenced(self) -> bool:
        """Whether this worker was put out of the run: end the process."""
        return isinstance(self._core.out, Fenced)

    def on_revoke(self, callback: RevokeCallback) -> None:
        """Call ``callback(epoch, reason)`` in the session's thread when an epoch is revoked (``epoch``: the next one's
        number), and with epoch 0 when this worker is out. It must return soon and must not wait for the session."""
        self._callbacks.append(callback)

    def check(self) -> None:
        """Raise if the epoch is over or this worker is out; return otherwise."""
        with self._client.condition:
            self._raise_if_out()
            self._raise_if_revoked()

    # -- the protocol -------------------------------------------------------------------------------------------------

    def mark(
        self,
        iteration: int,
        phase: str,
        microbatch: int | None = None,
        waiting: bool = False,
        allow: float = 0.0,
    ) -> None:
        """Report progress: no system call, the next heartbeat carries the latest mark.

        ``waiting``: from now on this worker waits for others (in a collective). ``allow``: seconds this phase may take
        without another mark, on top of the hang timeout (a checkpoint).
        """
        self._core.mark(iteration, phase[:256], microbatch, waiting, allow)

    def join(self, status: Json, reason: str = "") -> Plan:
        """Join the next epoch with ``status`` and wait for its plan, through all restarts of the rendezvous.

        Every member of the epoch gets the same plan. If ``plan.committed`` has reached an iteration that this worker
        reported done, that iteration is committed: apply its step. If the present epoch was not revoked, joining
        asks for a new one; say why in ``reason``. Raises ``Fenced`` or ``CoordinatorLost``; ``ValueError`` for a status
        that is no JSON or too long.
        """
        encode({"type": "join", "status": status}, MAX_TO_COORDINATOR // 2)
        with self._client.condition:
            self._raise_if_out()
            before = self.epoch
            self._client.perform(self._core.join(status, reason or "no reason given"))
            while self.epoch == before or self._core.revoked:
                self._raise_if_out()
                self._client.condition.wait()
            plan = self._core.plan
            assert plan is not None
            return plan

    def report_done(self, iteration: int) -> None:
        """Report that every segment of ``iteration`` is REDUCED here; does not wait. May raise as ``agree`` does."""
        with self._client.condition:
            self._raise_if_out()
            if self._core.committed < iteration:
                self._client.perform(self._core.report_done(iteration))
                self._raise_if_revoked()

    def wait_committed(self, iteration: int) -> None:
        """Wait until ``iteration`` is committed. May raise as ``agree`` does."""
        with self._client.condition:
            while self._core.committed < iteration:
                self._raise_if_out()
                self._raise_if_revoked()
                self._client.condition.wait()

    def agree(self, iteration: int) -> None:
        """Report ``iteration`` done and wait until it is committed: all members of the epoch have reported it.

        Raises ``EpochRevoked`` when the epoch ends first: the iteration may or may not have been committed, the next
        plan tells. Raises ``Fenced`` or ``CoordinatorLost`` when this worker is out.
        """
        self.report_done(iteration)
        self.wait_committed(iteration)

    def leave(self) -> None:
        """Leave in order: the run is finished for this worker; its end is no death. Harmless when already out."""
        with self._client.condition:
            if self._core.out is None:
                self._client.perform(self._core.leave())
        self._client.close()

    # -- inside -------------------------------------------------------------------------------------------------------

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
        elif notice.kind == "out":
            if self._exit_when_out is not None:
                code = self._core.out.code if isinstance(self._core.out, CoordinatorLost) else EXIT_FENCED
                timer = threading.Timer(self._exit_when_out, os._exit, [code])
                timer.daemon = True
                timer.start()
            for callback in self._callbacks:
                callback(0, str(self._core.out))
