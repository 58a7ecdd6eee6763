"""The flags of recover-run, and every check that can be made before a process is started.

All problems are collected and reported together: a user who waits in a queue for nodes should not learn of them one by
one.  Everything after SCRIPT belongs to the script and is not looked at.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recover_megatron import __version__
from recover_megatron.arguments import RecoverConfig, config_from_argv, parse_addresses
from recover_megatron.errors import UserError
from recover_megatron.launch.script import check_module, check_script
from recover_megatron.launch.slurm_launch import shape_of

DEFAULT_ADDR = "127.0.0.1"
DEFAULT_PORT_SEVERAL_NODES = 29500
MANUAL = "recover-run --help lists the options"

_VALUE_OPTIONS = {
    "--nproc-per-node": ("N", "workers on this node (default: 1; with --slurm: its GPUs, where SLURM counts them)"),
    "--nnodes": ("N", "nodes; one recover-run is started on each (default: 1)"),
    "--node-rank": ("R", "which node this is, from 0; node 0 keeps the store (default: 0)"),
    "--master-addr": ("A", f"address of node 0 (default: {DEFAULT_ADDR})"),
    "--master-port": (
        "P",
        f"port of the store on node 0 (default: a free one; {DEFAULT_PORT_SEVERAL_NODES} for several nodes)",
    ),
    "--log-dir": ("DIR", "folder for worker-<id>.log and workers.json; made if missing"),
    "--grace-seconds": ("S", "time between SIGTERM and SIGKILL when the launch is stopped (default: 15)"),
    "--rendezvous-timeout": ("S", "how long the launchers of several nodes wait for each other (default: 300)"),
    "--max-restarts": (
        "N",
        "with --recover: how many workers this launcher starts in place of others that died while the run goes on, in "
        "all (default: 0)",
    ),
    "--recover-coordinator": ("HOST:PORT,...", "with --join: the coordinators of the run"),
    "--world-size": ("W", "with --join: the number of workers that the run was launched with"),
}
_SWITCHES = {
    "--join": "take part in a run that goes on, with --nproc-per-node workers more",
    "--slurm": "under srun, one task a node: the nodes, this node's rank, address and port of the store are SLURM's",
    "--module": "SCRIPT is the name of a module, as with python -m",
}
_SHORT = {"-m": "--module"}
_TORCHRUN_HINTS = {
    "--standalone": "leave it out: one node with a free port is the default",
    "--rdzv-endpoint": "use --master-addr and --master-port",
    "--rdzv-backend": "leave it out; use --master-addr and --master-port",
    "--rdzv-id": "leave it out: the launchers agree on an id by themselves",
    "--redirects": "use --log-dir: output is shown and kept",
    "--tee": "use --log-dir: output is shown and kept",
}


class UsageError(Exception):
    """The command cannot be started; ``reasons`` says, one line each, what to change."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = list(reasons)


@dataclass
class Options:
    """The parsed command line.  ``script`` is None only while reasons against it are collected."""

    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = DEFAULT_ADDR
    master_port: int = 0
    """0: take a free one."""
    log_dir: Path | None = None
    grace_seconds: float = 15.0
    rendezvous_timeout: float = 300.0
    module: bool = False
    max_restarts: int = 0
    join: bool = False
    slurm: bool = False
    coordinators: tuple[tuple[str, int], ...] = ()
    """Of the run to join."""
    world_size: int = 0
    """Of the run to join."""
    script: str | None = None
    script_args: list[str] = field(default_factory=list)

    def command(self) -> tuple[str, ...]:
        """What a worker executes."""
        return (sys.executable, *(["-m"] if self.module else []), str(self.script), *self.script_args)


def make_parser() -> argparse.ArgumentParser:
    """The parser, for ``--help`` and for reading the launcher's part of the command line."""
    parser = argparse.ArgumentParser(
        prog="recover-run",
        description="Start the workers of a training job on this node and stay with them: a worker that dies does "
        "not end the others, and no process outlives this one.",
        epilog="Everything after SCRIPT belongs to the script. Manual: docs/launcher.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    for name, (metavar, text) in _VALUE_OPTIONS.items():
        parser.add_argument(name, _underscored(name), metavar=metavar, help=text, default=None)
    for name, text in _SWITCHES.items():
        shorts = [short for short, long in _SHORT.items() if long == name]
        parser.add_argument(*shorts, name, action="store_true", help=text)
    # Only for the help text: the command line is split at SCRIPT before the parser sees it.
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        nargs="?",
        help="the training script (or module); pretrain_gpt_recover.py comes with recover-run, from any folder",
    )
    parser.add_argument("script_args", metavar="...", nargs="*", help="arguments of the script")
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[Options, list[str]]:
    """Read the command line.  Returns the options and the reasons against them.

    ``--help`` and ``--version`` print and exit with 0.
    ``environ``: SLURM's variables, which with ``--slurm`` say what the command line leaves out.
    """
    own, rest, reasons = _split(argv)
    namespace = make_parser().parse_args(own)
    if namespace.slurm:
        reasons += _take_from_slurm(namespace, environ)
    options = Options(module=namespace.module, join=namespace.join, slurm=namespace.slurm)
    read = _Numbers(namespace, reasons)
    options.nproc_per_node = read.whole("--nproc-per-node", 1, minimum=1)
    options.nnodes = read.whole("--nnodes", 1, minimum=1)
    options.node_rank = read.whole("--node-rank", 0, minimum=0)
    default_port = DEFAULT_PORT_SEVERAL_NODES if options.nnodes > 1 else 0
    options.master_port = read.whole("--master-port", default_port, minimum=0, maximum=65535)
    options.grace_seconds = read.seconds("--grace-seconds", 15.0)
    options.rendezvous_timeout = read.seconds("--rendezvous-timeout", 300.0)
    options.master_addr = namespace.master_addr or DEFAULT_ADDR
    options.log_dir = Path(os.path.abspath(namespace.log_dir)) if namespace.log_dir else None
    if rest:
        options.script, options.script_args = rest[0], rest[1:]
    if options.node_rank >= options.nnodes and not read.failed & {"--node-rank", "--nnodes"}:
        reasons.append(
            f"--node-rank {options.node_rank} is not below --nnodes {options.nnodes}: nodes are numbered from 0 to "
            f"{options.nnodes - 1}"
        )
    if options.nnodes > 1 and options.master_port == 0 and "--master-port" not in read.failed:
        reasons.append("--master-port 0 (any free port) works for one node only: name the same port on every node")
    options.max_restarts = read.whole("--max-restarts", 0, minimum=0)
    options.world_size = read.whole("--world-size", 0, minimum=1)
    if options.script is not None:
        reasons += _check_newcomers(options, namespace.recover_coordinator)
    return options, reasons


def _take_from_slurm(namespace: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Fill in what the step says; the reasons against that."""
    reasons = [
        f"--{name.replace('_', '-')}: leave it out; with --slurm it is SLURM's"
        for name in ("nnodes", "node_rank")
        if getattr(namespace, name) is not None
    ]
    if namespace.join:
        reasons.append("--slurm is for the launch of a run: leave it out with --join; each launcher joins for itself")
    if reasons:
        return reasons
    try:
        shape = shape_of(environ, namespace.master_addr)
    except ValueError as error:
        return [str(error)]
    namespace.nnodes, namespace.node_rank = str(shape.nnodes), str(shape.node_rank)
    namespace.master_addr = shape.master_addr
    namespace.master_port = namespace.master_port or str(shape.master_port)
    if namespace.nproc_per_node is None and shape.gpus:
        namespace.nproc_per_node = str(shape.gpus)
    return []


def _check_newcomers(options: Options, coordinators: str | None) -> list[str]:
    """The reasons against starting workers while the run goes on; fills in the coordinators of the run to join."""
    reasons = []
    recover = "--recover" in options.script_args
    if options.max_restarts and not recover:
        reasons.append(
            "--max-restarts: a worker can be started again only in a run with --recover among the script's arguments; "
            "without it leave the option out"
        )
    if not options.join:
        given = {"--recover-coordinator": coordinators, "--world-size": options.world_size}
        reasons += [f"{name} is for --join: leave it out (or add --join)" for name, value in given.items() if value]
        return reasons
    if not recover:
        reasons.append("--join: only a run with --recover can be joined; give the script the arguments of that run")
    if options.nnodes > 1 or options.node_rank > 0:
        reasons.append("--join: leave out --nnodes and --node-rank; each launcher joins for itself")
    if not options.world_size:
        reasons.append("--join needs --world-size W, the number of workers that the run was launched with")
    if not options.master_port:
        reasons.append(
            "--join needs the run's store: --master-addr A and --master-port P, as the run says at its start"
        )
    text = coordinators or _config(options.script_args).coordinator
    if text is None:
        reasons.append("--join needs --recover-coordinator HOST:PORT[,HOST:PORT...], as the run says at its start")
        return reasons
    try:
        options.coordinators = tuple(parse_addresses(text))
    except ValueError as error:
        reasons.append(f"--recover-coordinator {text}: {error}")
    return reasons


def _config(script_args: Sequence[str]) -> RecoverConfig:
    """The script's --recover-* flags; their defaults where one is bad, which the script refuses."""
    try:
        return config_from_argv(script_args)
    except UserError:
        return RecoverConfig()


def check_files(options: Options) -> list[str]:
    """The reasons against the script and the log folder, which is made if it is missing."""
    reasons = []
    if options.script is not None:
        reasons += check_module(options.script) if options.module else check_script(options.script)
    if options.log_dir is not None:
        try:
            options.log_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=options.log_dir):
                pass
        except OSError as error:
            reasons.append(
                f"--log-dir {options.log_dir} cannot be written ({error.strerror or error}): "
                "name a folder that you may write to"
            )
    return reasons


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Divide ``argv`` into the launcher's part (as ``--name=value``), SCRIPT with its arguments, and reasons."""
    own: list[str] = []
    index = 0
    while index < len(argv):
        token = argv[index]
        index += 1
        if token == "--":
            break
        if not token.startswith("-") or token == "-":
            index -= 1
            break
        if token in ("-h", "--help", "--version"):
            return [token], [], []
        name, equals, value = token.partition("=")
        name = _SHORT.get(name, _dashed(name))
        if name in _SWITCHES:
            if equals:
                return own, [], [f"{name} takes no value: write {name} alone"]
            own.append(name)
        elif name in _VALUE_OPTIONS:
            if not equals:
                if index == len(argv):
                    return own, [], [f"{name} needs a value: {name} {_VALUE_OPTIONS[name][0]}; {MANUAL}"]
                value = argv[index]
                index += 1
            own.append(f"{name}={value}")
        else:
            # Whether it takes a value is not known, so neither is where SCRIPT is: nothing after it can be checked.
            return own, [], [_unknown(token)]
    rest = list(argv[index:])
    return own, rest, [] if rest else ["no SCRIPT given: recover-run [options] SCRIPT [its arguments]"]


def _unknown(token: str) -> str:
    name = _dashed(token.partition("=")[0])
    if name in _TORCHRUN_HINTS:
        return f"option {token} of torchrun is not one of recover-run: {_TORCHRUN_HINTS[name]}"
    known = [*_VALUE_OPTIONS, *_SWITCHES]
    nearest = [option for option in known if len(name) > 3 and option.startswith(name)]
    nearest += difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if nearest:
        return f"unknown option {token}: did you mean {nearest[0]}? (options of the script go after SCRIPT)"
    return f"unknown option {token}: options of the script go after SCRIPT; {MANUAL}"


def _dashed(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def _underscored(name: str) -> str:
    return "--" + name[2:].replace("-", "_")


class _Numbers:
    """Reads numbers out of the namespace, noting which could not be read."""

    def __init__(self, namespace: argparse.Namespace, reasons: list[str]) -> None:
        self._namespace = namespace
        self._reasons = reasons
        self.failed: set[str] = set()

    def whole(self, name: str, default: int, minimum: int, maximum: int | None = None) -> int:
        text = getattr(self._namespace, name[2:].replace("-", "_"))
        if text is None:
            return default
        if text.strip().lstrip("-").isdecimal() and minimum <= int(text) <= (int(text) if maximum is None else maximum):
            return int(text)
        limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        return int(self._fail(name, f"{name} {text!r}: must be a whole number, {limits}", default))

    def seconds(self, name: str, default: float) -> float:
        text = getattr(self._namespace, name[2:].replace("-", "_"))
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if 0 <= value < 1e9:
            return value
        return self._fail(name, f"{name} {text!r}: must be a number of seconds, 0 or more", default)

    def _fail(self, name: str, reason: str, default: float) -> float:
        self.failed.add(name)
        self._reasons.append(reason)
        return default
