"""Token recycling: what the target thought of every verified row, kept and used again.

A successor matrix maps a token to the tokens that the target found likeliest after it. It is
filled from the best K logits of every row of every forward, rejected nodes' rows included: the
target has paid for them anyway, and what it liked second here is often right the next time. With
p the softmax over the K logits of a row after token t,

    share(s | t)  <-  (1 - A) · share(s | t) + A · p(s),     the HELD largest are kept

The draft is a tree, grown best first by the product of CHANCE · share along a path: narrow where
the target was always sure, broad where it was not. A node's features are its share, its rank
among the successors, and that one token agrees. Nothing is known before rows were seen; prompts
have none, and their own pairs of tokens are what lookup and suffix copy from.

The matrix is shared by all requests of a Model and outlives them: it holds single tokens and what
usually follows them, no text longer than two tokens. What was learned last stays, MOST tokens at
most. Cost: about 5 µs a row learned, 2 µs a node, and the top K of the rows (engines/base.py).
Lossless because drafts are only proposals. Source: arXiv 2408.08696; the shares instead of the
last row's order, and the tree by them instead of a fixed one, are ours.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence

import numpy as np

from ..core import POINT, Ask, Draft, Features, Request, SeqId
from ..engines.base import Top
from . import Go, Retrieval

K, HELD = 8, 12
A = 0.3
CHANCE = 0.6  # of a successor whose share is 1, about
FLOOR = 0.01  # a lesser share is forgotten
LEAST = 0.01  # a node of less survival pays nowhere
DEEPEST, NODES = 8, 32
MOST = 20_000  # tokens with successors; about 9 MB
ENTRY_BYTES, TEXT_BYTES = 450, 300  # of a token's successors and of a request, by tracemalloc

Successors = tuple["array[int]", "array[float]"]  # ids and shares, the largest share first
Matrix = dict[int, Successors]  # what was learned last comes last
Node = tuple[int, int, Features]  # token, parent, features


class Recycling(Retrieval):
    """`shared`: one matrix for all requests, which outlives them; else each has its own."""

    name = "recycling"
    rows = K

    def __init__(self, shared: bool = True, most: int = MOST) -> None:
        self._most = most
        self._shared: Matrix | None = {} if shared else None
        self._matrices: dict[SeqId, Matrix] = {}
        self._last: dict[SeqId, int] = {}

    def open(self, seq: SeqId, request: Request) -> None:
        self._matrices[seq] = {} if self._shared is None else self._shared
        self._last[seq] = request.prompt[-1]

    def observe(self, seq: SeqId, committed: Sequence[int]) -> None:
        self._last[seq] = committed[-1]

    def learn(self, seq: SeqId, tokens: Sequence[int], best: Top) -> None:
        ids, scores = best.ids[:, :K], best.scores[:, :K]
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores[:, :1])
        shares = weights / weights.sum(1, keepdims=True)
        matrix = self._matrices[seq]
        # Backwards: the rows of the text itself come first, and are to be the freshest.
        rows = zip(reversed(tokens), ids[::-1].tolist(), shares[::-1].tolist(), strict=True)
        for token, found, share in rows:
            if not share[0] > 0:  # no number: everything was forbidden
                continue
            _mix(matrix, token, dict(zip(found, share, strict=True)))
            if len(matrix) > self._most:
                del matrix[next(iter(matrix))]

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        drafts = []
        for ask in asks:
            matrix = self._matrices.get(ask.seq, {})
            last = ask.after[-1] if ask.after else self._last.get(ask.seq, -1)
            if last in matrix:
                nodes = (_tree if ask.siblings else _chain)(matrix, last, min(ask.depth, DEEPEST))
                drafts.append(self._draft(ask, nodes))
        return drafts

    def _draft(self, ask: Ask, nodes: Sequence[Node]) -> Draft:
        tokens, parents, features = zip(*nodes, strict=True)
        mass = (POINT,) * len(nodes)
        return Draft(ask.seq, self.name, tokens, parents, features, mass, after=ask.after)

    def memory(self) -> int:
        shared = [] if self._shared is None else [self._shared]
        own = [m for m in self._matrices.values() if m is not self._shared]
        return ENTRY_BYTES * sum(map(len, shared + own)) + TEXT_BYTES * len(self._last)

    def close(self, seq: SeqId) -> None:
        self._matrices.pop(seq, None)
        self._last.pop(seq, None)


def _features(share: float, rank: int) -> Features:
    # Rounded, so that the policy meets the same values again and remembers their estimates.
    return Features(match=1, share=min(round(share, 2), 1.0), rank=rank)


def _mix(matrix: Matrix, token: int, found: dict[int, float]) -> None:
    known = matrix.pop(token, None)
    if known is not None:
        mixed = {s: (1 - A) * share for s, share in zip(*known, strict=True)}
        for successor, share in found.items():
            mixed[successor] = mixed.get(successor, 0.0) + A * share
        found = mixed
    kept = sorted([(share, s) for s, share in found.items() if share > FLOOR], reverse=True)
    del kept[HELD:]
    matrix[token] = array("i", [s for _, s in kept]), array("f", [share for share, _ in kept])


def _chain(matrix: Matrix, last: int, deepest: int) -> list[Node]:
    nodes: list[Node] = []
    while len(nodes) < deepest and last in matrix:
        ids, shares = matrix[last]
        nodes.append((ids[0], len(nodes) - 1, _features(shares[0], 0)))
        last = ids[0]
    return nodes


def _tree(matrix: Matrix, last: int, deepest: int) -> list[Node]:
    nodes: list[Node] = []
    heap: list[tuple[float, int, int, int, int, float, int]] = []
    survival, depth, parent, pushed = 1.0, 0, -1, 0
    while True:
        known = matrix.get(last) if depth < deepest else None
        for rank, (token, share) in enumerate(zip(*known, strict=True) if known else ()):
            chance = survival * CHANCE * share
            if chance < LEAST and (rank or depth):  # the first node stands, however unlikely
                break
            pushed += 1
            heapq.heappush(heap, (-chance, pushed, parent, depth + 1, rank, share, token))
        if not heap or len(nodes) == NODES:
            return nodes
        survival, _, above, depth, rank, share, last = heapq.heappop(heap)
        survival, parent = -survival, len(nodes)
        nodes.append((last, above, _features(share, rank)))
