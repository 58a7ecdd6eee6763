"""A worker's way back: who is put aside, which update of an orphan counts, and ranks that modules keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron.collectives.epoch import PeerLost
from recover_megatron.instep.decision import Decision
from recover_megatron.instep.faults import RunOver
from recover_megatron.instep.no_place import MOST, PAUSE_SECONDS
from recover_megatron.megatron_hooks.groups import renew_rank_copies
from recover_megatron.megatron_hooks.rejoin import Rejoin
from recover_megatron.megatron_hooks.training_parts import StepGuard

BESIDE = Decision(5, {0: (0, 1), 1: (2, 3)}, (), fresh=(1,))


def test_who_is_put_aside_says_so_to_people_and_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    left: list[str] = []
    slept: list[float] = []
    offers: list[dict[str, Any]] = []

    def wait(**offer: Any) -> None:
        offers.append(offer)
        raise RunOver(0, "the training is over")

    nothing: Any = SimpleNamespace(traffic=SimpleNamespace(mode=None), inside=SimpleNamespace(left=lambda: None))
    recovery: Any = SimpleNamespace(
        orphan=SimpleNamespace(leave=left.append, wait=wait),
        session=SimpleNamespace(note=notes.append),
        assignment=SimpleNamespace(me=4),
    )
    rejoin = Rejoin(recovery, nothing, nothing, nothing, nothing, nothing)
    tries = iter(range(MOST))
    monkeypatch.setattr(rejoin, "_wait", lambda: (next(tries), BESIDE)[1])
    monkeypatch.setattr("time.sleep", slept.append)

    def fail(decision: Decision) -> None:
        raise PeerLost("gloo could not connect")

    monkeypatch.setattr(rejoin, "_take_place", fail)
    with pytest.raises(RunOver):
        rejoin.come_back()
    told = "it is put aside: 3 times in a row it could not take a place: gloo could not connect"
    assert notes == [told], "in workers.json"
    assert left[-1] == told, "in recover-status"
    assert slept == [0.0, PAUSE_SECONDS]
    assert offers == [{"position": None, "ready": False}], "it is offered for no place any more"


class Event:
    """Of a device that is done when it is told so."""

    done = False

    def record(self) -> None:
        """Into a stream."""

    def query(self) -> bool:
        return self.done


@pytest.mark.parametrize(
    ("order", "believed"),
    [
        pytest.param("seal", True, id="between_updates-True"),
        pytest.param("begin end done seal", True, id="after_one_that_is_done-True"),
        pytest.param("begin end seal done", False, id="while_one_is_queued-False"),  # done with garbage
        pytest.param("begin seal end done", False, id="while_one_is_made-False"),
        pytest.param("seal begin end done", False, id="before_one-False"),
    ],
)
def test_only_an_update_that_was_carried_out_before_the_abort_counts(order: str, believed: bool) -> None:
    event = Event()
    guard = StepGuard(lambda: event)
    for what in order.split():
        if what == "done":
            event.done = True
        else:
            getattr(guard, what)()
    assert guard.believed is believed
    guard.seal()
    assert guard.believed is believed, "the first abort counts"
    guard.reset()
    assert guard.believed


def test_on_the_cpu_an_update_counts_when_it_has_returned() -> None:
    guard = StepGuard.of(torch.device("cpu"))
    guard.begin()
    guard.end()
    guard.seal()
    assert guard.believed


class Attention(torch.nn.Module):
    """As Transformer Engine's: with the ranks that it was made with; None: without context parallelism."""

    def __init__(self, ranks: list[int] | None) -> None:
        super().__init__()
        self.cp_global_ranks = ranks


def test_every_attention_with_context_parallelism_gets_the_present_ranks_and_no_other_module() -> None:
    layers = [Attention([4, 5]), Attention([4, 5]), Attention(None)]
    chunks = [torch.nn.Sequential(layers[0], torch.nn.Sequential(layers[1])), torch.nn.Sequential(layers[2])]
    renew_rank_copies(chunks, (2, 3))
    assert [layer.cp_global_ranks for layer in layers] == [[2, 3], [2, 3], None]
    assert not hasattr(chunks[0], "cp_global_ranks")
    layers[0].cp_global_ranks.append(9)  # type: ignore[union-attr]
    assert layers[1].cp_global_ranks == [2, 3], "each has a list of its own"
