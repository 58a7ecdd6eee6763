"""Stand-ins for Megatron's writers: who remembers, who writes, and that neither ends a run."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from recover_megatron.megatron_hooks import writers
from recover_megatron.megatron_hooks.writers import Stub
from tests.harness.waiting import DEADLINE


class Board:
    """A writer that may fail."""

    def __init__(self, fails: bool = False) -> None:
        self.told: list[tuple[str, float, int]] = []
        self._fails = fails
        self.flushed = 0

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        if self._fails:
            raise OSError(28, "No space left on device")
        self.told.append((name, float(value), step))

    def add_text(self, name: str, text: str) -> None:
        self.told.append((name, 0.0, 0))

    def flush(self) -> None:
        self.flushed += 1


def test_who_begins_to_write_tells_what_it_remembers_and_then_what_comes() -> None:
    opened: list[Board] = []
    iteration = 1

    def open_() -> Board:
        opened.append(Board())
        return opened[-1]

    writer = Stub("TensorBoard", None, open_, lambda: iteration)
    assert writer  # Megatron asks
    loss = torch.tensor([3.0])
    writer.add_scalar("loss", loss, 1)
    loss += 4  # what Megatron adds up for its row
    writer.add_text("args", "nobody is told")
    writer.run.log_artifact("nor of this")
    assert opened == []
    iteration = 2
    writer.begin()
    writer.begin()
    assert [board.told for board in opened] == [[("loss", 3.0, 1)]]
    assert opened[0].flushed
    writer.add_scalar("loss", 2.0, 2)
    writer.rest()
    writer.add_scalar("loss", 1.0, 3)
    assert opened[0].told == [("loss", 3.0, 1), ("loss", 2.0, 2)]
    writer.begin()  # the other one died: it may not have written them
    assert opened[0].told[-1] == ("loss", 1.0, 3)
    assert len(opened) == 1


def test_what_was_told_last_is_written_out_at_the_end_by_who_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends without taking Python down, so nothing else would write it."""
    board = Board()
    opened: list[str] = []
    others = Stub("W&B", None, lambda: opened.append("W&B"), lambda: 1)
    monkeypatch.setattr(writers.global_vars, "_GLOBAL_TENSORBOARD_WRITER", Stub("TensorBoard", board, Board, lambda: 1))
    monkeypatch.setattr(writers.global_vars, "_GLOBAL_WANDB_WRITER", others)
    writers.finish()
    assert board.flushed
    assert opened == []


@pytest.mark.parametrize("where", ["opened", "told"])
def test_a_writer_that_fails_is_told_of_once_and_ends_nothing(capsys: pytest.CaptureFixture[str], where: str) -> None:
    def open_() -> Board:
        if where == "opened":
            raise ConnectionError("no such host")
        return Board(fails=True)

    writer = Stub("TensorBoard", None, open_, lambda: 1)
    writer.begin()
    writer.add_scalar("loss", 1.0, 1)
    writer.add_scalar("loss", 1.0, 2)
    writer.flush()
    said = capsys.readouterr().err
    assert said.count("TensorBoard is not written any more") == 1


def test_a_writer_that_does_not_answer_holds_nobody_up_and_hears_everything_later() -> None:
    answers = threading.Event()

    class Slow(Board):
        def add_scalar(self, name: str, value: Any, step: int) -> None:
            assert answers.wait(DEADLINE)
            super().add_scalar(name, value, step)

    board = Slow()
    writer = Stub("TensorBoard", board, Board, lambda: 1)
    for step in range(100):
        writer.add_scalar("loss", 1.0, step)
    assert board.told == []
    answers.set()
    writer.flush()
    assert board.told == [("loss", 1.0, step) for step in range(100)]
    assert board.flushed
