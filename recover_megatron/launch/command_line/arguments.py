"""Command line of recover-run, and all checks of it that are possible before a process is started.

All mistakes are reported together, because a user who waits in a queue for nodes should not find them one by one.
Everything after SCRIPT belongs to the script and is not checked here.

``parse`` makes the ``LaunchSpec``, whose fields define the options.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recover_megatron import __version__
from recover_megatron.arguments import FLAGS as SCRIPT_FLAGS
from recover_megatron.arguments import parse_addresses
from recover_megatron.launch.command_line import readers
from recover_megatron.launch.command_line.readers import check_module, check_script
from recover_megatron.launch.command_line.script import Script
from recover_megatron.launch.command_line.spec import DEFAULT_PORT_SEVERAL_NODES, FLAGS, LaunchSpec
from recover_megatron.launch.slurm import shape_of
from recover_megatron.launch.workers.states import REFUSED
from recover_megatron.options import Flag, add_options
from recover_megatron.variables import OF_A_WORKER

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

    ``spec``: None if the command line could not be parsed; ``reserved``: node 0's store socket; ``code``: exit code.
    """

    def __init__(
        self, reasons: Sequence[str], spec: LaunchSpec | None = None, reserved: socket.socket | None = None,
        code: int = REFUSED,
    ) -> None:  # fmt: skip
        super().__init__("; ".join(reasons))
        self.code = code
        self.reasons, self.spec, self.reserved = list(reasons), spec, reserved


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


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[LaunchSpec, list[str]]:
    """Read the command line.  Return the launch, and the reasons why it is refused (empty: none).

    ``--help`` and ``--version`` print and exit with 0.  For options that the command line leaves out, torchrun's
    variables in ``environ`` are used, and with ``--slurm`` SLURM's variables.  Options with a wrong value, and all
    options of a command line that cannot be divided, have their defaults.
    """
    environ = {name: value for name, value in environ.items() if name not in OF_A_WORKER}
    host = socket.gethostname()
    namespace, reasons = _divide(argv)
    if namespace is None:
        return LaunchSpec(host=host, environ=environ), reasons
    rest = namespace.script[1:] if namespace.script[:1] == ["--"] else namespace.script
    rest = rest if rest[:1] != [""] else []  # an unset variable in quotes: recover-run "$SCRIPT"
    if not rest and not reasons:
        reasons.append("no SCRIPT given: recover-run [options] SCRIPT [its arguments]")
    taken, against = readers.take_from_environment(namespace, environ)
    reasons += against
    if namespace.slurm:
        reasons += _take_from_slurm(namespace, environ)
    values, failed = dict[str, Any](), set[str]()
    for flag in FLAGS:
        try:
            values |= _read(flag, getattr(namespace, flag.dest))
        except ValueError as error:
            variable = readers.PET + flag.dest.upper()
            source = variable if variable in taken else flag.name
            reasons.append(f"{source} {getattr(namespace, flag.dest)!r}: {error}")
            failed.add(flag.name)
    if namespace.master_port is None and values.get("nnodes", 1) > 1:
        values["master_port"] = DEFAULT_PORT_SEVERAL_NODES
    spec = LaunchSpec(**values, host=host, environ=environ, taken=taken)
    if rest:
        words, changes = list(rest), dict[str, Any]()
        if spec.no_python:
            words, changes, against = _find_program(spec, rest)
            reasons += against
        spec = replace(spec, script=Script.read(words[0], words[1:], environ), **changes)
    if spec.node_rank >= spec.nnodes and not failed & {"--node-rank", "--nnodes"}:
        reasons.append(
            f"--node-rank {spec.node_rank} is not below --nnodes {spec.nnodes}: nodes are numbered from 0 to "
            f"{spec.nnodes - 1}"
        )
    if spec.nnodes > 1 and spec.master_port == 0 and "--master-port" not in failed:
        reasons.append("--master-port 0 (any free port) works for one node only: give the same port on every node")
    if spec.lease not in ("auto", "off") and spec.nnodes == 1 and "--nnodes" not in failed:
        reasons.append("--lease needs several nodes: leave it out")
    if spec.witness not in ("auto", "off") and spec.nnodes == 1 and "--nnodes" not in failed:
        reasons.append("--witness needs several nodes: leave it out")
    if rest:
        changes, against = _check_newcomers(spec)
        spec, reasons = replace(spec, **changes), reasons + against
    return spec, reasons


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


def _read(flag: Flag, given: str | bool | None) -> dict[str, Any]:
    """Return the field of an option and its value, if it was given.  A ValueError names the valid values."""
    if given is None or (given == "" and flag.option.check is None):
        return {}
    value: Any = flag.option.check(given) if flag.option.check else given
    return {flag.field: Path(os.path.abspath(value)) if flag.field == "log_dir" else value}


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


def _find_program(spec: LaunchSpec, words: Sequence[str]) -> tuple[list[str], dict[str, Any], list[str]]:
    """Find the program of --no-python and the Python script that it runs, if any.

    Return the words from the script (or the program) on, fields of the launch, and the mistakes.
    """
    if spec.module:
        mistake = "--no-python and -m exclude each other: with --no-python, write python -m MODULE"
        return list(words), {}, [mistake]
    program = shutil.which(words[0]) or os.path.abspath(words[0])
    if why := readers.why_not_executed(program):
        return list(words), {}, [f"--no-python {words[0]}: {why}"]
    if (at := readers.script_behind_python(words)) is None:
        return [program, *words[1:]], {}, []
    module = words[at] == "-m"
    return list(words[at + module :]), {"module": module, "wrapper": (program, *words[1:at])}, []


def _check_newcomers(spec: LaunchSpec) -> tuple[dict[str, Any], list[str]]:
    """Return fields for replacements and for ``--join``, and the mistakes in these options."""
    reasons = []
    recover = spec.fault_tolerant
    if spec.max_restarts and not recover:
        reasons.append(
            "--max-restarts: workers can be replaced only in a run with --recover among the script's arguments, or "
            "with --elastic; in any other run leave --max-restarts out"
        )
    if spec.fork_workers and not spec.waits:
        reasons.append(
            "--fork-workers: only a Python script that imports load() of recover_megatron at its top level, as "
            "pretrain_gpt_recover.py does, can be imported before its workers start; leave --fork-workers out"
        )
    fields, mistakes = _check_device_test(spec)
    reasons += mistakes
    if not spec.join:
        given = {"--recover-coordinator": spec.recover_coordinator, "--world-size": spec.joined_world_size}
        reasons += [f"{name} is for --join: leave it out (or add --join)" for name, value in given.items() if value]
        return fields, reasons
    if not recover:
        reasons.append(
            "--join: only a run with --recover or --elastic can be joined; give the script the arguments of that run"
        )
    if spec.nnodes > 1 or spec.node_rank > 0:
        reasons.append("--join: leave out --nnodes and --node-rank; each launcher joins separately")
    if not spec.joined_world_size:
        reasons.append("--join needs --world-size W, the number of workers that the run was launched with")
    if not spec.master_port:
        reasons.append(
            "--join needs the run's store: --master-addr A and --master-port P, as the run prints at its start"
        )
    text = spec.recover_coordinator or spec.script.recover.coordinator
    if text is None:
        reasons.append("--join needs --recover-coordinator HOST:PORT[,HOST:PORT...], as the run prints at its start")
        return fields, reasons
    try:
        fields["coordinators"] = tuple(parse_addresses(text))
    except ValueError as error:
        reasons.append(f"--recover-coordinator {text}: {error}")
    return fields, reasons


def _check_device_test(spec: LaunchSpec) -> tuple[dict[str, Any], list[str]]:
    """Return the field ``device_test_command``, and the mistakes in ``--device-test``."""
    if not spec.device_test:
        return {}, []
    if not spec.max_restarts:
        return {}, ["--device-test: devices are tested only before a replacement worker is started; add --max-restarts"]
    try:
        words = shlex.split(spec.device_test)
    except ValueError as error:
        return {}, [f"--device-test {spec.device_test}: {error}"]
    if not words or (program := shutil.which(words[0])) is None:
        return {}, [f"--device-test {spec.device_test}: no such program on the PATH"]
    return {"device_test_command": (program, *words[1:])}, []


def check_files(spec: LaunchSpec) -> list[str]:
    """Return what is wrong with the script and the log folder; without ``--check``, create a missing log folder."""
    reasons = []
    target = spec.script.target
    if target and (spec.wrapper or not spec.no_python):
        reasons += check_module(target) if spec.module else check_script(target)
    if spec.log_dir is not None and (why := readers.why_not_written(spec.log_dir, tried=not spec.check)):
        reasons.append(f"--log-dir {spec.log_dir} cannot be written ({why}): choose a folder that you can write to")
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
