"""Acceptance: which nodes of a draft become text, and the bonus token after them.

A rule walks the tree from the root. At each node it decides the next token of the text: a child's
token moves the walk there (accepted), any other token is the bonus, and the walk ends. Rules are
generators: the caller checks EOS, stop strings and limits after every token and may simply stop
asking, so nothing is decided, or shown to a stateful processor, that is not committed.

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

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from .core import Dense, Draft, FloatRow, Point, Sparse
from .sampling import ACCEPT, RESIDUAL, Sampler, gumbel, key, uniform


class NodeRows:
    """Logits after the anchor (node -1) and after each draft node, fetched when first needed."""

    def __init__(self, argmax: Callable[[], Sequence[int]], row: Callable[[int], FloatRow]):
        self._argmax, self._row = argmax, row

    def argmax(self, node: int) -> int:
        return self._argmax()[node + 1]

    def row(self, node: int) -> FloatRow:
        return self._row(node + 1)


# (draft or None, rows, sampler, generated so far) -> (token, its node, or -1 for the bonus)
Rule = Callable[[Draft | None, NodeRows, Sampler, list[int]], Iterator[tuple[int, int]]]


def coupled(
    draft: Draft | None, rows: NodeRows, sampler: Sampler, generated: list[int]
) -> Iterator[tuple[int, int]]:
    history, node = list(generated), -1
    while True:
        token = (
            sampler.token(rows.row(node), history)
            if sampler.needs_row(len(history))
            else rows.argmax(node)
        )
        history.append(token)
        node = _child_with(draft, node, token)
        yield token, node
        if node < 0:
            return


def rejection(
    draft: Draft | None, rows: NodeRows, sampler: Sampler, generated: list[int]
) -> Iterator[tuple[int, int]]:
    history, node = list(generated), -1
    while True:
        p = sampler.probabilities(rows.row(node), history)
        draws = key(sampler.seed, len(history), ACCEPT)
        token, node = _accept_child(draft, node, p, draws)
        if node < 0:
            token = _draw(p, key(sampler.seed, len(history), RESIDUAL))
        history.append(token)
        yield token, node
        if node < 0:
            return


def _accept_child(
    draft: Draft | None, node: int, p: npt.NDArray[np.float64], draws: int
) -> tuple[int, int]:
    """The accepted child's (token, node), or (-1, -1) with `p` made the residual in place."""
    for count, child in enumerate(draft.children(node) if draft else ()):
        assert draft is not None
        token, q = draft.tokens[child], draft.q[child]
        if uniform(draws, count) * _mass(q, token) < p[token]:
            return token, child
        _subtract(p, q, token)
    return -1, -1


def _child_with(draft: Draft | None, node: int, token: int) -> int:
    if draft is None:
        return -1
    return next((child for child in draft.children(node) if draft.tokens[child] == token), -1)


def _mass(q: Point | Dense | Sparse, token: int) -> float:
    if isinstance(q, Point):
        return 1.0
    if isinstance(q, Dense):
        return float(q.probs[token])
    return float(q.probs[q.ids == token].sum())


def _subtract(p: npt.NDArray[np.float64], q: Point | Dense | Sparse, token: int) -> None:
    if isinstance(q, Point):
        p[token] = 0.0
    elif isinstance(q, Dense):
        p[: len(q.probs)] -= q.probs
    else:
        p[q.ids] -= q.probs
    np.maximum(p, 0.0, out=p)
    total = p.sum()
    if total > 0:
        p /= total
    else:
        # p <= q everywhere means p = q up to rounding, where rejection has probability 0 but for
        # that rounding; the drafted token is a draw from p then.
        p[token] = 1.0


def _draw(p: npt.NDArray[np.float64], k: int) -> int:
    ids = np.flatnonzero(p)
    return int(ids[int((np.log(p[ids]) + gumbel(k, ids)).argmax())])


RULES: dict[str, Rule] = {"coupled": coupled, "rejection": rejection}
