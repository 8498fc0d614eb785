"""From measurements to figures: speeds, ratios with intervals, acceptance, identity.

Speed is a ratio of sums: all tokens after the first ÷ all decode seconds. The mean of ratios
would give a prompt that ends after three tokens the weight of one with three hundred. A speed-up
compares two such speeds over the same prompts. Its interval is a bootstrap over prompts, paired:
each resample draws prompts and takes both methods' seconds for them, so that what makes a prompt
slow for both does not widen it. It says how far other prompts of the kind would move the figure;
with fewer than two prompts there is none (None). The resamples are seeded: the same measurements
give the same report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from .journal import Measurement

RESAMPLES = 4000
Floats = npt.NDArray[np.float64]
ByMethod = Mapping[str, Mapping[int | str, Measurement]]


def ratio(
    ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]
) -> tuple[float | None, list[float] | None]:
    """Speed of `ours` ÷ speed of `theirs`, pairs of (tokens, seconds) prompt by prompt, and its
    95 % interval."""
    return resampled(np.hstack([np.array(ours, float), np.array(theirs, float)]), _ratio_of_speeds)


def resampled(
    rows: Floats, figure: Callable[[Floats], Floats]
) -> tuple[float | None, list[float] | None]:
    """A figure of the column sums of `rows`, one row a prompt, and its 95 % interval. `figure` maps
    sums on the last axis to numbers; what it cannot tell is not finite."""
    n = len(rows)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = figure(rows.sum(0))
        if not np.isfinite(whole):
            return None, None
        if n < 2:
            return float(whole), None
        draws = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
        found = figure(draws @ rows)
    low, high = np.percentile(found[np.isfinite(found)], [2.5, 97.5])
    return float(whole), [float(low), float(high)]


def _ratio_of_speeds(sums: Floats) -> Floats:
    ratio: Floats = (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
    return ratio


def by_method(measurements: Sequence[Measurement]) -> ByMethod:
    table: dict[str, dict[int | str, Measurement]] = {}
    for m in measurements:
        table.setdefault(m.method, {})[m.question_id] = m
    return table


def base_of(methods: Sequence[str]) -> str | None:
    """What speed-ups and identity refer to."""
    return next((m for m in ("plain", "hf-plain") if m in methods), None)


def identical(m: Measurement, table: ByMethod, base: str | None) -> bool | None:
    """Whether a text has the very tokens of the base's."""
    return m.token_ids == table[base][m.question_id].token_ids if base else None


def methods(table: ByMethod) -> dict[str, Any]:
    """`overall` and `by_category` of every method."""
    base = base_of(list(table))
    return {
        name: {
            "overall": _figures(list(own.values()), table, base),
            "by_category": {
                category: _figures(some, table, base) for category, some in _split(own).items()
            },
        }
        for name, own in table.items()
    }


def comparisons(table: ByMethod, one: str = "auto") -> dict[str, Any]:
    """Ratios of one method against every other, as `{"auto/hf-lookup": {...}}`."""
    if one not in table:
        return {}
    return {
        f"{one}/{other}": {
            "overall": _compared(list(table[one].values()), table[other]),
            "by_category": {
                category: _compared(some, table[other])
                for category, some in _split(table[one]).items()
            },
        }
        for other in table
        if other != one
    }


def _compared(
    ours: Sequence[Measurement], theirs: Mapping[int | str, Measurement]
) -> dict[str, Any]:
    value, interval = ratio(
        [_speed(m) for m in ours], [_speed(theirs[m.question_id]) for m in ours]
    )
    return {"ratio": value, "interval": interval}


def _split(own: Mapping[int | str, Measurement]) -> dict[str, list[Measurement]]:
    split: dict[str, list[Measurement]] = {}
    for m in own.values():
        split.setdefault(m.category, []).append(m)
    return split


def _speed(m: Measurement) -> tuple[float, float]:
    return float(m.decoded), m.decode_seconds


def _figures(some: Sequence[Measurement], table: ByMethod, base: str | None) -> dict[str, Any]:
    tokens, seconds = sum(m.decoded for m in some), sum(m.decode_seconds for m in some)
    compared = _compared(some, table[base]) if base else {"ratio": None, "interval": None}
    same = [identical(m, table, base) for m in some]
    return {
        "tokens_per_second": tokens / seconds if seconds > 0 else None,
        "speedup_vs_plain": compared["ratio"],
        "speedup_interval": compared["interval"],
        "tokens_per_step": _shared(tokens, [m.steps for m in some]),
        "acceptance": _shared(sum(m.accepted or 0 for m in some), [m.verified for m in some]),
        "identical_to_plain": sum(x is True for x in same) / len(same) if base else None,
        "time_to_first_token": median(m.ttft for m in some),
        "prompts": len(some),
        "tokens": sum(len(m.token_ids) for m in some),
    }


def _shared(part: int, wholes: Sequence[int | None]) -> float | None:
    """part ÷ Σ wholes; None where they are unknown or nothing."""
    known = [w for w in wholes if w is not None]
    whole: int = sum(known)
    return part / whole if len(known) == len(wholes) and whole > 0 else None
