"""Every order in which kernels can be launched on 2 x 2 devices, searched for one in which nothing goes on.

    replica 1   A --TP-- B          A device has k hardware queues (CUDA_DEVICE_MAX_CONNECTIONS); each stream is mapped
                |        |          to one, and its kernels stand there in the order of their launch.
    columns     |        |
                |        |          The head of a queue starts when what was launched before it in its stream, and the
    replica 2   A' -TP-- B'         event that its stream waits for, are over; until then all behind it stand still.

A collective is over when its kernels run on all its members; what computes, by itself.  A kernel that runs has left the
queue.  An event that is recorded holds nothing up (else the one that torch records behind each collective would, and
Megatron, which asks for one queue, could not overlap anything).

What launches is a thread: steps in one order, each at any time after its host has seen what it waits for.  The
hardware does at once what it can: it enables and never forbids, so what a slow device gets stuck with stops a fast one,
too.

Sources: CUDA programming guide, CUDA_DEVICE_MAX_CONNECTIONS (environment variables), "Concurrent execution within
device" and "Implicit synchronization"; NCCL user guide, "Using multiple NCCL communicators concurrently".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

DEVICES = {"A": (1, 1), "B": (1, 2), "A'": (2, 1), "B'": (2, 2)}
"""Replica and column."""
GEMMS, TP, DENSE, EXPERTS = range(4)
"""Streams: the model's, that of its collectives, and one for each column's sums."""
MEMBERS = {
    (device, stream): [
        other
        for other, (its_replica, its_column) in enumerate(DEVICES.values())
        if (stream in (DENSE, EXPERTS) or its_replica == replica) and (stream == TP or its_column == column)
    ]
    for device, (replica, column) in enumerate(DEVICES.values())
    for stream in range(4)
}
"""The devices on which a kernel of a stream must have started before it can end on one."""


@dataclass(frozen=True)
class Step:
    """A kernel, and its launch.  ``seen``: what the host has seen over before; ``event``: what its stream waits for."""

    stream: int
    number: int
    """In its stream."""
    name: str
    seen: tuple[tuple[int, int], ...] = ()
    event: tuple[int, int] | None = None
    """(stream, number)."""


Thread = list[Step]
Device = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]
"""What each queue holds (streams, in order of launch), and how many kernels of each stream started and are over."""
State = tuple[Device, ...]


@dataclass
class Search:
    """``threads``: of each device; ``queue_of``: by stream.  One thread launches into a stream."""

    threads: Sequence[Sequence[Thread]]
    queue_of: Sequence[int]
    came_from: dict[State, tuple[State, str] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kernels = [{(step.stream, step.number): step for thread in its for step in thread} for its in self.threads]

    def stuck(self) -> str:
        """The launches after which nothing goes on though work is left, and what stands where; "": there are none."""
        none = (0,) * len(self.queue_of)
        first: State = (((((),) * (1 + max(self.queue_of))), none, none),) * len(DEVICES)
        self.came_from[first] = None
        todo = [first]
        while todo:
            state = todo.pop()
            following = self._launches(state)
            for name, after in following:
                if after not in self.came_from:
                    self.came_from[after] = state, name
                    todo.append(after)
            if not following and any(
                sum(device[2]) < len(its) for device, its in zip(state, self.kernels, strict=True)
            ):
                return "\n".join([*self._way(state), *self._left(state)])
        return ""

    def _launches(self, state: State) -> list[tuple[str, State]]:
        """Launches that come next, with what follows from them.

        Those of different devices commute.  So where all threads of a device that cannot launch wait for a kernel which
        the device itself has yet to launch, its launches are tried first, and the others' after them: as many states
        are stuck in the end (a persistent set).
        """
        everything = []
        for at, (queues, started, over) in enumerate(state):
            launched = [count + sum(queue.count(stream) for queue in queues) for stream, count in enumerate(started)]
            found, alone = [], True
            for thread in self.threads[at]:
                step = next((step for step in thread if step.number >= launched[step.stream]), None)
                missing = [its for its in step.seen if over[its[0]] <= its[1]] if step else []
                if step and not missing:
                    where = self.queue_of[step.stream]
                    longer = tuple((*queue, step.stream) if n == where else queue for n, queue in enumerate(queues))
                    after = (*state[:at], (longer, started, over), *state[at + 1 :])
                    found.append((f"{list(DEVICES)[at]} launches {step.name}", self._settled(after)))
                elif missing:
                    alone = alone and any(launched[stream] <= number for stream, number in missing)
            if found and alone:
                return found
            everything += found
        return everything

    def _settled(self, state: State) -> State:
        """The hardware goes on as far as it can."""
        queues = [[list(queue) for queue in device[0]] for device in state]
        started, over = [list(device[1]) for device in state], [list(device[2]) for device in state]
        moved = True
        while moved:
            moved = False
            for at, kernels in enumerate(self.kernels):
                for queue in queues[at]:
                    while queue and started[at][queue[0]] == over[at][queue[0]]:
                        event = kernels[queue[0], started[at][queue[0]]].event
                        if event is not None and over[at][event[0]] <= event[1]:
                            break
                        started[at][queue.pop(0)] += 1
                        moved = True
                for stream, number in enumerate(over[at]):
                    if started[at][stream] > number and all(started[o][stream] > number for o in MEMBERS[at, stream]):
                        over[at][stream] += 1
                        moved = True
        frozen = [tuple(tuple(queue) for queue in its) for its in queues]
        return tuple(zip(frozen, map(tuple, started), map(tuple, over), strict=True))

    def _way(self, state: State) -> list[str]:
        way = []
        while (before := self.came_from[state]) is not None:
            state, name = before
            way.append(name)
        return way[::-1]

    def _left(self, state: State) -> Iterator[str]:
        for name, kernels, (queues, started, over) in zip(DEVICES, self.kernels, state, strict=True):
            running = [kernels[stream, n].name for stream, n in enumerate(over) if started[stream] > n]
            next_of = list(started)
            for queue in queues:
                names = []
                for stream in queue:
                    names.append(kernels[stream, next_of[stream]].name)
                    next_of[stream] += 1
                yield f"{name} runs {', '.join(running) or 'nothing'}; in the queue: {', '.join(names) or 'nothing'}"


def model(buckets: int) -> Thread:
    """GEMM b computes bucket b; a collective of the replica between any two, as with tensor parallelism."""
    steps = [Step(GEMMS, 0, "GEMM 0")]
    for n in range(buckets):
        steps += [Step(TP, n, f"TP {n}", event=(GEMMS, n)), Step(GEMMS, n + 1, f"GEMM {n + 1}", event=(TP, n))]
    return steps


def behind_each_other(*columns: int) -> Thread:
    """Reduce-scatter and all-gather of each bucket (of the column that is named) as soon as it is computed, all under
    way: the host waits for buckets alone."""
    steps = []
    for bucket, column in enumerate(columns):
        n = 2 * columns[:bucket].count(column)
        steps.append(Step(column, n, f"RS {bucket}", ((GEMMS, bucket),)))
        steps.append(Step(column, n + 1, f"AG {bucket}"))
    return steps


def one_at_a_time(*columns: int) -> Thread:
    """The same, each when the host has seen the one before it over, whichever column it is of."""
    steps: Thread = []
    for step in behind_each_other(*columns):
        before = [(steps[-1].stream, steps[-1].number)] if steps else []
        steps.append(Step(step.stream, step.number, step.name, (*step.seen, *before)))
    return steps


def in_program_order(*columns: int) -> Thread:
    """The same, by the thread that launches the model, which waits for nothing: the stream waits for the bucket."""
    steps: Thread = []
    sums = behind_each_other(*columns)
    for step in model(len(columns)):
        steps.append(step)
        if step.stream == GEMMS:
            steps += [Step(its.stream, its.number, its.name, event=(GEMMS, step.number)) for its in sums[:2]]
            sums = sums[2:]
    return steps


ONE_QUEUE = (0, 0, 0, 0)
TWO_QUEUES = [(0, 1, 0, 0), (0, 0, 1, 1), (0, 1, 1, 1), (0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 0)]
"""All maps of the four streams but those that differ in the numbers of the queues alone."""
EVERY_MAP = pytest.mark.parametrize("queue_of", [ONE_QUEUE, *TWO_QUEUES], ids=str)


def search(sums: Thread, queue_of: Sequence[int], other_replica: Thread | None = None) -> str:
    """With a thread for the model, and one for the sums, where these are not in the model's."""
    its = [[sums] if sums[0].stream == GEMMS else [model(2), sums] for sums in (sums, other_replica or sums)]
    return Search([its[replica - 1] for replica, _ in DEVICES.values()], queue_of).stuck()


@EVERY_MAP
def test_two_operations_behind_each_other_hold_up_the_model_and_each_other(queue_of: Sequence[int]) -> None:
    told = search(behind_each_other(DENSE, DENSE), queue_of)
    print(told)
    assert bool(told) == (queue_of[DENSE] in (queue_of[GEMMS], queue_of[TP]))


@EVERY_MAP
@pytest.mark.parametrize("columns", [(DENSE, DENSE), (DENSE, EXPERTS)], ids=["one column", "two columns"])
def test_one_operation_at_a_time_holds_up_nothing(columns: Sequence[int], queue_of: Sequence[int]) -> None:
    assert not search(one_at_a_time(*columns), queue_of)


@EVERY_MAP
def test_program_order_would_hold_up_nothing_either(queue_of: Sequence[int]) -> None:
    assert not search(in_program_order(DENSE, EXPERTS), queue_of)


@pytest.mark.parametrize("launching", [one_at_a_time, behind_each_other, in_program_order])
def test_columns_whose_order_differs_between_workers_wait_for_each_other(launching: Callable[..., Thread]) -> None:
    assert search(launching(DENSE, EXPERTS), ONE_QUEUE, launching(EXPERTS, DENSE))
