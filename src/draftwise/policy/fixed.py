"""The baselines: `plain` never speculates, `fixed:K` always drafts K tokens with one drafter.

`fixed:K` uses the draft model if one is loaded, else the first drafter; `fixed:K:NAME` names it.
This is what static speculation does, kept for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core import Ask, Draft, Features, SeqId, State, StepPlan, StepResult, UsageError
from . import Costs


class Plain:
    name = "plain"

    @classmethod
    def make(cls, argument: str, costs: Costs) -> Plain:
        if argument:
            raise UsageError(f"policy plain takes no argument, not {argument!r}")
        return cls()

    def open(self, seq: SeqId) -> None:
        return

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        return []

    def go(self, seq: SeqId, features: Features) -> bool:
        return False

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        return [StepPlan(state.seq, None, 1) for state, _ in batch]

    def learn(self, results: Sequence[StepResult]) -> None:
        return

    def close(self, seq: SeqId) -> None:
        return


class Fixed(Plain):
    def __init__(self, length: int, drafter: str, serial: bool):
        self.name = f"fixed:{length}"
        self.length, self.drafter, self.serial = length, drafter, serial

    @classmethod
    def make(cls, argument: str, costs: Costs) -> Fixed:
        length, _, drafter = argument.partition(":")
        if not length.isdecimal() or len(length) > 4 or int(length) < 1:
            given = f", not {length[:20]!r}" if length else ""
            raise UsageError(f"policy fixed needs a draft length, as in fixed:5{given}")
        drafter = drafter or next(iter(costs.serial), next(iter(costs.drafters), ""))
        if drafter not in costs.drafters:
            raise UsageError(f"policy fixed:{argument}: no drafter {drafter!r} is loaded")
        return cls(int(length), drafter, drafter in costs.serial)

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        if not self.serial:
            return []
        return [
            Ask(s.seq, self.drafter, depth)
            for s in batch
            if (depth := min(self.length, s.wanted - 1, s.room[self.drafter])) > 0
        ]

    def go(self, seq: SeqId, features: Features) -> bool:
        return True

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        plans = []
        for state, drafts in batch:
            own = next((d for d in drafts if d.drafter == self.drafter), None)
            n = min(self.length, state.wanted - 1, len(own.tokens)) if own else 0
            plans.append(StepPlan(state.seq, own.head(n) if own and n > 0 else None, 1 + max(n, 0)))
        return plans
