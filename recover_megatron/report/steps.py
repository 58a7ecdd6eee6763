"""Reading steps.jsonl: one line for each iteration that committed.

A line is a JSON object: ``iteration``, ``loss`` (full precision), ``grad_norm``, ``consumed_samples``, ``epoch``,
``replicas`` (how many), ``seconds``, ``microbatches`` (replica id -> the ids of the microbatches it counted).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """One iteration that committed."""

    iteration: int
    loss: float
    grad_norm: float
    consumed_samples: int
    epoch: int
    replicas: int
    seconds: float
    microbatches: dict[str, tuple[int, ...]]


def parse_step(line: str | bytes) -> Step:
    """Read one line.  Raises ValueError, which says what is wrong with it."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not a line of JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    try:
        return Step(
            iteration=int(record["iteration"]),
            loss=_number(record["loss"]),
            grad_norm=_number(record["grad_norm"]),
            consumed_samples=int(record["consumed_samples"]),
            epoch=int(record["epoch"]),
            replicas=int(record["replicas"]),
            seconds=float(record["seconds"]),
            microbatches={str(replica): tuple(map(int, ids)) for replica, ids in record["microbatches"].items()},
        )
    except KeyError as error:
        raise ValueError(f"no key {error}") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"a value of an unexpected kind ({error})") from error


@dataclass(frozen=True)
class StepsFile:
    """The contents of a steps.jsonl."""

    steps: tuple[Step, ...]
    """In the order of the file; an iteration is there twice if the run went back to a checkpoint."""
    unreadable: tuple[str, ...] = ()
    """``line N: why`` for each line before the last one that could not be read."""
    cut: bool = False
    """The last line is incomplete: the writer was killed while it wrote."""

    def last_of_each(self) -> list[Step]:
        """The steps that count, by iteration: of those done twice, the later."""
        return [step for _, step in sorted({step.iteration: step for step in self.steps}.items())]


def read_steps(path: Path) -> StepsFile:
    """Read the whole file.  Raises OSError if it cannot be read; bad lines are reported, not raised."""
    lines = path.read_bytes().split(b"\n")
    steps: list[Step] = []
    unreadable: list[str] = []
    cut = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            steps.append(parse_step(line))
        except ValueError as error:
            if number == len(lines):  # nothing ended it
                cut = True
            else:
                unreadable.append(f"line {number}: {error}")
    return StepsFile(tuple(steps), tuple(unreadable), cut)


class Follower:
    """Reads the steps of a run while it runs: ``new_steps()`` returns those written since the last call."""

    def __init__(self, path: Path, skip_existing: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if skip_existing and path.exists() else 0

    def new_steps(self) -> Sequence[Step]:
        """Complete lines only; none while the file is not there.  Lines that cannot be read are left to the report."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return ()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        found = []
        for line in complete.splitlines():
            try:
                found.append(parse_step(line))
            except ValueError:
                continue
        return found


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
