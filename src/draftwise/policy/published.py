"""Published rules for the length of a draft, to compare `auto` with.

Each drafts at every step with one drafter: the serial one, else the first (`NAME:DRAFTER` names
it). `NAME:T` sets the threshold of those that have one, `NAME:T:DRAFTER` both.

  heuristic   20 tokens; 2 more after a draft accepted whole, else 1 fewer (transformers)
  confidence  up to 20, ends with a token of probability below 0.4 (transformers, 2405.04304)
  specdec++   up to 20, ends where 1 − Π p > 0.7 (2405.19715)
  svip        up to 40, ends where √(0.15·H) > 0.3 (2411.18462)
  adaedl      up to 7, ends where 1 − √(0.2·H) < λ, with λ adapted to the acceptance (2410.18351)
  gammatune   the moving mean of what was accepted, and more after full acceptance (2504.00030)
  ort         additive increase and decrease on the moving acceptance (servers)

p is the drafter's probability of its best token, H the entropy of its distribution in nats. Both
are -1 where they are not known (retrieval drafts, coupled sampling): then nothing ends the draft
before its greatest length. Cost: a few operations a token. Lossless: only lengths are chosen, and
a draft drawn at random ends by its distributions, never by its tokens, and is verified whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ..core import DEEPEST, Ask, Features, SeqId, State, StepResult, UsageError
from . import Costs, Goal
from .fixed import Single, chosen

_NUMBER = re.compile(r"\d+\.?\d*|\.\d+")


class Rule(Single):
    """At most `LONGEST` tokens; `adapt` hears of every draft that was verified to its end."""

    LONGEST = 20

    def __init__(self, drafter: str, costs: Costs):
        super().__init__(drafter, costs)
        self.longest = self.LONGEST

    @classmethod
    def make(cls, argument: str, costs: Costs, goal: Goal) -> Rule:
        return cls(chosen(f"{cls.name}:{argument}", argument, costs), costs)

    def length(self, seq: SeqId) -> int:
        return self.longest

    def learn(self, results: Sequence[StepResult]) -> None:
        for r in results:
            # Without a bonus token the text ended inside the draft: the rest was never judged.
            if r.verified and r.accepted < len(r.committed):
                self.adapt(r.seq, r.accepted, r.verified)

    def adapt(self, seq: SeqId, accepted: int, verified: int) -> None:
        return


class Heuristic(Rule):
    """transformers' schedule "heuristic", which keeps its length across requests. DEEPEST bounds
    it here; transformers has no bound."""

    name = "heuristic"

    def adapt(self, seq: SeqId, accepted: int, verified: int) -> None:
        if accepted == verified:
            self.longest = min(self.longest + 2, DEEPEST)
        else:
            self.longest = max(self.longest - 1, 1)


class Threshold(Rule):
    """A rule with a threshold that may be given, up to `GREATEST`."""

    THRESHOLD = 0.5
    GREATEST = 1.0

    def __init__(self, drafter: str, costs: Costs, threshold: float):
        super().__init__(drafter, costs)
        self.threshold = threshold

    @classmethod
    def make(cls, argument: str, costs: Costs, goal: Goal) -> Threshold:
        first, _, rest = argument.partition(":")
        if not _NUMBER.fullmatch(first):
            drafter = chosen(f"{cls.name}:{argument}", argument, costs)
            return cls(drafter, costs, cls.THRESHOLD)
        if not 0 < float(first) <= cls.GREATEST:
            need = f"above 0 and at most {cls.GREATEST:g}"
            raise UsageError(f"policy {cls.name}: its threshold must be {need}, not {first[:20]}")
        return cls(chosen(f"{cls.name}:{argument}", rest, costs), costs, float(first))


class Confidence(Threshold):
    """transformers' dynamic rule: the first token below the threshold is the last one drafted.
    When sampling with q, p is that of the best token and not of the drawn one, which would shift
    the text's distribution. The threshold is kept, as in transformers without scikit-learn."""

    name = "confidence"
    THRESHOLD = 0.4

    def go(self, seq: SeqId, features: Features) -> bool:
        return features.prob < 0 or features.prob >= self.threshold


class SpecDec(Threshold):
    """SpecDec++ ends a draft where the chance that one of its tokens is rejected exceeds the
    threshold. There a trained head on the draft model foretells each token's acceptance; here the
    drafter's own probability stands for it, as nothing is trained."""

    name = "specdec++"
    THRESHOLD = 0.7

    def __init__(self, drafter: str, costs: Costs, threshold: float):
        super().__init__(drafter, costs, threshold)
        self._whole: dict[SeqId, float] = {}  # the chance that all tokens so far are accepted

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        self._whole.update((state.seq, 1.0) for state in batch)
        return super().choose(batch)

    def go(self, seq: SeqId, features: Features) -> bool:
        if features.prob >= 0:
            self._whole[seq] *= features.prob
        return 1.0 - self._whole[seq] <= self.threshold

    def close(self, seq: SeqId) -> None:
        self._whole.pop(seq, None)


class Svip(Threshold):
    """SVIP bounds the acceptance of a token from below by 1 − √(c·H). c, the threshold and the
    greatest length are those of its authors' code."""

    name = "svip"
    LONGEST = 40
    THRESHOLD = 0.3
    GREATEST = 10.0
    C = 0.15

    def go(self, seq: SeqId, features: Features) -> bool:
        return features.entropy < 0 or math.sqrt(self.C * features.entropy) <= self.threshold


class AdaEdl(Rule):
    """AdaEDL with λ adapted as in Draft & Verify (2309.08168), whose constants these are:

        mean <- β₁·mean + (1 − β₁)·accepted/verified,   the first step's share to begin with
        λ    <- β₂·λ + (1 − β₂)·(λ + ε if mean < α, else λ − ε)

    γ is the paper's, LONGEST the best of the lengths it tried (3, 7, 16). The λ to begin with is
    chosen here. It is kept for a request, as there."""

    name = "adaedl"
    LONGEST = 7
    GAMMA = 0.2
    START = 0.4
    ALPHA, BETA1, BETA2, EPSILON = 0.9, 0.5, 0.9, 0.01

    def __init__(self, drafter: str, costs: Costs):
        super().__init__(drafter, costs)
        self._lambda: dict[SeqId, float] = {}
        self._mean: dict[SeqId, float] = {}

    def open(self, seq: SeqId) -> None:
        self._lambda[seq] = self.START

    def close(self, seq: SeqId) -> None:
        self._lambda.pop(seq, None)
        self._mean.pop(seq, None)

    def go(self, seq: SeqId, features: Features) -> bool:
        if features.entropy < 0:
            return True
        return 1.0 - math.sqrt(self.GAMMA * features.entropy) >= self._lambda[seq]

    def adapt(self, seq: SeqId, accepted: int, verified: int) -> None:
        share = accepted / verified
        mean = self.BETA1 * self._mean.get(seq, share) + (1 - self.BETA1) * share
        step = self.EPSILON if mean < self.ALPHA else -self.EPSILON
        self._mean[seq] = mean
        self._lambda[seq] += (1 - self.BETA2) * step


class PerRequest(Rule):
    """A length of its own for every request, between 1 and LONGEST."""

    START = 4.0

    def __init__(self, drafter: str, costs: Costs):
        super().__init__(drafter, costs)
        self._length: dict[SeqId, float] = {}

    def open(self, seq: SeqId) -> None:
        self._length[seq] = self.START

    def close(self, seq: SeqId) -> None:
        self._length.pop(seq, None)

    def length(self, seq: SeqId) -> int:
        return min(max(round(self._length[seq]), 1), self.LONGEST)


class GammaTune(PerRequest):
    """GammaTune: length <- (1 − η)·length + η·accepted. A draft accepted whole says only that more
    would have been, and counts as EXTRA tokens more. η, EXTRA, the start and the bound are chosen
    here; the paper's switch of heuristics is left out."""

    name = "gammatune"
    ETA = 0.3
    EXTRA = 2

    def adapt(self, seq: SeqId, accepted: int, verified: int) -> None:
        seen = accepted + self.EXTRA if accepted == verified else accepted
        length = (1 - self.ETA) * self._length[seq] + self.ETA * seen
        self._length[seq] = min(max(length, 1.0), float(self.LONGEST))


class Ort(PerRequest):
    """The adaptive length of inference servers in general terms: with the moving share of accepted
    tokens above HIGH one token more, below LOW one fewer. Rate and marks are chosen here."""

    name = "ort"
    LONGEST = 16
    RATE, HIGH, LOW = 0.2, 0.8, 0.5

    def __init__(self, drafter: str, costs: Costs):
        super().__init__(drafter, costs)
        self._share: dict[SeqId, float] = {}

    def close(self, seq: SeqId) -> None:
        super().close(seq)
        self._share.pop(seq, None)

    def adapt(self, seq: SeqId, accepted: int, verified: int) -> None:
        now = accepted / verified
        share = self._share.get(seq, now)
        share = self._share[seq] = share + self.RATE * (now - share)
        change = (share > self.HIGH) - (share < self.LOW)
        self._length[seq] = min(max(self._length[seq] + change, 1.0), float(self.LONGEST))


RULES: tuple[type[Rule], ...] = (Heuristic, Confidence, SpecDec, Svip, AdaEdl, GammaTune, Ort)
