"""A worker that cannot take the places that it is given is put aside: it is not tried in every iteration, for good."""

from __future__ import annotations

from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.instep.decision import Decision
from recover_megatron.instep.spare import MOST, PAUSE_SECONDS, UntakenPlaces

BESIDE = Decision(5, {0: (0, 1), 1: (2, 3)}, (), fresh=(1,))
ALL_NEW = Decision(5, {1: (2, 3)}, (), fresh=(1,))


def pauses(*errors: Exception, decision: Decision = BESIDE) -> list[float]:
    """Before each further offer; -1: there is none."""
    untaken = UntakenPlaces()
    found = []
    for error in errors:
        untaken.failed(error, decision)
        found.append(-1.0 if untaken.aside else untaken.pause)
    return found


def test_the_same_failure_three_times_in_a_row_is_enough_whatever_its_numbers() -> None:
    lost = [PeerLost(f"{number} of gloo's connections are gone already") for number in (1, 8, 3)]
    assert pauses(*lost) == [0.0, PAUSE_SECONDS, -1.0]
    assert pauses(lost[0], lost[1], TimeoutError("nobody came"), lost[2]) == [0.0, PAUSE_SECONDS, 0.0, 0.0]


def test_what_ends_by_another_or_where_the_run_is_at_stake_counts_for_nothing() -> None:
    lost = PeerLost("it is gone")
    assert pauses(*[EpochRevoked(5)] * 4) == [0.0] * 4
    assert pauses(*[lost] * 4, decision=ALL_NEW) == [0.0] * 4
    assert pauses(lost, EpochRevoked(5), lost, EpochRevoked(5), lost)[-1] == -1.0
    untaken = UntakenPlaces()
    for _ in range(MOST - 1):
        untaken.failed(lost, BESIDE)
    untaken.taken()
    untaken.failed(lost, BESIDE)
    assert not untaken.aside
