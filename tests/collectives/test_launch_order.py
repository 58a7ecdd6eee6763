"""Every order in which kernels can be launched on 2 x 2 devices, searched for one in which nothing goes on.

    replica 1   A --TP-- B          A device has k hardware queues (CUDA_DEVICE_MAX_CONNECTIONS); each stream is mapped
                |        |          to one, and its kernels stand there in the order of their launch.
    columns     |        |
                |        |          The head of a queue starts when what was launched before it in its stream, and the
    replica 2   A' -TP-- B'         event that its stream waits for, are over; until then all behind it stand still.

A collective is over when its kernels run on all its members; what computes, by itself.  A kernel that runs has left the
queue.  An event that is recorded holds nothing up (else Megatron, which asks for one queue, could overlap nothing).
A thread launches in one order, each step at any time after its host has seen what it waits for.  The hardware does at
once what it can: it enables and never forbids, so what a slow device gets stuck with stops a fast one, too.

Sources: CUDA programming guide, CUDA_DEVICE_MAX_CONNECTIONS (environment variables), "Concurrent execution within
device" and "Implicit synchronization"; NCCL user guide, "Using multiple NCCL communicators concurrently".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest

DEVICES = {"A": (1, 1), "B": (1, 2), "A'": (2, 1), "B'": (2, 2)}  # replica and column
GEMMS, TP, DENSE, EXPERTS = STREAMS = range(4)
"""Streams: the model's, that of its collectives, and one for each column's sums."""
SHARED = {GEMMS: slice(2), TP: slice(1), DENSE: slice(1, 2), EXPERTS: slice(1, 2)}
MEMBERS = {
    (at, stream): [other for other, its in enumerate(DEVICES.values()) if its[shared] == place[shared]]
    for (at, place), (stream, shared) in product(enumerate(DEVICES.values()), SHARED.items())
}
"""The devices on which a kernel of a stream must have started before it can end on one."""


@dataclass(frozen=True)
class Step:
    """A kernel, the ``number``-th of its stream, and its launch.  ``seen``: what the host has seen over before;
    ``event``: what its stream waits for; both (stream, number)."""

    stream: int
    number: int
    name: str
    seen: tuple[tuple[int, int], ...] = ()
    event: tuple[int, int] | None = None


Thread = list[Step]
Device = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]
"""What each queue holds (streams, in order of launch), and how many kernels of each stream started and are over."""
State = tuple[Device, ...]


class Search:
    """``threads``: of each device; ``queue_of``: by stream.  One thread launches into a stream."""

    def __init__(self, threads: Sequence[Sequence[Thread]], queue_of: Sequence[int]) -> None:
        self.threads, self.queue_of = threads, queue_of
        self.kernels = [{(step.stream, step.number): step for thread in its for step in thread} for its in threads]

    def stuck(self) -> str:
        """The launches after which nothing goes on though work is left, and what is in the queues; "": none."""
        none = (0,) * len(STREAMS)
        first: State = (((((),) * (1 + max(self.queue_of))), none, none),) * len(DEVICES)
        way: dict[State, tuple[str, ...]] = {first: ()}
        todo = [first]
        while todo:
            state = todo.pop()
            following = self._launches(state)
            for name, after in following:
                if after not in way:
                    way[after] = *way[state], name
                    todo.append(after)
            if not following and any(sum(its[2]) < len(all_) for its, all_ in zip(state, self.kernels, strict=True)):
                return "\n".join([*way[state], *self._left(state)])
        return ""

    def _launches(self, state: State) -> list[tuple[str, State]]:
        """Launches that come next, with what follows from them.

        Those of different devices commute.  Where all threads of a device that cannot launch wait for a kernel that it
        has yet to launch itself, its launches are tried first: as many states are stuck in the end (a persistent set).
        """
        everything = []
        for at, (queues, started, over) in enumerate(state):
            launched = [count + sum(queue.count(stream) for queue in queues) for stream, count in enumerate(started)]
            found, alone = [], True
            for thread in self.threads[at]:
                if not (left := [step for step in thread if step.number >= launched[step.stream]]):
                    continue
                step = left[0]
                if missing := [its for its in step.seen if over[its[0]] <= its[1]]:
                    alone = alone and any(launched[stream] <= number for stream, number in missing)
                    continue
                where = self.queue_of[step.stream]
                longer = (*queues[:where], (*queues[where], step.stream), *queues[where + 1 :])
                after = (*state[:at], (longer, started, over), *state[at + 1 :])
                found.append((f"{list(DEVICES)[at]} launches {step.name}", self._settled(after)))
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
                    if all(started[member][stream] > number for member in MEMBERS[at, stream]):
                        over[at][stream] += 1
                        moved = True
        frozen = [tuple(map(tuple, its)) for its in queues]
        return tuple(zip(frozen, map(tuple, started), map(tuple, over), strict=True))

    def _left(self, state: State) -> Iterator[str]:
        for name, kernels, (queues, started, over) in zip(DEVICES, self.kernels, state, strict=True):
            runs = [kernels[stream, over[stream]].name for stream in STREAMS if started[stream] > over[stream]]
            heads = [kernels[queue[0], started[queue[0]]].name for queue in queues if queue]
            yield f"{name} runs {runs}; at the heads of its queues: {heads}"


def model(buckets: int) -> Thread:
    """GEMM b computes bucket b; a collective of the replica between any two, as with tensor parallelism."""
    steps = [Step(GEMMS, 0, "GEMM 0")]
    for n in range(buckets):
        steps += [Step(TP, n, f"TP {n}", event=(GEMMS, n)), Step(GEMMS, n + 1, f"GEMM {n + 1}", event=(TP, n))]
    return steps


def behind_each_other(*columns: int) -> Thread:
    """Reduce-scatter and all-gather of each bucket, of its column: all under way, the host waits for buckets alone."""
    steps = []
    for bucket, column in enumerate(columns):
        n = 2 * columns[:bucket].count(column)
        steps += [Step(column, n, f"RS {bucket}", ((GEMMS, bucket),)), Step(column, n + 1, f"AG {bucket}")]
    return steps


def one_at_a_time(*columns: int) -> Thread:
    """The same, each when the host has seen the one before it over, whichever column it is of."""
    first, *others = steps = behind_each_other(*columns)
    behind = zip(others, steps, strict=False)
    return [first, *(replace(step, seen=(*step.seen, (before.stream, before.number))) for step, before in behind)]


ONE_QUEUE = (0, 0, 0, 0)
EVERY_MAP = pytest.mark.parametrize("queue_of", [(0, *others) for others in product((0, 1), repeat=3)], ids=str)
"""Of the four streams to one queue or two: all but those that differ in the numbers of the queues alone."""


def search(sums: Thread, queue_of: Sequence[int], other_replica: Thread | None = None) -> str:
    """With a thread for the model and one for the sums on each device."""
    each = [[model(2), sums], [model(2), other_replica or sums]]
    return Search([each[replica - 1] for replica, _ in DEVICES.values()], queue_of).stuck()


@EVERY_MAP
def test_two_operations_behind_each_other_hold_up_the_model_and_each_other(queue_of: Sequence[int]) -> None:
    told = search(behind_each_other(DENSE, DENSE), queue_of)
    print(told)
    assert bool(told) == (queue_of[DENSE] in (queue_of[GEMMS], queue_of[TP]))


@EVERY_MAP
@pytest.mark.parametrize("columns", [(DENSE, DENSE), (DENSE, EXPERTS)], ids=["one column", "two columns"])
def test_one_operation_at_a_time_holds_up_nothing(columns: Sequence[int], queue_of: Sequence[int]) -> None:
    assert not search(one_at_a_time(*columns), queue_of)


@pytest.mark.parametrize("launching", [one_at_a_time, behind_each_other])
def test_columns_whose_order_differs_between_workers_wait_for_each_other(launching: Callable[..., Thread]) -> None:
    assert search(launching(DENSE, EXPERTS), ONE_QUEUE, launching(EXPERTS, DENSE))
