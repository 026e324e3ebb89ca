"""Samples of one figure, and a figure beside its peer."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Samples:
    """Times of one thing, in milliseconds."""

    name: str
    values: list[float] = field(default_factory=list)
    absent: str | None = None
    """Why there are none (a peer that isn't installed, say)."""

    def time(self, action: Callable[[], object], count: int) -> None:
        """Runs `action` `count` times and keeps each wall time."""
        for _ in range(count):
            start = time.perf_counter()
            action()
            self.values.append((time.perf_counter() - start) * 1000)

    def quantile(self, q: float) -> float:
        """The nearest-rank quantile; NaN when there are no samples."""
        if not self.values:
            return math.nan
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]

    @property
    def p50(self) -> float:
        return self.quantile(0.5)

    @property
    def p99(self) -> float:
        return self.quantile(0.99)


@dataclass(frozen=True)
class Figure:
    """One figure with what it is compared with and what it has to reach.

    `limit` is in the figure's own unit, or a ratio to the peer when `relative`. `higher` figures (rates) have to
    reach at least the limit, all others at most.
    """

    name: str
    value: float
    unit: str
    limit: float
    relative: bool = False
    higher: bool = False
    peer: str | None = None
    peer_value: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.value / self.peer_value if self.peer_value else None

    @property
    def reached(self) -> bool:
        measured = self.ratio if self.relative else self.value
        if measured is None or math.isnan(measured):
            return False
        return measured >= self.limit if self.higher else measured <= self.limit

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": _finite(self.value),
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": _finite(self.peer_value),
            "ratio": _finite(self.ratio),
            "to_reach": {"limit": self.limit, "of": "ratio" if self.relative else "value", "at_least": self.higher},
            "reached": self.reached,
        }


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else round(value, 4)
