"""What every acceptance rule is made of: lazy rows, a choice, and what q says of a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..core import Dense, Draft, FloatRow, Point, Q
from ..sampling import Sampler, gumbel

Mass = npt.NDArray[np.float64]


class NodeRows:
    """Logits after the anchor (node -1) and after each draft node, fetched when first needed."""

    def __init__(self, argmax: Callable[[], Sequence[int]], row: Callable[[int], FloatRow]):
        self._argmax, self._row = argmax, row

    def argmax(self, node: int) -> int:
        return self._argmax()[node + 1]

    def row(self, node: int) -> FloatRow:
        return self._row(node + 1)


class Choice(NamedTuple):
    """The next token of the text, and its node in the draft (-1: it is the bonus). `loosened`: it
    is not the target's own choice, and `spent` the nats by which the target liked that better."""

    token: int
    node: int
    spent: float = 0.0
    loosened: bool = False


# (draft or None, rows, sampler, generated so far) -> choices until the bonus
Rule = Callable[[Draft | None, NodeRows, Sampler, list[int]], Iterator[Choice]]


def child_with(draft: Draft | None, node: int, token: int) -> int:
    if draft is None:
        return -1
    return next((child for child in draft.children(node) if draft.tokens[child] == token), -1)


def mass(q: Q, token: int) -> float:
    """q(token)."""
    if isinstance(q, Point):
        return 1.0
    if isinstance(q, Dense):
        return float(q.probs[token])
    return float(q.probs[q.ids == token].sum())


def without(p: Mass, q: Q, token: int) -> None:
    """max(p - q, 0), in place; `token` is the one drafted, for a q that is a point."""
    if isinstance(q, Point):
        p[token] = 0.0
    elif isinstance(q, Dense):
        p[: len(q.probs)] -= q.probs
    else:
        p[q.ids] -= q.probs
    np.maximum(p, 0.0, out=p)


def draw(p: Mass, k: int) -> int:
    """A token drawn from p, which need not sum to 1, by the noise of key k."""
    ids = np.flatnonzero(p)
    return int(ids[int((np.log(p[ids]) + gumbel(k, ids)).argmax())])
