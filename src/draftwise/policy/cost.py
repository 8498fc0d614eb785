"""The cost curve: seconds of a forward by width and context, from measurement alone.

    T(w, c) = drift · (base(w) + slope(w) · c)

`base` holds one value per measured width, interpolated linearly between them and extrapolated by
the last segment's slope; `slope` (seconds per context token, at least 0) comes from the sweep's
second context and is interpolated likewise between width 1 and 16. `drift` is one factor for
the whole machine: a clamped EWMA of measured/expected over recent steps, so that when another
process takes a core the curve follows within some ten steps and comes back as fast. What a step
says of its own width beyond drift moves `base` near that width, slowly.

    T̃(w, c) = min over w' ≥ w of T(w', c)      (padding up to a cheaper width is allowed)

The curve is seeded by a sweep (engines/base.py), stored by engine name, and corrected by every
real step, since an isolated forward under-prices a step as served. Source: docs/design.md §2.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..engines.base import Shape

LARGEST = 4.0  # a step counts for at most this many times, and at least this fraction of, its price
DRIFT_RATE = 0.15
BASE_RATE = 0.08
VERSION = 1


class CostCurve:
    def __init__(self, points: Iterable[tuple[Shape, float]] = ()):
        self.drift = 1.0
        self._base: dict[int, float] = {}
        self._slopes: dict[int, float] = {}
        self._context = 0
        self._widths: list[int] = []
        self._counts: dict[int, int] = {}
        self._sweep(list(points))

    def _sweep(self, points: list[tuple[Shape, float]]) -> None:
        if not points:
            points = [(Shape(1, 0), 0.03), (Shape(64, 0), 0.09)]  # until something is measured
        self._context = min(shape.context for shape, _ in points)
        for shape, seconds in points:
            if shape.context == self._context:
                self._base[shape.width] = seconds
        for shape, seconds in points:
            if shape.context > self._context and shape.width in self._base:
                gained = seconds - self._base[shape.width]
                self._slopes[shape.width] = max(gained / (shape.context - self._context), 0.0)
        self._smooth()

    def _smooth(self) -> None:
        self._widths = sorted(self._base)

    def _interpolate(self, table: dict[int, float], widths: list[int], width: int) -> float:
        if len(widths) == 1:
            return table[widths[0]]
        i = min(max(bisect_right(widths, width), 1), len(widths) - 1)
        low, high = widths[i - 1], widths[i]
        rise = (table[high] - table[low]) / (high - low)
        if width > widths[-1]:
            rise = max(rise, 0.0)
            return table[high] + rise * (width - high)
        return table[low] + rise * (width - low)

    def _slope(self, width: int) -> float:
        if not self._slopes:
            return 0.0
        return max(self._interpolate(self._slopes, sorted(self._slopes), width), 0.0)

    def _steady(self, width: int, context: int) -> float:
        base = self._interpolate(self._base, self._widths, width)
        return base + self._slope(width) * max(context - self._context, 0)

    def seconds(self, width: int, context: int) -> float:
        """T(w, c) now, drift included."""
        return self.drift * self._steady(width, context)

    def row(self, widest: int, context: int) -> list[float]:
        """T̃(w, c) for w = 0..widest (index 0 repeats width 1)."""
        top = max(self._widths[-1], widest)
        row = [self.seconds(w, context) for w in range(1, widest + 1)]
        least = min(
            (self.seconds(w, context) for w in self._widths if widest < w <= top), default=math.inf
        )
        for i in range(widest - 1, -1, -1):
            least = row[i] = min(row[i], least)
        return [row[0], *row]

    def padded(self, width: int, context: int) -> int:
        """The cheapest width of at least `width`; itself unless a wider one is 3 % cheaper."""
        best, least = width, 0.97 * self.seconds(width, context)
        for w in self._widths:
            if w > width and self.seconds(w, context) < least:
                best, least = w, self.seconds(w, context)
        return best

    def learn(self, shape: Shape, seconds: float) -> None:
        """Corrects the curve by one real step."""
        expected = self.seconds(shape.width, shape.context)
        ratio = min(max(seconds / expected, 1 / LARGEST), LARGEST)
        self.drift *= math.exp(DRIFT_RATE * _clamped(math.log(ratio), 0.5))
        seen = self._counts.get(shape.width, 0)
        self._counts[shape.width] = seen + 1
        # A width seen for the first time tells more than one seen often.
        rate = max(BASE_RATE, 0.5 / (1 + seen))
        own = _clamped(math.log(seconds / self.seconds(shape.width, shape.context)), 0.5)
        self._move(shape.width, math.exp(rate * own))
        # Only relations between widths belong into `base`: the level is drift's. Width 1 is the
        # yardstick of everything, so the two must not chase one another.

    def scale(self, seconds: float, expected: float) -> None:
        """Corrects the level alone, by work that was several forwards."""
        if seconds > 0 and expected > 0:
            self.drift *= math.exp(DRIFT_RATE * _clamped(math.log(seconds / expected), 0.5))

    def _move(self, width: int, factor: float) -> None:
        if width in self._base:
            self._base[width] *= factor
            return
        if len(self._widths) == 1 or width > self._widths[-1]:
            self._base[width] = self._interpolate(self._base, self._widths, width) * factor
            self._smooth()
            return
        i = bisect_right(self._widths, width)
        for w in self._widths[max(i - 1, 0) : i + 1]:
            near = 1 - abs(w - width) / max(self._widths[i] - self._widths[i - 1], 1) if i else 1.0
            self._base[w] *= factor**near

    def points(self) -> list[tuple[Shape, float]]:
        """What a curve is rebuilt from: `CostCurve(curve.points())` has the same steady prices."""
        base = [(Shape(w, self._context), t) for w, t in sorted(self._base.items())]
        far = self._context + 1000
        return base + [(Shape(w, far), self._base[w] + s * 1000) for w, s in self._slopes.items()]


def _clamped(value: float, most: float) -> float:
    return min(max(value, -most), most)


class CostStore:
    """Cost curves on disk, one small JSON file for every engine name (model, device, dtype,
    threads). A file that cannot be read counts as absent; one that cannot be written is skipped."""

    def __init__(self, folder: Path):
        self._folder = folder

    def _file(self, name: str) -> Path:
        return self._folder / f"{sha256(name.encode()).hexdigest()[:20]}.json"

    def load(self, name: str) -> CostCurve | None:
        try:
            data = json.loads(self._file(name).read_text())
            if data["version"] != VERSION or data["engine"] != name:
                return None
            points = [(Shape(int(w), int(c)), float(t)) for w, c, t in data["points"]]
            return CostCurve(points) if points and all(t > 0 for _, t in points) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, name: str, curve: CostCurve) -> None:
        data: dict[str, Any] = {"version": VERSION, "engine": name}
        data["points"] = [(s.width, s.context, t) for s, t in curve.points()]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
                json.dump(data, file)
            os.replace(file.name, self._file(name))
        except OSError:
            return
