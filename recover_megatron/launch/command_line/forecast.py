"""Forecast from a training's flags: what the training needs on each node, and what the loss of a domain would cost.

A domain is a node or a larger failure domain.  ``recover-run --check`` and the start of a launch log the forecast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from recover_megatron.launch.command_line.script import MAPPING, NO_SAVE, SIZES, Script
from recover_megatron.launch.command_line.spec import Domains, LaunchSpec
from recover_megatron.launch.messages import count
from recover_megatron.launch.nodes.leasing import slack_of
from recover_megatron.workload.domains import Loss, Training, domain_losses, on_nodes

SHADOWS = "--recover-shadow-shards 2"
MOST_NAMED = 4
"""Largest number of domains, or of ranges of nodes, that one line of a table names."""
COUNTED = 64
"""Largest number of workers for which open files were measured.  A larger run is refused only if the limit of open
files is too low even for this number of workers."""


@dataclass(frozen=True)
class Control:
    """Facts that decide whether the survivors may continue if a domain falls silent (``membership.leadership``)."""

    hosts: Sequence[int]
    """Ranks of the nodes that host a candidate coordinator; the candidate on the first of them leads."""
    lease: bool = False
    witness: bool = False
    slack: int = 0
    """Largest difference between the numbers of workers of two nodes (``leasing.slack_of``)."""
    replaced: bool = False
    """True if the run waits for replacements of lost workers (``--max-restarts``, ``--recover-spares``)."""


@dataclass(frozen=True)
class Forecast:
    """Consequences of the loss of each domain.

    ``then[i]`` describes what happens after ``losses[i]``; ``change[i]`` describes a change to avoid that outcome.
    """

    losses: list[Loss]
    then: list[str]
    change: list[str]

    def table(self) -> list[str]:
        """Return the table: one row per group of domains with the same outcome.

        If no loss costs more than the workers of its domain, return a single line.
        """
        fewest = min(self.losses, key=lambda loss: loss.whole)
        if all(then == _go(loss) for loss, then in zip(self.losses, self.then, strict=True)):
            kinds = sorted({loss.domain.partition(" ")[0] for loss in self.losses}, key="node".__ne__)
            return [f"no loss of one {' or '.join(kinds)} costs state; at least {_go(fewest)}"]
        rows: dict[tuple[str, str, str], list[str]] = {}
        for loss, then, change in zip(self.losses, self.then, self.change, strict=True):
            parts = f"{count(loss.workers)}, parts of {count(loss.broken, 'replica', 'replicas')}"
            lost = f"{parts}; {loss.lost}" if loss.lost else parts
            rows.setdefault((lost, then, change), []).append(loss.domain)
        cells = [("domain", "lost with it", "then", "what would avoid that")]
        cells += [(_named(domains), *what) for what, domains in rows.items()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


LOSSES = "what the loss of a node or another domain would cost"


def of_launch(spec: LaunchSpec, named: Domains, lease: bool, witness: bool) -> Forecast | None:
    """Return the forecast of a launch; None if ``forecast`` returns None.

    ``named``: domains of each node; ``lease``, ``witness``: True if the launch has one.
    """
    replaced = bool(spec.max_restarts or spec.spares)
    return forecast(spec, named, Control(spec.candidate_nodes, lease, witness, slack_of(spec), replaced))


def forecast(spec: LaunchSpec, named: Domains = (), control: Control | None = None) -> Forecast | None:
    """Return the forecast of a training, whose flags ``preflight.check`` has checked.

    Return None for a single node, without --recover, for a script that does not take Megatron's flags, and if the flags
    do not define the layout.  ``named``: domains of each node.  Ranks are assumed to be in the order of the nodes.
    """
    script, per_node = spec.script, spec.nproc_per_node
    if spec.nnodes < 2 or "--recover" not in script.args or not script.takes_megatron_flags:
        return None
    try:
        if (training := spec.training) is None:
            return None
        domains = on_nodes(spec.world_size, per_node, named)
        domains += domains[-1:] * spec.spares
        losses = domain_losses(training, domains, spec.spares)
        why = script.no_rollback_reason
        fewest = script.recover.min_replicas
        then = [_then(loss, fewest, why, (control or Control([])).replaced) for loss in losses]
        change = _changes(training, losses, domains, spec.spares, "--save" if why == NO_SAVE else "")
        for at, loss in enumerate(losses if control else ()):
            how, more = _silent(loss, control or Control([]), domains, per_node)
            if how and not then[at].startswith("ends"):
                then[at] = how if how.startswith("ends") else f"{then[at]} ({how})"
                change[at] = "; ".join(filter(None, (change[at], more)))
        return Forecast(losses, then, change)
    except (ValueError, IndexError, ArithmeticError):
        return None  # a flag is not valid: the checks or Megatron report the mistake


@dataclass(frozen=True)
class Needs:
    """Needs of a training on one node: amounts that are enough, and minimums (``least_*``; 0: the minimum is unknown).

    ``files``: open files of one worker, including connections.  ``tasks``: processes and threads of all workers on the
    node.  ``shared``: bytes in /dev/shm, for the batches of loader processes.
    """

    files: int
    least_files: int
    tasks: int
    least_tasks: int
    shared: int


def needs_of(script: Script, world: int, here: int, environ: Mapping[str, str], *, cpu: bool) -> Needs:
    """Return the needs of a Megatron training with ``--recover`` on a node with ``here`` of ``world`` workers.

    A worker was measured on CPUs, where every group uses gloo (tests/launch/test_limits.py): 56 threads, and 118
    descriptors plus up to 11 for each other worker.  A worker duplicates its sockets when it searches for gloo's
    sockets.  A loader process needs pipes, and a descriptor for each tensor of a batch.  ``cpu``: False on GPUs, where
    nothing was measured: the minimums are 0.  Raises ValueError for a flag with an invalid number.
    """
    names = ("--num-workers", SIZES["tensor"], "--micro-batch-size", "--seq-length")
    loaders, tensor, micro, sequence = map(script.number, names, (2, 1, 1, 1))
    omp = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    pool = int(omp) if omp.isdecimal() else 1 if here > 1 else len(os.sched_getaffinity(0))
    # A sequence element has a token, a label and an index of 8 bytes each, and a weight of 4 bytes.  The mask has one
    # byte for each pair of elements.  Each loader holds 3 batches.
    mask = 0 if "--no-create-attention-mask-in-dataloader" in script.given else sequence
    batch = micro * sequence * (28 + mask)
    return Needs(
        files=175 + 24 * (world - 1) + 30 * loaders,
        least_files=(100 + 8 * (min(world, COUNTED) - 1) + 10 * loaders) * cpu,
        tasks=30 + here * (64 + 12 * loaders + 2 * (pool - 1)),
        least_tasks=40 * here * cpu,
        shared=3 * loaders * batch * -(-here // max(1, tensor)),
    )


def _changes(
    training: Training, losses: Sequence[Loss], domains: Sequence[Sequence[str]], spares: int, save: str
) -> list[str]:
    """Return, for each loss, changes that would help; empty if no state is lost or no change would help.

    The function tries which flags avoid the loss of state.  ``save``: flag with which the run could go back to a
    checkpoint; empty if no such flag would help.
    """
    changes: list[tuple[str, dict[str, Any]]] = []
    if any(loss.lost for loss in losses):
        if training.blocks and not training.pipeline_before_data:
            changes.append((MAPPING, {"pipeline_before_data": True}))
        if training.spread and training.instances == 1 and training.shadows < 2:
            more = {"shadows": 2}
            changes += [(SHADOWS, more), *((f"{flag} and {SHADOWS}", {**change, **more}) for flag, change in changes)]
    state = {
        flag: {loss.domain for loss in domain_losses(replace(training, **change), domains, spares) if loss.lost}
        for flag, change in changes
    }
    found = []
    for loss in losses:
        flag = next((flag for flag, lost in state.items() if loss.domain not in lost), "")
        if not loss.back and not loss.waits and loss.workers < len(domains):
            flag = " or ".join(filter(None, (flag, "--recover-memory-tier auto", save)))
        if not loss.later:
            flag = "; ".join(filter(None, (flag, "spares on another node, recover-run --join")))
        found.append(flag if loss.lost else "")
    return found


def _go(loss: Loss) -> str:
    more = f", {loss.later} after regrouping" if loss.later > loss.whole else ""
    return f"{count(loss.whole, 'replica continues', 'replicas continue')}{more}"


def _then(loss: Loss, fewest: int, no_rollback_reason: str, replaced: bool) -> str:
    if not loss.later:
        wait = "waits five minutes for workers, else ends (10)"
        return wait if replaced and loss.waits else "ends (10): too few workers are left for a replica"
    if loss.lost and not loss.back:
        return f"ends (12): no snapshots (--recover-memory-tier off), {no_rollback_reason}"
    if loss.later < fewest:
        return f"ends (10): fewer than {fewest} replicas are left"
    return f"{count(loss.whole, 'replica goes', 'replicas go')} back to {loss.back}" if loss.back else _go(loss)


def _silent(loss: Loss, control: Control, domains: Sequence[Sequence[str]], per_node: int) -> tuple[str, str]:
    """Return what happens, in words, if all hosts of the domain of ``loss`` fall silent, and what would help.

    Both texts are empty if the coordinators can continue without further conditions, or if no worker is left.
    """
    there = [loss.domain in domains[node * per_node] for node in control.hosts]
    every, left = len(domains), len(domains) - loss.workers
    if not left:
        return "", ""
    if all(there):
        return "ends (11): all coordinators are lost", "--recover-domain @FILE spreads coordinators over domains"
    if not control.lease:
        enough = 2 * left > every if there[0] else 2 * left >= every
        return ("", "") if enough else ("silent: ends (11)", "a lease needs a --log-dir that all nodes see")
    if 2 * left > every + control.slack:
        return "", ""
    if 2 * loss.workers <= every + control.slack:
        return "silent: with the lease", ""
    return ("silent: with the witness", "") if control.witness else ("silent: ends (11)", "a witness (--witness)")


def _named(domains: Sequence[str]) -> str:
    """Return the domains' names in short form: ``nodes 0 to 3, 5; domains r0, r1 and 6 more``."""
    kinds: dict[str, list[str]] = {}
    for domain in domains:
        kind, _, name = domain.partition(" ")
        kinds.setdefault(kind, []).append(name)
    found = []
    for kind, names in kinds.items():
        shown = names
        if kind == "node":
            rows = [[*run] for _, run in groupby(names, key=lambda name: int(name) - names.index(name))]
            shown = [f"{run[0]} to {run[-1]}" if len(run) > 1 else run[0] for run in rows]
        more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
        found.append(f"{kind}{'s' * (len(names) > 1)} {', '.join(shown[:MOST_NAMED])}{more}")
    return "; ".join(found)
