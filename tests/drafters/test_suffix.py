"""The suffix drafter against a brute-force counter of substrings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import random_ids
from draftwise.core import Ask, Draft, Request, SamplingParams
from draftwise.drafters.suffix import BREAK, CHAIN, LONGEST, Automaton, Growth, Suffix

texts = st.lists(st.integers(0, 2), min_size=1, max_size=CHAIN - 4)


def automaton(text: Sequence[int]) -> Automaton:
    made = Automaton()
    made.extend(text)
    return made


def occurrences(text: Sequence[int], part: Sequence[int]) -> int:
    n = len(part)
    return sum(list(text[i : i + n]) == list(part) for i in range(len(text) - n + 1))


def longest_earlier_suffix(text: Sequence[int]) -> int:
    return max(n for n in range(len(text)) if not n or occurrences(text, text[-n:]) > 1)


def state_of(made: Automaton, part: Sequence[int]) -> int:
    state = 0
    for token in part:
        state = made.next[state][token]
    return state


@given(texts)
def test_the_link_of_the_whole_text_is_its_longest_earlier_suffix(text: list[int]) -> None:
    made = automaton(text)
    assert made.length[made.link[made.last]] == longest_earlier_suffix(text)


@given(texts)
def test_every_state_counts_the_occurrences_of_its_strings(text: list[int]) -> None:
    """Also states that were split off another later."""
    made = automaton(text)
    parts = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    for part in parts:
        assert made.count[state_of(made, part)] == occurrences(text, part)


@given(texts)
def test_only_substrings_of_the_text_can_be_walked(text: list[int]) -> None:
    made = automaton(text)
    reached, paths = 0, [((), 0)]
    while paths:
        path, state = paths.pop()
        reached += 1
        assert not path or occurrences(text, path)
        if len(path) < 4:
            paths += [((*path, token), after) for token, after in made.next[state].items()]
    short = {tuple(text[i : i + n]) for n in range(5) for i in range(len(text) - n + 1)}
    assert reached == len(short)


@given(texts, texts)
def test_stepping_follows_the_longest_match_in_another_text(
    stored: list[int], text: list[int]
) -> None:
    made = automaton(stored)
    state = matched = 0
    for end, token in enumerate(text, 1):
        state, matched = made.step(state, matched, token)
        longest = max(
            n for n in range(end + 1) if not n or occurrences(stored, text[end - n : end])
        )
        assert matched == longest
        assert state == state_of(made, text[end - matched : end])


@given(texts, st.integers(1, 6))
def test_each_node_is_the_most_frequent_continuation_and_reports_its_share(
    text: list[int], depth: int
) -> None:
    made = automaton(text)
    link = made.link[made.last]
    if link <= 0:
        return
    known = text[len(text) - made.length[link] :]
    growth = Growth()
    made.follow(growth, -1, link, made.length[link], depth)
    tokens, features = growth.tokens, growth.features
    assert 1 <= len(tokens) <= depth
    for token, feature in zip(tokens, features, strict=True):
        while not any(occurrences(text, [*known, t]) for t in set(text)):
            known = known[1:]  # the text ends here: a shorter suffix goes on
        rivals = Counter({t: occurrences(text, [*known, t]) for t in set(text)})
        assert rivals[token] == max(rivals.values())
        assert feature.share == pytest.approx(rivals[token] / rivals.total())
        assert feature.match >= 1
        known = [*known, token]


def start(suffix: Suffix, text: Sequence[int], seq: int = 0, prompt: int = 1) -> None:
    suffix.open(seq, Request(seq, tuple(text[:prompt]), SamplingParams(), 0))
    if text[prompt:]:
        suffix.observe(seq, text[prompt:])


def drafted(suffix: Suffix, depth: int = 8, seq: int = 0) -> Draft | None:
    drafts = suffix.propose([Ask(seq, "suffix", depth)], lambda of, features: True)
    return drafts[0] if drafts else None


def finish(suffix: Suffix, text: Sequence[int], seq: int = 99) -> None:
    start(suffix, text, seq)
    suffix.close(seq)


def test_the_request_itself_is_continued_without_any_store() -> None:
    suffix = Suffix()
    start(suffix, [1, 2, 3, 4, 5, 9, 2, 3])
    draft = drafted(suffix, 3)
    assert draft is not None
    assert draft.tokens == (4, 5, 9)
    assert [f.match for f in draft.features] == [2, 3, 4]


def test_earlier_requests_are_continued() -> None:
    suffix, story = Suffix(), random_ids(50, seed=1)
    finish(suffix, story)
    start(suffix, story[10:20])
    draft = drafted(suffix, 6)
    assert draft is not None
    assert list(draft.tokens) == story[20:26]
    assert draft.features[0].match == 10


def test_the_store_is_followed_where_it_matches_more_than_twice_as_much() -> None:
    suffix = Suffix()
    finish(suffix, [9, 8, 1, 2, 3, 50, 51])
    start(suffix, [2, 3, 60, 61, 0, 9, 8, 1, 2, 3])
    stored = drafted(suffix, 1)
    start(suffix, [1, 2, 3, 60, 61, 0, 9, 8, 1, 2, 3], seq=1)
    own = drafted(suffix, 1, seq=1)
    assert stored is not None and stored.tokens == (50,) and stored.features[0].other
    assert own is not None and own.tokens == (60,) and not own.features[0].other


@given(st.lists(texts, min_size=1, max_size=6), texts)
def test_the_separator_of_requests_is_never_proposed(
    stored: list[list[int]], text: list[int]
) -> None:
    suffix = Suffix(store=40)
    for seq, earlier in enumerate(stored, 1):
        finish(suffix, earlier, seq)
    start(suffix, text)
    draft = drafted(suffix, 12)
    assert draft is None or BREAK not in draft.tokens


def test_a_draft_does_not_run_from_one_request_into_the_next() -> None:
    suffix = Suffix()
    finish(suffix, [10, 11, 12])
    finish(suffix, [20, 21, 22])
    start(suffix, [10, 11])
    draft = drafted(suffix, 5)
    assert draft is not None and draft.tokens == (12,)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 60))
def test_the_store_stays_within_its_bound(lengths: list[int], bound: int) -> None:
    suffix = Suffix(store=bound)
    for i, length in enumerate(lengths):
        finish(suffix, random_ids(length, seed=i))
        kept = sum(map(len, suffix._texts))
        assert kept == suffix._size <= bound
        assert len(suffix._store.next) <= 1 + 2 * (kept + len(suffix._texts))


def test_a_full_store_forgets_the_oldest_and_keeps_the_latest() -> None:
    suffix = Suffix(store=100)
    stories = [random_ids(30, seed=s, below=10_000) for s in range(8)]
    for story in stories:
        finish(suffix, story)
    for seq, (story, kept) in enumerate([(stories[0], False), (stories[-1], True)]):
        start(suffix, story[:10], seq)
        draft = drafted(suffix, 4, seq)
        assert (draft is not None and list(draft.tokens) == story[10:14]) is kept
        assert kept or draft is None


def test_a_store_of_no_tokens_remembers_nothing() -> None:
    suffix, story = Suffix(store=0), random_ids(30, seed=2, below=10_000)
    finish(suffix, story)
    start(suffix, story[:10])
    assert drafted(suffix) is None


@pytest.mark.parametrize("store", [1000, 90])
def test_a_running_request_finds_its_place_in_a_store_that_changed(store: int) -> None:
    """Other requests end meanwhile; with the small bound the store is rebuilt as well."""
    suffix, story = Suffix(store), random_ids(40, seed=3, below=10_000)
    start(suffix, story[:20])
    assert drafted(suffix) is None
    for seq in range(1, 4):
        finish(suffix, random_ids(25, seed=10 + seq, below=10_000), seq)
    finish(suffix, story, 4)
    drafted(suffix)  # the store is newer than the cursor: still no crash, no stale state
    suffix.observe(0, [story[20]])
    draft = drafted(suffix, 5)
    assert draft is not None
    assert list(draft.tokens) == story[21:26]
    assert draft.features[0].match == 21


def test_match_lengths_are_capped() -> None:
    suffix, story = Suffix(), random_ids(100, seed=4, below=10_000)
    finish(suffix, story)
    start(suffix, story[:80])
    draft = drafted(suffix, 10)
    assert draft is not None
    assert {f.match for f in draft.features} == {LONGEST}


def test_long_monotonous_texts_are_cheap_and_continued() -> None:
    suffix = Suffix()
    start(suffix, [5] * 5000)
    draft = drafted(suffix, 64)
    assert draft is not None and set(draft.tokens) == {5}
    assert len(suffix._cursors[0].own.next) <= 2 * 5001
