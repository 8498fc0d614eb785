"""What could have been: the best fixed choice, the clairvoyant ones, and the hindsight optimum.

With A_i^d the tokens that drafter d would have got accepted at index i of the text (a trace has
them all), T_d(k) the price of drafting k tokens and T̃ the target's cost curve,

    V(i) = min over d and k ≤ A_i^d of  T_d(k) + T̃(k + 1, ctx_i) + V(i + k + 1),    V(≥ N) = 0

is the least time that any choice of one drafter and length a step can take (docs/design.md §6).
A draft model's prompt is free here, and no step ever drafts a wrong token, so V(0) is out of reach;
merged drafts may beat it. `clairvoyant` takes at each step the drafter and length with the most
tokens a second, knowing what will be accepted but not what comes after. `fixed(d, k)` drafts k
tokens at every step. Cost: O(N · drafters · 64) a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..core import DEEPEST
from ..policy.cost import CostCurve
from .costs import World
from .traces import Traced

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Bounds:
    """Seconds of one request; `fixed` by (drafter, length)."""

    plain: float
    hindsight: float
    clairvoyant: float
    fixed: Mapping[tuple[str, int], float]


def bounds(traced: Traced, world: World) -> Bounds:
    table = _Table(traced, world)
    return Bounds(
        sum(table.plain(i) for i in range(1, traced.tokens)),
        table.hindsight(),
        table.clairvoyant(),
        {(d, k): table.fixed(d, k) for d in table.names for k in LENGTHS},
    )


class _Table:
    def __init__(self, traced: Traced, world: World):
        self.traced, self.n, self.rest = traced, traced.tokens, world.rest
        self.drafting = {n: c for n, c in world.drafting().items() if n in traced.shadow}
        retrieval = [n for n, kind in traced.drafters.items() if kind == "retrieval"]
        self.names = (*retrieval, *self.drafting)
        self._rows: dict[int, list[float]] = {}
        self._curve: CostCurve = world.curve()
        self._runs = {name: self._right_runs(name) for name in self.drafting}

    def _right_runs(self, name: str) -> list[int]:
        """For each index, how many tokens in a row the model drafter has right from there on."""
        runs = [0] * (self.n + 1)
        for i in range(self.n - 1, 0, -1):
            code, _ = self.traced.shadow[name][i - 1][0]
            runs[i] = runs[i + 1] + 1 if code == 0 else 0
        return runs

    def context(self, i: int) -> int:
        return self.traced.prompt + i - 1

    def row(self, i: int) -> list[float]:
        """T̃(w) at index i, for w = 0..DEEPEST + 1; the context counts in steps of 16."""
        at = self.context(i) // 16
        if at not in self._rows:
            self._rows[at] = self._curve.row(DEEPEST + 1, 16 * at + 8)
        return self._rows[at]

    def plain(self, i: int) -> float:
        return self.row(i)[1]

    def right(self, name: str, i: int) -> int:
        """A_i^d, as far as the text goes and a bonus token is left."""
        if name in self._runs:
            found = self._runs[name][i]
        else:
            guess = self.traced.guesses.get(i, {}).get(name)
            found = guess.hits if guess else 0
        return min(found, self.n - i - 1, DEEPEST)

    def length(self, name: str, i: int) -> int:
        if name in self._runs:
            return DEEPEST
        guess = self.traced.guesses.get(i, {}).get(name)
        return len(guess.main) if guess else 0

    def price(self, name: str, k: int, i: int) -> float:
        """Seconds of a step that drafts and verifies k tokens."""
        draft = (
            k * self.drafting[name].seconds(1, self.context(i)) if name in self.drafting else 0.0
        )
        return draft + self.row(i)[1 + k] + self.rest

    def _choices(self, i: int) -> Iterator[tuple[int, float]]:
        """(accepted, seconds) of all that could be had at index i."""
        yield 0, self.plain(i)
        for name in self.names:
            for k in range(1, self.right(name, i) + 1):
                yield k, self.price(name, k, i)

    def hindsight(self) -> float:
        value = [0.0] * (self.n + 1)
        for i in range(self.n - 1, 0, -1):
            value[i] = min(seconds + value[i + k + 1] for k, seconds in self._choices(i))
        return value[1] if self.n > 1 else 0.0

    def clairvoyant(self) -> float:
        i, total = 1, 0.0
        while i < self.n:
            k, seconds = max(self._choices(i), key=lambda found: (found[0] + 1) / found[1])
            total += seconds
            i += k + 1
        return total

    def fixed(self, name: str, k: int) -> float:
        i, total = 1, 0.0
        while i < self.n:
            n = min(k, self.length(name, i), self.n - i - 1)
            # Who is asked takes its time, also for nothing; nobody is asked for the last token.
            total += self.price(name, n, i) if i + 1 < self.n else self.plain(i)
            i += min(self.right(name, i), n) + 1
        return total
