"""What the threads that talk to the other launchers tell the supervisor; see nodes.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recover_megatron.launch.candidates import Candidates
from recover_megatron.launch.exit_codes import Outcome


@dataclass
class NodeEvents:
    """What the supervisor is told, in its own thread."""

    joined: Callable[[str], None]
    """This node takes part; the argument is the run id (other nodes)."""
    coordinators: Callable[[Candidates], None]
    """All candidate coordinators are known."""
    all_joined: Callable[[], None]
    """Every node takes part (node 0)."""
    refused: Callable[[str], None]
    """This node may not take part."""
    note: Callable[[str], None]
    """Something the user should read."""
    failed: Callable[[str, int], None]
    """The launch cannot go on here: the reason, and the exit code."""
    store_lost: Callable[[str], None]
    """The store of node 0 is gone, or not reached."""
    store_back: Callable[[], None]
    """It is reached again."""
    report: Callable[[int, list[Outcome]], None]
    """Node R's workers have ended so (node 0)."""
    node_lost: Callable[[int], None]
    """Node R's launcher is not heard of any more, and has not reported (node 0)."""
    node_back: Callable[[int], None]
    """It is heard of again (node 0)."""
    delivered: Callable[[], None]
    """Our report is in the store, or the store is gone (other nodes)."""
