"""The part of gpu_checks.sh that runs inside Python.  See gpu_checks.sh, and lib/gpu_check_list.py for the checks.

DIR/results.json    what each check has come to, written when it is over: --resume runs the others
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.gpu_check_list import CHECKS, NotRun, Place
from lib.gpu_training import Failed

from recover_megatron import __version__
from recover_megatron.hostdevice import CudaBroken, driver_device_count

SECONDS = 580.0
"""For all checks of one call: under ten minutes."""
NO_DEVICE = "not run: no CUDA device"
NOTHING_RUN = 3
"""Exit status when no check could be run."""


class Results:
    """What the checks have come to, kept in a file for the next call."""

    def __init__(self, file: Path, resume: bool) -> None:
        self._file = file
        self._rows: dict[str, list[str]] = json.loads(file.read_text()) if resume and file.exists() else {}

    def passed(self, name: str) -> list[str] | None:
        """[result, seconds, number] of a check that has passed in an earlier call."""
        row = self._rows.get(name)
        return row if row and row[0] == "ok" else None

    def put(self, name: str, row: list[str]) -> None:
        """Keep it."""
        self._rows[name] = row
        self._file.write_text(json.dumps(self._rows, indent=1))


def run(check: Callable[[Place], str], place: Place) -> tuple[str, str]:
    """(result, number) of one check."""
    if time.monotonic() > place.deadline - 10:
        return "FAILED: no time was left for it (--keep DIR --resume runs it now)", ""
    try:
        return "ok", check(place)
    except NotRun as why:
        return str(why), ""
    except Failed as failure:
        return f"FAILED: {failure}", ""
    except Exception as error:  # noqa: BLE001  whatever a check did not foresee is its failure, and not that of the others
        return f"FAILED: {type(error).__name__}: {error}", ""


def _row(*cells: str) -> None:
    print("| " + " | ".join(" ".join(cell.split()).replace("|", "/") for cell in cells) + " |", flush=True)


def _smi(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _memory_gib() -> float:
    text = _smi("memory.total")
    return float(text) / 1024 if text.replace(".", "").isdigit() else 0.0


def _machine() -> str:
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.backends.cuda.is_built() else "none"
    gpu = _smi("name,driver_version,memory.total") or "GPU not named: no nvidia-smi"
    versions = f"torch {torch.__version__}, NCCL {nccl}, Python {platform.python_version()}"
    return f"{datetime.date.today()}, {gpu}, {versions}, {os.cpu_count()} cores"


def why_not() -> tuple[str, int]:
    """(why the checks cannot be run, exit status); ("", 0): they can."""
    try:
        devices = driver_device_count()
    except CudaBroken as broken:
        return f"not run: the CUDA driver does not work: {broken}", 1
    if not devices:
        return NO_DEVICE, 0
    import torch

    return ("", 0) if torch.backends.cuda.is_built() else ("not run: this torch was built without CUDA", 1)


def main() -> int:
    """Run the checks and print the table; the exit status."""
    options = _options()
    reason, status = ("", 0) if options.rehearse else why_not()
    if not reason:
        print(
            "rehearsal on the host device: nothing here is about a GPU" if options.rehearse else _machine(), end="\n\n"
        )
    _row("check", "result", "seconds", "number")
    print("|---|---|--:|---|", flush=True)
    tried = False
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-checks-")))
        folder.mkdir(parents=True, exist_ok=True)
        place = Place(folder.resolve(), options.rehearse, time.monotonic() + options.seconds, _memory_gib())
        results = Results(folder / "results.json", options.resume)
        for name, check in CHECKS:
            if options.only.lower() not in name.lower():
                continue
            row = results.passed(name)
            if row is None:
                started = time.monotonic()
                result, number = (reason, "") if reason else run(check, place)
                spent = "" if result.startswith("not ") else f"{time.monotonic() - started:.0f}"
                row = [result, spent, number]
                results.put(name, row)
            _row(name, *row)
            tried = tried or not row[0].startswith("not ")
            status = status or int(row[0].startswith("FAILED"))
    return status if tried or status else NOTHING_RUN


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_checks.sh", description="Check recover_megatron on one NVIDIA GPU.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs, runs and results in DIR")
    parser.add_argument("--resume", action="store_true", help="with --keep: only the checks that have not passed there")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the checks that have this in their name")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all checks of this call (%(default)g)")
    parser.add_argument(
        "--rehearse", action="store_true", help="without a GPU, on the host device: tries the checks, tells of no GPU"
    )
    options = parser.parse_args()
    if options.resume and options.keep is None:
        parser.error("--resume needs --keep DIR, the folder of the call before")
    return options


if __name__ == "__main__":
    sys.exit(main())
