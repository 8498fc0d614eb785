"""Calibration: whether drafted tokens were committed as often as the policy foresaw.

Every verified node has a *survival*, the chance of being committed that it was verified for. Nodes
are put into ten bins of equal width by it; in each, the mean survival stands beside the share that
was committed. The expected calibration error weighs the bins by their nodes:

    ECE = Σ_b n_b/N · |mean survival_b − rate_b|

Steps without a bonus token are left out: the text ended inside the draft, and the rest of it was
never judged. Only a policy that states survivals can be looked at; of ours, `auto`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..core import StepResult

BINS = 10
EVERY = "all drafters"


@dataclass(frozen=True)
class Bin:
    """Nodes whose survival lies in [low, high): their mean survival, and the share committed."""

    low: float
    high: float
    nodes: int
    predicted: float
    observed: float


@dataclass(frozen=True)
class Reliability:
    """Of one drafter's nodes, or of all: empty bins are left out."""

    drafter: str
    nodes: int
    predicted: float
    observed: float
    error: float
    bins: tuple[Bin, ...]


class Watching:
    """Collects (drafter, survival, committed) of every verified node that was judged."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, float, bool]] = []

    def __call__(self, result: StepResult) -> None:
        draft = result.plan.draft
        if draft is None or not draft.survival or result.accepted == len(result.committed):
            return
        path = set(result.path)
        for node, (source, survival) in enumerate(zip(draft.whose, draft.survival, strict=True)):
            self._seen.append((source, survival, node in path))

    def tables(self) -> tuple[Reliability, ...]:
        """Overall, then of each drafter; nothing where no survival was stated."""
        if not self._seen:
            return ()
        drafters = sorted({source for source, _, _ in self._seen})
        own = {d: [(s, hit) for source, s, hit in self._seen if source == d] for d in drafters}
        whole = reliability(EVERY, [(s, hit) for _, s, hit in self._seen])
        return (whole, *(reliability(d, nodes) for d, nodes in own.items()))


def reliability(drafter: str, nodes: list[tuple[float, bool]]) -> Reliability:
    """`nodes`: (survival, committed) of at least one node."""
    binned: dict[int, list[tuple[float, bool]]] = {}
    for survival, hit in nodes:
        binned.setdefault(min(int(survival * BINS), BINS - 1), []).append((survival, hit))
    bins = tuple(
        Bin(i / BINS, (i + 1) / BINS, len(own), _mean(s for s, _ in own), _mean(h for _, h in own))
        for i, own in sorted(binned.items())
    )
    error = sum(b.nodes * abs(b.predicted - b.observed) for b in bins) / len(nodes)
    predicted, observed = _mean(s for s, _ in nodes), _mean(hit for _, hit in nodes)
    return Reliability(drafter, len(nodes), predicted, observed, error, bins)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
