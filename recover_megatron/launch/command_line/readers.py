"""What recover-run reads besides its flags: their values, SCRIPT, and the environment; all without torch.

The readers of values take text and raise ValueError with what it must be.  The words of ``--nproc-per-node`` need the
number of GPUs of this host, which is counted without torch: importing it takes seconds, and may open the devices.

SCRIPT must be there; ``recover-run ... pretrain_gpt_recover.py ...`` works in any folder: a file of that name in the
current one is run, else the module that was installed with this package.

Others have put into the environment what the shape of a launch is, or what looks like one::

    PET_NNODES, PET_NODE_RANK, ...        the defaults of the options, as for torchrun: taken
    RANK and WORLD_SIZE, OMPI_*, PMI_*    this process is one of several: a launch of one node is refused then, unless
                                          --nnodes or --slurm says what is meant; each would train alone
"""

from __future__ import annotations

import ast
import difflib
import errno
import importlib.machinery
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from recover_megatron.log_writer import why_not_used

PROC = Path("/proc/driver/nvidia/gpus")
"""NVIDIA's driver has a folder here for each GPU."""


def count_gpus(environ: Mapping[str, str], proc: Path = PROC) -> int:
    """How many GPUs processes here may use: those of CUDA_VISIBLE_DEVICES if set, else all that the driver has."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = [word.strip() for word in visible.split(",")]
        # As CUDA reads it: what comes behind an entry that means no device is not seen.
        return next((n for n, word in enumerate(listed) if word in ("", "-1", "NoDevFiles")), len(listed))
    try:
        return sum(1 for _ in proc.iterdir())
    except OSError:
        return 0


def workers_by_word(text: str, environ: Mapping[str, str], proc: Path = PROC) -> int | None:
    """What torchrun's words for ``--nproc-per-node`` mean here; None: ``text`` is none of them.  Raises ValueError."""
    count = count_gpus(environ, proc)
    if text == "gpu" and count == 0:
        raise ValueError("this host has no GPU (CUDA_VISIBLE_DEVICES, NVIDIA's driver): give a number, or cpu")
    words = {"gpu": count, "cpu": len(os.sched_getaffinity(0)), "auto": count or len(os.sched_getaffinity(0))}
    return words.get(text)


def whole(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        if text.strip().lstrip("-").isdecimal() and minimum <= int(text) <= (int(text) if maximum is None else maximum):
            return int(text)
        limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"must be a whole number, {limits}")

    return read


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ValueError("must be a number of seconds, 0 or more")
    return value


def lease(text: str) -> str:
    """Reads ``--lease``: auto, off, or a path, which becomes absolute."""
    if text in ("auto", "off"):
        return text
    if not os.path.basename(text) or os.path.isdir(text):
        raise ValueError("must be auto, off, or the path of a file")
    if not os.path.isdir(os.path.dirname(os.path.abspath(text))):
        raise ValueError("its folder does not exist")
    return os.path.abspath(text)


def one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be {', '.join(words[:-1])} or {words[-1]}")
        return text

    return read


def workers_here(text: str) -> int:
    count = workers_by_word(text, os.environ)
    try:
        return whole(1)(text) if count is None else count
    except ValueError as error:
        raise ValueError(f"{error}; or gpu, cpu or auto") from None


def nodes(text: str) -> int:
    """Reads ``--nnodes``; of torchrun's MIN:MAX only what means one number."""
    least, colon, most = text.partition(":")
    if not colon:
        return whole(1)(text)
    if whole(1)(least) > whole(1)(most):
        raise ValueError("MIN is above MAX")
    if int(least) != int(most):
        raise ValueError(
            f"a run is launched with all of its nodes, for whose number batch and layout are checked. Give --nnodes "
            f"{most}: the run goes on when nodes are lost, down to the script's --recover-min-replicas. Or --nnodes "
            f"{least}, with --recover-max-replicas N among the script's arguments: further nodes come at any time, by "
            "the command recover-run --join ... that the launch prints"
        )
    return int(least)


INSTALLED = {"pretrain_gpt_recover.py": "pretrain_gpt_recover"}
"""Scripts that setup.py installs as modules."""


RUNNER = "recover_megatron.megatron_hooks"
"""The package that runs another script, so that it takes --recover (docs/patches.md)."""


def takes_runner(script: str, module: bool) -> bool:
    """Whether a script is Python's source, as it may be by any name, and none of this package's: these need none."""
    if Path(script).stem in INSTALLED.values():
        return False
    if module:
        return script.split(".")[0] != RUNNER.split(".")[0]
    return Path(script).suffix not in (".pyc", ".pyz", ".zip")


def installed_module(script: str) -> tuple[str, str] | None:
    """The module to run for the bare name ``script`` and where it lies; None: a file here, or nothing of ours."""
    if script not in INSTALLED or os.path.lexists(script):
        return None
    spec = _find_module(INSTALLED[script])
    return (INSTALLED[script], str(spec.origin)) if spec is not None else None


def check_script(script: str) -> list[str]:
    """The reasons against running the file (or folder) ``script``."""
    path = Path(script)
    if path.name in ("python", "python3", "torchrun", "recover-run") and not path.exists():
        return [f"SCRIPT is {script}: leave it out, and give the script itself; it is run by {sys.executable}"]
    if path.is_dir():
        return [] if (path / "__main__.py").is_file() else [f"script {script} is a folder without a __main__.py"]
    if not path.exists():
        nearest = difflib.get_close_matches(path.name, _names_in(path.parent), n=1)
        hint = f"; did you mean {path.parent / nearest[0]}?" if nearest else ""
        if shutil.which(script):
            hint = f"; to start the script by the program {script} write --no-python before it"
        if path.stem in INSTALLED.values():
            hint = f"; the installed one is run by its bare name, {path.stem}.py"
        return [f"script {script} does not exist (looked for {path.absolute()}){hint}"]
    if _is_other_program(path):
        return [f"script {script} is not written in Python: to execute it as it is write --no-python before it"]
    return [] if os.access(path, os.R_OK) else [f"script {script} cannot be read: check its permissions"]


def _is_other_program(path: Path) -> bool:
    """Tell a shell script or a binary, at which Python would end with a SyntaxError."""
    try:
        with path.open("rb") as file:
            first = file.readline(256)
            if re.match(rb"#!.*\b\w*sh\b", first):
                ast.parse(file.read())  # a few are both
            return first.startswith(b"\x7fELF")
    except OSError:
        return False
    except (SyntaxError, ValueError):
        return True


def why_not_executed(program: str) -> str:
    """Say why the kernel would not execute the file ``program``; empty: nothing speaks against it."""
    if not os.path.isfile(program):
        return "there is no such program, here or on the PATH"
    if not os.access(program, os.X_OK):
        return f"it may not be executed: chmod +x {program}"
    with suppress(OSError), open(program, "rb") as file:  # that may be executed, and not read
        first = file.readline(256)
        interpreter = os.fsdecode(b"".join(first[2:].split()[:1]))
        if first[:2] == b"#!" and not os.access(interpreter, os.X_OK):
            return f"its interpreter {interpreter} is not there"
        if first.isascii() and first[:2] != b"#!":
            return "it is a text without an interpreter: let its first line be #!/bin/sh, or as it needs"
    return ""


def script_behind_python(words: Sequence[str]) -> int | None:
    """Find the script that Python runs in a command, or the ``-m`` before a module: its place; None: nothing tells."""
    at = next((at for at, word in enumerate(words, 1) if re.fullmatch(r"python[\d.]*", Path(word).name)), len(words))
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "-c", "-m"):
        at += 2 if words[at] in ("-W", "-X") else 1
    found = words[at : at + 2]
    return at if found and found[0] not in ("-", "-c") and found != ["-m"] else None


def check_module(module: str) -> list[str]:
    spec = _find_module(module)
    if spec is None:
        bare = f" (write -m {module[:-3]})" if module.endswith(".py") else ""
        return [f"module {module} is not found{bare}: check its name, and that it is installed or in PYTHONPATH"]
    if spec.submodule_search_locations is not None and _find_module(f"{module}.__main__") is None:
        return [f"module {module} is a package without a __main__.py: name the module in it that is to be run"]
    return []


@cache
def imports_pretrain(script: str) -> bool:
    """Whether the file or module ``script`` imports Megatron's ``pretrain`` by name."""
    found = None if os.path.lexists(script) else _find_module(script)
    try:
        nodes = list(ast.walk(ast.parse(Path(found.origin or "" if found else script).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return False  # it is not here, or no source
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(
        node.module in ("megatron.training", "megatron.training.training")
        and "pretrain" in [its.name for its in node.names]
        for node in imports
    )


def why_not_written(folder: Path, *, tried: bool = False) -> str:
    """Why nobody here can write into ``folder``, which may have to be made; empty: nothing speaks against it.

    Unless it is to be ``tried``, nothing is made, so what only shows then (a full disk) is not seen.
    """
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        return f"{there} is no folder"
    if os.access(there, os.W_OK | os.X_OK):
        return why_not_used(folder) if tried else ""
    read_only = os.statvfs(there).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if read_only else errno.EACCES)


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _find_module(module: str) -> ModuleSpec | None:
    """Look for ``module`` without importing anything, as ``python -m`` would: the current folder first."""
    first, *rest = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(first, [os.getcwd(), *sys.path])
    if spec is None and first.isidentifier():
        spec = importlib.util.find_spec(first)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its own name: of a folder without __init__.py in another one that other has to be imported.
        spec = importlib.machinery.PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


PET = "PET_"
TAKEN_HERE = ("nproc_per_node",)
TAKEN = ("nnodes", "node_rank", "master_addr", "master_port", *TAKEN_HERE)
SIZE_AND_RANK = (
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
)


def take_from_environment(namespace: Any, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Fill in what ``PET_*`` say and the command line does not.

    Returns what was taken, by variable, and the reasons against a launch in this environment.
    A launch under ``--slurm``, or one that joins a run, has its shape from elsewhere.
    """
    elsewhere = namespace.slurm or namespace.join
    taken = {}
    for name in TAKEN_HERE if elsewhere else TAKEN:
        variable = PET + name.upper()
        if getattr(namespace, name) is None and environ.get(variable):
            taken[variable] = environ[variable]
            setattr(namespace, name, environ[variable])
    if PET + "NNODES" in taken and namespace.nnodes.split(":")[-1] != "1" and namespace.node_rank is None:
        return taken, [
            f"{PET}NNODES is {namespace.nnodes}, and nothing says which node this is: give --node-rank R (or set "
            f"{PET}NODE_RANK), from 0"
        ]
    if namespace.nnodes is not None or elsewhere:
        return taken, []
    return taken, [_one_of_several(environ, *pair) for pair in SIZE_AND_RANK if _tells(environ, *pair)][:1]


def _tells(environ: Mapping[str, str], size: str, rank: str) -> bool:
    """Whether by these variables this process is one of several."""
    value = environ.get(size, "")
    return rank in environ and value.isdecimal() and int(value) > 1


def _one_of_several(environ: Mapping[str, str], size: str, rank: str) -> str:
    flags = f"--nnodes {environ[size]} --node-rank {environ[rank]}"
    flags += f" --master-addr {environ.get('MASTER_ADDR') or 'A'} --master-port {environ.get('MASTER_PORT') or 'P'}"
    if "SLURM_STEP_ID" in environ:
        flags = "--slurm"
    return (
        f"{rank} {environ[rank]} and {size} {environ[size]} are in the environment: this is one of several, each of "
        f"which would train alone. Start one recover-run on each node, with {flags} where these are nodes; or give "
        "--nnodes 1 for a launch of its own"
    )
