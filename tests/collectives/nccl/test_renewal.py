"""How the next epoch's communicator comes to be: the decision by itself, and carried out over the double of NCCL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

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


DEVICE = 3


class Crew:
    """Workers, by number, on a device that is not the first one."""

    def __init__(self, library: Library, size: int) -> None:
        self.library = library
        self.pool = ThreadPoolExecutor(size, initializer=set_device, initargs=[DEVICE])
        self.keepers = [Keeper() for _ in range(size)]
        self.streams = [Stream(torch.device("cpu", worker)) for worker in range(size)]
        self.epoch = 0
        self.used: list[tuple[int, CancelToken, Communicator]] = []

    def round(self, members: list[int]) -> list[str]:
        """An epoch of these workers: one all-gather.  Returns the management calls that it took."""
        self.epoch += 1
        del self.library.core.calls[:]
        store, prefix, size = Dictionary(), f"c/{self.epoch}", len(members)

        def open_its(rank: int, worker: int) -> tuple[int, CancelToken, Communicator]:
            token = CancelToken(self.epoch)
            opening = Opening(self.library, self.keepers[worker], store, token, prefix=prefix, rank=rank, size=size)
            return worker, token, opened(opening, DEADLINE)

        def gathered(worker: int, _: CancelToken, communicator: Communicator) -> list[float]:
            output, source = torch.zeros(size), torch.tensor([float(worker)])
            communicator.wait(all_gather(communicator, self.streams[worker], output, source))
            return output.tolist()

        using = list(self.pool.map(open_its, range(size), members))
        assert list(self.pool.map(lambda its: gathered(*its), using)) == [[float(worker) for worker in members]] * size
        self.used += using
        return [call for call in self.library.core.calls if call != "abort"]

    def end(self, waiting: Sequence[int] = ()) -> None:
        """All epochs so far end; ``waiting`` are in an operation that the others do not take part in."""

        def end(worker: int, token: CancelToken, communicator: Communicator) -> None:
            if worker in waiting:
                all_gather(communicator, self.streams[worker], torch.zeros(communicator.size), torch.ones(1))
            token.cancel("a test ends the epoch")
            communicator.quiesce()
            self.keepers[worker].give(communicator)

        list(self.pool.map(lambda used: end(*used), self.used))
        self.used.clear()

    def close(self) -> None:
        """Whatever was made is aborted, by threads that have its device."""
        for keeper in self.keepers:
            keeper.close()
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

    def alone() -> Opening:
        return Opening(library, Keeper(), Dictionary(), token, prefix="c", rank=0, size=2)

    with pytest.raises(TimeoutError, match="not all members opened this communicator"):
        opened(alone(), 0.01)
    token.cancel("a test ends the epoch")
    with pytest.raises(EpochRevoked):
        opened(alone(), DEADLINE)
