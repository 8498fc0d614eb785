"""`auto`: each step the plan with the largest gain, priced by the present speed.

    gain(plan) = 1 + Σ S_v − ρ · (T_draft + T̃(1 + n, ctx) + T_overhead)

By Dinkelbach, maximising E[tokens]/E[seconds] means maximising this gain, with ρ the speed itself:
tokens over seconds of the last ~HALF_LIFE tokens, never below plain speed. S_v is a node's
survival (acceptance.py), T the measured curve (cost.py).

  choose    ask the serial drafter whose usual yield (acceptance.py), at today's prices, beats both
            plain decoding and the best retrieval draft at hand. A prompt that it has not read is
            a cost too: it is read once the tokens still wanted are expected to repay it.
  go        one more token while some m ≥ 1 further ones would raise the gain.
  select    drafting is sunk: argmax over every draft and every n of Σ_{v ≤ n} S_v − ρ·T̃(1 + n);
            the empty plan competes like any other (parking).

Retrieval drafts are scored against the text at every step, verified or not; a parked serial
drafter is probed with at most PROBE_SHARE of the time. The never-slower meter (guard.py) has the
last word. Lossless: only drafts are chosen here; drafts drawn at random are never trimmed after
the draw (docs/design.md §2, "no peeking"). Cost: about 0.1 ms a step. Source: arXiv 2406.14066
(TurboSpec).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core import DEEPEST, Ask, Draft, Features, SeqId, State, StepPlan, StepResult, UsageError
from ..engines.base import Shape
from . import Costs
from .acceptance import Acceptance, Yields
from .guard import Guard

HALF_LIFE = 50.0
SERIAL_DEEPEST = 16
PROBE_SHARE = 0.01
# Steps without a plain one after which one is taken: all is compared with T(1), so it must not be
# wrong for long. The gap doubles from 2 to RETIME, and is 2 again when the level moved.
RETIME = 256
RETIME_RATE = 0.4  # how much of the error such a step removes
# Plain steps in a row after which a single node is verified, whatever the curve says: a curve that
# prices every draft out would otherwise never be found wrong. At most 1 % where it is right.
WIDEN = 64
# A step is charged to the meter at most this many times its price: what a machine's stall costs is
# not speculation's loss, and one would close the meter for minutes (a draft model's first forward).
STALL = 3.0


@dataclass
class _Speed:
    """ρ of one sequence, and what the present step has come to."""

    tokens: float = 0.0
    seconds: float = 0.0
    context: int = 0
    survival: float = 1.0
    drafted: int = 0
    ask: Ask | None = None
    row: list[float] = field(default_factory=list)


class Auto:
    name = "auto"

    def __init__(self, costs: Costs, epsilon: float = 0.02):
        self.costs = costs
        self.acceptance = Acceptance()
        self.guard = Guard(epsilon)
        self.yields = Yields()
        self.overhead = 0.0
        self._speeds: dict[SeqId, _Speed] = {}
        self._since_plain, self._gap, self._level = 0, 2, costs.target.drift
        self._since_wide = 0
        self._probe_credit = 0.0

    @classmethod
    def make(cls, argument: str, costs: Costs) -> Auto:
        if argument:
            raise UsageError(f"policy auto takes no argument, not {argument!r}")
        return cls(costs)

    def open(self, seq: SeqId) -> None:
        self._speeds[seq] = _Speed()

    def close(self, seq: SeqId) -> None:
        self.acceptance.close(seq)
        self.yields.close(seq)
        self._speeds.pop(seq, None)

    def price(self, seq: SeqId, context: int) -> float:
        """ρ: tokens per second that a second spent now must bring."""
        speed = self._speeds[seq]
        floor = 1.0 / (self.costs.target.seconds(1, context) + self.overhead)
        # Worth a few tokens of plain decoding to begin with.
        tokens, seconds = speed.tokens + 8.0, speed.seconds + 8.0 / floor
        return max(tokens / seconds, floor)

    # choose: which serial drafter, if any

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        return [ask for state in batch if (ask := self._ask(state)) is not None]

    def _ask(self, state: State) -> Ask | None:
        speed = self._speeds[state.seq]
        speed.row = self.costs.target.row(DEEPEST + 1, state.context)
        speed.ask, speed.survival, speed.drafted = None, 1.0, 0
        speed.context = state.context
        if not self.costs.serial or state.wanted < 2:
            return None
        rho = self.price(state.seq, state.context)
        bar = max([1.0 - rho * speed.row[1]] + [self._best(state, d, rho)[0] for d in state.free])
        asks = [self._serial(state, name, rho) for name in self.costs.serial]
        gain, ask, cost = max(asks, key=lambda found: found[0])
        if ask is None:
            return None
        if gain <= bar:
            if cost > self._probe_credit:
                return None
            self._probe_credit = 0.0
        if not self.guard.allows(cost, speed.row[1]):
            return None
        speed.ask = ask
        return ask

    def _serial(self, state: State, name: str, rho: float) -> tuple[float, Ask | None, float]:
        """(expected gain, ask, seconds at risk) of asking the drafter."""
        deepest = min(SERIAL_DEEPEST, state.wanted - 1, state.room[name])
        if deepest < 1:
            return float("-inf"), None, 0.0
        speed, curve = self._speeds[state.seq], self.costs.serial[name]
        one, stale = curve.seconds(1, state.context), state.stale[name]
        accepted, drafted = self.yields.expected(state.seq, name)
        drafted = min(max(drafted, 1.0), float(deepest))
        accepted = min(accepted, drafted)
        width = 1 + round(drafted)
        gain = 1.0 + accepted - rho * (drafted * one + speed.row[width])
        # Catching up (the whole prompt, at first) also serves the steps to come. How many of them
        # there will be is unknown, since a text may end early: half of what is still wanted.
        extra = curve.seconds(stale, state.context - stale) - one if stale > 1 else 0.0
        steps = max(0.5 * state.wanted / (1.0 + accepted), 1.0)
        risk = extra + drafted * one + speed.row[width] - speed.row[1]
        return gain - rho * extra / steps, Ask(state.seq, name, deepest), risk

    # go: one more token from the drafter

    def go(self, seq: SeqId, features: Features) -> bool:
        speed = self._speeds[seq]
        ask = speed.ask
        if ask is None:
            return False
        speed.survival *= self.acceptance.chance(seq, ask.drafter, features)
        speed.drafted += 1
        n, survival = speed.drafted, speed.survival
        one = self.costs.serial[ask.drafter].seconds(1, speed.context)
        chance = self.acceptance.ahead(seq, ask.drafter, features)
        rho = self.price(seq, speed.context)
        gained = 0.0
        for m in range(1, ask.depth - n + 1):
            survival *= chance
            gained += survival
            if gained > rho * (m * one + speed.row[1 + n + m] - speed.row[1 + n]):
                return True
        return False

    # select: what to verify

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        return [self._plan(state, drafts) for state, drafts in batch]

    def _plan(self, state: State, drafts: Sequence[Draft]) -> StepPlan:
        speed, curve = self._speeds[state.seq], self.costs.target
        empty = StepPlan(state.seq, None, 1)
        rho = self.price(state.seq, state.context)
        drawn = next((d for d in drafts if not d.points), None)
        if drawn is not None:
            # Dropping a node by what was drawn after it would shift the text's distribution.
            return StepPlan(state.seq, drawn, 1 + len(drawn.tokens))
        if self._since_plain >= self._gap:
            return empty
        best, head = 1.0 - rho * speed.row[1], None
        for draft in drafts:
            gain, n, survival = self._best(state, draft, rho)
            if n and gain > best:
                best, head = gain, draft.head(n, survival)
        if head is None:
            return self._widened(state, drafts) or empty
        n = len(head.tokens)
        risk = speed.row[1 + n] - speed.row[1]
        if not self.guard.allows(risk, speed.row[1]):
            return self._widened(state, drafts) or empty
        width = min(curve.padded(1 + n, state.context), 1 + state.wanted)
        return StepPlan(state.seq, head, max(width, 1 + n))

    def _widened(self, state: State, drafts: Sequence[Draft]) -> StepPlan | None:
        if self._since_wide < WIDEN or not drafts or state.wanted < 2:
            return None
        rated = [(self.acceptance.survival(draft), draft) for draft in drafts]
        survival, surest = max(rated, key=lambda pair: pair[0][0])
        return StepPlan(state.seq, surest.head(1, survival), 2)

    def _best(self, state: State, draft: Draft, rho: float) -> tuple[float, int, list[float]]:
        """(gain, n, survivals): the best number of nodes to verify, drafting being paid for."""
        survival = self.acceptance.survival(draft)
        row = self._speeds[state.seq].row
        most = min(len(survival), state.wanted - 1, DEEPEST)
        tokens = list(itertools.accumulate(survival[:most], initial=1.0))
        best, n = max((tokens[n] - rho * row[1 + n], -n) for n in range(most + 1))
        return best, -n, survival

    # learn: from what was verified, and from what was not

    def learn(self, results: Sequence[StepResult]) -> None:
        for result in results:
            self._learn(result)

    def _learn(self, r: StepResult) -> None:
        curve, speed, width = self.costs.target, self._speeds[r.seq], r.plan.width
        plain = curve.seconds(1, r.context) + self.overhead
        rare = width == 1 and self._since_plain >= 2
        probe = width > 1 and self._since_wide >= WIDEN
        shape = Shape(width, r.context)
        curve.learn(shape, r.verify_seconds, RETIME_RATE if rare else 0.0, probe)
        self.overhead += 0.1 * (min(r.rest_seconds, 4 * self.overhead + 1e-3) - self.overhead)
        expected = curve.seconds(width, r.context) + self.overhead
        if r.asked is not None:
            own = next((len(d.tokens) for d in r.drafted if d.drafter == r.asked), 1)
            price = self.costs.serial[r.asked]
            catch_up = price.seconds(max(r.stale, 1), max(r.context - r.stale, 0))
            drafting = catch_up + (own - 1) * price.seconds(1, r.context)
            price.scale(r.draft_seconds, drafting)
            expected += drafting
        for draft in r.drafted:
            hits = self.acceptance.learn(draft, r.committed)
            if draft.drafter == r.asked:
                self.yields.learn(r.seq, r.asked, hits, len(draft.tokens))
        decay = 0.5 ** (len(r.committed) / HALF_LIFE)
        speed.tokens = decay * speed.tokens + len(r.committed)
        speed.seconds = decay * speed.seconds + r.seconds
        speculated = width > 1 or r.asked is not None
        charged = min(r.seconds, STALL * expected)
        self.guard.learn(charged, plain * len(r.committed) if speculated else charged)
        self._since_wide = 0 if width > 1 else self._since_wide + 1
        if width > 1:
            self._since_plain += 1
        else:
            moved = not 0.8 < curve.drift / self._level < 1.25
            if self._since_plain >= self._gap or moved:
                self._gap = 2 if moved else min(2 * self._gap, RETIME)
                self._level = curve.drift
            self._since_plain = 0
        self._probe_credit = min(self._probe_credit + PROBE_SHARE * r.seconds, 5.0)
