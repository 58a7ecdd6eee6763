"""Quickstart: train on the CPU, kill a worker in the middle of a step, and compare with a run without a death.

1. Create a corpus.
2. Train; worker ``VICTIM`` is killed in the backward pass of an iteration.
3. Train again without a death (the *reference*).
4. Write report.html, and compare both runs.  If the death has changed more than the order of additions, the exit
   status is 1.

quickstart.sh starts this script in .venv.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import prepare_corpus
from lib.progress import Progress, recoveries

from recover_megatron import __version__
from recover_megatron.report.full import main as report
from recover_megatron.report.run_dir import compare, read_run
from recover_megatron.run_log.events import EVENTS_FILE, Lines
from recover_megatron.run_log.steps import StepRecord

ROOT = Path(__file__).resolve().parents[1]
SEQUENCE = 128
MICRO_BATCH = 2
LEAST_MICROBATCHES = 8
POLL_SECONDS = 0.3
TAIL_LINES = 25
VICTIM = 1
"""Id of the worker that is killed."""
ROUNDING = 1e-4
"""Maximum relative difference of the grad norms in the iteration of the death.

Another order of additions causes a far smaller difference, a lost microbatch (one of 8) a far larger one.
"""

# The flags of the model and the optimizer were tuned for a low loss after a minute on two cores.
MODEL = shlex.split(
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --position-embedding-type rope --disable-bias-linear "
    "--init-method-std 0.06 --attention-dropout 0 --hidden-dropout 0"
)
OPTIMIZER = shlex.split(
    "--lr 3e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --adam-beta2 0.95 --weight-decay 0.1 "
    "--clip-grad 1.0"
)
# Flags that Megatron needs when TransformerEngine and Apex are not installed.
WITHOUT_KERNELS = shlex.split(
    "--recover-device cpu --distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--no-rope-fusion --attention-softmax-in-fp32"
)


class Stop(Exception):
    """The quickstart cannot continue; the command prints the message and exits with status 1."""


def microbatches(workers: int) -> int:
    """Return the number of microbatches per iteration: at least ``LEAST_MICROBATCHES``, and equally many per worker."""
    return -(-LEAST_MICROBATCHES // workers) * workers


def victims_iteration(args: argparse.Namespace) -> int | None:
    """Return the iteration in which worker ``VICTIM`` is killed; None if no worker is killed."""
    if args.no_failure or args.resume or args.workers < 2:
        return None
    return max(1, args.iters * 2 // 5)


def training_command(
    args: argparse.Namespace, run: Path, data_flags: Sequence[str], fault: int | None = None, save: bool = True
) -> list[str]:
    """Return the complete command line of a training, as a user would type it in the root of the checkout.

    ``fault``: iteration in whose backward pass worker ``VICTIM`` is killed; None: no worker is killed.  ``save``: write
    checkpoints.
    """
    batch = MICRO_BATCH * microbatches(args.workers)
    launcher = [str(Path(sys.executable).with_name("recover-run")), "--nproc-per-node", str(args.workers)]
    command = [*launcher, "--log-dir", str(run), "pretrain_gpt_recover.py", "--recover"]
    command += [*WITHOUT_KERNELS, *MODEL, *OPTIMIZER, *data_flags]
    command += ["--seq-length", str(SEQUENCE), "--max-position-embeddings", str(SEQUENCE)]
    command += ["--micro-batch-size", str(MICRO_BATCH), "--global-batch-size", str(batch)]
    command += ["--train-iters", str(args.iters), "--log-interval", "10", "--num-workers", "0"]
    # One evaluation at the end of the training; checkpoints in the middle and at the end.
    command += ["--eval-interval", str(args.iters + 1), "--eval-iters", "16"]
    if save:
        command += ["--save", str(run / "checkpoint"), "--save-interval", str(max(1, args.iters // 2))]
    if fault is not None:
        command += ["--recover-inject", f"{VICTIM}@{fault}:backward:kill"]
    if args.resume:
        command += ["--load", str(run / "checkpoint"), "--override-opt-param-scheduler"]
    return [*command, *args.megatron]


def claim(run: Path, resume: bool) -> Any:
    """Create the run folder and lock it; without ``resume``, remove the files of an earlier quickstart from it.

    Returns the open lock file, which the caller must keep open.  Raises Stop.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        held = (run / ".lock").open("a")
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        why = f"another quickstart is running in {run}; wait for it, or choose another folder with --out"
        raise Stop(why) from None
    except OSError as error:
        raise Stop(f"cannot write to {run}: {error.strerror}; choose another folder with --out") from error
    before = [path for path in run.iterdir() if path.name != ".lock"]
    if resume:
        if not checkpointed(run):
            raise Stop(f"--resume: no checkpoint in {run}; run without --resume to start from the beginning")
    elif before and not (run / "run.json").is_file():
        raise Stop(f"{run} contains files that are not from a quickstart; choose another folder with --out")
    else:
        for path in before:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return held


def checkpointed(run: Path) -> int:
    """Return the iteration of the newest checkpoint in the run folder; 0 if it has no checkpoint."""
    tracker = run / "checkpoint" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.is_file() else 0


def new_steps(lines: Lines, after: int) -> list[StepRecord]:
    """Return the steps that were added to the file since the last call.

    Steps up to iteration ``after`` are left out, because a resumed run may write them again.
    """
    steps = [StepRecord.from_fields(fields) for fields in lines.new()[1]]
    return [step for step in steps if step.iteration > after]


def train(command: Sequence[str], run: Path, progress: Progress) -> int:
    """Run the training to its end and print its progress; return its exit status.

    If an exception or a signal ends this function, it stops the training.
    """
    steps, events, resumed = Lines(run / "steps.jsonl"), Lines(run / EVENTS_FILE), checkpointed(run)
    for lines in (steps, events):
        lines.new()  # skips the lines that an earlier run has written
    workers = int(command[command.index("--nproc-per-node") + 1])
    environment = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // workers)), **os.environ}
    with (run / "console.log").open("ab") as console:
        process = subprocess.Popen(  # in a separate session, so that Ctrl-C does not reach it directly
            command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, env=environment, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
    try:
        print(progress.header(), flush=True)
        while True:
            ended = process.poll() is not None
            for line in (*recoveries(events), *progress.lines(new_steps(steps, resumed))):
                print(line, flush=True)
            if ended:
                return process.returncode
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            print("quickstart: stopping the training", file=sys.stderr)
            process.terminate()
            process.wait()


def corpus_of(folder: Path | None) -> dict[str, Any]:
    """Return the content of corpus.json in ``folder``; None: the default corpus, which is created if it is missing.

    Raises Stop.
    """
    if folder is None:
        if prepare_corpus.main(["--out", str(prepare_corpus.LIBRARY_OUT)]) != 0:
            raise Stop("the corpus could not be created (see above)")
        folder = prepare_corpus.LIBRARY_OUT
    corpus = prepare_corpus.load_if_complete(folder)
    if corpus is None:
        raise Stop(
            f"--corpus {folder}: this folder has no complete corpus; create one with\n"
            f"  {sys.executable} {ROOT / 'scripts' / 'prepare_corpus.py'} --input TEXT... --out {folder}"
        )
    return corpus


def settings_of(command: Sequence[str]) -> dict[str, Any]:
    """Return the settings of the training ``command`` that the report needs.

    If a flag occurs several times, its last value counts, as in Megatron.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--seq-length", "--micro-batch-size", "--global-batch-size", "--train-iters"):
        parser.add_argument(name, type=int)
    known = parser.parse_known_args(list(command))[0]
    return {
        "command": list(command),
        "seq_length": known.seq_length,
        "iterations": known.train_iters,
        "microbatches": known.global_batch_size // known.micro_batch_size,
    }


def run_training(command: Sequence[str], run: Path, corpus: dict[str, Any], rows: int = 25) -> int:
    """Train, and write the files that the report needs to the folder ``run``; return the training's exit status.

    ``rows``: approximate number of lines of progress to print.
    """
    settings = settings_of(command)
    run.mkdir(exist_ok=True)
    (run / "corpus.json").write_text(json.dumps(corpus, indent=2) + "\n", encoding="utf-8")
    (run / "run.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    began = time.monotonic()
    progress = Progress(settings["iterations"], corpus["unigram_entropy_nats"]["valid_under_train"], rows)
    status = train(command, run, progress)
    settings |= {"exit_code": status, "seconds": round(time.monotonic() - began, 1)}
    (run / "run.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    print()
    if status != 0:
        output = (run / "console.log").read_text(encoding="utf-8", errors="replace").splitlines()
        print(*output[-TAIL_LINES:], sep="\n", file=sys.stderr)
        print(f"quickstart: the training ended with exit code {status}; its last output is above", file=sys.stderr)
    return status


def compare_runs(run: Path, reference: Path, fault: int) -> list[str]:
    """Compare ``run``, the run with the death, with ``reference``, the run without; return the lines to print.

    Raises Stop if worker ``VICTIM`` was not killed, if the other workers did not finish the step of iteration
    ``fault``, or if the grad norms of this iteration differ by more than ``ROUNDING``.
    """
    steps = {step.iteration: step for step in read_run(run).steps}
    ends = {worker["worker_id"]: worker for worker in json.loads((run / "workers.json").read_bytes())}
    if ends[VICTIM]["signal"] != signal.SIGKILL:
        raise Stop(f"worker {VICTIM} was not killed in iteration {fault} as planned: {ends[VICTIM]['state']}")
    if fault not in steps or not steps[fault].replicas < steps[min(steps)].replicas:
        raise Stop(f"worker {VICTIM} was killed in iteration {fault}, but the other workers did not finish that step")
    both = compare(list(steps.values()), read_run(reference).steps)
    losses = {difference.iteration: difference.relative for difference in both.losses}
    norms = {difference.iteration: difference.relative for difference in both.grad_norms}
    if both.unlike or fault not in norms:
        raise Stop(f"the two runs cannot be compared: {(both.unlike or ['the reference has ended too early'])[0]}")
    before = max((norms[t] for t in norms if t < fault), default=0.0)
    lines = [
        "relative difference between the run with the death and the run without:",
        f"  before iteration {fault}: grad norm at most {before:.1e}",
        f"  iteration {fault}, with the death: loss {losses[fault]:.1e}, grad norm {norms[fault]:.1e}",
        f"  all iterations: loss at most {max(losses.values()):.1e} (in {max(losses, key=lambda t: losses[t])})",
    ]
    if not norms[fault] <= ROUNDING:
        raise Stop("\n".join([*lines, f"  another order of additions cannot change more than {ROUNDING:.0e}"]))
    return lines


def quickstart(args: argparse.Namespace) -> int:
    """Create the corpus, train with and without a death, write the report; return the exit status.  Raises Stop."""
    corpus = corpus_of(args.corpus)
    run = args.out.resolve()
    reference = run / "reference"
    fault = victims_iteration(args)
    with claim(run, args.resume):
        command = training_command(args, run, corpus["megatron_flags"], fault)
        print(
            f"training: {args.workers} workers, {settings_of(command)['iterations']} iterations; all output goes to "
            f"{run / 'console.log'}"
        )
        if fault is not None:
            print(
                f"A REAL DEATH: in the backward pass of iteration {fault}, --recover-inject kills worker {VICTIM} with "
                "SIGKILL, as kill -9 does (--no-failure switches this off)"
            )
        print(f"in {ROOT}:\n  {shlex.join(command)}\n", flush=True)
        status = run_training(command, run, corpus)
        compared = status == 0 and fault is not None
        if compared:
            print("reference: the same training again, without a death\n", flush=True)
            again = training_command(args, reference, corpus["megatron_flags"], save=False)
            status = run_training(again, reference, corpus, rows=5)
            compared = status == 0
        if not (run / "steps.jsonl").is_file():
            return status
        audit_status = report([str(run), *(["--reference", str(reference)] if compared else [])])
        names = ("console.log", "worker-0.log", "workers.json", "steps.jsonl", "events.jsonl", "checkpoint")
        print(f"{'written':<16}{run}: " + ", ".join(name for name in names if (run / name).exists()))
        if compared:
            assert fault is not None
            print("", *compare_runs(run, reference, fault), sep="\n")
    return status or audit_status


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of quickstart.sh."""
    parser = argparse.ArgumentParser(
        prog="quickstart.sh",
        description="Train a small GPT on real text with recover_megatron, on this machine's CPU; kill a worker in the "
        "middle of a step; compare with the same training without a death.",
        epilog="See docs/quickstart.md.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--iters", type=int, default=200, help="number of iterations (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="number of data-parallel workers (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "quickstart", help="folder of the run")
    parser.add_argument("--corpus", type=Path, help="folder of a corpus (default: Python's standard library)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the run folder")
    parser.add_argument("--no-failure", action="store_true", help="kill no worker, and train only once")
    parser.add_argument("megatron", nargs="*", help="Megatron flags after --; they override the quickstart's flags")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    options = parser()
    args = options.parse_args(argv)
    if args.iters < 1 or args.workers < 1:
        options.error("--iters and --workers must be 1 or more")
    for number in (signal.SIGTERM, signal.SIGHUP):  # these signals must stop the training as Ctrl-C does
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        return quickstart(args)
    except Stop as stop:
        print(f"quickstart: error: {stop}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
