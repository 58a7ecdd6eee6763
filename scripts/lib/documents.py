"""Where the documents of a corpus come from: files, folders, JSON lines, or Python's own standard library.

A document is a string of bytes, taken as it is: byte-level tokens make any bytes valid, so nothing is decoded,
normalised or dropped.  Only what is no text at all (a NUL byte near its start) is refused, because training on it by
mistake is worse than an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
