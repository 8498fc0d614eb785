"""Policies: which drafter to ask, how far to draft, what to verify, and when not to speculate.

The contract. `open`/`close` frame a request. `choose` sees each sequence with its retrieval drafts
and returns asks for serial drafters (or none); `go` is handed to the drafter and says whether one
more token is worth its price; `select` sees every draft of a step and returns one plan a sequence;
`learn` gets the results. A policy changes speed, never text. `REGISTRY` maps a name to a factory
`(argument, costs, goal) -> policy`, where `fixed:5` is name `fixed` with argument `5`. `auto` is
ours; all others are baselines (fixed.py) and published rules (published.py, bandit.py), to compare
with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core import Ask, Draft, Features, SeqId, State, StepPlan, StepResult, UsageError
from .cost import CostCurve


@dataclass(frozen=True)
class Costs:
    """The target's cost curve and that of each serial drafter; `drafters` lists all, in order.
    `trees`: whether the engine verifies trees; `padded`: whether the sequences of a forward all pay
    for the widest; `refeed`: whether rows kept after a rejection are run again (`rollback`)."""

    target: CostCurve
    serial: Mapping[str, CostCurve]
    drafters: tuple[str, ...]
    trees: bool = False
    padded: bool = False
    refeed: bool = False


OBJECTIVES = ("latency", "throughput")


@dataclass(frozen=True)
class Goal:
    """What the user wants of a policy. `objective`: "latency" prices a second by the request's own
    speed, "throughput" by that of all running requests together. `max_slowdown`: by what share of
    plain decoding's time a run may be slower than it, as a whole."""

    objective: str = "latency"
    max_slowdown: float = 0.02

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise UsageError(f"unknown objective {self.objective!r}: choose among {known}")
        share = self.max_slowdown
        number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if not (number and math.isfinite(share) and 0 <= share <= 1):
            raise UsageError(f"max_slowdown must be a number between 0 and 1, not {share!r}")


GOAL = Goal()


class Policy(Protocol):
    name: str

    def open(self, seq: SeqId) -> None: ...

    def choose(self, batch: Sequence[State]) -> list[Ask]: ...

    def go(self, seq: SeqId, features: Features) -> bool: ...

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]: ...

    def learn(self, results: Sequence[StepResult]) -> None: ...

    def close(self, seq: SeqId) -> None: ...


def _registry() -> dict[str, Callable[[str, Costs, Goal], Policy]]:
    from .bandit import Bandit
    from .fixed import Fixed, Plain
    from .goodput import Auto
    from .published import RULES

    return {
        "auto": Auto.make,
        "plain": Plain.make,
        "fixed": Fixed.make,
        **{rule.name: rule.make for rule in RULES},
        "bandit": Bandit.make,
    }


REGISTRY: dict[str, Callable[[str, Costs, Goal], Policy]] = _registry()


def check(spec: str) -> None:
    """Raises UsageError if no policy has this name; cheap, so that it can come before loading."""
    if not isinstance(spec, str) or spec.partition(":")[0] not in REGISTRY:
        raise UsageError(f"unknown policy {spec!r}: choose among {', '.join(REGISTRY)}")


def make(spec: str, costs: Costs, goal: Goal = GOAL) -> Policy:
    """The policy named by `spec`, such as "auto", "plain", "fixed:5" or "fixed:5:lookup"."""
    check(spec)
    name, _, argument = spec.partition(":")
    return REGISTRY[name](argument, costs, goal)
