"""Tables of what happens in a simulated run and what is seen of it: sentences, and under each the words of a script.

A script's clauses are separated by ``;``, or by ``->`` before what is expected; each is the name of a method of Script
and its words. Its first is ``world``. Names are those of the simulation: ``w1``, ``node0``, ``c0``; numbers are workers
(or candidates, nodes, seconds, as a method says).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from simulation import SETTINGS, World

from recover_megatron.membership.events import State
from recover_megatron.membership.messages.to_coordinator import ReportException
from recover_megatron.membership.records import CoordinatorLost, Settings
from recover_megatron.membership.sides.follower import Stage
from recover_megatron.membership.sides.node_agent import NodeAgentClient


def table(text: str) -> pytest.MarkDecorator:
    """A test for each sentence of ``text``, with the script that is indented below it."""
    found = re.findall(r"(?m)^(\S.*)\n((?:^ +.*\n?)+)", text)
    return pytest.mark.parametrize("script", [pytest.param(script, id=sentence) for sentence, script in found])


def play(script: str, settings: Settings = SETTINGS, kind: type[Script] | None = None) -> None:
    """Do what a script says, word by word; ``kind`` knows more words."""
    played = (kind or Script)(settings)
    for clause in re.split(r";|->|\n", script):
        if words := clause.split():
            try:
                getattr(played, words[0])(*words[1:])
            except AssertionError as error:
                error.add_note(f"in '{clause.strip()}'")
                raise


def _numbers(words: tuple[str, ...]) -> set[int]:
    return set(map(int, words))


class Script:
    """What a script's words mean."""

    def __init__(self, settings: Settings, world: World | None = None) -> None:
        self._settings = settings
        self.it = world or World(0, settings=settings)

    def world(self, workers: str, *more: str) -> None:
        """``runs=SECONDS`` before anything else happens, ``spares=0,1``, and what World takes."""
        options = {name: value for name, _, value in (word.partition("=") for word in more)}
        runs, spares = float(options.pop("runs", "0")), options.pop("spares", "")
        kinds: dict[str, Any] = {name: int(value) for name, value in options.items()}
        self.it = World(int(workers), settings=self._settings, **kinds)
        self.it.spares = {int(word) for word in spares.split(",") if word}
        self.it.run_fairly(runs)

    # -- what happens -------------------------------------------------------------------------------------------------

    def run(self, seconds: str, step: str = "1") -> None:
        self.it.run_fairly(float(seconds), float(step))

    def act(self, *workers: str) -> None:
        for worker in workers:
            self.it.act(int(worker))

    def busy(self, *workers: str) -> None:
        """They compute, without a mark."""
        self.it.busy |= _numbers(workers)

    def mark(self, worker: str, phase: str, *more: str) -> None:
        """In iteration 99; ``waits``: for others; a number: the seconds that it may take."""
        allow = sum(float(word) for word in more if word != "waits")
        self.it.worker(int(worker)).mark(99, phase, None, "waits" in more, allow)

    def waits(self, phase: str, *workers: str) -> None:
        """In every epoch these wait for the others in this, and report nothing."""
        self.it.waits |= dict.fromkeys(_numbers(workers), phase)

    def late(self, worker: str, also_busy: str = "") -> None:
        """It computes, and is set aside; ``also_busy`` does not join the epoch that leaves it out."""
        self.mark(worker, "forward")
        self.busy(worker)
        while self._fates()[int(worker)] != "aside":
            self.it.run_fairly(0.25, step=0.25)
            if also_busy and self.it.worker(int(also_busy)).done > self.it.worker(int(also_busy)).committed:
                self.busy(also_busy)
        if not also_busy:
            self.run("4")
        assert self._fates()[int(worker)] == "aside"

    def stop(self, worker: str) -> None:
        """It stops in the middle of a step, hears nothing, and is set aside."""
        self.mark(worker, "forward")
        self.busy(worker)
        self.run("2")
        self.freeze(f"w{worker}")
        self.it.run_fairly(self._settings.grace + 4)
        assert self._fates()[int(worker)] == "aside"

    def act_again(self, worker: str) -> None:
        self.it.busy.discard(int(worker))

    def freeze(self, *names: str) -> None:
        self.it.frozen |= set(names)

    def wake(self, *names: str) -> None:
        """Of those that were frozen; none named: all, and all that were busy, or waited for others."""
        self.it.busy = self.it.busy if names else set()
        self.it.waits = self.it.waits if names else {}
        self.it.frozen = self.it.frozen - set(names) if names else set()

    def kill(self, *workers: str) -> None:
        for worker in workers:
            self.it.kill_worker(int(worker))

    def kill_unheard(self, *workers: str) -> None:
        """No end of their connections is seen."""
        for worker in workers:
            self.it.kill_worker(int(worker), silently=True)

    def kill_silently(self, *workers: str) -> None:
        """And no launcher sees it."""
        self.kill_unheard(*workers)
        self.it.unreported.clear()

    def crash(self, candidate: str, *lose: str) -> None:
        """``lose``: with what it had sent and nobody has received."""
        self.it.kill_coordinator(int(candidate), lose=bool(lose))

    def restart(self, candidate: str) -> None:
        self.it.start_coordinator(int(candidate))

    def cut(self, *words: str) -> None:
        """Some nodes ``from`` a candidate."""
        self.it.blocked |= {(f"node{node}", int(words[-1])) for node in words[:-2]}

    def deliver(self, count: str) -> None:
        """So many messages, the oldest connection first."""
        for _ in range(int(count)):
            if pairs := self.it.deliverable():
                self.it.deliver(*pairs[0])

    def disconnect(self, name: str) -> None:
        for connection in [c for c in self.it.connections.values() if c.owner == name and c.coordinator_uses]:
            self.it.break_up(connection)

    def newcomers(self, *nodes: str) -> None:
        for node in nodes:
            self.it.add_newcomer(int(node))

    def place(self, worker: str, replica: str, position: str, *back: str) -> None:
        """``back``: and it could go back to a checkpoint."""
        member = self.it.worker(int(worker))
        member.place, member.goes_back = (int(replica), int(position), 1), bool(back)
        member.mark(98, "forward", None, False, 0.0)

    def no_spares(self) -> None:
        """From the next plan on."""
        self.it.spares.clear()

    def end(self, worker: str, code: str, *reason: str) -> None:
        """It gives up for all."""
        self.it._member_effects(f"w{worker}", self.it.worker(int(worker)).end_run(int(code), " ".join(reason)))

    def told_to_stop(self, node: str, signal: str) -> None:
        """Its launcher is told to end its workers, and says so."""
        launcher = self.it.members[f"node{node}"]
        assert isinstance(launcher, NodeAgentClient)
        self.it._member_effects(f"node{node}", launcher.stopping(int(signal)))
        for _ in range(20):
            for number, direction in self.it.deliverable():
                self.it.deliver(number, direction)

    def raises(self, worker: str, *words: str) -> None:
        """It ends by an exception in iteration 7, reports it with these NAME=VALUE, and the last words as its error."""
        known = {"at": "microbatch", "group": "group", "iteration": "iteration"}
        said: dict[str, Any] = {"iteration": 7, "traceback": "Traceback ...", "group": 0}
        while "=" in words[0]:
            name, _, value = words[0].partition("=")
            said |= {known[name]: int(value)} if name in known else {name: value}
            words = words[1:]
        said |= {"own": True} if "own" in said else {}
        said |= {"tried": list(map(int, said["tried"].split(",")))} if "tried" in said else {}
        member = self.it.worker(int(worker))
        self.it._member_effects(f"w{worker}", member.report_exception(ReportException(error=" ".join(words), **said)))
        self.it.run_fairly(1.0)
        assert member.noted
        if member.stage is not Stage.OUT:
            self.it.kill_worker(int(worker))
            self.it.run_fairly(2.0)

    def joins(self, *alone: str) -> None:
        """A node joins, with a worker and, unless it is ``alone``, a candidate."""
        node = self.it.add_node()
        self.it.add_newcomer(node)
        if not alone:
            self.it.add_candidate(node)
        self.it.run_fairly(4.0)

    def lose(self, node: str, *silently: str) -> None:
        """With its launcher, its worker and its candidate."""
        added = {where: candidate for (where, _), candidate in self.it.added.items()}
        for number, where in self.it.node_of.items():
            if where == int(node) and self.it.running(f"w{number}"):
                self.it.kill_worker(number, silently=bool(silently))
        self.it.dead.add(f"node{node}")
        if not silently:
            self.it._end_of_file(f"node{node}")
        self.it.kill_coordinator(added.get(f"node{node}", int(node)))

    def power_off(self, *nodes: str) -> None:
        """With their workers and their candidates: nobody hears of it but the witness."""
        for node in _numbers(nodes):
            self.it.power_off(node, node)

    def has_power(self, node: str) -> None:
        """The witness does not call it off."""
        self.it.off.discard(f"node{node}")

    def finish(self, worker: str) -> None:
        """It has done its training, and leaves."""
        self.it.members_finish = True
        self.it._member_effects(f"w{worker}", self.it.worker(int(worker)).leave())
        self.it.dead.add(f"w{worker}")
        for pair in self.it.deliverable():
            self.it.deliver(*pair)

    # -- what is seen -------------------------------------------------------------------------------------------------

    def goes_on(self, seconds: str, *workers: str) -> None:
        """Within so many seconds these, else all that run, see more commits, and are members."""
        running = [w for w in self.it.node_of if self.it.running(f"w{w}")]
        before = {w: self.it.worker(w).committed for w in (_numbers(workers) or running)}
        self.it.run_fairly(float(seconds))
        assert {w for w, committed in before.items() if self.it.worker(w).committed <= committed} == set()
        assert before.keys() <= self.it.newest

    def running(self, *workers: str) -> None:
        """These and no others."""
        assert {w for w in self.it.node_of if self.it.running(f"w{w}")} == _numbers(workers)

    def know(self, *added: str) -> None:
        """Those that were launched, and run, were told of these candidates that joined (0: the first of them)."""
        wanted = frozenset(address for n, address in enumerate(self.it.added) if n in _numbers(added))
        launched = [f"w{n}" for n in range(self.it.launched)] + [f"node{n}" for n in range(self.it._launched_nodes)]
        assert {frozenset(self.it.lists.get(name, ())) for name in launched if self.it.running(name)} == {wanted}

    def holders(self, *workers: str) -> None:
        """Those to whom the lease was granted last."""
        assert self.it.holders[-1].members == _numbers(workers)

    def more_commits(self, seconds: str) -> None:
        """Anybody's, within so many seconds."""
        before = max(self.it.commits)
        self.it.run_fairly(float(seconds))
        assert max(self.it.commits) > before

    def stands(self, seconds: str, worker: str) -> None:
        """For so many seconds it sees no commit but the one that was under way."""
        before = self.it.worker(int(worker)).committed
        self.it.run_fairly(float(seconds))
        assert self.it.worker(int(worker)).committed <= before + 1

    def ahead(self, worker: str, other: str) -> None:
        assert self.it.worker(int(worker)).committed > self.it.worker(int(other)).committed

    def goes_on_from(self, newcomer: str) -> None:
        """What the plan before its own had committed, and something was."""
        plan = self.it.worker(int(newcomer)).plan
        assert plan is not None
        before = [iteration for iteration, epoch in self.it.commits.items() if epoch < plan.epoch]
        assert plan.committed >= max(before)

    def done(self, worker: str, iteration: str) -> None:
        assert self.it.worker(int(worker)).done == int(iteration)

    def epochs(self, count: str) -> None:
        assert self.it.order == list(range(1, int(count) + 1))

    def members(self, *workers: str) -> None:
        assert self.it.newest == _numbers(workers)

    def always(self, *workers: str) -> None:
        """These and no others were in every epoch."""
        assert {members for _, members in self.it.formed.values()} == {frozenset(_numbers(workers))}

    def first_members_with(self, *workers: str) -> None:
        assert self.it.formed[self.it.order[0]][1] >= _numbers(workers)

    def _fates(self) -> dict[int, str]:
        """To the first candidate."""
        return {n: worker.fate.value for n, worker in sorted(self.it.coordinators[0].roster.workers.items())}

    def opened(self, *workers: str) -> None:
        """The rendezvous of the first candidate, of which there is no plan yet."""
        assert self.it.coordinators[0].rendezvous.opened.members == _numbers(workers)

    def fates(self, *fates: str) -> None:
        assert list(self._fates().values()) == list(fates)

    def faults(self, *faults: str) -> None:
        """As ``KIND:WORKER``, in order."""
        assert [f"{record['kind']}:{record['worker']}" for record in self.it.logged("fault")] == list(faults)

    def no(self, *events: str) -> None:
        assert self.it.logged(*events) == []

    def some(self, *events: str) -> None:
        assert self.it.logged(*events)

    def live(self, *workers: str) -> None:
        """To the first candidate, these and no others."""
        assert {n for n, fate in self._fates().items() if fate == "live"} == _numbers(workers)

    def lost(self, *workers: str) -> None:
        """To the first candidate, these and no others."""
        assert {n for n, fate in self._fates().items() if fate in ("out", "dead")} == _numbers(workers)

    def why(self, worker: str, *words: str) -> None:
        """What observers are told of it."""
        rows = {row["worker"]: row for row in self.it.coordinators[0].view(self.it.now).workers}
        assert " ".join(words) in rows[int(worker)]["why"]

    def in_rendezvous(self) -> None:
        assert self.it.coordinators[0].state is State.RENDEZVOUS

    def waited_for(self) -> None:
        """The first candidate takes what it sees for a stall."""
        assert self.it.coordinators[0].lateness.stall.reported

    def admitted(self, *workers: str) -> None:
        assert [record["worker"] for record in self.it.logged("admitted")] == list(map(int, workers))

    def stalled(self, *words: str) -> None:
        """The first time that it is told of a stall, these words are in the reason."""
        reason = self.it.logged("stalled")[0]["reason"]
        assert all(word in reason for word in words), reason

    def led(self, *candidates: str) -> None:
        assert [record["candidate"] for record in self.it.logged("lead")] == list(map(int, candidates))

    def here(self, *candidates: str) -> None:
        """The candidates whose processes run."""
        assert self.it.coordinators.keys() == _numbers(candidates)

    def following(self, worker: str) -> None:
        assert self.it.worker(int(worker)).stage is Stage.FOLLOWING

    def out(self, code: str, *workers: str) -> None:
        """They end with the code."""
        ends = [self.it.worker(int(worker)).out for worker in workers]
        assert [end.code for end in ends if isinstance(end, CoordinatorLost)] == [int(code)] * len(workers)

    def launcher_ends(self, node: str, code: str) -> None:
        """It was told of the end of a run that had its first epoch."""
        launcher = self.it.members[f"node{node}"]
        assert isinstance(launcher.out, CoordinatorLost)
        assert (launcher.out.code, launcher.out.reported, launcher.last_epoch) == (int(code), True, 1)

    def none_out(self, *workers: str) -> None:
        assert Stage.OUT not in [self.it.worker(int(worker)).stage for worker in workers]

    def because_of(self, worker: str, *reason: str) -> None:
        """All that were launched end by its word."""
        for w in range(self.it.launched):
            end = self.it.worker(w).out
            assert isinstance(end, CoordinatorLost)
            assert (str(end), end.by) == (" ".join(reason), int(worker))

    def stops(self, *stop: str) -> None:
        """``CODE REASON``: the run ended once, like this; nothing: it did not."""
        reported = [f"{record['code']} {record['reason']}" for record in self.it.logged("stop")]
        assert reported == [" ".join(stop)] * bool(stop)

    def ends(self, code: str, *words: str) -> None:
        """The run ended once, with this code, for a reason with these words in it."""
        (stop,) = self.it.logged("stop")
        assert stop["code"] == int(code)
        assert " ".join(words) in stop["reason"]

    def exceptions(self, *reported: str) -> None:
        """What the coordinators have logged of them, as ``WORKER:HOST:ITERATION:MICROBATCH:ERROR``."""
        fields = ("worker", "host", "iteration", "microbatch", "error")
        assert [":".join(str(e[field]) for field in fields) for e in self.it.logged("exception")] == list(reported)
