"""Where the seconds of a replay went, and how much of them rejected drafts took.

Of a serial drafter's seconds, the share of its tokens that were not accepted is lost. Of a forward
it is what it cost beyond one over the accepted rows alone, T(w) − T(1 + accepted): on a flat curve
that is little, however many rows were rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..core import StepResult
from .calibration import Watching
from .costs import World


@dataclass(frozen=True)
class Spent:
    """Seconds; `verify` and `useful_draft` are without what was for nothing."""

    useful_draft: float = 0.0
    rejected_draft: float = 0.0
    verify: float = 0.0
    rejected_verify: float = 0.0
    rest: float = 0.0


class Watched:
    """Adds up one policy's steps."""

    def __init__(self, world: World):
        self._curve, self.calibration = world.curve(), Watching()
        self.widths: Counter[int] = Counter()
        self._spent = [0.0] * 5

    def __call__(self, r: StepResult) -> None:
        self.widths[r.plan.width] += 1
        self.calibration(r)
        own = next((d.main().tokens for d in r.drafted if d.drafter == r.asked), ())
        useful = r.draft_seconds * _agreeing(own, r.committed[: r.accepted]) / max(len(own), 1)
        least = self._curve.seconds(1 + r.accepted, r.context)
        lost = max(r.verify_seconds - least, 0.0)
        rest = max(r.rest_seconds, 0.0)  # a difference of sums, so rounding may turn it negative
        parts = (useful, r.draft_seconds - useful, r.verify_seconds - lost, lost, rest)
        self._spent = [a + b for a, b in zip(self._spent, parts, strict=True)]

    def spent(self) -> Spent:
        return Spent(*self._spent)


def _agreeing(drafted: Sequence[int], committed: Sequence[int]) -> int:
    pairs = enumerate(zip(drafted, committed, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(drafted), len(committed)))
