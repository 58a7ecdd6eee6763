"""Draw one recovery of a real run: the activity of each worker before and after one worker is killed.

    python benchmarks/recovery_picture.py FOLDER OUT.svg

If FOLDER contains no run, four workers train there, and one of them gets SIGKILL in its backward pass.  The picture has
one lane per worker.

Workers simulate devices of fixed speed (BENCH_MICROBATCH of timed_pretrain.py), so that the phases of a recovery are
visible on any machine.  Each worker also records its progress marks with their times; otherwise the run is normal.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import COMMON, MODELS, RECOVER, SCRIPT, environment, lines
from recover_megatron.membership.io.session import Session

WORKERS, KILLED, ITERATION = 4, 2, 5
MICROBATCH = "0.4"
FLAGS = "--global-batch-size 8 --train-iters 8 --log-interval 1 --lr-decay-iters 8"
SHOWN = (ITERATION - 1, ITERATION, ITERATION + 1)

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 11px } .in { fill: #fff }
  .run { fill: #3a78b5 } .again { fill: #c2541b } .wait { fill: #d0d3d7 } .gone { fill: none; stroke: #aaa;
  stroke-dasharray: 4 3 } .step { stroke: #8a939c; stroke-dasharray: 2 3 } .death { fill: #b3261e; font-weight: 600 }
  @media (prefers-color-scheme: dark) { text { fill: #d7dbe0 } .in { fill: #fff } .run { fill: #3f7fbd }
  .again { fill: #d0652c } .wait { fill: #45494e } .gone { stroke: #666 } .death { fill: #ff8a80 } }
"""
"""CSS of the picture, which follows the reader's colour scheme."""


@dataclass(frozen=True)
class Span:
    """Activity of a worker from ``begin`` to ``end``, in seconds.

    ``microbatch``: number of the microbatch that the worker runs; None: the worker waits for other workers.
    """

    begin: float
    end: float
    iteration: int
    microbatch: int | None


def spans(marks: Sequence[dict[str, Any]], last: float) -> list[Span]:
    """Convert a worker's progress marks to spans.  Each span ends at the next mark; the last one at ``last``.

    Adjacent spans of the same activity are merged.
    """
    found: list[Span] = []
    for mark, end in zip(marks, [*(mark["at"] for mark in marks[1:]), last], strict=True):
        if mark["microbatch"] is None and not mark["waiting"]:
            continue
        before = found[-1] if found else None
        now = Span(mark["at"], min(end, last), mark["iteration"], mark["microbatch"])
        if before and (before.iteration, before.microbatch, before.end) == (now.iteration, now.microbatch, now.begin):
            found[-1] = Span(before.begin, now.end, now.iteration, now.microbatch)
        else:
            found.append(now)
    return [span for span in found if span.iteration in SHOWN]


def svg(folder: Path) -> str:
    """Return the picture of the run in ``folder``, as SVG."""
    marks = [lines(folder / f"marks-{worker}.jsonl") for worker in range(WORKERS)]
    faults = [event for path in sorted(folder.glob("events-?.jsonl")) for event in lines(path)]
    death = min(event["mono"] for event in faults if event["event"] == "fault" and event["worker"] == KILLED)
    (recovery,) = [event for event in lines(folder / "events.jsonl") if event["event"] == "recovery"]
    again = {j for ids in recovery["reran"].values() for j in ids}
    shown = [mark["at"] for track in marks for mark in track if mark["iteration"] in SHOWN]
    begin, end = min(shown), max(shown)
    left, scale, height, gap = 78, 800 / (end - begin), 30, 10

    def x(at: float) -> float:
        return left + (at - begin) * scale

    def box(css: str, since: float, until: float, space: int = 0) -> str:
        width = max((until - since) * scale - space, 1)
        return f'<rect class="{css}" x="{x(since):.1f}" y="{top}" width="{width:.1f}" height="{height}"/>'

    def middle(at: float, y: int, words: object, css: str = "") -> str:
        return f'<text class="{css}" x="{x(at):.1f}" y="{y}" text-anchor="middle">{words}</text>'

    parts = []
    for worker, track in enumerate(marks):
        top = 34 + worker * (height + gap)
        parts.append(f'<text x="{left - 8}" y="{top + 20}" text-anchor="end">replica {worker}</text>')
        for span in spans(track, death if worker == KILLED else end):
            rerun = span.iteration == ITERATION and span.microbatch in again and worker != KILLED
            kind = "wait" if span.microbatch is None else "again" if rerun else "run"
            parts.append(box(kind, span.begin, span.end, 1))
            if span.microbatch is not None:
                parts.append(middle((span.begin + span.end) / 2, top + 20, span.microbatch, "in"))
        if worker == KILLED:
            parts.append(box("gone", death, end))
            parts.append(f'<text class="death" x="{x(death) + 8:.1f}" y="{top + 20}">SIGKILL</text>')
    bottom = 34 + WORKERS * (height + gap)
    for iteration in SHOWN:
        at = max(m["at"] for track in marks for m in track if m["iteration"] == iteration and m["phase"] == "optimizer")
        first = min(m["at"] for track in marks for m in track if m["iteration"] == iteration)
        parts.append(f'<line class="step" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="24" y2="{bottom}"/>')
        parts.append(middle((first + at) / 2, 18, f"step {iteration}"))
    beyond = 1000 * sum(s for phase, s in recovery["seconds"].items() if phase != "rerun")
    words = [
        "Blue: microbatches 0 to 7 of each step. Grey: waiting. Orange: two microbatches of the dead worker, run by",
        f"other workers in the same step. Other costs of the death: {beyond:.0f} ms.",
    ]
    for row, line in enumerate(words):
        parts.append(f'<text class="small" x="{left}" y="{bottom + 16 + 15 * row}">{line}</text>')
    label = f"Four workers over three steps; worker {KILLED} is killed in step {ITERATION}. {' '.join(words)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + 812} {bottom + 42}" role="img" '
        f'aria-label="{label}">\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def run(folder: Path) -> None:
    """Train in ``folder``, with the death of one worker.  Raises CalledProcessError if the run fails."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "recover_megatron.launch", "--nproc-per-node", str(WORKERS)]
    command += ["--log-dir", str(folder)]
    script = [__file__, "--recover", *RECOVER[1:], *COMMON, *MODELS["toy"].argv, *FLAGS.split()]
    strike = f"{KILLED}@{ITERATION}"
    environ = environment(BENCH_OUT=str(folder), BENCH_MICROBATCH=MICROBATCH, BENCH_KILL=strike)
    subprocess.run([*command, *script], env=environ, check=True)


def work() -> None:
    """Train in this worker, and record the worker's progress marks."""
    out = open(f"{os.environ['BENCH_OUT']}/marks-{os.environ['RANK']}.jsonl", "w", buffering=1)  # noqa: SIM115
    mark = Session.mark

    def noted(self: Session, *of_mark: Any) -> None:
        names = ("iteration", "phase", "microbatch", "waiting")
        track = {"microbatch": None, "waiting": False, **dict(zip(names, of_mark, strict=False))}
        print(json.dumps({"at": time.monotonic(), **track}), file=out)
        mark(self, *of_mark)

    Session.mark = noted  # type: ignore[method-assign, assignment]
    sys.argv[0] = SCRIPT
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if not (args.folder / "events.jsonl").exists():
        run(args.folder)
    args.out.write_text(svg(args.folder), encoding="utf-8")


if __name__ == "__main__":
    if "BENCH_OUT" in os.environ and "RANK" in os.environ:
        work()
    else:
        main()
