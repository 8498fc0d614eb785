"""Cost curves for a replay: by name, from a file, or as a trace has them.

`flat` and `steep` are what two engines measured on the same two cores for the same 1.5B model with
a 0.5B draft model (docs/design.md §2): transformers in bfloat16, where a row more costs little, and
llama.cpp with Q4_K_M, where every row costs. A file is what `draftwise profile --json` prints.
`trace` is the curve that was in force in the median request, by its price of one row, and the
median of the seconds beside the forwards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..core import UsageError
from ..engines.base import Shape
from ..policy.cost import GUESS, CostCurve
from .traces import Traced

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_FLAT = (202, 218, 235, 224, 252, 267, 303, 342, 419, 471)
_STEEP = (36, 57, 78, 96, 151, 229, 299, 277, 415, 480)
_MOST = 1 << 30  # rows or tokens: what is more is no measurement
Points = Sequence[tuple[int, int, float]]


@dataclass(frozen=True)
class World:
    """What things cost in a replay: width, context and seconds of the target's forward and of each
    serial drafter's; `rest`: seconds of a step beside them."""

    name: str
    target: Points
    serial: Mapping[str, Points]
    rest: float = 0.0

    def curve(self) -> CostCurve:
        return _curve(self.target)

    def drafting(self) -> dict[str, CostCurve]:
        return {name: _curve(points) for name, points in self.serial.items()}


def named(name: str, serial: Sequence[str]) -> World:
    """`flat` or `steep`, with every serial drafter as dear as the 0.5B is there."""
    milliseconds, one = {"flat": (_FLAT, 84), "steep": (_STEEP, 22)}[name]
    target = [(w, 0, t / 1e3) for w, t in zip(_WIDTHS, milliseconds, strict=True)]
    # What the table does not tell: a draft model's own rows get dearer as the target's do.
    draft = [(w, 0, t / target[0][2] * one / 1e3) for w, _, t in target]
    return World(name, target, {drafter: draft for drafter in serial})


def world(given: str, serial: Sequence[str]) -> World:
    """The curves that `--cost` names: flat, steep or a file."""
    if given in ("flat", "steep"):
        return named(given, serial)
    if not Path(given).exists():
        raise UsageError(f"unknown costs {given!r}: choose trace, flat, steep or a file")
    return _file(Path(given), serial)


def recorded(traces: Sequence[Traced], serial: Sequence[str]) -> World:
    """The curves of a trace itself."""
    if not all(sensible(points) for t in traces for points in t.costs.values()):
        raise UsageError("the trace's cost curves are no measurements: choose others with --cost")
    middle = sorted(traces, key=lambda t: _curve(t.costs["target"]).seconds(1, t.prompt))
    costs = middle[(len(middle) - 1) // 2].costs
    if missing := [name for name in serial if name not in costs]:
        raise UsageError(f"the trace has no cost curve for {', '.join(missing)}")
    rest = [step.seconds[2] for t in traces for step in t.steps]
    drafting = {name: costs[name] for name in serial}
    return World("trace", costs["target"], drafting, median(rest) if rest else 0.0)


def guessed(world: World) -> bool:
    """Whether the target's curve is only what is assumed until something is measured."""
    return list(map(tuple, world.target)) == [(s.width, s.context, t) for s, t in GUESS]


def _file(path: Path, serial: Sequence[str]) -> World:
    try:
        found = json.loads(path.read_text())
        target = _rows(found["target"])
        draft = _rows(found["draft"]) if "draft" in found else None
    except OSError as error:
        raise UsageError(f"cannot read cost curves: {error}") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(f"{path} is not what `draftwise profile --json` prints") from error
    if serial and draft is None:
        raise UsageError(f"{path} has no curve for {', '.join(serial)}: profile it with --draft")
    return World(path.name, target, {name: draft or [] for name in serial})


def _rows(report: Mapping[str, Sequence[Mapping[str, float]]]) -> Points:
    rows = [(int(p["width"]), int(p["context"]), p["ms"] / 1e3) for p in report["points"]]
    if not rows or not sensible(rows):
        raise ValueError("no points")
    return rows


def sensible(points: Points) -> bool:
    """Whether these can be widths, contexts and seconds of forwards."""
    return all(
        0 < width <= _MOST and 0 <= context <= _MOST and 0 < seconds < math.inf
        for width, context, seconds in points
    )


def _curve(points: Points) -> CostCurve:
    return CostCurve([(Shape(width, context), seconds) for width, context, seconds in points])
