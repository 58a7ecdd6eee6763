"""Who is late, and what becomes of them: the watching part of ``Coordinator``.

Late is who is silent, who hangs (``detect``), and whose connection has ended although its process may be running. What
is done about it is ``stall``'s answer: they are put out, or waited for.
"""

from __future__ import annotations

from collections.abc import Hashable

from recover_megatron.membership.detect import judge
from recover_megatron.membership.epochs import Epochs, State
from recover_megatron.membership.records import to_runs
from recover_megatron.membership.roster import Fate, Worker
from recover_megatron.membership.stall import Answer
from recover_megatron.membership.view import statuses_of

NAMED = 4
"""Of those that a stall has caught so many are told of one by one."""


class Lateness(Epochs):
    """Puts out the late, or tells of the stall for whose end the run waits."""

    def _lost_touch(self, worker: Worker, reason: str, now: float) -> None:
        """The connection of a worker that may still be running has ended."""
        if self.state in (State.STANDBY, State.GATHERING):
            self._leave(worker, reason, now)
        else:
            self._unbind(worker)
            self._unreached[worker.number] = (now, reason)
            self._put_out_the_late(now)

    def _unacknowledged(self, worker: Worker, silence: float, now: float) -> None:
        """The host of a worker that is not heard does not answer either."""
        reason = f"its host has acknowledged nothing for {silence:.1f} s"
        if self.state in (State.STANDBY, State.GATHERING):
            self._leave(worker, reason, now)
        else:
            self._deaf[worker.number] = now, reason
            self._put_out_the_late(now)

    def _leave(self, worker: Worker, reason: str, now: float) -> None:
        """Before this coordinator has opened an epoch nobody waits for a worker that is not reached."""
        if self.state is State.STANDBY:
            self._unbind(worker)
        else:
            self._exclude(worker, reason, now)

    def _put_out_the_late(self, now: float) -> bool:
        """Put them out, or wait for them; whether all wait for each other."""
        late = self._not_heard(now)
        members, settings, fresh = self.opened.members, self.settings, self.stall.fresh
        if self.state is State.STEADY:
            members = self.formed.members - self._idle(self.formed)
        group = [w.progress for m in members if (w := self.workers[m]).session is not None and w.fate is Fate.LIVE]
        patience = settings.hang_timeout if self.formed.epoch else settings.start_timeout
        judgement = judge(group, now, patience, fresh)
        late |= {number: self._no_progress(number, now) for number in judgement.hung}
        slow = {number: self._no_progress(number, now) for number in judgement.slow}
        if not late and not slow and self.stall.since is None:
            return judgement.stuck
        replica_of = self._replica_of()
        half = judge(group, now, patience / 2, fresh)
        slow |= self._held_up(late, {replica_of.get(number) for number in half.slow} - {None}, replica_of, now)
        late = {number: reason for number, reason in late.items() if number not in slow}
        suspected = {w.number for w in self._quiet(settings.heartbeat_timeout / 2, now)}
        suspected |= set(half.hung)
        answer = self.stall.consider(late, slow, suspected, replica_of, now)
        self._out_together = answer.put_out
        for number in sorted(answer.put_out):
            self._exclude(self.workers[number], late[number], now)
        self._out_together = frozenset()
        self._tell(answer, replica_of, now)
        return judgement.stuck

    def _not_heard(self, now: float) -> dict[int, str]:
        """Who is silent or has lost its connection, and why it is late."""
        fresh = self.stall.fresh
        late = {w.number: f"silent for {now - w.heard:.1f} s" for w in self._silent(now, fresh)}
        self._deaf = {
            number: (at, reason)
            for number, (at, reason) in self._deaf.items()
            if now - at <= self.settings.heartbeat_interval  # it is asked again and again, see ``_silent``
            and at > max(self.workers[number].heard, fresh)
            and self.workers[number].fate is Fate.LIVE
        }
        late |= {number: reason for number, (_, reason) in self._deaf.items()}
        self._unreached = {
            n: why
            for n, why in self._unreached.items()
            if self.workers[n].session is None and self.workers[n].fate is Fate.LIVE
        }
        for number, (since, reason) in self._unreached.items():
            if since > fresh or now > fresh + 1.2 * self.settings.heartbeat_timeout:
                late[number] = reason
        return late

    def _no_progress(self, number: int, now: float) -> str:
        progress = self.workers[number].progress
        where = f"iteration {progress.iteration}, {progress.phase or 'no phase'}"
        return f"no progress for {now - progress.marked:.1f} s at {where} while others wait"

    def _held_up(
        self, late: dict[int, str], slow: set[Hashable], replica_of: dict[int, Hashable], now: float
    ) -> dict[int, str]:
        """Those of the late that run and have a mate that waits for storage: they wait for it, and cannot say so."""
        return {
            number: reason
            for number, reason in late.items()
            if replica_of.get(number) in slow
            and self.workers[number].session is not None
            and self._silence(self.workers[number], now) <= self.settings.heartbeat_timeout
        }

    def _replica_of(self) -> dict[int, Hashable]:
        """The replicas of the last plan that have lost nobody, but to what makes workers late; see ``stall``.

        What a worker says of its place now, else what the plan's statuses say. Where there are no replicas each worker
        is one.
        """
        told = statuses_of(self._plan)
        replica_of: dict[int, Hashable] = {}
        broken: set[Hashable] = {None}
        for number in (self.formed.members - self._idle(self.formed)) | self.stall.lately.keys():
            worker = self.workers[number]
            place = worker.progress.place
            replica: Hashable = place[0] if place else told.get(number, {}).get("replica", f"of {number}")
            if worker.fate is Fate.LIVE or (worker.fate is Fate.OUT and number in self.stall.lately):
                replica_of[number] = replica
            else:
                broken.add(replica)
        return {number: replica for number, replica in replica_of.items() if replica not in broken}

    def _tell(self, answer: Answer, replica_of: dict[int, Hashable], now: float) -> None:
        """Say on the launchers' consoles and in the event log that the run waits, or that it does not any more."""
        if answer.say:
            assert self.stall.since is not None
            waited, seconds, left = self.stall.waited, now - self.stall.since, self.stall.left(now)
            text = (
                f"STALLED: {self._who(waited)}; the run waits for them, {left:.0f} s more at most "
                "(--recover-stall-timeout)"
            )
            replicas = len({replica_of[number] for number in waited if number in replica_of})
            self._log("stalled", workers=to_runs(waited), replicas=replicas, seconds=seconds, left=left, reason=text)
            self._send(self._witness_sessions(), {"type": "tell", "text": text[:2000]})
        if answer.over is not None:
            text = f"the stall is over after {answer.over:.0f} s: the run goes on"
            self._log("stall_over", seconds=answer.over)
            self._send(self._witness_sessions(), {"type": "tell", "text": text})

    def _who(self, waited: dict[int, str]) -> str:
        """Workers with their hosts and what they do, for people."""
        named = [f"{self.workers[number].name}: {waited[number]}" for number in sorted(waited)[:NAMED]]
        more = [f"and {len(waited) - NAMED} more workers"] * (len(waited) > NAMED)
        return "; ".join([*named, *more])
