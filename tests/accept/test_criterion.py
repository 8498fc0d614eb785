"""`auto`: every rule is tried, the best is kept, and what was best once may be overtaken."""

from __future__ import annotations

from collections import Counter

from draftwise.accept.criterion import EXPLORE, LOSSLESS, TRIALS, Criterion


def served(criterion: Criterion, gains: dict[str, float], requests: int) -> list[str]:
    chosen = []
    for _ in range(requests):
        rule = criterion.choose()
        criterion.learn(rule, gains[rule] * 3.0, 3.0)
        chosen.append(rule)
    return chosen


def test_every_rule_is_tried_then_the_best_is_kept_with_a_fixed_share_of_others() -> None:
    criterion = Criterion()
    gains = {"coupled": 1.5, "rejection": 1.6, "block": 1.8}
    first = served(criterion, gains, TRIALS * len(LOSSLESS))
    assert Counter(first) == dict.fromkeys(LOSSLESS, TRIALS)
    later = Counter(served(criterion, gains, 20 * EXPLORE))
    assert later["block"] >= 20 * (EXPLORE - 1)
    assert later["coupled"] >= 5 and later["rejection"] >= 5


def test_it_follows_a_change() -> None:
    criterion = Criterion()
    served(criterion, {"coupled": 1.9, "rejection": 1.0, "block": 1.0}, 100)
    turned = served(criterion, {"coupled": 1.0, "rejection": 1.0, "block": 1.9}, 400)
    assert Counter(turned[-80:])["block"] >= 60


def test_requests_that_name_their_rule_teach_too_and_others_do_not() -> None:
    criterion = Criterion()
    for _ in range(TRIALS * len(LOSSLESS)):
        criterion.choose()
    for _ in range(5):
        criterion.learn("rejection", 2.0, 1.0)
        criterion.learn("topk", 9.0, 1.0)
        criterion.learn("block", 9.0, 0.0)  # no step was asked for
    assert criterion.choose() == "rejection"


def test_without_evidence_the_default_is_kept() -> None:
    criterion = Criterion()
    chosen = [criterion.choose() for _ in range(40)][TRIALS * len(LOSSLESS) :]
    assert Counter(chosen)["coupled"] >= 0.8 * len(chosen)


def test_a_request_is_judged_by_earlier_ones_only() -> None:
    """What a choice is depends on what was learned before it, whatever comes after."""
    one, two = Criterion(), Criterion()
    for criterion in (one, two):
        served(criterion, {"coupled": 1.0, "rejection": 1.5, "block": 1.2}, 11)
    assert one.choose() == two.choose()
    one.learn("block", 100.0, 1.0)
    assert one.choose() != two.choose()
