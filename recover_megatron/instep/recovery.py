"""A worker's part in the run: epochs, decisions, sections that are tried again, and what becomes of an orphan.

                 rendezvous                              rendezvous
    PLACED(e) -------------> PLACED(e+1) ...  PLACED(e) ------------> too few replicas: the run ends, exit code 10
        |    ^
        |    '-- an epoch at a boundary puts it into a new replica -------------.
        |  a worker of my own replica is gone (the session's thread sees it in  |
        |  the revoke; or my replica's communication fails, maybe earlier)      |
        v                                                                       |
    SPARE --(joins every epoch without a place: spare.py)-----------------------+--> the run's end

What needs workers of all replicas is part of a *decision*: a training step, an evaluation, a checkpoint, a barrier of
all.  (What some of them do together between two decisions: `exchange`.)  Every worker passes the same decisions in the
same order and numbers them; a decision is over when all have reported it done (``agree``), and whoever is told
otherwise meets the others and, but for a step, starts it again.

Before a step lies a *boundary*: where a plan has said that spares make new replicas, all meet there once more, and the
plan of that epoch places them.  The step that follows is their first decision.

An orphan's main thread may be stuck in a call that nothing wakes, so it is the session's thread that sees to it that
the others need not wait: it shuts the replica's connections and starts the thread that joins in the orphan's name.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from recover_megatron.collectives.errors import EpochRevoked
from recover_megatron.instep.edges import MOST, Edges, explanation, news, roads_of, why_out
from recover_megatron.instep.errors import NoReplica, Orphaned, OtherPosition, RunOver, StateLost
from recover_megatron.instep.exchange import Exchange
from recover_megatron.instep.generation import Fabric, Generation
from recover_megatron.instep.grid import LaunchGrid
from recover_megatron.instep.hooks import Hooks, nothing
from recover_megatron.instep.losses import Loss, Losses
from recover_megatron.instep.plan import Decision, Rules, Status, decide
from recover_megatron.instep.shares import Shares
from recover_megatron.instep.spare import LINGER_SECONDS, Mirror, Over, Rebuild, Spare
from recover_megatron.instep.staging import Kept
from recover_megatron.instep.standing import Standing
from recover_megatron.membership.errors import (
    EXIT_FENCED,
    EXIT_LOST_MAJORITY,
    EXIT_NO_REPLICA,
    EXIT_STATE_LOST,
    CoordinatorLost,
    Fenced,
)
from recover_megatron.membership.session import Session

BLAME_SECONDS = 1.0
"""How long to wait for the news of a death after my replica's communication failed, before saying so myself."""


class Recovery(Standing):
    """See the module's text.  One per worker; the main thread calls it, the session's thread its revoke callback."""

    def __init__(
        self,
        session: Session,
        me: int,
        grid: LaunchGrid,
        fabric: Fabric,
        hooks: Hooks,
        *,
        slot: int | None,
        node: str = "",
        rules: Rules | None = None,
        min_replicas: int = 1,
        verify_interval: int = 0,
    ) -> None:
        """``slot``: where this worker stands at launch; None: nowhere yet.  ``verify_interval``: see ``boundary``."""
        self._rules = rules or Rules()
        super().__init__(session, hooks, me, grid, Shares(grid, self._rules.multiple_of))
        self._at_launch = slot is not None
        if slot is not None:
            self._stand(*grid.place(slot))
        self.losses = Losses(grid)
        self._node = node
        self.fabric = fabric
        self.edges = Edges(me)
        self._statuses: dict[int, Status] = {}
        self._explained = ""
        self._why = ""
        """Why the last epoch ended, as the coordinator told."""
        self._min_replicas = min_replicas
        self._verify_interval = verify_interval
        self._verified = 0
        self._at = 0
        self._pending: Decision | None = None
        self._lock = threading.Lock()
        self._spare: Spare | None = None
        self._finished = False
        self.section_kind = ""
        """What the last section was, or is."""
        self.kept = Kept()
        """What operations of the present section wrote over."""
        self.exchange = Exchange(self)
        """Operations outside of decisions."""
        session.on_revoke(self._revoked)

    @property
    def orphaned(self) -> bool:
        """Whether this worker's replica is known to be broken."""
        with self._lock:
            return self._spare is not None

    @property
    def spare_seconds(self) -> float:
        """How long this worker has been without a place."""
        with self._lock:
            return 0.0 if self._spare is None else self._spare.seconds

    # ---- the run

    def start(self) -> None:
        """Join the first epoch: from now on deaths are survived.  Raises as ``rendezvous`` does."""
        self._join(self._status())

    def finish(self) -> None:
        """The training is over for this worker: leave in order, when all have come this far."""
        self.section("end", lambda: None)
        self._finished = True
        self.generation.close()
        self.session.leave()

    def begin(self) -> int:
        """The number of the next decision."""
        self._at += 1
        self.tried.clear()
        return self._at

    @property
    def at(self) -> int:
        """The number of the decision under way, or of the last one."""
        return self._at

    def boundary(self, prepare: Callable[[], Any]) -> None:
        """Before a step: meet the others once more if a plan has called for it.

        ``prepare`` is called before and must be made of sections: what must not wait until new mates are here.  Every
        ``verify_interval`` iterations all meet anyway: the digests of their states are compared (see ``plan``).
        """
        while self._wanted_at_boundary():
            before = self.decision
            prepare()
            if self.decision is before:
                self._verified = self.hooks.iteration()
                status = self._status(at=self._at + 1, boundary=True, digest=self.hooks.digest())
                self.rendezvous(status)
        self.shares.easing = self.decision.at == self._at + 1 and bool(self.decision.transfers)

    def _wanted_at_boundary(self) -> bool:
        if self._pending is not None and self._pending.at == self._at + 1:
            return False  # others have begun this step: there will be another one
        if self.decision.at == self._at + 1 and self.decision.version is not None:
            return False  # the epoch was made for this boundary
        if self.decision.regroup:
            return True
        return self.verifying and self._verified != self.hooks.iteration()

    @property
    def verifying(self) -> bool:
        """Whether states are compared before the step of this iteration."""
        return self._verify_interval > 0 and self.hooks.iteration() % self._verify_interval == 0

    @property
    def joining_next(self) -> bool:
        """At a boundary: whether the step that follows is one that others have begun, or some begin without a state."""
        begun = self._pending is not None and self._pending.at == self._at + 1
        return begun or (self.decision.at == self._at + 1 and bool(self.decision.fresh))

    def pending(self, number: int) -> Decision | None:
        """The plan of step ``number``, if the present epoch was made when others had begun it and this worker not."""
        pending, self._pending = self._pending, None
        return pending if pending is not None and pending.at == number else None

    def check(self) -> None:
        """Raise ``EpochRevoked`` if the present epoch is over, ``Orphaned`` if my replica is."""
        self._leave_if_orphan()
        self.generation.check()

    def stay(self) -> None:
        """Raise ``Orphaned`` if my replica is broken, ``Fenced`` or ``CoordinatorLost`` if this worker is out."""
        self._leave_if_orphan()
        self.session.wait_revoked(0)

    def agree(self, number: int) -> None:
        """Report the decision done and wait for all; raises as ``Session.agree`` does."""
        self.strike("agree")
        self.mark("agree", waiting=True)
        self.session.agree(number)
        self.warm = True

    def section(
        self, kind: str, run: Callable[[], Any], *, reset: Callable[[], None] = nothing, together: bool = False
    ) -> Any:
        """Run something that needs all workers to its end: again from the start when an epoch ends in the middle.

        ``run`` must either raise ``EpochRevoked`` or have no effect that a second run would double; ``reset`` undoes
        the rest, but for what operations over replicas wrote over their input: that is ``kept``.

        ``together``: in ``run`` the workers of a replica wait for each other, and ``run`` does not raise
        ``EpochRevoked``. So they begin it together, whichever of them knows already that the epoch is over.
        """
        number = self.begin()
        result = None
        self.section_kind = kind
        self.kept.forget()
        while True:
            try:
                if together:
                    self._leave_if_orphan()
                else:
                    self.check()
                outcome = run()
                # Not left to ``agree``: the session may not have heard yet of what an operation of ``run`` has met (and
                # gone on after: ``Mode.DEFERRED``), and what is reported done counts in later epochs, too.
                self.check()
                if self.decision.at == number:
                    # The epoch was made in the middle of this section.  What is reported stays so: a column that had
                    # reported it could see it committed, by what others report now, while one of its members runs it
                    # again and needs the rest.  So nobody reports before all have run it again.
                    with self.waiting(kind):
                        self.generation.any(False, tuple(sorted(self.live)))
                result = outcome
                self.agree(number)
                self.kept.forget()
                return result
            except EpochRevoked:
                if self.committed_before_the_end(number):
                    return result
                self.rendezvous(self._status(at=number))
                if self.committed(number):  # only when all had reported it done, this worker too
                    return result
                self.kept.restore()
                reset()
                self.hooks.log("again", what=kind)

    def committed_before_the_end(self, number: int) -> bool:
        """After ``EpochRevoked``: whether the decision was committed in the epoch that ends: all of it say the same.

        A worker that had reported it in an earlier epoch may be repeating it when that happens. Its mates go on, into
        operations that need it: it must not wait for them at a rendezvous. (A coordinator tells of its commits before
        it tells of the epoch's end, so with the end they are known.) Raises as ``stay`` does.
        """
        self._leave_if_orphan()
        self.session.ask(*self.failure())  # nothing, if the end is known
        self.session.wait_revoked()
        return self.session.committed >= number

    def failure(self) -> tuple[str, int | None]:
        """Why the epoch cannot go on, as this worker has found, and with whom it failed, if that is known."""
        failure = self.generation.failure
        if failure is None:
            return "an operation of the epoch has failed", None
        worker = None if failure.slot is None else self.standing.get(failure.slot)
        if worker is not None and failure.road:
            self.edges.noticed(worker)
        elif failure.road:
            self.edges.suspect(self.decision.workers)
        return failure.reason + ("" if worker is None else f" (with worker {worker})"), worker

    def rendezvous_in_step(self, number: int, total: int, ran: Sequence[int]) -> None:
        """As ``rendezvous``, in the middle of step ``number`` of ``total`` microbatches: my replica holds ``ran``."""
        self.rendezvous(self._status(at=number, step=True, total=total, ran=tuple(ran)))

    def _status(self, **fields: Any) -> Status:
        hooks, board = self.hooks, self.fabric.board.address
        told = {"position": self.position, "version": hooks.version(), "node": self._node, "board": board, **fields}
        return Status(self.replica, iteration=hooks.iteration(), checkpoint=hooks.last_checkpoint(), **told)

    def rendezvous(self, status: Status) -> None:
        """Meet the others and take up the plan of the next epoch.

        Raises ``Orphaned`` when this worker has no place any more, ``NoReplica`` when nobody has, ``Fenced`` and
        ``CoordinatorLost`` when this worker is out.
        """
        self._leave_if_orphan()
        self.generation.close()
        self.strike("recovery")
        self._join(status)

    def meet(self, status: Status, reason: str) -> tuple[Decision, Loss | None]:
        """Join the next epoch: what it decided, and whom it found missing.  For the main thread and for the spare's."""
        status = replace(status, unreached=self.edges.look(status.at, lambda: self.session.opened_members))
        plan = self.session.join(status.to_json(), reason)
        statuses = {int(worker): Status.from_json(value) for worker, value in plan.data["statuses"].items()}
        decision = decide(plan.epoch, statuses, self.grid, self._rules)
        self.edges.told(decision, statuses, plan.committed)
        self._statuses = statuses
        note = explanation(decision, self.me, self.replica if self.placed else None, self._explained)
        if note != self._explained:
            self._explained = note
            self.session.note(note)
        with self._lock:
            self._committed = plan.committed
            return decision, self.losses.note(decision, self._decision)

    def _join(self, status: Status) -> None:
        started, before = time.perf_counter(), self._decision
        decision, lost = self.meet(status, "asked for by a worker")
        if self.me == min(decision.workers, default=self.me):
            for line in news(before, decision, self._statuses, self.edges.tries, self._why):
                _say(line)
        self.give_up_unless_enough(decision)
        if decision.place(self.me) is None:
            reason = why_out(decision, self.replica) or "a worker of its replica has no place any more"
            self._orphan(reason)
            raise Orphaned(reason)
        self._take_up(decision)
        self._pending = decision if decision.step else None
        if status.at == decision.at:
            self._pending = None
        self.hooks.planned(decision)
        self.log_plan(decision, lost, time.perf_counter() - started)

    def log_plan(self, decision: Decision, lost: Loss | None, seconds: float) -> None:
        """Write the plan's event; ``seconds``: what it took to meet."""
        self.hooks.log(
            "plan",
            epoch=decision.epoch,
            replicas=list(decision.replicas),
            spares=list(decision.spares),
            lost_workers=lost.workers if lost else [],
            lost_replicas=lost.replicas if lost else [],
            grid={str(replica): list(workers) for replica, workers in decision.grid.items()},
            fresh=list(decision.fresh),
            mended=list(decision.mended),
            disputed=list(decision.disputed),
            broken=[list(pair) for pair in sorted(decision.broken)],
            order=list(decision.order),
            put_out={str(replica): [list(pair) for pair in its] for replica, its in decision.put_out.items()},
            seconds={"rendezvous": round(seconds, 6)},
            **self.hooks.describe(decision),
        )

    def _take_up(self, decision: Decision) -> None:
        """Stand where the decision says, with groups that live as long as its epoch."""
        place = decision.place(self.me)
        assert place is not None
        self.exchange.settled()
        self.shares.forget()
        with self._lock:
            self._stand(*place)
            self._decision = decision
            boards, roads = decision.boards_by_slot(self.grid), roads_of(decision, self.grid)
            self._generation = Generation(decision.epoch, self.slot, self.fabric, boards, roads)
        self._end_if_over(decision)

    def _end_if_over(self, decision: Decision) -> None:
        if self.session.revoked or self.session.epoch != decision.epoch:
            self.generation.end("the epoch was over before its groups were opened")

    def give_up_unless_enough(self, decision: Decision) -> None:
        """End the run, for all, if too few replicas are left or may come; raises ``NoReplica`` or ``StateLost``.

        Both say who was lost when.  Also if the run does not get any further: raises ``CoordinatorLost``.
        """
        if self.edges.tries >= MOST:
            reason = f"{self.edges.tries + 1} epochs at one point, and nobody was lost; the last one ended: {self._why}"
            self.session.give_up(EXIT_LOST_MAJORITY, reason)
            raise CoordinatorLost(reason, EXIT_LOST_MAJORITY)
        if decision.enough >= self._min_replicas:
            return
        message = self.losses.last_words(decision, self._min_replicas)
        self.session.give_up(EXIT_STATE_LOST if decision.state_lost else EXIT_NO_REPLICA, message)
        raise StateLost(message) if decision.state_lost else NoReplica(message)

    def lose_state(self, what: str) -> NoReturn:
        """End the run, for all: something of the training's state was lost with those who are gone."""
        message = self.losses.last_words(replace(self.decision, state_lost=what), self._min_replicas)
        self.session.give_up(EXIT_STATE_LOST, message)
        raise StateLost(message)

    # ---- orphans and spares

    def replica_failed(self, error: BaseException) -> None:
        """My replica's communication failed in the main thread: somebody of it is gone, or its connections are.

        Returns when this worker has become a spare.
        """
        epoch = self.session.epoch
        if self._spare is None and self.session.epoch == epoch and not self.session.revoked:
            self.session.wait_revoked(BLAME_SECONDS)
        if self.placed and not self._lost_of_mine():
            self.edges.suspect(self.decision.grid[self.replica])
        self._orphan(f"{type(error).__name__}: {error}"[:500])

    def wait_as_spare(self, **offer: Any) -> Decision:
        """In the main thread, out of the training: wait for a place; the decision that has one.

        ``offer``: what this worker can bring (``version``, ``digest``; ``position`` None: it can not come back).
        Raises ``OtherPosition`` when another model is wanted of it, ``RunOver`` when there will be no place.
        """
        spare = self._spare or self.be_spare("it has no place yet")
        while isinstance(outcome := spare.arrive(**offer), Mirror):
            with self._lock:
                boards = outcome.decision.boards_by_slot(self.grid)
                self._generation = Generation(outcome.decision.epoch, -1 - self.me, self.fabric, boards)
            self._end_if_over(outcome.decision)
            offer = offer | self.hooks.mirror(outcome.decision, self._generation)
            self._generation.close()
        if isinstance(outcome, Over):
            raise RunOver(outcome.code, outcome.reason)
        if isinstance(outcome, Rebuild):
            raise OtherPosition(outcome.position)
        return outcome.decision

    def displaced(self, note: str) -> None:
        """This worker cannot take the place that it was given: it is a spare again."""
        self._orphan(note)

    def come_back(self, decision: Decision) -> None:
        """Take up the place that ``decision`` has for this spare: its next decision is the one that all begin now."""
        with self._lock:
            self._spare = None
        self._take_up(decision)
        self._pending = None
        self._at = decision.at - 1

    def _leave_if_orphan(self) -> None:
        if self.orphaned or self._lost_of_mine():
            self._orphan("a worker of its replica is gone")
            raise Orphaned(f"replica {self.replica} is broken")

    def _lost_of_mine(self) -> list[int]:
        """Workers of my replica that the run does not count on any more."""
        return self.lost_mates if self.session.revoked else []

    @property
    def lost_mates(self) -> list[int]:
        """Workers of the replica that I had or have a place in, that the newest epoch does without."""
        return sorted(self.mates - self.session.opened_members)

    @property
    def mates(self) -> frozenset[int]:
        """The workers of the replica that I had or have a place in, this one with them; empty without a place."""
        return frozenset(self.decision.grid[self.replica]) if self.placed else frozenset()

    def _revoked(self, epoch: int, reason: str) -> None:
        """In the session's thread: an epoch has ended, or (epoch 0) this worker's part in the run."""
        self._why = reason
        with self._lock:
            generation, started = self._generation, self.started
        if generation is not None:
            generation.end(reason)
        if epoch == 0:
            self.exchange.wake()
        else:
            self.exchange.opened(epoch, self.session.opened_members)
        if self._finished:
            return
        if epoch == 0:
            self._out(reason)
        elif not started and self.session.plan is not None:
            pass  # the run has begun without this worker's main thread, which is about to take up its first plan
        elif not started:
            if self._at_launch and self.session.dead:
                names = ", ".join(map(str, sorted(self.session.dead)))
                _say(f"worker {names} died before the training began, which is not survived yet: {reason}")
                os._exit(1)
        elif lost := self._lost_of_mine():
            self._orphan(f"worker {', '.join(map(str, lost))} of its replica is gone")

    def be_spare(self, note: str) -> Spare:
        """Have the spare's thread join from now on; the one that does so already, if there is."""
        with self._lock:
            if self._spare is not None:
                return self._spare
            status = replace(self._status(at=self._at), replica=None, version=None, ready=False, note=note)
            self._spare = Spare(self, status)
        self.session.show(None)
        self.session.mark(status.iteration, "spare")
        self._spare.start()
        return self._spare

    def _orphan(self, note: str) -> None:
        if self.orphaned:
            return
        if self._generation is not None:
            self._generation.end(note)
        self.hooks.abort_replica()
        self.be_spare(note)
        self.exchange.leave()

    def _out(self, reason: str) -> None:
        """This worker is out; a main thread that is stuck inside its replica must not keep the process."""
        self.hooks.abort_replica()
        code = EXIT_FENCED if self.session.fenced else self._exit_code()
        timer = threading.Timer(LINGER_SECONDS, os._exit, [code])
        timer.daemon = True
        timer.start()

    def _exit_code(self) -> int:
        try:
            self.session.check()
        except CoordinatorLost as lost:
            return lost.code
        except (EpochRevoked, Fenced):
            pass
        return EXIT_FENCED


def _say(message: str) -> None:
    print(f"recover: {message}", file=sys.stderr, flush=True)
