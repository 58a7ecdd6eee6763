"""How the next epoch's communicator comes to be: the decision by itself, and carried out over the double of NCCL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked
from recover_megatron.collectives.nccl.communicator import Communicator, State
from recover_megatron.collectives.nccl.library import Library
from recover_megatron.collectives.nccl.renewal import Decision, Holding, Keeper, Opening, decide, open_all
from tests.collectives.nccl.test_communicator import all_gather
from tests.collectives.together import DEADLINE, Dictionary
from tests.doubles.nccl import library as double
from tests.doubles.nccl.streams import Stream
from tests.harness.waiting import eventually


def held(
    ranks: Sequence[int | None], size: int, *, ready: bool = True, operations: int = 7
) -> list[dict[str, Holding]]:
    return [{} if rank is None else {"old": Holding(rank, size, ready, operations)} for rank in ranks]


INIT, MIXED = Decision("init"), [*held([0], 3, ready=False, operations=3), *held([2], 3, operations=4)]


@pytest.mark.parametrize(
    ("members", "can_grow", "wanted"),
    [
        ([{}, {}], True, INIT),
        (held([0, 1, 2], 3), True, Decision("keep", "old")),
        (held([0, 1, 2], 3, ready=False), True, INIT),
        ([*held([0, 1], 3), *held([2], 3, operations=6)], True, INIT),
        (held([0, 2, 3], 5), False, Decision("shrink", "old", (1, 4))),
        (MIXED, False, Decision("shrink", "old", (1,))),
        (held([2, 0], 3), True, INIT),
        (held([None, 0, 1], 2), True, INIT),
        (held([0, 1, None], 2), True, Decision("grow", "old")),
        (held([0, 1, None], 2), False, INIT),
        (held([0, 1, None], 3), True, INIT),
        (held([0, 1, None], 2, ready=False), True, INIT),
    ],
    ids=[
        "nothing held", "the same members keep it", "revoked anywhere", "of another length", "a loss shrinks it",
        "whatever its state", "permuted", "joiners in front", "joiners behind the others", "of an old NCCL",
        "a loss and a joiner at the same time", "joiners to what is revoked",
    ],
)  # fmt: skip
def test_what_becomes_of_what_is_held(members: list[dict[str, Holding]], can_grow: bool, wanted: Decision) -> None:
    assert decide(members, can_grow=can_grow) == wanted


RANKS = st.lists(st.sampled_from([None, 0, 1, 2, 3]), min_size=2, max_size=5).filter(
    lambda ranks: len({rank for rank in ranks if rank is not None}) == sum(rank is not None for rank in ranks)
)


@given(RANKS, st.booleans(), st.booleans())
def test_a_decision_keeps_to_nccls_rules(ranks: list[int | None], ready: bool, can_grow: bool) -> None:
    members = held(ranks, 4, ready=ready)
    decision = decide(members, can_grow=can_grow)
    old = [rank for rank in ranks if rank is not None]
    if decision.how == "shrink":  # all who stay call it, ranks are renumbered in order, somebody is excluded
        assert None not in ranks
        assert old == sorted(old)
        assert decision.exclude
        assert set(decision.exclude) == set(range(4)) - set(old)
    if decision.how in ("keep", "grow"):
        assert ready
        assert old == list(range(4))
    assert decision.how != "grow" or can_grow


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
        (self.communicator,) = open_all([opening], token, DEADLINE)
        return self.communicator

    def gathered(self, members: list[Worker]) -> list[float]:
        assert self.communicator is not None
        output = torch.zeros(len(members))
        self.communicator.wait(all_gather(self.communicator, self.stream, output, torch.tensor([float(self.name)])))
        return output.tolist()


class Crew:
    def __init__(self, library: Library, size: int) -> None:
        self.library = library
        self.pool = ThreadPoolExecutor(size + 3)
        self.workers = [Worker(library, name) for name in range(size + 3)]
        self.epoch = 0
        self.used: list[Worker] = []
        self.tokens: dict[int, CancelToken] = {}

    def round(self, names: list[int]) -> list[str]:
        """An epoch of these workers: one all-gather.  Returns the management calls that it took."""
        members = [self.workers[name] for name in names]
        self.epoch += 1
        del self.library.core.calls[:]
        store, epoch = Dictionary(), self.epoch
        self.tokens = {worker.name: CancelToken(epoch) for worker in members}
        futures = [self.pool.submit(it.open, epoch, members, store, self.tokens[it.name]) for it in members]
        calls = [future.result(DEADLINE) for future in futures] and list(self.library.core.calls)
        for result in list(self.pool.map(lambda it: it.gathered(members), members)):
            assert result == [float(name) for name in names]
        self.used = members
        return sorted(set(calls) - {"abort"})

    def end(self, dead: Sequence[int] = (), waiting: Sequence[int] = ()) -> None:
        """The epoch ends; ``waiting`` are in an operation that ``dead`` do not take part in."""
        for worker in self.used:
            communicator = worker.communicator
            assert communicator is not None
            if worker.name in waiting:
                all_gather(communicator, worker.stream, torch.zeros(len(self.used)), torch.ones(1))
            self.tokens[worker.name].cancel("a test ends the epoch")
            communicator.settle()
            if worker.name in dead:
                communicator.close()
                worker.keeper.close()
            worker.keeper.give(communicator, self.epoch)

    def close(self) -> None:
        for worker in self.workers:
            if worker.communicator is not None:
                worker.communicator.close()
            worker.keeper.close()
        self.pool.shutdown()


@pytest.fixture
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    made = Crew(double(getattr(request, "param", (2, 29, 7)), seed=1), 4)
    yield made
    made.close()


def test_an_orderly_change_keeps_the_communicator(crew: Crew) -> None:
    assert crew.round([0, 1, 2]) == ["init"]
    crew.end()
    assert crew.round([0, 1, 2]) == []


def test_a_loss_in_the_middle_of_an_operation_shrinks(crew: Crew) -> None:
    crew.round([0, 1, 2, 3])
    crew.end(dead=[1], waiting=[0, 2])
    assert crew.round([0, 2, 3]) == ["shrink"]
    crew.end(dead=[0])
    assert crew.round([2, 3]) == ["shrink"]


def test_joiners_grow_it_and_then_a_loss_shrinks_it(crew: Crew) -> None:
    crew.round([0, 1])
    crew.end()
    assert crew.round([0, 1, 2, 3]) == ["get_unique_id", "grow"]
    crew.end(dead=[2], waiting=[0, 1, 3])
    assert crew.round([0, 1, 3]) == ["shrink"]


@pytest.mark.parametrize("crew", [(2, 27, 7)], indirect=True)
def test_an_old_nccl_aborts_and_opens_anew_where_something_was_outstanding(crew: Crew) -> None:
    crew.round([0, 1, 2])
    crew.end(dead=[1], waiting=[0, 2])
    assert crew.round([0, 2]) == ["init"]
    crew.end()
    assert crew.round([0, 2, 3]) == ["init"]


def test_what_nobody_wants_is_aborted_an_epoch_later(crew: Crew) -> None:
    crew.round([0, 1])
    crew.end()
    first = crew.used[0].communicator
    assert first is not None
    crew.round([1, 0])
    assert first.state is State.READY
    crew.end()
    crew.round([1, 0])
    eventually(lambda: first.state is State.CLOSED, "what two epochs did not use is aborted")


def test_an_opening_that_nobody_joins_is_ended_by_the_switch_and_by_its_timeout() -> None:
    library, token = double(), CancelToken(1)
    worker = Worker(library, 0)
    opening = Opening(library, worker.keeper, Dictionary(), token, prefix="c", rank=0, size=2)
    with pytest.raises(TimeoutError, match="not all members have opened it"):
        open_all([opening], token, 0.01)
    token.cancel("a test ends the epoch")
    again = Opening(library, worker.keeper, Dictionary(), token, prefix="c", rank=0, size=2)
    with pytest.raises(EpochRevoked):
        open_all([again], token, DEADLINE)
