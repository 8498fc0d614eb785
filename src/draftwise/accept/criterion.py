"""`auto`: which lossless rule judges a sampled request, by what earlier ones gained.

    gain(rule) = Σ tokens · T(1) / Σ seconds,  over the steps in which a serial drafter drafted

that is, tokens per second in units of plain decoding, so that neither a long context nor a slower
machine counts for or against a rule. Only those steps tell the rules apart: a point draft is
accepted with p(x) under each. Every sampled request teaches, also one whose rule was named; old
ones fade. Each rule is tried TRIALS times, then every EXPLORE-th request goes to the one that was
tried longest ago, all others to the best.

Lossless: a request's rule is chosen at its start, from earlier requests only. Greedy requests, and
those without a serial drafter, are `coupled`. Cost: none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LOSSLESS = ("coupled", "rejection", "block")
TRIALS = 2
EXPLORE = 8
FADE = 0.95  # per request of that rule


@dataclass
class _Arm:
    requests: int = 0
    last: int = 0
    plain: float = 0.0
    seconds: float = 0.0

    @property
    def gain(self) -> float:
        return self.plain / self.seconds if self.seconds > 0 else 1.0


class Criterion:
    def __init__(self) -> None:
        self.arms = {name: _Arm() for name in LOSSLESS}
        self._chosen = 0

    def choose(self) -> str:
        self._chosen += 1
        name = self._next()
        arm = self.arms[name]
        arm.requests, arm.last = arm.requests + 1, self._chosen
        return name

    def _next(self) -> str:
        fewest = self._least(lambda arm: arm.requests)
        if self.arms[fewest].requests < TRIALS:
            return fewest
        if self._chosen % EXPLORE == 0:
            return self._least(lambda arm: arm.last)
        return self._least(lambda arm: -arm.gain)

    def _least(self, by: Callable[[_Arm], float]) -> str:
        return min(LOSSLESS, key=lambda name: by(self.arms[name]))

    def learn(self, rule: str, plain: float, seconds: float) -> None:
        """A request's asked steps took `seconds`, plain decoding would have taken `plain`."""
        arm = self.arms.get(rule)
        if arm is not None and seconds > 0:
            arm.plain = FADE * arm.plain + plain
            arm.seconds = FADE * arm.seconds + seconds
