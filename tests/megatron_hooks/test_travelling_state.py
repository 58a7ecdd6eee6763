"""A worker that takes a place goes on with all that the others go on with: also with what they have from a checkpoint,
not from their flags."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import megatron.training
import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import training

from recover_megatron.collectives.state.trees import flatten, new_memory, unflatten
from recover_megatron.errors import Disagreement
from recover_megatron.hostdevice.apex_stub import FusedAdam
from recover_megatron.instep.decision import MEMORY, Rollback
from recover_megatron.megatron_hooks.checkpoint import training_state as state
from recover_megatron.megatron_hooks.checkpoint.training_state import TrainingState, load_groups, plain_groups
from recover_megatron.megatron_hooks.gradients import microbatches
from recover_megatron.megatron_hooks.gradients.maxima import Scales
from recover_megatron.megatron_hooks.logging import trackers
from recover_megatron.megatron_hooks.logging.trackers import LogTotals
from recover_megatron.megatron_hooks.loop import loop_counters, rejoin
from recover_megatron.megatron_hooks.loop.loop_counters import CONSUMED, LAUNCH
from recover_megatron.megatron_hooks.loop.megatron_lm import MEGATRON_LM
from recover_megatron.megatron_hooks.parallel_groups import Groups
from recover_megatron.workload.grid import Slot, launch_grid
from tests.megatron_hooks.in_checkpoints import travels

BATCH = 10
SAVED = {"max_lr": 0.5, "lr_decay_steps": 400, "start_wd": 0.1, "end_wd": 0.9, "wd_incr_steps": 400}
"""What the checkpoint's schedule has, that the flags have otherwise."""


def schedule(optimizer: Any, **values: Any) -> OptimizerParamScheduler:
    flags = {"max_lr": 0.2, "lr_decay_steps": 100, "start_wd": 0.1, "end_wd": 0.3, "wd_incr_steps": 100} | values
    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, min_lr=0.0, lr_warmup_steps=0, lr_decay_style="linear", wd_incr_style="linear", **flags
    )


class Chunk(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 1)


@dataclass
class Worker:
    """One of a column: its state, and what that is made of."""

    args: Any
    inner: torch.optim.Adam
    scheduler: OptimizerParamScheduler
    state: TrainingState

    def train(self, iterations: int) -> list[float]:
        """The parameters after each iteration."""
        found = []
        for _ in range(iterations):
            self.state.begin()
            self.update()
            self.scheduler.step(increment=BATCH)
            self.args.curr_iteration += 1
            found += [
                float(parameter.detach().sum()) for group in self.inner.param_groups for parameter in group["params"]
            ]
        return found

    def update(self) -> None:
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter) * (1 + self.args.curr_iteration)
        self.inner.step()
        self.state.stepped(updated=True)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    def worker(*, loaded: bool, running: Any = float) -> Worker:
        args = SimpleNamespace(
            iteration=4, curr_iteration=4, load=None, finetune=loaded, no_load_optim=False, train_iters=100,
            iterations_to_skip=(), consumed_train_samples=4 * BATCH, consumed_valid_samples=0, skipped_train_samples=0,
            do_valid=True, do_test=False, num_floating_point_operations_so_far=0,
        )  # fmt: skip
        monkeypatch.setattr(state, "no_rollback_reason", lambda *unused: "")
        monkeypatch.setattr(trackers, "get_timers", lambda: SimpleNamespace(_timers={}))
        monkeypatch.setattr(loop_counters, "update_num_microbatches", lambda *args, **named: None)
        for name in ("get_current_global_batch_size", "get_current_running_global_batch_size"):
            monkeypatch.setattr(loop_counters, name, lambda: BATCH)
        act_as(args)
        torch.manual_seed(int(loaded))
        model = Chunk()
        inner = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9) if loaded else (0.9, 0.99))
        optimizer = SimpleNamespace(optimizer=inner, param_groups=inner.param_groups)
        scheduler = schedule(optimizer)
        if loaded:
            scheduler.load_state_dict({**schedule(optimizer, **SAVED).state_dict(), "num_steps": 4 * BATCH})
        return Worker(
            args,
            inner,
            scheduler,
            TrainingState(
                [model],
                optimizer,
                scheduler,
                None,
                float,
                running=running,
                blank=not loaded,
                scales=Scales(args, [model]),
            ),
        )

    def act_as(args: Any) -> None:
        for module in (state, loop_counters, microbatches):
            monkeypatch.setattr(module, "get_args", lambda: args)

    worker.act_as = lambda who: act_as(who.args)  # type: ignore[attr-defined]
    return worker


def sent(tree: Any) -> Any:
    text, tensors = flatten(tree)
    copies = iter([tensor.clone() for tensor in tensors])
    return unflatten(text, lambda path, shape, dtype: new_memory(path, shape, dtype).copy_(next(copies)))[0]


def test_a_newcomer_steps_by_the_schedule_and_the_groups_that_the_others_have_from_a_checkpoint(make: Any) -> None:
    other, newcomer = make(loaded=True), make(loaded=False)
    make.act_as(other)
    other.train(3)
    other.state.begin()
    given = sent(other.state.tree())
    make.act_as(newcomer)
    newcomer.state.load(given)
    assert newcomer.scheduler.state_dict() == other.scheduler.state_dict()
    assert newcomer.scheduler.max_lr == SAVED["max_lr"]
    assert newcomer.inner.param_groups[0]["betas"] == (0.8, 0.9)
    assert newcomer.args.finetune is True
    assert newcomer.state.digest() == other.state.digest()
    alone = newcomer.train(5)
    make.act_as(other)
    assert other.train(5) == alone


def test_a_worker_that_takes_a_place_saves_the_arguments_in_checkpoints_that_the_others_save(make: Any) -> None:
    """A checkpoint has Megatron's arguments as its writer has them, with the iteration at which the run began."""
    other, newcomer = make(loaded=True), make(loaded=False)
    make.act_as(other)
    other.train(3)
    other.args.consumed_train_samples += 3 * BATCH
    other.state.begin()
    given = sent(other.state.tree())
    make.act_as(newcomer)
    newcomer.state.load(given)
    assert newcomer.args.iteration == 7, "there it enters train()"
    newcomer.state.begin()
    assert vars(newcomer.args) == vars(other.args)


@dataclass
class Clock:
    """The clock of a host, which is ``ahead`` of another's, and Megatron's start time in a process there."""

    now: ClassVar[float] = 50_000.0
    monkeypatch: pytest.MonkeyPatch
    ahead: float
    started: float
    """By a clock that is not ahead."""

    def running(self, seconds: float) -> float:
        """As Megatron-LM's loop counts."""
        self.monkeypatch.setattr(training, "_TRAIN_START_TIME", self.started + self.ahead)
        self.monkeypatch.setattr(time, "time", lambda: self.now + self.ahead)
        counted = MEGATRON_LM.services.running(seconds)  # type: ignore[attr-defined]
        self.started = training._TRAIN_START_TIME - self.ahead
        return float(counted)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    monkeypatch.setattr(Clock, "now", Clock.now)
    return partial(Clock, monkeypatch)


def test_a_newcomer_counts_the_time_of_the_run_from_its_start_whatever_its_clock_says(make: Any, clock: Any) -> None:
    there, here = clock(ahead=0.0, started=41_000.0), clock(ahead=3600.0, started=49_900.0)
    other, newcomer = make(loaded=True, running=there.running), make(loaded=False, running=here.running)
    make.act_as(other)
    other.state.begin()
    given = sent(other.state.tree())
    make.act_as(newcomer)
    newcomer.state.load(given)
    assert here.started == 41_000
    newcomer.state.begin()
    Clock.now += 500
    newcomer.state.resume()
    assert (here.running(0.0), here.started) == (9500, 41_000), "what was counted in the past moves no start"


def test_a_worker_counts_from_the_first_start_where_the_start_was_made_again(
    make: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = clock(ahead=3600.0, started=49_900.0)
    here.running(0.0)  # time.time() is that of this host now
    monkeypatch.setenv("RECOVER_FIRST_START", str(48_000 + 3600))
    make(loaded=True, running=here.running)
    assert here.started == 48_000


@pytest.mark.parametrize("source", [MEMORY, "save"])
def test_all_who_go_back_to_a_checkpoint_count_the_time_of_the_run(
    make: Any, clock: Any, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """A newcomer among them has it from nobody else: a checkpoint and a snapshot are of the past."""
    here = clock(ahead=3600.0, started=49_900.0)
    newcomer = make(loaded=False, running=here.running)
    monkeypatch.setattr(loop_counters.dist, "all_reduce", lambda its, op: its.fill_(max(float(its), 9000.0)))
    decision = SimpleNamespace(rollback=Rollback(4, source, 0), epoch=2, timeline=[0], workers=[0])
    communication = SimpleNamespace(device=torch.device("cpu"))
    manager: Any = SimpleNamespace(
        view=SimpleNamespace(decision=decision, worker=1, communication=communication),
        inject=lambda *_: None,
        section=lambda name, run, moved: run(),
        log=lambda *_, **__: None,
    )
    memory = SimpleNamespace(load=lambda target: lambda: None)
    parts: Any = SimpleNamespace(state=newcomer.state, sharded=None, memory=memory)
    said: Any = SimpleNamespace(rolled_back=lambda *_: None, went_back=lambda _: None)
    groups: Any = SimpleNamespace(in_section=nullcontext)
    back = rejoin.Rollback(manager, groups, parts, said, said)
    monkeypatch.setattr(back, "_load", lambda *_: 0)
    monkeypatch.setattr(rejoin, "_folder", lambda _: "")
    back.carry_out(None, None, None)
    assert here.started == 41_000


@pytest.mark.parametrize("updated", [False, True], ids=["before its update", "between update and schedule"])
def test_an_orphan_of_the_first_iteration_after_a_checkpoint_goes_on_as_the_others(make: Any, updated: bool) -> None:
    """In that iteration Megatron decays weights by the flags: it sets the decay before it loads the schedule."""
    other, orphan = make(loaded=True), make(loaded=True)
    make.act_as(orphan)
    orphan.state.begin()
    if updated:
        orphan.update()
    orphan.state.finish_schedule()
    digest = orphan.state.digest()
    orphan.state.resume()
    assert orphan.state.digest() == digest
    later = orphan.train(3)
    make.act_as(other)
    if updated:
        other.train(1)
    other.state.begin()
    assert other.state.digest() == digest
    assert other.train(3) == later


@pytest.mark.parametrize(
    ("change", "value"),
    [("lr", 0.123), ("weight_decay", 0.5), ("betas", (0.5, 0.5)), ("eps", 1e-3), ("num_steps", 77), ("max_lr", 77),
     ("lr_decay_steps", 77), ("end_wd", 77), ("wd_incr_style", "constant")],
)  # fmt: skip
def test_what_steers_the_update_is_compared_where_states_are(make: Any, change: str, value: Any) -> None:
    """Of the optimizer's groups, and of the schedule."""
    one = make(loaded=True)
    digest = one.state.digest()
    group = one.inner.param_groups[0]
    (group if change in group else vars(one.scheduler))[change] = value
    assert one.state.digest() != digest


def test_who_takes_a_place_and_would_step_otherwise_does_not_take_it(make: Any) -> None:
    """A tensor in a group is not sent: a count of steps that is kept on the device."""
    other, newcomer = make(loaded=True), make(loaded=False)
    other.inner.param_groups[0]["step"] = torch.tensor(7)
    make.act_as(other)
    given = sent(other.state.tree())
    make.act_as(newcomer)
    with pytest.raises(Disagreement, match="the optimizer's settings are"):
        newcomer.state.load(given)


def test_all_have_one_weight_decay_after_going_back_whether_they_knew_the_schedule_or_not(make: Any) -> None:
    there, newcomer = make(loaded=True), make(loaded=False)
    saved = {**there.scheduler.state_dict(), "num_steps": 6 * BATCH}
    for worker in (there, newcomer):
        make.act_as(worker)
        worker.state.go_back(6)
        worker.scheduler.load_state_dict(saved)
        worker.state.loaded(6, 0, 1)
        assert worker.scheduler.num_steps == 6 * BATCH, "Megatron adds the steps of a checkpoint to those that it has"
    assert newcomer.inner.param_groups[0]["weight_decay"] == there.inner.param_groups[0]["weight_decay"]


def test_all_that_this_megatron_keeps_in_a_checkpoint_and_sets_from_one_travels() -> None:
    travels(Path(megatron.training.__file__).parents[1], {*CONSUMED, *LAUNCH})


def stepped(optimizer: FusedAdam, parameter: torch.nn.Parameter, times: int) -> None:
    for _ in range(times):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def test_a_step_count_in_the_groups_is_that_of_the_older_state() -> None:
    """Adam of apex and of Transformer Engine counts there; before its first step there is no count."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedAdam([parameter], lr=0.5)
    before = plain_groups(optimizer.param_groups)
    stepped(optimizer, parameter, 3)
    after = plain_groups(optimizer.param_groups)
    assert optimizer.param_groups[0]["step"] == 3
    load_groups(optimizer.param_groups, before)
    assert "step" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["params"] == [parameter]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    load_groups(optimizer.param_groups, after)
    assert optimizer.param_groups[0]["step"] == 3


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Megatron's log of multi-token prediction counts in."""
    its: dict[str, Any] = {"values": torch.zeros(1)}
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", its)
    monkeypatch.setattr(trackers, "get_timers", lambda: SimpleNamespace(_timers={}))
    return its


def test_what_the_log_counts_from_the_start_of_the_run_leaves_out_what_is_run_again(tracker: dict[str, Any]) -> None:
    log = LogTotals()
    at_the_start = log.tree()
    tracker["cumulative_correct_values"], tracker["cumulative_total_values"] = torch.ones(1), torch.ones(1)
    log.load(at_the_start)
    assert set(tracker) == {"values"}, "Megatron begins to count anew"


def test_what_is_left_out_of_a_batch_that_grows_counts_as_many_samples_as_megatron_has_counted(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 samples a batch, from the 60th sample on 20; iterations 6, 7 and 8 are left out: 10 and twice 20 samples."""
    batch = BATCH

    def update(consumed: int, consistency_check: bool = True) -> None:
        nonlocal batch
        batch = BATCH if consumed < 6 * BATCH else 2 * BATCH

    orphan = make(loaded=True)
    monkeypatch.setattr(loop_counters, "update_num_microbatches", update)
    for name in ("get_current_global_batch_size", "get_current_running_global_batch_size"):
        monkeypatch.setattr(loop_counters, name, lambda: batch)
    orphan.args.iterations_to_skip = (6, 7, 8)
    orphan.state.begin()
    orphan.update()
    orphan.state.finish_schedule()
    orphan.state.resume()
    assert (orphan.args.curr_iteration, orphan.args.consumed_train_samples) == (8, 4 * BATCH + 10 + 10 + 20 + 20)
    assert orphan.args.skipped_train_samples == 10 + 20 + 20
    assert orphan.args.num_floating_point_operations_so_far == BATCH, "of iteration 5 alone: one per sample here"


def test_a_worker_gives_its_model_back_before_it_builds_that_of_another_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    groups = Groups(Slot(0), (), torch.device("cpu"))
    model = Chunk()
    model.hooks = [model]  # as Megatron's DDP is part of a circle
    groups.model = [model]
    gone = weakref.ref(model)
    del model
    loop: Any = SimpleNamespace(services=SimpleNamespace(forget=lambda: None))
    grid = launch_grid(2, tensor=1, context=1, pipeline=2, inner_ranks=1)
    manager: Any = SimpleNamespace(view=SimpleNamespace(worker=0, grid=grid))
    rejoin.build_elsewhere(manager, groups, loop, 1, built=True)
    assert gone() is None
