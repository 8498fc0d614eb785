"""Acceptance: the chance that a node is accepted, given that its parent was.

Each drafter has Beta posteriors in bins of what it reports for nothing (match length, share of
continuations, own probability or margin) and of the sequence's mood (accepted tokens since its
last rejection). Three levels, each shrunk to the one above by a few pseudo-counts:

    prior of the feature  <-  bin over all requests  <-  bin in this request (fast forgetting)

    mean = (hits + K · mean_above) / (tries + K),    hits, tries discounted at each update

Learned from the accepted prefix and the first rejection only: what came after is not known to be
wrong, it was never compared (it is censored). A drafter's own probability over-states acceptance
where it is sure and under-states it where it is not, so it is a bin, never the estimate.
Survival of a node is the product of means along its path. Cost: about 0.4 µs a node (bins are
cached per step). Sources: docs/design.md §2; 2607.05147 (calibration).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ..core import Draft, Features

Bin = tuple[int, ...]
MATCHES = (2, 3, 4, 5, 7, 10, 14, 20, 28)
SHARES = (0.35, 0.6, 0.85, 0.999)
PROBS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 0.995)
MARGINS = (0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 6.0, 9.0)
MOODS = (1, 4, 12)

PRIOR_WEIGHT = 3.0
REQUEST_WEIGHT = 6.0
SHARED_DISCOUNT = 0.995
REQUEST_DISCOUNT = 0.97


def prior(f: Features) -> float:
    """The guess before anything is seen, from design-time measurements on public prompts."""
    if f.prob >= 0:
        return 0.12 + 0.83 * f.prob
    if f.margin >= 0:
        return 0.35 + 0.6 * min(f.margin / 5.0, 1.0)
    longer = 1.0 - 1.0 / (1.6 + 0.55 * f.match)
    return min(longer, 0.97) * (0.35 + 0.65 * f.share)


def binned(f: Features, mood: int) -> Bin:
    m = bisect_right(MOODS, mood)
    if f.prob >= 0:
        return (0, bisect_right(PROBS, f.prob), m)
    if f.margin >= 0:
        return (1, bisect_right(MARGINS, f.margin), m)
    return (2, bisect_right(MATCHES, f.match), bisect_right(SHARES, f.share), m)


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
    """Estimates for every drafter and sequence. `mood` is the accepted tokens since a rejection."""

    def __init__(self) -> None:
        self._shared: dict[str, Table] = {}
        self._request: dict[tuple[int, str], Table] = {}
        self._average: dict[tuple[int, str], _Counts] = {}
        self._mood: dict[int, int] = {}

    def open(self, seq: int) -> None:
        self._mood[seq] = 0

    def close(self, seq: int) -> None:
        self._mood.pop(seq, None)
        for table in (self._request, self._average):
            for k in [k for k in table if k[0] == seq]:
                del table[k]

    def chance(self, seq: int, drafter: str, f: Features) -> float:
        return self._chance(seq, drafter, f, binned(f, self._mood[seq]))

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
        """Chance that each node is committed: the product of the chances along its path."""
        mood, known, out = self._mood[draft.seq], {}, []
        for f, parent in zip(draft.features, draft.parents, strict=True):
            chance = known.get(f)
            if chance is None:
                bin_ = binned(f, mood)
                chance = known[f] = self._chance(draft.seq, draft.drafter, f, bin_)
            out.append(chance if parent < 0 else out[parent] * chance)
        return out

    def average(self, seq: int, drafter: str) -> float:
        """Chance for a node of which nothing is known yet: the recent mean over all bins."""
        shared = self._average.get((-1, drafter))
        mean = shared.mean(0.6, 4.0) if shared else 0.6
        request = self._average.get((seq, drafter))
        return request.mean(mean, 8.0) if request else mean

    def learn(self, draft: Draft, committed: Sequence[int]) -> None:
        """Compares a draft, verified or not, with the text that came; a chain or a tree's walk."""
        seq, name, mood = draft.seq, draft.drafter, self._mood[draft.seq]
        shared = self._shared.setdefault(name, Table(SHARED_DISCOUNT))
        request = self._request.setdefault((seq, name), Table(REQUEST_DISCOUNT))
        averages = [
            self._average.setdefault((-1, name), _Counts()),
            self._average.setdefault((seq, name), _Counts()),
        ]
        node = -1
        for token in committed:
            children = draft.children(node)
            node = -1
            for child in children:
                hit = draft.tokens[child] == token
                bin_ = binned(draft.features[child], mood)
                shared.add(bin_, hit)
                request.add(bin_, hit)
                for counts in averages:
                    counts.add(hit, 0.98)
                if hit:
                    node = child
                    break
            if node < 0:
                return

    def moved(self, seq: int, accepted: int, rejected: bool) -> None:
        self._mood[seq] = 0 if rejected else self._mood[seq] + accepted
