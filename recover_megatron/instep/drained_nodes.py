"""Nodes that are to be switched off: what an epoch decides of them, by what its members joined with (`plan`).

    asked --epoch: accepted--> spares of the node leave at once; all know which replicas are to (``leaving``)
                                   |  until the next boundary they compute as ever; there what only they hold of a
                                   |  state that is spread is given to others
                                   '--epoch at that boundary--> they have no place in it, and leave

Every epoch decides anew: where a death means that the run cannot do without a node any more it stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from recover_megatron.instep.decision import JoinStatus, Rules
from recover_megatron.workload.drain import drain, leaving

Statuses = Mapping[int, JoinStatus]


def draining_of(
    statuses: Statuses, whole: Mapping[int, Sequence[int]], rules: Rules, asked: Sequence[str]
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """The nodes that the run does without, those first that it has decided on before; and why not the others."""
    known = _told(statuses)
    wanted = [*known, *(node for node in asked if node not in known)]
    found = drain(wanted, _nodes(statuses), whole, rules.min_replicas, rules.shards)
    return found.accepted, found.refused


def without(
    draining: Sequence[str], statuses: Statuses, whole: Mapping[int, tuple[int, ...]], boundary: bool
) -> tuple[dict[int, JoinStatus], dict[int, tuple[int, ...]]]:
    """The statuses of those that go on, and the replicas that do, of those that are ``whole``.

    Spares of these nodes do not.  Replicas leave at a boundary to which all have come knowing it: some may have had the
    plan that said so, and others not, since the coordinator died.
    """
    here = [worker for workers in whole.values() for worker in workers] if boundary else []
    ready = {node for node in draining if here and all(node in statuses[worker].draining for worker in here)}
    gone = leaving(whole, _nodes(statuses), ready)
    stay = {replica: workers for replica, workers in whole.items() if replica not in gone}
    working = {worker for workers in stay.values() for worker in workers}
    return {w: status for w, status in statuses.items() if w in working or status.node not in draining}, stay


def leaving_of(replicas: Mapping[int, Sequence[int]], statuses: Statuses, draining: Sequence[str]) -> frozenset[int]:
    """Those of ``replicas`` that are to leave at the next boundary."""
    return frozenset(leaving(replicas, _nodes(statuses), draining))


def finished_of(left: Collection[int], statuses: Statuses, draining: Collection[str]) -> frozenset[int]:
    """Those that have ``left`` in order and had finished: its node was not ``draining`` then.

    ``statuses``: the last with which they joined; who is not there is of a node that was drained, if any was.
    """
    nodes = _nodes(statuses)
    return frozenset(
        worker for worker in left if nodes.get(worker, "") not in draining and (worker in nodes or not draining)
    )


def _told(statuses: Statuses) -> list[str]:
    return sorted({node for status in statuses.values() for node in status.draining})


def _nodes(statuses: Statuses) -> dict[int, str]:
    return {worker: status.node for worker, status in statuses.items()}
