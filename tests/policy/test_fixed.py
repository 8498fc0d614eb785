"""The baselines, and how a policy is named."""

from __future__ import annotations

import pytest

from draftwise.core import Features, State, UsageError, chain
from draftwise.engines.base import Shape
from draftwise.policy import REGISTRY, Costs, make
from draftwise.policy.cost import CostCurve

CURVE = CostCurve([(Shape(1, 0), 0.1), (Shape(8, 0), 0.2)])


def costs(*drafters, serial=()):
    return Costs(CURVE, {name: CURVE for name in serial}, drafters)


def drafts(name, n=8):
    return [chain(0, name, range(n), [Features(match=1)] * n)]


@pytest.mark.parametrize(
    "spec",
    ["", "nosuch", "plain:1", "auto:2", "fixed", "fixed:", "fixed:0", "fixed:-1", "fixed:x",
     "fixed:3:nosuch"],
)  # fmt: skip
def test_a_bad_name_gets_one_clear_line(spec):
    with pytest.raises(UsageError) as error:
        make(spec, costs("lookup"))
    assert "\n" not in str(error.value)


def test_fixed_needs_a_drafter():
    with pytest.raises(UsageError):
        make("fixed:5", costs())


def test_every_registered_policy_can_be_made_and_run():
    state = State(0, 10, 20, tuple(drafts("lookup")))
    for name in REGISTRY:
        policy = make("fixed:3" if name == "fixed" else name, costs("lookup"))
        policy.open(0)
        policy.choose([state])
        (plan,) = policy.select([(state, state.free)])
        assert plan.width >= 1 + (len(plan.draft.tokens) if plan.draft else 0)
        policy.close(0)


def test_plain_never_verifies_a_draft():
    policy = make("plain", costs("lookup"))
    state = State(0, 10, 20, tuple(drafts("lookup")))
    assert policy.choose([state]) == []
    assert policy.select([(state, state.free)])[0].draft is None


@pytest.mark.parametrize(("wanted", "expected"), [(20, 5), (4, 3), (1, 0)])
def test_fixed_verifies_its_length_within_what_is_wanted(wanted, expected):
    policy = make("fixed:5", costs("lookup"))
    state = State(0, 10, wanted, tuple(drafts("lookup")))
    (plan,) = policy.select([(state, state.free)])
    assert (len(plan.draft.tokens) if plan.draft else 0) == expected


def test_fixed_prefers_the_serial_drafter_and_stays_in_its_context():
    policy = make("fixed:5", costs("lookup", "model", serial=("model",)))
    state = State(0, 10, 20, (), {"model": 1}, {"model": 3})
    (ask,) = policy.choose([state])
    assert (ask.drafter, ask.depth) == ("model", 3)
    assert make("fixed:5:lookup", costs("lookup", "model", serial=("model",))).choose([state]) == []
