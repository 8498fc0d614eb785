"""Acceptance: which nodes of a draft become text, and the bonus token after them.

A rule walks the tree from the root. At each node it decides the next token of the text: a child's
token moves the walk there (accepted), any other token is the bonus, and the walk ends. Rules are
generators: the caller checks EOS, stop strings and limits after every token and may simply stop
asking, so nothing is decided, or shown to a stateful processor, that is not committed.

    coupled, rejection   tokenwise.py   lossless, token by token
    block                blockwise.py   lossless, a chain as a whole
    typical, topk        loosen.py      with loss, never a default
    budget               loosen.py      coupled, with a bounded loss: what `quality_budget` asks for
    auto                 criterion.py   no rule, but the choice of a lossless one for each request
"""

from __future__ import annotations

from typing import Any

from ..core import Request, UsageError
from .base import Choice, NodeRows, Rule
from .blockwise import block
from .criterion import Criterion
from .loosen import Budget, topk, typical
from .tokenwise import coupled, rejection

__all__ = ["NAMES", "RULES", "Choice", "Criterion", "NodeRows", "Rule", "check", "named", "rule_of"]

RULES: dict[str, Rule] = {
    "coupled": coupled,
    "rejection": rejection,
    "block": block,
    "typical": typical,
    "topk": topk,
}
NAMES = (*RULES, "auto")


def check(acceptance: str, quality_budget: Any = 0.0) -> None:
    """Raises UsageError if there is no such criterion, or none with this budget."""
    if acceptance not in NAMES:
        raise UsageError(f"unknown acceptance {acceptance!r}: choose among {', '.join(NAMES)}")
    number = isinstance(quality_budget, (int, float)) and not isinstance(quality_budget, bool)
    if not (number and 0 <= quality_budget <= 2):
        raise UsageError(f"quality_budget must be between 0 and 2, not {quality_budget!r}")
    if quality_budget > 0 and acceptance not in ("coupled", "auto"):
        raise UsageError(
            f"quality_budget loosens acceptance coupled or auto, not {acceptance}: leave one out"
        )


def rule_of(request: Request) -> Rule:
    """The rule that judges this request, with a state of its own where it has one."""
    return Budget(request.quality_budget) if request.quality_budget else RULES[request.acceptance]


def named(request: Request) -> str:
    """Its name, for the report."""
    return "budget" if request.quality_budget else request.acceptance
