"""What a run told and left: the numbers of its console and its TensorBoard, the tensors of its checkpoints."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

Numbers = dict[str, dict[int, float]]
"""Name -> iteration -> value."""

LINE = re.compile(r"^ \[[^]]*\] iteration +(\d+)/ *\d+ \|(.*)\|\s*$", re.MULTILINE)
OF_THE_MACHINE = re.compile(r"time|throughput|TFLOP|memory|mem-")
"""What a death or the machine's load may change; it is told in the same iterations all the same."""
OURS_ALONE = "recover/"
"""How the names begin that Megatron alone does not tell."""


def console(logs: Iterable[Path]) -> Numbers:
    """Megatron's line of each iteration that it logged; raises AssertionError where two workers logged it otherwise."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for log in logs:
        for iteration, fields in LINE.findall(log.read_text(errors="replace")):
            for field in fields.split("|"):
                name, _, value = field.rpartition(":")
                before = found[name.strip()].setdefault(int(iteration), float(value))
                same = OF_THE_MACHINE.search(name) or math.isclose(before, float(value), rel_tol=1e-3)
                assert same, (log, iteration, name, before, value)
    return dict(found)


def scalars(folder: Path) -> Numbers:
    """What TensorBoard shows, of all files that the run's writers have left."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for file in sorted(folder.glob("events.out.tfevents.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            found[name].update({event.step: event.value for event in events.Scalars(name)})
    return dict(found)


def differences(ours: Numbers, theirs: Numbers, near: float) -> list[str]:
    """Where numbers differ by more than ``near``, relative, or are only in one of them.

    Of those of the machine (``OF_THE_MACHINE``) only the names and the iterations are compared.
    """
    found = []
    for name in sorted(name for name in set(ours) | set(theirs) if not name.startswith(OURS_ALONE)):
        mine, its = ours.get(name, {}), theirs.get(name, {})
        for at in sorted(set(mine) | set(its)):
            if at not in mine or at not in its:
                found.append(f"{name} at {at}: only {'ours' if at in mine else 'theirs'}")
            elif OF_THE_MACHINE.search(name):
                continue
            elif "zeros" in name:  # another order of additions, another exact zero; in 16 bits more of them
                if abs(mine[at] - its[at]) > max(3, near * its[at]):
                    found.append(f"{name} at {at}: {mine[at]}, not {its[at]}")
            # The console rounds a gradient's norm to three digits behind the point.
            elif not math.isclose(mine[at], its[at], rel_tol=near, abs_tol=2e-3 if "norm" in name else near):
                found.append(f"{name} at {at}: {mine[at]}, not {its[at]}")
    return found


def checkpoint(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name, but random states and the distributed optimizer's flat buffers."""
    here = folder / f"iter_{iteration:07d}"
    if (here / ".metadata").exists():
        return _flat(_distributed(here))
    paths = sorted(here.glob("mp_rank_*/*.pt"))
    assert paths, f"no checkpoint in {here}"
    return {
        f"{path.parent.name}/{path.name}/{name}": tensor
        for path in paths
        for name, tensor in _flat(torch.load(path, weights_only=False)).items()
    }


def saved_arguments(folder: Path, iteration: int) -> Any:
    """Megatron's arguments, of a distributed checkpoint."""
    return _distributed(folder / f"iter_{iteration:07d}")["common_state/shard_0_1"][0]["args"]


def _distributed(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    _load_state_dict(found, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return found


def _flat(value: object, name: str = "") -> dict[str, torch.Tensor]:
    if "rng" in name or "gbuf_idx" in name:  # of the latter the padding is whatever the memory held
        return {}
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return {key: tensor for at, item in items for key, tensor in _flat(item, f"{name}.{at}").items()}
