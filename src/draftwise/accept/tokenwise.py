"""Lossless rules that judge token by token.

coupled    next = Sampler.token(row, history), a function of history, logits and seed alone; a
           child is accepted iff it equals it. Plain decoding is the same walk over an empty tree,
           hence the same text, greedy or sampled (arXiv 2408.07978).
rejection  children in order: accept x with probability min(1, p(x)/q(x)), else p becomes
           norm(max(p - q, 0)); the bonus is drawn from what p is then. The text has the target's
           distribution, but is not what the seed gives in plain decoding (arXiv 2211.17192,
           2302.01318).
           A point mass has q(x) = 1: accept with p(x), then strike x out of p.

Cost: one row of logits for every committed token.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core import Draft, Q
from ..sampling import ACCEPT, RESIDUAL, Sampler, key, uniform
from .base import Choice, Mass, NodeRows, child_with, draw, mass, without


def coupled(
    draft: Draft | None, rows: NodeRows, sampler: Sampler, generated: list[int]
) -> Iterator[Choice]:
    history, node = list(generated), -1
    while True:
        token = (
            sampler.token(rows.row(node), history)
            if sampler.needs_row(len(history))
            else rows.argmax(node)
        )
        history.append(token)
        node = child_with(draft, node, token)
        yield Choice(token, node)
        if node < 0:
            return


def rejection(
    draft: Draft | None, rows: NodeRows, sampler: Sampler, generated: list[int]
) -> Iterator[Choice]:
    history, node = list(generated), -1
    while True:
        p = sampler.probabilities(rows.row(node), history)
        draws = key(sampler.seed, len(history), ACCEPT)
        token, node = _accept_child(draft, node, p, draws)
        if node < 0:
            token = draw(p, key(sampler.seed, len(history), RESIDUAL))
        history.append(token)
        yield Choice(token, node)
        if node < 0:
            return


def _accept_child(draft: Draft | None, node: int, p: Mass, draws: int) -> tuple[int, int]:
    """The accepted child's (token, node), or (-1, -1) with `p` made the residual in place."""
    for count, child in enumerate(draft.children(node) if draft else ()):
        assert draft is not None
        token, q = draft.tokens[child], draft.q[child]
        if uniform(draws, count) * mass(q, token) < p[token]:
            return token, child
        _subtract(p, q, token)
    return -1, -1


def _subtract(p: Mass, q: Q, token: int) -> None:
    without(p, q, token)
    total = p.sum()
    if total > 0:
        p /= total
    else:
        # p <= q everywhere means p = q up to rounding, where rejection has probability 0 but for
        # that rounding; the drafted token is a draw from p then.
        p[token] = 1.0
