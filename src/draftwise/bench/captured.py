"""What a replay comes to: speeds over plain decoding, and the share of the possible gain.

    captured gain = (T_plain − T_policy) / (T_plain − V(0))

as a ratio of sums over requests, with V(0) the hindsight optimum (oracle.py): 1 is what nobody can
reach, 0 is plain decoding, below 0 the policy lost time. Where V(0) is not at least 5 % faster than
plain there is nothing to capture, and no share is given. Intervals are bootstraps over requests
(summary.py). Requests of a single token have no decoding, and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core import UsageError
from .calibration import Reliability
from .costs import World
from .oracle import Bounds, bounds
from .replay import replay
from .spent import Spent, Watched
from .summary import Floats, resampled
from .traces import Traced

HEADROOM = 0.05
LONG = 256  # tokens from which on a request counts as long
PLAIN = "plain"
HINDSIGHT, CLAIRVOYANT = "hindsight", "clairvoyant-greedy"
BEST, BEST_EACH = "best fixed", "best for each request"


@dataclass(frozen=True)
class Row:
    """Of a policy or a reference. `speed`: over plain; `worst`: in one request, `worst_long` in one
    of at least LONG tokens."""

    name: str
    seconds: float
    speed: float
    captured: float | None
    interval: Sequence[float] | None
    worst: float
    worst_long: float | None
    tokens_per_step: float | None = None


@dataclass(frozen=True)
class Category:
    """Speeds over plain and captured gains, by the names of rows."""

    label: str
    requests: int
    tokens_per_second: float
    speed: Mapping[str, float]
    captured: Mapping[str, float | None]


@dataclass(frozen=True)
class Recorded:
    """A policy as it was served, and as it was replayed."""

    policy: str
    recorded_seconds: float
    replayed_seconds: float
    recorded_steps: int
    replayed_steps: int


@dataclass(frozen=True)
class Study:
    """All that one set of cost curves tells of a trace."""

    world: World
    requests: int
    tokens: int
    policies: tuple[Row, ...]
    references: tuple[Row, ...]
    categories: tuple[Category, ...]
    spent: Mapping[str, Spent]
    widths: Mapping[str, Mapping[int, int]]
    recorded: Recorded | None = None
    calibration: tuple[Reliability, ...] = ()


class _Replays:
    """Seconds of each request by policy and reference, and what was seen on the way."""

    def __init__(
        self,
        traces: Sequence[Traced],
        policies: Sequence[str],
        world: World,
        advance: Callable[[], None],
    ):
        self.traces, self.world = traces, world
        self.tokens = np.array([t.tokens - 1 for t in traces])
        self.seconds: dict[str, Floats] = {}
        self.steps: dict[str, int] = {}
        self.watched: dict[str, Watched] = {}
        for name in dict.fromkeys((PLAIN, *policies)):
            self.watched[name] = watch = Watched(world)
            made, _ = replay(traces, name, world, watch)
            self.seconds[name] = np.array([r.seconds for r in made])
            self.steps[name] = sum(r.steps for r in made)
            advance()
        found = [bounds(t, world) for t in traces]
        advance()
        self.plain = self.seconds[PLAIN]
        self.hindsight = np.array([b.hindsight for b in found])
        each = [min([p, *b.fixed.values()]) for b, p in zip(found, self.plain, strict=True)]
        self.best, self.fixed = _best_fixed(found, self.plain)
        self.references = {
            HINDSIGHT: self.hindsight,
            CLAIRVOYANT: np.array([b.clairvoyant for b in found]),
            f"best {self.best}": self.fixed,
            BEST_EACH: np.array(each),
        }

    def row(self, name: str) -> Row:
        seconds = self.references[name] if name in self.references else self.seconds[name]
        steps = self.steps.get(name)
        speeds = self.plain / seconds
        long = speeds[self.tokens >= LONG - 1]
        captured, interval = share(self.plain, seconds, self.hindsight)
        return Row(
            name,
            float(seconds.sum()),
            float(self.plain.sum() / seconds.sum()),
            captured,
            interval,
            float(speeds.min()),
            float(long.min()) if len(long) else None,
            float(self.tokens.sum() / steps) if steps else None,
        )

    def category(self, label: str) -> Category:
        here = np.array([t.label == label for t in self.traces])
        every = {BEST: self.fixed, HINDSIGHT: self.hindsight} | self.seconds
        own = {name: seconds[here] for name, seconds in every.items()}
        plain, hindsight = own[PLAIN], own[HINDSIGHT]
        return Category(
            label,
            int(here.sum()),
            float(self.tokens[here].sum() / plain.sum()),
            {name: float(plain.sum() / seconds.sum()) for name, seconds in own.items()},
            {name: share(plain, seconds, hindsight)[0] for name, seconds in own.items()},
        )

    def recorded(self) -> Recorded | None:
        """What the trace took, if one policy made all of it and was replayed on its own curves."""
        policy, *others = {t.policy for t in self.traces}
        if others or self.world.name != "trace" or policy not in self.seconds:
            return None
        took, count = sum(t.seconds for t in self.traces), sum(len(t.steps) for t in self.traces)
        return Recorded(policy, took, float(self.seconds[policy].sum()), count, self.steps[policy])


def study(
    traces: Sequence[Traced],
    policies: Sequence[str],
    world: World,
    advance: Callable[[], None] = lambda: None,
) -> Study:
    """Replays plain, then the policies. `advance` is called after each of them, and after all."""
    traces = [t for t in traces if t.tokens > 1]
    if not traces:
        raise UsageError("no request of the trace has more than one token")
    made = _Replays(traces, policies, world, advance)
    auto = made.watched.get("auto")
    return Study(
        world,
        len(traces),
        int(made.tokens.sum()),
        tuple(map(made.row, made.seconds)),
        tuple(map(made.row, made.references)),
        tuple(made.category(label) for label in dict.fromkeys(t.label for t in traces)),
        {name: watched.spent() for name, watched in made.watched.items()},
        {name: dict(sorted(watched.widths.items())) for name, watched in made.watched.items()},
        made.recorded(),
        auto.calibration.tables() if auto else (),
    )


def _best_fixed(found: Sequence[Bounds], plain: Floats) -> tuple[str, Floats]:
    """The drafter and length that are best for all requests together; `plain` is length 0."""
    common = set.intersection(*(set(b.fixed) for b in found))
    choices = {PLAIN: plain} | {
        f"fixed:{k}:{d}": np.array([b.fixed[d, k] for b in found]) for d, k in sorted(common)
    }
    best = min(choices, key=lambda name: float(choices[name].sum()))
    return best, choices[best]


def share(
    plain: Floats, seconds: Floats, hindsight: Floats
) -> tuple[float | None, Sequence[float] | None]:
    """Captured gain and its interval, from the seconds of each request."""
    if plain.sum() <= (1 + HEADROOM) * hindsight.sum():
        return None, None
    rows = np.stack([plain, seconds, hindsight], axis=1)
    return resampled(rows, lambda s: (s[..., 0] - s[..., 1]) / (s[..., 0] - s[..., 2]))
