"""Acceptance: the chance that a node is accepted, given that its parent was.

Each drafter has Beta posteriors in bins of what it reports for nothing (match length, share of
continuations, own probability or margin) and of its mood: the tokens it has foretold in this text
since it was last wrong, verified or not. Three levels, each shrunk to the one above:

    prior of the feature  <-  bin over all requests  <-  bin in this request (fast forgetting)

    mean = (hits + K · mean_above) / (tries + K),    hits, tries discounted at each update

Learned from the accepted prefix and the first rejection only: what came after is not known to be
wrong, it was never compared (it is censored). A drafter's own probability over-states acceptance
where it is sure and under-states it where it is not, so it is a bin, never the estimate.
Survival of a node is the product of means along its path. Cost: about 0.4 µs a node (bins are
cached per step). Sources: docs/design.md §2; arXiv 2607.05147 (calibration).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from ..core import Draft, Features

Bin = tuple[int, ...]
MATCHES = (2, 3, 4, 5, 7, 10, 14, 20, 28)
SHARES = (0.35, 0.6, 0.85, 0.999)
PROBS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 0.995)
MARGINS = (0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 6.0, 9.0)
MOODS = (1, 4, 12)

NOTHING = 0.004  # a chance that no plan ever pays for
PRIOR_WEIGHT = 3.0
REQUEST_WEIGHT = 6.0
SHARED_DISCOUNT = 0.995
REQUEST_DISCOUNT = 0.97


# What was accepted at design time, over two models and 49 public prompts (2026-12-01): by match
# length where all known continuations agree, and by the drafter's own probability.
_BY_MATCH: list[float] = np.interp(
    np.arange(33.0),
    [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 30],
    [0.1, 0.33, 0.54, 0.65, 0.7, 0.77, 0.82, 0.87, 0.93, 0.95, 0.98],
).tolist()
_BY_PROB: list[float] = np.interp(
    np.linspace(0.0, 1.0, 101),
    [0, 0.2, 0.35, 0.45, 0.6, 0.75, 0.9, 1],
    [0.25, 0.28, 0.45, 0.63, 0.7, 0.82, 0.94, 0.995],
).tolist()


def prior(f: Features) -> float:
    """The guess before anything is seen here."""
    if f.prob >= 0:
        return _BY_PROB[int(100 * min(f.prob, 1.0))]
    if f.margin >= 0:
        return 0.35 + 0.6 * min(f.margin / 5.0, 1.0)
    chance = _BY_MATCH[min(f.match, 32)] * min(0.1 + 1.05 * f.share, 1.0)
    # Requests are alike where it tells nothing: in the words of the chat template.
    return 0.4 * chance if f.other else chance


def binned(f: Features, mood: int) -> Bin:
    m = bisect_right(MOODS, mood)
    if f.prob >= 0:
        return (0, bisect_right(PROBS, f.prob), m)
    if f.margin >= 0:
        return (1, bisect_right(MARGINS, f.margin), m)
    return (2 + f.other, bisect_right(MATCHES, f.match), bisect_right(SHARES, f.share), m)


class _Counts:
    __slots__ = ("hits", "tries")

    def __init__(self) -> None:
        self.hits = self.tries = 0.0

    def add(self, hit: bool, discount: float) -> None:
        self.hits = discount * self.hits + hit
        self.tries = discount * self.tries + 1.0

    def mean(self, above: float, weight: float) -> float:
        return (self.hits + weight * above) / (self.tries + weight)


class Table:
    """Counts of one drafter, over all requests or in one."""

    def __init__(self, discount: float) -> None:
        self._discount = discount
        self._bins: dict[Bin, _Counts] = {}

    def add(self, bin_: Bin, hit: bool) -> None:
        counts = self._bins.get(bin_)
        if counts is None:
            counts = self._bins[bin_] = _Counts()
        counts.add(hit, self._discount)

    def mean(self, bin_: Bin, above: float, weight: float) -> float:
        counts = self._bins.get(bin_)
        return above if counts is None else counts.mean(above, weight)


class Acceptance:
    """Estimates for every drafter and sequence."""

    def __init__(self) -> None:
        self._shared: dict[str, Table] = {}
        self._request: dict[tuple[int, str], Table] = {}
        self._ahead: dict[tuple[int, str, Bin | None], _Counts] = {}
        self._mood: dict[tuple[int, str], int] = {}

    def close(self, seq: int) -> None:
        self._request = {k: v for k, v in self._request.items() if k[0] != seq}
        self._ahead = {k: v for k, v in self._ahead.items() if k[0] != seq}
        self._mood = {k: v for k, v in self._mood.items() if k[0] != seq}

    def chance(self, seq: int, drafter: str, f: Features) -> float:
        return self._chance(seq, drafter, f, binned(f, self._mood.get((seq, drafter), 0)))

    def _chance(self, seq: int, drafter: str, f: Features, bin_: Bin) -> float:
        mean = prior(f)
        shared = self._shared.get(drafter)
        if shared is not None:
            mean = shared.mean(bin_, mean, PRIOR_WEIGHT)
        request = self._request.get((seq, drafter))
        if request is not None:
            mean = request.mean(bin_, mean, REQUEST_WEIGHT)
        return mean

    def survival(self, draft: Draft) -> list[float]:
        """Chance that each node is committed: the product of the chances along its path. A chain is
        followed down to where nothing is left of it, and the list ends there."""
        mood = self._mood.get((draft.seq, draft.drafter), 0)
        known: dict[Features, float] = {}
        out: list[float] = []
        for f, parent in zip(draft.features, draft.parents, strict=True):
            chance = known.get(f)
            if chance is None:
                bin_ = binned(f, mood)
                chance = known[f] = self._chance(draft.seq, draft.drafter, f, bin_)
            out.append(chance if parent < 0 else out[parent] * chance)
            if out[-1] < NOTHING and draft.is_chain:
                break
        return out

    def ahead(self, seq: int, drafter: str, last: Features | None = None) -> float:
        """Chance of a node that is not drafted yet, from the node before it (None: from the mood).

        Sure tokens come in runs, so what the last node looked like says much about the next."""
        after = self._after(seq, drafter, last)
        mean = 0.7
        for owner, weight in ((-1, 4.0), (seq, 8.0)):
            for key, k in ((None, weight), (after, weight)):
                counts = self._ahead.get((owner, drafter, key))
                if counts is not None:
                    mean = counts.mean(mean, k)
        return mean

    def _after(self, seq: int, drafter: str, last: Features | None) -> Bin:
        if last is not None:
            return binned(last, 0)
        return (-1, bisect_right(MOODS, self._mood.get((seq, drafter), 0)))

    def learn(self, draft: Draft, committed: Sequence[int]) -> int:
        """Compares a draft, verified or not, with the text that came: nodes that foretold it."""
        seq, name = draft.seq, draft.drafter
        mood = self._mood.get((seq, name), 0)
        shared = self._shared.setdefault(name, Table(SHARED_DISCOUNT))
        request = self._request.setdefault((seq, name), Table(REQUEST_DISCOUNT))
        node, foretold = -1, 0
        for token in committed:
            children = draft.children(node)
            node = -1
            for child in children:
                hit = draft.tokens[child] == token
                last = draft.features[draft.parents[child]] if draft.parents[child] >= 0 else None
                after = self._after(seq, name, last)
                bin_ = binned(draft.features[child], mood)
                shared.add(bin_, hit)
                request.add(bin_, hit)
                for k in [
                    (-1, name, None),
                    (-1, name, after),
                    (seq, name, None),
                    (seq, name, after),
                ]:
                    self._ahead.setdefault(k, _Counts()).add(hit, 0.98)
                if hit:
                    node = child
                    break
            if node >= 0:
                self._mood[seq, name] = self._mood.get((seq, name), 0) + 1
                foretold += 1
            else:
                if children:
                    self._mood[seq, name] = 0
                break
        return foretold


class Yields:
    """Tokens accepted and drafted each time a serial drafter is asked, under the policy's own
    stopping: what asking is worth. The best fixed length at the mean chance falls short of it,
    since drafting on only while the drafter is sure earns more (in replay 1.19x against 1.27x).
    """

    START = (2.2, 2.6)  # accepted, drafted: what a draft model of a third the price did
    # A few unlucky asks at the start must not end the asking, from which alone it is learned.
    SHARED_WEIGHT, REQUEST_WEIGHT = 24.0, 6.0
    SHARED_DISCOUNT, REQUEST_DISCOUNT = 0.99, 0.9

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], tuple[float, float, float]] = {}

    def expected(self, seq: int, drafter: str) -> tuple[float, float]:
        accepted, drafted = self.START
        for owner, weight in ((-1, self.SHARED_WEIGHT), (seq, self.REQUEST_WEIGHT)):
            n, a, d = self._sums.get((owner, drafter), (0.0, 0.0, 0.0))
            accepted = (a + weight * accepted) / (n + weight)
            drafted = (d + weight * drafted) / (n + weight)
        return accepted, drafted

    def learn(self, seq: int, drafter: str, accepted: int, drafted: int) -> None:
        for owner, keep in ((-1, self.SHARED_DISCOUNT), (seq, self.REQUEST_DISCOUNT)):
            n, a, d = self._sums.get((owner, drafter), (0.0, 0.0, 0.0))
            self._sums[owner, drafter] = (keep * n + 1, keep * a + accepted, keep * d + drafted)

    def close(self, seq: int) -> None:
        self._sums = {k: v for k, v in self._sums.items() if k[0] != seq}
