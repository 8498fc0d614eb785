"""The cost curve: seconds of a forward by width and context, from measurement alone.

    T(w, c) = drift · (base(w) + slope(w) · c)

`base` holds one value per measured width, interpolated linearly between them and extrapolated by
the last segment's slope; `slope` (seconds per context token, at least 0) comes from the sweep's
second context and is interpolated likewise between width 1 and 16. `drift` is one factor for
the whole machine: a clamped EWMA of measured/expected over recent steps, so that when another
process takes a core the curve follows within some ten steps and comes back as fast. What a step
says of its own width beyond drift moves `base` there, slowly.

    T̃(w, c) = min over w' ≥ w of T(w', c)      (padding up to a cheaper width is allowed)

A forward of b sequences, each of width w after c tokens, has a curve of its own, T_b(w, c). Until
it is measured it is taken to cost what one sequence of b·w rows does, and its attention b times
that of one, corrected by how far the nearest b that was measured is from that:

    T_b(w, c) = T_n(w, c) · P_b(w, c) / P_n(w, c),   P_b(w, c) = base(b·w) + b · slope(w) · c

Plain decoding of a batch is T_b(1, c). The level of one sequence's curve moves the others along.

The curve is seeded by a sweep (engines/base.py), stored by engine name, and corrected by every
real step, since an isolated forward under-prices a step as served. Source: docs/design.md §2.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engines.base import Shape

LARGEST = 4.0  # a step counts for at most this many times, and at least this fraction of, its price
DRIFT_RATE = 0.15
BASE_RATE = 0.02  # far below drift's, or a busy machine would bend the curve instead of lifting it
COMMON_RATE = 0.3
FAR = 0.7  # a step that took half of what it should, level aside
SWEPT = 2.0  # what the sweep says of a width counts as so many steps
VERSION = 2
WIDEST = 64  # of the widths at which a batch's curve is guessed
TAUGHT = 7  # steps after which a guessed curve is as good as a measured one
GUESS = ((Shape(1, 0), 0.03), (Shape(64, 0), 0.09))  # until something is measured
Floats = npt.NDArray[np.float64]


class CostCurve:
    def __init__(self, points: Iterable[tuple[Shape, float]] = ()):
        """`points`: measured (shape, seconds); those of the shortest context make the base. A
        shape's width and context are those of each of its sequences."""
        points, together = list(points), [p for p in points if p[0].batch > 1]
        points = [(shape, t) for shape, t in points if shape.batch == 1]
        self.measured = bool(points)
        points = points or list(GUESS)
        self.drift = 1.0
        self._common = 0.0  # what drift has not caught up with, over the last few steps
        self._last = 0.0  # what the last re-timing of this kind said
        self._context = min(shape.context for shape, _ in points)
        base = {s.width: t for s, t in points if s.context == self._context}
        if len(base) == 1:  # one width says nothing of the others: assume that rows cost something
            ((width, seconds),) = base.items()
            base[64 * width] = 3.0 * seconds
        self._widths: Floats = np.array(sorted(base), dtype=np.float64)
        self._base: Floats = np.array([base[int(w)] for w in self._widths])
        self._seen: Floats = np.full(len(base), SWEPT)
        slopes = {
            s.width: max((t - base[s.width]) / (s.context - self._context), 0.0)
            for s, t in points
            if s.context > self._context and s.width in base
        }
        self._sloped = bool(slopes)
        self._slope_widths = sorted(slopes) or [1]
        self._slopes = [slopes[w] for w in sorted(slopes)] or [0.0]
        self._guess = TAUGHT  # steps that a guessed curve has learned from, up to so many
        self._batches: dict[int, CostCurve] = {}
        for batch in sorted({shape.batch for shape, _ in together}):
            own = [(Shape(s.width, s.context), t) for s, t in together if s.batch == batch]
            self._batches[batch] = CostCurve(own)

    def of(self, batch: int) -> CostCurve:
        """The curve of forwards of so many sequences."""
        if batch == 1:
            return self
        if batch not in self._batches:
            self._batches[batch] = self._guessed(batch)
        return self._batches[batch]

    def _guessed(self, batch: int) -> CostCurve:
        """T_b(w, c) by the formula above, which is read off where widths were measured."""
        near = min([1, *self._batches], key=lambda b: (abs(b - batch), b))
        points = []
        for context in (self._context, self._context + 1000)[: 1 + self._sloped]:
            for width in (1, *(int(w) for w in self._widths if 1 < w <= WIDEST)):
                prior = self._prior(batch, width, context) / self._prior(near, width, context)
                seconds = self.of(near).seconds(width, context) * prior
                points.append((Shape(width, context), seconds))
        curve = CostCurve(points)
        curve._guess = 0
        return curve

    def _prior(self, batch: int, width: int, context: int) -> float:
        """P_b(w, c)."""
        return self._base_at(batch * width) + batch * self._slope_at(width, context)

    def seconds(self, width: float, context: int, batch: int = 1) -> float:
        """T_b(w, c) now, drift included."""
        if batch > 1:
            return self.of(batch).seconds(width, context)
        return float(self.drift * (self._base_at(width) + self._slope_at(width, context)))

    def _base_at(self, width: float) -> float:
        base = _line(width, self._widths, self._base)
        if width > self._widths[-1]:
            base += self._rise() * (width - self._widths[-1])
        return base

    def _slope_at(self, width: float, context: int) -> float:
        slope = _line(width, self._slope_widths, self._slopes)
        return slope * max(context - self._context, 0)

    def _rise(self) -> float:
        """What a row costs beyond the last width; there are always two widths at least."""
        rise = (self._base[-1] - self._base[-2]) / (self._widths[-1] - self._widths[-2])
        return max(float(rise), 0.0)

    def _prices(self, widths: Floats, context: int) -> Floats:
        base = np.interp(widths, self._widths, self._base)
        if widths[-1] > self._widths[-1]:
            base += self._rise() * np.maximum(widths - self._widths[-1], 0.0)
        slope = np.interp(widths, self._slope_widths, self._slopes)
        prices: Floats = self.drift * (base + slope * max(context - self._context, 0))
        return prices

    def row(self, widest: int, context: int, batch: int = 1, padding: bool = True) -> list[float]:
        """T̃_b(w, c) for w = 0..widest (index 0 repeats width 1); T_b without padding."""
        if batch > 1:
            return self.of(batch).row(widest, context, padding=padding)
        widths = np.arange(1, max(widest, int(self._widths[-1])) + 1, dtype=np.float64)
        prices = self._prices(widths, context)
        if not padding:
            exact: list[float] = prices[:widest].tolist()
            return [exact[0], *exact]
        least: list[float] = np.minimum.accumulate(prices[::-1])[::-1][:widest].tolist()
        return [least[0], *least]

    def padded(self, width: int, context: int) -> int:
        """The cheapest width of at least `width`; itself unless a wider one is 3 % cheaper."""
        wider = self._widths[self._widths > width]
        if not len(wider):
            return width
        prices = self._prices(wider, context)
        best = int(prices.argmin())
        return int(wider[best]) if prices[best] < 0.97 * self.seconds(width, context) else width

    def learn(self, shape: Shape, seconds: float, least: float = 0.0, probe: bool = False) -> None:
        """Corrects the curve by one real step: the level by all steps, a width by its own, which
        moves by at least the share `least` of what it was off. `probe`: the step was taken to see
        whether the curve prices wider forwards out for nothing."""
        if shape.batch > 1:
            self.of(shape.batch).learn(Shape(shape.width, shape.context), seconds, least, probe)
            return
        self.scale(seconds, self.seconds(shape.width, shape.context))
        own = math.log(seconds / self.seconds(shape.width, shape.context))
        if least and not probe:
            # A busy machine makes every width slow: what steps of other widths said just now is
            # not this one's own, and what a single step says may be a stall. (2026-12-01: bursts
            # of load had moved T(1) to four times what it was, and the wider ones down for it.)
            said, own = own - self._common, _agreed(own - self._common, self._last)
            self._last = said
        else:
            self._common += COMMON_RATE * (min(max(own, -1.5), 1.5) - self._common)
        if probe and own < -FAR:
            # The sweep met a bad moment: what it says of this width and wider ones, as far as no
            # step has confirmed it, comes down at once, or nothing so dear would be tried again.
            doubtful = (self._widths >= shape.width) & (self._seen <= SWEPT)
            self._base[doubtful] *= math.exp(own)
            own = 0.0
        self._move(shape.width, min(max(own, -1.0), 1.0), least)

    def scale(self, seconds: float, expected: float) -> None:
        """Corrects the level alone, by work that may have been several forwards."""
        if seconds <= 0 or expected <= 0:
            return
        rate = DRIFT_RATE
        if self._guess < TAUGHT:
            self._guess += 1
            rate = max(1.0 / self._guess, DRIFT_RATE)  # the mean of what the first steps say
        change = min(max(seconds / expected, 1 / LARGEST), LARGEST) ** rate
        for curve in (self, *self._batches.values()):
            curve.drift *= change

    def _move(self, width: int, own: float, least: float) -> None:
        at = int(np.searchsorted(self._widths, width))
        if at == len(self._widths) or self._widths[at] != width:
            # A width of its own: shared out among its neighbours, what it says would bend T(1).
            price = self.seconds(width, self._context) / self.drift
            self._widths = np.insert(self._widths, at, width)
            self._base = np.insert(self._base, at, price)
            self._seen = np.insert(self._seen, at, 0.0)
        # What is far off was measured on a machine that has changed since: mend it sooner. The
        # first steps at a width tell more than later ones.
        steady = BASE_RATE * (1.0 + 10.0 * min(abs(own), 0.5))
        rate = max(steady, 0.4 / (1.0 + self._seen[at]), least)
        self._base[at] *= math.exp(rate * own)
        self._seen[at] += 1.0

    def points(self) -> list[tuple[Shape, float]]:
        """What a curve is rebuilt from: `CostCurve(curve.points())` has the same steady prices."""
        base = {int(w): float(t) for w, t in zip(self._widths, self._base, strict=True)}
        points = [(Shape(w, self._context), t) for w, t in base.items()]
        for w, slope in zip(self._slope_widths, self._slopes, strict=True):
            if self._sloped and w in base:
                points.append((Shape(w, self._context + 1000), base[w] + slope * 1000))
        return points

    def batch_points(self) -> list[tuple[Shape, float]]:
        """The same for the batches that steps have measured, at this curve's level."""
        return [
            (shape._replace(batch=batch), t * curve.drift / self.drift)
            for batch, curve in self._batches.items()
            if curve._guess >= TAUGHT
            for shape, t in curve.points()
        ]


def _agreed(one: float, other: float) -> float:
    """What two of the same sign have in common."""
    return min(one, other, key=abs) if one * other > 0 else 0.0


def _line(x: float, xs: Sequence[float] | Floats, ys: Sequence[float] | Floats) -> float:
    """np.interp for one number: 1 µs, where that takes 8."""
    i = bisect_right(xs, x)
    if i == 0 or i == len(xs):
        return float(ys[i - 1] if i else ys[0])
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return float(ys[i - 1] + share * (ys[i] - ys[i - 1]))


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
            points = [
                (Shape(int(w), int(c), *map(int, b)), float(t)) for w, c, t, *b in data["points"]
            ]
            return CostCurve(points) if points and all(t > 0 for _, t in points) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, name: str, curve: CostCurve) -> None:
        data: dict[str, Any] = {"version": VERSION, "engine": name}
        data["points"] = [
            (s.width, s.context, t, s.batch) for s, t in [*curve.points(), *curve.batch_points()]
        ]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
                json.dump(data, file)
            os.replace(file.name, self._file(name))
        except OSError:
            return
