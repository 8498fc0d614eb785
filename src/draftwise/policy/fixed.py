"""The baselines: `plain` never speculates, `fixed:K` always drafts K tokens with one drafter.

`fixed:K` uses the draft model if one is loaded, else the first drafter; `fixed:K:NAME` names it.
This is what static speculation does, kept for comparison. `Single` is what all policies share
that use one drafter only; the published rules (published.py) are made of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core import Ask, Draft, Features, SeqId, State, StepPlan, StepResult, UsageError
from . import Costs, Goal


class Plain:
    name = "plain"

    @classmethod
    def make(cls, argument: str, costs: Costs, goal: Goal) -> Plain:
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


class Single(Plain):
    """One drafter; `length` says how many tokens of it, and `go` may stop a serial one before."""

    def __init__(self, drafter: str, costs: Costs):
        self.drafter, self.serial = drafter, drafter in costs.serial

    def length(self, seq: SeqId) -> int:
        raise NotImplementedError

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        if not self.serial:
            return []
        asks = [ask(state, self.drafter, self.length(state.seq)) for state in batch]
        return [a for a in asks if a is not None]

    def go(self, seq: SeqId, features: Features) -> bool:
        return True

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        return [
            plan(state, drafts, self.drafter, self.length(state.seq)) for state, drafts in batch
        ]


class Fixed(Single):
    def __init__(self, length: int, drafter: str, costs: Costs):
        super().__init__(drafter, costs)
        self.name, self._length = f"fixed:{length}", length

    @classmethod
    def make(cls, argument: str, costs: Costs, goal: Goal) -> Fixed:
        length, _, drafter = argument.partition(":")
        if not length.isdecimal() or len(length) > 4 or int(length) < 1:
            given = f", not {length[:20]!r}" if length else ""
            raise UsageError(f"policy fixed needs a draft length, as in fixed:5{given}")
        return cls(int(length), chosen(f"fixed:{argument}", drafter, costs), costs)

    def length(self, seq: SeqId) -> int:
        return self._length


def chosen(spec: str, drafter: str, costs: Costs) -> str:
    """The drafter of that name; for "" the first serial one, else the first."""
    if not drafter and not costs.drafters:
        raise UsageError(f"policy {spec[:40]} needs a drafter, and none is loaded")
    drafter = drafter or next(iter(costs.serial), costs.drafters[0])
    if drafter not in costs.drafters:
        raise UsageError(f"policy {spec[:40]}: no drafter {drafter[:40]!r} is loaded")
    return drafter


def ask(state: State, drafter: str, length: int) -> Ask | None:
    """At most `length` tokens of a serial drafter, within what is wanted and what it has room for;
    none where the target cannot roll back, which leaves no drafter in `room`."""
    depth = min(length, state.wanted - 1, state.room.get(drafter, 0))
    return Ask(state.seq, drafter, depth) if depth > 0 else None


def plan(state: State, drafts: Sequence[Draft], drafter: str, length: int) -> StepPlan:
    """The first `length` nodes of the drafter's draft; one drawn at random is verified whole."""
    own = next((d for d in drafts if d.drafter == drafter), None)
    n = 0
    if own is not None:
        own = own.main()
        most = min(length, state.wanted - 1) if own.points else len(own.tokens)
        n = max(min(most, len(own.tokens)), 0)
    return StepPlan(state.seq, own.head(n) if own and n else None, 1 + n)
