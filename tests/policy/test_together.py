"""Policies over batches, on the virtual clock: what a forward of several sequences costs is learned
once, and the batch as a whole is no slower than plain decoding of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from tests.policy.simulate import Clock, Curve, Rows, curve

from draftwise.core import (
    Ask,
    Draft,
    Features,
    Request,
    SamplingParams,
    State,
    StepPlan,
    StepResult,
    chain,
)
from draftwise.decode import Parts, decode_batch
from draftwise.drafters import Go, Retrieval
from draftwise.engines.base import WIDTHS, Caps, PrefillChunk, Shape, Verify
from draftwise.policy import REGISTRY, Costs, Goal, make
from draftwise.policy.cost import CostCurve, CostStore
from draftwise.policy.goodput import Auto
from draftwise.stopping import Stopper
from draftwise.turns import Turn

TEXT = [int(t) for t in np.random.default_rng(5).integers(10, 99, 4000)]
PROMPT = 4


@dataclass
class BatchEngine:
    """All sequences continue TEXT. `together`: seconds of one forward of these widths."""

    price: Curve
    clock: Clock
    together: str = "rows"  # what a forward costs: by all its rows, or one sequence after the other
    caps: Caps = Caps(False, "free", "padded", None, 1 << 20)  # noqa: RUF009
    name: str = "batch"
    held: dict[int, int] = field(default_factory=dict)
    steps: list[list[int]] = field(default_factory=list)

    def open(self, seq: int, tokens: Sequence[int], share: int | None = None) -> int:
        self.held[seq] = 0
        return 0

    def forward(self, work: Sequence[PrefillChunk | Verify]) -> list[Rows]:
        widths = [max(len(w.tokens), getattr(w, "width", 0)) for w in work]
        if isinstance(work[0], PrefillChunk):
            self.held[work[0].seq] += len(work[0].tokens)
            return [Rows([TEXT[self.held[work[0].seq]]])]
        self.steps.append(widths)
        if self.together == "rows":
            self.clock.now += self.price(len(widths) * max(widths))
        else:
            self.clock.now += sum(self.price(w) for w in widths)
        starts = [self.held[w.seq] for w in work]
        return [
            Rows([TEXT[start + j + 1] for j in range(len(w.tokens))])
            for w, start in zip(work, starts, strict=True)
        ]

    def commit(self, seq: int, path: Sequence[int]) -> None:
        self.held[seq] += len(path)

    def close(self, seq: int, keep: bool = False) -> None:
        del self.held[seq]

    def shape(self, widths: Sequence[int], contexts: Sequence[int]) -> Shape:
        return Shape(max(widths), max(contexts), len(widths))


class Copies(Retrieval):
    """Drafts of 16 tokens, of which each is right as often as its sequence's number says."""

    name = "g"

    def __init__(self, rights: Sequence[float]):
        self.rights, self.at = rights, dict[int, int]()
        self.rng = np.random.default_rng(1)

    def open(self, seq: int, request: Request) -> None:
        self.at[seq] = len(request.prompt)

    def observe(self, seq: int, committed: Sequence[int]) -> None:
        self.at[seq] += len(committed)

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        drafts = []
        for ask in asks:
            true = TEXT[self.at[ask.seq] : self.at[ask.seq] + min(ask.depth, 16)]
            right = self.rights[ask.seq % len(self.rights)]
            tokens = [t if self.rng.random() < right else t + 1 for t in true]
            drafts.append(chain(ask.seq, self.name, tokens, [Features(match=3)] * len(tokens)))
        return drafts

    def close(self, seq: int) -> None:
        del self.at[seq]


class Model(Copies):
    """The same for a price a token: side by side for all, or for one sequence after the other."""

    serial = True
    name = "m"

    def __init__(self, rights: Sequence[float], price: float, clock: Clock, abreast: bool):
        super().__init__(rights)
        self.price, self.clock, self.abreast, self.asked = price, clock, abreast, 0

    def stale(self, seq: int) -> int:
        return 1

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        drafts, levels = [], list[int]()
        for whole in super().propose(asks, go):
            n, feature = 1, Features(prob=0.8)
            while n < len(whole.tokens) and go(whole.seq, feature):
                n += 1
            drafts.append(chain(whole.seq, self.name, whole.tokens[:n], [feature] * n))
            levels.append(n)
        self.asked += len(drafts)
        self.clock.now += self.price * (max(levels) if self.abreast else sum(levels))
        return [replace(draft, forwards=(1,) * len(draft.tokens)) for draft in drafts]


@dataclass
class Ran:
    seconds: float
    plain: float  # what the same texts take without drafts, in the same batches
    policy: Auto
    engine: BatchEngine
    results: list[list[StepResult]]
    model: Model | None

    @property
    def speedup(self) -> float:
        return self.plain / self.seconds


def ran(
    regime: str = "flat",
    rights: Sequence[float] = (0.9, 0.2),
    size: int = 4,
    texts: int = 8,
    tokens: int = 300,
    together: str = "rows",
    policy: str = "auto",
    objective: str = "latency",
    model: float = 0.0,
    abreast: bool = True,
) -> Ran:
    clock, price = Clock(), curve(regime)
    engine = BatchEngine(price, clock, together)
    drafter = Model(rights, model, clock, abreast) if model else Copies(rights)
    serial = {"m": CostCurve([(Shape(1, 4), model), (Shape(32, 4), 2 * model)])} if model else {}
    target = CostCurve([(Shape(w, 4), price(w)) for w in WIDTHS])
    costs = Costs(target, serial, (drafter.name,), padded=True)
    chosen = make(policy, costs, Goal(objective))
    parts = Parts(engine, {drafter.name: drafter}, chosen, Turn(), clock.perf_counter)
    asked = []
    for seq in range(texts):
        request = Request(seq, tuple(TEXT[:PROMPT]), SamplingParams(), 0, limit=tokens)
        asked.append((request, Stopper(None, request.prompt, tokens)))
    results = list(decode_batch(parts, asked, size))
    for _, stopper in asked:
        assert stopper.tokens == TEXT[PROMPT : PROMPT + tokens]
    assert not engine.held and not drafter.at
    forward = price(size) if together == "rows" else size * price(1)
    plain = texts / size * (tokens - 1) * forward
    return Ran(clock.now, plain, chosen, engine, results, drafter if model else None)


@pytest.mark.parametrize("policy", [p for p in REGISTRY if p != "fixed"] + ["fixed:3"])
def test_every_policy_decodes_batches(policy):
    assert ran(policy=policy, tokens=60).results
    assert ran(policy=policy, tokens=60, model=0.02).results


@pytest.mark.parametrize("together", ["rows", "apart"])
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_batch_gains_where_its_rows_are_cheap_and_does_not_lose_where_they_are_not(
    together, objective
):
    assert ran("flat", (0.9,), together=together, objective=objective).speedup > 1.5
    assert ran("steep", (0.9,), size=8, together=together, objective=objective).speedup > 0.98
    assert ran("flat", (0.0,), together=together, objective=objective).speedup > 0.97
    assert ran("steep", (0.0,), together=together, objective=objective).speedup > 0.97


def test_a_fixed_length_loses_where_auto_does_not():
    """The negative control: eight times five rows are dear on a steep curve."""
    assert ran("steep", (0.5,), size=8, policy="fixed:4").speedup < 0.9
    assert ran("steep", (0.5,), size=8).speedup > 0.98


def test_lengths_are_each_sequence_s_own_in_one_forward():
    done = ran("flat", (0.95, 0.0), size=2, texts=2, tokens=400, policy="auto")
    both = [r for r in done.results if len(r) == 2]
    widths = np.array([[r.plan.width for r in pair] for pair in both[len(both) // 2 :]])
    assert widths[:, 0].mean() > widths[:, 1].mean() + 2
    steps = [
        sum(r.seq == seq and not r.prefill for rs in done.results for r in rs) for seq in (0, 1)
    ]
    assert steps[0] < 0.5 * steps[1]


@pytest.mark.parametrize(("together", "size"), [("rows", 4), ("apart", 4), ("apart", 8)])
def test_the_plain_cost_of_a_batch_is_learned_whatever_the_engine_does(together, size):
    done = ran("flat", (0.6,), size=size, texts=size, together=together)
    true = curve("flat")(size) if together == "rows" else size * curve("flat")(1)
    assert done.policy.costs.target.seconds(1, 100, size) == pytest.approx(true, rel=0.1)
    assert done.policy.costs.target.seconds(1, 100) == pytest.approx(curve("flat")(1), rel=0.1)


def test_one_price_a_second_for_all_that_share_a_forward():
    auto = Auto(Costs(CostCurve([(Shape(1, 0), 0.1), (Shape(64, 0), 0.1)]), {}, ("g",)))
    states = [State(seq, 50, 20) for seq in range(3)]
    for state in states:
        auto.open(state.seq)
    auto.choose(states)
    prices = {auto._speeds[seq].rho for seq in range(3)}
    assert len(prices) == 1 and prices.pop() == pytest.approx(30.0), "three tokens a plain step"
    results = [
        StepResult(s.seq, StepPlan(s.seq, None, 1), 50, tuple(range(n)), n - 1, verify_seconds=0.1)
        for s, n in zip(states, (1, 1, 4), strict=True)
    ]
    for _ in range(60):
        auto.learn(results)
    auto.choose(states)
    assert auto._speeds[0].rho == pytest.approx(60.0, rel=0.1)
    auto.close(2)
    auto.choose(states[:2])
    assert auto._speeds[0].rho < 25.0, "what is gone has no say but in the usual speed"


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_the_meter_counts_a_forward_once(objective):
    done = ran("flat", (0.3,), objective=objective)
    seconds = sum(rs[0].seconds for rs in done.results if not rs[0].prefill)
    assert done.policy.guard.spent == pytest.approx(seconds, rel=0.05)
    assert done.policy.guard.plain == pytest.approx(done.plain, rel=0.15)


def test_a_draft_model_pays_for_a_batch_if_it_drafts_for_all_at_once():
    """What pays for one sequence alone does not for four, one of which drafts at a time."""
    alone = ran("flat", (0.75,), size=1, texts=2, model=0.03)
    apart = ran("flat", (0.75,), size=4, texts=8, model=0.03, abreast=False)
    abreast = ran("flat", (0.75,), size=4, texts=8, model=0.03)
    asked = [
        done.model.asked / sum(len(rs) for rs in done.results if not rs[0].prefill)
        for done in (alone, apart, abreast)
        if done.model is not None
    ]
    assert asked[0] > 0.5 > 0.2 > asked[1] and asked[2] > 0.5
    assert alone.speedup > 1.5 and abreast.speedup > 1.05
    assert apart.speedup > 0.97, "what it cost to find out is within the grace"


def test_a_batch_s_curve_is_guessed_from_rows_then_learned_then_passed_on():
    one = CostCurve([(Shape(w, 4), 0.02 + 0.01 * w) for w in WIDTHS])
    assert one.seconds(3, 4, 4) == pytest.approx(one.seconds(12, 4))
    for _ in range(3):  # an engine that runs them one after another
        one.learn(Shape(1, 4, 4), 4 * 0.03)
    assert one.seconds(1, 4, 4) == pytest.approx(0.12, rel=0.05)
    assert one.seconds(1, 4) == pytest.approx(0.03)
    # The next batch begins with what was learned of this one.
    assert one.seconds(1, 4, 5) / one.seconds(5, 4) == pytest.approx(0.12 / 0.06, rel=0.1)
    before = one.seconds(1, 4, 4)
    for _ in range(60):
        one.learn(Shape(1, 4), 2 * 0.03)
    assert one.seconds(1, 4, 4) > 1.5 * before, "a machine that is slow is slow for all"


def test_the_attention_of_a_batch_counts_for_each():
    points = [(Shape(w, c), 0.1 + 0.001 * c) for w in (1, 16) for c in (0, 1000)]
    one = CostCurve(points)
    assert one.seconds(1, 1000, 4) == pytest.approx(0.1 + 4 * 1.0)


def test_batches_that_were_measured_are_stored(tmp_path):
    one = CostCurve([(Shape(w, 4), 0.02 + 0.01 * w) for w in WIDTHS])
    one.learn(Shape(1, 4, 8), 0.3)
    for _ in range(10):
        one.learn(Shape(1, 4, 4), 0.12)
    store = CostStore(tmp_path)
    store.save("e", one)
    again = store.load("e")
    assert again is not None
    assert again.seconds(1, 4, 4) == pytest.approx(0.12, rel=0.05)
    assert set(again._batches) == {4}, "one step is not a measurement"
    assert CostCurve([(Shape(1, 4), 0.1), (Shape(2, 4, 3), 0.5)]).seconds(2, 4, 3) == 0.5
