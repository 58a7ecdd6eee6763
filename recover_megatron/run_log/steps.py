"""steps.jsonl: one line per iteration, to check the invariant.

    {"iteration": 7, "loss": 3.0481903553009033, "grad_norm": 1.37, "consumed_samples": 224, "epoch": 0, "replicas": 4,
     "seconds": 0.31, "time": 1700000000.123, "micro_batch_size": 4,
     "microbatches": {"0": [0, 4], "1": [1, 5], "2": [2, 6], "3": [3, 7]}}

A step with M microbatches is good if the ids in ``microbatches``, over all replicas, are 0..M-1, each once
(`audit_problem`). A run is good if every iteration is present and good (`violations`). M follows from the samples that
the iteration consumed, so the batch size may change during a run, by ramp-up, a step schedule or another launch.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from recover_megatron.log_writer import LogWriter
from recover_megatron.run_log.events import line_object, line_objects

STEPS_FILE = "steps.jsonl"
NOT_SHOWN = "not shown"
"""Part of every sentence about iterations whose lines are missing; ``report`` finds these sentences by it."""
_BLOCK = 1 << 16
"""Number of bytes that one read of a file requests."""


@dataclass(frozen=True)
class StepRecord:
    iteration: int
    """Counted from 1."""
    loss: float | None
    """Loss over the complete batch, with all digits; None if the optimizer step was skipped (loss scaling)."""
    grad_norm: float | None
    """Gradient norm before clipping; None if the optimizer step was skipped."""
    consumed_samples: int
    """Number of samples that the run has consumed, including this iteration."""
    epoch: int
    """Epoch (generation of the membership) in which the iteration was committed."""
    replicas: int
    """Number of replicas in ``microbatches``."""
    seconds: float
    """Duration of the iteration, from its start to the end of its optimizer step."""
    microbatches: Mapping[int, list[int]]
    """Replica id -> the ids of the microbatches whose gradients this replica accumulated."""
    skipped: int = 0
    """Number of iterations directly before this one that ``--iterations-to-skip`` left out."""
    skipped_samples: int | None = None
    """Number of samples of the iterations counted in ``skipped``; None if unknown, and in files of older versions."""
    time: float | None = None
    """Unix seconds at the end of the iteration, by the writer's clock; None in files of older versions."""
    micro_batch_size: int | None = None
    """Micro batch size of the launch that ran the step; None in files of older versions."""

    def to_json(self) -> str:
        """Return the step as a line of steps.jsonl, without the newline.

        The microbatches come last, so that ``Lines.new(upto=...)`` can omit them.
        """
        fields = asdict(self)
        if not self.skipped:
            del fields["skipped"]
        for name in ("skipped_samples", "time", "micro_batch_size"):
            if fields[name] is None:
                del fields[name]
        fields["microbatches"] = fields.pop("microbatches")
        return json.dumps(fields)

    def to_line(self) -> bytes:
        return (self.to_json() + "\n").encode()

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """Return the step in a line that ``to_json`` has returned. Raises ValueError for any other line."""
        try:
            return cls.from_fields(json.loads(line))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a step: {line!r} ({error})") from None

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> StepRecord:
        """Return the step in the JSON object of a line; removes ``microbatches`` from ``fields``.

        Raises AttributeError, KeyError, TypeError or ValueError if the object is no step.
        """
        microbatches = {int(replica): list(ids) for replica, ids in fields.pop("microbatches").items()}
        return cls(microbatches=microbatches, **fields)


def audit_problem(step: StepRecord) -> str | None:
    """Return the problem with the microbatch ids of a step, as text; None if each id 0..M-1 was counted exactly once.

    The line does not contain M, so M is the highest id plus 1. Missing ids at the end are found only by comparison with
    the consumed samples (`violations`).
    """
    counted = sorted(j for ids in step.microbatches.values() for j in ids)
    twice = sorted({a for a, b in pairwise(counted) if a == b})
    if twice:
        return f"iteration {step.iteration}: microbatches {twice} were counted more than once"
    missing = sorted(set(range(counted[-1] + 1)) - set(counted)) if counted else []
    if missing or not counted:
        return f"iteration {step.iteration}: microbatches {missing or 'all'} were not counted"
    return None


def read_steps(path: Path, spoiled: dict[str, int] | None = None) -> Iterator[StepRecord]:
    """Yield the steps of a file, in its order; skips lines that are no steps, and an incomplete last line.

    ``spoiled``: for each line that is no step, gets "file name:line number" -> the iteration of the step before that
    line (0: none).
    """
    last = 0
    for number, fields in line_objects(path):
        try:
            step = StepRecord.from_fields(fields or {})
        except (AttributeError, KeyError, TypeError, ValueError):
            if spoiled is not None:
                spoiled[f"{path.name}:{number}"] = last
        else:
            last = step.iteration
            yield step


class StepsFile:
    """Writer of steps.jsonl. If the disk works, a line is in the file when `append` returns.

    A failing disk does not block the caller (``log_writer``).
    """

    def __init__(
        self,
        path: Path,
        first_iteration: int | None,
        may_write: Callable[[], bool] = lambda: True,
        since_epoch: int | None = None,
    ) -> None:
        """Continue the file ``path`` with the line of ``first_iteration``.

        If ``first_iteration`` is None, continue after the last line of a lost writer.

        ``since_epoch``: epoch in which the run rolled back without a restart. If the last line has this epoch or a
        later one, another writer has continued the file since the rollback, and all lines are kept.

        ``may_write``: called before each line, in the writer's thread, where it may wait; if it returns False, the line
        is dropped.

        Other lines of ``first_iteration`` or later iterations are superseded, because this run resumed from a
        checkpoint, started again or rolled back. If there are such lines, the old file is kept as path.1, path.2, ...,
        and the new file begins with the valid lines. An incomplete last line is cut off.
        """
        self._first = first_iteration
        self._since_epoch = since_epoch
        self._may_write = may_write
        self._last = 0
        """Iteration of the last line when the file was opened."""
        self._file = LogWriter(path, opening=self._open)

    def append(self, step: StepRecord) -> None:
        """Write the line of ``step``, unless the file had a line of this or a later iteration when it was opened."""
        self.append_line(step.iteration, step.to_line())

    def append_line(self, iteration: int, line: bytes) -> None:
        self._file.put(line, wanted=lambda: self._may_write() and iteration > self._last)
        self._file.wait_done()

    def flush(self) -> bool:
        """Wait a bounded time until all lines are in the file. Return whether they are."""
        return self._file.flush()

    def close(self) -> None:
        """Write the lines that are not in the file yet, if the disk accepts them; then close the file."""
        self._file.flush()
        self._file.close()

    def give_up(self) -> None:
        """Discard the lines that are not in the file yet, and close the file: another worker is now the writer."""
        self._file.discard()
        self._file.close()

    def _open(self, path: Path) -> int:
        """Open the file, in the writer's thread; replace it by a new one if some of its lines are superseded.

        Reads the complete file only if it must be replaced.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if self._first is not None and not self._has_gone_back(descriptor):
                end = _first_at_least(descriptor, self._first)
                if end < _end_of_lines(descriptor):
                    old, descriptor = descriptor, _begin_new_file(path, descriptor, end)
                    os.close(old)
            end, size = _end_of_lines(descriptor), os.fstat(descriptor).st_size
            if b"\0" in _read(descriptor, end, size):
                os.write(descriptor, b"\n")  # end the spoiled line, so that readers see that lines were lost
            elif end < size:
                os.ftruncate(descriptor, end)
            self._last = read_last(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        self._first = None  # if the file is opened again, all its lines belong to this run
        return descriptor

    def _has_gone_back(self, descriptor: int) -> bool:
        """Return whether another writer has written to this file since the run rolled back."""
        return self._since_epoch is not None and _last_field(descriptor, "epoch") >= self._since_epoch


def microbatches_per_iteration(steps: Sequence[StepRecord]) -> int:
    """Return the highest microbatch id in ``steps``, plus 1."""
    return 1 + max((j for step in steps for ids in step.microbatches.values() for j in ids), default=-1)


def samples_per_microbatch(steps: Sequence[StepRecord]) -> int | None:
    """Return the micro batch size computed from the steps that do not record it; None if no step determines it.

    If steps differ, returns the most frequent size.
    """
    sizes: Counter[int] = Counter()
    for before, step in pairwise(steps):
        if step.micro_batch_size is not None:
            continue
        consumed = step.consumed_samples - before.consumed_samples
        counted = sum(len(ids) for ids in step.microbatches.values())
        if step.iteration == before.iteration + 1 and counted and consumed % counted == 0 < consumed:
            sizes[consumed // counted] += 1
    return sizes.most_common(1)[0][0] if sizes else None


def violations(steps: Sequence[StepRecord], expected: int | None = None) -> list[str]:
    """Return all violations of the invariant in ``steps``, one sentence each, in the order of iterations.

    A missing iteration is a violation, too. ``expected``: number of microbatches of every iteration; if None,
    computed from the samples that the iteration consumed, and for the first step from the step's ids.
    """
    return list(_violations(steps, expected))


def _violations(steps: Sequence[StepRecord], expected: int | None) -> Iterator[str]:
    for step in steps[:1]:
        yield from _counts(step, microbatches_per_iteration([step]) if expected is None else expected)
    usual = samples_per_microbatch(steps)
    for before, step in pairwise(steps):
        size = step.micro_batch_size or usual
        consumed = step.consumed_samples - before.consumed_samples
        if step.skipped_samples is not None:
            consumed -= step.skipped_samples
        elif consumed % (1 + step.skipped) == 0:  # assume that the skipped iterations had the same batch size
            consumed //= 1 + step.skipped
        total = microbatches_per_iteration([step]) if expected is None else expected
        if (first := before.iteration + 1) <= (last := step.iteration - 1 - step.skipped):
            yield not_shown(first, last)
        elif step.iteration != before.iteration + 1 + step.skipped:
            yield f"iteration {step.iteration} follows iteration {before.iteration} in steps.jsonl"
        elif size is None:
            # No step of the file determines the micro batch size.
            yield f"iteration {step.iteration}: {consumed} samples do not match the counted microbatches"
        elif consumed % size:
            yield f"iteration {step.iteration}: {consumed} samples are not a whole number of microbatches of {size}"
        elif expected is None:
            total = consumed // size
        elif consumed != total * size:
            yield f"iteration {step.iteration}: {consumed} samples were consumed, not {total} microbatches of {size}"
        yield from _counts(step, total)


def not_shown(first: int, last: int | None) -> str:
    """Return the sentence that the lines of iterations ``first`` to ``last`` (None if unknown) are missing."""
    if last is None:
        which = f"iterations after {first - 1} are"
    else:
        which = f"iteration {first} is" if first == last else f"iterations {first} to {last} are"
    return f"{which} {NOT_SHOWN}: steps.jsonl has no readable line of {'it' if first == last else 'them'}"


def _counts(step: StepRecord, total: int) -> Iterator[str]:
    """Yield the problems with the microbatch ids of a step, which should be 0..total-1."""
    counted = {j for ids in step.microbatches.values() for j in ids}
    if problem := audit_problem(step):
        yield problem
    elif missing := sorted(set(range(total)) - counted):
        yield f"iteration {step.iteration}: microbatches {missing} were not counted"
    elif foreign := sorted(counted - set(range(total))):
        yield f"iteration {step.iteration}: microbatches {foreign} were counted, but the last one is {total - 1}"


# -- search for a line without reading the complete file; the lines are sorted by iteration -------------------------


def _end_of_lines(descriptor: int) -> int:
    """Return the offset of the end of the last complete line. Raises OSError."""
    return _before(descriptor, os.fstat(descriptor).st_size)


def read_last(descriptor: int) -> int:
    """Return the iteration of the last complete line, 0 if there is none. Raises OSError."""
    return _last_field(descriptor, "iteration")


def _last_field(descriptor: int, name: str) -> int:
    """Return the number in field ``name`` of the last complete line; 0 if there is none. Raises OSError."""
    end = _end_of_lines(descriptor)
    while end:
        start = _before(descriptor, end - 1)
        if (found := _number(_read(descriptor, start, end), name)) is not None:
            return found
        end = start  # skip a spoiled line
    return 0


def _first_at_least(descriptor: int, iteration: int) -> int:
    """Return the offset of the first line whose iteration is at least ``iteration``, by binary search.

    If there is none, returns the offset of the end of the last complete line. Raises OSError.
    """
    low, high = 0, _end_of_lines(descriptor)  # always starts of lines, or the end of the last line
    place = high
    while low < high:
        middle = end = _before(descriptor, (low + high) // 2)
        found = None
        while found is None and end < high:  # skips spoiled lines
            start, end = end, _after(descriptor, end, high)
            found = _number(_read(descriptor, start, end), "iteration")
        if found is not None and found < iteration:
            low = end
        else:
            high = middle
            place = place if found is None else start
    return place


def _begin_new_file(path: Path, descriptor: int, end: int) -> int:
    """Keep the old file as path.1, path.2, ..., and copy its first ``end`` bytes to a new file.

    ``descriptor``: descriptor of the old file. Returns the descriptor of the new file. Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    other = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        offset = 0
        while offset < end and (block := os.pread(descriptor, min(16 * _BLOCK, end - offset), offset)):
            offset += len(block)
            while block:
                block = block[os.write(other, block) :]
        number = 1
        while (old := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        try:
            os.link(path, old)  # a link keeps steps.jsonl present at all times
        except OSError:
            os.rename(path, old)
        os.replace(temporary, path)
    except OSError:
        os.close(other)
        raise
    return other


def _before(descriptor: int, offset: int) -> int:
    """Return the offset after the last newline before ``offset``; 0 if there is no newline."""
    while offset > 0:
        start = max(0, offset - _BLOCK)
        found = _read(descriptor, start, offset).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        offset = start
    return 0


def _after(descriptor: int, offset: int, end: int) -> int:
    """Return the offset after the first newline in offset:end; ``end`` if there is no newline."""
    while offset < end:
        block = _read(descriptor, offset, min(end, offset + _BLOCK))
        found = block.find(b"\n")
        if found >= 0:
            return offset + found + 1
        if not block:
            break
        offset += len(block)
    return end


def _read(descriptor: int, start: int, end: int) -> bytes:
    data = b""
    while len(data) < end - start and (block := os.pread(descriptor, end - start - len(data), start + len(data))):
        data += block
    return data


def _number(line: bytes, name: str) -> int | None:
    try:
        return int((line_object(line) or {})[name])
    except (ValueError, TypeError, KeyError):
        return None
