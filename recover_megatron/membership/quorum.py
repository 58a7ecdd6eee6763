"""The rule of partition and failover, by which some of the workers may go on, as pure functions.

Words. ``gone``: workers known to have ended (their kernel closed the connection, a node agent saw the process end) or
to have left in order. The unreachable are not gone: they may be running on the other side of a partition.

The rule, for a coordinator that wants to fix the plan of a new epoch with the workers it reaches:

* Nobody is missing but the gone: it may, however few are left.
* It formed the last epoch itself: it needs at least half of that epoch's members that are not gone (its own vote
  breaks the tie).
* It did not (the old coordinator is lost): it needs more than half of them, and more than half of every rendezvous
  that anybody presents as opened after that epoch, since one of those may have been formed unseen.
* With a lease (``lease``, on shared storage) the same holds for both: more than half of the epoch's members, those
  that are gone counted as if they were missing, may go on. Fewer of them that miss no more than half, and still
  have one, need the lease (``standing``). Others may not go on.

  One case more is ``witness``'s: those that are fewer need the lease where nobody else can be running.

* Members that have no part in the last epoch (*idle*) cannot tell what it committed, since nothing waited for them. So
  where somebody is missing who may be running, idle members alone never go on under a new coordinator, lease or not.

Why two sides can never both go on: let M be the last epoch both know, A the side that formed it, B the other. They are
disjoint, because a member follows one coordinator at a time and only ever a higher term. A has at least half of those
of M that are not gone, B has more than half; both cannot be, unless B knows deaths on A's side that happened
after A went on. Such a death could only be told by a node agent, and a side that leaves somebody out goes on
only after the node agents of its own members have acknowledged the new rendezvous: a node agent that later turns to B
presents it, and B needs a majority of that one too.

*Newcomers* add members to an epoch and votes to its count, but never take the place of those before: until a rendezvous
counts on them they are in no set that anybody needs a majority of, until they hold a plan they cannot tell what was
committed, and newcomers alone go on nowhere. The argument above holds as it stands, since whoever of M is in a later
epoch has joined it, so presents it.

With the lease two sides can never both have *enough* and a *claim*, whatever deaths each of them knows: of the epoch's
members one would need more than half, and the other would miss no more than half; what a side learns of the other's
deaths later is told by a node agent, as above. Of two claims the lease grants the second only to a side with a member
of the first, that has followed the second's coordinator later: then the first side can go on without that member only
by another claim, which is refused (``lease.may_take``). The lease knows no time, so no pause and no clock matters.

The Promela model (tests/formal/) explores this exhaustively, with a lease and without, for a run without newcomers; the
simulation (tests/membership) has those, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from recover_megatron.membership.records import Workers


def majority(reached: Workers, members: Workers, gone: Workers, tie: bool) -> bool:
    """Whether ``reached`` is more than half of ``members`` that are not ``gone`` (with ``tie``: at least half).

    When all members are gone nobody can be running on another side, so anybody is a majority.
    """
    living = members - gone
    votes = 2 * len(reached & living)
    return votes >= len(living) if tie or not living else votes > len(living)


def may_go_on(reached: Workers, bases: Iterable[Workers], gone: Workers, own: bool) -> bool:
    """The rule above, without an arbiter. ``own``: this coordinator formed the last epoch (``bases`` is it alone)."""
    return bool(reached) and all(majority(reached, base, gone, tie=own) for base in bases)


class Standing(Enum):
    """What those that a coordinator reaches may do, where somebody is missing who may be running."""

    ENOUGH = "enough"
    """Go on."""
    CLAIM = "claim"
    """Go on if they get the lease."""
    TOO_FEW = "too few"
    """Nothing: the others may go on."""


def standing(reached: Workers, bases: Iterable[Workers], gone: Workers, slack: int) -> Standing:
    """The rule above with a lease. The same for whoever formed the last epoch.

    ``slack``: by so many workers two halves may differ that can each get the lease, since a node has more workers left
    than another one. The same for all candidates of a run.
    """
    answer = Standing.ENOUGH
    for base in bases:
        living = base - gone
        here, missing, all_votes = reached & living, living - reached, len(base) + slack
        if not missing or 2 * len(here) > all_votes:
            continue
        if not here or 2 * len(missing) > all_votes:
            return Standing.TOO_FEW
        answer = Standing.CLAIM
    return answer if reached else Standing.TOO_FEW


def can_tell(reached: Workers, idle: Workers, missing: Workers, own: bool) -> bool:
    """Whether what the last epoch committed is known to ``reached``, or to nobody who may be running elsewhere.

    ``idle``: members without a part in that epoch; ``missing``: those not reached that are not gone. Members with a
    part have reported what may have been committed, and the coordinator that formed the epoch (``own``) has decided it.
    """
    return own or not missing or bool(reached - idle)
