"""The fault specification: what it means, and that all its errors are told at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.chaos import PHASES, BadSpec, Fault, Kind, parse_spec

FAULTS = st.builds(
    Fault,
    worker=st.integers(0, 999),
    iteration=st.integers(1, 10**6),
    phase=st.sampled_from(PHASES),
    kind=st.sampled_from(Kind),
    visit=st.integers(1, 40),
)


@given(st.lists(FAULTS, unique_by=lambda f: (f.worker, f.iteration, f.phase, f.visit)))
def test_what_is_written_is_what_is_read(faults: list[Fault]) -> None:
    assert parse_spec(",".join(map(str, faults))) == faults


def test_kill_at_the_first_visit_is_the_default() -> None:
    assert parse_spec("5@7:backward") == [Fault(5, 7, "backward", Kind.KILL, 1)]
    assert parse_spec(" 5@7:forward#2:stop , 3@4:reduce-scatter#5") == [
        Fault(5, 7, "forward", Kind.STOP, 2),
        Fault(3, 4, "reduce-scatter", Kind.KILL, 5),
    ]
    assert parse_spec("  ") == []


def test_all_errors_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="iterations count from 1") as caught:
        parse_spec("5,1@0:forward,1@2:lunch:tickle,9@1:agree,1@3:agree#0,2@2:eval:exit,2@2:eval,", workers=4)
    assert isinstance(caught.value, BadSpec)
    said = "\n".join(caught.value.reasons)
    assert len(caught.value.reasons) == 8
    assert "fault '5': not of the form WORKER@ITERATION:PHASE[#VISIT][:KIND]" in said
    assert "fault '1@2:lunch:tickle': no phase 'lunch'; there are data, forward, backward" in said
    assert "fault '1@2:lunch:tickle': no kind 'tickle'; there are kill, stop, raise, exit" in said
    assert "fault '9@1:agree': there is no worker 9, only 0 to 3" in said
    assert "fault '1@3:agree#0': visits count from 1" in said
    assert "fault '2@2:eval': '2@2:eval:exit' strikes the same worker at the same place already" in said
    assert "fault '': not of the form" in said


@pytest.mark.parametrize("text", ["-1@2:eval", "1@2", "1@2:eval:kill:stop", "1@2:eval#x", "1.0@2:eval", "²@1:eval"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(BadSpec, match="not of the form"):
        parse_spec(text)
