"""Targets whose kept rows are fed again after a rejection: the rows are priced, and bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from tests.policy.simulate import CAPS, Clock, Guesser, Rows, TextEngine, simulate
from tests.policy.test_never_slower import CURVES, PHASES, SureModel, Trap

from draftwise.core import Features, State, StepPlan, StepResult, chain
from draftwise.engines.base import UNFED, Caps, PrefillChunk, Shape, Verify
from draftwise.policy import Costs
from draftwise.policy.acceptance import Acceptance
from draftwise.policy.asking import Asking, Prices
from draftwise.policy.cost import CostCurve
from draftwise.policy.goodput import Auto, _argmax

REFEED = replace(CAPS, rollback="refeed")


@dataclass
class RefeedEngine(TextEngine):
    """The same with a state that is put back: unfed rows are paid for in the next forward."""

    caps: Caps = REFEED
    rows: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    most: int = 0

    def unfed(self, seq: int) -> int:
        return self.waiting.get(seq, 0)

    def forward(self, work: Sequence[PrefillChunk | Verify]) -> list[Rows]:
        (w,) = work
        if isinstance(w, Verify):
            self.most = max(self.most, self.unfed(w.seq))
            assert w.width <= len(w.tokens), "padding would be taken out of the state again"
            self.clock.now += self.curve(len(w.tokens) + self.unfed(w.seq))
            self.clock.now -= self.curve(len(w.tokens))
            self.rows[w.seq] = len(w.tokens)
        return super().forward(work)

    def commit(self, seq: int, path: Sequence[int]) -> None:
        super().commit(seq, path)
        whole = len(path) == self.rows[seq]
        self.waiting[seq] = 0 if whole else self.unfed(seq) + len(path)

    def close(self, seq: int, keep: bool = False) -> None:
        super().close(seq, keep)
        self.waiting.pop(seq, None)


@pytest.mark.parametrize("phase", sorted(PHASES))
@pytest.mark.parametrize("regime", sorted(CURVES))
def test_useless_drafts_make_no_run_slower(monkeypatch, regime, phase):
    def drafters(text: list[int], clock: Clock):
        return [Trap("a", text, PHASES[phase], 1), Trap("b", text, PHASES["never"], 2)]

    done = simulate(
        monkeypatch, CURVES[regime], drafters, tokens=300, requests=5, kind=RefeedEngine
    )
    assert done.speedup >= 0.98
    assert min(done.requests) >= 0.95


@pytest.mark.parametrize("regime", sorted(CURVES))
def test_a_model_that_is_sure_and_wrong(monkeypatch, regime):
    share = 0.5 * CURVES[regime](1)

    def drafters(text: list[int], clock: Clock):
        return [SureModel("m", text, 0.0, share, clock)]

    done = simulate(
        monkeypatch,
        CURVES[regime],
        drafters,
        tokens=300,
        requests=5,
        serial_price=share,
        kind=RefeedEngine,
    )
    assert done.speedup >= 0.98
    assert min(done.requests) >= 0.95


@pytest.mark.parametrize("right", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("regime", sorted(CURVES))
def test_useful_drafts_gain_most_of_what_they_do_elsewhere(monkeypatch, regime, right):
    def drafters(text: list[int], clock: Clock):
        return [Guesser("g", text, right)]

    free = simulate(monkeypatch, CURVES[regime], drafters, requests=3).speedup
    done = simulate(monkeypatch, CURVES[regime], drafters, requests=3, kind=RefeedEngine).speedup
    assert done >= 0.98
    if regime not in ("steep", "dear"):  # there, rows fed again cost as much as plain steps
        assert done - 1 >= 0.55 * (free - 1) > 0


@pytest.mark.parametrize("policy", ["auto", "fixed:5", "fixed:2"])
def test_unfed_rows_are_bounded_whatever_the_policy(monkeypatch, policy):
    engines = []

    def drafters(text: list[int], clock: Clock):
        return [Guesser("g", text, 0.3)]

    def change(step: int, engine: TextEngine) -> None:
        engines.append(engine)

    done = simulate(
        monkeypatch,
        CURVES["free"],
        drafters,
        policy,
        requests=2,
        change=change,
        kind=RefeedEngine,
    )
    longest = max(len(step.committed) for step in done.steps)
    assert UNFED < engines[0].most <= UNFED + longest
    assert max(step.unfed for step in done.steps) == engines[0].most
    assert all(step.plan.width == 1 for step in done.steps if step.unfed > UNFED)


def test_what_is_fed_again_shortens_a_draft_or_forbids_it():
    row = [1.0, *(1.0 + 0.1 * w for w in range(80))]
    survival = [0.8**n for n in range(1, 17)]
    _, free = _argmax(survival, 1.0, row)
    _, n = _argmax(survival, 1.0, row, 1.0)
    assert 0 < n < free
    # By hand: if the one node is rejected, the next step has the anchor's row beside its own.
    assert _argmax([0.9], 1.0, row, 1.0) == pytest.approx((1.9 - 1.1 - 0.1 * 0.1, 1))
    assert _argmax([0.15], 1.0, row, 1.0)[1] == 0
    assert _argmax([0.15], 1.0, row)[1] == 1


def test_the_curve_learns_from_the_rows_that_were_run(monkeypatch):
    """A plain step that feeds rows is no measurement of width 1."""

    def drafters(text: list[int], clock: Clock):
        return [Guesser("g", text, 0.5)]

    true = CURVES["steep"]
    done = simulate(
        monkeypatch, true, drafters, requests=3, kind=RefeedEngine, told=lambda w: 0.03 + 0.002 * w
    )
    assert any(step.unfed for step in done.steps)
    assert done.policy.costs.target.seconds(1, 300) == pytest.approx(true(1), rel=0.1)


def costs(refeed: bool = True) -> Costs:
    curve = CostCurve([(Shape(w, 4), 1.0 + 0.1 * (w - 1)) for w in (1, 2, 4, 8, 16, 64)])
    cheap = CostCurve([(Shape(1, 4), 0.01), (Shape(32, 4), 0.02)])
    return Costs(curve, {"m": cheap}, ("g", "m"), refeed=refeed)


def test_a_plain_step_is_charged_for_the_rows_that_it_feeds():
    auto = Auto(costs())
    auto.open(0)
    for unfed, seconds in ((0, 1.0), (5, 1.5)):
        auto.choose([State(0, 4, 20, stale={"m": 1}, room={"m": 0}, unfed=unfed)])
        plain, spent = auto.guard.plain, auto.guard.spent
        plan = StepPlan(0, None, 1)
        auto.learn([StepResult(0, plan, 4, (1,), 0, verify_seconds=seconds, unfed=unfed)])
        assert auto.guard.spent - spent == pytest.approx(seconds, rel=0.02)
        assert auto.guard.plain - plain == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("refeed", [False, True])
def test_the_meter_counts_what_a_rejection_has_fed_again(refeed):
    auto = Auto(costs(refeed))
    auto.open(0)
    draft = chain(0, "g", [5], [Features(match=30)])
    state = State(0, 4, 20, (draft,), {"m": 1}, {"m": 0})
    auto.choose([state])
    assert auto.select([(state, [draft])])[0].draft is not None
    auto.guard.spent = 10.0 - 0.15  # of ten plain steps of grace, less than the two rows' price
    assert (auto.select([(state, [draft])])[0].draft is None) == refeed


def test_asking_is_priced_with_what_a_rejection_has_fed_again():
    state = State(0, 4, 20, stale={"m": 1}, room={"m": 100})
    offers = []
    for refeed in (False, True):
        asking = Asking(costs(refeed), Acceptance())
        asking.open(0)
        for _ in range(20):
            asking.yields.learn(0, "m", 2, 4, 4)
        row = costs().target.row(80, 4)
        offers.append(asking.best(state, Prices(1.0, row, row[1]), -9.0))
    free, fed = offers
    # Half of what is drafted is accepted: two tokens, so that three rows come again.
    assert fed.risk - free.risk == pytest.approx(0.3, abs=0.01)
    assert free.gain - fed.gain == pytest.approx(0.5 * 0.3, abs=0.03)
