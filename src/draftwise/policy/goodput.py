"""`auto`: each step the plan with the largest gain, priced by the present speed.

    gain(plan) = 1 + Σ S_v − ρ · (T_draft + T̃(1 + n, ctx) + T_overhead)

By Dinkelbach, maximising E[tokens]/E[seconds] means maximising this gain, with ρ the speed itself:
tokens over seconds of the last ~HALF_LIFE tokens, never below plain speed (for throughput: of
all running requests together). S_v is a node's survival (tree.py), T the measured curve (cost.py).

  choose    ask a serial drafter if that beats the best without it (asking.py)
  go        one more token while further ones would raise the gain
  select    drafting is sunk: all drafts are merged into one tree, its nodes come by survival, and
            n* = argmax over every n of Σ_{v ≤ n} S_v − ρ·T̃(1 + n); the empty plan competes like any
            other (parking). Several sequences share one forward by pool.py

Of b sequences in one forward each pays T_b/b, and ρ is the speed of all of them together, since a
second of the forward is everyone's; for b = 1 that is the above. The curve learns the forward once,
and the meter compares it with a plain one of the same b.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..core import DEEPEST, Ask, Draft, Features, SeqId, State, StepPlan, StepResult, UsageError
from ..engines.base import Shape
from . import GOAL, Costs, Goal
from .acceptance import Acceptance
from .asking import Asking, Offer, Prices
from .guard import Guard
from .pool import Cost, share
from .reliability import Reliability
from .retiming import Retiming
from .tree import Companies, Tree

HALF_LIFE = 50.0
BEGIN, USUAL = 20.0, 50.0  # tokens that the usual speed is worth, and plain ones before that
LEAST = 0.01  # a node of less survival pays nowhere
# A step is charged to the meter at most this many times its price: what a machine's stall costs is
# not speculation's loss, and one would close the meter for minutes (a draft model's first forward).
STALL = 1.3


Candidate = tuple[list[float], Callable[[int], Draft]]  # survivals; the draft of the first n nodes

NOTHING: Candidate = ([], lambda n: Draft(-1, "", (), (), (), ()))


@dataclass
class _Speed:
    """Speed of one sequence, and what the present step has come to. `row`: its share of T̃(w)."""

    tokens: float = 0.0
    seconds: float = 0.0
    rho: float = 0.0
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
        self._retimings: dict[int, Retiming] = {}  # by sequences in a forward
        self.overhead = 0.0  # seconds a sequence
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

    def price(self, seq: SeqId, context: int, size: int = 1) -> float:
        """A sequence's part of ρ: tokens per second that a second spent now must bring, of all
        `size` sequences that share it."""
        plain = self.costs.target.seconds(1, context, size)
        floor = 1.0 / (plain + size * self.overhead)
        # A new request is taken to go as earlier ones went, until some tokens tell more.
        usual = (self._gained + USUAL) / (self._spent + USUAL)
        if self.goal.objective == "throughput":
            return _rate(self._pool, size * floor, usual) / size
        return _rate(self._speeds[seq], floor, usual)

    def retiming(self, size: int) -> Retiming:
        """That of forwards of so many sequences."""
        if size not in self._retimings:
            self._retimings[size] = Retiming(self.costs.target.of(size).drift)
        return self._retimings[size]

    # choose and go: what to draft

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        size, context = len(batch), _mean(batch)
        rho = sum(self.price(state.seq, context, size) for state in batch)
        refeed = self.costs.refeed  # such engines run one sequence at a time
        unfed = batch[0].unfed if refeed else 0
        whole = self.costs.target.row(DEEPEST + 2 + unfed, context, size, not refeed)
        row = [seconds / size for seconds in whole[unfed:]]
        prices = Prices(rho, row, whole[1] / size, size)
        bars: dict[SeqId, float] = {}
        offers: list[tuple[State, Offer]] = []
        for state in batch:
            speed = self._speeds[state.seq]
            speed.rho, speed.row, speed.plain = rho, row, prices.plain
            self.asking.none(state.seq)
            if not self.costs.serial or state.wanted < 2:
                continue
            bars[state.seq], _ = self._best(state, state.free)
            offer = self.asking.best(state, prices, bars[state.seq])
            if offer is not None:
                offers.append((state, offer))
        if 0 < len(offers) < size:
            # Fewer share the drafter's forwards than was thought, which makes them dearer.
            prices = replace(prices, shared=len(offers))
            priced = [(s, self.asking.again(s, o, prices)) for s, o in offers]
            offers = [(s, o) for s, o in priced if o.probe or o.gain > bars[s.seq]]
        asks: list[Ask] = []
        risk = 0.0
        for _, offer in offers:
            if self.guard.allows(risk + offer.risk, whole[1] / size):
                risk += offer.risk
                self.asking.begin(offer)
                asks.append(offer.ask)
        return asks

    def go(self, seq: SeqId, features: Features) -> bool:
        speed = self._speeds[seq]
        return self.asking.go(seq, features, speed.rho, speed.row)

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
        if self.retiming(1).plain_due:
            return empty
        _, head = self._best(state, drafts)
        n = len(head.tokens) if head else 0
        risk = speed.row[1 + n] - speed.row[1]
        if self.costs.refeed:
            risk += speed.row[2] - speed.plain
        if head is None or not self._allowed(state.seq, risk):
            return self._widened(1, state, drafts) or empty
        if self.costs.refeed:
            return StepPlan(state.seq, head, 1 + n)
        width = min(curve.padded(1 + n, state.context), 1 + state.wanted)
        return StepPlan(state.seq, head, max(width, 1 + n))

    def _allowed(self, seq: SeqId, risk: float) -> bool:
        plain = self._speeds[seq].plain
        return self.guard.allows(risk, plain) and self.guard.allows_request(seq, risk, plain)

    def _widened(self, size: int, state: State, drafts: Sequence[Draft]) -> StepPlan | None:
        roots = [draft for draft in drafts if draft.tokens and not draft.after]
        if not self.retiming(size).wide_due or state.wanted < 2 or not roots:
            return None
        rated = [(self.acceptance.survival(draft), draft) for draft in roots]
        survival, surest = max(rated, key=lambda pair: pair[0][0])
        return StepPlan(state.seq, surest.head(1, survival), 2)

    def _best(self, state: State, drafts: Sequence[Draft]) -> tuple[float, Draft | None]:
        """(gain, draft): the best nodes to verify, drafting being paid for; None: plain."""
        speed = self._speeds[state.seq]
        plain = speed.plain if self.costs.refeed else None
        best: tuple[float, Draft | None] = (1.0 - speed.rho * speed.row[1], None)
        for survival, head in self._candidates(state, drafts):
            gain, n = _argmax(survival, speed.rho, speed.row, plain)
            if n and gain > best[0]:
                best = (gain, head(n))
        return best

    def _candidates(self, state: State, drafts: Sequence[Draft]) -> Iterator[Candidate]:
        """The tree of all drafts, or its paths where only chains can be verified."""
        seq, tree = state.seq, self._tree(state, drafts)
        if tree is None:
            return
        if self.costs.trees:
            # No more nodes than tokens may follow: the cache may have no more rows than that left.
            nodes = tree.nodes[: state.wanted - 1]
            survival = self.reliability.corrected(node.survival for node in nodes)
            yield survival, lambda n: tree.draft(seq, n)
            return
        for path in tree.paths():
            survival = self.reliability.corrected(tree.nodes[i].survival for i in path)
            yield survival, lambda n, path=path: tree.chain(seq, path[:n])  # type: ignore[misc]

    def _tree(self, state: State, drafts: Sequence[Draft]) -> Tree | None:
        speed = self._speeds[state.seq]
        speed.tree = None
        if state.wanted >= 2 and drafts:
            estimate = self.acceptance.estimator(state.seq)
            deepest = min(state.wanted - 1, DEEPEST)
            speed.tree = Tree(drafts, estimate, self.companies, deepest, LEAST)
        return speed.tree

    def _pooled(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        """One forward for several sequences."""
        size, states = len(batch), [state for state, _ in batch]
        rho, row = self._speeds[states[0].seq].rho, self._speeds[states[0].seq].row
        cost, drawn = _by_rows(row, size), [_drawn(drafts) for _, drafts in batch]
        least = [len(draft.tokens) if draft else 0 for draft in drawn]
        plans = [StepPlan(s.seq, d, 1 + n) for s, d, n in zip(states, drawn, least, strict=True)]
        if self.retiming(size).plain_due:
            return plans

        def worth(candidate: Candidate) -> float:
            return _argmax(candidate[0], rho, row)[0]

        found = [
            NOTHING if q else max(self._candidates(*pair), key=worth, default=NOTHING)
            for q, pair in zip(drawn, batch, strict=True)
        ]
        counts = share([s for s, _ in found], least, rho, cost, self.costs.padded)
        # Each node is answered for by its sequence, with its part of what the forward costs more.
        risk = self._rows_cost(counts, cost) - cost(size)
        each = risk / max(sum(counts), 1)
        counts = [
            n if self.guard.allows_request(state.seq, each * n, row[1]) else m
            for state, n, m in zip(states, counts, least, strict=True)
        ]
        risk = self._rows_cost(counts, cost) - cost(size)
        if not self.guard.allows(risk, cost(size) / size):
            counts = least
        for i, (n, (_, head)) in enumerate(zip(counts, found, strict=True)):
            if n and drawn[i] is None:
                plans[i] = StepPlan(states[i].seq, head(n), 1 + n)
        if not any(counts):
            plans = [self._widened(size, *pair) or p for pair, p in zip(batch, plans, strict=True)]
        return plans

    def _rows_cost(self, counts: Sequence[int], cost: Cost) -> float:
        padded = self.costs.padded
        return cost(len(counts) * (1 + max(counts)) if padded else len(counts) + sum(counts))

    # learn: from what was verified, and from what was not

    def learn(self, results: Sequence[StepResult]) -> None:
        plain, expected = self._learn_costs(results)
        for result in results:
            self._learn_acceptance(result)
        self._learn_speed(results, plain, expected)

    def _learn_costs(self, results: Sequence[StepResult]) -> tuple[float, float]:
        """(seconds of a plain step, of one like this), as they are priced."""
        curve, size, context = self.costs.target, len(results), _mean(results)
        widths = [r.plan.width + r.unfed for r in results]
        mean = max(widths) if self.costs.padded else sum(widths) / size
        width = math.ceil(mean)
        plain = curve.seconds(1, context, size) + size * self.overhead
        retiming = self.retiming(size)
        least = retiming.rate if width == 1 else 0.0
        before = curve.drift
        price = curve.seconds(mean, context, size)
        verified = results[0].verify_seconds * curve.seconds(width, context, size) / price
        probe = width > 1 and retiming.wide_due
        curve.learn(Shape(width, context, size), verified, least, probe)
        for serial in self.costs.serial.values():
            serial.drift *= curve.drift / before  # who shares the machine, shares what befalls it
        rest = results[0].rest_seconds / size
        self.overhead += 0.1 * (min(rest, 4 * self.overhead + 1e-3) - self.overhead)
        expected = curve.seconds(mean, context, size) + size * self.overhead
        expected += self.asking.learn([r for r in results if r.asked is not None])
        retiming.learn(width, curve.of(size).drift)
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

    def _learn_speed(self, results: Sequence[StepResult], plain: float, expected: float) -> None:
        size, seconds = len(results), results[0].seconds
        tokens, nodes = sum(len(r.committed) for r in results), sum(r.verified for r in results)
        self._pool.add(tokens, seconds, HALF_LIFE * len(self._speeds))
        charged = min(seconds, STALL * expected)
        speculated = any(r.plan.width + r.unfed > 1 or r.asked is not None for r in results)
        token = plain / size if speculated else charged / tokens  # what one is worth
        self.guard.learn(charged, token * tokens)
        verifying = charged - min(results[0].draft_seconds, charged)
        for r in results:
            self._gained += len(r.committed)
            self._spent += seconds / plain
            self._speeds[r.seq].add(len(r.committed), seconds, HALF_LIFE)
            # What a forward costs more than a plain one is for those whose nodes made it wider.
            part = r.verified / nodes if nodes else 1.0 / size
            own = plain / size + part * (verifying - plain)
            self.guard.learn_request(r.seq, own, token * len(r.committed))
        self.asking.spent(seconds)


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


def _mean(batch: Sequence[State] | Sequence[StepResult]) -> int:
    """Tokens before a forward, of one of its sequences."""
    return sum(one.context for one in batch) // len(batch)


def _rate(speed: _Speed, floor: float, usual: float) -> float:
    """Tokens per second of late; before there are many, `usual` times plain speed."""
    tokens, seconds = speed.tokens + BEGIN, speed.seconds + BEGIN / (floor * usual)
    return max(tokens / seconds, floor)


def _by_rows(row: Sequence[float], size: int) -> Cost:
    """Seconds by rows in all; `row`: a sequence's share of them by its width."""

    def cost(rows: int) -> float:
        width, over = divmod(rows, size)
        part = over / size
        return size * (row[width] if not over else (1 - part) * row[width] + part * row[width + 1])

    return cost
