"""`bandit`: UCB1 over (drafter, length), to compare `auto` with.

    arm = argmax over arms of  mean reward + √(2·ln t / n),   every arm once to begin with
    reward = tokens per second of the step ÷ the best seen

Arms: plain decoding, and lengths 1, 2, 4, 8 and 16 of every drafter (`bandit:DRAFTER`: of that
one). They are learned across requests. An arm pays for all that its step costs: for the tokens
that its drafter had to catch up with, and for a step without a draft where it found none. Cost:
some µs a step. Lossless: an arm is chosen before anything is drafted, and a draft drawn at random
is verified whole. Sources: arXiv 2505.15141 (bandits over speculation); UCB1 is by Auer et al.,
2002.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core import Ask, Draft, Features, SeqId, State, StepPlan, StepResult
from . import Costs, Goal
from .fixed import Plain, ask, chosen, plan

LENGTHS = (1, 2, 4, 8, 16)


@dataclass
class Arm:
    drafter: str
    length: int
    tries: int = 0
    total: float = 0.0  # tokens per second, summed over the tries


class Bandit(Plain):
    name = "bandit"

    def __init__(self, drafters: Sequence[str], costs: Costs):
        self.drafters, self.serial = tuple(drafters), frozenset(costs.serial)
        self.drafter = drafters[0] if len(drafters) == 1 else None  # the only one ever used
        self.arms = [Arm("", 0), *(Arm(name, n) for name in drafters for n in LENGTHS)]
        self._best = 0.0
        self._pulled: dict[SeqId, Arm] = {}

    @classmethod
    def make(cls, argument: str, costs: Costs, goal: Goal) -> Bandit:
        one = chosen(f"bandit:{argument}", argument, costs)
        return cls((one,) if argument else costs.drafters, costs)

    def close(self, seq: SeqId) -> None:
        self._pulled.pop(seq, None)

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        asks = []
        for state in batch:
            self._pulled.pop(state.seq, None)
            if state.wanted < 2:
                continue  # no arm could draft, so that none is tried
            arm = self._pulled[state.seq] = self._pull()
            if arm.drafter in self.serial:
                asks.append(ask(state, arm.drafter, arm.length))
        return [a for a in asks if a is not None]

    def _pull(self) -> Arm:
        tries = sum(arm.tries for arm in self.arms)

        def bound(arm: Arm) -> float:
            if not arm.tries:
                return math.inf
            bonus = math.sqrt(2.0 * math.log(tries) / arm.tries)
            return arm.total / (arm.tries * self._best) + bonus

        return max(self.arms, key=bound)

    def go(self, seq: SeqId, features: Features) -> bool:
        return True

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        plans = []
        for state, drafts in batch:
            arm = self._pulled.get(state.seq, self.arms[0])
            plans.append(plan(state, drafts, arm.drafter, arm.length))
        return plans

    def learn(self, results: Sequence[StepResult]) -> None:
        for r in results:
            arm = self._pulled.pop(r.seq, None)
            if arm is None or r.seconds <= 0:
                continue
            rate = len(r.committed) / r.seconds
            self._best = max(self._best, rate)
            arm.tries += 1
            arm.total += rate
