"""Policies: which drafter to ask, how far to draft, what to verify, and when not to speculate.

The contract. `open`/`close` frame a request. `choose` sees each sequence with its retrieval drafts
and returns asks for serial drafters (or none); `go` is handed to the drafter and says whether one
more token is worth its price; `select` sees every draft of a step and returns one plan a sequence;
`learn` gets the results. A policy changes speed, never text. `REGISTRY` maps a name to a factory
`(argument, costs) -> policy`, where `fixed:5` is name `fixed` with argument `5`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core import Ask, Draft, Features, SeqId, State, StepPlan, StepResult, UsageError
from .cost import CostCurve


@dataclass(frozen=True)
class Costs:
    """The target's cost curve and that of each serial drafter; `drafters` lists all, in order."""

    target: CostCurve
    serial: Mapping[str, CostCurve]
    drafters: tuple[str, ...]


class Policy(Protocol):
    name: str

    def open(self, seq: SeqId) -> None: ...

    def choose(self, batch: Sequence[State]) -> list[Ask]: ...

    def go(self, seq: SeqId, features: Features) -> bool: ...

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]: ...

    def learn(self, results: Sequence[StepResult]) -> None: ...

    def close(self, seq: SeqId) -> None: ...


def _registry() -> dict[str, Callable[[str, Costs], Policy]]:
    from .fixed import Fixed, Plain
    from .goodput import Auto

    return {"auto": Auto.make, "plain": Plain.make, "fixed": Fixed.make}


REGISTRY: dict[str, Callable[[str, Costs], Policy]] = _registry()


def check(spec: str) -> None:
    """Raises UsageError if no policy has this name; cheap, so that it can come before loading."""
    if not isinstance(spec, str) or spec.partition(":")[0] not in REGISTRY:
        raise UsageError(f"unknown policy {spec!r}: choose among {', '.join(REGISTRY)}")


def make(spec: str, costs: Costs) -> Policy:
    """The policy named by `spec`, such as "auto", "plain", "fixed:5" or "fixed:5:lookup"."""
    check(spec)
    name, _, argument = spec.partition(":")
    return REGISTRY[name](argument, costs)
