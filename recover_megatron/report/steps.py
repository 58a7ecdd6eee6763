"""steps.jsonl: one line per iteration, the audit that the invariant is judged by.

    {"iteration": 7, "loss": 3.0481903553009033, "grad_norm": 1.37, "consumed_samples": 224, "epoch": 0, "replicas": 4,
     "seconds": 0.31, "microbatches": {"0": [0, 4], "1": [1, 5], "2": [2, 6], "3": [3, 7]}}

A step is good when its microbatch ids, over all replicas, are exactly 0..M-1, each once (`audit_problem`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """One committed iteration."""

    iteration: int
    """Counted from 1."""
    loss: float | None
    """The logged loss over the whole batch, all digits; None where the step was skipped (loss scaling)."""
    grad_norm: float | None
    """Before clipping; None where the step was skipped."""
    consumed_samples: int
    """After this iteration."""
    epoch: int
    """Generation of the membership that committed it."""
    replicas: int
    """How many replicas counted microbatches."""
    seconds: float
    """From the start of the iteration to the end of its optimizer step."""
    microbatches: Mapping[int, list[int]]
    """Replica id -> the ids j whose gradients this replica accumulated."""

    def to_json(self) -> str:
        """One line, without its line end."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Step:
        """The inverse of ``to_json``; raises ValueError for anything else."""
        try:
            fields: dict[str, Any] = json.loads(line)
            microbatches = {int(replica): list(ids) for replica, ids in fields.pop("microbatches").items()}
            return cls(microbatches=microbatches, **fields)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no step: {line!r} ({error})") from None


def audit_problem(step: Step) -> str | None:
    """What is wrong with the microbatches of a step, in words; None if each of 0..M-1 was counted exactly once.

    M itself is not in the line: it is the number of ids, so a step that lost its last ids shows only against the
    samples it consumed (`audit`).
    """
    counted = sorted(j for ids in step.microbatches.values() for j in ids)
    twice = sorted({a for a, b in pairwise(counted) if a == b})
    if twice:
        return f"iteration {step.iteration}: microbatches {twice} were counted more than once"
    missing = sorted(set(range(counted[-1] + 1)) - set(counted)) if counted else []
    if missing or not counted:
        return f"iteration {step.iteration}: microbatches {missing or 'all'} were not counted"
    return None


def read_steps(path: Path) -> Iterator[Step]:
    """The steps of a file, in order.

    A last line that was cut by a crash is left out; raises ValueError, naming the line, for a bad one before it.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield Step.from_json(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None


class StepsFile:
    """The writer of steps.jsonl: every line is whole on disk (as far as the kernel goes) when ``append`` returns.

    ``last``: the iteration of the last line, 0 if there is none.
    """

    def __init__(self, path: Path, first_iteration: int | None) -> None:
        """Open ``path`` to continue before ``first_iteration``; None: after whatever is there.

        Lines of a run before that reached ``first_iteration`` or further are superseded (it resumed from a checkpoint,
        or started afresh): the old file is kept as path.1, path.2, ..., and the new one begins with what still holds.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last = 0
        if path.exists():
            kept = [step for step in read_steps(path) if first_iteration is None or step.iteration < first_iteration]
            text = "".join(step.to_json() + "\n" for step in kept)
            if text.encode() != path.read_bytes():
                _set_aside(path)
                path.write_text(text, encoding="utf-8")
            self.last = kept[-1].iteration if kept else 0
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  open as long as the run

    @classmethod
    def taken_over(cls, path: Path) -> StepsFile:
        """Continue the file of a writer that is gone: a line that it left unfinished is cut off."""
        return cls(path, None)

    def append(self, step: Step) -> None:
        """Add one line and hand it to the kernel, so that a killed worker leaves it whole."""
        self._file.write(step.to_json() + "\n")
        self._file.flush()
        self.last = step.iteration


def _set_aside(path: Path) -> None:
    number = 1
    while (old := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    os.rename(path, old)
