"""The corpus: the very bytes come back through Megatron's own reader, and what is wrong is told."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import prepare_corpus
import pytest
from prepare_corpus import CorpusError, at_most, split

TEXTS = [f"document {n}: {'äöü ' * n}\r\n".encode() for n in range(1, 61)] + [b"\xff\xfe no UTF-8 \x80"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of text files whose order by name is that of TEXTS."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, text in enumerate(TEXTS):
        (texts / f"{number:03}.txt").write_bytes(text)
    return texts


def prepare(out: Path, *arguments: Path | str) -> dict[str, Any]:
    assert prepare_corpus.main(["--out", str(out), *map(str, arguments)]) == 0
    return json.loads((out / "corpus.json").read_bytes())


def read(out: Path, name: str) -> list[list[int]]:
    """The documents of a split as Megatron's reader gives them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(out / f"{name}_document"))
    assert list(data.document_indices) == list(range(len(data) + 1))  # a sequence each
    return [data[i].tolist() for i in range(len(data))]


def refused(capsys: pytest.CaptureFixture[str], out: Path, *arguments: Path | str) -> str:
    assert prepare_corpus.main(["--out", str(out), *map(str, arguments)]) == 1
    assert not (out / "corpus.json").exists()
    return capsys.readouterr().err


def test_every_byte_comes_back_in_one_split_only(tmp_path: Path, folder: Path) -> None:
    corpus = prepare(tmp_path / "out", "--input", folder, "--valid-percent", "20")
    train, valid = read(tmp_path / "out", "train"), read(tmp_path / "out", "valid")
    for document in train + valid:
        assert document[-1] == 256
        assert max(document[:-1]) <= 255
    texts = {name: [bytes(d[:-1]) for d in documents] for name, documents in (("train", train), ("valid", valid))}
    assert Counter(texts["train"] + texts["valid"]) == Counter(TEXTS)
    assert set(texts["train"]).isdisjoint(texts["valid"])
    for name in ("train", "valid"):
        assert texts[name] == [t for t in TEXTS if t in set(texts[name])]  # in order
        size = sum(map(len, texts[name]))
        assert corpus[name] == {"documents": len(texts[name]), "bytes": size, "tokens": size + len(texts[name])}


def test_the_split_is_the_same_every_time_has_about_the_share_asked_for_and_is_never_empty() -> None:
    documents = [b"%d" % n for n in range(5000)]
    first = list(split(documents, 10))
    assert 400 < sum(is_valid for _, is_valid in first) < 600
    # A longer input does not move the documents that were there before.
    assert list(split(documents[:100], 10)) == first[:100]
    for count in (1, 2, 3):
        documents = [b"one line\nanother line\n" * 10] * count
        parts = list(split(documents, 5))
        assert {is_valid for _, is_valid in parts} == {True, False}
        assert b"".join(text for text, _ in parts) == b"".join(documents)
        assert parts[0][0].endswith(b"\n")
    with pytest.raises(CorpusError, match="cannot be split"):
        list(split([b"x"], 5))
    documents = [b"a" * 10, b"b" * 10, b"c" * 10]
    caps = (25 / 2**20, None, 4 / 2**20)
    assert [list(at_most(documents, cap)) for cap in caps] == [documents[:2], documents, [b"aaaa"]]


def test_the_entropy_is_that_computed_directly(tmp_path: Path, folder: Path) -> None:
    corpus = prepare(tmp_path / "out", "--input", folder)
    train, valid = ([t for document in read(tmp_path / "out", name) for t in document] for name in ("train", "valid"))
    counts = Counter(train)
    cross = -sum(math.log((counts[t] + 1) / (len(train) + 257)) for t in valid) / len(valid)
    assert corpus["unigram_entropy_nats"]["valid_under_train"] == pytest.approx(cross, rel=1e-12)


def test_the_flags_make_megatron_see_all_ids_and_the_end_of_a_document(tmp_path: Path, folder: Path) -> None:
    from argparse import ArgumentParser

    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    corpus = prepare(tmp_path / "out", "--input", folder)
    parser = ArgumentParser()
    for flag in ("--train-data-path", "--valid-data-path"):
        parser.add_argument(flag)
    parser.add_argument("--tokenizer-type")
    for flag in ("--vocab-size", "--make-vocab-size-divisible-by"):
        parser.add_argument(flag, type=int)
    args = parser.parse_args(corpus["megatron_flags"])
    vars(args).update(rank=0, tensor_model_parallel_size=1, pad_vocab_size=True, padded_vocab_size=None)
    assert build_tokenizer(args).eod == prepare_corpus.END_OF_DOCUMENT == 256
    assert args.padded_vocab_size >= prepare_corpus.VOCABULARY
    assert Path(args.train_data_path + ".bin").is_file()
    assert Path(args.valid_data_path + ".idx").is_file()


def test_json_lines_give_a_document_each(tmp_path: Path) -> None:
    lines = [{"body": f"text {n} é", "id": n} for n in range(4)] + [{"body": "", "id": 5}]
    source = tmp_path / "pages.jsonl"
    source.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    prepare(tmp_path / "out", "--input", source, "--json-key", "body")
    documents = read(tmp_path / "out", "train") + read(tmp_path / "out", "valid")
    assert sorted(bytes(d[:-1]).decode() for d in documents) == [f"text {n} é" for n in range(4)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": 7, "body": "x"}', "no key 'text'; the keys are: body, id; choose one with --json-key"),
        ('{"text": 7}', "the value of 'text' must be a string, not a int"),
        ("[1, 2]", "expected a JSON object, found a list"),
        ('{"text": "cut', "invalid JSON: "),
        (b'{"text": "\xff"}', "invalid JSON: "),
    ],
)
def test_a_bad_json_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str | bytes, said: str
) -> None:
    source = tmp_path / "pages.jsonl"
    source.write_bytes(b'{"text": "fine"}\n\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    error = refused(capsys, tmp_path / "out", "--input", source)
    assert f"{source}:3: " in error
    assert said in error


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nowhere", None, "nowhere: no such file or folder"),
        ("empty.txt", b"", "the input is empty"),
        ("program", b"\x7fELF\0\0abc", "not a text file"),
        ("text.gz", b"\x1f\x8b\x08abc", "not a text file"),
        (".", None, "no text files in"),
    ],
)
def test_an_input_that_is_not_there_or_empty_or_binary_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, said: str
) -> None:
    (tmp_path / "in").mkdir()
    if content is not None:
        (tmp_path / "in" / name).write_bytes(content)
    assert said in refused(capsys, tmp_path / "out", "--input", tmp_path / "in" / name)
    assert not list(tmp_path.glob("out/*_document*"))


def test_binary_files_of_a_folder_are_left_out_and_told(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (folder / ".hidden").write_bytes(b"hidden")
    corpus = prepare(tmp_path / "out", "--input", folder)
    assert corpus["train"]["documents"] + corpus["valid"]["documents"] == len(TEXTS)
    assert "skipped 1 binary files, such as" in capsys.readouterr().err


def test_a_corpus_is_made_again_only_if_something_changed_or_it_is_not_whole(tmp_path: Path, folder: Path) -> None:
    """And with the old text goes the index of samples that Megatron has made of it."""
    out = tmp_path / "out"
    index = out / "train_document" / "cache" / "GPTDataset_indices" / "0-sample_index.npy"

    def is_made(*arguments: str) -> bool:
        index.parent.mkdir(parents=True, exist_ok=True)
        index.touch()
        prepare(out, "--input", folder, *arguments)
        return not index.exists()

    prepare(out, "--input", folder)
    assert not is_made()
    (out / "corpus.json").unlink()
    assert is_made()
    os.utime(folder / "000.txt", (1, 1))
    assert is_made()
    assert is_made("--max-mib", "0.001")


def test_a_run_that_cannot_write_says_so_and_leaves_no_corpus_that_is_half_of_another(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    prepare(out, "--input", folder)
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if Path(target).name == "valid_document.bin":
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    assert prepare_corpus.main(["--out", str(out), "--input", str(folder), "--valid-percent", "20"]) == 1
    assert prepare_corpus.load_if_complete(out) is None
    assert not list(out.glob(".making-*"))
    assert f"{out}: No space left on device" in capsys.readouterr().err


def test_the_standard_library_is_the_text_without_an_input(tmp_path: Path) -> None:
    corpus = prepare(tmp_path / "out", "--max-mib", "0.5")
    assert corpus["source"].startswith("standard library of Python 3.")
    assert 0.3 * 2**20 < corpus["train"]["bytes"] + corpus["valid"]["bytes"] <= 0.5 * 2**20
    assert 2 < corpus["unigram_entropy_nats"]["valid_under_train"] < 4  # program text
