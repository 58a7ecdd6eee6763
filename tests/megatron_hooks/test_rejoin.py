"""A worker that is put aside: `Rejoin`, with places that cannot be taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.collectives.epoch import PeerLost
from recover_megatron.instep.decision import Decision
from recover_megatron.instep.faults import RunOver
from recover_megatron.instep.spare import MOST, PAUSE_SECONDS
from recover_megatron.megatron_hooks.rejoin import Rejoin

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
    rejoin = Rejoin(recovery, nothing, nothing, nothing, nothing, None, nothing, nothing, ())
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
