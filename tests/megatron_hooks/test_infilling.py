"""Megatron's data set for infilling is a function of the index, whoever has read what before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from megatron.training.datasets.fim_dataset import GPTFIMDataset

from recover_megatron.megatron_hooks import data

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
