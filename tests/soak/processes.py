"""What the processes of a launch hold, and whether that grows."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One look at one process."""

    process: str
    """What it is to the run."""
    pid: int
    kills: int
    """How many there had been."""
    iteration: int
    memory: int
    """Resident, in bytes."""
    descriptors: int
    threads: int
    seconds: float
    """Of processor time, so far."""


def sample(process: str, pid: int, kills: int, iteration: int) -> Sample:
    """Raises psutil.NoSuchProcess for a process that has ended."""
    seen = psutil.Process(pid)
    used, times = seen.memory_info().rss, seen.cpu_times()
    descriptors, threads = seen.num_fds(), seen.num_threads()
    return Sample(process, pid, kills, iteration, used, descriptors, threads, times.user + times.system)


def growth(samples: Sequence[Sample]) -> list[str]:
    """What one process has more of late in a run than early, in words; empty: nothing.

    The first tenth is left out: what is allocated once is there by then. Of what follows the first and the last
    quarter are compared, by their medians: a sample may fall into the middle of a recovery.
    """
    told = samples[len(samples) // 10 :]
    if len(told) < 8:
        return []
    quarter = len(told) // 4
    early, late = told[:quarter], told[-quarter:]
    found = []
    for what, slack in (("descriptors", 2.0), ("threads", 1.0), ("memory", 6.0 * MIB)):
        before, after = (statistics.median(getattr(one, what) for one in part) for part in (early, late))
        if after > 1.03 * before + slack:
            found.append(f"{samples[0].process}: {what} {before:.0f} -> {after:.0f}")
    before, after = (_work(part) for part in (early, late))
    # The slack is that of a coordinator: it shows each worker that it has ever known to whoever looks, and we do.
    if len(told) >= 100 and after > 1.5 * before + 0.005:
        found.append(f"{samples[0].process}: processor seconds per iteration {before:.4f} -> {after:.4f}")
    return found


def _work(part: Sequence[Sample]) -> float:
    """Processor seconds per iteration, from one kill to the next, so with a recovery every few of them.

    Not per kill: on a busy machine a newcomer takes longer, and more iterations pass meanwhile.
    """
    pairs = [(early, late) for early, late in itertools.pairwise(part) if late.iteration > early.iteration]
    each = [(late.seconds - early.seconds) / (late.iteration - early.iteration) for early, late in pairs]
    return statistics.median(each) if each else 0.0
