"""How many processes a run of pytest has, and which tests go to one of them.

Folders are run by two processes (pytest -n auto, which pyproject.toml says; test.sh says a number), files and single
tests by the one that was started: a second one would cost seconds of imports.

Together are the tests with the same ``xdist_group``, and all of the fork server that have no other group: so no two
runs of six or eight workers starve each other, and Megatron is imported for them once; what waits most of the time is
done by the other processes meanwhile.  (Those start a fork server, too, for what launched trainings are compared with.)
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence

import pytest


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For -n auto; pytest-xdist asks nobody under --pdb, where there is one."""
    return processes_for(config.args)


def processes_for(arguments: Sequence[str]) -> int:
    """Of a run with these files, folders and tests; 0: it runs in the one that was started."""
    folders = [argument for argument in arguments if "::" not in argument and not argument.endswith(".py")]
    return int(os.environ.get("RECOVER_TEST_PROCESSES", "2")) if folders else 0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, object, object]:
    """Around pytest-xdist's own, which writes the groups behind the names of the items."""
    for item in items:
        uses = getattr(item, "fixturenames", ())
        if "forkserver" in uses and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("fork server"))
    result = yield
    for item in items:
        named = vars(item).get("_nodeid")
        if named is not None and named != item.nodeid:
            _rename(item, named)
    return result


def _rename(item: pytest.Item, name: str) -> None:
    """pytest-xdist 3.8 sets an attribute that pytest 9.2 has no more: without this no group has any effect."""
    from _pytest.nodeid import coerce_node_id

    item._id = coerce_node_id(name)  # type: ignore[attr-defined]
