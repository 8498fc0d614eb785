"""The statistics, on numbers whose answers are known."""

from __future__ import annotations

import math

import pytest

from draftwise.bench.journal import Measurement
from draftwise.bench.summary import base_of, by_method, comparisons, methods, ratio


def measured(
    question: int, method: str, tokens: int, seconds: float, category: str = "a", **more: object
) -> Measurement:
    own: dict[str, object] = {
        "token_ids": tuple(range(tokens)),
        "decode_seconds": seconds,
        "ttft": 0.5,
        "wall_seconds": seconds + 0.5,
        "steps": None,
        "accepted": None,
        "verified": None,
        "by_drafter": {},
    }
    return Measurement(question, category, method, **own | more)  # type: ignore[arg-type]


def test_a_ratio_is_one_of_sums_not_a_mean_of_ratios() -> None:
    # 10x on a prompt of 10 tokens, 1x on one of 1000: the mean of ratios would say 5.5.
    value, _ = ratio([(10, 1), (1000, 100)], [(10, 10), (1000, 100)])
    assert value == pytest.approx((1010 / 101) / (1010 / 110))


def test_an_interval_is_paired_by_prompt() -> None:
    # Prompts differ a hundredfold in speed, the methods by exactly 2 on each of them.
    theirs = [(100.0, seconds) for seconds in (1.0, 3.0, 10.0, 30.0, 100.0)]
    ours = [(tokens, seconds / 2) for tokens, seconds in theirs]
    value, interval = ratio(ours, theirs)
    assert value == pytest.approx(2)
    assert interval == pytest.approx([2, 2])


def test_an_interval_has_the_width_that_theory_gives() -> None:
    # Equal tokens and seconds of 1 against 1 ± 0.2: a mean of n, deviation 0.2 / √n.
    n = 400
    ours = [(1.0, 1.0)] * n
    theirs = [(1.0, 1.2 if i % 2 else 0.8) for i in range(n)]
    value, interval = ratio(ours, theirs)
    assert value == pytest.approx(1) and interval is not None
    assert interval[1] - interval[0] == pytest.approx(2 * 1.96 * 0.2 / math.sqrt(n), rel=0.1)
    assert ratio(ours, theirs) == (value, interval)  # seeded


def test_too_little_to_compare_gives_nothing() -> None:
    assert ratio([(10, 1)], [(10, 2)]) == (pytest.approx(2), None)
    assert ratio([(0, 0), (0, 0)], [(10, 2), (10, 2)]) == (None, None)
    assert ratio([(10, 1), (10, 1)], [(0, 0), (0, 0)]) == (None, None)
    # One of the prompts ended with its first token.
    value, interval = ratio([(0, 0), (10, 1)], [(0, 0), (10, 2)])
    assert value == pytest.approx(2) and interval == pytest.approx([2, 2])


def test_figures_by_category_and_overall() -> None:
    table = by_method(
        [
            measured(1, "plain", 11, 10.0, steps=10, accepted=0, verified=0),
            measured(1, "auto", 11, 5.0, steps=4, accepted=6, verified=12),
            measured(2, "plain", 21, 20.0, "b", steps=20, accepted=0, verified=0),
            measured(2, "auto", 20, 20.0, "b", steps=19, accepted=0, verified=4),
            measured(1, "hf-plain", 11, 10.0),
            measured(2, "hf-plain", 21, 20.0, "b"),
        ]
    )
    made = methods(table)
    auto = made["auto"]["overall"]
    assert auto["tokens_per_second"] == pytest.approx(29 / 25)
    assert auto["speedup_vs_plain"] == pytest.approx(29 / 25)
    assert auto["tokens_per_step"] == pytest.approx(29 / 23)
    assert auto["acceptance"] == pytest.approx(6 / 16)
    assert auto["identical_to_plain"] == 0.5
    assert (auto["prompts"], auto["tokens"], auto["time_to_first_token"]) == (2, 31, 0.5)
    assert made["auto"]["by_category"]["a"]["speedup_vs_plain"] == pytest.approx(2)
    assert made["plain"]["overall"]["acceptance"] is None
    assert made["hf-plain"]["overall"]["tokens_per_step"] is None
    compared = comparisons(table)
    assert set(compared) == {"auto/plain", "auto/hf-plain"}
    assert compared["auto/hf-plain"]["by_category"]["b"]["ratio"] == pytest.approx(19 / 20)


def test_the_base_is_plain_else_that_of_transformers_else_none() -> None:
    assert base_of(["auto", "hf-plain", "plain"]) == "plain"
    assert base_of(["auto", "hf-plain"]) == "hf-plain"
    assert base_of(["auto"]) is None
    own = methods(by_method([measured(1, "auto", 5, 1.0)]))["auto"]["overall"]
    assert own["speedup_vs_plain"] is None and own["identical_to_plain"] is None
    assert comparisons(by_method([measured(1, "plain", 5, 1.0)])) == {}
