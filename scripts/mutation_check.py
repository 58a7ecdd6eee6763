"""Mutation test: insert deliberate bugs, and check that the tests catch them.

    python scripts/mutation_check.py                       # all mutations; takes minutes, as some tests train
    python scripts/mutation_check.py --only NAME --only NAME
    python scripts/mutation_check.py --list                # list the mutations and the promises that they break

A mutation is an entry of tests/mutations/mutations.toml.  It names a short text of the product, a replacement that is
wrong, and tests; with the replacement, at least one of these tests must fail.  The mutation is applied to a copy of the
working tree (tracked files, and untracked files that git does not ignore), never to the tree itself.

First all named tests run in an unchanged copy, because a test that fails without a mutation proves nothing.  The
verdicts are written to docs/data/mutations.json, where they replace older verdicts on the same mutations;
scripts/reference.py makes a page of that file.

    caught      a named test failed
    survived    all named tests passed: no test checks this promise
    no verdict  pytest could not run the tests, for example because a test was renamed, or they exceeded the time limit

Exit status: 0 if all mutations are caught, 1 if not, 2 if a mutation does not fit the tree, or a test fails without a
mutation.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Event

from recover_megatron import __version__

REPOSITORY = Path(__file__).resolve().parents[1]
LIST = Path("tests/mutations/mutations.toml")
VERDICTS = Path("docs/data/mutations.json")
PRODUCT = "recover_megatron"
ALL = {"RECOVER_TESTS": "all", "RECOVER_MATRIX": "all"}
"""Environment variables that make pytest run all tests, also those that CI only samples (tests/drawn.py)."""
_running: set[subprocess.Popen[bytes]] = set()
_stopped = Event()
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Edit:
    """Replacement of the text ``old`` by ``new`` in ``file``, where ``old`` must occur exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """Deliberate bug.  ``promise``: statement about the product that the bug breaks.

    ``tests``: node ids of pytest; at least one of these tests must fail.  ``of_all``: True if CI leaves out some of
    these tests, so that they must run with the environment ``ALL``, as in ``scripts/test.sh --all``.
    """

    name: str
    promise: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    of_all: bool


@dataclass(frozen=True)
class Verdict:
    """Result of a mutation: caught, survived or no verdict.

    ``by``: node id of the test that failed first, "" if none failed.  ``output``: pytest's output.
    """

    mutation: Mutation
    result: str
    seconds: float
    by: str = ""
    output: str = ""


def read(path: Path) -> list[Mutation]:
    """Read the mutations of a TOML file such as ``LIST``.  Raises KeyError if an entry lacks a required key."""
    return [
        Mutation(
            entry["name"],
            entry["promise"],
            tuple(Edit(one["file"], one["old"], one["new"]) for one in (entry, *entry.get("also", ()))),
            tuple(entry["tests"]),
            entry.get("all", False),
        )
        for entry in tomllib.loads(path.read_text())["mutation"]
    ]


# ---- check of the list against the tree


def problems(mutation: Mutation, root: Path) -> list[str]:
    """Return the reasons why a mutation cannot be applied to the tree at ``root``; [] if it can."""
    found = [why for edit in mutation.edits if (why := _why_not(edit, root))]
    found += [f"test {test} does not exist" for test in mutation.tests if not exists(test, root)]
    found += ["it names no test"] * (not mutation.tests)
    return [f"mutation {mutation.name}: {why}" for why in found]


def _why_not(edit: Edit, root: Path) -> str:
    if edit.old == edit.new:
        return f"it changes nothing in {edit.file}"
    count = _count(root / edit.file, edit.old)
    if count == 1:
        return ""
    if count > 1:
        return f"its text occurs {count} times in {edit.file}: make the text longer, so that it is unique\n{edit.old}"
    others = [path.relative_to(root) for path in sorted((root / PRODUCT).rglob("*.py")) if _count(path, edit.old)]
    where = f"it is now in {', '.join(map(str, others))}" if others else "find the rewritten code of this rule"
    return f"its text does not occur in {edit.file}; {where}\n{edit.old}"


def _count(path: Path, text: str) -> int:
    return path.read_text().count(text) if path.is_file() else 0


def exists(test: str, root: Path) -> bool:
    """Return whether the file and the function of a pytest node id exist; parameters in brackets are not checked."""
    path, *names = test.split("[")[0].split("::")
    return names[-1] in _functions(root / path) if names else (root / path).is_file()


@cache
def _functions(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


# ---- running


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """Yield a temporary copy of the tree at ``root``: tracked files, and new files that git does not ignore."""
    command = ["git", "-C", root, "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Path(folder) / "tree"
        for name in listed.split("\0"):
            if name and (root / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, tree / name)
        yield tree


def try_out(mutation: Mutation, root: Path, limit: float) -> Verdict:
    """Apply the mutation to a copy of ``root``, and run its tests there until the first test fails.

    ``limit``: time limit in seconds.
    """
    with copied(root) as tree:
        for edit in mutation.edits:
            path = tree / edit.file
            path.write_text(path.read_text().replace(edit.old, edit.new))
        started = time.monotonic()
        code, output = pytest(["-x", *mutation.tests], tree, limit, mutation.of_all)
        seconds = time.monotonic() - started
    failed = _FAILED.findall(output)
    if code == 1 and failed:
        return Verdict(mutation, "caught", seconds, failed[0], output)
    return Verdict(mutation, "survived" if code == 0 else "no verdict", seconds, output=output)


def pytest(arguments: Sequence[str], tree: Path, limit: float, of_all: bool = False) -> tuple[int | None, str]:
    """Run pytest in ``tree``; return its exit status and its output.

    After ``limit`` seconds pytest is stopped, and the status is None.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-n", "0", f"--basetemp={tree.parent / 'base'}", *arguments]
    inherited = {name: value for name, value in os.environ.items() if name not in ALL}
    environment = {"OMP_NUM_THREADS": "1", **inherited, **(ALL if of_all else {}), "PYTHONPATH": str(tree)}
    with (tree.parent / "output").open("w+") as file:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        _running.add(process)
        code: int | None = None
        try:
            if not _stopped.is_set():  # if it is set, this process started while Ctrl-C stopped the other processes
                code = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                end(process)
            _running.discard(process)
        file.seek(0)
        return code, file.read()


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a pytest process, so that its tests stop their child processes; after 20 s kill the process."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# ---- output


def say(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def record(root: Path, verdicts: Sequence[Verdict], jobs: int) -> None:
    """Add the verdicts to the file ``VERDICTS``; drop verdicts on mutations that are not in ``LIST``.

    ``jobs``: number of mutations that ran at the same time.
    """
    path = root / VERDICTS
    found = {one["id"]: one for one in (json.loads(path.read_text()) if path.is_file() else ())}
    for its in verdicts:
        found[its.mutation.name] = {
            **{"id": its.mutation.name, "file": its.mutation.edits[0].file, "promise": its.mutation.promise},
            **{"verdict": its.result, "seconds": round(its.seconds), "test": its.by},
            **{"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "jobs": jobs},
        }
    lines = [json.dumps(found[its.name], ensure_ascii=False) for its in read(root / LIST) if its.name in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(f"  {line}" for line in lines) + "\n]\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--list", action="store_true", help="only list the mutations and their tests")
    parser.add_argument("--only", action="append", metavar="NAME", help="run only this mutation; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutations that run at the same time")
    parser.add_argument("--timeout", type=float, default=400, help="time limit in seconds for the tests of a mutation")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mutation first")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="root of the working tree to test")
    options = parser.parse_args(arguments)
    root: Path = options.root
    mutations = read(root / LIST)
    if unknown := sorted(set(options.only or ()) - {mutation.name for mutation in mutations}):
        parser.error(f"no mutation {', '.join(unknown)}; see --list")
    if options.only:
        mutations = [mutation for mutation in mutations if mutation.name in options.only]
    if options.list:
        for mutation in mutations:
            print(f"{mutation.name}: {mutation.promise}", *mutation.tests, sep="\n    ")
        return 0
    if wrong := [why for mutation in mutations for why in problems(mutation, root)]:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    if not options.no_baseline:
        say("running the named tests without a mutation")
        for of_all in sorted({mutation.of_all for mutation in mutations}):
            judged = [mutation for mutation in mutations if mutation.of_all == of_all]
            tests = list(dict.fromkeys(test for mutation in judged for test in mutation.tests))
            with copied(root) as tree:
                code, output = pytest(tests, tree, options.timeout * len(judged), of_all)
            if code != 0:
                say(f"{output}\nthese tests must pass before they can judge a mutation")
                return 2
    verdicts = []
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for verdict in pool.map(lambda mutation: try_out(mutation, root, options.timeout), mutations):
                say(f"{verdict.mutation.name}: {verdict.result} ({verdict.seconds:.0f} s) {verdict.by}")
                if verdict.result != "caught":
                    say(verdict.output)
                verdicts.append(verdict)
        except KeyboardInterrupt:
            _stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                end(process)
            raise
    record(root, verdicts, options.jobs)
    left = sum(verdict.result != "caught" for verdict in verdicts)
    print(f"{len(verdicts) - left} of {len(verdicts)} mutations caught; the verdicts are in {root / VERDICTS}")
    return 1 if left else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
