"""The ``--recover-*`` flags: a dataclass whose fields are the flags, with their texts, defaults and checks.

The flags join Megatron's own parser (``add_recover_arguments`` is an ``extra_args_provider``), so a user adds them to
the command line that trains today.  Nothing here imports torch or Megatron: the launcher and the device layer read the
same definitions before either is loaded.  ``scripts/flag_tables.py`` writes the table in docs/operations.md from them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recover_megatron.errors import UserError
from recover_megatron.options import add_options, at_least, checked, flags_of, option, seconds_above_0, seconds_from_0
from recover_megatron.variables import COORDINATOR_VARIABLE, HOST_VARIABLE, LOG_DIR_VARIABLE


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """The addresses of ``HOST:PORT[,HOST:PORT...]`` (``[HOST]:PORT`` for IPv6); ValueError for anything else."""
    addresses = []
    for item in map(str.strip, text.split(",")):
        host, _, port = item.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            host = ""
        number = int(port) if port.isascii() and port.isdecimal() else 0
        if not host or not 0 < number < 65536:
            raise ValueError(f"{item!r} is not HOST:PORT")
        addresses.append((host, number))
    return addresses


def metrics_address(text: str) -> tuple[str, int]:
    """The address of ``PORT`` (on loopback) or ``HOST:PORT``; ValueError for anything else."""
    try:
        [(host, port)] = parse_addresses(text if ":" in text else f"127.0.0.1:{text}")
    except ValueError:
        raise ValueError("give a port (1 to 65535) or HOST:PORT ([HOST]:PORT for IPv6)") from None
    return host, port


def listed_domains(text: str) -> dict[str, str]:
    """Host -> the names of its domains, in the order of the file, of ``@FILE``, lines of HOST NAME[,NAME...]; empty for
    other text.  ValueError: all that is wrong with the file."""
    if not text.startswith("@"):
        return {}
    try:
        lines = Path(text[1:]).read_text(encoding="utf-8-sig").splitlines()  # an editor's mark may be first
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read ({getattr(error, 'strerror', '') or 'it is no text'})") from None
    found: dict[str, str] = {}
    wrong = []
    for number, line in enumerate(lines, start=1):
        host, *names = line.partition("#")[0].split(maxsplit=1)[:2] or [""]
        if not host:
            continue
        if host in found:
            wrong.append(f"line {number}: host {host} is there twice")
        if not names or not names[0].strip(" ,"):
            wrong.append(f"line {number}: host {host} has no domain: write HOST NAME[,NAME...]")
        found[host] = names[0] if names else ""
    if wrong or not found:
        raise ValueError("; ".join(wrong) or "it names no host: write a line HOST NAME[,NAME...] for each node")
    return found


def own_domains(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """What ``--recover-domain`` says of this host, where it names a file by its line; UserError: there is none."""
    if not text.startswith("@"):
        return text
    name = socket.gethostname()
    names = [name, name.partition(".")[0], environ.get("SLURMD_NODENAME", ""), environ.get(HOST_VARIABLE, "")]
    try:
        listed = listed_domains(text)
    except ValueError as error:
        raise UserError(f"--recover-domain {text}: {error}") from None
    if found := [listed[name] for name in names if name in listed]:
        return found[0]
    raise UserError(f"--recover-domain {text}: it has no line of this host: add one, {names[0]} NAME[,NAME...]")


def some_path(text: str) -> None:
    """Raises ValueError for none."""
    if not text:
        raise ValueError("give the path of a file")


def words_of(text: str) -> list[str]:
    """The words of a command; ValueError where there are none."""
    if not (words := shlex.split(text)):
        raise ValueError("give a command")
    return words


@dataclass(frozen=True)
class RecoverConfig:
    """The values of the ``--recover-*`` flags of one worker; ``problems`` checks them."""

    enabled: bool = option(
        False,
        "finish the step on the survivors when a worker dies (docs/operations.md); needs recover-run",
        name="--recover",
        docs="without it nothing of this is installed",
    )
    log_dir: Path | None = option(
        None,
        "with --recover: folder for steps.jsonl, one line per iteration",
        metavar="DIR",
        environment=LOG_DIR_VARIABLE,
        default_text=f"the --log-dir of recover-run, by the environment variable {LOG_DIR_VARIABLE}",
        docs="where `steps.jsonl` and `events.jsonl` go",
    )
    device: str = option(
        "auto",
        "cuda: a GPU, or an error where there is none; cpu: run on the host device, without a GPU; "
        "auto (default): cuda where there is a CUDA device, else cpu",
        choices=("auto", "cuda", "cpu"),
        default_text="",
        docs="[hostdevice.md](hostdevice.md)",
    )
    coordinator: str | None = option(
        None,
        "the candidate coordinators, in the same order for all workers",
        metavar="HOST:PORT[,HOST:PORT...]",
        check=parse_addresses,
        environment=COORDINATOR_VARIABLE,
        default_text=f"those of recover-run, by the environment variable {COORDINATOR_VARIABLE}",
        docs="only with coordinators started by hand",
    )
    heartbeat_interval: float = option(
        1.0,
        "seconds between a worker's signs of life",
        metavar="S",
        check=seconds_above_0,
        docs="hardly ever",
    )
    heartbeat_timeout: float = option(
        5.0,
        "a host that is silent for so many seconds is out; at least twice the interval",
        metavar="S",
        check=seconds_above_0,
        docs="up on networks or hosts that stall for seconds. At least twice the interval",
    )
    hang_timeout: float = option(
        60.0,
        "a worker that makes no progress for so many seconds while others wait for it is out; at least the "
        "heartbeat timeout",
        metavar="S",
        check=seconds_above_0,
        docs="[below](#timeouts)",
    )
    stall_timeout: float = option(
        600.0,
        "where more than half of the replicas hang or are silent at once, wait for them for so many seconds; so "
        "long may a worker wait for its data, too; 0: never wait",
        metavar="S",
        check=seconds_from_0,
        docs="[below](#a-stall-that-many-share): longer where storage or hosts stall for longer than ten minutes, 0 "
        "never to wait",
    )
    grace: float = option(
        0.0,
        "where all other replicas have waited so long in an iteration for one that lives, they take its microbatches "
        "over, and it comes back for the next iteration; below the hang timeout, at least twice the heartbeat "
        "interval. 0: never",
        metavar="S",
        check=seconds_from_0,
        docs="[below](#a-replica-that-is-late)",
    )
    domain: str = option(
        "",
        "what this worker may be lost with besides its node: a rack, a power line, a switch; it may differ from node "
        "to node. @FILE: a line HOST NAME[,NAME...] for each node, in their order. Copies of the optimizer's state are "
        "kept on workers of other nodes and domains",
        metavar="NAME[,NAME...]|@FILE",
        check=listed_domains,
        default_text="the switches of SLURM's topology, if it tells them (SLURM_TOPOLOGY_ADDR)",
        docs="[sharded.md](sharded.md#failure-domains)",
    )
    collective: str = option(
        "auto",
        "how gradients are summed over the replicas: ring, the fault-tolerant ring; native, NCCL's own "
        "collectives; auto, native on GPUs, ring on the CPU",
        choices=("auto", "ring", "native"),
        docs="`native`: NCCL's own reduce-scatter and all-gather, on GPUs alone; a bucket is then finished as "
        "a whole or not at all. `ring`: in segments, each of which is finished by itself",
    )
    min_replicas: int = option(
        1,
        "end the run when fewer complete replicas are left",
        metavar="N",
        check=at_least(1),
        docs="when fewer replicas are not worth their cost: the run then ends with 10. Replicas that the live workers "
        "can still make count. More than the launch has is refused",
    )
    inject: str | None = option(
        None,
        "for tests: faults to inject, WORKER@ITERATION:PHASE[:KIND][,...]",
        metavar="SPEC",
        docs="trying it out: [chaos.md](chaos.md). Without `--recover` it is refused",
    )
    balance: bool = option(
        False,
        "give slow replicas fewer microbatches, by measured speed",
        docs="when replicas differ in speed for long (event `quotas`). Needs more microbatches than replicas; two runs "
        "are no longer equal to the last bit",
    )
    spares: int = option(
        0,
        "start N workers more than the launch has, on its last node, which wait to take the place of one that "
        "dies; that node needs N devices more",
        metavar="N",
        check=at_least(0),
        docs="[getting workers back](#getting-workers-back)",
    )
    max_replicas: int = option(
        0,
        "let workers that join a run that is whole make further replicas, up to N in all; the microbatches of an "
        "iteration stay the same and are shared by more. 0: no more than at the launch, who comes then is a spare",
        metavar="N",
        check=at_least(0),
        docs="to let a run grow by `recover-run --join` ([growing](regroup.md#growing)). At most the microbatches of "
        "an iteration. Give it to every launcher",
    )
    allow_cross_node_tp: bool = option(
        False,
        "put new replicas together from workers of different nodes, too, where there is no other way: their "
        "tensor parallelism is then as slow as the network",
        docs="when a run at the network's speed is better than idle GPUs. Replicas within nodes are made first",
    )
    verify_interval: int = option(
        0,
        "every N iterations compare the replicas' parameters and optimizer states, which must be equal; one that "
        "differs from most takes over theirs; 0: never (default)",
        metavar="N",
        check=at_least(0),
        default_text="",
        docs="[comparing replicas](regroup.md#comparing-replicas). Each time costs a digest of the state, a rendezvous "
        "and new rings",
    )
    shadow_shards: int = option(
        1,
        "with --use-distributed-optimizer: how many other workers keep an up-to-date copy of each worker's part "
        "of the optimizer's state, 0, 1 or 2; with 0 any death takes the run back to a snapshot or a checkpoint, or "
        "ends it with exit code 12 where there is neither",
        metavar="N",
        check=at_least(0, 2),
        docs="with `--use-distributed-optimizer`: 2 where neighbours fail together; 0 to pay nothing, and have any "
        "death take the run back or end it: [sharded.md](sharded.md)",
    )
    shadow_device: str = option(
        "device",
        "where these copies are kept and updated: device, with the parameters (default); cpu, in host memory",
        choices=("device", "cpu"),
        default_text="",
        docs="where device memory is short: in host memory, updated there while the next step computes",
    )
    memory_tier: str = option(
        "auto",
        "keep snapshots of the training's state in the host memory of workers of other nodes or domains: auto, where "
        "the loss of one would take all that hold a part of the state (default); always; off",
        choices=("auto", "always", "off"),
        default_text="",
        docs="`off` where hosts do not have the memory, `always` to have snapshots for losses of several workers, too: "
        "[regroup.md](regroup.md#the-memory-tier)",
    )
    memory_interval: int = option(
        0,
        "iterations between two snapshots; 0: by what they cost (default)",
        metavar="K",
        check=at_least(0),
        default_text="",
        docs="to have no more than K iterations run again after the loss of a node, whatever that costs",
    )
    last_resort: str = option(
        "auto",
        "when nobody who lives has all of the state: auto, those who live go back to the newest checkpoint in place, "
        "where there is one (default); off, the run ends with exit code 12",
        choices=("auto", "off"),
        default_text="",
        docs="`off` to have a loss of the state end the run, which somebody is to look at, or a job script starts "
        "again; snapshots in memory have a flag of their own: "
        "[regroup.md](regroup.md#back-to-a-checkpoint-in-place)",
    )
    untested: bool = option(
        False,
        "take flags whose path is built, but of which a part needs a GPU or Transformer Engine and was never run; "
        "without it they are refused by name",
        docs="when a flag is refused that names it. Compare a run with deaths to one without before you trust it",
    )

    may_differ: str = option(
        "",
        "flags, ours or the training's, that need not be the same for all workers; the others are compared, and a "
        "worker with another value is refused",
        metavar="FLAG[,FLAG...]",
        docs="where a flag is given another value on some nodes for a good reason (names without dashes); `code`: the "
        "program ([footguns.md](footguns.md#do-not-edit-the-code-of-a-run)). Give it to every launcher",
    )
    metrics: str | None = option(
        None,
        "serve metrics for Prometheus at this port of loopback, or of HOST (0.0.0.0: all interfaces), on the node "
        "whose coordinator leads at first; needs recover-run --log-dir",
        metavar="[HOST:]PORT",
        check=metrics_address,
        docs="[metrics.md](metrics.md)",
    )
    metrics_file: str | None = option(
        None,
        "write the same to a file every two seconds, for node-exporter's textfile collector (name it *.prom)",
        metavar="PATH",
        check=some_path,
        docs="[metrics.md](metrics.md)",
    )
    on_event: str | None = option(
        None,
        "run this command for every loss, recovery, return, checkpoint and change of state, with a JSON object on its "
        "stdin; nothing waits for it",
        metavar="COMMAND",
        check=words_of,
        docs="[metrics.md](metrics.md#a-command-for-events)",
    )


FLAGS = tuple(flags_of(RecoverConfig, prefix="recover"))


def add_recover_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "recover" to ``parser`` and return it (the protocol of Megatron's ``extra_args_provider``)."""
    group = parser.add_argument_group(
        "recover", "fault tolerance by recover_megatron; without --recover the run is stock Megatron, no hook installed"
    )
    add_options(group, FLAGS)
    return parser


def config_from_argv(argv: Sequence[str]) -> RecoverConfig:
    """Read our flags alone out of a whole command line (without the program's name).

    The device must be chosen before Megatron is imported, and Megatron's parser is part of Megatron; ``--yaml-cfg``
    replaces Megatron's namespace by one that has none of our flags.  Raises UserError for a bad value of ours; flags
    that are nobody's are refused later, by the whole parser.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    try:
        args, _ = add_recover_arguments(parser).parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from None
    values = {flag.field: getattr(args, flag.dest) for flag in FLAGS}
    for flag in FLAGS:
        if flag.option.environment:
            values[flag.field] = values[flag.field] or os.environ.get(flag.option.environment) or None
    config = RecoverConfig(**values)
    return config if config.log_dir is None else replace(config, log_dir=Path(config.log_dir))


def problems(config: RecoverConfig) -> list[str]:
    """Every value that cannot be used, one line each, with what to change; empty: none."""
    found = checked(config, FLAGS)
    interval, timeout, hang = config.heartbeat_interval, config.heartbeat_timeout, config.hang_timeout
    if timeout < 2 * interval:
        found.append(
            f"--recover-heartbeat-timeout {timeout:g} must be at least twice --recover-heartbeat-interval {interval:g}"
        )
    if hang < timeout:
        found.append(f"--recover-hang-timeout {hang:g} must not be below --recover-heartbeat-timeout {timeout:g}")
    if config.grace and not 2 * interval <= config.grace < hang:
        found.append(
            f"--recover-grace {config.grace:g} must be at least twice --recover-heartbeat-interval {interval:g}, and "
            f"below --recover-hang-timeout {hang:g}"
        )
    return found


def config_or_defaults(argv: Sequence[str]) -> RecoverConfig:
    """As ``config_from_argv``, for a launcher: the defaults where a value is bad, which the script refuses."""
    try:
        return config_from_argv(argv)
    except UserError:
        return RecoverConfig()


def times_from_argv(argv: Sequence[str]) -> RecoverConfig:
    """The same for the script's coordinators: the defaults, too, where values do not go together."""
    config = config_or_defaults(argv)
    return RecoverConfig() if problems(replace(config, coordinator=None)) else config


def spares_from_argv(argv: Sequence[str]) -> int:
    """``--recover-spares`` of a run with ``--recover``; 0 where it is bad, which the script refuses."""
    config = config_or_defaults(argv)
    return max(0, config.spares) if config.enabled else 0
