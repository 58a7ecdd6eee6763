"""The ``--recover-*`` flags: fields of one dataclass, with help texts, defaults and checks.

A user adds the flags to an existing command line; ``add_recover_arguments`` is the ``extra_args_provider`` that adds
them to Megatron's parser.  This module imports neither torch nor Megatron, because the launcher and the device layer
read the flags before they load torch or Megatron.  ``scripts/reference.py`` writes docs/reference/command_line.md from
these flags.
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
    """Return the (host, port) pairs in ``HOST:PORT[,HOST:PORT...]``; IPv6: ``[HOST]:PORT``.

    Raises ValueError for any other text.
    """
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
    """Return (host, port) for ``PORT`` (the host is then 127.0.0.1) or ``HOST:PORT``.

    Raises ValueError for any other text.
    """
    try:
        [(host, port)] = parse_addresses(text if ":" in text else f"127.0.0.1:{text}")
    except ValueError:
        raise ValueError("give a port (1 to 65535) or HOST:PORT ([HOST]:PORT for IPv6)") from None
    return host, port


def listed_domains(text: str) -> dict[str, str]:
    """Return host -> names of its failure domains, separated by commas, from the file FILE if ``text`` is ``@FILE``.

    The file has a line HOST NAME[,NAME...] for each host; the result is in the order of the lines.  Returns an empty
    dict if ``text`` does not begin with ``@``.  Raises ValueError with all mistakes in the file.
    """
    if not text.startswith("@"):
        return {}
    try:
        lines = Path(text[1:]).read_text(encoding="utf-8-sig").splitlines()  # the file may begin with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file cannot be read ({getattr(error, 'strerror', '') or 'not a text file'})") from None
    found: dict[str, str] = {}
    wrong = []
    for number, line in enumerate(lines, start=1):
        host, *names = line.partition("#")[0].split(maxsplit=1)[:2] or [""]
        if not host:
            continue
        if host in found:
            wrong.append(f"line {number}: host {host} is listed twice")
        if not names or not names[0].strip(" ,"):
            wrong.append(f"line {number}: host {host} has no domain: write HOST NAME[,NAME...]")
        found[host] = names[0] if names else ""
    if wrong or not found:
        raise ValueError("; ".join(wrong) or "the file names no host: write a line HOST NAME[,NAME...] for each node")
    return found


def own_domains(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the names of this host's failure domains, separated by commas; ``text``: value of ``--recover-domain``.

    Raises UserError if ``text`` names a file that is invalid or has no line for this host.
    """
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
    raise UserError(f"--recover-domain {text}: the file has no line for this host: add {names[0]} NAME[,NAME...]")


def some_path(text: str) -> None:
    """Raise ValueError if the path ``text`` is empty."""
    if not text:
        raise ValueError("give the path of a file")


def words_of(text: str) -> list[str]:
    """Split the command ``text`` into words, as a shell does.

    Raises ValueError if the command is empty, or a quotation mark in it is not closed.
    """
    if not (words := shlex.split(text)):
        raise ValueError("give a command")
    return words


@dataclass(frozen=True)
class RecoverConfig:
    """Values of the ``--recover-*`` flags of one worker.  The function ``problems`` checks them."""

    enabled: bool = option(
        False,
        "finish the step on the survivors when a worker dies (docs/operations.md); needs recover-run",
        name="--recover",
        docs="without it no hook is installed",
    )
    log_dir: Path | None = option(
        None,
        "with --recover: write steps.jsonl, one line per iteration, to this folder",
        metavar="DIR",
        environment=LOG_DIR_VARIABLE,
        default_text=f"the --log-dir of recover-run, from the environment variable {LOG_DIR_VARIABLE}",
        docs="the folder of `steps.jsonl` and `events.jsonl`",
    )
    device: str = option(
        "auto",
        "cuda: a GPU, or an error if there is none; cpu: run on the host device, without a GPU; "
        "auto (default): cuda if there is a CUDA device, else cpu",
        choices=("auto", "cuda", "cpu"),
        default_text="",
        docs="[CPU](hostdevice.md)",
    )
    coordinator: str | None = option(
        None,
        "addresses of the candidate coordinators, in the same order for all workers",
        metavar="HOST:PORT[,HOST:PORT...]",
        check=parse_addresses,
        environment=COORDINATOR_VARIABLE,
        default_text=f"the candidates of recover-run, from the environment variable {COORDINATOR_VARIABLE}",
        docs="only if you start the coordinators by hand",
    )
    heartbeat_interval: float = option(
        1.0,
        "seconds between two heartbeats of a worker",
        metavar="S",
        check=seconds_above_0,
        docs="rarely",
    )
    heartbeat_timeout: float = option(
        5.0,
        "evict a host that has sent no heartbeat for S seconds; S must be at least twice the interval",
        metavar="S",
        check=seconds_above_0,
        docs="raise it if the network or hosts stall for several seconds",
    )
    hang_timeout: float = option(
        60.0,
        "evict a worker that has made no progress for S seconds while other workers wait for it; S must not be "
        "below the heartbeat timeout",
        metavar="S",
        check=seconds_above_0,
        docs="[timeouts](operations.md#timeouts)",
    )
    stall_timeout: float = option(
        600.0,
        "if more than half of the replicas hang or are silent at the same time, wait up to S seconds for them; a "
        "worker may also wait up to S seconds for its data; 0: never wait",
        metavar="S",
        check=seconds_from_0,
        docs="[stalls](operations.md#a-stall-of-many-replicas): raise it if storage or hosts stall for more than ten "
        "minutes; 0 to never wait",
    )
    grace: float = option(
        0.0,
        "if all other replicas have waited S seconds for a late replica in an iteration, set it aside: the other "
        "replicas run its microbatches, and it returns in the next iteration. S must be below the hang timeout and at "
        "least twice the heartbeat interval; 0: never set a replica aside",
        metavar="S",
        check=seconds_from_0,
        docs="[late replicas](operations.md#a-replica-that-is-late)",
    )
    domain: str = option(
        "",
        "failure domains of this worker in addition to its node, such as its rack, power line or switch; give each "
        "node the names of its domains. @FILE: a file with a line HOST NAME[,NAME...] for each node, in the "
        "order of the node ranks. Copies of the optimizer state are kept on workers of other nodes and domains",
        metavar="NAME[,NAME...]|@FILE",
        check=listed_domains,
        default_text="the switches of SLURM's topology, if SLURM reports them (SLURM_TOPOLOGY_ADDR)",
        docs="[failure domains](sharded.md#keep-copies-in-different-failure-domains)",
    )
    collective: str = option(
        "auto",
        "how gradients are summed over the replicas: ring, by the fault-tolerant ring; native, by NCCL's collectives; "
        "auto, native on GPUs and ring on the CPU",
        choices=("auto", "ring", "native"),
        docs="`native`: NCCL's reduce-scatter and all-gather, on GPUs only; a bucket is then finished completely or "
        "not at all. `ring`: each segment of a bucket is finished separately",
    )
    min_replicas: int = option(
        1,
        "end the run if fewer than N complete replicas are left",
        metavar="N",
        check=at_least(1),
        docs="if fewer replicas are not worth their cost: the run then ends with exit code 10. Replicas that the live "
        "workers can still form count, too. N cannot exceed the number of replicas at launch",
    )
    inject: str | None = option(
        None,
        "for tests: faults that workers inject into themselves, WORKER@ITERATION:PHASE[:KIND][,...]",
        metavar="SPEC",
        docs="to try recovery: [try a death](operations.md#try-a-death). Refused without `--recover`",
    )
    balance: bool = option(
        False,
        "measure the speed of each replica, and give slower replicas fewer microbatches",
        docs="if replicas differ in speed for a long time (event `quotas`). Needs more microbatches than replicas; two "
        "runs are then no longer bitwise equal",
    )
    spares: int = option(
        0,
        "on the last node, start N additional workers, which wait to take the places of dead workers; that node "
        "needs N additional devices",
        metavar="N",
        check=at_least(0),
        docs="[get workers back](operations.md#get-workers-back)",
    )
    max_replicas: int = option(
        0,
        "when all replicas of the launch are complete, let workers that join form further replicas, up to N in total; "
        "all replicas then share the same microbatches of an iteration. 0: no more replicas than at launch; workers "
        "that join become spares",
        metavar="N",
        check=at_least(0),
        docs="to let a run grow by `recover-run --join` ([growing](regroup.md#let-the-run-grow)). N cannot exceed the "
        "number of microbatches of an iteration. Give it to every launcher",
    )
    allow_cross_node_tp: bool = option(
        False,
        "form new replicas from workers of different nodes if workers of one node are too few; tensor parallelism in "
        "such a replica is as slow as the network",
        docs="if a run at the network's speed is better than idle GPUs. Replicas within nodes are formed first",
    )
    verify_interval: int = option(
        0,
        "every N iterations compare the replicas' parameters and optimizer states, which must be equal; a replica that "
        "differs from the majority receives the majority's state; 0: never (default)",
        metavar="N",
        check=at_least(0),
        default_text="",
        docs="[comparing replicas](regroup.md#compare-replicas). Each comparison costs a digest, a rendezvous "
        "and new rings",
    )
    shadow_shards: int = option(
        1,
        "with --use-distributed-optimizer: number of other workers that keep an up-to-date copy of each worker's shard "
        "of the optimizer state: 0, 1 or 2. With 0, any death rolls the run back to a snapshot or a checkpoint, or if "
        "neither exists, ends the run with exit code 12",
        metavar="N",
        check=at_least(0, 2),
        docs="with `--use-distributed-optimizer`: 2 if neighbours fail together; 0 to save the cost, but then any "
        "death rolls the run back or ends it: [shadows](sharded.md#choose-the-number-of-shadows)",
    )
    shadow_device: str = option(
        "device",
        "memory for the copies of --recover-shadow-shards: device, device memory (default); cpu, host memory",
        choices=("device", "cpu"),
        default_text="",
        docs="`cpu` if device memory is short: the copies are updated in host memory while the next step computes",
    )
    memory_tier: str = option(
        "auto",
        "keep snapshots of the training state in the host memory of workers of other nodes or domains: auto, only if "
        "all copies of a part of the state could be lost with one node or domain (default); always; off",
        choices=("auto", "always", "off"),
        default_text="",
        docs="`off` if hosts do not have the memory, `always` to keep snapshots for losses of several workers, too: "
        "[snapshots](checkpoints.md#keep-snapshots-in-host-memory)",
    )
    memory_interval: int = option(
        0,
        "number of iterations between two snapshots; 0: computed from the cost of a snapshot (default)",
        metavar="K",
        check=at_least(0),
        default_text="",
        docs="to repeat at most K iterations after the loss of a node, whatever the snapshots cost",
    )
    last_resort: str = option(
        "auto",
        "action if the surviving workers do not hold the complete state: auto, roll back to the newest checkpoint, if "
        "one exists, in the same processes (default); off, end the run with exit code 12",
        choices=("auto", "off"),
        default_text="",
        docs="`off` to end the run after a loss of the state, so that an operator can inspect it or a job script "
        "restarts it; snapshots in memory have their own flag: "
        "[rollback](checkpoints.md#go-back-after-the-state-is-lost)",
    )
    untested: bool = option(
        False,
        "accept flags that are implemented, but partly untested because they need a GPU or Transformer Engine; "
        "otherwise the run refuses these flags",
        docs="if a refusal names this flag. Before you trust the run, compare a run with deaths to one without deaths",
    )

    may_differ: str = option(
        "",
        "flags of recover_megatron or of the training script that may differ between workers; all other flags are "
        "compared, and a worker with another value is refused",
        metavar="FLAG[,FLAG...]",
        docs="if a flag must have another value on some nodes. Names without dashes; `code` accepts other program code "
        "([refused workers](troubleshooting.md#a-worker-is-refused-other-flags-or-other-code)). Give it to every "
        "launcher",
    )
    metrics: str | None = option(
        None,
        "serve metrics for Prometheus on the node of the first candidate coordinator, at this port of the loopback "
        "interface, or of HOST (0.0.0.0: all interfaces); needs recover-run --log-dir",
        metavar="[HOST:]PORT",
        check=metrics_address,
        docs="[metrics](monitoring.md#export-metrics-to-prometheus)",
    )
    metrics_file: str | None = option(
        None,
        "write the metrics of --recover-metrics to PATH (*.prom) every 2 s, for node-exporter's textfile collector",
        metavar="PATH",
        check=some_path,
        docs="[metrics](monitoring.md#export-metrics-to-prometheus)",
    )
    on_event: str | None = option(
        None,
        "run this command for each event (loss, recovery, ...) and each change of state; the command gets a JSON "
        "object on stdin, and the run does not wait for the command",
        metavar="COMMAND",
        check=words_of,
        docs="[event command](monitoring.md#run-a-command-for-each-event)",
    )


FLAGS = tuple(flags_of(RecoverConfig, prefix="recover"))


def add_recover_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "recover" to ``parser`` and return it (the protocol of Megatron's ``extra_args_provider``)."""
    group = parser.add_argument_group(
        "recover", "fault tolerance by recover_megatron; without --recover no hook is installed"
    )
    add_options(group, FLAGS)
    return parser


def config_from_argv(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> RecoverConfig:
    """Return the values of the ``--recover-*`` flags in a complete command line, without the program's name.

    A flag that the command line leaves out may have its value in ``environ`` (``Option.environment``).

    Megatron's parser is not used, because the device must be chosen before Megatron is imported, and ``--yaml-cfg``
    replaces Megatron's arguments by others without these flags.  Raises UserError if a value of these flags cannot be
    parsed; ``problems`` checks the parsed values.  Ignores all other flags; Megatron's parser refuses unknown flags
    later.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    try:
        args, _ = add_recover_arguments(parser).parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from None
    values = {flag.field: getattr(args, flag.dest) for flag in FLAGS}
    for flag in FLAGS:
        if flag.option.environment:
            values[flag.field] = values[flag.field] or environ.get(flag.option.environment) or None
    config = RecoverConfig(**values)
    return config if config.log_dir is None else replace(config, log_dir=Path(config.log_dir))


def problems(config: RecoverConfig) -> list[str]:
    """Return a message for each invalid value in ``config``, and for each contradiction between two values.

    Each message says which values are valid.  Returns an empty list if ``config`` can be used.
    """
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
