"""Checks of recover_megatron on NVIDIA GPUs, started by gpu_checks.sh.

Every check runs in separate processes with a deadline, so that the other checks still run if it hangs or crashes.  The
results are written to ``results.json`` in the folder of ``--keep``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python does not do this if PYTHONSAFEPATH is set

import torch
from lib.gpu_ranks import kills, one_queue, two
from lib.gpu_training import Failed, NotRun, Place, deaths, large, nvidia_smi, overlap, parity

from recover_megatron import __version__
from recover_megatron.hostdevice import CudaBroken, driver_device_count

NO_DEVICE = "not run: no CUDA device"
TP2 = "--tensor-model-parallel-size 2 --recover-allow-cross-node-tp --num-layers 2 --global-batch-size 6"
PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8"
EP2 = """--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-topk 2
    --disable-bias-linear --recover-allow-cross-node-tp"""
SHARDED = "--use-distributed-optimizer"
MIXED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --bf16"
HSDP = f"""--use-megatron-fsdp {SHARDED} --data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce
    --num-distributed-optimizer-instances 2 --ckpt-format fsdp_dtensor --no-gradient-reduce-div-fusion
    --disable-bias-linear --recover-allow-cross-node-tp"""
RING, HANG = "--recover-collective ring", "--recover-hang-timeout 15"
SAVED = f"{SHARDED} --save checkpoints --save-interval 2 --ckpt-format torch_dist"
CHECKS: list[tuple[str, Callable[[Place], str]]] = [
    ("queue: kernels behind an unfinished sum", one_queue),
    ("overlap: TP during sums, a death, a rejoin", overlap),
    ("2 ranks over NCCL, communicators kept", two),
    ("killed in sums", kills),
    ("DP 4, 2 killed", partial(deaths, "dp4", "", "1@3:backward#2,3@5:reduce-scatter", (1, 3), 2, 4)),
    ("TP 2, 2 killed", partial(deaths, "tp2", TP2, "1@3:backward#2,2@5:backward", (1, 2), 1, 4)),
    ("distributed optimizer, 1 killed", partial(deaths, "sharded", SHARDED, "1@3:backward#2", (1,), 3, 4)),
    ("a worker's device breaks", partial(deaths, "broken", "", "1@3:forward:device", (1,), 1, 2)),
    ("parity and iteration time, 1 worker", parity),
    ("bf16, overlap, 1 killed in its gather", partial(deaths, "bf16", MIXED, "1@3:param-gather", (1,), 3, 4)),
    ("PP 2, 1 killed", partial(deaths, "pp2", PP2, "1@3:backward#2", (1,), 1, 4)),
    ("experts over 2, 1 killed", partial(deaths, "ep2", EP2, "1@3:backward#2", (1,), 1, 4)),
    ("HSDP, 2 groups of 2, 1 killed", partial(deaths, "hsdp", HSDP, "1@3:backward#2", (1,), 1, 4)),
    ("ring, 1 killed in its sum", partial(deaths, "ring", RING, "1@3:reduce-scatter#2", (1,), 3, 4)),
    ("a hang", partial(deaths, "hang", HANG, "1@3:backward#2:stop", (1,), 3, 4)),
    ("checkpoints, 1 killed in one", partial(deaths, "saved", SAVED, "1@4:checkpoint", (1,), 3, 4)),
    ("a large model, a rejoin", large),
]
"""(Name, function) of each check, the most informative checks first."""


def run(check: Callable[[Place], str], place: Place) -> tuple[str, str]:
    """Run one check; return two texts for the table: the result, and the numbers that the check has measured."""
    if time.monotonic() > place.deadline - 10:
        return "FAILED: no time was left for this check; call again with --keep DIR --resume to run it", ""
    try:
        return "ok", check(place)
    except NotRun as why:
        return str(why), ""
    except Exception as error:  # noqa: BLE001  an unexpected error must not prevent the other checks
        return f"FAILED: {'' if isinstance(error, Failed) else f'{type(error).__name__}: '}{error}", ""


def _row(*cells: str) -> None:
    print("| " + " | ".join(" ".join(cell.split()).replace("|", "/") for cell in cells) + " |", flush=True)


def why_not() -> tuple[str, int, int]:
    """Return (reason why the checks cannot run, exit status, number of GPUs); the reason is "" if they can run."""
    try:
        gpus = driver_device_count()
    except CudaBroken as broken:
        return f"not run: the CUDA driver does not work: {broken}", 1, 0
    if gpus and not torch.backends.cuda.is_built():
        return "not run: this torch was built without CUDA", 1, gpus
    return "" if gpus else NO_DEVICE, 0, gpus


def main() -> int:
    """Run the checks and print the table; return the exit status."""
    tree = Path(__file__).resolve().parents[1].joinpath("pyproject.toml").is_file()
    prog = "gpu_checks.sh" if tree else "recover-tools gpu-checks"
    parser = argparse.ArgumentParser(prog=prog, description="Check recover_megatron on NVIDIA GPUs.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs, runs and results in DIR")
    parser.add_argument("--resume", action="store_true", help="run only the checks that have not passed in --keep DIR")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only the checks whose name contains TEXT")
    parser.add_argument("--seconds", type=float, default=900.0, help="time limit for all checks (default: %(default)g)")
    parser.add_argument("--rehearse", action="store_true", help="run the checks on the host device, without a GPU")
    options = parser.parse_args()
    if options.resume and options.keep is None:
        parser.error("--resume needs --keep DIR, the folder of the previous call")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a normal exit stops the child processes
    reason, status, gpus = ("", 0, 1) if options.rehearse else why_not()
    if options.rehearse:
        print("rehearsal on the host device: these results say nothing about a GPU\n")
    elif not reason:
        gpu = nvidia_smi("--query-gpu=name,driver_version,memory.total") or "unknown GPU: no nvidia-smi"
        print(f"{datetime.date.today()}, {gpu}, torch {torch.__version__}, Python {sys.version}\n")
    _row("check", "result", "seconds", "number")
    print("|---|---|--:|---|", flush=True)
    tried = False
    with tempfile.TemporaryDirectory(prefix="gpu-checks-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        place = Place(folder.resolve(), options.rehearse, time.monotonic() + options.seconds, gpus)
        file = folder / "results.json"
        rows: dict[str, list[str]] = json.loads(file.read_text()) if options.resume and file.exists() else {}
        for name, check in CHECKS:
            if options.only.lower() not in name.lower():
                continue
            if rows.get(name, [""])[0] != "ok":
                started = time.monotonic()
                result, number = (reason, "") if reason else run(check, place)
                rows[name] = [result, "" if result.startswith("not ") else f"{time.monotonic() - started:.0f}", number]
                file.write_text(json.dumps(rows, indent=1))
            _row(name, *rows[name])
            tried = tried or not rows[name][0].startswith("not ")
            status = status or int(rows[name][0].startswith("FAILED"))
    return status if tried or status else 3


if __name__ == "__main__":
    sys.exit(main())
