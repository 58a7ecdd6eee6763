"""What is logged, and by whom: numbers beside the losses, and Megatron's writers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import training
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch.utils.tensorboard import SummaryWriter

from recover_megatron import log_writer
from recover_megatron.megatron_hooks.logging import records, writers
from recover_megatron.megatron_hooks.logging import trackers as module
from recover_megatron.megatron_hooks.logging.trackers import Trackers
from recover_megatron.megatron_hooks.logging.writers import Stub
from recover_megatron.megatron_hooks.loop.megatron_lm import MEGATRON_LM
from recover_megatron.megatron_hooks.loop.trainer import MegatronTrainer
from recover_megatron.membership.messages.fields import NOTHING
from recover_megatron.membership.messages.to_coordinator import Attach
from recover_megatron.membership.records import CoordinatorLost, Fenced, MembershipError, Settings, WorkerId
from recover_megatron.membership.sides.member import Member
from recover_megatron.workload.grid import launch_grid
from tests.harness.waiting import DEADLINE

ARGS = SimpleNamespace(
    num_experts=4,
    moe_router_load_balancing_type=["aux_loss"],
    moe_z_loss_coeff=1e-3,
    num_layers=2,
    mtp_num_layers=1,
    dsa_indexer_loss_coeff=None,
)
LAUNCHED = 4
GRID = launch_grid(LAUNCHED, tensor=1, context=1, pipeline=1, inner_ranks=1)
TAIL = range(LAUNCHED)


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> moe_logging.MoEMetricsTracker:
    """Megatron's trackers, empty."""
    experts = moe_logging.MoEMetricsTracker()
    monkeypatch.setattr(moe_logging, "_MOE_METRICS_TRACKER", experts)
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    monkeypatch.setattr(training, "_seqlen_stats_in_iteration", None)
    replica = SimpleNamespace(get_tensor_and_context_parallel_group=lambda: "within the replica")
    monkeypatch.setattr(module, "parallel_state", replica)
    made = experts.ensure_initialized
    monkeypatch.setattr(experts, "ensure_initialized", lambda name, layers: made(name, layers, "cpu"))
    return experts


def run(experts: moe_logging.MoEMetricsTracker, microbatches: int) -> None:
    """What so many microbatches add, each the same."""
    for _ in range(microbatches):
        experts.record("load_balancing_loss", torch.tensor(1.0), 1, 3)
        experts.record("z_loss", torch.tensor(2.0), 2, 3, avg_group="all replicas")
        its = MTPLossLoggingHelper.tracker
        for name, value in (("loss_values", 3.0), ("correct_values", 4.0), ("total_values", 5.0)):
            its[name] = its.get(name, torch.zeros(1)) + value
        its["avg_group"] = "all replicas"


def test_each_worker_is_given_what_equal_shares_of_the_launch_would_have_given_it(
    megatron: moe_logging.MoEMetricsTracker,
) -> None:
    """Eight microbatches; one of two workers that are left ran five of them, and something before that was lost."""
    trackers = Trackers(ARGS, TAIL, GRID)
    nothing = trackers.read()
    assert nothing.tolist() == [0.0] * trackers.size
    run(megatron, 3)
    trackers.begin()
    assert trackers.read().tolist() == [0.0] * trackers.size
    run(megatron, 5)
    mine = trackers.read()
    trackers.write(mine + 3 / 5 * mine)
    share = 8 / LAUNCHED
    assert megatron.metrics["load_balancing_loss"].values.tolist() == [1.0 * share, 0, 0]
    assert megatron.metrics["z_loss"].values.tolist() == [0, 2.0 * share, 0]
    its = MTPLossLoggingHelper.tracker
    assert its["loss_values"].tolist() == [3.0 * share]
    assert (its["correct_values"].tolist(), its["total_values"].tolist()) == ([4.0 * 8], [5.0 * 8])


def test_the_share_is_that_of_the_launch_in_a_run_that_may_grow(megatron: moe_logging.MoEMetricsTracker) -> None:
    grid = GRID.with_room_for(2 * LAUNCHED)
    tail = grid.column(TAIL)
    assert len(tail) == 2 * LAUNCHED
    trackers = Trackers(ARGS, tail, grid)
    run(megatron, 8)
    trackers.write(trackers.read())
    assert megatron.metrics["load_balancing_loss"].values.tolist() == [8 / LAUNCHED, 0, 0]
    assert MTPLossLoggingHelper.tracker["loss_values"].tolist() == [3.0 * 8 / LAUNCHED]


def test_nothing_is_left_to_be_asked_of_other_replicas(megatron: moe_logging.MoEMetricsTracker) -> None:
    trackers = Trackers(ARGS, TAIL, GRID)
    run(megatron, 1)
    trackers.write(trackers.read())
    assert [entry.needs_dp_avg for entry in megatron.metrics.values()] == [False, False]
    assert [entry.avg_group for entry in megatron.metrics.values()] == [None, "within the replica"]
    assert MTPLossLoggingHelper.tracker["avg_group"] is None


def test_lengths_of_packed_sequences_are_those_of_the_whole_batch(
    megatron: moe_logging.MoEMetricsTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = Trackers(ARGS, TAIL, GRID)
    monkeypatch.setattr(training, "_seqlen_stats_in_iteration", torch.tensor([6.0, 20.0], dtype=torch.float64))
    monkeypatch.setattr(training, "_seqlen_stats_active", True)
    monkeypatch.setattr(training, "consume_seqlen_stats_in_iteration", training.consume_seqlen_stats_in_iteration)
    monkeypatch.setattr(module.parallel_state, "get_context_parallel_world_size", lambda: 2, raising=False)
    module.install(MEGATRON_LM, lambda: True)
    trackers.write(4 * trackers.read())
    assert training.consume_seqlen_stats_in_iteration() == (12.0, 40.0)  # two context-parallel ranks counted the same
    assert training.consume_seqlen_stats_in_iteration() == (None, None)


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

    close = flush


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


def tell(step: int, *workers: Stub) -> None:
    for each in workers:
        each.add_scalar("loss", 1.0, step)
        each.flush()


def boards(folder: Path) -> Iterator[Stub]:
    return (Stub("TensorBoard", None, lambda: SummaryWriter(str(folder)), lambda: 1) for _ in range(2))


def steps_told(folder: Path) -> list[list[int]]:
    """Steps in each file, the files in the order of their names, in which they are read."""
    return [
        [event.step for event in LegacyEventFileLoader(str(file)).Load() if event.HasField("summary")]
        for file in sorted(folder.iterdir())
    ]


def shown(told: list[list[int]]) -> list[int]:
    """The steps that TensorBoard's server shows: one takes back all that was read of later ones."""
    steps: list[int] = []
    for step in chain(*told):
        steps = [*(before for before in steps if before < step), step]
    return steps


def test_tensorboard_shows_every_step_where_the_turn_comes_back_to_a_worker(tmp_path: Path) -> None:
    first, second = boards(tmp_path)
    for step, (writes, rests) in enumerate([(first, second), (second, first)] * 2, 1):
        rests.rest()
        writes.begin()
        tell(step, first, second)
    told = steps_told(tmp_path)
    assert told == [
        [1],
        [1, 2],
        [2, 3],
        [3, 4],
    ]  # what the other has told, and not its own again, of which W&B would warn
    assert shown(told) == [1, 2, 3, 4]


def test_tensorboard_shows_the_steps_that_a_worker_has_missed_which_writes_later(tmp_path: Path) -> None:
    first, second = boards(tmp_path)
    first.begin()
    tell(1, first, second)
    tell(2, first)
    second.missed()
    tell(3, first, second)
    second.begin()  # the other one was killed
    tell(4, second)
    assert steps_told(tmp_path) == [[1, 2, 3], [3, 4]]


def test_tensorboard_shows_the_steps_that_the_worker_which_wrote_has_missed(tmp_path: Path) -> None:
    first, second = boards(tmp_path)
    first.begin()
    tell(1, first, second)
    second.begin()
    tell(2, second)
    first.missed()
    second.rest()
    first.begin()
    tell(3, first, second)
    assert shown(steps_told(tmp_path)) == [1, 2, 3]


def test_what_was_told_is_on_the_disk_when_a_worker_that_remembers_it_may_have_lost_its_place() -> None:
    board = Board()
    writer = Stub("TensorBoard", board, Board, lambda: 1)
    writer.begin()
    writer._background.flush()
    assert board.flushed


def test_wandb_which_cannot_be_flushed_or_closed_is_written_on_when_the_turn_comes_back() -> None:
    told: list[int] = []
    opened: list[Any] = []

    def open_() -> Any:
        opened.append(SimpleNamespace(log=told.append))
        return opened[-1]

    writer = Stub("W&B", None, open_, lambda: 1)
    for value in (1, 2):
        writer.begin()
        writer.log(value)
        writer.rest()
        writer._background.flush()
    assert told == [1, 2]
    assert len(opened) == 1


def left_in_order() -> MembershipError:
    """What the session of a worker raises that has finished."""
    hello = Attach(WorkerId(0), "0" * 32, "host", 1, NOTHING, done=0)
    member = Member(hello, 1, Settings(), now=0.0)
    member.leave()
    assert member.out is not None
    return member.out


@pytest.mark.parametrize(
    ("error", "writes"),
    [(None, True), (Fenced("late"), False), (CoordinatorLost("over", 0), True), (left_in_order(), True)],
    ids=["in touch", "put out", "run over", "left in order"],
)
def test_steps_that_a_slow_disk_has_not_taken_yet_are_written_by_who_was_not_put_out(
    error: MembershipError | None, writes: bool
) -> None:
    """Also when the worker has finished: the thread that writes asks whether it may, and must not end by the answer."""

    def wait_in_touch(*, in_epoch: bool) -> None:
        if error is not None:
            raise error

    manager: Any = SimpleNamespace(wait_in_touch=wait_in_touch)
    assert records._still_in(manager) is writes


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
    assert said.count("TensorBoard is disabled on this worker") == 1


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


def test_all_that_is_remembered_is_told_before_what_comes_then() -> None:
    answers = threading.Event()
    board = Board()
    many = log_writer.MOST_BYTES // writers.CALL_BYTES + 1

    def open_() -> Board:
        assert answers.wait(DEADLINE)
        return board

    writer = Stub("TensorBoard", None, open_, lambda: 1)
    for step in range(many):
        writer.add_scalar("loss", 1.0, step)
    writer.begin()
    writer.add_scalar("loss", 1.0, many)
    answers.set()
    writer.flush()
    assert [step for _, _, step in board.told] == list(range(many + 1))


def test_the_losses_of_a_step_have_their_names_where_no_microbatch_was_run_and_a_chunk_has_no_weights() -> None:
    """A pipeline's layout may leave a stage's first chunk without layers."""
    config = SimpleNamespace(calculate_per_token_loss=False, finalize_model_grads_func=lambda **call: None)
    chunks = [SimpleNamespace(config=config, parameters=lambda its=its: iter(its)) for its in ([], [torch.ones(1)])]
    part = SimpleNamespace(size=0, write=lambda its: None)
    parts: Any = SimpleNamespace(
        beside=[part] * 4, buckets=SimpleNamespace(), state=SimpleNamespace(totals=module.LogTotals()),
        routers=part, trackers=part, logits=part, scales=part,
    )  # fmt: skip

    def finish(*losses: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        unused: Any = None
        trainer = MegatronTrainer(unused, {"model": chunks}, parts, unused, unused, unused, 1)
        trainer._finalize_call = {"model": chunks, "num_tokens": None}
        trainer._losses += losses
        return trainer.finish(torch.tensor([0, 6.0, 2.0, 8.0, 4.0], dtype=torch.float64))

    assert finish() == [], "it has never run one"
    (whole,) = finish({"lm loss": torch.ones(2), "mtp": torch.ones(1)})
    assert {name: loss.tolist() for name, loss in whole.items()} == {"lm loss": [6.0, 2.0], "mtp": [2.0]}
    (whole,) = finish()
    assert {name: loss.tolist() for name, loss in whole.items()} == {"lm loss": [3.0], "mtp": [2.0]}


def test_the_progress_log_ends_nobody_and_is_one_that_megatron_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is in its place; a line that was cut as the disk was full, Megatron's reader ends by."""
    args = SimpleNamespace(
        save=str(tmp_path), async_save=False, world_size=4, seq_length=8, num_floating_point_operations_so_far=0,
        consumed_train_samples=16,
    )  # fmt: skip
    rank = 0
    monkeypatch.setattr(writers.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(training, "_TRAIN_START_TIME", time.time() - 10)
    for each in (training, writers):
        monkeypatch.setattr(each, "get_args", lambda: args)
    monkeypatch.setattr(log_writer, "RETRY_SECONDS", 0.01)
    append = training.append_to_progress_log

    def worker() -> tuple[writers.ProgressLog, Callable[..., None]]:
        its = writers.ProgressLog(alone=lambda: False)
        monkeypatch.setattr(training, "append_to_progress_log", its._appending(append))
        return its, its._throughputs(training.compute_throughputs_and_append_to_progress_log)

    progress = tmp_path / "progress.txt"
    progress.mkdir()
    wrapped, told = worker()
    training.append_to_progress_log(args.save, "Starting job")
    told(2, 1e15)
    told(4, 2e15)
    said = capsys.readouterr().err
    assert said.count("progress.txt cannot be written (Is a directory)") == 1, said
    assert said.count("cannot read progress.txt; checkpoints are not logged there") == 1, said

    progress.rmdir()
    wrapped.finish()
    with progress.open("a") as file:
        file.write("2026-01-01 00:00:00\tJob")
    wrapped, told = worker()  # the next rank 0
    told(6, 3e15)
    rank = 1
    told(8, 4e15)
    training.append_to_progress_log(args.save, "Starting job")
    wrapped.finish()
    lines = [line.split("\t")[2:5] for line in progress.read_text().splitlines()]
    assert lines == [["# GPUs: 4", "Starting job"], ["# GPUs: 4", "Saved checkpoint", "Iteration: 6"]]
    assert training.get_start_time_from_progress_log()[1] == 0
