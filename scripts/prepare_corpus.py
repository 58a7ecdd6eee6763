#!/usr/bin/env python3
"""Make a small corpus of real text that Megatron trains on: byte-level tokens, no tokenizer to download.

    python scripts/prepare_corpus.py                                   Python's own standard library
    python scripts/prepare_corpus.py --input book.txt notes/ --out data/books
    python scripts/prepare_corpus.py --input pages.jsonl --json-key body

Ids 0 to 255 are the bytes of the text (UTF-8, or whatever the files hold: bytes go through as they are), id 256 ends
a document.  Only what is no text at all (a NUL byte near its start) is refused: training on it by mistake is worse than
an error.  Written are ``train_document.{bin,idx}`` and ``valid_document.{bin,idx}`` in Megatron's own format, by its
own writer, and last of all ``corpus.json``: a corpus is whole if and only if that file is there.  It holds the number
of documents, bytes and tokens, the flags to train with, and the unigram entropy: the loss of the best model that knows
nothing but how frequent each byte is.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recover_megatron import __version__

FORMAT = 1
END_OF_DOCUMENT = 256
VOCABULARY = 257
SPLITS = ("train", "valid")
LIBRARY_OUT = Path(__file__).resolve().parents[1] / "data" / "stdlib"
INPUT_OUT = LIBRARY_OUT.with_name("mine")
_SNIFFED_BYTES = 8192

# Folders of the standard library that are tests, data in the shape of a program, or not part of it.
_NOT_LIBRARY = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"),
    *("encodings", "pydoc_data", "idlelib", "turtledemo", "ensurepip", "lib2to3"),
}


class CorpusError(Exception):
    """What is wrong with an input or an output, in words for the user."""


@dataclass(frozen=True)
class Source:
    """A file with one document (text) or one document in each line (JSON lines)."""

    path: Path
    is_jsonl: bool
    size: int
    mtime_ns: int


@dataclass
class Part:
    """What went into one split."""

    documents: int = 0
    text_bytes: int = 0
    counts: np.ndarray = field(default_factory=lambda: np.zeros(VOCABULARY, dtype=np.int64))

    def add(self, document: bytes) -> np.ndarray:
        """Count ``document`` and return its tokens."""
        tokens = np.empty(len(document) + 1, dtype=np.int16)
        tokens[:-1] = np.frombuffer(document, dtype=np.uint8)
        tokens[-1] = END_OF_DOCUMENT
        self.documents += 1
        self.text_bytes += len(document)
        self.counts += np.bincount(tokens, minlength=VOCABULARY)
        return tokens


def entropy(counts: np.ndarray) -> float:
    """The entropy of the distribution that ``counts`` describe, in nats per token."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def cross_entropy(counts: np.ndarray, model_counts: np.ndarray) -> float:
    """Nats per token of a text with ``counts`` under the distribution of ``model_counts``.

    One is added to every model count, so that a byte which the model never saw costs much, not infinitely much.
    """
    q = (model_counts + 1) / (model_counts.sum() + len(model_counts))
    return float(-(counts / counts.sum() * np.log(q)).sum())


def megatron_flags(out: Path) -> list[str]:
    """The flags by which Megatron reads the corpus in ``out``.

    NullTokenizer takes the last id of its vocabulary, 256, as the end of a document.  The embedding is padded to a
    multiple of 8 rather than of 128, which would be a third of it for nothing.
    """
    data = [f for s in SPLITS for f in (f"--{s}-data-path", str(out.resolve() / f"{s}_document"))]
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY)]
    return [*data, *tokenizer, "--make-vocab-size-divisible-by", "8"]


def _fingerprint(sources: Iterable[Source], args: argparse.Namespace) -> str:
    """Changes when the same call would give another corpus: files by path, size and time of change, and options."""
    inputs = [(str(s.path.resolve()), s.is_jsonl, s.size, s.mtime_ns) for s in sources]
    options = (FORMAT, args.json_key, args.max_mib, args.valid_percent, str(args.out.resolve()))
    return hashlib.sha256(json.dumps([inputs, options]).encode()).hexdigest()


def load_if_whole(out: Path, fingerprint: str | None = None) -> dict[str, Any] | None:
    """What ``corpus.json`` says if the corpus in ``out`` is whole (and was made from ``fingerprint``), else None."""
    try:
        corpus = json.loads((out / "corpus.json").read_bytes())
        whole = corpus["format"] == FORMAT and all(
            (out / name).stat().st_size == facts["bytes"] for name, facts in corpus["files"].items()
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return corpus if whole and fingerprint in (None, corpus["fingerprint"]) else None


def _write_parts(parts: Iterator[tuple[bytes, bool]], folder: Path) -> dict[str, Part]:
    """Write both splits into ``folder`` with Megatron's own writer."""
    with warnings.catch_warnings():  # of kernels for GPUs, which are not needed to write a file
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        import torch
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

        logging.disable(logging.NOTSET)
    made = {name: Part() for name in SPLITS}
    dtype = DType.optimal_dtype(VOCABULARY)
    writers = {name: IndexedDatasetBuilder(get_bin_path(str(folder / f"{name}_document")), dtype) for name in SPLITS}
    for document, is_valid in parts:
        name = "valid" if is_valid else "train"
        tokens = made[name].add(document)
        writers[name].add_item(torch.from_numpy(tokens))
        writers[name].end_document()
    for name, writer in writers.items():
        writer.finalize(get_idx_path(str(folder / f"{name}_document")))
    if not made["train"].documents:
        raise CorpusError("the input is empty: there is no text to train on")
    return made


def _file_facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest}


def _describe(made: dict[str, Part], folder: Path, out: Path, source: str, fingerprint: str) -> dict[str, Any]:
    nats = {
        "valid_under_train": cross_entropy(made["valid"].counts, made["train"].counts),
        "train": entropy(made["train"].counts),
        "valid": entropy(made["valid"].counts),
    }
    return {
        "format": FORMAT,
        "source": source,
        "fingerprint": fingerprint,
        "vocabulary": VOCABULARY,
        "end_of_document": END_OF_DOCUMENT,
        **{
            n: {"documents": p.documents, "bytes": p.text_bytes, "tokens": int(p.counts.sum())} for n, p in made.items()
        },
        "unigram_entropy_nats": nats,
        "unigram_entropy_bits": {name: value / math.log(2) for name, value in nats.items()},
        "megatron_flags": megatron_flags(out),
        "files": {f.name: _file_facts(f) for f in sorted(folder.iterdir())},
    }


def _install(folder: Path, out: Path, corpus: dict[str, Any]) -> None:
    """Move a finished corpus from ``folder`` into ``out``, such that it is never taken for whole before it is."""
    (out / "corpus.json").unlink(missing_ok=True)
    for name in SPLITS:
        # Megatron keeps its sample indices here, and knows them by the path of the data, not by its content.
        shutil.rmtree(out / f"{name}_document", ignore_errors=True)
    for name in corpus["files"]:
        os.replace(folder / name, out / name)
    with (folder / "corpus.json").open("w", encoding="utf-8") as file:
        json.dump(corpus, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "corpus.json", out / "corpus.json")


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Only one process at a time makes a corpus in ``out``."""
    with (out / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Make the corpus that ``args`` ask for, unless it is there.  Returns corpus.json and whether it was there.

    Raises CorpusError for inputs that cannot be used, OSError for an output that cannot be written.
    """
    skipped: list[Path] = []
    if args.input:
        sources, skipped = files_of(args.input, args.binary)
        source = ", ".join(map(str, args.input))
    else:
        sources, source = python_library(), f"standard library of Python {platform.python_version()}"
    if skipped:
        print(f"left out {len(skipped)} binary files, such as {skipped[0]}", file=sys.stderr)
    fingerprint = _fingerprint(sources, args)
    args.out.mkdir(parents=True, exist_ok=True)
    with _alone_in(args.out):
        if not args.force and (corpus := load_if_whole(args.out, fingerprint)):
            return corpus, True
        limit = None if args.max_mib is None else int(args.max_mib * 2**20)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=args.out) as name:
            folder = Path(name)
            documents = at_most(documents_of(sources, args.json_key), limit)
            made = _write_parts(split(documents, args.valid_percent), folder)
            corpus = _describe(made, folder, args.out, source, fingerprint)
            _install(folder, args.out, corpus)
    return corpus, False


# -- where the documents come from ------------------------------------------------------------------------------------


def python_library() -> list[Source]:
    """The modules of the running interpreter's standard library, in the order of their paths.

    Raises CorpusError where the library is not there as files (a zipped or frozen one).
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, names, files in os.walk(library):
        names[:] = sorted(name for name in names if name not in _NOT_LIBRARY and not name.startswith("config-"))
        found += [
            Path(folder, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    sources = [_source(path) for path in sorted(found)]
    if not sources:
        raise CorpusError(f"no Python sources in {library}; name text of your own with --input")
    return sources


def files_of(inputs: Sequence[Path], take_binary: bool) -> tuple[list[Source], list[Path]]:
    """The files that ``inputs`` name, folders searched through, and the files of folders left out as binary.

    The order is that of ``inputs``, and by path inside a folder.  Hidden files and folders are left out, and symbolic
    links to folders not followed.  Raises CorpusError for a path that is not there, for a binary file named itself, and
    when nothing is left.
    """
    sources: list[Source] = []
    skipped: list[Path] = []
    for given in inputs:
        if given.is_dir():
            for path in _files_under(given):
                if not take_binary and _is_binary(path):
                    skipped.append(path)
                else:
                    sources.append(_source(path))
        elif not given.exists():
            raise CorpusError(f"{given}: no such file or folder")
        elif not take_binary and _is_binary(given):
            raise CorpusError(
                f"{given}: this is not text (a NUL byte or a compressed file's mark in its first {_SNIFFED_BYTES} "
                "bytes); unpack or convert it first, or take it as it is with --binary"
            )
        else:
            sources.append(_source(given))
    if not sources:
        raise CorpusError("no text files in " + ", ".join(map(str, inputs)))
    return sources, skipped


def documents_of(sources: Iterable[Source], json_key: str) -> Iterator[bytes]:
    """The documents in order, the empty ones left out.  Raises CorpusError for a bad line, naming file and line."""
    for source in sources:
        try:
            if source.is_jsonl:
                yield from _json_lines(source.path, json_key)
            elif data := source.path.read_bytes():
                yield data
        except OSError as error:
            raise CorpusError(f"cannot read {source.path}: {error.strerror}") from error


def at_most(documents: Iterable[bytes], limit: int | None) -> Iterator[bytes]:
    """The first documents, as many whole ones as fit into ``limit`` bytes; of a first one that is larger, its start."""
    total = 0
    for document in documents:
        if limit is not None and total + len(document) > limit:
            if total == 0:
                yield document[:limit]
            return
        total += len(document)
        yield document


def split(documents: Iterable[bytes], valid_percent: float) -> Iterator[tuple[bytes, bool]]:
    """Each document with whether it is validation text.

    Whole documents, chosen by their number alone, so that the split is the same every time and on every machine.  The
    first one is training text and the second one validation text whatever the percentage: neither is ever empty.  A
    single document is cut in two at the end of a line.
    """
    numbered = enumerate(documents)
    _, first = next(numbered, (0, b""))
    if not first:
        return
    second = next(numbered, None)
    if second is None:
        cut = _line_end(first, int(len(first) * (1 - valid_percent / 100)))
        yield first[:cut], False
        yield first[cut:], True
        return
    yield first, False
    yield second[1], True
    for number, document in numbered:
        digest = hashlib.sha256(b"%d" % number).digest()
        yield document, int.from_bytes(digest[:4], "big") * 100 < valid_percent * 2**32


def _source(path: Path) -> Source:
    stat = path.stat()
    return Source(path, path.suffix.lower() in (".jsonl", ".ndjson"), stat.st_size, stat.st_mtime_ns)


def _files_under(folder: Path) -> list[Path]:
    found = []
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(here, name) for name in files if not name.startswith(".") and Path(here, name).is_file()]
    return sorted(found)


def _is_binary(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(_SNIFFED_BYTES)
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from error
    return b"\0" in start or start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))


def _json_lines(path: Path, key: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                raise CorpusError(f"{where}: not a line of JSON: {error}") from error
            if not isinstance(record, dict):
                raise CorpusError(f"{where}: a JSON object is expected, this is a {type(record).__name__}")
            if key not in record:
                keys = ", ".join(sorted(record)) or "none"
                raise CorpusError(f"{where}: no key {key!r} (its keys: {keys}); choose one with --json-key")
            if not isinstance(record[key], str):
                raise CorpusError(f"{where}: the value of {key!r} is no string but a {type(record[key]).__name__}")
            if text := record[key].encode("utf-8", errors="surrogatepass"):
                yield text


def _line_end(document: bytes, near: int) -> int:
    """Where to cut ``document`` into two parts that are not empty: after the last newline before ``near``, if any."""
    if len(document) < 2:
        raise CorpusError("one document of one byte cannot be split into training and validation text")
    cut = document.rfind(b"\n", 0, near) + 1
    return cut or max(1, min(near, len(document) - 1))


# -- the command ------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Make a corpus of real text, byte-level, that Megatron trains on.",
        epilog="Text goes through byte by byte, whatever its encoding. In JSON lines (.jsonl, .ndjson) every line is a "
        "document; any other file is one document. Binary files in folders are left out.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--input", type=Path, nargs="+", metavar="PATH", help="text files, folders, .jsonl files")
    parser.add_argument("--json-key", default="text", help="where the text of a JSON line is (default: text)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: data/stdlib, or data/mine with --input")
    parser.add_argument("--max-mib", type=float, help="take only so much text, in whole documents")
    parser.add_argument("--valid-percent", type=float, default=5, help="documents for validation (default: 5)")
    parser.add_argument("--binary", action="store_true", help="take binary files too")
    parser.add_argument("--force", action="store_true", help="make it again even if nothing changed")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0, or 1 for an error that is told on stderr."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.out = args.out or (INPUT_OUT if args.input else LIBRARY_OUT)
    if not 0 < args.valid_percent < 100:
        parser.error("--valid-percent must be between 0 and 100")
    if args.max_mib is not None and args.max_mib <= 0:
        parser.error("--max-mib must be positive")
    try:
        corpus, reused = prepare(args)
    except CorpusError as error:
        print(f"prepare_corpus: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"prepare_corpus: error: cannot write the corpus in {args.out}: {error}", file=sys.stderr)
        print("prepare_corpus: choose another folder with --out, or make room", file=sys.stderr)
        return 1
    train, valid = corpus["train"], corpus["valid"]
    print(
        f"corpus: {corpus['source']}: {train['documents']} + {valid['documents']} documents, "
        f"{train['tokens']:,} + {valid['tokens']:,} byte tokens (training + validation), unigram entropy "
        f"{corpus['unigram_entropy_nats']['valid_under_train']:.3f} nats, in {args.out}"
        + (" (up to date)" if reused else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
