"""What the user may ask of `auto`: the objective, and how much slower than plain it may be."""

from __future__ import annotations

import numpy as np
import pytest
from tests.policy.simulate import Clock, Guesser, SerialGuesser, TextEngine, curve, simulate

import draftwise
import draftwise.decode as loop
from conftest import plain_ids
from draftwise import Model
from draftwise.core import Request, SamplingParams, UsageError
from draftwise.engines.base import WIDTHS, Shape
from draftwise.policy import Costs, Goal, make
from draftwise.policy.cost import CostCurve
from draftwise.policy.goodput import Auto
from draftwise.stopping import Stopper
from draftwise.turns import Turn


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"objective": "speed"}, "choose among latency, throughput"),
        ({"objective": None}, "objective"),
        ({"max_slowdown": -0.01}, "between 0 and 1, not -0.01"),
        ({"max_slowdown": 1.5}, "max_slowdown"),
        ({"max_slowdown": float("nan")}, "max_slowdown"),
        ({"max_slowdown": "2%"}, "max_slowdown"),
        ({"max_slowdown": True}, "max_slowdown"),
    ],
)
def test_a_goal_that_cannot_be_is_refused_in_one_line(options, says):
    with pytest.raises(UsageError, match=says) as caught:
        Goal(**options)
    assert "\n" not in str(caught.value)


def test_the_meter_gets_the_slowdown_that_is_allowed():
    costs = Costs(CostCurve(), {}, ())
    assert make("auto", costs).guard.epsilon == 0.02
    for share in (0, 0.3, 1):
        assert make("auto", costs, Goal(max_slowdown=share)).guard.epsilon == share


def test_a_larger_slowdown_buys_more_tries(monkeypatch):
    """A drafter that only seems good: the meter decides how often it is tried."""

    def asked(share):
        def drafters(text, clock):
            return [SerialGuesser("m", text, 0.0, 0.02, clock)]

        def fresh(spec, costs):
            auto = make(spec, costs, Goal(max_slowdown=share))
            auto.asking.yields.expected = lambda seq, name: (3.0, 3.0, 3.0)
            return auto

        monkeypatch.setattr("tests.policy.simulate.make", fresh)
        done = simulate(monkeypatch, curve("flat"), drafters, tokens=1500, serial_price=0.02)
        return sum(s.asked is not None for s in done.steps), done.speedup

    (few, fast), (many, slow) = asked(0.02), asked(0.5)
    assert many > 3 * few
    assert fast >= 0.98 > slow >= 1 / 1.5


def together(monkeypatch, objective, rights, regime, rounds=400, dice=0):
    """Tokens per second of requests that take turns, all of them still running at the end, and
    their prices then."""
    clock, price = Clock(), curve(regime)
    text = [int(t) for t in np.random.default_rng(5).integers(10, 99, 40 * rounds)]
    engine = TextEngine(text, price, clock)
    target = CostCurve([(Shape(w, 4), price(w)) for w in WIDTHS])
    policy = make("auto", Costs(target, {}, ("g",)), Goal(objective))
    runs = []
    for seq, right in enumerate(rights):
        drafters = {"g": Guesser("g", text, right, seq + 10 * dice)}
        parts = loop.Parts(engine, drafters, policy, Turn(), clock.perf_counter)
        request = Request(seq, tuple(text[:4]), SamplingParams(), 0, limit=len(text))
        runs.append(loop.decode(parts, request, Stopper(None, text[:4], len(text))))
    for run in runs:
        next(run)
    start, tokens = clock.now, [0] * len(runs)
    for _ in range(rounds):
        for seq, run in enumerate(runs):
            result = next(run)
            assert result.finish is None
            tokens[seq] += len(result.committed)
    return sum(tokens) / (clock.now - start), [policy.price(seq, 100) for seq in range(len(runs))]


@pytest.mark.parametrize("regime", ["flat", "steep"])
@pytest.mark.parametrize("rights", [(0.95, 0.3), (0.9, 0.5), (0.8, 0.6)])
def test_throughput_is_no_lower_when_it_is_the_objective(monkeypatch, regime, rights):
    """In the mean of some draws: in one of them, luck in the drafts is worth a percent or two."""
    ratios = []
    for dice in range(4):
        latency, _ = together(monkeypatch, "latency", rights, regime, 250, dice)
        throughput, _ = together(monkeypatch, "throughput", rights, regime, 250, dice)
        ratios.append(throughput / latency)
    assert sum(ratios) / len(ratios) > 1.0


def test_there_is_one_price_for_throughput_and_one_for_each_request_otherwise(monkeypatch):
    for objective in ("latency", "throughput"):
        _, (easy, hard) = together(monkeypatch, objective, (0.95, 0.2), "flat", rounds=60)
        if objective == "latency":
            assert easy > 1.5 * hard
        else:
            assert easy == hard


def test_a_request_alone_has_the_same_price_under_both(monkeypatch):
    speeds = [together(monkeypatch, o, (0.7,), "flat")[0] for o in ("latency", "throughput")]
    assert speeds[0] == speeds[1]


def test_the_common_price_ends_with_the_last_request():
    auto = Auto(Costs(CostCurve(), {}, ()), Goal("throughput"))
    auto.open(0)
    fresh = auto.price(0, 10)
    auto._pool.add(100, 0.1, 50.0)
    assert auto.price(0, 10) > fresh
    auto.open(1)
    auto.close(0)
    assert auto.price(1, 10) > fresh
    auto.close(1)
    auto.open(2)
    assert auto.price(2, 10) == fresh


def test_load_and_model_hand_the_goal_on(llama):
    model = Model(llama, None, ["lookup"], objective="throughput", max_slowdown=0.1)
    auto = model._policy("auto")
    assert auto.goal == Goal("throughput", 0.1) and auto.guard.epsilon == 0.1
    assert list(model.generate([5, 6, 7] * 4, max_new_tokens=20).token_ids) == plain_ids(
        llama, [5, 6, 7] * 4, 20
    )
    for options in ({"objective": "speed"}, {"max_slowdown": 2}):
        with pytest.raises(UsageError, match=next(iter(options))):
            Model(llama, None, **options)
        with pytest.raises(UsageError, match=next(iter(options))):
            draftwise.load("no/such-model", **options)
