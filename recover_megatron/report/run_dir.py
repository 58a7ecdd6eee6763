"""The files of a run's log folder, read into one record."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recover_megatron.run_log.events import EVENTS_FILE, read_events
from recover_megatron.run_log.steps import STEPS_FILE, StepRecord, read_steps

# Megatron prints it; no file has it in a better form.
_EVALUATION = re.compile(
    rb"validation loss at iteration (\d+)(?: on (\w+) set)? \| lm loss value: ([0-9.E+-]+|nan|inf)", re.IGNORECASE
)


class NotARun(Exception):
    """The folder holds no run that could be reported on, in words for the user."""


@dataclass(frozen=True)
class RecordedRun:
    """What is known of a run."""

    folder: Path
    steps: list[StepRecord]
    """In the order of their iterations; a last line that a crash cut short is not among them."""
    corpus: dict[str, Any] | None
    """corpus.json of scripts/prepare_corpus.py."""
    workers: list[dict[str, Any]]
    """workers.json of recover-run: an object for each worker; empty: there is none."""
    settings: dict[str, Any]
    """run.json of scripts/quickstart.sh; empty for other runs."""
    evaluations: dict[str, dict[int, float]]
    """Split (validation, test) -> iteration -> loss."""
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    """The events of those that were carried out, in their order: ``to``, ``lost``, ``tier``."""

    @property
    def unigram_entropy(self) -> float | None:
        """Nats per token of the validation text, knowing only how frequent each byte is in the training text."""
        return None if self.corpus is None else float(self.corpus["unigram_entropy_nats"]["valid_under_train"])


def _rollbacks(folder: Path) -> list[dict[str, Any]]:
    try:
        return [event for event in read_events(folder / EVENTS_FILE) if event["event"] == "rolled back"]
    except ValueError as error:
        raise NotARun(f"a line of {EVENTS_FILE} cannot be read: {error}") from error


def read_run(folder: Path, corpus: Path | None = None) -> RecordedRun:
    """Read what is there.  ``corpus`` is the corpus.json to compare with (default: the one in ``folder``, if any).

    Raises NotARun if there is no steps.jsonl, if a file of the run is damaged, or no corpus at a path that was given.
    """
    if not folder.is_dir():
        raise NotARun(f"{folder}: no such folder")
    try:
        steps = list(read_steps(folder / STEPS_FILE))
    except FileNotFoundError:
        raise NotARun(
            f"{folder} has no {STEPS_FILE}: no iteration has been committed there, or the run did not have --recover"
        ) from None
    except ValueError as error:
        raise NotARun(f"a line of {STEPS_FILE} cannot be read: {error}") from error
    if corpus is not None and not corpus.is_file():
        raise NotARun(f"{corpus}: no such file")
    return RecordedRun(
        folder=folder,
        steps=steps,
        corpus=_json(corpus or folder / "corpus.json", dict),
        workers=_json(folder / "workers.json", list) or [],
        settings=_json(folder / "run.json", dict) or {},
        evaluations=_evaluations(folder),
        rollbacks=_rollbacks(folder),
    )


def _json[Content: (list[Any], dict[str, Any])](path: Path, kind: type[Content]) -> Content | None:
    """What is in the file; None: there is no file.  Raises NotARun."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise NotARun(f"{path} is not JSON: {error}") from error
    if not isinstance(content, kind):
        raise NotARun(f"{path} should hold a JSON {'object' if kind is dict else 'list'}")
    return content


def _evaluations(folder: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for log in sorted(folder.glob("*.log")):
        with log.open("rb") as lines:
            for line in lines:
                if match := _EVALUATION.search(line):
                    split = (match[2] or b"validation").decode()
                    found.setdefault(split, {})[int(match[1])] = float(match[3])
    return found
