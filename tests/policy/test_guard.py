"""The never-slower meter."""

from __future__ import annotations

from draftwise.policy.guard import GRACE_STEPS, Guard


def test_a_new_meter_allows_a_little_and_no_more():
    guard = Guard()
    assert guard.allows(1.0, plain_step=1.0)
    assert not guard.allows(GRACE_STEPS + 0.1, plain_step=1.0)


def test_losses_close_it_and_plain_steps_alone_open_it_again_slowly():
    guard = Guard(epsilon=0.02)
    while guard.allows(0.5, 1.0):
        guard.learn(1.5, plain=1.0)
    closed = guard.spent - guard.plain
    assert closed <= GRACE_STEPS + 0.02 * guard.plain
    for _ in range(20):
        guard.learn(1.0, plain=1.0)
    assert not guard.allows(0.5, 1.0)
    for _ in range(400):
        guard.learn(1.0, plain=1.0)
    assert guard.allows(0.5, 1.0)


def test_what_good_steps_earn_may_be_spent():
    guard = Guard()
    for _ in range(50):
        guard.learn(1.2, plain=3.0)
    for _ in range(50):
        assert guard.allows(1.0, 1.0)
        guard.learn(2.0, plain=1.0)


def test_the_loss_of_any_run_is_bounded_whatever_is_tried():
    guard = Guard(epsilon=0.02)
    for _ in range(2000):
        if guard.allows(2.0, 1.0):
            guard.learn(3.0, plain=1.0)
        else:
            guard.learn(1.0, plain=1.0)
    assert guard.spent <= 1.02 * guard.plain


def test_no_request_is_made_to_pay_for_what_others_earned():
    guard = Guard(0.02)
    guard.learn(100.0, 300.0)  # the run has earned much
    assert guard.allows(50.0, 1.0)
    lost = 0
    while guard.allows_request(7, 1.0, 1.0):
        guard.learn_request(7, 2.0, 1.0)
        lost += 1
    assert 4 <= lost <= 8
    assert guard.allows_request(8, 1.0, 1.0)
    for _ in range(100):
        guard.learn_request(7, 1.0, 1.0)
    assert guard.allows_request(7, 1.0, 1.0)
    guard.close(7)
    assert guard.allows_request(7, 5.0, 1.0)
