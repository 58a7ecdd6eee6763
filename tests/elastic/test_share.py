"""The holders of the state, and who runs what: decided by each worker from what all have joined with."""

from __future__ import annotations

from itertools import chain

import pytest

from recover_megatron.elastic.state import Standing, Status, shares, standing


def status(completed: int = 0, holds: bool = True, digest: str = "", ran: tuple[int, ...] = ()) -> Status:
    return Status(completed, holds, digest, ran, "host:1")


def test_a_status_comes_through_the_wire() -> None:
    one = status(7, True, "ab", (0, 3))
    assert Status.from_json(one.to_json()) == one


@pytest.mark.parametrize(
    ("statuses", "committed", "wanted"),
    [
        ({0: status(digest="a"), 1: status(digest="a")}, 0, Standing(0, (0, 1))),
        ({0: status(digest="a"), 1: status(digest="b"), 2: status(digest="a")}, 0, Standing(0, (0, 2))),
        ({1: status(digest="b"), 2: status(digest="a")}, 0, Standing(0, (1,))),
        ({0: status(digest="a"), 1: status(500, digest="c"), 2: status(500, digest="d")}, 0, Standing(500, (1,))),
        ({0: status(7), 1: status(7), 4: status(holds=False)}, 7, Standing(7, (0, 1))),
        ({0: status(6), 1: status(7), 4: status(holds=False)}, 7, Standing(7, (0, 1))),
        ({0: status(0, digest="a"), 1: status(1)}, 1, Standing(1, (0, 1))),
        ({4: status(holds=False), 5: status(holds=False)}, 7, None),
    ],
    ids=["equal", "one differs", "the lowest leads", "who has completed most", "a newcomer", "one has to apply it",
         "the first step", "nobody"],
)  # fmt: skip
def test_who_holds_the_state(statuses: dict[int, Status], committed: int, wanted: Standing | None) -> None:
    assert standing(statuses, committed) == wanted


def test_what_nobody_had_is_shared_out_and_nothing_else() -> None:
    statuses = {0: status(7, ran=(0, 3)), 2: status(7, ran=(2,)), 4: status(holds=False)}
    at = Standing(7, (0, 2))
    assert shares(statuses, at, [0, 2, 4], 8, 6) == {0: [1], 2: [4, 5]}, "who had less runs more; a newcomer nothing"


def test_what_was_run_of_an_older_step_does_not_count() -> None:
    statuses = {0: status(6, ran=(0, 1, 2)), 1: status(7, ran=())}
    assert shares(statuses, Standing(7, (0, 1)), [0, 1], 8, 4) == {0: [0, 2], 1: [1, 3]}


@pytest.mark.parametrize("step", [9, 20])
def test_later_steps_of_the_epoch_are_everybodys(step: int) -> None:
    statuses = {0: status(7, ran=(0, 3)), 2: status(7), 4: status(holds=False)}
    dealt = shares(statuses, Standing(7, (0, 2)), [0, 2, 4], step, 7)
    assert sorted(chain(*dealt.values())) == list(range(7))
    assert {len(ids) for ids in dealt.values()} == {2, 3}
