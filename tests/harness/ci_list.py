"""What CI runs: all fast tests, and of the slow ones those that tests/ci.toml lists; none that is in quarantine.

    tests/ci.toml            sections of lines:  "a slow test" = "what only it shows"
                             (with its parameters in brackets, or without: then with all that tests/drawn.py draws)
    tests/quarantine.toml    tests that failed by chance, with the date and how; repaired or deleted soon

``scripts/test.sh --all`` (RECOVER_TESTS=all) and whoever names a test (FILE::TEST) run them all.  At the end: how long
the tests of each folder took.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.drawn import ALL, SEED

TESTS = Path(__file__).resolve().parents[1]
CHOSEN = pytest.StashKey[frozenset[str]]()
"""In the configuration: the tests that this module leaves in, whatever -m and -k leave out of them."""
LEFT_OUT = pytest.StashKey[frozenset[str]]()
"""The others."""
DRAWN = (
    f"RECOVER_SEED={SEED} draws from the long families; RECOVER_MATRIX=all runs all of them"
    if ALL
    else f"of the slow tests those of tests/ci.toml, drawn by seed {SEED}; scripts/test.sh --all runs all, others drawn"
)


def listed() -> dict[str, str]:
    """Test -> what only it shows."""
    table: Mapping[str, Mapping[str, str]] = tomllib.loads((TESTS / "ci.toml").read_text())
    return {test: why for section in table.values() for test, why in section.items()}


def quarantined() -> dict[str, Mapping[str, Any]]:
    """Test -> its entry."""
    return {entry["test"]: entry for entry in tomllib.loads((TESTS / "quarantine.toml").read_text()).get("test", ())}


def among(node: str, names: Iterable[str]) -> bool:
    """Whether ``node`` is one of the tests, or one of them with parameters."""
    return node in names or node.split("[")[0] in names


def left_out(items: Sequence[pytest.Item], table: Mapping[str, str], named: Sequence[str]) -> list[pytest.Item]:
    """The slow tests that no line of ``table`` lists; ``named``: tests of the command line, which run anyway."""
    return [
        item
        for item in items
        if item.get_closest_marker("slow")
        and not among(item.nodeid, table)
        and not any(among(item.nodeid, (name,)) for name in named)
    ]


def without_a_test(items: Sequence[pytest.Item], names: Iterable[str]) -> list[str]:
    """Which ``names`` say a parameter, or a function, that a file of the ``items`` does not have."""
    nodes = {item.nodeid for item in items}
    nodes |= {node.split("[")[0] for node in nodes}
    files = {node.split("::")[0] for node in nodes}
    return [name for name in names if name.split("::")[0] in files and name not in nodes]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[CHOSEN], config.stash[LEFT_OUT] = frozenset(item.nodeid for item in items), frozenset[str]()
    if ALL:
        return
    named = [argument for argument in config.args if "::" in argument]
    table, away = listed(), quarantined()
    if not named and (wrong := without_a_test(items, [*table, *away])):
        raise pytest.UsageError("ci.toml or quarantine.toml names tests that there are not:\n  " + "\n  ".join(wrong))
    for item in items:
        if among(item.nodeid, away):
            entry = away.get(item.nodeid) or away[item.nodeid.split("[")[0]]
            item.add_marker(pytest.mark.skip(reason=f"IN QUARANTINE since {entry['date']}: {entry['how']}"))
    gone = left_out(items, table, named)
    config.stash[LEFT_OUT] = frozenset(item.nodeid for item in gone)
    config.stash[CHOSEN] -= config.stash[LEFT_OUT]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item.nodeid in config.stash[CHOSEN]]


def pytest_report_header() -> str:
    return DRAWN


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                path = Path(report.nodeid.split("::")[0])
                seconds[str(path.parent)] += report.duration
    told = ", ".join(f"{folder.removeprefix('tests/')} {taken:.0f}" for folder, taken in seconds.most_common())
    terminalreporter.write_line(f"seconds by folder: {told}")
    terminalreporter.write_line(DRAWN)
