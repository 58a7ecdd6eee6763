#!/usr/bin/env python3
"""Create a small corpus of real text for Megatron, with bytes as tokens, so that no tokenizer is needed.

    python scripts/prepare_corpus.py                                   # text: the sources of Python's standard library
    python scripts/prepare_corpus.py --input book.txt notes/ --out data/books
    python scripts/prepare_corpus.py --input pages.jsonl --json-key body

Token ids 0 to 255 are the bytes of the text, in whatever encoding it has; id 256 ends a document.  The script refuses
binary files (with a NUL byte near the start), so that no one trains on them by mistake.

It writes ``train_document.{bin,idx}`` and ``valid_document.{bin,idx}`` with Megatron's own writer, and
``corpus.json`` last: a corpus is complete if and only if this file exists.  The file contains the numbers of documents,
bytes and tokens, the flags to train with, and the unigram entropy: the validation loss of a model that knows only the
frequency of each byte in the training text.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recover_megatron import __version__

FORMAT = 2
END_OF_DOCUMENT = 256
VOCABULARY = 257
SPLITS = ("train", "valid")
_ROOT = Path(__file__).resolve().parents[1]
LIBRARY_OUT = _ROOT / "data" / "stdlib"
INPUT_OUT = LIBRARY_OUT.with_name("mine")
_SNIFFED_BYTES = 8192

# Folders to leave out: they contain tests or data as Python code, or are not part of the standard library.
_NOT_LIBRARY = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"),
    *("encodings", "pydoc_data", "idlelib", "turtledemo", "ensurepip", "lib2to3"),
}
_GENERATED = ("_sysconfigdata", "python-config")


class CorpusError(Exception):
    """The input cannot be used; the command prints the message."""


def cross_entropy(counts: np.ndarray, model_counts: np.ndarray) -> float:
    """Return the cross entropy, in nats per token, of a text under a model that knows only frequencies of tokens.

    ``counts``: number of occurrences of each token in the text.  ``model_counts``: the same numbers in the text from
    which the model takes its frequencies.  They are increased by one, so that a byte that does not occur in that text
    has a finite cost.
    """
    q = (model_counts + 1) / (model_counts.sum() + len(model_counts))
    return float(-(counts / counts.sum() * np.log(q)).sum())


def megatron_flags(out: Path) -> list[str]:
    """Return the flags with which Megatron reads the corpus in ``out``.

    NullTokenizer uses the last id of its vocabulary, 256, as the end of a document.  The embedding is padded to a
    multiple of 8 rows; Megatron's default, a multiple of 128, would waste a third of the embedding.
    """
    data = [f for s in SPLITS for f in (f"--{s}-data-path", str(out.resolve() / f"{s}_document"))]
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY)]
    return [*data, *tokenizer, "--make-vocab-size-divisible-by", "8"]


def _fingerprint(sources: Iterable[Path], args: argparse.Namespace) -> str:
    """Return a hash of the paths, sizes and modification times of the files, and of the options.

    If it is unchanged, the corpus need not be created again.
    """
    inputs = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    options = (FORMAT, args.json_key, args.max_mib, args.valid_percent, str(args.out.resolve()))
    return hashlib.sha256(json.dumps([inputs, options]).encode()).hexdigest()


def load_if_complete(out: Path, fingerprint: str | None = None) -> dict[str, Any] | None:
    """Return the content of corpus.json in ``out``; None if ``out`` has no complete corpus.

    ``fingerprint``: return None also if the corpus has another fingerprint.
    """
    try:
        corpus: dict[str, Any] = json.loads((out / "corpus.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return corpus if fingerprint in (None, corpus.get("fingerprint")) else None


def _write_splits(documents: Iterable[tuple[bytes, bool]], folder: Path) -> dict[str, np.ndarray]:
    """Write the training and the validation text into ``folder`` with Megatron's writer.

    ``documents``: each with a flag, True for validation text.  Returns split name -> number of occurrences of each
    token.
    """
    with warnings.catch_warnings():  # Megatron warns of missing GPU kernels, which its writer does not need
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        import torch
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

        logging.disable(logging.NOTSET)
    paths = {name: str(folder / f"{name}_document") for name in SPLITS}
    dtype = DType.optimal_dtype(VOCABULARY)
    writers = {name: IndexedDatasetBuilder(get_bin_path(path), dtype) for name, path in paths.items()}
    counts = {name: np.zeros(VOCABULARY, dtype=np.int64) for name in SPLITS}
    for document, is_valid in documents:
        name = SPLITS[is_valid]
        tokens = np.append(np.frombuffer(document, dtype=np.uint8).astype(np.int16), np.int16(END_OF_DOCUMENT))
        counts[name] += np.bincount(tokens, minlength=VOCABULARY)
        writers[name].add_item(torch.from_numpy(tokens))
        writers[name].end_document()
    for name, writer in writers.items():
        writer.finalize(get_idx_path(paths[name]))
    return counts


def prepare(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Create the requested corpus if it does not exist.

    Returns the content of corpus.json, and True if the corpus existed.  Raises CorpusError for inputs that cannot be
    used, OSError for files that cannot be read or written.
    """
    if args.input:
        sources, source = files_of(args.input), ", ".join(map(str, args.input))
    else:
        sources, source = python_library(), f"standard library of Python {platform.python_version()}"
    fingerprint = _fingerprint(sources, args)
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("a") as lock, tempfile.TemporaryDirectory(prefix=".making-", dir=out) as name:
        fcntl.flock(lock, fcntl.LOCK_EX)  # without the lock, two concurrent calls would mix their files
        if corpus := load_if_complete(out, fingerprint):
            return corpus, True
        folder = Path(name)
        documents = at_most(documents_of(sources, args.json_key), args.max_mib)
        counts = _write_splits(split(documents, args.valid_percent), folder)
        corpus = {
            "source": source,
            "fingerprint": fingerprint,
            "unigram_entropy_nats": {"valid_under_train": cross_entropy(counts["valid"], counts["train"])},
            "megatron_flags": megatron_flags(out),
        }
        for split_name, found in counts.items():
            documents_in, tokens = int(found[END_OF_DOCUMENT]), int(found.sum())
            corpus[split_name] = {"documents": documents_in, "bytes": tokens - documents_in, "tokens": tokens}
        (out / "corpus.json").unlink(missing_ok=True)  # the corpus counts as incomplete until the new file exists
        for split_name in SPLITS:
            # Megatron caches sample indices in this folder by the path of the data: they do not fit the new text.
            shutil.rmtree(out / f"{split_name}_document", ignore_errors=True)
        for file in list(folder.iterdir()):
            os.replace(file, out / file.name)  # a training that has the old file open continues to read that file
        (folder / "corpus.json").write_text(json.dumps(corpus, indent=2) + "\n", encoding="utf-8")
        os.replace(folder / "corpus.json", out / "corpus.json")
    return corpus, False


# -- sources of documents ---------------------------------------------------------------------------------------------


def python_library() -> list[Path]:
    """Return the modules of the running interpreter's standard library, sorted by path.

    Raises CorpusError if the library does not exist as files, because it is zipped or frozen.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(
        path
        for path in library.rglob("*.py")
        if _NOT_LIBRARY.isdisjoint(path.relative_to(library).parts) and not path.name.startswith(_GENERATED)
    )
    if not sources:
        raise CorpusError(f"no Python sources in {library}; pass your own text with --input")
    return sources


def files_of(inputs: Sequence[Path]) -> list[Path]:
    """Return the files and the files in the folders of ``inputs``, in this order; files of a folder sorted by path.

    In folders, hidden files and binary files are skipped, and symbolic links to folders are not followed.  The number
    of skipped binary files is printed on stderr.  Raises CorpusError for a path that does not exist, for a binary file
    in ``inputs``, and if no file is left.
    """
    sources: list[Path] = []
    binary: list[Path] = []
    for given in inputs:
        if given.is_dir():
            for path in sorted(given.rglob("*")):
                hidden = any(part.startswith(".") for part in path.relative_to(given).parts)
                if path.is_file() and not hidden:
                    (binary if _is_binary(path) else sources).append(path)
        elif not given.exists():
            raise CorpusError(f"{given}: no such file or folder")
        elif _is_binary(given):
            raise CorpusError(
                f"{given}: not a text file, since its first {_SNIFFED_BYTES} bytes contain a NUL byte or the signature "
                "of a compressed file; unpack or convert the file first"
            )
        else:
            sources.append(given)
    if binary:
        print(f"skipped {len(binary)} binary files, such as {binary[0]}", file=sys.stderr)
    if not sources:
        raise CorpusError("no text files in " + ", ".join(map(str, inputs)))
    return sources


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(_SNIFFED_BYTES)
    return b"\0" in start or start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))


def documents_of(sources: Iterable[Path], json_key: str) -> Iterator[bytes]:
    """Yield the non-empty documents of ``sources``, in order.

    Each line of a JSON lines file is a document, with the text under ``json_key``; any other file is one document.
    Raises CorpusError, with file and line number, for an invalid line.
    """
    for path in sources:
        if path.suffix.lower() in (".jsonl", ".ndjson"):
            yield from _json_lines(path, json_key)
        elif data := path.read_bytes():
            yield data


def _json_lines(path: Path, key: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:  # the line is not JSON, or not UTF-8
                raise CorpusError(f"{where}: invalid JSON: {error}") from error
            if not isinstance(record, dict):
                raise CorpusError(f"{where}: expected a JSON object, found a {type(record).__name__}")
            if key not in record:
                keys = ", ".join(sorted(record)) or "none"
                raise CorpusError(f"{where}: no key {key!r}; the keys are: {keys}; choose one with --json-key")
            if not isinstance(record[key], str):
                raise CorpusError(f"{where}: the value of {key!r} must be a string, not a {type(record[key]).__name__}")
            if text := record[key].encode("utf-8", errors="surrogatepass"):
                yield text


def at_most(documents: Iterable[bytes], mib: float | None) -> Iterator[bytes]:
    """Yield documents as long as their total size is at most ``mib`` MiB; None: no limit.

    If the first document is larger than the limit, yield only its start.
    """
    total, limit = 0, None if mib is None else int(mib * 2**20)
    for document in documents:
        if limit is not None and total + len(document) > limit:
            if total == 0:
                yield document[:limit]
            return
        total += len(document)
        yield document


def split(documents: Iterable[bytes], valid_percent: float) -> Iterator[tuple[bytes, bool]]:
    """Yield each document with a flag, True for validation text.  Raises CorpusError if there is no text.

    The flag depends only on the document's number, so that it is the same on every machine.  The first document is
    always training text and the second is always validation text, so neither is empty.  A single document is cut in
    two at the end of a line.
    """
    numbered = enumerate(documents)
    _, first = next(numbered, (0, b""))
    if not first:
        raise CorpusError("the input is empty: it has no text to train on")
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


def _line_end(document: bytes, near: int) -> int:
    """Return the offset at which to cut ``document`` into two non-empty parts.

    This is the end of the last line that ends before ``near``; if there is none, ``near``.
    """
    if len(document) < 2:
        raise CorpusError("a single document of one byte cannot be split into training and validation text")
    cut = document.rfind(b"\n", 0, near) + 1
    return cut or max(1, min(near, len(document) - 1))


# -- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 0, or 1 after an error message on stderr."""
    parser = argparse.ArgumentParser(
        # An installed package has no pyproject.toml; users then call this script as ``recover-tools corpus``.
        prog=None if (_ROOT / "pyproject.toml").is_file() else "recover-tools corpus",
        description="Create a byte-level corpus of real text for Megatron.",
        epilog="Text is copied byte by byte, in any encoding. In JSON lines files (.jsonl, .ndjson) every line is a "
        "document; any other file is one document. Binary files in folders are skipped.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--input", type=Path, nargs="+", metavar="PATH", help="text files, .jsonl files or folders")
    parser.add_argument("--json-key", default="text", help="key of the text in each JSON line (default: text)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the corpus (default: data/stdlib; with --input data/mine; in recover-tools corpus data/corpus)",
    )
    parser.add_argument("--max-mib", type=float, help="maximum size of the text in MiB; later documents are left out")
    parser.add_argument("--valid-percent", type=float, default=5, help="share of documents for validation (default: 5)")
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
        print(f"prepare_corpus: error: {error.filename or args.out}: {error.strerror}", file=sys.stderr)
        print("prepare_corpus: choose another output folder with --out", file=sys.stderr)
        return 1
    train, valid = corpus["train"], corpus["valid"]
    print(
        f"corpus: {corpus['source']}: {train['documents']} + {valid['documents']} documents, "
        f"{train['tokens']:,} + {valid['tokens']:,} byte tokens (training + validation), unigram entropy "
        f"{corpus['unigram_entropy_nats']['valid_under_train']:.3f} nats, in {args.out}"
        + (" (up to date)" if reused else "")
    )
    if argv is None:
        print(f"corpus: Megatron flags to train on it: {shlex.join(corpus['megatron_flags'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
