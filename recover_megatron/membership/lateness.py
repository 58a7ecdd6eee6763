"""Workers that are silent or hung, or whose connections have ended although they may be running.

``detect.Stall`` decides whether these workers are evicted or the run waits for them. If a witness (``witness``)
reports a node off, the silent workers of that node are evicted without this decision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from recover_megatron.membership.detect import STORAGE_PHASES, Answer, Stall, WorkerProgress, apart, behind, judge
from recover_megatron.membership.epochs import Epochs, Rendezvous
from recover_megatron.membership.events import Outbox, Probe, State, Statement
from recover_megatron.membership.leadership import Leadership
from recover_megatron.membership.messages import to_member
from recover_megatron.membership.records import WorkerId, Workers, to_runs
from recover_megatron.membership.roster import Fate, Member, Roster
from recover_megatron.membership.view import statuses_of

NAMED = 4
"""Number of stalled workers that a report names one by one."""


class Lateness:
    """Evicts late workers, or reports that the run waits for them (a stall)."""

    def __init__(self, roster: Roster, epochs: Epochs, out: Outbox) -> None:
        self.stall = Stall(roster.settings)
        self.unreached: dict[WorkerId, tuple[float, str]] = {}
        """Worker that may be running although its connection has ended -> time and reason of the connection's end."""
        self._others_wait = False
        """True if some worker was waiting at the last call of ``evict``."""
        self._deaf: dict[WorkerId, tuple[float, str]] = {}
        """Worker whose host acknowledges no data -> time of the last probe, and why the worker is late."""
        self._heard = -math.inf
        """Time before which the silence of no attached worker has begun, so that ``_quiet`` need not search for it."""
        self._roster = roster
        self._epochs = epochs
        self._out = out

    def ask_the_quiet(self, now: float, held_up: bool) -> None:
        """Send ``beat`` to quiet members, and ask the kernel whether the hosts of silent members acknowledge data.

        The kernel is asked (``Probe``) because a live process may not answer for a long time: a worker in a call that
        holds the interpreter lock, or a launcher that is stopped for hours. The kernel is not asked if this process was
        ``held_up`` (paused), because it has sent no data recently. The longer a launcher is silent, the fewer beats it
        receives, so that its receive buffer keeps room for important messages.
        """
        roster, settings = self._roster, self._roster.settings
        seconds = 1.5 * settings.heartbeat_interval
        for worker in self._quiet(seconds, now):
            assert worker.session is not None
            deaf = roster.silence(worker, now) > settings.heartbeat_timeout and roster.vouched(worker, now)
            if deaf and not held_up:
                self._out.do(Probe(worker.session))
            self._out.send([worker.session], to_member.Beat())
        for node_agent in roster.node_agents.values():
            silence = roster.silence(node_agent, now)
            if silence <= seconds or node_agent.session is None:
                continue
            if silence > settings.heartbeat_timeout:
                if not node_agent.silent:
                    self._out.log("witness_gone", node=node_agent.node, reason="silent")
                node_agent.silent = True
                if not held_up:
                    self._out.do(Probe(node_agent.session))
            if silence > 1.1 * node_agent.asked:
                self._out.send([node_agent.session], to_member.Beat())
                node_agent.asked = silence

    def silent(self, now: float, fresh: float = -math.inf) -> list[Member]:
        """Return workers that no launcher vouches for and that were silent for a heartbeat timeout after ``fresh``."""
        timeout = self._roster.settings.heartbeat_timeout
        return [w for w in self._quiet(timeout, now) if now - fresh > timeout and not self._roster.vouched(w, now)]

    def connection_ended(self, worker: Member, reason: str, now: float) -> None:
        """Record that the connection of a worker has ended, although the worker may still be running."""
        self._roster.unbind(worker)
        self.unreached[worker.number] = now, reason

    def unacknowledged(self, worker: Member, reason: str, now: float) -> None:
        """Record that the host of a silent worker acknowledges no data."""
        self._deaf[worker.number] = now, reason

    def excuse(self, pause: float) -> None:
        """Move the times of the current stall forward by ``pause``: the seconds for which this process was paused."""
        self.stall.excuse(pause)

    def evict(self, members: Workers, now: float) -> bool:
        """Evict late ``members``, or wait for them. Return whether all ``members`` wait for each other.

        ``members``: the workers that the run waits for now, in an epoch or in a rendezvous.
        """
        late = self._not_heard(now)
        workers, settings, fresh = self._roster.workers, self._roster.settings, self.stall.fresh
        group = self._group(members)
        patience = settings.hang_timeout if self._epochs.formed.epoch else settings.start_timeout
        waiting = [p.waiting_since for p in group if p.waiting_since is not None]
        self._others_wait = bool(waiting)
        judgement = judge(group, now, patience, fresh)
        late |= {number: self._no_progress(number, now) for number in judgement.hung}
        slow = {number: self._no_progress(number, now) for number in judgement.slow}
        if not late and not slow and self.stall.since is None:
            return judgement.stuck
        replica_of = self._replica_of()
        half = judge(group, now, patience / 2, fresh)
        held_up = self._held_up(late, {replica_of.get(number) for number in half.slow} - {None}, replica_of, now)
        blocked = {replica_of.get(number) for number in held_up}
        slow |= {number: self._no_progress(number, now) for number in half.slow if replica_of.get(number) in blocked}
        slow |= held_up  # reported together with the workers that they wait for
        late = {number: reason for number, reason in late.items() if number not in slow}
        suspected = {w.number for w in self._quiet(settings.heartbeat_timeout / 2, now)}
        suspected |= set(half.hung)
        if self._is_lost_node({*late, *slow, *suspected}, replica_of, now):
            replica_of = {}  # the late workers share only a node, so this is no stall
        self.stall.until = self._until(group, slow) if waiting or late or not slow else math.inf
        answer = self.stall.consider(late, slow, suspected, replica_of, now)
        for number in sorted(answer.evict):
            self._roster.exclude(workers[number], late[number], now, together=answer.evict)
        self._report(answer, replica_of, now)
        return judgement.stuck

    def all_wait(self, members: Workers, now: float) -> None:
        """Request a new epoch because all ``members`` wait for each other, or evict workers.

        A worker that waits *apart* (``detect.apart``) in two such epochs in a row is evicted. Raises RunOver after too
        many such epochs in a row.
        """
        workers, group = self._roster.workers, self._group(members)
        evicted = self._epochs.all_wait(apart(group, self._replica_of()))
        for worker in (workers[number] for number in sorted(evicted)):
            where = f"{worker.progress.phase or 'no phase'} of iteration {worker.progress.iteration}"
            reason = f"all workers wait for each other; it waits again in {where}, which the other workers do not reach"
            self._roster.exclude(worker, reason, now, together=evicted)

    def _group(self, members: Workers) -> list[WorkerProgress]:
        """Return the progress of those ``members`` that are reached."""
        workers = self._roster.workers
        live = members & self._roster.with_fate(Fate.LIVE)
        return [w.progress for m in live if (w := workers[m]).session is not None]

    def _until(self, group: list[WorkerProgress], slow: dict[WorkerId, str]) -> float | None:
        """Return the time until which the run waits for ``slow`` workers whose marks allow more than the stall timeout.

        None: no slow worker's mark allows that much.
        """
        settings, since = self._roster.settings, [p.waiting_since for p in group if p.waiting_since is not None]
        longer = [p for p in group if p.worker in slow and p.allow > settings.stall_timeout]
        ends = (max(p.marked, min(since, default=p.marked)) + settings.hang_timeout + p.allow for p in longer)
        return max(ends, default=None)

    def evict_aside(self, now: float) -> None:
        """Evict workers that were set aside and did not come back in time."""
        workers, settings = self._roster.workers, self._roster.settings
        for number in sorted(self._roster.with_fate(Fate.ASIDE)):
            if now - workers[number].aside_since > max(settings.hang_timeout, settings.grace):
                self._roster.exclude(workers[number], "it was set aside and did not come back", now)

    def set_aside(self, members: Workers, now: float) -> None:
        """If all other ``members`` have waited for one replica longer than the grace, set that replica aside."""
        settings = self._roster.settings
        if settings.grace > 0 and self._others_wait and len(group := self._group(members)) == len(members):
            late = behind(group, self._replica_of(), now, settings)
            self._roster.set_aside(late, f"its replica is late by more than {settings.grace:g} s", now)

    def _is_lost_node(self, away: set[WorkerId], replica_of: dict[WorkerId, Hashable], now: float) -> bool:
        """Return whether the workers ``away`` are on one silent node, and the other workers can continue without it.

        The other workers can continue if a replica is complete without the node. Otherwise, the other workers
        must be enough for one replica. They must also hold all positions, or all report that they could roll back.
        """
        nodes = {self._roster.workers[number].node_agent for number in away}
        on_node = [w for w in self._roster.workers.values() if w.node_agent in nodes and w.fate is Fate.LIVE]
        if len(nodes) != 1 or "" in nodes or not away.issuperset(w.number for w in on_node):
            return False
        if any(self._roster.vouched(w, now) for w in on_node):
            return False
        if not {replica_of.get(number) for number in away} >= {*replica_of.values()}:
            return True
        places = {number: self._roster.workers[number].progress for number in replica_of}
        others = [places[number] for number in replica_of.keys() - away]
        size = max(Counter(replica_of.values()).values(), default=0)
        positions = {p.place[1] for p in others if p.place}
        everywhere = positions >= {p.place[1] for p in places.values() if p.place}
        return len(others) >= max(1, size) and (everywhere or all(p.goes_back for p in others))

    def _quiet(self, seconds: float, now: float) -> list[Member]:
        """Return attached workers that have been silent for more than ``seconds``."""
        heard_by = now - seconds  # as in ``silence``, without a call for each worker
        workers = self._roster.workers.values() if heard_by > self._heard else ()
        quiet = [w for w in workers if w.heard + w.excused < heard_by and w.session is not None]
        self._heard = self._heard if quiet else max(heard_by, self._heard)
        return quiet

    def _not_heard(self, now: float) -> dict[WorkerId, str]:
        """Return worker -> reason, for workers that are late because they are silent or have no connection."""
        workers, settings, fresh = self._roster.workers, self._roster.settings, self.stall.fresh
        late = {w.number: f"silent for {now - w.heard:.1f} s" for w in self.silent(now, fresh)}
        self._deaf = {
            number: (at, reason)
            for number, (at, reason) in self._deaf.items()
            if now - at <= settings.heartbeat_interval  # older entries are out of date: each tick probes again
            and at > max(workers[number].heard, fresh)
            and workers[number].fate is Fate.LIVE
        }
        late |= {number: reason for number, (_, reason) in self._deaf.items()}
        self.unreached = {
            n: why for n, why in self.unreached.items() if workers[n].session is None and workers[n].fate is Fate.LIVE
        }
        for number, (since, reason) in self.unreached.items():
            if since > fresh or now > fresh + 1.2 * settings.heartbeat_timeout:
                late[number] = reason
        return late

    def _no_progress(self, number: WorkerId, now: float) -> str:
        progress = self._roster.workers[number].progress
        where = f"iteration {progress.iteration}, {progress.phase or 'no phase'}"
        storage = " (it waits for storage)" if progress.phase in STORAGE_PHASES else ""
        others = " while others wait" if self._others_wait else ""
        return f"no progress for {now - progress.marked:.1f} s at {where}{storage}{others}"

    def _held_up(
        self, late: dict[WorkerId, str], slow: set[Hashable], replica_of: dict[WorkerId, Hashable], now: float
    ) -> dict[WorkerId, str]:
        """Return late workers that send messages, but wait for a worker of their replica that waits for storage."""
        return {
            number: reason
            for number, reason in late.items()
            if replica_of.get(number) in slow
            and self._roster.workers[number].session is not None
            and self._roster.silence(self._roster.workers[number], now) <= self._roster.settings.heartbeat_timeout
        }

    def _replica_of(self) -> dict[WorkerId, Hashable]:
        """Return worker -> replica, for complete replicas, and replicas that lost workers only to recent evictions.

        *Recent* is the last hang timeout. The replica of a worker is taken from the worker's marks, else from the
        plan's statuses. A worker with neither counts as a replica of one worker.
        """
        statuses = statuses_of(self._epochs.plan)
        replica_of: dict[WorkerId, Hashable] = {}
        broken: set[Hashable] = {None}
        for number in self._epochs.working | self.stall.lately.keys():
            worker = self._roster.workers[number]
            place = worker.progress.place
            replica: Hashable = place[0] if place else statuses.get(number, {}).get("replica", f"of {number}")
            if worker.fate is Fate.LIVE or (worker.fate is Fate.OUT and number in self.stall.lately):
                replica_of[number] = replica
            else:
                broken.add(replica)
        return {number: replica for number, replica in replica_of.items() if replica not in broken}

    def _report(self, answer: Answer, replica_of: dict[WorkerId, Hashable], now: float) -> None:
        """Report on the launchers' consoles and in the event log that the run is stalled, or that a stall has ended."""
        if answer.say:
            assert self.stall.since is not None
            waited, seconds = self.stall.waited, now - self.stall.since
            text = f"STALLED: {self._describe(waited)}; the run waits for them "
            left = self.stall.ends_in(now)
            text += "without a time limit" if left is None else f"for at most {left:.0f} s more"
            text += " (--recover-stall-timeout)" * (self.stall.until is None)
            counts = {"replicas": len({replica_of[number] for number in waited if number in replica_of})}
            self._out.log("stalled", workers=to_runs(waited), **counts, seconds=seconds, left=left, reason=text)
            self._out.send(self._roster.node_agent_sessions, to_member.Tell(text[:2000]))
        if answer.over is not None:
            text = f"the stall is over after {answer.over:.0f} s: the run continues"
            self._out.log("stall_over", seconds=answer.over)
            self._out.send(self._roster.node_agent_sessions, to_member.Tell(text))

    def _describe(self, waited: dict[WorkerId, str]) -> str:
        """Return text that names workers, their hosts, and why the run waits for them."""
        named = [f"{self._roster.workers[number].name}: {waited[number]}" for number in sorted(waited)[:NAMED]]
        more = [f"and {len(waited) - NAMED} more workers"] * (len(waited) > NAMED)
        return "; ".join([*named, *more])


@dataclass(eq=False)
class Witnessed:
    """Asks the witness about nodes that may be off, and evicts silent workers on nodes that the witness reports off."""

    _roster: Roster
    _leadership: Leadership
    _epochs: Epochs
    _rendezvous: Rendezvous
    _lateness: Lateness

    def look(self, state: State, now: float) -> None:
        """Ask the witness if the run is stalled, or too few members are reached. Called at every tick, in any state.

        Also request a new epoch if waiting newcomers may be admitted now.
        """
        stalled = state in (State.RENDEZVOUS, State.STEADY) and self._lateness.stall.since is not None
        too_few = state is State.RENDEZVOUS and self._rendezvous.too_few
        no_leader = state is State.STANDBY and self._leadership.lacks_members
        self._leadership.witness.ask(now, needed=stalled or too_few or no_leader)
        others = self._roster.with_fate(Fate.LIVE) - self._rendezvous.members
        waiting = others & self._roster.newcomers if others else ()
        lets_in = self._leadership.witness.lets_in
        if state is State.STEADY and any(lets_in(number, self._epochs.formed) for number in waiting):
            self._roster.changes.append("waiting newcomers may be admitted")

    def hear(self, testimony: Statement, state: State, now: float) -> None:
        """Evict the silent workers on nodes that the witness reports off.

        If a rendezvous is open, a new one replaces it, because the statement counts only for a rendezvous opened later.
        """
        off = self._leadership.witness.hear(testimony)
        if not off or state not in (State.RENDEZVOUS, State.STEADY):
            return
        timeout = self._roster.settings.heartbeat_timeout
        for worker in list(self._roster.workers.values()):
            silent = worker.session is None or self._roster.silence(worker, now) > timeout
            if worker.node_agent in off and worker.fate is Fate.LIVE and silent:
                self._roster.exclude(worker, testimony.reason, now)
        if state is State.RENDEZVOUS:
            self._roster.changes.append(testimony.reason)
