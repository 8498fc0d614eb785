"""Asking serial drafters: whether, which, and how far, before anything is drafted.

Worth asking is the drafter whose usual yield in a step (acceptance.Yields), at today's prices,

    gain = 1 + accepted − ρ · (drafted · T_draft + T̃(1 + verified) + catch-up per step to come)

beats the best that can be had without it. A prompt that it has not read is bought as skis are: when
BUY of its price has been lost by doing without, and only if the text is expected to go on long
enough (lengths.py). A text that ends early then never pays for it: in replay the worst request came
to 1.03x plain, 0.73x with the expected length alone. One more token is drafted while some m ≥ 1
further ones, each with the chance seen after nodes like the last, would raise the gain.

A parked drafter is probed with at most PROBE_SHARE of the time, which is saved up for it.
Source: docs/design.md §2; ski rental: Karlin et al. 1988.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core import DEEPEST, SIBLINGS, Ask, Features, SeqId, State, StepResult
from . import Costs
from .acceptance import Acceptance, Yields
from .lengths import Lengths

DEEPEST_ASK = 16
FAR_BEHIND, BUY = 30, 0.5  # tokens; share of the price of reading them
PROBE_SHARE, MOST_CREDIT = 0.01, 5.0  # seconds
THRIFT_RATE, LEAST_THRIFT = 0.05, 0.3


@dataclass
class Drafting:
    """The draft of one sequence while it grows."""

    ask: Ask
    one: float  # seconds of a token
    survival: float = 1.0
    drafted: int = 0


@dataclass(frozen=True)
class Offer:
    """What asking is expected to gain, the seconds at risk, and those of a drafted token."""

    gain: float
    risk: float
    ask: Ask
    one: float
    probe: bool = False  # it is asked whatever it gains


@dataclass(frozen=True)
class Prices:
    """Of one step: ρ, T̃ by rows from the anchor on, T(1) where nothing is unfed, and how many
    sequences share a forward of the drafter."""

    rho: float
    row: Sequence[float]
    plain: float
    shared: int = 1


class Asking:
    def __init__(self, costs: Costs, acceptance: Acceptance):
        self.costs, self.acceptance = costs, acceptance
        self.yields, self.lengths = Yields(), Lengths()
        self._drafting: dict[SeqId, Drafting] = {}
        self._forgone: dict[tuple[SeqId, str], float] = {}  # seconds lost by doing without
        self._credit = 0.0
        self._thrift = dict.fromkeys(costs.serial, 1.0)

    def one(self, name: str, context: int, shared: int = 1) -> float:
        """Seconds of a drafted token: its part of a forward that is `shared` by so many sequences,
        less what guesses inside the drafter save."""
        return self._thrift[name] * self.costs.serial[name].seconds(1, context, shared) / shared

    def open(self, seq: SeqId) -> None:
        self.lengths.open(seq)

    def close(self, seq: SeqId) -> None:
        self.yields.close(seq)
        self.lengths.close(seq)
        self._drafting.pop(seq, None)
        self._forgone = {k: v for k, v in self._forgone.items() if k[0] != seq}

    def best(self, state: State, prices: Prices, bar: float) -> Offer | None:
        """The best offer that beats `bar`, the gain without asking, or a probe that is due."""
        offers = [self._offer(state, name, prices, bar) for name in self.costs.serial]
        offer = max((o for o in offers if o is not None), key=lambda o: o.gain, default=None)
        if offer is None or offer.gain > bar:
            return offer
        if offer.risk > self._credit:
            return None
        self._credit = 0.0
        return replace(offer, probe=True)

    def again(self, state: State, offer: Offer, prices: Prices) -> Offer:
        """An offer of `best` where another number of sequences share the forwards."""
        priced = self._offer(state, offer.ask.drafter, prices, 0.0, bought=True)
        return replace(priced, probe=offer.probe) if priced else offer

    def _offer(
        self, state: State, name: str, prices: Prices, bar: float, bought: bool = False
    ) -> Offer | None:
        rho, row, shared = prices.rho, prices.row, prices.shared
        deepest = min(DEEPEST_ASK, state.wanted - 1, state.room[name])
        if deepest < 1:
            return None
        curve, stale = self.costs.serial[name], state.stale[name]
        one = self.one(name, state.context, shared)
        accepted, drafted, verified = self.yields.expected(state.seq, name)
        drafted = min(max(drafted, 1.0), float(deepest))
        accepted = min(accepted, float(state.wanted - 1))
        width = 1 + min(round(max(verified, drafted)), DEEPEST)
        # What is fed again if any is rejected; all are accepted at most as often as one is.
        again = row[2 + round(accepted)] - prices.plain if self.costs.refeed else 0.0
        rejected = max(1.0 - accepted / (width - 1), 0.0)
        gain = 1.0 + accepted - rho * (drafted * one + row[width] + rejected * again)
        # Catching up also serves the steps to come, as many as the text may still have.
        extra = 0.0
        if stale > 1:
            together = shared if stale <= FAR_BEHIND else 1
            extra = curve.seconds(stale, state.context - stale, together) / together - one
        if (
            stale > FAR_BEHIND
            and not bought
            and self._rents(state.seq, name, (gain - bar) / rho, extra)
        ):
            return None
        left = self.lengths.left(state.seq, state.context, state.wanted)
        gain -= rho * extra / max(left / (1 + accepted), 1.0)
        ask = Ask(state.seq, name, deepest, siblings=SIBLINGS if self.costs.trees else 0)
        return Offer(gain, extra + drafted * one + row[width] - row[1] + again, ask, one)

    def _rents(self, seq: SeqId, name: str, saved: float, price: float) -> bool:
        lost = self._forgone.get((seq, name), 0.0) + max(saved, 0.0)
        self._forgone[seq, name] = lost
        return lost < BUY * price

    def begin(self, offer: Offer) -> None:
        self._drafting[offer.ask.seq] = Drafting(offer.ask, offer.one)

    def none(self, seq: SeqId) -> None:
        self._drafting.pop(seq, None)

    def go(self, seq: SeqId, last: Features, rho: float, row: Sequence[float]) -> bool:
        """Whether one more token is worth its price, after one that looked like `last`."""
        drafting = self._drafting.get(seq)
        if drafting is None:
            return False
        ask = drafting.ask
        drafting.survival *= self.acceptance.chance(seq, ask.drafter, last)
        drafting.drafted += 1
        n, survival = drafting.drafted, drafting.survival
        one = drafting.one
        chance = self.acceptance.ahead(seq, ask.drafter, last)
        gained = 0.0
        for m in range(1, ask.depth - n + 1):
            survival *= chance
            gained += survival
            if gained > rho * (m * one + row[1 + n + m] - row[1 + n]):
                return True
        return False

    def learn(self, asked: Sequence[StepResult]) -> float:
        """From the sequences of a step for which a drafter was asked; the seconds that drafting
        should have taken."""
        whole: dict[str, float] = {}
        for name in {r.asked for r in asked if r.asked is not None}:
            own = [r for r in asked if r.asked == name]
            for r in own:
                self._learn(r, name)
            whole[name] = self._expected(own, name)
        total = sum(whole.values())
        for name, seconds in whole.items():
            together = sum(r.asked == name for r in asked)
            curve = self.costs.serial[name].of(together)
            curve.scale(asked[0].draft_seconds * seconds / total, seconds)
        return total

    def _learn(self, r: StepResult, name: str) -> None:
        _, own = self._widths(r, name)
        plain, expected = self._plain(r, name), self._expected([r], name)
        if r.stale <= FAR_BEHIND:
            seen = max(expected / plain, LEAST_THRIFT)
            self._thrift[name] += THRIFT_RATE * (seen - self._thrift[name])
        self.yields.learn(r.seq, name, r.accepted, own, r.verified)

    def _widths(self, r: StepResult, name: str) -> tuple[tuple[int, ...], int]:
        """(widths of its forwards, if they are known; tokens drafted in a row)."""
        draft = next((d for d in r.drafted if d.drafter == name), None)
        return (draft.forwards, len(draft.main().tokens)) if draft else ((), 1)

    def _plain(self, r: StepResult, name: str) -> float:
        """Seconds of drafting for one sequence without guesses."""
        curve, (_, own) = self.costs.serial[name], self._widths(r, name)
        first = curve.seconds(max(r.stale, 1), max(r.context - r.stale, 0))
        return first + (own - 1) * curve.seconds(1, r.context)

    def _expected(self, asked: Sequence[StepResult], name: str) -> float:
        """Seconds of drafting for these side by side, level by level; a prompt is read alone."""
        curve, seconds = self.costs.serial[name], 0.0
        levels: list[tuple[tuple[int, ...], int]] = []
        for r in asked:
            widths, before = self._widths(r, name)[0], max(r.context - r.stale, 0)
            if not widths:
                seconds += self._plain(r, name)
            elif len(asked) > 1 and r.stale > FAR_BEHIND:
                seconds += curve.seconds(widths[0], before)
                widths = widths[1:]
            levels.append((widths, before))
        for k in range(max(len(widths) for widths, _ in levels)):
            some = [(widths[k], before) for widths, before in levels if k < len(widths)]
            before = sum(before for _, before in some) // len(some)
            seconds += curve.seconds(max(width for width, _ in some), before, len(some))
        return seconds

    def spent(self, seconds: float) -> None:
        self._credit = min(self._credit + PROBE_SHARE * seconds, MOST_CREDIT)
