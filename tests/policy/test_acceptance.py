"""Acceptance estimates: calibration, censoring, forgetting, and what carries over to requests."""

from __future__ import annotations

import numpy as np
import pytest

from draftwise.core import POINT, Draft, Features, chain
from draftwise.policy.acceptance import Acceptance, prior


def draft(tokens, feature=None, seq=0):
    features = [feature or Features(match=3)] * len(tokens)
    return chain(seq, "d", tokens, features)


def teach(acceptance, right, steps, feature=None, seq=0, rng=None):
    rng = rng or np.random.default_rng(1)
    for _ in range(steps):
        hit = rng.random() < right
        acceptance.learn(draft([1], feature, seq), [1 if hit else 2])


@pytest.mark.parametrize("right", [0.1, 0.5, 0.9])
def test_the_estimate_comes_to_what_is_observed(right):
    acceptance = Acceptance()
    rng = np.random.default_rng(0)
    feature = Features(prob=0.6)
    estimates = []
    for i in range(600):
        hit = rng.random() < right
        if i > 100:
            estimates.append(acceptance.chance(0, "d", feature))
        acceptance.learn(draft([1], feature), [1 if hit else 2])
    assert np.mean(estimates) == pytest.approx(right, abs=0.06)


def test_bins_are_told_apart():
    acceptance = Acceptance()
    for _ in range(60):
        acceptance.learn(draft([1], Features(match=1)), [2])
        acceptance.learn(draft([1], Features(match=20)), [1])
    assert acceptance.chance(0, "d", Features(match=1)) < 0.2
    assert acceptance.chance(0, "d", Features(match=20)) > 0.8


def test_survival_is_the_product_along_the_path_also_in_a_tree():
    acceptance = Acceptance()
    f = Features(match=5)
    tree = Draft(0, "d", (1, 2, 3, 4), (-1, -1, 0, 2), (f,) * 4, (POINT,) * 4)
    c = acceptance.chance(0, "d", f)
    assert acceptance.survival(tree) == pytest.approx([c, c, c * c, c**3])


def test_nodes_after_the_first_rejection_teach_nothing():
    acceptance, other = Acceptance(), Acceptance()
    first, later = Features(match=2), Features(match=9)
    long = chain(0, "d", [1, 5, 6], [first, later, later])
    short = chain(0, "d", [1], [first])
    acceptance.learn(long, [9, 9, 9])
    other.learn(short, [9])
    for f in (first, later):
        assert acceptance.chance(0, "d", f) == other.chance(0, "d", f)


def test_nodes_beyond_the_committed_text_teach_nothing():
    acceptance = Acceptance()
    before = acceptance.chance(0, "d", Features(match=9))
    acceptance.learn(chain(0, "d", [1, 5], [Features(match=2), Features(match=9)]), [1])
    # Only the mood has changed: the bin itself is untouched.
    assert acceptance.chance(1, "d", Features(match=9)) == before


def test_a_new_request_starts_from_what_others_taught_and_then_finds_its_own():
    acceptance = Acceptance()
    teach(acceptance, 0.9, 200, seq=0)
    start = acceptance.chance(1, "d", Features(match=3))
    assert start > 0.75
    teach(acceptance, 0.0, 15, seq=1)
    assert acceptance.chance(1, "d", Features(match=3)) < 0.45
    acceptance.close(1)
    assert acceptance.chance(2, "d", Features(match=3)) > 0.45


def test_closing_forgets_the_request():
    acceptance = Acceptance()
    teach(acceptance, 0.5, 10, seq=3)
    acceptance.close(3)
    assert not any(k[0] == 3 for t in (acceptance._request, acceptance._ahead) for k in t)
    assert not any(k[0] == 3 for k in acceptance._mood)


def test_what_lies_ahead_is_judged_by_the_node_before_it():
    acceptance = Acceptance()
    sure, unsure = Features(prob=0.99), Features(prob=0.3)
    for _ in range(80):
        acceptance.learn(chain(0, "d", [1, 2], [sure, sure]), [1, 2])
        acceptance.learn(chain(0, "d", [1, 2], [unsure, unsure]), [1, 9])
    assert acceptance.ahead(0, "d", sure) > acceptance.ahead(0, "d", unsure) + 0.3


def test_priors_rise_with_the_evidence_and_stay_chances():
    for rising in (
        [prior(Features(match=m)) for m in range(33)],
        [prior(Features(prob=p / 10)) for p in range(11)],
        [prior(Features(margin=float(m))) for m in range(31)],
    ):
        assert rising == sorted(rising)
        assert all(0 < p < 1 for p in rising)
