"""The loss of a run as a picture."""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path

from recover_megatron.report.run_dir import Run


def plot_loss(run: Run, path: Path) -> bool:
    """Draw the loss over the iterations into ``path`` (PNG).  False if matplotlib is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return False
    matplotlib.use("agg")  # no display
    pyplot = importlib.import_module("matplotlib.pyplot")

    steps = [step for step in run.steps if step.loss is not None]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([s.iteration for s in steps], [s.loss for s in steps], linewidth=1, label="training")
    for split, losses in sorted(run.evaluations.items()):
        axes.plot(*zip(*sorted(losses.items()), strict=True), "o-", label=split)
    if run.unigram_entropy is not None:
        axes.axhline(
            run.unigram_entropy, color="grey", linestyle="--", linewidth=1, label="unigram entropy of the text"
        )
    for before, step in pairwise(steps):
        if step.replicas != before.replicas:
            axes.axvline(step.iteration, color="tab:red", linewidth=0.8)
            axes.annotate(f"{step.replicas} replicas", (step.iteration, step.loss), fontsize="small")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", title=run.folder.name)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
