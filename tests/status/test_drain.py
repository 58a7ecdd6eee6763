"""``recover-status ... drain NODE``: what it says and how it ends, for what a coordinator answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recover_megatron.membership.io.observer import NoAnswer
from recover_megatron.membership.messages.to_member import Stop
from recover_megatron.membership.records import AuthenticationError
from recover_megatron.status import __main__ as command
from recover_megatron.status.__main__ import DrainExit, drain, main
from recover_megatron.status.model import RunStatus, read
from tests.harness.waiting import DEADLINE
from tests.status.test_status_model import seen, text, view

ASKED = {"node": "b", "state": "asked", "workers": [[2, 3]], "names": ["b", "host"]}
MOVING = {**ASKED, "state": "moving"}
DRAINED = {"node": "b", "state": "drained", "workers": [], "names": ["b", "host"]}
REFUSED = {"node": "b", "state": "refused", "workers": [], "reason": "nothing would be left", "names": ["b"]}
ENDED = Stop("all workers have left", 0, 3)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PAUSE_SECONDS", 0.0)


class Run:
    """Answers with one view after the other; None: nobody answers; an error is raised."""

    def __init__(self, *answers: list[dict[str, object]] | Stop | Exception | None) -> None:
        self._answers: Iterator[object] = iter(answers)
        self.asked: list[str | None] = []

    def look(self, node: str | None) -> RunStatus:
        self.asked.append(node)
        answer = next(self._answers)
        if answer is None:
            raise NoAnswer("it has just died")
        if isinstance(answer, Exception):
            raise answer
        return read(answer if isinstance(answer, Stop) else view(drains=answer), "h:1")


def drained(run: Run, node: str = "b", patience: float = DEADLINE) -> tuple[list[str], DrainExit]:
    said: list[str] = []
    return said, drain(node, run.look, patience, said.append)


def test_each_change_is_a_line_and_it_ends_when_the_node_may_be_switched_off() -> None:
    run = Run([ASKED], [ASKED], [MOVING], [DRAINED])
    said, code = drained(run)
    assert said == [
        "b: drain is requested; workers there: 2-3",
        "b: leaves at the next iteration; workers there: 2-3",
        "b is drained: it may be switched off",
    ]
    assert (code, run.asked) == (DrainExit.DRAINED, ["b", None, None, None])


def test_a_host_is_drained_when_all_its_nodes_are() -> None:
    other = {**MOVING, "node": "c", "workers": [[5, 5]]}
    said, code = drained(Run([DRAINED, other], [DRAINED, {**other, "state": "drained"}]), "host")
    assert said == ["host: leaves at the next iteration; workers there: 5", "host is drained: it may be switched off"]
    assert code == DrainExit.DRAINED


def test_a_refusal_is_told_with_its_reason() -> None:
    said, code = drained(Run([REFUSED]))
    assert (said, code) == (["b is not drained, and nothing has changed: nothing would be left"], DrainExit.REFUSED)


def test_of_a_host_with_several_nodes_it_is_told_which_may_be_switched_off_and_which_not() -> None:
    other = {**REFUSED, "node": "c", "names": ["c", "host"]}
    said, code = drained(Run([MOVING, other], [DRAINED, other]), "host")
    assert said[-1] == "host is not completely drained. c stays: nothing would be left. Drained: b"
    assert code == DrainExit.REFUSED


def test_the_next_coordinator_is_asked_again_if_it_knows_nothing_of_it() -> None:
    run = Run([ASKED], None, [], [ASKED], [DRAINED])
    assert drained(run)[1] == DrainExit.DRAINED
    assert run.asked == ["b", None, None, "b", None]


def test_a_coordinator_that_goes_away_while_the_secret_is_proved_to_it_does_not_end_the_command() -> None:
    """The closed connection looks like a refused secret; before the first answer it is taken for that."""
    refused = AuthenticationError("h:1 rejects the secret")
    assert drained(Run([ASKED], refused, [], [ASKED], [DRAINED]))[1] == DrainExit.DRAINED
    with pytest.raises(AuthenticationError):
        drained(Run(refused, [ASKED]))


def test_when_nobody_answers_any_more_it_says_so() -> None:
    with pytest.raises(NoAnswer):
        drained(Run([ASKED], *[None] * 3), patience=0.0)


def test_a_run_that_has_ended_needs_no_node() -> None:
    said, code = drained(Run([ASKED], ENDED))
    assert (said[-1], code) == ("the run has ended (all workers have left): no worker runs on b", DrainExit.DRAINED)


@pytest.mark.parametrize(
    "more", [["drain"], ["drain", ""], ["drain", "a", "b"], ["stop", "a"], ["drain", "a", "--json"]]
)
def test_a_mistyped_order_is_refused(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["127.0.0.1:9", *more])
    assert ended.value.code == 2
    assert "drain NODE" in capsys.readouterr().err


def test_the_view_names_drained_nodes() -> None:
    shown = text(seen(drains=[DRAINED, {**MOVING, "node": "c"}, REFUSED]))
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "b drained: it may be switched off" in lines
    assert "c being drained 2-3" in lines
    assert "b refused nothing would be left" in lines


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 1)])
def test_who_stops_looking_is_not_told_that_the_node_may_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    """A script that is interrupted goes on with its next command if this one ends with exit code 0."""

    def stopped(*_: object) -> DrainExit:
        raise error

    monkeypatch.setenv("RECOVER_SECRET", "a secret of many bytes")
    monkeypatch.setattr("recover_megatron.status.__main__.drain", stopped)
    monkeypatch.setattr("recover_megatron.status.__main__._print_no_more", lambda: None)
    assert main(["h:1", "drain", "b"]) == code
