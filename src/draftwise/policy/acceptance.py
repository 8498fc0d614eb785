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

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from ..core import Draft, Features

Bin = tuple[int, ...]
MATCHES = (2, 3, 4, 5, 7, 10, 14, 20, 28)
SHARES = (0.35, 0.6, 0.85, 0.999)
PROBS = (0.01, 0.03, 0.06, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 0.995)
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
    if f.rank and (f.prob >= 0 or f.margin >= 0):
        # The draft model is surer of its choice than it should be, so the others are likelier.
        return min(1.1 * f.prob, 0.5) if f.prob >= 0 else 0.35 * math.exp(-f.margin)
    if f.prob >= 0:
        return _BY_PROB[int(100 * min(f.prob, 1.0))]
    if f.margin >= 0:
        return 0.35 + 0.6 * min(f.margin / 5.0, 1.0)
    if f.rank:
        return 0.3 * min(f.share, 0.5)
    chance = _BY_MATCH[min(f.match, 32)] * min(0.1 + 1.05 * f.share, 1.0)
    # Requests are alike where it tells nothing: in the words of the chat template.
    return 0.4 * chance if f.other else chance


def binned(f: Features, mood: int) -> Bin:
    m = bisect_right(MOODS, mood)
    if f.rank and (f.prob >= 0 or f.margin >= 0):
        own = bisect_right(PROBS, f.prob) if f.prob >= 0 else bisect_right(MARGINS, f.margin)
        return (4, f.prob >= 0, own, f.rank)
    if f.rank:
        match, share = bisect_right(MATCHES, f.match), bisect_right(SHARES, f.share)
        return (5 + f.other, match, share, f.rank)
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

    def estimator(self, seq: int) -> Callable[[Draft, int], float]:
        """The chance of a node given that its parent is committed; remembered for as long as the
        function is used."""
        known: dict[tuple[str, Features], float] = {}

        def estimate(draft: Draft, node: int) -> float:
            f = draft.features[node]
            found = known.get((draft.drafter, f))
            if found is None:
                mood = self._mood.get((seq, draft.drafter), 0)
                found = self._chance(seq, draft.drafter, f, binned(f, mood))
                known[draft.drafter, f] = found
            return found

        return estimate

    def survival(self, draft: Draft) -> list[float]:
        """Chance that each node is committed: the product of the chances along its path. A chain is
        followed down to where nothing is left of it, and the list ends there."""
        estimate, is_chain = self.estimator(draft.seq), draft.is_chain
        out: list[float] = []
        for node, parent in enumerate(draft.parents):
            above = out[parent] if parent >= 0 else 1.0
            out.append(above * estimate(draft, node))
            if is_chain and out[-1] < NOTHING:
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
        before = len(draft.after)
        if tuple(committed[:before]) != draft.after:
            return 0
        shared = self._shared.setdefault(name, Table(SHARED_DISCOUNT))
        mood = self._mood.get((seq, name), 0)
        foretold, main, ended = self._compare(draft, committed[before:], mood, shared)
        if not before:
            # A sibling's hit does not make the main chain right.
            self._mood[seq, name] = 0 if ended else mood + main
        return foretold

    def rehearse(self, seq: int, places: Sequence[tuple[Draft, tuple[int, ...]]]) -> None:
        """Learns from places in the prompt, for this request alone: prompts repeat themselves more
        than texts do. (In replay: 0.03 of the possible gain with retrieval drafters; shared with
        other requests it is lost again where verifying is dear.)"""
        moods: dict[str, int] = {}
        for draft, followed in places:
            mood = moods.get(draft.drafter, 0)
            _, main, ended = self._compare(draft, followed, mood, None)
            # A place is one token on from the one before, so that is what it adds.
            moods[draft.drafter] = mood + 1 if main else 0 if ended else mood

    def _compare(
        self, draft: Draft, text: Sequence[int], mood: int, shared: Table | None
    ) -> tuple[int, int, bool]:
        """(nodes that foretold the text, of these on the main chain, whether it was wrong)."""
        seq, name = draft.seq, draft.drafter
        request = self._request.setdefault((seq, name), Table(REQUEST_DISCOUNT))
        node, foretold, main, on_main = -1, 0, 0, True
        for token in text:
            children, node = draft.children(node), -1
            for child in children:
                hit = draft.tokens[child] == token
                bin_ = binned(draft.features[child], mood)
                request.add(bin_, hit)
                if shared is not None:
                    shared.add(bin_, hit)
                    if draft.features[child].rank == 0:
                        self._follow(draft, child, hit)
                if draft.features[child].rank == 0:
                    on_main = hit
                if hit:
                    node = child
            if node < 0:
                return foretold, main, bool(children)
            foretold += 1
            main += on_main
        return foretold, main, False

    def _follow(self, draft: Draft, node: int, hit: bool) -> None:
        """Counts a node of the main chain under what the node before it looked like."""
        seq, name, parent = draft.seq, draft.drafter, draft.parents[node]
        after = self._after(seq, name, draft.features[parent] if parent >= 0 else None)
        for key in [(-1, name, None), (-1, name, after), (seq, name, None), (seq, name, after)]:
            self._ahead.setdefault(key, _Counts()).add(hit, 0.98)


class Yields:
    """What asking a serial drafter comes to, under the policy's own stopping: tokens accepted in
    the step, tokens drafted, rows verified. The best fixed length at the mean chance falls short of
    it: drafting on only while the drafter is sure earns more (in replay 1.19x against 1.27x).
    """

    START = (2.2, 2.6, 3.6)  # what a draft model of a third the price did
    # A few unlucky asks at the start must not end the asking, from which alone it is learned.
    SHARED_WEIGHT, REQUEST_WEIGHT = 24.0, 6.0
    SHARED_DISCOUNT, REQUEST_DISCOUNT = 0.99, 0.9

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], tuple[float, ...]] = {}

    def expected(self, seq: int, drafter: str) -> tuple[float, float, float]:
        """(accepted, drafted, verified)."""
        mean: tuple[float, ...] = self.START
        for owner, weight in ((-1, self.SHARED_WEIGHT), (seq, self.REQUEST_WEIGHT)):
            n, *sums = self._sums.get((owner, drafter), (0.0, 0.0, 0.0, 0.0))
            mean = tuple((s + weight * m) / (n + weight) for s, m in zip(sums, mean, strict=True))
        return mean[0], mean[1], mean[2]

    def learn(self, seq: int, drafter: str, accepted: int, drafted: int, verified: int) -> None:
        seen = (1, accepted, drafted, verified)
        for owner, keep in ((-1, self.SHARED_DISCOUNT), (seq, self.REQUEST_DISCOUNT)):
            sums = self._sums.get((owner, drafter), (0.0, 0.0, 0.0, 0.0))
            self._sums[owner, drafter] = tuple(
                keep * s + x for s, x in zip(sums, seen, strict=True)
            )

    def close(self, seq: int) -> None:
        self._sums = {k: v for k, v in self._sums.items() if k[0] != seq}
