"""Print which of NVIDIA's training configurations run with --recover.

    python scripts/recipe_table.py

Each line of scripts/recipes/*.tsv is a configuration.  Its flags go through Megatron's parser and the checks of
--recover; nothing is trained.  scripts/reference.py makes a page of the results.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from recover_megatron import __version__  # noqa: E402
from recover_megatron.arguments import RecoverConfig, add_recover_arguments  # noqa: E402

FOLDER = ROOT / "scripts" / "recipes"
WORLD = 16
"""Assumed number of workers, because the configurations contain none.

The number suffices for two shard groups of experts in Megatron-FSDP.
"""
KINDS = {
    "release": "release tests: GPT, Mixtral, DeepSeek-V3 (proxy), Nemotron",
    "tests": "functional tests: GPT, experts, hybrid",
    "examples": "examples",
    "main": "functional tests that only Megatron's main has",
    "performance": "published performance recipes and runs",
}


HEAD = """\
# NVIDIA's training configurations with --recover

> Results of the checks of `--recover` for published configurations: accepted, accepted with something switched off,
> only with `--recover-untested`, or refused. None was trained. The files in `scripts/recipes/` list the configurations
> and, in their first lines, the sources. For Megatron-FSDP, 16 workers are assumed.

"""


class Answer(Enum):
    """Result of the checks of --recover for a configuration."""

    TAKEN = "accepted"
    SWITCHED = "accepted, something off"
    UNTESTED = "with `--recover-untested`"
    REFUSED = "refused"


@dataclass(frozen=True)
class Recipe:
    """Training configuration: "KIND/NAME" and flags."""

    name: str
    flags: tuple[tuple[str, ...], ...]
    """Flags, each as a tuple of the flag and its values."""

    @property
    def kind(self) -> str:
        return self.name.split("/")[0]


@dataclass(frozen=True)
class Verdict:
    """Result of the checks of --recover for a recipe.

    ``reasons``: depending on ``answer``, the flags that are refused even with --recover-untested (REFUSED), that are
    refused without it (UNTESTED), or that are switched off (SWITCHED).
    """

    recipe: Recipe
    answer: Answer
    reasons: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    """Flags that Megatron's parser does not know; the verdict ignores them."""


def recipes() -> Iterator[Recipe]:
    """Read all recipes from the files in ``FOLDER``."""
    for path in sorted(FOLDER.glob("*.tsv")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                name, _, flags = line.partition("\t")
                yield Recipe(name, tuple(tuple(re.split("[=,]", f"--{flag}")) for flag in flags.split()))


def verdicts() -> list[Verdict]:
    """Check all recipes; return the verdicts in the order of ``recipes``.  Imports Megatron."""
    from megatron.training.arguments import add_megatron_arguments

    from recover_megatron.megatron_hooks.entry.refused import adjust, cannot_recover, cannot_shard
    from recover_megatron.megatron_hooks.fsdp.fsdp_refused import cannot_shard_model

    plain, untested = RecoverConfig(enabled=True), RecoverConfig(enabled=True, untested=True)
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    parser = add_recover_arguments(add_megatron_arguments(parser))
    parser.set_defaults(rerun_mode="disabled")

    @functools.cache
    def known(words: tuple[str, ...]) -> bool:
        try:
            return not parser.parse_known_args(words)[1]
        except argparse.ArgumentError:
            return False

    def refusals(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
        found = [*cannot_recover(args, config), *cannot_shard(args, config), *cannot_shard_model(args, config, WORLD)]
        return list(dict.fromkeys(found))

    def judge(recipe: Recipe) -> Verdict:
        unknown = tuple(" ".join(words) for words in recipe.flags if not known(words))
        args = parser.parse_args([*chain.from_iterable(filter(known, recipe.flags))])
        switched = [its.flag for its in adjust(args) if its.off]
        anyway, unless = refusals(args, untested), refusals(args, plain)
        if refused := anyway or unless:
            answer = Answer.REFUSED if anyway else Answer.UNTESTED
            return Verdict(recipe, answer, tuple(map(_flag, refused)), unknown)
        return Verdict(recipe, Answer.SWITCHED if switched else Answer.TAKEN, tuple(switched), unknown)

    return [judge(recipe) for recipe in recipes()]


def _flag(message: str) -> str:
    """Return the flag that the message of a refusal names, without the other words."""
    words = message.split(": ")[0].removeprefix("--recover ")
    words = words.removeprefix("with --use-distributed-optimizer ").removeprefix("with --use-megatron-fsdp ")
    for before in ("cannot be combined with ", "accepts ", "needs "):
        words = words.removeprefix(before)
    return words.removesuffix(" yet").removesuffix(" only with --recover-untested")


def tables(found: list[Verdict]) -> str:
    """Return the page's tables of ``found`` as Markdown."""
    answers = {kind: Counter(its.answer for its in found if its.recipe.kind == kind) for kind in KINDS}
    lines = [
        "| configurations | " + " | ".join(answer.value for answer in Answer) + " |",
        "| --- |" + " --- |" * len(Answer),
    ]
    for kind, title in KINDS.items():
        numbers = " | ".join(str(answers[kind][answer]) for answer in Answer)
        lines.append(f"| {title} ({answers[kind].total()}) | {numbers} |")
    for title, among in (("not accepted", (Answer.UNTESTED, Answer.REFUSED)), ("switched off", (Answer.SWITCHED,))):
        these = [its for its in found if its.answer in among]
        alone = Counter(its.reasons[0] for its in these if len(its.reasons) == 1)
        named = Counter(reason for its in these for reason in its.reasons)
        lines += ["", f"| {title} | configurations | of these with no other flag |", "| --- | --- | --- |"]
        for reason, number in sorted(named.items(), key=lambda item: (-item[1], item[0])):
            lines.append(f"| `{reason}` | {number} | {alone[reason]} |")
    lines += ["", "| not a flag, or not a value, of Megatron 0.19.2 | configurations |", "| --- | --- |"]
    foreign = Counter(flag for its in found for flag in its.unknown)
    lines += [f"| `{flag}` | {number} |" for flag, number in sorted(foreign.items())]
    for title, these in (
        ("release and example", [its for its in found if its.recipe.kind not in ("tests", "performance")]),
        ("recipe or run", [its for its in found if its.recipe.kind == "performance"]),
    ):
        lines += ["", f"| {title} | |", "| --- | --- |", *map(_row, these)]
    return "\n".join(lines)


def _row(its: Verdict) -> str:
    name = its.recipe.name.removeprefix("release/").removeprefix("performance/")
    reasons = ", ".join(f"`{reason}`" for reason in its.reasons)
    foreign = "; without " * bool(its.unknown) + ", ".join(f"`{flag}`" for flag in its.unknown)
    return f"| {name} | {its.answer.value}{': ' if reasons else ''}{reasons}{foreign} |"


def page() -> str:
    """Return the text of the generated page."""
    return HEAD + tables(verdicts()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.parse_args()
    for its in verdicts():
        print(its.answer.value, its.recipe.name, ", ".join(its.reasons), ", ".join(its.unknown), sep="\t")


if __name__ == "__main__":
    main()
