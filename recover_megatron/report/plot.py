"""Pictures of a run, drawn with matplotlib if it is installed.

Each ``draw_*`` function draws into given axes; `save` creates the figure with the axes.  In all pictures, blue is the
run, grey the reference, and red a change of the number of replicas.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from recover_megatron.report.history import PHASES, RecoveryRecord
from recover_megatron.report.run_dir import Comparison, RecordedRun
from recover_megatron.report.summary import rates
from recover_megatron.run_log.steps import StepRecord

MAX_BARS = 30
_MAX_COLUMNS = 600
_MAX_LINES = 40
"""Largest number of changes of the replicas for which lines are drawn; more lines would hide the curve."""
_RUN, _REFERENCE, _CHANGE = "tab:blue", "0.55", "tab:red"
_PHASE_COLOURS = {
    "rendezvous": "#ff9f40",
    "regroup": "#f4d35e",
    "pull": "#9bc53d",
    "rerun": "#3a86c8",
    "reduce": "#6a4c93",
    "agree": "#2a9d8f",
}

NO_PLOT = "none: matplotlib is not installed: pip install 'recover-megatron[plot]'"
"""Text that is printed in place of the pictures if matplotlib is missing."""


def save(path: Path, draw: Callable[[Sequence[Any]], None], heights: Sequence[float]) -> bool:
    """Save a picture to ``path``; return False if matplotlib is missing.

    ``draw``: called with axes that are stacked vertically.  ``heights``: their heights in inches, from the top.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return False
    matplotlib.use("agg")  # a backend that needs no display
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(
        len(heights), figsize=(9, sum(heights)), layout="constrained", squeeze=False, height_ratios=heights
    )
    try:
        draw([row[0] for row in axes])
        for axis in [row[0].xaxis for row in axes if row[0].get_xlabel() == "iteration"]:
            axis.get_major_locator().set_params(integer=True)
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
    return True


def draw_loss(axes: Any, run: RecordedRun, reference: RecordedRun | None = None) -> None:
    """Draw the loss over the iterations; also the reference's loss, evaluations, and changes of the replicas."""
    if reference is not None:
        _line(axes, [(s.iteration, s.loss) for s in reference.steps], color=_REFERENCE, linewidth=3, label="reference")
    _line(axes, [(s.iteration, s.loss) for s in run.steps], color=_RUN, linewidth=1, label="training")
    for split, losses in sorted(run.evaluations.items()):
        axes.plot(*zip(*sorted(losses.items()), strict=True), "o-", label=split)
    if run.unigram_entropy is not None:
        axes.axhline(
            run.unigram_entropy, color="grey", linestyle="--", linewidth=1, label="unigram entropy of the text"
        )
    mark_changes(axes, run.steps)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", title=run.folder.name)
    axes.set_ylim(bottom=0)
    axes.legend()


def draw_difference(axes: Any, comparison: Comparison) -> None:
    """Draw the relative difference of the loss from the reference, in logarithmic scale; 0 is drawn at the bottom."""
    points = [(d.iteration, d.relative) for d in comparison.losses if math.isfinite(d.relative)]
    different = [value for _, value in points if value > 0]
    floor = 10.0 ** (math.floor(math.log10(min(different, default=1e-15))) - 1)
    axes.set_yscale("log")
    axes.set_ylim(floor / 3, 10 * max(different, default=1e-15))
    axes.plot([x for x, _ in points], [max(y, floor) for _, y in points], ".", color=_RUN, markersize=4)
    axes.axhline(floor, color=_REFERENCE, linewidth=0.8)
    axes.annotate("equal", (1, floor), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize="small")
    axes.set(xlabel="iteration", ylabel="relative difference\nof the loss")


def draw_replicas(axes: Any, steps: Sequence[StepRecord]) -> None:
    """Draw the number of replicas that counted microbatches in each iteration."""
    axes.step([s.iteration for s in steps], [s.replicas for s in steps], where="post", color=_RUN, linewidth=1.5)
    axes.set(ylabel="replicas")
    axes.set_ylim(0, max((s.replicas for s in steps), default=1) * 1.15)
    axes.yaxis.get_major_locator().set_params(integer=True)
    mark_changes(axes, steps, text=False)


def draw_quotas(axes: Any, steps: Sequence[StepRecord]) -> None:
    """Draw the number of microbatches of each replica in each iteration as a colour; white if there are none.

    In a long run, each column of the picture is the mean of several iterations.
    """
    replicas = sorted({replica for step in steps for replica in step.microbatches})
    width = math.ceil(len(steps) / _MAX_COLUMNS) or 1
    columns = [steps[at : at + width] for at in range(0, len(steps), width)]
    grid = [
        [sum(len(step.microbatches.get(r, ())) for step in column) / len(column) or math.nan for column in columns]
        for r in replicas
    ]
    extent = (steps[0].iteration - 0.5, steps[-1].iteration + 0.5, len(replicas) - 0.5, -0.5)
    image = axes.imshow(grid, aspect="auto", interpolation="nearest", extent=extent, cmap="viridis", vmin=0)
    if len(replicas) <= 16:
        axes.set_yticks(range(len(replicas)), [str(replica) for replica in replicas])
    axes.set(xlabel="iteration", ylabel="replica")
    axes.figure.colorbar(image, ax=axes, label="microbatches", pad=0.01)


def draw_recoveries(axes: Any, recoveries: Sequence[RecoveryRecord]) -> None:
    """Draw a bar for each recovery, divided into phases, in milliseconds; only the `MAX_BARS` longest recoveries.

    The phase ``detect`` is text next to the bar, since detection of a hang takes far longer than the other phases.
    """
    shown = sorted(recoveries, key=lambda r: r.total, reverse=True)[:MAX_BARS]
    shown.sort(key=lambda r: r.time)
    left = [0.0] * len(shown)
    names = [*PHASES, *sorted({name for r in shown for name in r.seconds} - set(PHASES))]
    for name in names[1:]:
        widths = [1000 * r.seconds.get(name, 0.0) for r in shown]
        if any(widths):
            axes.barh(range(len(shown)), widths, left=left, label=name, color=_PHASE_COLOURS.get(name))
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, (end, recovery) in enumerate(zip(left, shown, strict=True)):
        axes.annotate(f" {end:.0f} ms{_bar_note(recovery)}", (end, place), va="center")
    axes.set_yticks(range(len(shown)), [_bar_name(r) for r in shown])
    axes.invert_yaxis()
    longest_note = max((len(_bar_note(r)) for r in shown), default=0)
    axes.set_xlim(0, max([*left, 1e-3]) * (1.15 + 0.02 * longest_note))
    axes.set(xlabel="milliseconds" + (f" (the longest {MAX_BARS} recoveries)" if len(recoveries) > MAX_BARS else ""))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=8, fontsize="small", frameon=False)


def draw_throughput(axes: Any, steps: Sequence[StepRecord]) -> None:
    _line(axes, rates(steps), color=_RUN, linewidth=1)
    mark_changes(axes, steps)
    axes.set(xlabel="iteration", ylabel="samples per second")
    axes.set_ylim(bottom=0)


def mark_changes(axes: Any, steps: Sequence[StepRecord], text: bool = True) -> None:
    """Draw a red line at each change of the number of replicas; none if there are more than `_MAX_LINES` changes."""
    changes = [step for before, step in pairwise(steps) if step.replicas != before.replicas]
    if len(changes) > _MAX_LINES:
        return
    top = axes.get_xaxis_transform()
    for number, step in enumerate(changes):
        axes.axvline(step.iteration, color=_CHANGE, linewidth=0.8, alpha=0.7)
        if text and len(changes) <= 12:
            axes.annotate(
                f" {step.replicas}" + (f" replica{'' if step.replicas == 1 else 's'}" if number == 0 else ""),
                (step.iteration, 0.98), xycoords=top, va="top", fontsize="small", color=_CHANGE,
            )  # fmt: skip


def _bar_note(recovery: RecoveryRecord) -> str:
    phase_note = f", in {recovery.phase}" if recovery.phase else ""
    return phase_note + (
        f"; detected after {1000 * recovery.seconds['detect']:.0f} ms" if "detect" in recovery.seconds else ""
    )


def _bar_name(recovery: RecoveryRecord) -> str:
    where = f"iteration {recovery.iteration}" if recovery.iteration is not None else f"epoch {recovery.epoch}"
    lost = recovery.lost_workers
    if not lost:
        return where
    return f"{where}: worker {', '.join(map(str, lost[:4]))}{', ...' if len(lost) > 4 else ''}"


def _line(axes: Any, points: Sequence[tuple[int, float | None]], **style: Any) -> None:
    """Draw a line through the points, with gaps for missing values."""
    axes.plot([x for x, _ in points], [math.nan if y is None else y for _, y in points], **style)
