"""Lengths, reliability and retiming: small estimators, each with its own few lines."""

from __future__ import annotations

import pytest

from draftwise.policy.lengths import Lengths
from draftwise.policy.reliability import WEIGHT, Reliability
from draftwise.policy.retiming import RETIME, WIDEN, Retiming


def ended(lengths: Lengths, prompt: int, tokens: int, seq: int = 0) -> None:
    lengths.open(seq)
    lengths.add(seq, prompt, tokens - 1)
    lengths.close(seq)


def test_a_text_is_expected_to_go_on_as_long_as_those_before_it():
    lengths = Lengths()
    lengths.open(1)
    assert lengths.left(1, 100, 60) == pytest.approx(30)
    for _ in range(20):
        ended(lengths, 100, 21)
    lengths.open(2)
    assert 19 < lengths.left(2, 100, 60) < 22
    lengths.add(2, 100, 30)  # longer than any before: nothing is known of it
    assert lengths.left(2, 100, 60) == pytest.approx(30)


def test_prompts_of_like_length_count_for_more():
    lengths = Lengths()
    for _ in range(10):
        ended(lengths, 1000, 10)
        ended(lengths, 50, 200)
    lengths.open(1)
    lengths.open(2)
    assert lengths.left(1, 1000, 250) < 0.5 * lengths.left(2, 50, 250)


def test_verified_nodes_that_fare_worse_than_predicted_are_marked_down():
    reliability = Reliability()
    assert reliability.corrected([0.05, 0.5]) == [0.05, 0.5]
    for i in range(400):
        reliability.learn(0.5, i % 4 == 0)
    low, high = reliability.corrected([0.05, 0.5])
    assert low == 0.05
    expected = 0.5 * (100 + WEIGHT) / (200 + WEIGHT)
    assert high == pytest.approx(expected, rel=0.05)


def test_plain_steps_fall_due_ever_more_rarely_and_again_when_the_level_moved():
    retiming = Retiming(1.0)
    gaps, since = [], 0
    for _ in range(4 * RETIME):
        if retiming.plain_due:
            gaps.append(since)
            since = 0
            retiming.learn(1, 1.0)
        else:
            since += 1
            retiming.learn(4, 1.0)
    assert gaps == [2, 4, 8, 16, 32, 64, 128, 256, 256]
    retiming.learn(1, 2.0)
    retiming.learn(4, 2.0)
    retiming.learn(4, 2.0)
    assert retiming.plain_due


def test_a_wide_step_falls_due_after_many_plain_ones():
    retiming = Retiming(1.0)
    for _ in range(WIDEN):
        assert not retiming.wide_due
        retiming.learn(1, 1.0)
    assert retiming.wide_due
    retiming.learn(2, 1.0)
    assert not retiming.wide_due
