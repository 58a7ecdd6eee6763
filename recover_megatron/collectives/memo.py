"""Results of pure functions that an iteration asks for again and again."""

from collections.abc import Callable, Hashable


class Memo[V]:
    """By key; all are forgotten when they weigh more than ``most``.  For any thread: at worst one is made twice."""

    def __init__(self, most: int, weight: Callable[[V], int]) -> None:
        """``weight``: of a value, in the unit of ``most``."""
        self._most = most
        self._weight = weight
        self._known = dict[Hashable, V]()
        self._total = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """What ``make`` gave for ``key``; it must depend on nothing else."""
        known = self._known.get(key)
        if known is None:
            known = make()
            self._total += self._weight(known)
            if self._total > self._most:
                self._known.clear()
                self._total = self._weight(known)
            self._known[key] = known
        return known
