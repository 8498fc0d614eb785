"""Several sequences in one forward: the rows are shared out by one rule.

    argmax over n_1 .. n_B of  Σ_i Σ_{v ≤ n_i} S_i,v − ρ · T(1 + n_1, .. , 1 + n_B)

Each sequence's survivals S_i come sorted, so a plan is its number of nodes n_i. A packed engine
pays for the total of rows: then the nodes of all sequences, sorted by survival, are taken in that
order and every total is tried. A padded engine pays sequences × the widest: then every width is
tried, and within a width every sequence takes all that it has. Both are exact, at the cost of
sorting the nodes once. One ρ for all: a second of the forward is a second of everyone's.
Source: docs/design.md §2; arXiv 2406.14066 (TurboSpec).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Cost = Callable[[int], float]  # seconds of a forward, by rows in all


def share(
    survivals: Sequence[Sequence[float]], least: Sequence[int], rho: float, cost: Cost, padded: bool
) -> list[int]:
    """Nodes to verify for each sequence; `least`: nodes that a sequence must verify anyway."""
    return (_padded if padded else _packed)(survivals, least, rho, cost)


def _packed(
    survivals: Sequence[Sequence[float]], least: Sequence[int], rho: float, cost: Cost
) -> list[int]:
    counts = list(least)
    rows, tokens = len(counts) + sum(counts), 0.0
    queue = sorted(
        (-s, j, i) for i, row in enumerate(survivals) for j, s in enumerate(row) if j >= least[i]
    )
    best, gain = list(counts), -rho * cost(rows)
    for negative, _, i in queue:
        counts[i] += 1
        rows, tokens = rows + 1, tokens - negative
        if tokens - rho * cost(rows) > gain:
            best, gain = list(counts), tokens - rho * cost(rows)
    return best


def _padded(
    survivals: Sequence[Sequence[float]], least: Sequence[int], rho: float, cost: Cost
) -> list[int]:
    best, gain = list(least), float("-inf")
    longest = max((len(row) for row in survivals), default=0)
    for n in range(max(least, default=0), max(longest, max(least, default=0)) + 1):
        counts = [max(min(n, len(row)), m) for row, m in zip(survivals, least, strict=True)]
        tokens = sum(sum(row[:c]) for row, c in zip(survivals, counts, strict=True))
        value = tokens - rho * cost(len(counts) * (1 + max(counts, default=0)))
        if value > gain:
            best, gain = counts, value
    return best
