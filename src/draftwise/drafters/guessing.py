"""Guessing: a draft model drafts faster by guessing its own next tokens.

Retrieval drafters guess what the draft model will choose; it runs its last token and g guesses in
one forward, and every guess that it would have chosen itself saves a forward. The draft is the same
as without guesses. With a the chance that one more guess is right, given that those before were,

    g* = argmax over g of (1 + Σ_{j ≤ g} a_1 · .. · a_j) / T(1 + g)

where T is the draft model's cost curve and a is counted by match length, shrunk to a prior. Cost:
a proposal of the retrieval drafters for every forward of the draft model, about 30 µs.
Source: speculation within the drafter, as in cascade drafting (arXiv 2312.11462).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core import Features

MOST = 7
WEIGHT, DISCOUNT = 4.0, 0.99
LONG = 10


class Guessing:
    """`price(width, context)`: seconds of the draft model's forward."""

    def __init__(self, price: Callable[[int, int], float]):
        self._price = price
        self._hits = [WEIGHT * (0.35 + 0.05 * m) for m in range(LONG + 1)]
        self._tries = [WEIGHT] * (LONG + 1)

    def count(self, features: Sequence[Features], context: int, rows: int = 1) -> int:
        """How many of the guesses with these features are worth running beside `rows` others."""
        best, count = 1.0 / self._price(rows, context), 0
        survival = tokens = 1.0
        for g, f in enumerate(features[:MOST], start=1):
            m = min(f.match, LONG)
            survival *= self._hits[m] / self._tries[m]
            tokens += survival
            pace = tokens / self._price(rows + g, context)
            if pace > best:
                best, count = pace, g
        return count

    def learn(self, features: Sequence[Features], right: int) -> None:
        """`right` of the guesses that were run were the draft model's own choice."""
        for g, f in enumerate(features[: right + 1]):
            m = min(f.match, LONG)
            self._hits[m] = DISCOUNT * self._hits[m] + (g < right)
            self._tries[m] = DISCOUNT * self._tries[m] + 1.0
