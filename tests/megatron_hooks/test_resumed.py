"""Warnings of an order of samples that a user does not expect, held against Megatron's own data sets and indices."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from recover_megatron.errors import UserError
from recover_megatron.megatron_hooks.checkpoint import resumed
from recover_megatron.megatron_hooks.data.source import _with_sources
from recover_megatron.megatron_hooks.gradients.microbatches import Shuffled

LENGTH = 8


class Tokenizer:
    vocab_size, eod, pad = 5000, 4999, 4998
    unique_identifiers = {"class": "none"}  # noqa: RUF012


def write(prefix: Path, documents: int, first: int = 0) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for start in range(first, first + documents * 17, 17):
        builder.add_document(numpy.arange(start, start + 17), [17])
    builder.finalize(f"{prefix}.idx")


def read(prefixes: list[Path], samples: int) -> Any:
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=LENGTH,
        blend=(list(map(str, prefixes)), None if len(prefixes) == 1 else [1.0] * len(prefixes)),
        split="100,0,0",
        path_to_cache=str(prefixes[0].parent / "cache"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


def asks(samples: int) -> Any:
    return SimpleNamespace(train_samples=None, train_iters=samples // 2, global_batch_size=2, dataloader_type="single")


@pytest.mark.parametrize(
    ("before", "after"),
    [(100, 106), (100, 110), (110, 100), (110, 150), (110, 180), (180, 190), (190, 210), (210, 214), (150, 330)],
)
def test_a_training_of_another_length_is_warned_of_exactly_where_megatron_changes_the_order(
    tmp_path: Path, before: int, after: int
) -> None:
    write(tmp_path / "corpus", documents=50)  # 106 samples an epoch
    old, new = read([tmp_path / "corpus"], before), read([tmp_path / "corpus"], after)
    both = min(before, after)
    changed = any(not old[at]["tokens"].equal(new[at]["tokens"]) for at in range(both))
    said = resumed.warnings(new, asks(after), asks(before))
    assert bool(said) == changed
    assert all(f"requested {before} samples" in line and f"this run requests {after}" in line for line in said)
    assert resumed.warnings(new, asks(after), None) == []
    for line in said:  # the number it gives is the largest that keeps the order
        iterations = int(re.search(r"up to --train-iters (\d+)\.", line)[1])  # type: ignore[index]
        for more, kept in ((0, True), (1, False)):
            tried = read([tmp_path / "corpus"], 2 * (iterations + more))
            there = min(before, 2 * iterations)
            assert all(old[at]["tokens"].equal(tried[at]["tokens"]) for at in range(there)) == kept, (iterations, more)


def test_a_corpus_that_was_replaced_under_its_path_is_warned_of_and_no_other(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    write(corpus, documents=50)
    for _ in range(2):  # as it is built, and as it is read
        assert resumed.warnings(read([corpus], 200), asks(200), None) == []
    write(corpus, documents=100, first=1000)
    replaced = read([corpus], 200)
    assert max(int(replaced[at]["tokens"].max()) for at in range(200)) < 1000 + 50 * 17  # half of it is never read
    (line,) = resumed.warnings(replaced, asks(200), None)
    assert f"does not match {corpus}" in line
    assert f"{replaced.unique_description_hash}-*" in line


def test_the_first_worker_tells_when_it_builds_its_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    corpora = [tmp_path / "one", tmp_path / "other"]
    for corpus in corpora:
        write(corpus, documents=50)
    monkeypatch.setattr(resumed, "get_args", lambda: asks(220))
    monkeypatch.setattr("recover_megatron.megatron_hooks.data.source.get_args", lambda: asks(220))
    monkeypatch.setattr(resumed, "_loaded", asks(200))

    def build(*args: Any) -> Any:
        raise KeyboardInterrupt

    def said(rank: int) -> list[str]:
        caplog.clear()
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(KeyboardInterrupt):
            _with_sources(build)(read(corpora, 220), 0)
        return [record.getMessage() for record in caplog.records if "another order" in record.getMessage()]

    assert [str(corpus) in line for corpus, line in zip(corpora, said(rank=0), strict=True)] == [True, True]
    assert said(rank=1) == []


def test_cyclic_samples_of_a_blend_are_shuffled_by_the_length_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where each data set of it is dealt as before."""
    corpora = [tmp_path / "one", tmp_path / "other"]
    for corpus in corpora:
        write(corpus, documents=50)
    old, new = (Shuffled(len(read(corpora, samples)), 1, 2, sharded=True) for samples in (100, 104))
    assert [old.samples(at) for at in range(50)] != [new.samples(at) for at in range(50)]

    def said(after: int, kind: str) -> list[str]:
        caplog.clear()
        now = SimpleNamespace(**{**vars(asks(after)), "dataloader_type": kind})
        monkeypatch.setattr(resumed, "get_args", lambda: now)
        monkeypatch.setattr(resumed, "_loaded", asks(100))
        resumed.look(read(corpora, after))
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    (line,) = said(104, "cyclic")
    assert "requested 100 samples of a blend, but this run requests 104" in line
    assert said(104, "single") == said(100, "cyclic") == []


@pytest.fixture
def resume(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What --recover does as Megatron has read the arguments of a checkpoint, for a run on so many ranks."""
    monkeypatch.setattr(resumed, "_loaded", None)

    def compared(saved: int, ranks: int, **flags: Any) -> Any:
        args = SimpleNamespace(data_parallel_size=ranks, no_load_rng=False, micro_batch_size=1, train_iters=9, **flags)
        monkeypatch.setattr(resumed, "get_args", lambda: args)
        then = SimpleNamespace(data_parallel_size=saved, consumed_train_samples=8)
        called = []
        resumed._compared(lambda *given: called.append(given))(then, {"num_layers"})
        assert called == [(then, {"num_layers"})]
        assert resumed._loaded is then
        return args

    return compared


def test_a_batch_of_a_schedule_that_does_not_divide_by_the_ranks_of_a_resume_is_refused_in_words(resume: Any) -> None:
    schedule = {"step_batch_size_schedule": "0:4 64:8", "seq_length": 8}
    with pytest.raises(UserError, match="schedule is not a multiple of micro batch size 1 x 3 data"):
        resume(4, 3, **schedule)
    resume(4, 8, **schedule)  # the batch of 4 is over


def test_random_states_of_fewer_ranks_are_not_loaded(resume: Any) -> None:
    given = {"data_parallel_random_init": True}
    assert [resume(2, ranks, **given).no_load_rng for ranks in (4, 2, 1)] == [True, False, False]
    assert not resume(2, 4, data_parallel_random_init=False).no_load_rng
