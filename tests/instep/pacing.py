"""Alterations of a script (``altered``) that decide when something happens: what is else a race, or the machine's load.

Those that ``hold`` hold the training at the boundary before an iteration.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recover_megatron.arguments import parse_addresses
from recover_megatron.chaos import spec
from recover_megatron.instep.decision import Decision
from recover_megatron.instep.groups.model_parallel_groups import ModelParallelGroups
from recover_megatron.instep.hooks import ProgressReports
from recover_megatron.instep.meeting import edges
from recover_megatron.instep.meeting.assignment import Assignment
from recover_megatron.instep.meeting.rendezvous import Boundary, Rendezvous, Sections
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.state.snapshot_parts import Copy
from recover_megatron.instep.state.snapshots import SnapshotStore
from recover_megatron.instep.step import Step
from recover_megatron.instep.view import View
from recover_megatron.membership.io.client import Client
from recover_megatron.membership.io.session import Session, is_newcomer, worker_id
from recover_megatron.membership.wire import find_secret
from recover_megatron.status.source import Watch
from tests.harness.patience import patient as patiently
from tests.harness.waiting import written_lines


def log_folder() -> Path:
    return Path(sys.argv[sys.argv.index("--recover-log-dir") + 1])


def noted[T](kind: type[T]) -> list[T]:
    """Filled with each object of this class in this process when it is made."""
    made: list[T] = []
    begin = kind.__init__

    def noted_init(self: T, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        begin(self, *args, **kwargs)

    kind.__init__ = noted_init  # type: ignore[method-assign]
    return made


def hold(waits: Callable[[Decision, int], bool]) -> None:
    """Hold every iteration, counted from 1, for which ``waits`` is true of the epoch's decision and the iteration.

    All workers with a place wait there.  When an epoch is over meanwhile, since a newcomer has come or is ready, they
    meet at that boundary and wait on.  So no iteration is used up by an epoch, of which there are the more the further
    apart the newcomers come, by the machine's load.  An iteration is made early only

        for new replicas    of which the epoch consists that was made for it: other newcomers wait for its commit
        with those          who have begun it already: they wait for this worker in it
        and where           an asynchronous checkpoint is under way: who has begun it would wait for its writers first,
                            so the step is made, and all meet in it
    """
    wanted = Boundary._wanted

    def held(self: Boundary) -> bool:
        mine = self._assignment
        if wanted(self):
            return True
        while waits(mine.decision, self._hooks.iteration()):
            fresh = mine.decision.fresh and mine.decision.at == self._next
            if fresh or mine.begun_by_others(self._next):
                return False
            if mine.epoch_groups.over:
                from megatron.training import async_utils  # not before the script has chosen the device

                return bool(async_utils.is_empty_async_queue())
            time.sleep(0.01)
        return False

    Boundary._wanted = held  # type: ignore[method-assign]


def awaiting(when: str) -> None:
    """Wait for what others say; ``when``: FIRST[-LAST]:FILE:TEXT[;FILE:TEXT...].

    No iteration from FIRST to LAST begins before each FILE, in the log folder, has its TEXT in it.
    """
    span, _, rest = when.partition(":")
    first, _, last = span.partition("-")
    wanted = [(log_folder() / name, text) for name, _, text in (part.partition(":") for part in rest.split(";"))]

    def waits(decision: Decision, iteration: int) -> bool:
        held = int(first) <= iteration <= int(last or first)
        return held and not all(path.exists() and text in path.read_text() for path, text in wanted)

    hold(waits)


def patient(when: str) -> None:
    """Wait until the run has as many replicas as it should; ``when``: FIRST-LAST:REPLICAS[,...].

    No iteration from FIRST to LAST (empty: the end) begins before that many replicas take part, however long it takes
    to build their models.  What is excepted: ``hold``; each new replica may cost an iteration.

    In place of REPLICAS: ``mirrors=NUMBER``, so many spares that keep the state of the last replica; ``over``, the end
    of the epoch in which the workers have come to the iteration.
    """
    came: dict[int, int] = {}
    """Iteration -> the epoch in which it was come to."""

    def waits(decision: Decision, iteration: int) -> bool:
        for part in when.split(","):
            span, _, replicas = part.partition(":")
            first, last = span.split("-")
            if int(first) <= iteration <= int(last or iteration):
                if replicas == "over":
                    return came.setdefault(iteration, decision.epoch) == decision.epoch
                what, _, number = replicas.rpartition("=")
                return len(decision.mirrors if what else decision.replicas) < int(number)
        return False

    hold(waits)


PATIENCE = 4
"""Iterations that ``whole`` lets go by before it waits."""


def whole(replicas: str, workers: str) -> None:
    """Have faults strike one after another, in the order of ``workers`` (comma-separated), each in a whole run.

    Whole: as many replicas as at the launch, all with their state.  The training goes on meanwhile, but no more than
    PATIENCE iterations before the run is whole again, which takes the longer the busier the machine is (``hold``).
    """
    folder, count, order = log_folder(), int(replicas), [int(worker) for worker in workers.split(",")]
    recoveries = noted(Recovery)
    began: dict[int, int] = {}
    """Epoch -> the iteration in which it was first seen here."""
    at, strike = spec.Injector.at, spec.Injector._inject

    def struck() -> list[tuple[int, int]]:
        """Epoch and iteration of each fault so far."""
        texts = [path.read_text() for path in sorted(folder.glob("struck-*"))]
        return [(int(epoch), int(iteration)) for epoch, iteration in map(str.split, texts)]

    def in_turn(self: spec.Injector, phase: str, iteration: int) -> None:
        if self.active and (before := len(struck())) < len(order) and recoveries[-1].assignment.me == order[before]:
            decision = recoveries[-1].assignment.decision
            # In the iteration in which a replica takes its place, its state may still be on the way from its only
            # holders.
            placed = not decision.fresh or iteration > began.setdefault(decision.epoch, iteration)
            if len(decision.replicas) == count and placed and all(epoch < decision.epoch for epoch, _ in struck()):
                at(self, phase, iteration)

    def noted_strike(self: spec.Injector, fault: Any) -> None:
        scratch = folder / "scratch"
        scratch.write_text(f"{recoveries[-1].assignment.decision.epoch} {fault.iteration}")
        scratch.rename(folder / f"struck-{len(struck())}")
        strike(self, fault)

    def waits(decision: Decision, iteration: int) -> bool:
        hits = struck()
        return bool(hits) and iteration > hits[-1][1] + PATIENCE + 1 and len(decision.replicas) < count

    hold(waits)
    spec.Injector.at = in_turn  # type: ignore[method-assign]
    spec.Injector._inject = noted_strike  # type: ignore[method-assign]


def draining(when: str) -> None:
    """Have nodes drained; ``when``: ITERATION:NODE[,...].

    Before that iteration's step, or in the middle of it with a phase behind the iteration (ITERATION@PHASE:NODE), the
    first worker of the launch asks for the node to be drained, as recover-status does, and goes on when the coordinator
    shows the node; what the command says goes to drain-NUMBER.txt in the log folder, with its exit code at the end.  A
    number is that of the order, from 0.

    The last two iterations wait until all commands have ended, or the epoch has: they look twice a second, and should
    not find the run over.
    """
    from megatron.training import get_args, training

    folder, orders = log_folder(), [order.rpartition(":")[::2] for order in when.split(",")]
    given: set[int] = set()
    recoveries = noted(Recovery)
    train_step, inject = training.train_step, ProgressReports.inject

    def ask(number: int, node: str) -> None:
        """Start the command, and go on when the coordinator knows of the node."""
        address = os.environ["RECOVER_COORDINATOR"]
        command = [sys.executable, "-m", "recover_megatron.status", address, "drain", node]
        said = f"{shlex.join(command)} > {folder}/drain-{number}.txt 2>&1; echo $? >> {folder}/drain-{number}.txt"
        subprocess.Popen(["/bin/sh", "-c", said], start_new_session=True)
        watch = Watch(parse_addresses(address), find_secret())
        while not any(node in row.names for row in watch.look().drains):
            time.sleep(0.5)
        watch.close()

    def due(place: str) -> None:
        for number, (at, node) in enumerate(orders):
            if at == place and number not in given and worker_id() == 0:
                given.add(number)
                ask(number, node)

    def ended(number: int) -> bool:
        last = written_lines(folder / f"drain-{number}.txt")[-1:]
        return last != [] and last[0].isdecimal()

    def step(*args: Any, **kwargs: Any) -> Any:
        due(str(get_args().curr_iteration + 1))
        while get_args().curr_iteration + 2 >= get_args().train_iters and not all(map(ended, range(len(orders)))):
            if recoveries[-1].assignment.epoch_groups.over:
                break
            time.sleep(0.05)
        return train_step(*args, **kwargs)

    def inject_and_ask(self: ProgressReports, phase: str, *args: Any, **kwargs: Any) -> Any:
        if hasattr(get_args(), "curr_iteration"):
            due(f"{get_args().curr_iteration + 1}@{phase}")
        return inject(self, phase, *args, **kwargs)

    step.__wrapped__ = train_step  # type: ignore[attr-defined]
    training.train_step = step
    ProgressReports.inject = inject_and_ask  # type: ignore[method-assign]


def slow(pauses: str) -> None:
    """Have workers take their time at some places; ``pauses``: PLACE@WORKER=SECONDS,...

    PLACE: ``joined``, when the first epoch has begun, ``met``, after a rendezvous, ``again``, before sums are made in a
    later epoch than the first, or a phase: before a fault may strike in it.  The seconds are those of an idle machine.
    """
    mine: dict[str, float] = {}
    for part in pauses.split(","):
        where, seconds = part.split("=")
        place, worker = where.split("@")
        if worker == os.environ["RANK"]:
            mine[place] = patiently(float(seconds))
    assignments = noted(Assignment)
    join, meet, strike, mark = Session.join, Rendezvous.meet, ProgressReports.inject, ProgressReports.mark

    def slow_join(self: Session, *args: Any) -> Any:
        plan = join(self, *args)
        time.sleep(mine.pop("joined", 0))
        return plan

    def slow_meet(self: Rendezvous, number: int, **where: Any) -> None:
        meet(self, number, **where)
        time.sleep(mine.get("met", 0))

    def slow_strike(self: ProgressReports, phase: str, *args: Any) -> None:
        time.sleep(mine.get(phase, 0))
        strike(self, phase, *args)

    def slow_mark(self: ProgressReports, phase: str, **how: Any) -> None:
        mark(self, phase, **how)
        if phase == "reduce-scatter" and assignments[-1].epoch_groups.number > 1:
            time.sleep(mine.pop("again", 0))

    ProgressReports.mark = slow_mark  # type: ignore[method-assign]
    Session.join = slow_join  # type: ignore[method-assign]
    Rendezvous.meet = slow_meet  # type: ignore[method-assign]
    ProgressReports.inject = slow_strike  # type: ignore[method-assign]


def trying() -> None:
    """Have workers try broken roads for long: an outage that a test ends is over before, on any machine."""
    edges.REACH_SECONDS = edges.AGAIN_SECONDS = patiently(30)


BESIDE = "a state begins to come while others compute"


def late_states() -> None:
    """Have a state come only when somebody of its column computes, with open rings; say BESIDE then.

    Where the epoch ends before that the state comes unsaid.
    """
    from recover_megatron.megatron_hooks.checkpoint.state_exchange import (
        StateExchange,
    )  # when the script has chosen the device

    folder, receive, compute = log_folder(), StateExchange._receive, Step._compute

    def computes(mine: Assignment | View) -> Path:
        return folder / f"computes-{mine.decision.epoch}-{mine.position}"

    def late_receive(self: StateExchange, decision: Decision) -> int:
        view = self._manager.view
        while not computes(view).exists() and not view.groups.over:
            time.sleep(0.01)
        if not view.groups.over:
            print(BESIDE, flush=True)
        return receive(self, decision)

    def noted_compute(self: Step) -> Any:
        if not self._assignment.epoch_groups.over:
            computes(self._assignment).touch()
        return compute(self)

    StateExchange._receive = late_receive  # type: ignore[method-assign]
    Step._compute = noted_compute  # type: ignore[method-assign]


def late() -> None:
    """Have newcomers come only when a worker has said in its log that it waits for them."""
    folder = Path(os.readlink("/proc/self/fd/1")).parent
    said = "waits up to 300 s for other workers"
    while is_newcomer() and not any(said in log.read_text() for log in folder.glob("worker-*.log")):
        time.sleep(0.02)


def late_copy() -> None:
    """Have snapshots copied as late as may be: when somebody waits for that, or after 2 seconds where nobody does."""
    make, begin = Copy.make, SnapshotStore.begin
    copied, join_status = SnapshotStore.copied, SnapshotStore.join_status
    waited_for = threading.Event()

    def late_make(self: Copy, *args: Any) -> Any:
        waited_for.wait(2)
        return make(self, *args)

    def noted_begin(self: SnapshotStore, *args: Any) -> None:
        waited_for.clear()
        begin(self, *args)

    def noted_copied(self: SnapshotStore) -> None:
        waited_for.set()
        copied(self)

    def noted_status(self: SnapshotStore) -> dict[str, Any]:
        waited_for.set()
        return join_status(self)

    Copy.make = late_make  # type: ignore[method-assign]
    SnapshotStore.begin = noted_begin  # type: ignore[method-assign]
    SnapshotStore.copied = noted_copied  # type: ignore[method-assign]
    SnapshotStore.join_status = noted_status  # type: ignore[method-assign]


def late_session() -> None:
    """Have sessions connect only while Megatron makes the groups inside the replica."""
    seconds = patiently(60)
    making, attached = threading.Event(), threading.Event()
    dial, connected, make = Client._dial, Client._connected, ModelParallelGroups.make

    def late_dial(self: Client, candidate: int) -> None:
        making.wait(seconds)
        dial(self, candidate)

    def noted_connected(self: Client) -> None:
        connected(self)
        attached.set()

    def noted_make(self: ModelParallelGroups, create: Any) -> Any:
        def created() -> Any:
            making.set()
            attached.wait(seconds)
            return create()

        return make(self, created)

    Client._dial, Client._connected = late_dial, noted_connected  # type: ignore[method-assign]
    ModelParallelGroups.make = noted_make  # type: ignore[method-assign]


def blocked(folder: str, worker: str) -> None:
    """Have one worker wait for its data, from its third microbatch on, until FOLDER/go is there."""
    from recover_megatron.megatron_hooks.data.source import Source

    get = Source.get
    reads = 0

    def blocked_get(self: Source, number: int) -> Any:
        nonlocal reads
        reads += 1
        while reads >= 3 and not (Path(folder) / "go").exists():
            time.sleep(0.01)
        return get(self, number)

    if os.environ["RANK"] == worker:
        Source.get = blocked_get  # type: ignore[method-assign]


def parted(kind: str, dying: str, first: str, late: str) -> None:
    """Have the news of a death part two mates in a section.

    In the third section of ``kind`` worker ``first`` begins; then worker ``dying`` kills itself, which had not begun;
    worker ``late`` begins when it has been told that the epoch is over.
    """
    begun = log_folder() / "begun"
    run = Sections.run
    counted = 0

    def parting(self: Sections, its: str, section: Callable[[], Any], **rest: Any) -> Any:
        nonlocal counted
        counted += its == kind
        me = str(self._assignment.me)

        def noted() -> Any:
            begun.touch()
            return section()

        if its == kind and counted == 3:
            if me == first:
                return run(self, its, noted, **rest)
            while me == dying and not begun.exists():
                time.sleep(0.01)
            if me == dying:
                os.kill(os.getpid(), signal.SIGKILL)
            while me == late and not self._assignment.epoch_groups.over:
                time.sleep(0.01)
        return run(self, its, section, **rest)

    Sections.run = parting  # type: ignore[method-assign]
