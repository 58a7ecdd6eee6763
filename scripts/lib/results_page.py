"""Pages of the docs that show measurements, made from docs/data; scripts/reference.py writes them.

    docs/reference/results.md     the tables of the benchmarks: docs/data/results/*.json
    docs/reference/mutations.md   the deliberate bugs and the tests that caught them: docs/data/mutations.json

A file of results has ``title``, ``date``, ``machine``, ``versions``, ``notes`` and ``runs``; a run has ``columns``,
``rows`` and ``what``, and may have ``title``, ``command``, ``date``, ``versions``, ``load`` and ``notes``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from module_map import ROOT, page, wrapped

DATA = ROOT / "docs" / "data"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def of_run(run: dict[str, Any]) -> list[str]:
    lines = ["", f"### {run['title']}"] if "title" in run else []
    if "command" in run:
        lines += ["", "```", run["command"], "```"]
    said = [run["what"], run.get("date", ""), run.get("versions", ""), f"Load: {run['load']}" if "load" in run else ""]
    text = " ".join(f"{part.rstrip('.')}." for part in said if part)
    return [*lines, "", wrapped(text), "", *table(run["columns"], run["rows"]), *notes(run)]


def notes(of: dict[str, Any]) -> list[str]:
    return ["", *(wrapped(note, "* ") for note in of["notes"])] if of.get("notes") else []


def results() -> str:
    """Return the text of docs/reference/results.md."""
    lines = [
        "> The measurements behind [benchmarks.md](../benchmarks.md), for readers who check them, each with its",
        "> command, machine and load. Made from `docs/data/results/`.",
    ]
    for path in sorted((DATA / "results").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        where = "; ".join(found[key] for key in ("date", "machine", "versions") if key in found)
        lines += ["", f"## {found['title']}", "", wrapped(f"{where}."), *notes(found)]
        lines += [line for run in found["runs"] for line in of_run(run)]
    return page("Results", *lines)


def mutations() -> str:
    """Return the text of docs/reference/mutations.md."""
    found = json.loads((DATA / "mutations.json").read_text(encoding="utf-8"))
    caught = sum(one["verdict"] == "caught" for one in found)
    days = [one["date"] for one in found]
    where = sorted({f"{one['cores']} cores, {one['jobs']} mutations at once" for one in found})
    lines = [
        "> The deliberate bugs of `tests/mutations/mutations.toml` and the test that caught each, for readers who",
        "> judge what the tests notice. When to run them: [contributing.md](../contributing.md#deliberate-bugs).",
        "> Made from `docs/data/mutations.json`.",
        "",
        f"{caught} of {len(found)} caught. Tried from {min(days)} to {max(days)}, with {'; '.join(where)}.",
        "",
        *table(
            ("mutation", "rule that it breaks", "verdict", "seconds", "by"),
            [
                (one["id"], one["promise"], one["verdict"], str(one["seconds"]), f"`{one['test']}`" * bool(one["test"]))
                for one in found
            ],
        ),
    ]
    return page("Deliberate bugs", *lines)
