"""Drafters that mean harm: at every cost curve the whole run stays within 2 % of plain decoding,
and every longer request within 5 %."""

from __future__ import annotations

import numpy as np
import pytest
from tests.policy.simulate import POINTS, Clock, Guesser, SerialGuesser, curve, simulate

from draftwise.core import Ask, Draft, Features, chain
from draftwise.drafters import Go

CURVES = {
    **{name: curve(name) for name in POINTS},
    "free": lambda w: 0.03 + 1e-5 * w,
    "dear": lambda w: 0.03 * w,
    "stairs": lambda w: 0.03 * (1 + (w - 1) // 4),
}


class Trap(Guesser):
    """Looks as sure as can be, and is right only while `phase(at)` says so."""

    def __init__(self, name, text, phase, seed=0):
        super().__init__(name, text, 1.0, seed)
        self.phase = phase

    def propose(self, asks: list[Ask], go: Go) -> list[Draft]:
        n = min(asks[0].depth, 24)
        true = (self.text + [0] * 100)[self.at : self.at + n]
        tokens = [t if self.phase(self.at + j) else t + 1 for j, t in enumerate(true)]
        return [chain(asks[0].seq, self.name, tokens, [Features(match=30)] * n)]


class SureModel(SerialGuesser):
    """A draft model that is always sure and always wrong, after a good start."""

    def propose(self, asks, go):
        self.right = 1.0 if self.at < 40 and not self.asked else 0.0
        (draft,) = super().propose(asks, go)
        return [
            chain(draft.seq, self.name, draft.tokens, [Features(prob=0.999)] * len(draft.tokens))
        ]


PHASES = {
    "never": lambda at: False,
    "good at first": lambda at: at < 30,
    "every other time": lambda at: at // 25 % 2 == 0,
    "one in three": lambda at: at % 3 == 0,
    "two then wrong": lambda at: at % 3 != 2,
}


@pytest.mark.parametrize("phase", sorted(PHASES))
@pytest.mark.parametrize("regime", sorted(CURVES))
def test_traps(monkeypatch, regime, phase):
    def drafters(text: list[int], clock: Clock):
        return [Trap("a", text, PHASES[phase], 1), Trap("b", text, PHASES["never"], 2)]

    done = simulate(monkeypatch, CURVES[regime], drafters, tokens=300, requests=5)
    assert done.speedup >= 0.98
    assert min(done.requests) >= 0.95


@pytest.mark.parametrize("price", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("regime", sorted(CURVES))
def test_a_model_that_is_sure_and_wrong(monkeypatch, regime, price):
    share = price * CURVES[regime](1) / 0.2

    def drafters(text: list[int], clock: Clock):
        return [SureModel("m", text, 0.0, share, clock)]

    done = simulate(
        monkeypatch, CURVES[regime], drafters, tokens=300, requests=5, serial_price=share
    )
    assert done.speedup >= 0.98
    assert min(done.requests) >= 0.95


@pytest.mark.parametrize("regime", sorted(CURVES))
def test_many_drafters_with_random_ways(monkeypatch, regime):
    right = 0.5 * np.random.default_rng(3).random(6)

    def phase(i: int):
        return lambda at: (at * 7919 + i) % 97 < 97 * right[i]

    def drafters(text: list[int], clock: Clock):
        return [Trap(f"d{i}", text, phase(i), i) for i in range(6)]

    done = simulate(monkeypatch, CURVES[regime], drafters, tokens=300, requests=5)
    assert done.speedup >= 0.98
    assert min(done.requests) >= 0.95


@pytest.mark.parametrize("busy", ["now and then", "at first", "in the middle"])
def test_a_busy_machine_is_not_speculations_fault(monkeypatch, busy):
    """Load that makes all forwards three times as slow, the draft model's too, comes and goes; as
    soon as it has gone, all is as before."""
    slow, made = [1.0], []

    def loaded(step: int) -> bool:
        if busy == "now and then":
            return step < 260 and step // 7 % 3 == 1
        return step < 80 if busy == "at first" else 60 <= step < 140

    def drafters(text: list[int], clock: Clock):
        made.append(SerialGuesser("m", text, 0.85, 0.02, clock))
        return [*made, Guesser("g", text, 0.4)]

    def change(step, engine):
        slow[0] = 3.0 if loaded(step) else 1.0
        made[0].price = 0.02 * slow[0]

    flat = CURVES["flat"]
    done = simulate(
        monkeypatch,
        lambda w: slow[0] * flat(w),
        drafters,
        tokens=300,
        requests=8,
        serial_price=0.02,
        change=change,
        told=flat,
    )
    calm = simulate(monkeypatch, flat, _calm, tokens=300, requests=8, serial_price=0.02)
    # Of three requests: the luck of a single one is worth a tenth.
    assert sum(done.requests[-3:]) > 0.9 * sum(calm.requests[-3:])
    assert done.policy.costs.serial["m"].seconds(1, 300) == pytest.approx(0.02, rel=0.3)
    assert done.policy.costs.target.seconds(1, 300) == pytest.approx(flat(1), rel=0.15)


def _calm(text: list[int], clock: Clock):
    return [SerialGuesser("m", text, 0.85, 0.02, clock), Guesser("g", text, 0.4)]
