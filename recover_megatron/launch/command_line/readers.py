"""Readers of flag values, of SCRIPT and of the environment for recover-run, without torch.

The readers of values parse text and raise ValueError, which names the valid values.  ``--nproc-per-node gpu`` needs the
number of this host's GPUs, which are counted without torch: its import takes seconds and may open the devices.

SCRIPT must exist, with one exception: ``pretrain_gpt_recover.py`` works in any folder.  If the current folder has no
file of that name, recover-run starts the module that was installed with this package.

Other tools describe a launch in the environment::

    PET_NNODES, PET_NODE_RANK, ...        defaults of torchrun's options: recover-run uses them, too
    RANK and WORLD_SIZE, OMPI_*, PMI_*    this process is one of several: unless --nnodes or --slurm is given, the
                                          launch is refused, because each process would train separately
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
"""Folder in which NVIDIA's driver has a subfolder for each GPU."""


def count_gpus(environ: Mapping[str, str], proc: Path = PROC) -> int:
    """Return the number of usable GPUs: the GPUs in CUDA_VISIBLE_DEVICES if it is set, else all GPUs of the driver."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = [word.strip() for word in visible.split(",")]
        # As in CUDA, entries after an invalid device are ignored.
        return next((n for n, word in enumerate(listed) if word in ("", "-1", "NoDevFiles")), len(listed))
    try:
        return sum(1 for _ in proc.iterdir())
    except OSError:
        return 0


def workers_by_word(text: str, environ: Mapping[str, str], proc: Path = PROC) -> int | None:
    """Return the number of workers that ``text`` (gpu, cpu or auto, as in torchrun) means here; None for other text.

    Raises ValueError for gpu if this host has no GPU.
    """
    count = count_gpus(environ, proc)
    if text == "gpu" and count == 0:
        raise ValueError("this host has no GPU (see CUDA_VISIBLE_DEVICES and NVIDIA's driver): give a number, or cpu")
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
    """Read ``--lease``: auto, off, or a path, which becomes absolute."""
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
    """Read ``--nnodes``; accept torchrun's MIN:MAX only if both are equal."""
    least, colon, most = text.partition(":")
    if not colon:
        return whole(1)(text)
    if whole(1)(least) > whole(1)(most):
        raise ValueError("MIN is above MAX")
    if int(least) != int(most):
        raise ValueError(
            f"--nnodes MIN:MAX is not supported: a launch needs a fixed number of nodes. Give --nnodes {most}: the run "
            "continues after the loss of nodes, down to the script's --recover-min-replicas. Or give --nnodes "
            f"{least}, with --recover-max-replicas N among the script's arguments: further nodes can join at any time "
            "with the command recover-run --join ... that the launch prints"
        )
    return int(least)


INSTALLED = {"pretrain_gpt_recover.py": "pretrain_gpt_recover"}
"""File name of each script that setup.py installs as a module -> name of that module."""


RUNNER = "recover_megatron.megatron_hooks"
"""Package that runs another script with support for --recover (docs/integrate.md)."""


def takes_runner(script: str, module: bool) -> bool:
    """Return whether to run ``script`` through RUNNER: it is Python source (any file name) outside of this package."""
    if Path(script).stem in INSTALLED.values():
        return False
    if module:
        return script.split(".")[0] != RUNNER.split(".")[0]
    return Path(script).suffix not in (".pyc", ".pyz", ".zip")


def installed_module(script: str) -> tuple[str, str] | None:
    """Return the installed module for the bare name ``script``, and the module's file.

    Return None for any other script, if the current folder has a file of that name, or if the module is not installed.
    """
    if script not in INSTALLED or os.path.lexists(script):
        return None
    spec = _find_module(INSTALLED[script])
    return (INSTALLED[script], str(spec.origin)) if spec is not None else None


def check_script(script: str) -> list[str]:
    """Return the reasons why the file (or folder) ``script`` cannot be run."""
    path = Path(script)
    if path.name in ("python", "python3", "torchrun", "recover-run") and not path.exists():
        return [f"SCRIPT is {script}: leave it out and give the Python script; {sys.executable} runs it"]
    if path.is_dir():
        return [] if (path / "__main__.py").is_file() else [f"script {script} is a folder without a __main__.py"]
    if not path.exists():
        nearest = difflib.get_close_matches(path.name, _names_in(path.parent), n=1)
        hint = f"; did you mean {path.parent / nearest[0]}?" if nearest else ""
        if shutil.which(script):
            hint = f"; to start the script through the program {script}, write --no-python before it"
        if path.stem in INSTALLED.values():
            hint = f"; to run the installed script, give its bare name, {path.stem}.py"
        return [f"script {script} does not exist (looked for {path.absolute()}){hint}"]
    if _is_other_program(path):
        return [f"script {script} is not written in Python: to execute it directly, write --no-python before it"]
    return [] if os.access(path, os.R_OK) else [f"script {script} cannot be read: check its permissions"]


def _is_other_program(path: Path) -> bool:
    """Return whether ``path`` is a shell script or a binary, in which Python would find a SyntaxError."""
    try:
        with path.open("rb") as file:
            first = file.readline(256)
            if re.match(rb"#!.*\b\w*sh\b", first):
                ast.parse(file.read())  # a few shell scripts are also valid Python
            return first.startswith(b"\x7fELF")
    except OSError:
        return False
    except (SyntaxError, ValueError):
        return True


def why_not_executed(program: str) -> str:
    """Return why the kernel would not execute the file ``program``; empty if no reason is found."""
    if not os.path.isfile(program):
        return "no such program, here or on the PATH"
    if not os.access(program, os.X_OK):
        return f"it is not executable: chmod +x {program}"
    with suppress(OSError), open(program, "rb") as file:  # it may be executable but not readable
        first = file.readline(256)
        interpreter = os.fsdecode(b"".join(first[2:].split()[:1]))
        if first[:2] == b"#!" and not os.access(interpreter, os.X_OK):
            return f"its interpreter {interpreter} does not exist"
        if first.isascii() and first[:2] != b"#!":
            return "it is a text file without an interpreter: make its first line #!/bin/sh, or another interpreter"
    return ""


def script_behind_python(words: Sequence[str]) -> int | None:
    """Return the index of the Python script in the command ``words``; for ``python -m MODULE``, the index of ``-m``.

    Return None if no Python script is recognized.
    """
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
        return [f"module {module} is a package without a __main__.py: name the module in it to run"]
    return []


PRETRAIN = (("megatron.training", "megatron.training.training"), "pretrain")
LOAD = (("recover_megatron.megatron_hooks.entry.program",), "load")


@cache
def imports(script: str, modules: tuple[str, ...], name: str, *, top_level: bool = False) -> bool:
    """Return whether the file or module ``script`` imports ``name`` from one of ``modules``.

    ``top_level``: True to ignore imports inside functions and conditions.
    """
    found = None if os.path.lexists(script) else _find_module(script)
    try:
        module = ast.parse(Path(found.origin or "" if found else script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False  # the script does not exist here, or is not Python source code
    nodes = [node for node in (module.body if top_level else ast.walk(module)) if isinstance(node, ast.ImportFrom)]
    return any(alias.name == name for node in nodes if node.module in modules for alias in node.names)


def why_not_written(folder: Path, *, tried: bool = False) -> str:
    """Return why this process cannot write into ``folder``, which may not exist yet; empty if no reason is found.

    If ``tried`` is True, write to the folder as a test.  If False, create nothing; then errors that only a write shows
    (a full disk) are not found.
    """
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    if not existing.is_dir():
        return f"{existing} is not a folder"
    if os.access(existing, os.W_OK | os.X_OK):
        return why_not_used(folder) if tried else ""
    read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if read_only else errno.EACCES)


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _find_module(module: str) -> ModuleSpec | None:
    """Look for ``module`` where ``python -m`` does, first in the current folder, but import nothing."""
    first, *rest = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(first, [os.getcwd(), *sys.path])
    if spec is None and first.isidentifier():
        spec = importlib.util.find_spec(first)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # Search for one part of the name at a time: a search for the full name would import the parent packages.
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
    """Fill in, from ``PET_*`` variables, options that the command line leaves out.

    Return the used variables by name, and the reasons why this environment permits no launch.  With ``--slurm`` or
    ``--join``, only the options in TAKEN_HERE are filled in, because the nodes are known from another source.
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
            f"{PET}NNODES is {namespace.nnodes}, but the rank of this node is unknown: give --node-rank R (or set "
            f"{PET}NODE_RANK), from 0"
        ]
    if namespace.nnodes is not None or elsewhere:
        return taken, []
    return taken, [_one_of_several(environ, *pair) for pair in SIZE_AND_RANK if _is_one_of_several(environ, *pair)][:1]


def _is_one_of_several(environ: Mapping[str, str], size: str, rank: str) -> bool:
    """Return whether the variables ``size`` and ``rank`` show that this process is one of several."""
    value = environ.get(size, "")
    return rank in environ and value.isdecimal() and int(value) > 1


def _one_of_several(environ: Mapping[str, str], size: str, rank: str) -> str:
    flags = f"--nnodes {environ[size]} --node-rank {environ[rank]}"
    flags += f" --master-addr {environ.get('MASTER_ADDR') or 'A'} --master-port {environ.get('MASTER_PORT') or 'P'}"
    if "SLURM_STEP_ID" in environ:
        flags = "--slurm"
    return (
        f"{rank} {environ[rank]} and {size} {environ[size]} are in the environment: this is one of several processes, "
        f"each of which would train alone. If each is on a different node, start recover-run there with {flags}; or "
        "give --nnodes 1 for a separate launch"
    )
