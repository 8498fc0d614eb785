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
from dataclasses import dataclass

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
    context: int
    survival: float = 1.0
    drafted: int = 0


@dataclass(frozen=True)
class Offer:
    """What asking is expected to gain, and the seconds at risk."""

    gain: float
    risk: float
    ask: Ask


class Asking:
    def __init__(self, costs: Costs, acceptance: Acceptance):
        self.costs, self.acceptance = costs, acceptance
        self.yields, self.lengths = Yields(), Lengths()
        self._drafting: dict[SeqId, Drafting] = {}
        self._forgone: dict[tuple[SeqId, str], float] = {}  # seconds lost by doing without
        self._credit = 0.0
        self._thrift = dict.fromkeys(costs.serial, 1.0)

    def one(self, name: str, context: int) -> float:
        """Seconds of a drafted token: of a forward, less what guesses inside the drafter save."""
        return self._thrift[name] * self.costs.serial[name].seconds(1, context)

    def open(self, seq: SeqId) -> None:
        self.lengths.open(seq)

    def close(self, seq: SeqId) -> None:
        self.yields.close(seq)
        self.lengths.close(seq)
        self._drafting.pop(seq, None)
        self._forgone = {k: v for k, v in self._forgone.items() if k[0] != seq}

    def best(
        self, state: State, rho: float, bar: float, row: Sequence[float], plain: float
    ) -> Offer | None:
        """The best offer that beats `bar`, the gain without asking, or a probe that is due. `row`:
        T̃ by rows from the anchor on; `plain`: T(1), where nothing is unfed."""
        offers = [self._offer(state, name, rho, bar, row, plain) for name in self.costs.serial]
        offer = max((o for o in offers if o is not None), key=lambda o: o.gain, default=None)
        if offer is None or offer.gain > bar:
            return offer
        if offer.risk > self._credit:
            return None
        self._credit = 0.0
        return offer

    def _offer(
        self,
        state: State,
        name: str,
        rho: float,
        bar: float,
        row: Sequence[float],
        plain: float,
    ) -> Offer | None:
        deepest = min(DEEPEST_ASK, state.wanted - 1, state.room[name])
        if deepest < 1:
            return None
        curve, stale = self.costs.serial[name], state.stale[name]
        one = self.one(name, state.context)
        accepted, drafted, verified = self.yields.expected(state.seq, name)
        drafted = min(max(drafted, 1.0), float(deepest))
        accepted = min(accepted, float(state.wanted - 1))
        width = 1 + min(round(max(verified, drafted)), DEEPEST)
        # What is fed again if any is rejected; all are accepted at most as often as one is.
        again = row[2 + round(accepted)] - plain if self.costs.refeed else 0.0
        rejected = max(1.0 - accepted / (width - 1), 0.0)
        gain = 1.0 + accepted - rho * (drafted * one + row[width] + rejected * again)
        # Catching up also serves the steps to come, as many as the text may still have.
        extra = curve.seconds(stale, state.context - stale) - one if stale > 1 else 0.0
        if stale > FAR_BEHIND and self._rents(state.seq, name, (gain - bar) / rho, extra):
            return None
        left = self.lengths.left(state.seq, state.context, state.wanted)
        gain -= rho * extra / max(left / (1 + accepted), 1.0)
        ask = Ask(state.seq, name, deepest, siblings=SIBLINGS if self.costs.trees else 0)
        return Offer(gain, extra + drafted * one + row[width] - row[1] + again, ask)

    def _rents(self, seq: SeqId, name: str, saved: float, price: float) -> bool:
        lost = self._forgone.get((seq, name), 0.0) + max(saved, 0.0)
        self._forgone[seq, name] = lost
        return lost < BUY * price

    def begin(self, ask: Ask, context: int) -> None:
        self._drafting[ask.seq] = Drafting(ask, context)

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
        one = self.one(ask.drafter, drafting.context)
        chance = self.acceptance.ahead(seq, ask.drafter, last)
        gained = 0.0
        for m in range(1, ask.depth - n + 1):
            survival *= chance
            gained += survival
            if gained > rho * (m * one + row[1 + n + m] - row[1 + n]):
                return True
        return False

    def context(self, seq: SeqId) -> int:
        drafting = self._drafting.get(seq)
        return drafting.context if drafting else 0

    def learn(self, asked: Sequence[StepResult]) -> float:
        """From the sequences of a step for which a drafter was asked, one after the other; the
        seconds that drafting should have taken."""
        expected: dict[str, float] = {}
        for r in asked:
            assert r.asked is not None
            expected[r.asked] = expected.get(r.asked, 0.0) + self._learn(r, r.asked)
        whole = sum(expected.values())
        for name, seconds in expected.items():
            self.costs.serial[name].scale(asked[0].draft_seconds * seconds / whole, seconds)
        return whole

    def _learn(self, r: StepResult, name: str) -> float:
        curve = self.costs.serial[name]
        draft = next((d for d in r.drafted if d.drafter == name), None)
        own = len(draft.main().tokens) if draft else 1
        plain = curve.seconds(max(r.stale, 1), max(r.context - r.stale, 0))
        plain += (own - 1) * curve.seconds(1, r.context)
        widths = draft.forwards if draft else ()
        before = max(r.context - r.stale, 0)
        expected = sum(curve.seconds(width, before) for width in widths) or plain
        if r.stale <= FAR_BEHIND:
            seen = max(expected / plain, LEAST_THRIFT)
            self._thrift[name] += THRIFT_RATE * (seen - self._thrift[name])
        self.yields.learn(r.seq, name, r.accepted, own, r.verified)
        return expected

    def spent(self, seconds: float) -> None:
        self._credit = min(self._credit + PROBE_SHARE * seconds, MOST_CREDIT)
