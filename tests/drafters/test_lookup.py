"""Prompt lookup copies from the longest, latest place where the last words stood before."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from conftest import random_ids
from draftwise.core import Ask, Draft, Request, SamplingParams
from draftwise.drafters.lookup import LONGEST, PLACES, Lookup

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def drafted(text: Sequence[int], depth: int = 4, prompt: int = 1) -> Draft | None:
    lookup = Lookup()
    lookup.open(0, Request(0, tuple(text[:prompt]), SamplingParams(), 0))
    lookup.observe(0, text[prompt:])
    drafts = lookup.propose([Ask(0, "lookup", depth)], lambda seq, features: True)
    return drafts[0] if drafts else None


def matched(text: Sequence[int], place: int) -> int:
    """Tokens before `place` that agree with the end of the text."""
    n = 0
    while n < min(place, LONGEST) and text[place - 1 - n] == text[len(text) - 1 - n]:
        n += 1
    return n


@given(texts, st.integers(1, 12))
def test_the_draft_continues_a_match_of_the_length_it_reports(text: list[int], depth: int) -> None:
    draft = drafted(text, depth)
    if draft is None:
        assert text[-1] not in text[:-1]
        return
    assert len(draft.tokens) == depth
    run = list(draft.tokens)
    places = [p for p in range(1, len(text)) if (text[p:] + run)[:depth] == run]
    assert draft.features[0].match in [matched(text, p) for p in places]


@given(texts)
def test_no_longer_match_stands_among_the_latest_places(text: list[int]) -> None:
    draft = drafted(text)
    ends = [p for p in range(1, len(text)) if text[p - 1] == text[-1]]
    best = max((matched(text, p) for p in ends[-PLACES:]), default=0)
    assert (draft.features[0].match if draft else 0) >= best


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    draft = drafted([1, 2, 3, 10, 9, 3, 20, 1, 2, 3], 1)
    assert draft is not None
    assert draft.tokens == (10,)
    assert draft.features[0].match == 3


def test_of_equal_matches_the_latest_wins() -> None:
    draft = drafted([3, 10, 0, 3, 20, 1, 3], 1)
    assert draft is not None and draft.tokens == (20,)


def test_a_loop_is_drafted_to_full_depth() -> None:
    draft = drafted([9, 1, 2, 3, 1, 2, 3], 10)
    assert draft is not None
    assert draft.tokens == (1, 2, 3, 1, 2, 3, 1, 2, 3, 1)


def test_the_match_grows_along_the_draft_up_to_its_cap() -> None:
    text = random_ids(60, seed=1) * 2
    draft = drafted(text[:90], 20)
    assert draft is not None
    assert list(draft.tokens) == text[90:110]
    assert [f.match for f in draft.features] == [min(30 + j, LONGEST) for j in range(20)]


def test_a_text_of_two_equal_tokens_is_a_match_of_one() -> None:
    draft = drafted([4, 4], 3)
    assert draft is not None
    assert draft.tokens == (4, 4, 4)
    assert draft.features[0].match == 1


def test_nothing_is_proposed_where_nothing_repeats() -> None:
    assert drafted(list(range(50))) is None


@given(texts, st.integers(1, 40))
def test_it_does_not_matter_what_was_prompt_and_what_was_generated(
    text: list[int], prompt: int
) -> None:
    assert drafted(text, prompt=min(prompt, len(text))) == drafted(text)


def test_few_places_are_remembered_for_each_run_of_tokens() -> None:
    lookup = Lookup()
    lookup.open(0, Request(0, (1, 2) * 500, SamplingParams(), 0))
    assert max(len(found) for found in lookup._texts[0].places.values()) <= PLACES + 1
