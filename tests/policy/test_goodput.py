"""`auto` on a virtual clock: right in both cost regimes, never slower, and equal to brute force."""

from __future__ import annotations

import itertools

import pytest
from tests.policy.simulate import Guesser, SerialGuesser, curve, simulate

from draftwise.core import Features, State, chain
from draftwise.engines.base import Shape
from draftwise.policy import Costs
from draftwise.policy.cost import CostCurve
from draftwise.policy.goodput import Auto
from draftwise.policy.retiming import RETIME, WIDEN


@pytest.mark.parametrize("regime", ["flat", "steep"])
def test_a_drafter_that_is_always_right_is_used_to_the_full(monkeypatch, regime):
    done = simulate(monkeypatch, curve(regime), lambda t, c: [Guesser("g", t, 1.0)])
    assert done.speedup > {"flat": 8.0, "steep": 1.7}[regime]


@pytest.mark.parametrize("regime", ["flat", "steep"])
@pytest.mark.parametrize("right", [0.0, 0.1, 0.3])
def test_a_useless_drafter_costs_at_most_two_percent(monkeypatch, regime, right):
    done = simulate(monkeypatch, curve(regime), lambda t, c: [Guesser("g", t, right)], tokens=1500)
    assert done.speedup >= 0.98


@pytest.mark.parametrize("regime", ["flat", "steep"])
def test_a_useless_serial_drafter_costs_at_most_two_percent(monkeypatch, regime):
    def drafters(text, clock):
        return [SerialGuesser("m", text, 0.0, 0.08, clock)]

    done = simulate(monkeypatch, curve(regime), drafters, tokens=1500)
    assert done.speedup >= 0.98


def test_drafters_that_only_seem_good_are_stopped_by_the_meter(monkeypatch):
    def drafters(text, clock):
        return [Guesser(f"g{i}", text, 0.0, i) for i in range(8)]

    done = simulate(monkeypatch, curve("steep"), drafters, tokens=1500)
    assert done.speedup >= 0.98


def test_the_better_of_two_drafters_serves(monkeypatch):
    def drafters(text, clock):
        return [Guesser("bad", text, 0.3, 1), Guesser("good", text, 0.9, 2)]

    done = simulate(monkeypatch, curve("flat"), drafters, tokens=600)
    served = [s.plan.draft.drafter for s in done.steps if s.plan.draft]
    assert served.count("good") > 0.9 * len(served)


def test_the_serial_drafter_serves_where_it_pays_and_not_where_it_does_not(monkeypatch):
    def good(text, clock):
        return [SerialGuesser("m", text, 0.9, 0.02, clock)]

    def dear(text, clock):
        return [SerialGuesser("m", text, 0.9, 0.5, clock)]

    paid = simulate(monkeypatch, curve("flat"), good, serial_price=0.02)
    assert paid.speedup > 2.0
    parked = simulate(monkeypatch, curve("flat"), dear, serial_price=0.5, tokens=1000)
    assert sum(s.asked is not None for s in parked.steps) < 0.02 * len(parked.steps)
    assert parked.speedup >= 0.98


def test_a_parked_serial_drafter_that_became_good_comes_back(monkeypatch):
    made = []

    def drafters(text, clock):
        made.append(SerialGuesser("m", text, 0.0, 0.02, clock))
        return made

    def change(step, engine):
        if step == 300:
            made[0].right = 0.95

    done = simulate(
        monkeypatch, curve("flat"), drafters, serial_price=0.02, tokens=3000, change=change
    )
    late = done.steps[-100:]
    assert sum(s.asked is not None for s in late) > 50


def test_longer_drafts_where_verifying_is_cheap(monkeypatch):
    def drafters(text, clock):
        return [Guesser("g", text, 0.8)]

    flat = simulate(monkeypatch, curve("flat"), drafters)
    steep = simulate(monkeypatch, curve("steep"), drafters)

    def mean(done):
        return sum(s.verified for s in done.steps) / len(done.steps)

    assert mean(flat) > 2 * mean(steep)
    assert flat.speedup > 1.9
    assert steep.speedup >= 0.99


def test_plain_steps_are_retimed_while_speculation_pays(monkeypatch):
    done = simulate(
        monkeypatch, curve("flat"), lambda t, c: [Guesser("g", t, 0.9)], tokens=400, requests=6
    )
    gaps = [
        len(list(group))
        for plain, group in itertools.groupby(done.steps, lambda s: s.plan.width == 1)
        if not plain
    ]
    assert len(done.steps) > RETIME
    assert max(gaps) <= RETIME


def test_the_curve_follows_a_machine_that_became_slower(monkeypatch):
    price = curve("flat")
    slow = [1.0]

    def change(step, engine):
        slow[0] = 2.0 if step >= 60 else 1.0

    done = simulate(
        monkeypatch,
        lambda w: slow[0] * price(w),
        lambda t, c: [Guesser("g", t, 0.5)],
        tokens=400,
        change=change,
    )
    assert done.policy.costs.target.seconds(1, 100) == pytest.approx(2 * price(1), rel=0.1)


@pytest.mark.parametrize("right", [0.0, 0.3])
@pytest.mark.parametrize("lie", ["T(1) twice too high", "wide forwards three times too cheap"])
@pytest.mark.parametrize("regime", ["flat", "steep"])
def test_a_curve_that_lies_is_found_out(monkeypatch, regime, lie, right):
    price = curve(regime)

    def told(w):
        if lie.startswith("T(1)"):
            return 2 * price(1) if w == 1 else price(w)
        return price(w) if w == 1 else price(w) / 3

    done = simulate(
        monkeypatch, price, lambda t, c: [Guesser("g", t, right)], tokens=1500, told=told
    )
    assert done.speedup >= 0.98


@pytest.mark.parametrize("regime", ["flat", "steep"])
def test_a_curve_that_prices_every_draft_out_is_found_out(monkeypatch, regime):
    price = curve(regime)
    done = simulate(
        monkeypatch,
        price,
        lambda t, c: [Guesser("g", t, 0.95)],
        tokens=2000,
        told=lambda w: price(w) if w == 1 else 20 * price(w),
    )
    true = simulate(monkeypatch, price, lambda t, c: [Guesser("g", t, 0.95)], tokens=2000)
    assert done.speedup > 1 + 0.6 * (true.speedup - 1)


def test_after_many_plain_steps_a_draft_without_tokens_is_passed_over():
    auto = Auto(Costs(CostCurve([(Shape(1, 0), 0.1), (Shape(2, 0), 9.0)]), {}, ("a", "b")))
    auto.open(0)
    auto.retiming(1)._since_wide = WIDEN
    none, some = chain(0, "a", [], []), chain(0, "b", [5, 6], [Features(match=1)] * 2)
    for made, expected in (([none], None), ([none, some], (5,))):
        state = State(0, 5, 9, tuple(made))
        auto.choose([state])
        (plan,) = auto.select([(state, made)])
        assert (plan.draft and plan.draft.tokens) == expected
