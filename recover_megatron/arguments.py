"""The ``--recover-*`` flags: one argparse group, one dataclass, one place that checks them.

The flags join Megatron's own parser (``add_recover_arguments`` is an ``extra_args_provider``), so a user adds them to
the command line that trains today.  Nothing here imports torch or Megatron: the launcher and the device layer read the
same definitions before either is loaded.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recover_megatron.errors import UserError

LOG_DIR_VARIABLE = "RECOVER_LOG_DIR"
"""Environment variable by which ``recover-run --log-dir`` tells its workers the default of ``--recover-log-dir``."""

COORDINATOR_VARIABLE = "RECOVER_COORDINATOR"
"""Environment variable by which recover-run tells its workers the default of ``--recover-coordinator``."""

DEVICES = ("auto", "cuda", "cpu")
COLLECTIVES = ("ring", "native")
SHADOW_DEVICES = ("device", "cpu")
MOST_SHADOWS = 2


@dataclass(frozen=True)
class RecoverConfig:
    """The checked values of the ``--recover-*`` flags of one worker."""

    enabled: bool = False
    """``--recover``: install the hooks.  Everything else but ``device`` has no effect without it."""
    log_dir: Path | None = None
    """Where ``steps.jsonl`` goes; None: it is not written."""
    device: str = "auto"
    """One of ``DEVICES``."""
    coordinator: str | None = None
    """``HOST:PORT[,HOST:PORT...]``, the candidate coordinators (``parse_addresses``); None: there are none."""
    heartbeat_interval: float = 1.0
    """Seconds, as the three that follow; what they mean: ``membership.records.Settings``."""
    heartbeat_timeout: float = 5.0
    hang_timeout: float = 60.0
    stall_timeout: float = 600.0
    collective: str = "ring"
    """One of ``COLLECTIVES``."""
    min_replicas: int = 1
    """The run ends when fewer complete replicas are left."""
    inject: str | None = None
    """Faults to inject, as the user wrote them."""
    balance: bool = False
    """Give slow replicas fewer microbatches."""
    spares: int = 0
    """Workers that recover-run starts beyond those of the launch, to take the place of one that dies."""
    allow_cross_node_tp: bool = False
    """A replica may be put together from workers of several nodes, its tensor-parallel groups too."""
    verify_interval: int = 0
    """Compare the replicas' parameters and optimizer states every so many iterations; 0: never."""
    shadow_shards: int = 1
    """With the distributed optimizer: how many others keep a copy of each worker's part of the optimizer's state."""
    shadow_device: str = "device"
    """One of ``SHADOW_DEVICES``: where these copies are."""


def add_recover_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "recover" to ``parser`` and return it (the protocol of Megatron's ``extra_args_provider``)."""
    group = parser.add_argument_group(
        "recover", "fault tolerance by recover_megatron; without --recover the run is stock Megatron, no hook installed"
    )
    group.add_argument(
        "--recover",
        action="store_true",
        help="finish the step on the survivors when a worker dies (docs/operations.md); needs recover-run",
    )
    group.add_argument(
        "--recover-log-dir",
        type=str,
        default=None,
        metavar="DIR",
        help="with --recover: folder for steps.jsonl, one line per iteration "
        f"(default: the --log-dir of recover-run, by the environment variable {LOG_DIR_VARIABLE})",
    )
    group.add_argument(
        "--recover-device",
        choices=DEVICES,
        default="auto",
        help="cuda: a GPU, or an error where there is none; cpu: run on the host device, without a GPU; "
        "auto (default): cuda where there is a CUDA device, else cpu",
    )
    defaults = RecoverConfig()
    group.add_argument(
        "--recover-coordinator",
        type=str,
        default=None,
        metavar="HOST:PORT[,HOST:PORT...]",
        help="the candidate coordinators, in the same order for all workers "
        f"(default: those of recover-run, by the environment variable {COORDINATOR_VARIABLE})",
    )
    group.add_argument(
        "--recover-heartbeat-interval",
        type=float,
        default=defaults.heartbeat_interval,
        metavar="S",
        help="seconds between a worker's signs of life (default: %(default)s)",
    )
    group.add_argument(
        "--recover-heartbeat-timeout",
        type=float,
        default=defaults.heartbeat_timeout,
        metavar="S",
        help="a host that is silent for so many seconds is out; at least twice the interval (default: %(default)s)",
    )
    group.add_argument(
        "--recover-hang-timeout",
        type=float,
        default=defaults.hang_timeout,
        metavar="S",
        help="a worker that makes no progress for so many seconds while others wait for it is out; at least the "
        "heartbeat timeout (default: %(default)s)",
    )
    group.add_argument(
        "--recover-stall-timeout",
        type=float,
        default=defaults.stall_timeout,
        metavar="S",
        help="where more than half of the replicas hang or are silent at once, wait for them for so many seconds; so "
        "long may a worker wait for its data, too; 0: never wait (default: %(default)s)",
    )
    group.add_argument(
        "--recover-collective",
        choices=COLLECTIVES,
        default=defaults.collective,
        help="how gradients are summed over the replicas: ring, the fault-tolerant ring; native, the backend's own "
        "collectives (default: %(default)s)",
    )
    group.add_argument(
        "--recover-min-replicas",
        type=int,
        default=defaults.min_replicas,
        metavar="N",
        help="end the run when fewer complete replicas are left (default: %(default)s)",
    )
    group.add_argument(
        "--recover-inject",
        type=str,
        default=None,
        metavar="SPEC",
        help="for tests: faults to inject, WORKER@ITERATION:PHASE[:KIND][,...]",
    )
    group.add_argument(
        "--recover-balance", action="store_true", help="give slow replicas fewer microbatches, by measured speed"
    )
    group.add_argument(
        "--recover-spares",
        type=int,
        default=defaults.spares,
        metavar="N",
        help="start N workers more than the launch has, on its last node, which wait to take the place of one that "
        "dies; that node needs N devices more (default: %(default)s)",
    )
    group.add_argument(
        "--recover-allow-cross-node-tp",
        action="store_true",
        help="put new replicas together from workers of different nodes, too, where there is no other way: their "
        "tensor parallelism is then as slow as the network",
    )
    group.add_argument(
        "--recover-verify-interval",
        type=int,
        default=defaults.verify_interval,
        metavar="N",
        help="every N iterations compare the replicas' parameters and optimizer states, which must be equal; one that "
        "differs from most takes over theirs; 0: never (default)",
    )
    group.add_argument(
        "--recover-shadow-shards",
        type=int,
        default=defaults.shadow_shards,
        metavar="N",
        help="with --use-distributed-optimizer: how many other workers keep an up-to-date copy of each worker's part "
        "of the optimizer's state, 0, 1 or 2; with 0 any death ends the run with exit code 12 (default: %(default)s)",
    )
    group.add_argument(
        "--recover-shadow-device",
        choices=SHADOW_DEVICES,
        default=defaults.shadow_device,
        help="where these copies are kept and updated: device, with the parameters (default); cpu, in host memory",
    )
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
    log_dir = args.recover_log_dir or os.environ.get(LOG_DIR_VARIABLE)
    return RecoverConfig(
        enabled=args.recover,
        log_dir=Path(log_dir) if log_dir else None,
        device=args.recover_device,
        coordinator=args.recover_coordinator or os.environ.get(COORDINATOR_VARIABLE) or None,
        heartbeat_interval=args.recover_heartbeat_interval,
        heartbeat_timeout=args.recover_heartbeat_timeout,
        hang_timeout=args.recover_hang_timeout,
        stall_timeout=args.recover_stall_timeout,
        collective=args.recover_collective,
        min_replicas=args.recover_min_replicas,
        inject=args.recover_inject,
        balance=args.recover_balance,
        spares=args.recover_spares,
        allow_cross_node_tp=args.recover_allow_cross_node_tp,
        verify_interval=args.recover_verify_interval,
        shadow_shards=args.recover_shadow_shards,
        shadow_device=args.recover_shadow_device,
    )


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


def problems(config: RecoverConfig) -> list[str]:
    """Every value that cannot be used, one line each, with what to change; empty: none."""
    found = []
    interval, timeout, hang = config.heartbeat_interval, config.heartbeat_timeout, config.hang_timeout
    times = {
        "--recover-heartbeat-interval": interval,
        "--recover-heartbeat-timeout": timeout,
        "--recover-hang-timeout": hang,
    }
    for flag, seconds in times.items():
        if not 0 < seconds < math.inf:
            found.append(f"{flag} {seconds:g}: give a number of seconds above 0")
    if not 0 <= config.stall_timeout < math.inf:
        found.append(f"--recover-stall-timeout {config.stall_timeout:g}: give a number of seconds, 0 or more")
    if timeout < 2 * interval:
        found.append(
            f"--recover-heartbeat-timeout {timeout:g} must be at least twice --recover-heartbeat-interval {interval:g}"
        )
    if hang < timeout:
        found.append(f"--recover-hang-timeout {hang:g} must not be below --recover-heartbeat-timeout {timeout:g}")
    if config.min_replicas < 1:
        found.append(f"--recover-min-replicas {config.min_replicas}: give 1 or more")
    for flag, number in (
        ("--recover-spares", config.spares),
        ("--recover-verify-interval", config.verify_interval),
    ):
        if number < 0:
            found.append(f"{flag} {number}: give 0 or more")
    if not 0 <= config.shadow_shards <= MOST_SHADOWS:
        found.append(f"--recover-shadow-shards {config.shadow_shards}: give 0 to {MOST_SHADOWS}")
    if config.coordinator is not None:
        try:
            parse_addresses(config.coordinator)
        except ValueError as error:
            found.append(f"--recover-coordinator (or {COORDINATOR_VARIABLE}) {config.coordinator}: {error}")
    return found


def times_from_argv(argv: Sequence[str]) -> RecoverConfig:
    """The config in a script's command line for who starts its coordinators; defaults where it is bad.

    The script refuses a bad one itself.
    """
    try:
        config = config_from_argv(argv)
    except UserError:
        return RecoverConfig()
    return RecoverConfig() if problems(replace(config, coordinator=None)) else config


def spares_from_argv(argv: Sequence[str]) -> int:
    """``--recover-spares`` of a run with ``--recover``; 0 where it is bad, which the script refuses."""
    try:
        config = config_from_argv(argv)
    except UserError:
        return 0
    return max(0, config.spares) if config.enabled else 0


def device_from_argv(argv: Sequence[str]) -> str:
    """``--recover-device`` in a script's command line; "auto" where it is bad, which the script refuses."""
    try:
        return config_from_argv(argv).device
    except UserError:
        return "auto"
