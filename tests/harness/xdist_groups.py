"""Which tests of a run (pytest -n) go to one process: those with the same ``xdist_group``, and all of the fork server.

So no two runs of six or eight workers starve each other, and Megatron is imported for them once; what waits most of
the time is done by the other processes meanwhile.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest


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
