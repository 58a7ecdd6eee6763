"""What the threads that talk to the other launchers tell this one; see nodes.py."""

from __future__ import annotations

from typing import Protocol

from recover_megatron.launch.candidates import Candidates
from recover_megatron.launch.exit_codes import ExitOutcome


class NodeEvents(Protocol):
    """Called in the main thread, by the event loop."""

    def accepted(self, run_id: str) -> None:
        """This node takes part in the run (other nodes than 0)."""

    def coordinators(self, candidates: Candidates) -> None:
        """All candidate coordinators are known."""

    def all_joined(self) -> None:
        """Every node takes part (node 0)."""

    def refused(self, reason: str) -> None:
        """This node may not take part."""

    def note(self, text: str) -> None:
        """Something the user should read."""

    def failed(self, reason: str, code: int) -> None:
        """The launch cannot go on here: the reason, and the exit code."""

    def store_failed(self, reason: str) -> None:
        """The store is not served (node 0)."""

    def store_lost(self, reason: str) -> None:
        """The store of node 0 is gone, or not reached."""

    def store_back(self) -> None:
        """It is reached again."""

    def report(self, node_rank: int, outcomes: list[ExitOutcome]) -> None:
        """The workers of a node have ended so (node 0)."""

    def node_lost(self, node_rank: int) -> None:
        """The launcher of a node is not heard of any more, and has not reported (node 0)."""

    def node_back(self, node_rank: int) -> None:
        """It is heard of again (node 0)."""

    def delivered(self) -> None:
        """Our report is in the store, or the store is gone (other nodes)."""
