"""What the pictures that are part of the page share: their width, the time axis under them, the legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT = 70
"""For the names of what is in the picture."""
_WIDTH, _FOOT = 960, 26
_RIGHT = 30  # for half of the last time's text
_PARTS = 6
"""Between two times; at most."""


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a class of the page's style, and what it stands for."""

    css: str
    text: str


@dataclass(frozen=True)
class Axis:
    """From ``begin`` to ``end``, unix seconds."""

    begin: float
    end: float

    @property
    def scale(self) -> float:
        """Of a second."""
        return (_WIDTH - LEFT - _RIGHT) / max(self.end - self.begin, 1e-9)

    def x(self, time: float) -> float:
        """Where a moment is."""
        return LEFT + (time - self.begin) * self.scale

    def picture(self, css: str, words: str, parts: Sequence[str], height: int, gap: int) -> str:
        """An SVG of ``parts``, ``height`` high, and ``gap`` below it round times since ``begin``; ``words``: for a
        reader who does not see it."""
        of, y = self.end - self.begin, height + gap
        ticks = (
            f'<text x="{self.x(self.begin + time):.1f}" y="{y}" text-anchor="middle">{since(time, of)}</text>'
            for time in round_times(of)
        )
        head = f'<svg class="{css}" role="img" aria-label="{escape(words)}" viewBox="0 0 {_WIDTH} {height + _FOOT}">'
        return "".join([head, *parts, *ticks, "</svg>"])


def round_times(of: float) -> list[float]:
    """From 0 to at most ``of`` seconds, each a multiple of 1, 2 or 5 (times a power of ten) of its unit."""
    unit = _unit(of)
    step = 10.0 ** math.floor(math.log10(max(of / unit, 1e-3) / _PARTS))
    step = next(size for size in (step, 2 * step, 5 * step, 10 * step) if size * _PARTS >= of / unit) * unit
    return [n * step for n in range(math.floor(of / step + 1e-9) + 1)]


def since(seconds: float, of: float) -> str:
    """Seconds in the unit that suits a picture of ``of`` seconds."""
    unit = _unit(of)
    return f"{seconds / unit:{'.0f' if of >= 6 * unit else '.1f'}} {_UNITS[unit]}"


_UNITS = {1: "s", 60: "min", 3600: "h"}


def _unit(of: float) -> int:
    return 1 if of < 600 else 60 if of < 18000 else 3600
