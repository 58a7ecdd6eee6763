"""The time axis under the pictures that are part of the page, and its legend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

RIGHT = 30
"""To the right of a picture, for half of the last time's text."""
_PARTS = 6
"""Between two times; at most."""


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a class of the page's style, and what it stands for."""

    css: str
    text: str


def ticks(begin: float, end: float, x: Callable[[float], float], y: float) -> str:
    """Round times since ``begin`` as SVG, at the height ``y``."""
    times = round_times(end - begin)
    return "".join(
        f'<text x="{x(begin + time):.1f}" y="{y}" text-anchor="middle">{since(time, end - begin)}</text>'
        for time in times
    )


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
