"""The never-slower meter: speculation may be spent on, not lost on.

    spent  = Σ seconds of decode steps, drafting and draft prefill included
    plain  = Σ over committed tokens of T(1, context)
    free to speculate  ⇔  spent + cost(plan) − E[tokens] · T(1) ≤ (1 + ε) · plain + grace

A plain step adds its own seconds to both sides, so that noise in T(1) cannot close the meter. One
meter runs across requests, so the margin that good steps earn may be spent in bad ones; where
it is used up, plain steps are all that is allowed and the meter can only recover. `grace` lets a
new process try anything at all. With ε = 0.02 the run as a whole stays within 2 % of plain once
grace is small beside it. A second meter runs over each request's verifying alone, with 1.5 ε and a
smaller grace, so that no long text is made to pay for what others earned.
Source: docs/design.md §2; arXiv 2506.20675 (Cascade).
"""

from __future__ import annotations

from ..core import SeqId

EPSILON = 0.02
GRACE_STEPS = 10.0  # plain steps: some eight asks of a draft model that all fail


REQUEST_STEPS, REQUEST_SHARE = 5.5, 1.5  # a text of 256 tokens then loses less than 5 %


class Guard:
    def __init__(self, epsilon: float = EPSILON):
        self.epsilon = epsilon
        self.spent = 0.0
        self.plain = 0.0
        self._lost: dict[SeqId, tuple[float, float]] = {}  # verifying of each request: lost, plain

    def close(self, seq: SeqId) -> None:
        self._lost.pop(seq, None)

    def allows(self, risk: float, plain_step: float) -> bool:
        """May a plan be tried that loses `risk` seconds against plain if nothing is accepted?
        `plain_step`: seconds of a plain token, so that a batch has no more grace than one text."""
        # Half of ε is kept back for the grace and for what the meter cannot see (curve noise).
        allowed = (1 + 0.5 * self.epsilon) * self.plain + GRACE_STEPS * plain_step
        return self.spent + risk <= allowed

    def allows_request(self, seq: SeqId, risk: float, plain_step: float) -> bool:
        """The same for what one request loses by verifying."""
        lost, plain = self._lost.get(seq, (0.0, 0.0))
        allowed = REQUEST_SHARE * self.epsilon * plain + REQUEST_STEPS * plain_step
        return lost + risk <= allowed

    def learn(self, seconds: float, plain: float) -> None:
        """`seconds` were spent on tokens for which plain decoding would have spent `plain`."""
        self.spent += seconds
        self.plain += plain

    def learn_request(self, seq: SeqId, seconds: float, plain: float) -> None:
        """The same for a request, without the seconds of drafting."""
        lost, before = self._lost.get(seq, (0.0, 0.0))
        self._lost[seq] = (lost + seconds - plain, before + plain)
