"""Rules with loss, which a user asks for by name: the coupled walk, with deviations.

The target's own choice t* is the coupled token (tokenwise.py). Where no child is t*, a child x may
be accepted all the same; it gives up the gap of perturbed scores, in nats (greedy: g = 0),

    gap(x) = (s(t*) + g(t*)) - (s(x) + g(x)) ≥ 0

typical  p(x) > min(0.09, 0.3 · exp(-H(p))): x is not rare where p is unsure (arXiv 2401.10774).
topk     x is among the 3 best of the processed scores.
budget   spent + gap ≤ b · tokens, the hard bound at every token, and gap ≤ price · brings(x) with
         brings(x) = 1 + Σ over the nodes v below x of S_v / S_x   (tokens that follow if x stays)
         price = b + (b · tokens - spent) / 5
         The price of a token grows while less than the budget is spent and falls with every
         purchase, down to b, where deviations pay for themselves: cheap, well-placed ones are
         bought first.

Greedy requests are judged by softmax of their processed logits. Never accepted: a token that
processing forbids, an EOS that is not t*, anything in place of an EOS that is. The text depends on
what was drafted. Cost: as coupled; where no child is t*, one pass over a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..core import Draft, FloatRow
from ..sampling import Sampler
from .base import Choice, NodeRows, child_with

BEST = 3
EPSILON, DELTA = 0.09, 0.3
SAVING = 5.0  # tokens over which saved budget is offered for the next one
UNKNOWN = 0.5  # chance of a node whose survival the policy does not say


class _Judged:
    """A row as the target sees it: its own choice, and what another token gives up."""

    def __init__(self, sampler: Sampler, row: FloatRow, history: list[int]):
        self.index = len(history)
        self._sampler, self._support = sampler, sampler.support(row, history)
        self.token = sampler.choice(self._support, self.index)

    def gap(self, token: int) -> float:
        return self._sampler.gap(self._support, self.index, self.token, token)

    def rank(self, token: int) -> int:
        """How many tokens have a better score."""
        _, scores = self._support
        return int((scores > self._sampler.score(self._support, token)).sum())

    def typical(self, token: int) -> bool:
        _, scores = self._support
        top = float(scores.max())
        weights = np.exp(scores.astype(np.float64) - top)
        p = weights / weights.sum()
        entropy = -float((p * np.log(np.maximum(p, 1e-300))).sum())
        own = np.exp(self._sampler.score(self._support, token) - top) / weights.sum()
        return bool(own > min(EPSILON, DELTA * np.exp(-entropy)))


# (the row, draft, child, its gap) -> may it be accepted though it is not the target's choice?
Allows = Callable[[_Judged, Draft, int, float], bool]


def typical(
    draft: Draft | None, rows: NodeRows, sampler: Sampler, generated: list[int]
) -> Iterator[Choice]:
    return _walk(draft, rows, sampler, generated, lambda r, d, x, gap: r.typical(d.tokens[x]))


def topk(
    draft: Draft | None, rows: NodeRows, sampler: Sampler, generated: list[int]
) -> Iterator[Choice]:
    return _walk(draft, rows, sampler, generated, lambda r, d, x, gap: r.rank(d.tokens[x]) < BEST)


class Budget:
    """The rule of one request: it remembers what the request has spent."""

    def __init__(self, budget: float):
        self.budget, self.spent = budget, 0.0

    def __call__(
        self, draft: Draft | None, rows: NodeRows, sampler: Sampler, generated: list[int]
    ) -> Iterator[Choice]:
        for choice in _walk(draft, rows, sampler, generated, self._allows):
            self.spent += choice.spent
            yield choice

    def _allows(self, row: _Judged, draft: Draft, child: int, gap: float) -> bool:
        # A hair less than all of it, since sums of what was spent round differently elsewhere.
        saved = self.budget * (row.index + 1) * (1 - 1e-9) - self.spent
        return gap <= saved and gap <= self.price(saved) * brings(draft, child)

    def price(self, saved: float) -> float:
        """Nats that one further token is worth."""
        return self.budget + saved / SAVING


def brings(draft: Draft, node: int) -> float:
    """Expected tokens that follow if this node stays: the next one, and the nodes below it."""
    below = {node: 1.0}
    for v in range(node + 1, len(draft.tokens)):
        above = draft.parents[v]
        if above in below:
            below[v] = below[above] * _chance(draft, v)
    return sum(below.values())


def _chance(draft: Draft, node: int) -> float:
    """Survival of a node relative to its parent's."""
    known, above = draft.survival, draft.parents[node]
    if not known:
        return UNKNOWN
    if node >= len(known):
        return 0.0  # a survival is left out where nothing is left of it
    return known[node] / known[above] if known[above] > 0 else 0.0


def _walk(
    draft: Draft | None, rows: NodeRows, sampler: Sampler, generated: list[int], allows: Allows
) -> Iterator[Choice]:
    history, node = list(generated), -1
    while True:
        choice = _next(draft, node, rows, sampler, history, allows)
        history.append(choice.token)
        node = choice.node
        yield choice
        if node < 0:
            return


def _next(
    draft: Draft | None,
    node: int,
    rows: NodeRows,
    sampler: Sampler,
    history: list[int],
    allows: Allows,
) -> Choice:
    children = draft.children(node) if draft else ()
    if not sampler.needs_row(len(history)):
        token = rows.argmax(node)
        own = child_with(draft, node, token)
        if own >= 0 or not children or token in sampler.eos:
            return Choice(token, own)
    row = _Judged(sampler, rows.row(node), history)
    own = child_with(draft, node, row.token)
    if own >= 0 or draft is None or row.token in sampler.eos:
        return Choice(row.token, own)
    found = [(row.gap(draft.tokens[x]), x) for x in children if draft.tokens[x] not in sampler.eos]
    found = [(gap, x) for gap, x in found if gap < np.inf and allows(row, draft, x, gap)]
    if not found:
        return Choice(row.token, -1)
    gap, child = min(found)
    return Choice(draft.tokens[child], child, gap, loosened=True)
