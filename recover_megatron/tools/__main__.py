"""recover-tools: access to the files and scripts that are shipped with the installed package.

recover-tools                        list the shipped files and their folders
recover-tools corpus [OPTIONS]       create a small corpus to train on, in data/corpus
recover-tools patch CHECKOUT         patch a Megatron-LM checkout to accept --recover
recover-tools gpu-checks [OPTIONS]   check the GPUs of this machine with this Python and its torch
recover-tools copy slurm FOLDER      copy files to edit: slurm, examples, patches, docs
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from recover_megatron import __version__

PACKAGE = Path(__file__).resolve().parents[1]
COPIED = {"slurm": "scripts/slurm", "examples": "examples", "patches": "patches", "docs": "docs"}
"""Name that ``copy`` accepts -> folder below ``root()``."""
RUN = {
    "corpus": [sys.executable, "scripts/prepare_corpus.py"],
    "patch": ["bash", "scripts/apply_patches.sh"],
    "gpu-checks": ["bash", "scripts/gpu_checks.sh"],
}
"""Command -> interpreter and script."""


def root() -> Path:
    """Return the folder with the shipped files: in an installed package ``shipped``, otherwise the source tree."""
    shipped = PACKAGE / "shipped"
    return shipped if shipped.is_dir() else PACKAGE.parent


def words_of(command: str, arguments: Sequence[str], files: Path) -> list[str]:
    """Return the words of the command line that runs the script of ``command`` with ``arguments``."""
    interpreter, script = RUN[command]
    # Without --out, the script would write into the package's folder, which may be read-only.
    default = ["--out", "data/corpus"] if command == "corpus" else []
    return [interpreter, str(files / script), *default, *arguments]


def listed(files: Path) -> str:
    lines = [f"{name:<12}{files / place}" for name, place in COPIED.items() if (files / place).is_dir()]
    return "\n".join(["recover-tools copy NAME FOLDER copies one of these:", *lines, "", str(__doc__).strip()])


def copy(name: str, folder: Path, files: Path) -> int:
    """Copy the shipped files ``name`` into ``folder`` and make the copy writable; return the exit status."""
    if (folder / name).exists():
        print(f"recover-tools: error: {folder / name} exists already: name another folder", file=sys.stderr)
        return 2
    try:
        shutil.copytree(files / COPIED[name], folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder / name, *(folder / name).rglob("*")):
            path.chmod(path.stat().st_mode | stat.S_IWUSR)  # writable, even if the package is read-only
    except OSError as error:  # shutil.Error holds a list of all failures
        why = error.strerror or error.args[0][0][2]
        print(f"recover-tools: error: {folder / name} cannot be written: {why}", file=sys.stderr)
        return 2
    print(folder / name)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of recover-tools; return the exit status, 0 or 2.

    For a command in ``RUN``, the script replaces this process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    files = root()
    if given and given[0] in RUN:
        words = words_of(given[0], given[1:], files)
        os.environ.setdefault("RECOVER_GPU_PYTHON", sys.executable)  # not a .venv, which may have another torch
        sys.stdout.flush()
        os.execvp(words[0], words)
    parser = argparse.ArgumentParser(
        prog="recover-tools", description=listed(files), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in RUN:
        commands.add_parser(name, add_help=False)
    copies = commands.add_parser("copy")
    copies.add_argument("name", choices=sorted(COPIED))
    copies.add_argument("folder", type=Path)
    args = parser.parse_args(given)
    if args.command == "copy":
        return copy(args.name, args.folder, files)
    print(listed(files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
