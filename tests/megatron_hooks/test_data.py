"""Microbatches: their samples and who reads them, their random numbers, and interleaved pipelines that run any number.

An interleaved schedule's order of work is Megatron's own (``get_schedule_table``, ``get_pp_rank_microbatches``); how
long it takes is computed from who waits for whom: a forward pass of a chunk one unit of time, a backward pass two.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import schedules
from megatron.training.datasets.fim_dataset import GPTFIMDataset

from recover_megatron.errors import Disagreement, UserError
from recover_megatron.instep.decision import NON_PERSISTENT
from recover_megatron.instep.decision import Rollback as Target
from recover_megatron.megatron_hooks.checkpoint import resumed
from recover_megatron.megatron_hooks.data import source as data
from recover_megatron.megatron_hooks.data.source import Cyclic, LoaderKilled, Source, TaggedDataset, _reading
from recover_megatron.megatron_hooks.gradients import microbatches
from recover_megatron.megatron_hooks.gradients.microbatches import (
    ByNumber,
    InOrder,
    InTurn,
    Shuffled,
    skipped_before,
    with_skipped,
)
from recover_megatron.megatron_hooks.loop import rejoin
from recover_megatron.megatron_hooks.loop.loop_counters import CONSUMED
from recover_megatron.workload import quotas
from recover_megatron.workload.assign import group_size, runs
from tests.harness.loaders import groups, kill, strike_in_update


def megatrons(total: int, size: int, ranks: int, *, sharded: bool, rounds: int, consumed: int = 0) -> list[list[int]]:
    """The samples of the microbatches of ``rounds`` rounds, one of each rank in turn."""
    from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler

    def of(rank: int) -> list[list[int]]:
        sampler = MegatronPretrainingRandomSampler(None, total, consumed, size, rank, ranks, sharded)
        endless = itertools.chain.from_iterable(itertools.repeat(sampler))
        return list(itertools.islice(endless, rounds))

    return [batch for each in zip(*map(of, range(ranks)), strict=True) for batch in each]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("total", "size", "ranks"), [(24, 2, 3), (26, 2, 3), (13, 1, 4), (15, 1, 4), (22, 2, 4), (100, 3, 2)]
)
def test_shuffled_is_megatrons_order_over_several_epochs(total: int, size: int, ranks: int, sharded: bool) -> None:
    order = Shuffled(total, size, ranks, sharded=sharded)
    rounds = 3 * order.epoch // order.round
    ours = [order.samples(first) for first in range(0, rounds * order.round, size)]
    assert ours == megatrons(total, size, ranks, sharded=sharded, rounds=rounds)
    later = order.epoch + order.round
    again = megatrons(total, size, ranks, sharded=sharded, rounds=1, consumed=later)
    assert [order.samples(later + rank * size) for rank in range(ranks)] == again


@pytest.mark.slow
@pytest.mark.parametrize(("total", "ranks"), [(12, 3), (13, 3), (14, 3), (5, 5), (9, 1)])
def test_in_turn_is_megatrons_order_of_full_validation_over_several_evaluations(total: int, ranks: int) -> None:
    from megatron.training.datasets.data_samplers import MegatronFullValidationSampler

    samplers = [MegatronFullValidationSampler(total, rank, ranks) for rank in range(ranks)]
    order = InTurn(total, ranks)
    assert order.rounds == max(map(len, samplers))
    endless = [itertools.chain.from_iterable(itertools.repeat(sampler)) for sampler in samplers]
    expected = [next(endless[first % ranks]) for first in range(4 * total)]
    assert [order.samples(first) for first in range(4 * total)] == expected


def resumes(
    monkeypatch: pytest.MonkeyPatch,
    consumed: int,
    ranks: int,
    saved: Any = None,
    *,
    micro: int = 2,
    sharded: bool = True,
    total: int = 98,
) -> Cyclic:
    """The order of a launch of ``ranks``, with the checkpoint arguments ``saved``."""
    args = SimpleNamespace(data_parallel_size=ranks, micro_batch_size=micro, dataloader_type="cyclic")
    args.data_sharding = sharded
    for module in (data, resumed):
        monkeypatch.setattr(module, "get_args", lambda: args)
    monkeypatch.setattr(resumed, "_loaded", None)
    if saved is not None:
        resumed._compared(lambda *_: None)(saved)
    sampler = type("MegatronPretrainingRandomSampler", (), {"micro_batch_size": micro, "data_sharding": sharded})()
    made = data._order_of(range(total), sampler, consumed)
    made.args = args  # type: ignore[union-attr]
    return made  # type: ignore[return-value]


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_cyclic_samples_of_an_epoch_come_once_each_however_many_replicas_go_on(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    whole = Shuffled(98, 2, 4, sharded=True)
    first = resumes(monkeypatch, 0, 4)
    seen = [sample for at in range(0, 48, 2) for sample in first.samples(at)]
    second = resumes(monkeypatch, 48, ranks, first.args)  # type: ignore[attr-defined]
    seen += [sample for at in range(48, 60, 2) for sample in second.samples(at)]
    third = resumes(monkeypatch, 60, 5, second.args)  # type: ignore[attr-defined]
    seen += [sample for at in range(60, 96, 2) for sample in third.samples(at)]
    assert sorted(seen) == sorted(sample for at in range(0, 96, 2) for sample in whole.samples(at))
    assert len(set(seen)) == 96
    stock = SimpleNamespace(data_parallel_size=ranks, micro_batch_size=2)  # of a launch without --recover
    assert resumes(monkeypatch, 96, 5, stock).samples(96) == Shuffled(98, 2, ranks, sharded=True).samples(96)


def test_cyclic_samples_go_on_with_the_microbatches_of_the_checkpoint_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = SimpleNamespace(data_parallel_size=4, micro_batch_size=2)
    with pytest.raises(UserError, match="after 48 samples, --micro-batch-size 5 would skip or repeat samples"):
        resumes(monkeypatch, 48, 3, saved, micro=5)
    with pytest.raises(UserError, match="use the --micro-batch-size of the run that wrote the checkpoint"):
        resumes(monkeypatch, 60, 3, saved, micro=3)
    resumes(monkeypatch, 0, 3, saved, micro=3)
    resumes(monkeypatch, 48, 3, saved, micro=3)  # an epoch of 96 as well, after two rounds of 24


@pytest.mark.parametrize(
    ("now", "said"), [(True, "with --no-data-sharding: add the flag"), (False, "without --no-data")]
)
def test_cyclic_samples_are_shuffled_by_rank_or_all_together_from_an_epochs_begin_to_its_end(
    monkeypatch: pytest.MonkeyPatch, now: bool, said: str
) -> None:
    """In its middle 26 of the last 48 samples would be read again here, as many each way."""
    saved = resumes(monkeypatch, 0, 4, sharded=not now).args  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=f"in the middle of an epoch .48 samples., by a run {said}"):
        resumes(monkeypatch, 48, 4, saved, sharded=now)
    assert resumes(monkeypatch, 96, 4, saved, sharded=now).samples(96) == Shuffled(98, 2, 4, sharded=now).samples(96)


def test_where_all_ranks_shuffle_the_whole_another_microbatch_begins_with_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Microbatches of 1 shuffle 97 samples, and those of 2 shuffle 96, though both have epochs of 96."""
    saved = resumes(monkeypatch, 0, 4, micro=1, sharded=False, total=97).args  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="after 48 samples, --micro-batch-size 2 would skip or repeat samples"):
        resumes(monkeypatch, 48, 4, saved, sharded=False, total=97)
    resumes(monkeypatch, 96, 4, saved, sharded=False, total=97)


def test_a_loader_of_the_users_own_goes_on_where_a_microbatch_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(micro_batch_size=4, num_workers=0)
    monkeypatch.setattr(data, "get_args", lambda: args)
    loader = SimpleNamespace(microbatch=lambda number: {"at": torch.tensor([number])})
    with pytest.raises(UserError, match="6 consumed samples are not a multiple of the micro batch size 4"):
        data._external(loader, 6)
    its = data._external(loader, 8)
    its.begin(8, [0], 1)
    assert its.get(0)["at"].tolist() == [2]


def test_a_worker_that_comes_later_has_the_order_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that comes later has loaded no checkpoint: the argument comes with the counters of a state."""
    assert resumed.SHUFFLED_FOR in CONSUMED
    late = resumes(monkeypatch, 0, 3)
    setattr(late.args, resumed.SHUFFLED_FOR, 4)  # type: ignore[attr-defined]
    assert late.samples(48) == Shuffled(98, 2, 4, sharded=True).samples(48)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 60), st.booleans())
def test_an_epoch_has_no_sample_twice(size: int, ranks: int, more: int, sharded: bool) -> None:
    total = size * ranks + more
    order = Shuffled(total, size, ranks, sharded=sharded)
    seen = [sample for first in range(0, order.epoch, size) for sample in order.samples(first) or []]
    assert len(seen) == order.epoch == len(set(seen))
    assert max(seen) < total


def test_a_loader_of_the_users_own_is_asked_for_microbatches_by_their_numbers_in_the_run() -> None:
    assert [ByNumber(4).samples(first) for first in (0, 4, 40)] == [[0], [1], [10]]


def test_in_order_ends_with_the_data_set() -> None:
    order = InOrder(7, 3)
    assert [order.samples(first) for first in (0, 3, 6)] == [[0, 1, 2], [3, 4, 5], None]


def test_a_data_set_of_less_than_one_round_is_refused() -> None:
    with pytest.raises(ValueError, match="3 samples are not enough for one microbatch of 2 on each of 2 ranks"):
        Shuffled(3, 2, 2, sharded=True)


@pytest.mark.parametrize(
    ("iteration", "skipped", "done"), [(0, (1,), 1), (3, (4, 5, 7), 5), (5, (4, 5), 5), (6, (4, 5), 6), (2, (), 2)]
)
def test_what_is_left_out_right_after_an_iteration_is_over_with_it(
    iteration: int, skipped: tuple[int, ...], done: int
) -> None:
    assert with_skipped(iteration, skipped) == done
    assert with_skipped(done, skipped) == done


@pytest.mark.parametrize(
    ("iteration", "begun", "found"), [(6, 0, 2), (6, 3, 2), (6, 4, 1), (6, 5, 0), (4, 0, 0), (2, 0, 1), (2, 1, 0)]
)
def test_a_line_tells_how_many_were_left_out_before_it_since_the_run_began(
    iteration: int, begun: int, found: int
) -> None:
    assert skipped_before(iteration, begun, (1, 4, 5)) == found


DEADLY = 6


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The last of them ends by ``number`` whoever reads it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return DEADLY + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == DEADLY:
            os.kill(os.getpid(), self._number)
        return {"text": torch.tensor([index])}


def source(number: int = signal.SIGKILL) -> Source:
    loader = torch.utils.data.DataLoader(TaggedDataset(Samples(number)), num_workers=1)
    found = Source(loader, 1, 0, InOrder(DEADLY + 1, 1))
    found.begin(0, range(DEADLY + 1), DEADLY + 1)
    return found


def end(reads: Source) -> None:
    """Of its processes: they would hold our pipes, the one to the fork server, too."""
    with suppress(AttributeError):
        reads._batches._shutdown_workers()  # type: ignore[union-attr]


def test_a_killed_one_is_told_to_who_reads_and_not_to_what_else_the_main_thread_does() -> None:
    reads = source()
    assert reads.get(0)["text"].item() == 0
    (process,) = reads._batches._workers  # type: ignore[union-attr]
    kill(process)
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(LoaderKilled, match="was killed by signal 9"):
        reads.get(1)
    end(reads)


def test_a_process_that_is_killed_in_the_optimizers_update_leaves_no_parameter_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, weights = source(), [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    reads.get(0)
    (process,) = reads._batches._workers  # type: ignore[union-attr]
    strike_in_update(monkeypatch, lambda: process)
    for weight in weights:
        weight.grad = torch.ones(2)
    torch.optim.SGD(groups(*weights), lr=1.0).step()
    assert [weight.tolist() for weight in weights] == [[0.0, 0.0]] * 2
    with pytest.raises(LoaderKilled, match="was killed by signal 9"):
        reads.get(1)
    end(reads)


def test_a_cleaner_of_tmpdir_changes_no_batch_that_a_loader_reads(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    read: dict[bool, list[list[int]]] = {False: [], True: []}
    for cleaned, batches in read.items():
        loader = torch.utils.data.DataLoader(TaggedDataset(Samples(0)), batch_size=1, num_workers=2)
        reads = Source(loader, 1, 0, InOrder(DEADLY, 1))
        reads.begin(0, range(DEADLY), DEADLY)
        for j in range(DEADLY):
            batches.append(reads.get(j)["text"].tolist())
            if cleaned and j:  # the second batch is that of the second process: both have begun
                for folder in tmp_path.iterdir():
                    shutil.rmtree(folder)
        end(reads)
    assert read[True] == read[False] == [[[sample]] for sample in range(DEADLY)]


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGKILL, LoaderKilled), (signal.SIGTERM, LoaderKilled), (signal.SIGSEGV, RuntimeError)]
)
def test_whose_fault_it_is_says_the_signal(number: int, kind: type[Exception]) -> None:
    """A sample that ends whoever reads it is none of the host."""
    reads = source(number)
    with pytest.raises((LoaderKilled, RuntimeError)) as raised:
        list(map(reads.get, range(DEADLY + 1)))
    assert type(raised.value) is kind
    assert f"was killed by signal {int(number)}" in str(raised.value)
    end(reads)


class Ending:
    """A process whose descriptors are closed, and whose exit code is known once it has been waited for."""

    pid, exitcode = 7, None

    def __init__(self) -> None:
        self.sentinel, write = os.pipe()
        os.close(write)

    def join(self) -> None:
        self.exitcode = -signal.SIGKILL


def test_a_connection_that_closes_before_the_exit_code_is_known_is_told_as_the_end_of_the_process() -> None:
    process = Ending()
    with pytest.raises(LoaderKilled, match=r"data loader process 7 .* was killed by signal 9"), _reading([process]):
        raise ConnectionResetError(104, "Connection reset by peer")
    os.close(process.sentinel)


WORDS = 40


class Tokenizer:
    """A letter is a token."""

    def ids_to_text(self, ids: Any, **_: Any) -> str:
        return "".join(map(chr, ids))

    def text_to_ids(self, text: str) -> list[int]:
        return list(map(ord, text))


def dataset() -> Any:
    """Of documents of letters, each sample one, without what reads files."""
    made = object.__new__(GPTFIMDataset)
    made.config = SimpleNamespace(random_seed=1234, tokenizer=SimpleNamespace(_tokenizer=Tokenizer()))
    made.np_rng = numpy.random.RandomState(1234)
    made.shuffle_index, made.document_index = numpy.arange(8), numpy.arange(9)
    made.sample_index = numpy.array([(n, 0) for n in range(9)])
    made.dataset = SimpleNamespace(get=lambda document, **_: numpy.arange(65, 65 + WORDS) + document % 3)
    made.fim_rate, made.fim_spm_rate, made.fragment_fim_rate = 0.9, 0.5, None
    made.fim_split_sample = made.no_fim_prefix = None
    made.prefix_tok_id, made.middle_tok_id, made.suffix_tok_id, made.pad_tok_id, made.eod_tok_id = range(1, 6)
    return made


def test_a_sample_for_infilling_is_the_same_whatever_was_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = GPTFIMDataset._query_document_sample_shuffle_indices
    forward, backward = dataset(), dataset()
    by_itself = [stock(forward, index)[0].tolist() for index in range(8)]
    assert [stock(backward, index)[0].tolist() for index in reversed(range(8))] != by_itself[::-1]
    monkeypatch.setattr(GPTFIMDataset, "_query_document_sample_shuffle_indices", data._by_index(stock))
    forward, backward = dataset(), dataset()
    read = [forward._query_document_sample_shuffle_indices(index)[0].tolist() for index in range(8)]
    again = [backward._query_document_sample_shuffle_indices(index)[0].tolist() for index in reversed(range(8))]
    assert again[::-1] == read
    assert any(1 in sample for sample in read), "nothing was permuted"
    assert len(set(map(tuple, read))) > 3


class Tracker:
    """The part of a tracker that is used; Transformer Engine's holds generators, which its layers keep."""

    def __init__(self, states: dict[str, torch.Generator] | dict[str, torch.Tensor]) -> None:
        self.states = states

    def get_states(self) -> dict[str, object]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states


def test_generators_of_transformer_engine_are_seeded_in_place_with_the_numbers_of_the_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for getter in ("pipeline_model_parallel", "tensor_model_parallel", "context_parallel", "expert_model_parallel"):
        monkeypatch.setattr(parallel_state, f"get_{getter}_rank", lambda: 1)
    monkeypatch.setattr(microbatches, "get_args", lambda: SimpleNamespace(seed=7))
    names = ("data-parallel-rng", "model-parallel-rng")
    generators = {name: torch.Generator() for name in names}
    trackers = Tracker(dict(generators)), Tracker({name: torch.Generator().get_state() for name in names})
    drawn = []
    for microbatch in (3, 4, 3):
        for tracker in trackers:
            monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda tracker=tracker: tracker)
            microbatches.MicrobatchSeeds(torch.device("cpu")).seed(2, microbatch, 0)
        assert trackers[0].states == generators
        drawn.append([torch.rand(4, generator=generators[name]) for name in names])
        for name, numbers in zip(names, drawn[-1], strict=True):
            generator = torch.Generator()
            generator.set_state(trackers[1].states[name])
            assert torch.equal(torch.rand(4, generator=generator), numbers)
    first, other, again = map(torch.stack, drawn)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_a_microbatch_is_counted_by_whichever_dense_parameter_it_has_a_gradient_of() -> None:
    """Not each has one: that of a vision transformer from a sample without an image."""
    accumulated, chunk = microbatches.Accumulated(), torch.nn.Module()
    make = accumulated._counting(lambda ddp, param: lambda *_: None)
    of_vision, of_both = (make(chunk, torch.nn.Parameter(torch.zeros(1))) for _ in range(2))
    with_image = accumulated._calling(lambda: (of_vision(), of_both()))
    for _ in range(3):
        with_image()
    before = accumulated.counts([chunk])
    with_image()
    for _ in range(2):
        accumulated._calling(of_both)()
    accumulated.check([chunk], before, [3])
    with pytest.raises(Disagreement, match="added the gradients of 3 microbatches instead of 4"):
        accumulated.check([chunk], before, [4])


def test_what_is_mixed_over_a_whole_layer_is_mixed_alike_on_its_tensor_and_context_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in Megatron, whose streams of these names do not have such a rank in their seed; dropout's has."""
    monkeypatch.setattr(microbatches, "get_args", lambda: SimpleNamespace(seed=7))
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    tracker = Tracker({name: torch.Generator().get_state() for name in ("mtp-hsm-rng", "model-parallel-rng")})
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    seeded = []
    for rank in (0, 1):
        for getter in ("tensor_model_parallel", "context_parallel", "expert_model_parallel"):
            monkeypatch.setattr(parallel_state, f"get_{getter}_rank", lambda rank=rank: rank)
        microbatches.MicrobatchSeeds(torch.device("cpu")).seed(2, 3, 0)
        seeded.append(dict(tracker.states))
    one, other = seeded
    assert torch.equal(one["mtp-hsm-rng"], other["mtp-hsm-rng"])
    assert not torch.equal(one["model-parallel-rng"], other["model-parallel-rng"])


@pytest.mark.parametrize(
    "kept",
    [list, lambda states: SimpleNamespace(data=states), lambda states: {"(0, 1)": states}],
    ids=["torch", "torch_dist", "fsdp_dtensor"],
)
@pytest.mark.parametrize(("living", "expected"), [("abc", "abcc"), ("a", "aaaa"), ("abcd", "abcd"), ("abcde", "abcde")])
def test_a_checkpoint_has_as_many_random_states_as_the_launch_has_replicas(
    monkeypatch: pytest.MonkeyPatch, kept: Callable[[list[str]], Any], living: str, expected: str
) -> None:
    def gathered(ckpt_format: str) -> Any:
        """As Megatron 0.18 makes them: a list by its count of the replicas, filled by those who are asked."""
        states = [""] * parallel_state.get_data_parallel_world_size()
        for number, state in enumerate(living):
            states[number] = state
        return kept(states)

    args = SimpleNamespace(data_parallel_random_init=True, data_parallel_size=4)
    monkeypatch.setattr(microbatches, "get_args", lambda: args)
    monkeypatch.setattr(parallel_state, "_MPU_DATA_PARALLEL_WORLD_SIZE", 4)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    group = SimpleNamespace(size=lambda: len(living))
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda **named: group)
    found = kept_states(microbatches._as_many_as_launched(gathered)("any"))
    assert "".join(found) == expected
    args.data_parallel_random_init = False
    assert len(kept_states(microbatches._as_many_as_launched(gathered)("any"))) == len(living)


@pytest.fixture
def going_back(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rollback whose ``load_checkpoint`` is that of the test, with ``args``: Megatron has newer checkpoints."""
    args = SimpleNamespace(
        no_save_rng=False, no_load_rng=False, data_parallel_random_init=True, save="saved", load=None, ckpt_step=None,
        strict_fsdp_dtensor_load=False, do_valid=1, do_test=False, non_persistent_global_ckpt_dir=None,
    )  # fmt: skip
    newest = {"read_metadata": lambda tracker: (9, False), "_get_non_persistent_iteration": lambda *unused: 9}
    checkpointing = SimpleNamespace(**newest)
    monkeypatch.setattr(rejoin, "get_args", lambda: args)
    monkeypatch.setattr(rejoin, "checkpointing", checkpointing)
    unused: Any = None
    groups: Any = SimpleNamespace(in_section=nullcontext)
    communication = SimpleNamespace(device=torch.device("cpu"))
    manager: Any = SimpleNamespace(view=SimpleNamespace(communication=communication))
    rollback = rejoin.Rollback(manager, groups, unused, unused, unused)
    told = torch.tensor([0, 1])  # by another
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda its, op: its.copy_(its.maximum(told)))

    def load(source: str, load_checkpoint: Any) -> None:
        checkpointing.load_checkpoint = load_checkpoint
        rollback._load(Target(7, source, 0), unused, unused, unused)

    return SimpleNamespace(args=args, checkpointing=checkpointing, load=load)


def test_who_goes_back_reads_all_of_one_checkpoint_but_random_states_where_there_is_one_for_each_replica_of_then(
    going_back: Any,
) -> None:
    """With Megatron-FSDP Megatron looks in --load for what there is to read, and may go on without a part of it."""
    args, read, where = going_back.args, [], set()

    def load_checkpoint(*unused: Any, load_arg: str, **named: Any) -> tuple[int, int]:
        read.append(not args.no_load_rng)
        where.add((getattr(args, load_arg), args.load, args.ckpt_step, args.strict_fsdp_dtensor_load))
        return 7, 0

    for args.data_parallel_random_init in (True, False):
        going_back.load("save", load_checkpoint)
    assert (read, args.no_load_rng) == ([False, True], False)
    assert where == {("saved", "saved", 7, True)}


def test_who_goes_back_reads_the_checkpoint_of_the_plan_whatever_is_newer(going_back: Any) -> None:
    megatron, read = going_back.checkpointing, []

    def load_checkpoint(*args_: Any, **named: Any) -> tuple[int, int]:
        # Of a legacy checkpoint with a distributed optimizer the tracker file is read once more.
        of_last = megatron._get_non_persistent_iteration("", None)
        read.append((getattr(going_back.args, named["load_arg"]), megatron.read_metadata("")[0], of_last))
        return 7, 0

    # As Megatron does it, the last one would be read as one of the default format, whatever it is.
    for source in ("save", NON_PERSISTENT):
        going_back.load(source, load_checkpoint)
    assert read == [("saved", 7, -1), ("saved/non_persistent", 7, -1)]


def test_who_goes_back_takes_part_in_each_evaluation_that_another_one_knows_of(going_back: Any) -> None:
    """Megatron looks for data where a position has any; a worker that was built alone was not told of them."""
    going_back.load("save", lambda *unused, **named: (7, 0))
    assert (going_back.args.do_valid, going_back.args.do_test) == (1, 1)


def kept_states(found: Any) -> list[str]:
    inside = getattr(found, "data", found)
    return next(iter(inside.values())) if isinstance(inside, dict) else inside


FORWARD, BACKWARD = 1, 2
Work = tuple[int, int, int, int]
"""How long it takes (and so which pass it is), microbatch, chunk, stage."""


def order(count: int, stages: int, chunks: int, group: int, stage: int) -> Iterator[Work]:
    """What one stage does, in its order: forward passes, then one forward and one backward in turn, then backward."""
    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: stages, rank=lambda: stage), virtual_pipeline_model_parallel_size=chunks
    )
    total, _, warmup, _ = schedules.get_pp_rank_microbatches(count, chunks, group, p2p_communicator=communicator)
    table = schedules.get_schedule_table(count, chunks, group)
    for k in range(total + warmup):
        if k < total:
            yield (FORWARD, *table[k], stage)
        if k >= warmup:
            microbatch, chunk = table[k - warmup]
            yield BACKWARD, microbatch, chunks - 1 - chunk, stage


def needs(work: Work, stages: int, chunks: int) -> Work | None:
    """What must be done before; None: it is the first of its microbatch."""
    seconds, microbatch, chunk, stage = work
    place = chunk * stages + stage  # among all the chunks of layers, from the embedding to the loss
    if seconds == FORWARD:
        return (FORWARD, microbatch, *divmod(place - 1, stages)) if place else None
    if place == chunks * stages - 1:
        return FORWARD, microbatch, chunk, stage
    return (BACKWARD, microbatch, *divmod(place + 1, stages))


@functools.cache
def seconds(count: int, stages: int, chunks: int, group: int) -> tuple[float, int]:
    """How long a pass takes, and the most chunks' activations that the first stage keeps; a deadlock fails."""
    queues = [list(order(count, stages, chunks, group, stage)) for stage in range(stages)]
    done: dict[Work, int] = {}
    at, clock = [0] * stages, [0] * stages
    while any(at[stage] < len(queues[stage]) for stage in range(stages)):
        before = sum(at)
        for stage, queue in enumerate(queues):
            while at[stage] < len(queue):
                work = queue[at[stage]]
                first = needs(work, stages, chunks)
                if first is not None and first not in done:
                    break
                clock[stage] = max(clock[stage], done[first] if first else 0) + work[0]
                done[work] = clock[stage]
                at[stage] += 1
        assert sum(at) > before, f"a deadlock with {count} microbatches in groups of {group}: {at}"
    assert len(done) == 2 * count * chunks * stages
    kept, most = 0, 0
    for work in queues[0]:
        kept += 1 if work[0] == FORWARD else -1
        most = max(most, kept)
    return max(clock), most


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 4), (3, 2), (4, 2), (4, 3), (8, 2)])
def test_any_number_of_microbatches_runs_without_a_bubble_more_than_its_pipeline_has(stages: int, chunks: int) -> None:
    for count in range(stages, 5 * stages + 1):
        group = group_size(count, stages, stages)
        took, kept = seconds(count, stages, chunks, group)
        assert took == (count * chunks + stages - 1) * (FORWARD + BACKWARD), (count, group)
        assert kept <= (chunks - 1) * group + 2 * (stages - 1) + 1, (count, group)


@pytest.mark.parametrize(
    ("replicas", "stages", "chunks", "batch"), [(64, 8, 2, 2048), (64, 8, 4, 2048), (128, 16, 2, 2048), (4, 2, 2, 16)]
)
def test_after_one_loss_a_step_is_within_a_twentieth_of_the_best_that_whole_microbatches_allow(
    replicas: int, stages: int, chunks: int, batch: int
) -> None:
    left = quotas(batch, range(replicas - 1), least=stages)
    took = max(seconds(count, stages, chunks, group_size(count, stages, stages))[0] for count in set(left.values()))
    most = -(-batch // (replicas - 1))
    best = most * chunks * (FORWARD + BACKWARD)  # without any bubble
    bubble = (stages - 1) * (FORWARD + BACKWARD)
    assert took <= 1.05 * (best + bubble)
    assert max(left.values()) == most


class Fit(Exception):
    """The schedule has accepted the numbers."""


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_schedule_takes_exactly_the_sizes_that_are_said_to_run(
    monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    def accepted(*args: object, **options: object) -> None:
        raise Fit

    monkeypatch.setattr(schedules, "get_pp_rank_microbatches", accepted)  # called when the numbers were checked
    monkeypatch.setattr(schedules, "get_model_type", lambda model: None)
    monkeypatch.setattr(schedules.torch, "zeros", lambda *args, **kwargs: 0)
    config = SimpleNamespace(
        overlap_p2p_comm=False, batch_p2p_comm=True, no_sync_func=None, grad_sync_func=None, param_sync_func=None,
        timers=None, microbatch_group_size_per_vp_stage=0, finalize_model_grads_func=None,
        hidden_size=1, sequence_parallel=False, overlap_moe_expert_parallel_comm=False,
    )  # fmt: skip
    monkeypatch.setattr(schedules, "get_model_config", lambda model: config)
    group = SimpleNamespace(size=lambda: stages, rank=lambda: 0)
    collection = SimpleNamespace(tp=group, cp=group, pp=group, embd=group, pos_embd=group, dp_cp=group)
    taken = {}
    for count in range(1, 4 * stages):
        for size in range(1, 4 * stages):
            config.microbatch_group_size_per_vp_stage = size
            try:
                schedules.forward_backward_pipelining_with_interleaving(
                    forward_step_func=None, data_iterator=[None, None], model=[schedules.torch.nn.Module()] * 2,
                    num_microbatches=count, seq_length=1, micro_batch_size=1,
                    p2p_communicator=SimpleNamespace(config=config, pp_group=group), pg_collection=collection,
                )  # fmt: skip
            except Fit:
                taken[count, size] = True
            except (ValueError, RuntimeError) as error:
                taken[count, size] = "micro-batches" not in str(error)  # another error would be none of the numbers'
    assert taken == {(count, size): runs(count, stages, size) for count, size in taken}
    assert True in taken.values()
