"""The never-slower meter: speculation may be spent on, not lost on.

    spent  = Σ seconds of decode steps, drafting and draft prefill included
    plain  = Σ over committed tokens of T(1, context)
    free to speculate  ⇔  spent + cost(plan) − E[tokens] · T(1) ≤ (1 + ε) · plain + grace

A plain step adds its own seconds to both sides, so that noise in T(1) cannot close the meter. One
meter runs across requests, so the margin that good steps earn may be spent in bad ones; where
it is used up, plain steps are all that is allowed and the meter can only recover. `grace` lets a
new process try anything at all. With ε = 0.02 the run as a whole stays within 2 % of plain once
grace is small beside it. Source: docs/design.md §2; arXiv 2506.20675 (Cascade).
"""

from __future__ import annotations

EPSILON = 0.02
GRACE_STEPS = 10.0  # plain steps: some eight asks of a draft model that all fail


class Guard:
    def __init__(self, epsilon: float = EPSILON):
        self.epsilon = epsilon
        self.spent = 0.0
        self.plain = 0.0

    def allows(self, risk: float, plain_step: float) -> bool:
        """May a plan be tried that loses `risk` seconds against plain if nothing is accepted?"""
        # Half of ε is kept back for the grace and for what the meter cannot see (curve noise).
        allowed = (1 + 0.5 * self.epsilon) * self.plain + GRACE_STEPS * plain_step
        return self.spent + risk <= allowed

    def learn(self, seconds: float, plain: float) -> None:
        """`seconds` were spent on tokens for which plain decoding would have spent `plain`."""
        self.spent += seconds
        self.plain += plain
