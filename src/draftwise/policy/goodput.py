"""`auto`: each step the plan with the largest gain, priced by the present speed.

    gain(plan) = 1 + Σ S_v − ρ · (T_draft + T̃(1 + n, ctx) + T_overhead)

By Dinkelbach, maximising E[tokens]/E[seconds] means maximising this gain, with ρ the speed itself:
tokens over seconds of the last ~HALF_LIFE tokens, never below plain speed (for throughput: of
all running requests together). S_v is a node's survival (tree.py), T the measured curve (cost.py).

  choose    ask a serial drafter if that beats the best without it (asking.py)
  go        one more token while further ones would raise the gain
  select    drafting is sunk: all drafts are merged into one tree, its nodes come by survival, and
            n* = argmax over every n of Σ_{v ≤ n} S_v − ρ·T̃(1 + n); the empty plan competes like any
            other (parking). Several sequences share one forward by pool.py.

Where rows are fed again after a rejection (Costs.refeed), T(w) is that of u + w rows with u unfed,
so that of the plain step too, and a plan of n nodes of which a are kept, if not all, costs more:

    + (1 − S_n) · (T(u + 2 + a) − T(1))      the next step's rows, beside those of plain decoding

Retrieval drafts are scored against the text at every step, verified or not. The never-slower meter
(guard.py) has the last word. Lossless: only drafts are chosen here; drafts drawn at random are
never trimmed after the draw (docs/design.md §2, "no peeking"). Cost: about 0.2 ms a step.
Source: arXiv 2406.14066 (TurboSpec).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core import DEEPEST, Ask, Draft, Features, SeqId, State, StepPlan, StepResult, UsageError
from ..engines.base import Shape
from . import GOAL, Costs, Goal
from .acceptance import Acceptance
from .asking import Asking
from .guard import Guard
from .pool import share
from .reliability import Reliability
from .retiming import Retiming
from .tree import Companies, Tree

HALF_LIFE = 50.0
BEGIN, USUAL = 20.0, 50.0  # tokens that the usual speed is worth, and plain ones before that
LEAST = 0.01  # a node of less survival pays nowhere
# A step is charged to the meter at most this many times its price: what a machine's stall costs is
# not speculation's loss, and one would close the meter for minutes (a draft model's first forward).
STALL = 1.3


@dataclass
class _Speed:
    """ρ of one sequence, and what the present step has come to."""

    tokens: float = 0.0
    seconds: float = 0.0
    row: list[float] = field(default_factory=list)  # T̃ by the rows from the anchor on
    plain: float = 0.0  # T(1), where nothing is unfed
    tree: Tree | None = None

    def add(self, tokens: int, seconds: float, half_life: float) -> None:
        decay = 0.5 ** (tokens / half_life)
        self.tokens = decay * self.tokens + tokens
        self.seconds = decay * self.seconds + seconds


class Auto:
    name = "auto"

    def __init__(self, costs: Costs, goal: Goal = GOAL):
        self.costs, self.goal = costs, goal
        self.acceptance, self.companies = Acceptance(), Companies()
        self.reliability = Reliability()
        self.asking = Asking(costs, self.acceptance)
        self.guard = Guard(goal.max_slowdown)
        self.retiming = Retiming(costs.target.drift)
        self.overhead = 0.0
        self._speeds: dict[SeqId, _Speed] = {}
        self._pool = _Speed()  # of all running requests: the price for throughput
        self._gained = self._spent = 0.0  # tokens so far, and seconds in plain steps

    @classmethod
    def make(cls, argument: str, costs: Costs, goal: Goal) -> Auto:
        if argument:
            raise UsageError(f"policy auto takes no argument, not {argument!r}")
        return cls(costs, goal)

    def open(self, seq: SeqId) -> None:
        self._speeds[seq] = _Speed()
        self.asking.open(seq)

    def warm(self, seq: SeqId, rehearsed: Sequence[tuple[Draft, tuple[int, ...]]]) -> None:
        """Learns from what retrieval drafters would have proposed within the prompt."""
        self.acceptance.rehearse(seq, rehearsed)

    def close(self, seq: SeqId) -> None:
        self.acceptance.close(seq)
        self.asking.close(seq)
        self.guard.close(seq)
        self._speeds.pop(seq, None)
        if not self._speeds:
            self._pool = _Speed()

    def price(self, seq: SeqId, context: int) -> float:
        """ρ: tokens per second that a second spent now must bring."""
        speed = self._pool if self.goal.objective == "throughput" else self._speeds[seq]
        floor = 1.0 / (self.costs.target.seconds(1, context) + self.overhead)
        # A new request is taken to go as earlier ones went, until some tokens tell more.
        usual = floor * (self._gained + USUAL) / (self._spent + USUAL)
        tokens, seconds = speed.tokens + BEGIN, speed.seconds + BEGIN / usual
        return max(tokens / seconds, floor)

    # choose and go: what to draft

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        return [ask for state in batch if (ask := self._ask(state)) is not None]

    def _ask(self, state: State) -> Ask | None:
        speed = self._speeds[state.seq]
        row = self.costs.target.row(DEEPEST + 2 + state.unfed, state.context, not self.costs.refeed)
        speed.row, speed.plain = row[state.unfed :], row[1]
        self.asking.none(state.seq)
        if not self.costs.serial or state.wanted < 2:
            return None
        rho = self.price(state.seq, state.context)
        bar, _ = self._best(state, state.free, rho)
        offer = self.asking.best(state, rho, bar, speed.row, speed.plain)
        if offer is None or not self.guard.allows(offer.risk, speed.plain):
            return None
        self.asking.begin(offer.ask, state.context)
        return offer.ask

    def go(self, seq: SeqId, features: Features) -> bool:
        rho = self.price(seq, self.asking.context(seq))
        return self.asking.go(seq, features, rho, self._speeds[seq].row)

    # select: what to verify

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        if len(batch) == 1:
            return [self._plan(*batch[0])]
        return self._pooled(batch)

    def _plan(self, state: State, drafts: Sequence[Draft]) -> StepPlan:
        speed, curve = self._speeds[state.seq], self.costs.target
        empty = StepPlan(state.seq, None, 1)
        drawn = _drawn(drafts)
        if drawn is not None:
            # Dropping a node by what was drawn after it would shift the text's distribution.
            return StepPlan(state.seq, drawn, 1 + len(drawn.tokens))
        if self.retiming.plain_due:
            return empty
        _, head = self._best(state, drafts, self.price(state.seq, state.context))
        n = len(head.tokens) if head else 0
        risk = speed.row[1 + n] - speed.row[1]
        if self.costs.refeed:
            risk += speed.row[2] - speed.plain
        if head is None or not self._allowed(state.seq, risk):
            return self._widened(state, drafts) or empty
        if self.costs.refeed:
            return StepPlan(state.seq, head, 1 + n)
        width = min(curve.padded(1 + n, state.context), 1 + state.wanted)
        return StepPlan(state.seq, head, max(width, 1 + n))

    def _allowed(self, seq: SeqId, risk: float) -> bool:
        plain = self._speeds[seq].plain
        return self.guard.allows(risk, plain) and self.guard.allows_request(seq, risk, plain)

    def _widened(self, state: State, drafts: Sequence[Draft]) -> StepPlan | None:
        roots = [draft for draft in drafts if draft.tokens and not draft.after]
        if not self.retiming.wide_due or state.wanted < 2 or not roots:
            return None
        rated = [(self.acceptance.survival(draft), draft) for draft in roots]
        survival, surest = max(rated, key=lambda pair: pair[0][0])
        return StepPlan(state.seq, surest.head(1, survival), 2)

    def _best(
        self, state: State, drafts: Sequence[Draft], rho: float
    ) -> tuple[float, Draft | None]:
        """(gain, draft): the best nodes to verify, drafting being paid for; None: plain."""
        speed = self._speeds[state.seq]
        row, plain = speed.row, speed.plain if self.costs.refeed else None
        best: tuple[float, Draft | None] = (1.0 - rho * row[1], None)
        tree = self._tree(state, drafts)
        if tree is None:
            return best
        if self.costs.trees:
            gain, n = _argmax(self._survival(tree, state.wanted), rho, row)
            return (gain, tree.draft(state.seq, n)) if n and gain > best[0] else best
        for path in tree.paths():
            survival = self.reliability.corrected(tree.nodes[i].survival for i in path)
            gain, n = _argmax(survival, rho, row, plain)
            if n and gain > best[0]:
                best = (gain, tree.chain(state.seq, path[:n]))
        return best

    def _tree(self, state: State, drafts: Sequence[Draft]) -> Tree | None:
        speed = self._speeds[state.seq]
        speed.tree = None
        if state.wanted >= 2 and drafts:
            estimate = self.acceptance.estimator(state.seq)
            deepest = min(state.wanted - 1, DEEPEST)
            speed.tree = Tree(drafts, estimate, self.companies, deepest, LEAST)
        return speed.tree

    def _survival(self, tree: Tree, wanted: int) -> list[float]:
        # No more nodes than tokens may follow: the cache may have no more rows than that left.
        return self.reliability.corrected(node.survival for node in tree.nodes[: wanted - 1])

    def _pooled(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        """One forward for several sequences, on an engine that verifies trees."""
        states = [state for state, _ in batch]
        drawn = [_drawn(drafts) for _, drafts in batch]
        trees = [None if q else self._tree(*pair) for q, pair in zip(drawn, batch, strict=True)]
        survivals = [
            self._survival(tree, state.wanted) if tree else []
            for tree, state in zip(trees, states, strict=True)
        ]
        least = [len(draft.tokens) if draft else 0 for draft in drawn]
        context = sum(state.context for state in states)
        row = self.costs.target.row(len(batch) * (1 + DEEPEST), context)
        if self.retiming.plain_due:
            survivals = [[] for _ in batch]
        rho = sum(self.price(state.seq, state.context) for state in states)
        counts = share(survivals, least, rho, row.__getitem__, self.costs.padded)
        if not self.guard.allows(row[len(batch) + sum(counts)] - row[len(batch)], row[len(batch)]):
            counts = least
        plans = []
        for state, tree, whole, n in zip(states, trees, drawn, counts, strict=True):
            draft = whole or (tree.draft(state.seq, n) if tree and n else None)
            plans.append(StepPlan(state.seq, draft, 1 + n))
        return plans

    # learn: from what was verified, and from what was not

    def learn(self, results: Sequence[StepResult]) -> None:
        for result in results:
            plain, expected = self._learn_costs(result)
            self._learn_acceptance(result)
            self._learn_speed(result, plain, expected)

    def _learn_costs(self, r: StepResult) -> tuple[float, float]:
        """(seconds of a plain step, of one like this), as they are priced."""
        curve, width = self.costs.target, r.plan.width + r.unfed
        plain = curve.seconds(1, r.context) + self.overhead
        shape = Shape(width, r.context)
        least = self.retiming.rate if width == 1 else 0.0
        before = curve.drift
        curve.learn(shape, r.verify_seconds, least, width > 1 and self.retiming.wide_due)
        for serial in self.costs.serial.values():
            serial.drift *= curve.drift / before  # who shares the machine, shares what befalls it
        self.overhead += 0.1 * (min(r.rest_seconds, 4 * self.overhead + 1e-3) - self.overhead)
        expected = curve.seconds(width, r.context) + self.overhead
        if r.asked is not None:
            expected += self.asking.learn(r)
        self.retiming.learn(width, curve.drift)
        return plain, expected

    def _learn_acceptance(self, r: StepResult) -> None:
        if r.plan.draft is not None and r.plan.draft.points:
            path = set(r.path)
            for i, survival in enumerate(r.plan.draft.survival):
                self.reliability.learn(survival, i in path)
        tree = self._speeds[r.seq].tree
        if tree is not None:
            tree.learn(self.companies, r.committed)
        for draft in r.drafted:
            self.acceptance.learn(draft, r.committed)
        self.asking.lengths.add(r.seq, r.context, len(r.committed))

    def _learn_speed(self, r: StepResult, plain: float, expected: float) -> None:
        tokens = len(r.committed)
        self._gained += tokens
        self._spent += r.seconds / plain
        self._speeds[r.seq].add(tokens, r.seconds, HALF_LIFE)
        self._pool.add(tokens, r.seconds, HALF_LIFE * len(self._speeds))
        charged = min(r.seconds, STALL * expected)
        speculated = r.plan.width + r.unfed > 1 or r.asked is not None
        worth = plain * tokens if speculated else charged
        self.guard.learn(charged, worth)
        self.guard.learn_request(r.seq, charged - min(r.draft_seconds, charged), worth)
        self.asking.spent(r.seconds)


def _drawn(drafts: Sequence[Draft]) -> Draft | None:
    return next((draft for draft in drafts if not draft.points), None)


def _argmax(
    survival: Sequence[float], rho: float, row: Sequence[float], plain: float | None = None
) -> tuple[float, int]:
    """(gain, n) of verifying the first n of the nodes with these survivals: the best n. `plain`:
    T(1), if what a rejection leaves is fed again."""
    tokens = itertools.accumulate(survival, initial=1.0)
    if plain is None:
        gain, n = max((t - rho * row[1 + n], -n) for n, t in enumerate(tokens))
        return gain, -n
    best = (-math.inf, 0)
    for n, (total, whole) in enumerate(zip(tokens, (1.0, *survival), strict=True)):
        seconds = row[1 + n]
        if whole < 1.0:  # corrected estimates may be over 1, and need not fall with depth
            kept = (total - 1.0 - n * whole) / (1.0 - whole)
            kept = min(max(kept, 0.0), n - 1.0)
            seconds += (1.0 - whole) * (row[2 + round(kept)] - plain)
        best = max(best, (total - rho * seconds, -n))
    return best[0], -best[1]
