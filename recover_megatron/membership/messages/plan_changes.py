"""Changes between two plans, so that a plan costs each member a few bytes instead of the statuses of all members.

A plan of ``records.members_only`` has the statuses of all members.  With N members, N full plans are N x N statuses: at
10,000 workers about 80 GB for one epoch.  But after a death nearly all fields of nearly all statuses are as in the plan
before, or have changed to the same value (the iteration).  ``pack`` sends only what differs::

    own       worker -> {field: value}: fields that neither ``common`` nor the plan before has
    common    {field: value}: changes that hold for most members
    without   worker -> [field, ...]: fields of the plan before (or of ``common``) that the status lacks

Without a plan before (the first epoch, a newcomer), ``common`` still has what most statuses share, and the rest is
compressed if it is large.  A plan of any other form is sent whole.  Packing loses nothing: ``unpack`` returns an equal
plan, whichever way the plan was sent, and a digest of all statuses shows it.  So a member whose copy of the plan before
was altered never decides from another plan than the others: it refuses the changes, and then gets the whole plan.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from recover_megatron.membership.messages.fields import MAX_DEPTH, NO_PLAN, PlanId, check_depth
from recover_megatron.membership.records import Json, WorkerId, Workers

SAMPLES = 16
"""Number of statuses from which ``common`` is taken: spread over all members, so that one odd member does not count."""

LARGE = 1 << 16
"""Bytes from which a packed plan is compressed; smaller ones stay readable in a capture."""
MOST = 256 << 20
"""Largest number of bytes to which a compressed plan may expand."""

_bytes = msgspec.json.Encoder().encode
_sorted_bytes = msgspec.json.Encoder(order="sorted").encode


def pack(plan: Json, members: Workers, base: Json = None) -> dict[str, Json]:
    """Return the plan of ``members`` in a form from which a member that holds the plan ``base`` can ``unpack`` it.

    ``base`` is None for a member that holds no plan.
    """
    statuses, before = _statuses(plan), _statuses(base) or {}
    if statuses is None or plan["members"] != sorted(members):
        return _compressed({"whole": plan})
    common = _common(statuses, before)
    own: dict[str, Json] = {}
    without: dict[str, Json] = {}
    texts = list(map(_sorted_bytes, statuses.values()))
    for (worker, status), text in zip(statuses.items(), texts, strict=True):
        expected = {**before.get(worker, {}), **common}
        if expected == status and _sorted_bytes(expected) == text:
            continue
        if changed := {name: value for name, value in status.items() if not _has(expected, name, value)}:
            own[worker] = changed
        if lacking := [name for name in expected if name not in status]:
            without[worker] = lacking
    rest = {name: value for name, value in plan.items() if name not in ("members", "statuses")}
    packed = {"rest": rest, "common": common, "own": own, "digest": _digest(texts)}
    return _compressed({**packed, "without": without} if without else packed)


def packed_for(
    plan: Json, holds: Mapping[WorkerId, PlanId], base: PlanId, before: Json
) -> Iterator[tuple[Workers, PlanId, Json]]:
    """Yield receivers, the plan that they need, and the packed plan, for all members.

    ``holds``: member -> plan that it holds; ``base``: the plan ``before``, NO_PLAN if it is not known.
    """
    members = frozenset(holds)
    holders = frozenset(member for member, held in holds.items() if held == base != NO_PLAN)
    for receivers, needed, known in ((holders, base, before), (members - holders, NO_PLAN, None)):
        if receivers:
            yield receivers, needed, pack(plan, members, known)


def presented(packed: Any, members: Workers) -> Json:
    """Return a plan that a member has presented; None if it is no packed plan, or too deep to be sent on."""
    try:
        plan = unpack(packed, members)
        check_depth(plan, 10 * MAX_DEPTH)
    except ValueError:
        return None
    return plan


def _compressed(packed: dict[str, Json]) -> dict[str, Json]:
    text = _bytes(packed)
    return packed if len(text) < LARGE else {"zlib": base64.b64encode(zlib.compress(text, level=1)).decode()}


def _expanded(text: str) -> Json:
    try:
        inflater = zlib.decompressobj()
        found = inflater.decompress(base64.b64decode(text, validate=True), MOST)
        if not inflater.eof:
            raise ValueError(f"it has more than {MOST} bytes, or is cut")
        return msgspec.json.decode(found)
    except (ValueError, zlib.error, RecursionError) as error:
        raise ValueError(f"the packed plan cannot be expanded: {error}") from error


def unpack(packed: Any, members: Workers, base: Json = None) -> Json:
    """Return the plan that ``pack`` was given; ``members`` and ``base`` must be the same as there.

    None is no plan.  Raises ValueError if ``packed`` is no packed plan, or if its digest differs because ``base`` does.
    """
    if type(packed) is dict and type(text := packed.get("zlib")) is str:
        packed = _expanded(text)
    match packed:
        case None:
            return None
        case {"whole": plan}:
            return plan
        case {"rest": dict(rest), "common": dict(common), "own": dict(own)}:
            without: Any = packed.get("without", {})
        case _:
            raise ValueError("this is no packed plan")
    before, statuses = _statuses(base) or {}, dict[str, Json]()
    for worker in map(str, sorted(members)):
        try:
            status = {**before.get(worker, {}), **common, **own.get(worker, {})}
            for name in without.get(worker, ()):
                del status[name]
        except (TypeError, KeyError) as error:
            raise ValueError(f"the packed status of worker {worker} is not valid") from error
        statuses[worker] = status
    if _digest(map(_sorted_bytes, statuses.values())) != packed.get("digest"):
        raise ValueError("the packed plan has another digest: it has the changes to another plan than the one held")
    return {"members": sorted(members), "statuses": statuses, **rest}


def _statuses(plan: Json) -> Mapping[str, Mapping[str, Json]] | None:
    """Return the statuses of a plan; None unless it has one status, with fields, for each of its ``members``."""
    match plan:
        case {"members": list(members), "statuses": dict(statuses)}:
            every = list(map(str, members)) == list(statuses) and members == sorted(members)
            return statuses if every and all(type(status) is dict for status in statuses.values()) else None
    return None


def _common(statuses: Mapping[str, Mapping[str, Json]], before: Mapping[str, Mapping[str, Json]]) -> dict[str, Json]:
    """Return the changes that most of some statuses share."""
    workers = list(statuses)
    sample = workers[:: len(workers) // SAMPLES | 1]  # an odd step, else all could have the same position
    changes: Counter[tuple[str, bytes]] = Counter()
    for worker in sample:
        old = before.get(worker, {})
        changes.update((name, _bytes(value)) for name, value in statuses[worker].items() if not _has(old, name, value))
    return {name: msgspec.json.decode(value) for (name, value), count in changes.items() if 2 * count > len(sample)}


def _digest(texts: Iterable[bytes]) -> str:
    """Return a digest of statuses, as JSON with sorted fields, in the order of their workers."""
    return hashlib.blake2b(b",".join(texts), digest_size=8).hexdigest()


def _has(status: Mapping[str, Json], name: str, value: Json) -> bool:
    return name in status and _same(status[name], value)


def _same(one: Json, other: Json) -> bool:
    """Return whether two values are the same JSON text: in Python, 1 is equal to True and to 1.0."""
    return one == other and _bytes(one) == _bytes(other)
