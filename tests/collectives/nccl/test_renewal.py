"""How the next epoch's communicator comes to be: the decision by itself, and carried out over the double of NCCL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked
from recover_megatron.collectives.nccl.communicator import Communicator
from recover_megatron.collectives.nccl.library import Library
from recover_megatron.collectives.nccl.renewal import Keeper, Opening, decide, opened
from tests.collectives.nccl.test_communicator import all_gather
from tests.collectives.together import DEADLINE, Dictionary
from tests.doubles.nccl import library as double
from tests.doubles.nccl.streams import Stream, set_device
from tests.harness.waiting import eventually


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ([{}, {}], None),
        ([{"old": 7}, {"old": 7}, {"old": 7}], "old"),
        ([{"old": 7}, {}, {"old": 7}], None),
        ([{"old": 7}, {"old": 7}, {"old": 6}], None),
        ([{"others": 1, "old": 7}, {"old": 7}], "old"),
    ],
    ids=["nothing held", "the same members keep it", "ended at one", "of another length", "one of another column"],
)
def test_what_becomes_of_what_is_held(told: list[dict[str, int]], kept: str | None) -> None:
    assert decide(told) == kept


# ---- carried out


class Worker:
    """A rank through several epochs."""

    def __init__(self, library: Library, name: int) -> None:
        self.library = library
        self.name = name
        self.keeper = Keeper()
        self.stream = Stream(torch.device("cpu", name))
        self.communicator: Communicator | None = None

    def open(self, epoch: int, members: list[Worker], store: Any, token: CancelToken) -> Communicator:
        rank = members.index(self)
        opening = Opening(self.library, self.keeper, store, token, prefix=f"c/{epoch}", rank=rank, size=len(members))
        self.communicator = opened(opening, DEADLINE)
        return self.communicator

    def gathered(self, members: list[Worker]) -> list[float]:
        assert self.communicator is not None
        output = torch.zeros(len(members))
        self.communicator.wait(all_gather(self.communicator, self.stream, output, torch.tensor([float(self.name)])))
        return output.tolist()


DEVICE = 3


class Crew:
    """Workers on a device that is not the first one."""

    def __init__(self, library: Library, size: int) -> None:
        self.library = library
        self.pool = ThreadPoolExecutor(size, initializer=set_device, initargs=[DEVICE])
        self.workers = [Worker(library, name) for name in range(size)]
        self.epoch = 0
        self.used: list[tuple[Worker, CancelToken, Communicator]] = []

    def round(self, names: list[int]) -> list[str]:
        """An epoch of these workers: one all-gather.  Returns the management calls that it took."""
        members = [self.workers[name] for name in names]
        self.epoch += 1
        del self.library.core.calls[:]
        store, epoch = Dictionary(), self.epoch
        tokens = [CancelToken(epoch) for _ in members]
        opened = list(self.pool.map(lambda it, token: it.open(epoch, members, store, token), members, tokens))
        calls = list(self.library.core.calls)
        for result in list(self.pool.map(lambda it: it.gathered(members), members)):
            assert result == [float(name) for name in names]
        self.used += zip(members, tokens, opened, strict=True)
        return [call for call in calls if call != "abort"]

    def end(self, waiting: Sequence[int] = ()) -> None:
        """All epochs so far end; ``waiting`` are in an operation that the others do not take part in."""

        def end(worker: Worker, token: CancelToken, communicator: Communicator) -> None:
            if worker.name in waiting:
                all_gather(communicator, worker.stream, torch.zeros(communicator.size), torch.ones(1))
            token.cancel("a test ends the epoch")
            communicator.settle()
            worker.keeper.give(communicator)

        list(self.pool.map(lambda used: end(*used), self.used))
        self.used.clear()

    def close(self) -> None:
        """Whatever was made is aborted, by threads that have its device."""
        for worker in self.workers:
            worker.keeper.close()
        self.pool.shutdown()
        core = self.library.core
        eventually(lambda: not core.live, "every communicator is aborted")
        assert core.strays == []


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew(double(seed=1), 4)
    yield made
    made.end()
    made.close()


def test_an_orderly_change_keeps_the_communicator(crew: Crew) -> None:
    assert crew.round([0, 1, 2]) == ["init"] * 3
    crew.end()
    assert crew.round([0, 1, 2]) == []


def test_other_members_open_another_one_and_what_they_had_is_aborted(crew: Crew) -> None:
    crew.round([0, 1, 2])
    crew.end()
    assert crew.round([0, 1, 3]) == ["init"] * 3
    eventually(lambda: len(crew.library.core.live) == 4, "worker 2, which was not asked, still has its own")


def test_one_that_was_in_the_middle_of_an_operation_at_any_member_is_not_kept(crew: Crew) -> None:
    crew.round([0, 1, 2])
    crew.end(waiting=[0])
    assert crew.round([0, 1, 2]) == ["init"] * 3


def test_a_column_takes_nothing_of_another_one(crew: Crew) -> None:
    """Worker 0 has the same place among as many members in both, and offers both."""
    columns = [0, 1], [0, 2]
    for column in columns:
        crew.round(column)
    crew.end()
    assert [crew.round(column) for column in columns] == [[], []]


def test_an_opening_that_nobody_joins_is_ended_by_the_switch_and_by_its_timeout() -> None:
    library, token = double(), CancelToken(1)
    worker = Worker(library, 0)
    opening = Opening(library, worker.keeper, Dictionary(), token, prefix="c", rank=0, size=2)
    with pytest.raises(TimeoutError, match="not all members have opened it"):
        opened(opening, 0.01)
    token.cancel("a test ends the epoch")
    again = Opening(library, worker.keeper, Dictionary(), token, prefix="c", rank=0, size=2)
    with pytest.raises(EpochRevoked):
        opened(again, DEADLINE)
