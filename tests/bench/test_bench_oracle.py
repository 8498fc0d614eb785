"""The hindsight optimum and its relatives against brute force, on small traces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.bench.costs import World
from draftwise.bench.oracle import LENGTHS, bounds
from draftwise.bench.replay import replay
from draftwise.bench.traces import Guess, Traced
from draftwise.core import Features

WIDTHS = (1, 2, 4, 8, 16, 32, 64)


def guess(hits: int, n: int) -> Guess:
    codes = (0,) * min(hits, n) + (1,) * (hits < n) + (-1,) * max(n - hits - 1, 0)
    return Guess(codes, tuple(range(-1, n - 1)), tuple(Features(match=3 + j) for j in range(n)))


@st.composite
def traces(draw, model: bool = True) -> Traced:
    tokens = draw(st.integers(2, 8))
    guesses = {}
    for at in range(1, tokens):
        guesses[at] = {
            name: guess(draw(st.integers(0, min(n, tokens - at))), n)
            for name in ("a", "b")
            if (n := draw(st.integers(0, 5)))
        }
    shadow = {}
    if model:
        codes = draw(st.lists(st.integers(0, 1), min_size=tokens - 1, max_size=tokens - 1))
        shadow = {"m": tuple(((code, Features(prob=0.8)),) for code in codes)}
    drafters = {"a": "retrieval", "b": "retrieval"} | ({"m": "serial"} if model else {})
    return Traced(
        "x", "plain", "coupled", 5, 64, tokens, "length", drafters, {}, (), guesses, shadow
    )


@st.composite
def worlds(draw, model: bool = True) -> World:
    target = [(w, 0, draw(st.floats(0.1, 2.0))) for w in WIDTHS]
    one = draw(st.floats(0.01, 1.0))
    draft = [(w, 0, one) for w in WIDTHS]
    return World("made", target, {"m": draft} if model else {}, draw(st.floats(0.0, 0.1)))


def accepted(traced: Traced, name: str, at: int) -> int:
    if name in traced.shadow:
        codes = [choices[0][0] for choices in traced.shadow[name][at - 1 :]]
        return next((j for j, code in enumerate(codes) if code), len(codes))
    found = traced.guesses[at].get(name)
    return found.hits if found else 0


def brute_force(traced: Traced, world: World, at: int = 1) -> float:
    """The least seconds from index `at` on, over all sequences of choices."""
    if at >= traced.tokens:
        return 0.0
    curve, context = world.curve(), traced.prompt + at - 1
    row = curve.row(65, 16 * (context // 16) + 8)
    options = [row[1] + brute_force(traced, world, at + 1)]
    for name in ("a", "b", *traced.shadow):
        most = min(accepted(traced, name, at), traced.tokens - at - 1)
        for k in range(1, most + 1):
            seconds = row[1 + k] + world.rest
            if name in traced.shadow:
                seconds += k * world.drafting()[name].seconds(1, context)
            options.append(seconds + brute_force(traced, world, at + k + 1))
    return min(options)


@settings(max_examples=60, deadline=None)
@given(traced=traces(), world=worlds())
def test_the_hindsight_optimum_is_that_of_brute_force(traced, world):
    assert bounds(traced, world).hindsight == pytest.approx(brute_force(traced, world))


@settings(max_examples=60, deadline=None)
@given(traced=traces(), world=worlds())
def test_nothing_beats_hindsight_and_greed_beats_plain(traced, world):
    found = bounds(traced, world)
    eps = 1e-9
    assert found.hindsight <= found.clairvoyant + eps
    assert found.hindsight <= min(found.fixed.values()) + eps
    assert found.hindsight <= found.plain + eps
    assert set(found.fixed) == {(d, k) for d in ("a", "b", "m") for k in LENGTHS}


@settings(max_examples=60, deadline=None)
@given(traced=traces(model=False), world=worlds(model=False), k=st.sampled_from([1, 2, 4]))
def test_a_fixed_choice_takes_what_its_replay_takes(traced, world, k):
    world = World(world.name, world.target, {}, 0.0)
    (done,), _ = replay([traced], f"fixed:{k}:b", world)
    # The replayed drafter may be asked for no more than is wanted, of which 64 is enough here.
    assert done.seconds == pytest.approx(_unpadded(traced, world, k))


def _unpadded(traced: Traced, world: World, k: int) -> float:
    """`fixed` without padding to cheaper widths, which a fixed policy does not do."""
    curve, at, total = world.curve(), 1, 0.0
    while at < traced.tokens:
        found = traced.guesses[at].get("b")
        n = min(k, len(found.main) if found else 0)
        total += curve.seconds(1 + n, traced.prompt + at - 1)
        at += min(accepted(traced, "b", at), n, traced.tokens - at - 1) + 1
    return total


def test_a_padded_forward_is_as_cheap_as_the_wider_one():
    world = World("stairs", [(1, 0, 1.0), (2, 0, 3.0), (4, 0, 2.0), (64, 0, 9.0)], {})
    traced = Traced(
        "x", "plain", "coupled", 5, 9, 3, "length", {"a": "retrieval"}, {}, (),
        {1: {"a": guess(1, 1)}, 2: {}},
    )  # fmt: skip
    found = bounds(traced, world)
    assert found.plain == pytest.approx(2.0)
    assert found.fixed["a", 1] == pytest.approx(2.0)  # one forward of width 2, run as 4
