"""The matrix of deaths, and what is drawn of it.

A *cell* is a layout, a phase, a position (where a replica is one worker: which replica), one of the first, a later and
the last iteration.  ``RECOVER_MATRIX=all`` runs all of them, with and without dropout, over 40 iterations; otherwise a
run draws some by ``RECOVER_SEED``.

What a kill at a phase means, where it is not plain:

    data            the first tensor ranks of the first and of the last stage read; nobody else visits it
    reduce-scatter  a sum of the ring arrived; with n members 2 (n - 1) visits (one bucket and the tail) or more
    all-gather      a finished sum arrived; as many
    agree           everything is summed, and this worker has not said so: nothing can be committed without the others
    optimizer       visit 1 before Megatron's optimizer step, visit 2 after it: the iteration is committed
    recovery        visit 1 before the rendezvous, visit 2 before the lost microbatches run: another one died before
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.drawn import EVERYTHING
from tests.instep.runs import CONTEXT_LAYOUTS, LAYOUTS, Case, Layout, Strike

ITERATIONS = 40 if EVERYTHING else 8
PHASES = (
    "data", "forward", "backward", "reduce-scatter", "all-gather", "agree", "optimizer", "recovery", "eval",
    "checkpoint",
)  # fmt: skip
SHARDED_PHASES = ("shadow", "norm", "update", "param-gather")
"""What the distributed optimizer adds."""
WHEN = ("first", "later", "last")
BEFORE_THE_COMMIT = ("data", "forward", "backward", "reduce-scatter", "all-gather", "agree")
IN_A_MICROBATCH = ("data", "forward", "backward")
IN_THE_RING = ("reduce-scatter", "all-gather")


@dataclass(frozen=True)
class Cell:
    """See the module's text."""

    layout: Layout
    phase: str
    place: int
    when: str
    dropout: bool
    kind: str = "kill"

    def __str__(self) -> str:
        dropout = "-dropout" * self.dropout
        return f"{self.layout.name}-{self.phase}-{self.place}-{self.when}{dropout}-{self.kind}"


def visits(layout: Layout, position: int, phase: str) -> bool:
    """Whether the workers of this position ever visit this phase."""
    stage, tensor_rank = position // (layout.tensor * layout.context), position % layout.tensor
    return phase != "data" or (tensor_rank == 0 and stage in (0, layout.pipeline - 1))


def cells(
    layouts: Sequence[Layout] = (*LAYOUTS, *CONTEXT_LAYOUTS),
    phases: Sequence[str] = PHASES,
    dropouts: Sequence[bool] = (False, True),
) -> list[Cell]:
    """The whole matrix, kills only."""
    found = []
    for layout in layouts:
        places = [0, 1, layout.replicas - 1] if layout.positions == 1 else range(layout.positions)
        for phase in phases:
            if phase == "recovery" and layout.replicas == 2:
                continue  # nobody would be left: see test_ends.py
            for place in places:
                if layout.positions > 1 and not visits(layout, place, phase):
                    continue
                found += [Cell(layout, phase, place, when, dropout) for when in WHEN for dropout in dropouts]
    return found


def drawn(seed: int) -> list[Cell]:
    """Every phase once, so laid over the layouts that each of them comes at least once, with dropout or without."""
    source = random.Random(f"cells {seed}")
    every = cells()
    layouts = [*LAYOUTS, *CONTEXT_LAYOUTS]
    having = {phase: {cell.layout for cell in every if cell.phase == phase} for phase in PHASES}
    while True:
        dealt = source.sample([*layouts, *source.sample(layouts, len(PHASES) - len(layouts))], len(PHASES))
        if all(layout in having[phase] for phase, layout in zip(PHASES, dealt, strict=True)):
            break
    dropout = {layout: source.random() < 0.5 for layout in layouts}
    return [
        source.choice([cell for cell in every if (cell.layout, cell.phase, cell.dropout) == (at, phase, dropout[at])])
        for phase, at in zip(PHASES, dealt, strict=True)
    ]


def case_of(cell: Cell, seed: int, most: int = 0, iterations: int = ITERATIONS) -> Case:
    """What the cell leaves open (which replica, which visit, which iteration a later one is) is drawn.

    ``most``: visits that are made for certain; 0: ``most_visits``.
    """
    source = random.Random(f"{cell} {seed}")
    layout = cell.layout
    replica, position = source.randrange(layout.replicas), cell.place
    if layout.positions == 1:
        replica, position = cell.place, 0
    iteration = {"first": 1, "last": iterations, "later": source.randrange(2, iterations)}[cell.when]
    visit = source.randint(1, most or most_visits(layout, cell.phase, layout.replicas))
    strikes = [Strike(replica, position, iteration, cell.phase, cell.kind, visit)]
    if cell.phase == "recovery":
        strikes = before_recovery(source, layout, strikes[0])
    return Case(layout, tuple(strikes), iterations, cell.dropout)


def most_visits(layout: Layout, phase: str, replicas: int) -> int:
    """How often a phase is visited in an iteration for certain, at least."""
    if phase in IN_THE_RING:
        return 2 * (replicas - 1)
    if phase == "param-gather":
        return replicas - 1
    if phase in IN_A_MICROBATCH:
        return min(3, layout.samples // (layout.replicas * layout.inner_ranks))
    most = {"optimizer": 2, "update": 2, "recovery": 2, "eval": 2}
    return most.get(phase, 1)


def before_recovery(source: random.Random, layout: Layout, strike: Strike) -> list[Strike]:
    """A death in another replica that the recovery of ``strike`` is that of."""
    other = source.choice([replica for replica in range(layout.replicas) if replica != strike.replica])
    # Who dies in "agree" may be the only one that has not reported: then nothing is run again (visit 2).
    phase = source.choice([phase for phase in BEFORE_THE_COMMIT if strike.visit == 1 or phase != "agree"])
    return [Strike(other, _position(source, layout, phase), strike.iteration, phase), strike]


def rows(seed: int) -> Iterator[Case]:
    """Several deaths in one run, down to one replica: at once, one after another, one in the recovery of another."""
    source = random.Random(f"rows {seed}")
    while True:
        for layout in LAYOUTS[:4]:
            yield row(source, layout)


def row(source: random.Random, layout: Layout, iterations: int = ITERATIONS) -> Case:
    """One such case.

    Within one iteration at most one strike lies in the ring, in a visit that is made whoever else is gone; so each
    strikes for certain.
    """
    victims = source.sample(range(layout.replicas), layout.replicas - 1)
    together = source.randint(1, iterations)
    when = [source.choice([together, source.randint(1, iterations)]) for _ in victims]
    strikes: list[Strike] = []
    for replica, iteration in zip(victims, sorted(when), strict=True):
        phase = source.choice(_phases([strike.phase for strike in strikes if strike.iteration == iteration]))
        visit = source.randint(1, min(2, layout.samples // layout.replicas)) if phase in IN_A_MICROBATCH else 1
        strikes.append(Strike(replica, _position(source, layout, phase), iteration, phase, visit=visit))
    return Case(layout, tuple(strikes), iterations, source.random() < 0.5)


def _phases(before: list[str]) -> list[str]:
    """What may strike in an iteration in which others strike at ``before``."""
    phases = [phase for phase in BEFORE_THE_COMMIT if phase not in IN_THE_RING or not {*before} & {*IN_THE_RING}]
    if {*before} & {*BEFORE_THE_COMMIT}:
        phases += ["recovery", "recovery"]
    return [*phases, "optimizer"]


def _position(source: random.Random, layout: Layout, phase: str) -> int:
    return source.choice([p for p in range(layout.positions) if visits(layout, p, phase)])
