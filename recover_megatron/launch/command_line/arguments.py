"""Command line of recover-run, and all checks of it that are possible before a process is started.

All mistakes are reported together, because a user who waits in a queue for nodes should not find them one by one.
Everything after SCRIPT belongs to the script and is not checked here.

Each option is a field of ``Options``; ``scripts/reference.py`` writes the table in docs/reference from these fields.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recover_megatron import __version__
from recover_megatron.arguments import FLAGS as SCRIPT_FLAGS
from recover_megatron.arguments import config_or_defaults, parse_addresses
from recover_megatron.launch.command_line import readers
from recover_megatron.launch.command_line.readers import (
    RUNNER,
    check_module,
    check_script,
    lease,
    nodes,
    one_of,
    seconds,
    takes_runner,
    whole,
    workers_here,
)
from recover_megatron.launch.slurm import shape_of
from recover_megatron.launch.workers.states import REFUSED
from recover_megatron.options import Flag, add_options, flags_of, option

DEFAULT_ADDR = "127.0.0.1"
DEFAULT_PORT_SEVERAL_NODES = 29500
MANUAL = "recover-run --help lists the options"

_TORCHRUN_HINTS = {
    "--standalone": "leave it out: one node with a free port is the default",
    "--rdzv-endpoint": "use --master-addr and --master-port",
    "--rdzv-backend": "leave it out; use --master-addr and --master-port",
    "--rdzv-id": "leave it out: the launchers agree on an id automatically",
    "--rdzv-conf": "leave it out; --rendezvous-timeout sets how long nodes wait for each other",
    "--redirects": "use --log-dir: the console shows all output, and log files keep it",
    "-r": "use --log-dir: the console shows all output, and log files keep it",
    "--tee": "use --log-dir: the console shows all output, and log files keep it",
    "-t": "use --log-dir: the console shows all output, and log files keep it",
    "--local-ranks-filter": "leave it out; each line begins with the worker's id",
    "--local-addr": "set RECOVER_HOST to the address at which the other nodes reach this one",
    "--monitor-interval": "leave it out: the kernel reports the end of a worker at once",
    "--start-method": "leave it out: each worker is a separate process",
    "--shutdown-timeout": "use --grace-seconds",
    "--role": "leave it out",
    "--event-log-handler": "leave it out",
    "--numa-binding": "start the script through numactl: --no-python numactl --cpunodebind=N python SCRIPT",
    "--run-path": "give the script directly",
}


class UsageError(Exception):
    """Error for a command that cannot be started; each of ``reasons`` describes in one line what to change.

    ``options``: None if the command line could not be parsed; ``reserved``: node 0's store socket; ``code``: exit code.
    """

    def __init__(
        self, reasons: Sequence[str], options: Options | None = None, reserved: socket.socket | None = None,
        code: int = REFUSED,
    ) -> None:  # fmt: skip
        super().__init__("; ".join(reasons))
        self.code = code
        self.reasons, self.options, self.reserved = list(reasons), options, reserved


@dataclass
class Options:
    """Parsed command line.  ``script`` is None only if the command line is refused."""

    nproc_per_node: int = option(
        1,
        "workers on this node; gpu: one per GPU, cpu: one per core, auto: one per GPU, or per core without GPUs",
        metavar="N",
        check=workers_here,
        default_text="1; with --slurm: the number of the node's GPUs, if SLURM reports it",
    )
    nnodes: int = option(1, "nodes of the launch; start one recover-run on each", metavar="N", check=nodes)
    node_rank: int = option(0, "rank of this node, from 0; node 0 serves the store", metavar="R", check=whole(0))
    master_addr: str = option(DEFAULT_ADDR, "address of node 0", metavar="A")
    master_port: int = option(
        0,
        "port of the store on node 0",
        metavar="P",
        check=whole(0, 65535),
        default_text=f"a free port; {DEFAULT_PORT_SEVERAL_NODES} for several nodes",
    )
    """Port number; 0: a free port."""
    log_dir: Path | None = option(
        None,
        "folder for worker-<id>.log and workers.json; created if missing",
        metavar="DIR",
        docs="[files of a run](operations.md#files-of-a-run)",
    )
    log_format: str = option(
        "plain",
        "plain: lines unchanged; iso: each line with time (UTC), node and worker; json: each line as an object with "
        "these fields. Applies to the console and the logs",
        metavar="FORMAT",
        check=one_of("plain", "iso", "json"),
    )
    grace_seconds: float = option(
        15.0,
        "time between SIGTERM and SIGKILL when the launch is stopped",
        metavar="S",
        check=seconds,
        default_text="15",
    )
    rendezvous_timeout: float = option(
        300.0,
        "longest time that the launchers of several nodes wait for each other",
        metavar="S",
        check=seconds,
        default_text="300",
    )
    max_restarts: int = option(
        0,
        "with --recover or --elastic: largest total number of replacements that this launcher starts for workers "
        "that died during the run",
        metavar="N",
        check=whole(0),
        docs="[get workers back](operations.md#get-workers-back)",
    )
    lease: str = option(
        "auto",
        "several nodes: a file on shared storage, by which one half of the workers may continue if the other half is "
        "unreachable; auto: in the log folder, if all nodes see the same folder; off: none",
        metavar="PATH",
        check=lease,
        docs="[lease](operations.md#survive-the-loss-of-half-of-the-nodes)",
    )
    witness: str = option(
        "auto",
        "several nodes with a lease: slurm or kubernetes, which confirms that lost nodes are off, so that fewer than "
        "half of the workers may continue; auto: the system that runs this job, if it answers; off: none",
        metavar="KIND",
        check=one_of("auto", "slurm", "kubernetes", "off"),
        docs="[witness](operations.md#survive-the-loss-of-most-nodes)",
    )
    device_test: str = option(
        "",
        "with --max-restarts: command that tests a device before a replacement worker is started on it; exit code 0: "
        "the device is healthy. Without this option, CUDA devices have a built-in test",
        metavar="COMMAND",
        docs="[get workers back](operations.md#get-workers-back)",
    )
    device_test_timeout: float = option(
        60.0,
        "time limit of the device test; a device whose test takes longer has failed",
        metavar="S",
        check=seconds,
        default_text="60",
    )
    recover_coordinator: str | None = option(
        None,
        "with --join: the coordinators of the run",
        metavar="HOST:PORT,...",
        docs="if not given: the script's flag of this name, or the environment",
    )
    world_size: int = option(
        0,
        "with --join: the number of workers that the run was launched with",
        metavar="W",
        check=whole(1),
        default_text="",
    )
    join: bool = option(
        False,
        "join a running run with --nproc-per-node additional workers",
        docs="[add a host](operations.md#add-a-host-to-a-running-job)",
    )
    slurm: bool = option(
        False,
        "under srun, one task per node: take the nodes, this node's rank, and the store's address from SLURM",
        docs="[SLURM](slurm.md#use-recover-run---slurm-in-a-script-of-your-own)",
    )
    elastic: bool = option(
        False,
        "SCRIPT trains with the library (ElasticDataParallel): the run survives deaths of workers, as with --recover",
        docs="[your own loop](integrate.md#write-your-own-loop-without-megatron)",
    )
    check: bool = option(
        False,
        "check launch, layout and batch without Megatron, print the cost of each node's loss, and start nothing",
        docs="[check a command](operations.md#check-a-command-before-you-start-it)",
    )
    module: bool = option(False, "SCRIPT is the name of a module, as with python -m", short="-m")
    no_python: bool = option(
        False,
        "SCRIPT is a program, which is executed directly",
        docs="[flags and variables](operations.md#flags-and-variables)",
    )
    wrapper: tuple[str, ...] = ()
    """Words before the Python script in the command of ``no_python``; empty: no Python script was recognized."""
    device_test_command: tuple[str, ...] = ()
    """Program (its path) and arguments of ``device_test``; empty: the option was not given."""
    coordinators: tuple[tuple[str, int], ...] = ()
    """Addresses (host, port) of the coordinators of the run to join; empty without ``join``."""
    taken: Mapping[str, str] = field(default_factory=dict)
    """Name -> value of the environment variables that were used in place of options."""
    script: str | None = None
    script_args: list[str] = field(default_factory=list)

    @property
    def fault_tolerant(self) -> bool:
        return self.elastic or "--recover" in self.script_args

    def command(self) -> tuple[str, ...]:
        if self.no_python and not self.wrapper:
            return (str(self.script), *self.script_args)
        asked = not self.elastic and any(word.startswith("--recover") for word in self.script_args)
        runner = ["-m", RUNNER] if asked and takes_runner(str(self.script), self.module) else []
        runner += ["-m"] if self.module else []
        return (*(self.wrapper or [sys.executable]), *runner, str(self.script), *self.script_args)


FLAGS = tuple(flags_of(Options))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser, which keeps all values as text and raises ``argparse.ArgumentError`` instead of exiting."""
    parser = argparse.ArgumentParser(
        prog="recover-run",
        usage="recover-run [options] SCRIPT [its arguments]",
        description="Start the workers of a training job on this node and supervise them: the death of a worker does "
        "not stop the others, and no process outlives this one.",
        epilog="Everything after SCRIPT belongs to the script. Manual: docs/operations.md.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    add_options(parser, FLAGS, as_text=True, underscores=True)
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        nargs=argparse.REMAINDER,
        help="the training script (or module) and its arguments; pretrain_gpt_recover.py ships with recover-run: its "
        "bare name works from any folder",
    )
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[Options, list[str]]:
    """Read the command line.  Return the options, and the reasons why they are refused (empty: none).

    ``--help`` and ``--version`` print and exit with 0.  For options that the command line leaves out, torchrun's
    variables in ``environ`` are used, and with ``--slurm`` SLURM's variables.
    """
    namespace, reasons = _divide(argv)
    if namespace is None:
        return Options(), reasons
    rest = namespace.script[1:] if namespace.script[:1] == ["--"] else namespace.script
    if not rest and not reasons:
        reasons.append("no SCRIPT given: recover-run [options] SCRIPT [its arguments]")
    taken, against = readers.take_from_environment(namespace, environ)
    reasons += against
    if namespace.slurm:
        reasons += _take_from_slurm(namespace, environ)
    options, failed = Options(taken=taken), set()
    for flag in FLAGS:
        try:
            _read(options, flag, getattr(namespace, flag.dest))
        except ValueError as error:
            variable = readers.PET + flag.dest.upper()
            source = variable if variable in taken else flag.name
            reasons.append(f"{source} {getattr(namespace, flag.dest)!r}: {error}")
            failed.add(flag.name)
    if namespace.master_port is None and options.nnodes > 1:
        options.master_port = DEFAULT_PORT_SEVERAL_NODES
    if rest:
        options.script, options.script_args = rest[0], list(rest[1:])
        reasons += _take_program(options, rest) if options.no_python else []
    if options.node_rank >= options.nnodes and not failed & {"--node-rank", "--nnodes"}:
        reasons.append(
            f"--node-rank {options.node_rank} is not below --nnodes {options.nnodes}: nodes are numbered from 0 to "
            f"{options.nnodes - 1}"
        )
    if options.nnodes > 1 and options.master_port == 0 and "--master-port" not in failed:
        reasons.append("--master-port 0 (any free port) works for one node only: give the same port on every node")
    if options.lease not in ("auto", "off") and options.nnodes == 1 and "--nnodes" not in failed:
        reasons.append("--lease needs several nodes: leave it out")
    if options.witness not in ("auto", "off") and options.nnodes == 1 and "--nnodes" not in failed:
        reasons.append("--witness needs several nodes: leave it out")
    if options.script is not None:
        reasons += _check_newcomers(options)
    return options, reasons


def _divide(argv: Sequence[str]) -> tuple[argparse.Namespace | None, list[str]]:
    """Divide the command line into the launcher's options, as text, and ``script``: SCRIPT and all words after it.

    Return a namespace of both, or None if the division fails; and the mistakes in the command line.  If an option
    is unknown, ``script`` is empty: the option may or may not take a value, so the position of SCRIPT is unknown.
    """
    try:
        namespace, unknown = make_parser().parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        flag = next(flag for flag in FLAGS if flag.name in str(error.argument_name).split("/"))
        if flag.switch:
            return None, [f"{flag.name} takes no value: write only {flag.name}"]
        return None, [f"{flag.name} needs a value: {flag.name} {flag.option.metavar}; {MANUAL}"]
    if unknown:
        namespace.script = []
    # Report all of torchrun's options before the presumed SCRIPT, not only the first unknown option.
    before = itertools.takewhile(lambda word: word != "-m" and not word.endswith(".py"), argv)
    torchruns = [word for word in before if word.partition("=")[0].replace("_", "-") in _TORCHRUN_HINTS]
    return namespace, [_unknown(word) for word in dict.fromkeys([unknown[0], *torchruns])] if unknown else []


def _read(options: Options, flag: Flag, given: str | bool | None) -> None:
    """Set an option of ``options`` if it was given.  The ValueError for a wrong value names the valid values."""
    if given is None or (given == "" and flag.option.check is None):
        return
    value: Any = flag.option.check(given) if flag.option.check else given
    setattr(options, flag.field, Path(os.path.abspath(value)) if flag.field == "log_dir" else value)


def _take_from_slurm(namespace: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Fill in options from the SLURM step.  Return the reasons why ``--slurm`` cannot be used."""
    if namespace.check and "SLURM_STEP_ID" not in environ:  # outside a step there is no node rank
        namespace.nnodes = namespace.nnodes or environ.get("SLURM_JOB_NUM_NODES")
        namespace.nproc_per_node = namespace.nproc_per_node or environ.get("SLURM_GPUS_ON_NODE")
        return []
    reasons = [
        f"--{name.replace('_', '-')}: leave it out; with --slurm, SLURM defines it"
        for name in ("nnodes", "node_rank")
        if getattr(namespace, name) is not None
    ]
    if namespace.join:
        reasons.append("--slurm is for the launch of a run: leave it out with --join; each launcher joins separately")
    if reasons:
        return reasons
    try:
        shape = shape_of(environ, namespace.master_addr)
    except ValueError as error:
        return [str(error)]
    if namespace.nproc_per_node is None:
        namespace.nproc_per_node = shape.get("nproc_per_node")
    for name in ("nnodes", "node_rank", "master_addr", "master_port"):
        setattr(namespace, name, getattr(namespace, name) or shape[name])
    return []


def _take_program(options: Options, words: Sequence[str]) -> list[str]:
    """Find the program of --no-python and the Python script that it runs, if any.  Return the mistakes."""
    if options.module:
        return ["--no-python and -m exclude each other: with --no-python, write python -m MODULE"]
    program = shutil.which(words[0]) or os.path.abspath(words[0])
    if why := readers.why_not_executed(program):
        return [f"--no-python {words[0]}: {why}"]
    options.script = program
    if (at := readers.script_behind_python(words)) is not None:
        options.module, options.wrapper = words[at] == "-m", (program, *words[1:at])
        options.script, *options.script_args = words[at + options.module :]
    return []


def _check_newcomers(options: Options) -> list[str]:
    """Return the mistakes in the options for replacements and for ``--join``; fill in ``options.coordinators``."""
    reasons = []
    recover = options.fault_tolerant
    if options.max_restarts and not recover:
        reasons.append(
            "--max-restarts: workers can be replaced only in a run with --recover among the script's arguments, or "
            "with --elastic; in any other run leave --max-restarts out"
        )
    reasons += _check_device_test(options)
    if not options.join:
        given = {"--recover-coordinator": options.recover_coordinator, "--world-size": options.world_size}
        reasons += [f"{name} is for --join: leave it out (or add --join)" for name, value in given.items() if value]
        return reasons
    if not recover:
        reasons.append(
            "--join: only a run with --recover or --elastic can be joined; give the script the arguments of that run"
        )
    if options.nnodes > 1 or options.node_rank > 0:
        reasons.append("--join: leave out --nnodes and --node-rank; each launcher joins separately")
    if not options.world_size:
        reasons.append("--join needs --world-size W, the number of workers that the run was launched with")
    if not options.master_port:
        reasons.append(
            "--join needs the run's store: --master-addr A and --master-port P, as the run prints at its start"
        )
    text = options.recover_coordinator or config_or_defaults(options.script_args).coordinator
    if text is None:
        reasons.append("--join needs --recover-coordinator HOST:PORT[,HOST:PORT...], as the run prints at its start")
        return reasons
    try:
        options.coordinators = tuple(parse_addresses(text))
    except ValueError as error:
        reasons.append(f"--recover-coordinator {text}: {error}")
    return reasons


def _check_device_test(options: Options) -> list[str]:
    """Return the mistakes in ``--device-test``; fill in ``options.device_test_command``."""
    if not options.device_test:
        return []
    if not options.max_restarts:
        return ["--device-test: devices are tested only before a replacement worker is started; add --max-restarts"]
    try:
        words = shlex.split(options.device_test)
    except ValueError as error:
        return [f"--device-test {options.device_test}: {error}"]
    if not words or (program := shutil.which(words[0])) is None:
        return [f"--device-test {options.device_test}: no such program on the PATH"]
    options.device_test_command = (program, *words[1:])
    return []


def check_files(options: Options) -> list[str]:
    """Return what is wrong with the script and the log folder; without ``--check``, create a missing log folder."""
    reasons = []
    if options.script is not None and (options.wrapper or not options.no_python):
        reasons += check_module(options.script) if options.module else check_script(options.script)
    if options.log_dir is not None and (why := readers.why_not_written(options.log_dir, tried=not options.check)):
        reasons.append(f"--log-dir {options.log_dir} cannot be written ({why}): choose a folder that you can write to")
    return reasons


def _unknown(token: str) -> str:
    name = token.partition("=")[0].replace("_", "-")
    if name in _TORCHRUN_HINTS:
        return f"option {token} of torchrun is not an option of recover-run: {_TORCHRUN_HINTS[name]}"
    if any(flag.name == name for flag in SCRIPT_FLAGS):
        return f"{token} is an option of the script: write it after SCRIPT"
    known = [flag.name for flag in FLAGS]
    nearest = [option for option in known if len(name) > 3 and option.startswith(name)]
    nearest += difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if nearest:
        return f"unknown option {token}: did you mean {nearest[0]}? (options of the script go after SCRIPT)"
    return f"unknown option {token}: options of the script go after SCRIPT; {MANUAL}"
