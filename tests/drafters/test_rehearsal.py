"""Rehearsal: what retrieval drafters would have proposed within the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core import Ask, Features, Request, SamplingParams, chain
from draftwise.drafters import AHEAD, REGISTRY, REHEARSED, Retrieval
from draftwise.drafters.lookup import Lookup
from draftwise.drafters.recycling import Recycling
from draftwise.drafters.suffix import Suffix
from draftwise.policy import Costs
from draftwise.policy.cost import CostCurve
from draftwise.policy.goodput import Auto

RETRIEVAL = {"lookup": Lookup, "suffix": Suffix, "recycling": Recycling}
texts = st.lists(st.integers(1, 4), min_size=1, max_size=120)


def test_every_registered_retrieval_drafter_is_tried_here():
    assert RETRIEVAL.keys() == {n for n, make in REGISTRY.items() if issubclass(make, Retrieval)}


def request(prompt):
    return Request(0, tuple(prompt), SamplingParams(), 0)


def proposed(drafter, depth=6):
    return drafter.propose([Ask(0, drafter.name, depth, siblings=2)], lambda seq, f: True)


@pytest.mark.parametrize("name", sorted(RETRIEVAL))
@settings(max_examples=60, deadline=None)
@given(prompt=texts)
def test_a_rehearsed_sequence_goes_on_like_one_that_was_opened(name, prompt):
    opened, rehearsed = RETRIEVAL[name](), RETRIEVAL[name]()
    opened.open(0, request(prompt))
    rehearsed.rehearse(0, request(prompt))
    for token in (1, 2, 1, 3):
        assert proposed(opened) == proposed(rehearsed)
        opened.observe(0, [token])
        rehearsed.observe(0, [token])


@pytest.mark.parametrize("name", sorted(RETRIEVAL))
@settings(max_examples=60, deadline=None)
@given(prompt=texts)
def test_a_rehearsal_is_what_the_beginning_of_the_prompt_would_have_had_proposed(name, prompt):
    drafts = RETRIEVAL[name]().rehearse(0, request(prompt))
    assert len(drafts) <= REHEARSED
    for draft, came in drafts:
        assert len(came) == AHEAD
        places = [i for i in range(len(prompt)) if tuple(prompt[i : i + AHEAD]) == came]
        again = []
        for place in places:
            drafter = RETRIEVAL[name]()
            drafter.open(0, request(prompt[:place]))
            again += drafter.propose([Ask(0, name, AHEAD)], lambda seq, f: True)
        assert draft in again


def test_a_rehearsal_counts_for_its_own_request_alone():
    auto = Auto(Costs(CostCurve(), {}, ("lookup",)))
    features = Features(match=3)

    def draft(seq):
        return chain(seq, "lookup", (7,), (features,))

    for seq in (0, 1):
        auto.open(seq)
    before = [auto.acceptance.survival(draft(seq))[0] for seq in (0, 1)]
    auto.warm(0, [(draft(0), (9, 8))] * 30)
    after = [auto.acceptance.survival(draft(seq))[0] for seq in (0, 1)]
    assert after[0] < before[0] - 0.3
    assert after[1] == before[1]
    auto.warm(1, [(draft(1), (7, 8))] * 30)
    auto.acceptance._mood[1, "lookup"] = 20  # where it was right so often, it counts as such
    assert auto.acceptance.survival(draft(1))[0] > before[1] + 0.2
