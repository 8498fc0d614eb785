"""The draft model with its tokens guessed by retrieval drafters, and its siblings."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import VOCABULARY, plain_ids, random_ids, shared_model
from draftwise.core import Ask, Dense, Draft, Features, Request, SamplingParams
from draftwise.drafters import Drafter
from draftwise.drafters.guessing import MOST, Guessing
from draftwise.drafters.lookup import Lookup
from draftwise.drafters.model import ModelDrafter
from draftwise.drafters.suffix import Suffix
from draftwise.engines.transformers import TransformersEngine
from draftwise.sampling import gumbel, key

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 3
WAYS = {
    "greedy": ({}, "coupled"),
    "coupled": ({"temperature": 0.8}, "coupled"),
    "rejection": ({"temperature": 0.8}, "rejection"),
}


def flat(width: int, context: int) -> float:
    return 1.0 + 0.02 * width


class Counting(TransformersEngine):
    """Counts the forwards, and their rows."""

    def __init__(self, model):
        super().__init__(model)
        self.widths: list[int] = []

    def forward(self, work):
        self.widths += [len(w.tokens) for w in work]
        return super().forward(work)


class Pair:
    """A draft model with its guessers, all told of one sequence."""

    def __init__(self, guess: bool, way: str, seed: int = 0, weights: int = 1):
        sampling, acceptance = WAYS[way]
        self.engine = Counting(shared_model("llama", weights))
        self.model = ModelDrafter(self.engine, VOCABULARY)
        self.guessers: list[Drafter] = [Lookup(), Suffix()]
        if guess:
            self.model.guess_with(self.guessers, flat)
        request = Request(
            0, tuple(PROMPT), SamplingParams(**sampling), 7 + seed, acceptance=acceptance
        )
        for drafter in (*self.guessers, self.model):
            drafter.open(0, request)

    def observe(self, tokens: Sequence[int]) -> None:
        for drafter in (*self.guessers, self.model):
            drafter.observe(0, tokens)

    def propose(self, depth: int, go: int, siblings: int = 0) -> Draft:
        answers = iter([True] * go + [False] * 99)
        asks = [Ask(0, "model", depth, siblings=siblings)]
        (draft,) = self.model.propose(asks, lambda seq, f: next(answers))
        return draft


@pytest.mark.parametrize("way", sorted(WAYS))
def test_the_draft_is_that_without_guesses(way):
    rng = random.Random(3)
    plain, guessing = Pair(False, way), Pair(True, way)
    text = [5, 6, 7]
    for pair in (plain, guessing):
        pair.observe(text)
    for _ in range(30):
        depth, go = rng.randint(1, 9), rng.randint(0, 9)
        a, b = (pair.propose(depth, go, siblings=2) for pair in (plain, guessing))
        # Guesses that were right are drafted for nothing, also where `go` had enough.
        n = len(a.tokens)
        assert b.tokens[:n] == a.tokens and b.parents[:n] == a.parents
        for x, y in zip(a.features, b.features, strict=False):
            assert tuple(x) == pytest.approx(tuple(y), rel=1e-3, abs=1e-3)
        for p, q in zip(a.q, b.q, strict=False):
            assert type(p) is type(q)
            if isinstance(p, Dense) and isinstance(q, Dense):
                assert np.allclose(p.probs, q.probs, atol=1e-5)
        kept = list(a.main().tokens[: rng.randint(0, len(a.main().tokens))])
        wrong = [rng.randrange(1, VOCABULARY)]
        for pair in (plain, guessing):
            pair.observe([*kept, *wrong])


def test_right_guesses_save_forwards():
    """A model that copies what it is shown: its own greedy text, given back as a prompt."""
    loop = plain_ids(shared_model("llama", 1), PROMPT, 40)
    counts = {}
    for guess in (False, True):
        pair = Pair(guess, "greedy")
        pair.observe(loop)
        pair.observe(loop[:2])
        drafted = pair.propose(12, 12)
        counts[guess] = len(drafted.forwards)
        assert sum(drafted.forwards) >= len(drafted.tokens)
        assert list(drafted.forwards) == pair.engine.widths[-len(drafted.forwards) :]
    assert counts[True] <= counts[False]


@pytest.mark.parametrize("guess", [False, True])
def test_a_drafter_with_the_targets_weights_is_always_right(guess):
    text = plain_ids(shared_model("llama", 1), PROMPT, 120)
    pair, rng, at = Pair(guess, "greedy"), random.Random(5), 1
    pair.observe(text[:1])
    while at < 100:
        draft = pair.propose(rng.randint(1, 8), rng.randint(0, 8))
        n = len(draft.tokens)
        assert list(draft.tokens) == text[at : at + n]
        step = rng.randint(1, n + 1)  # the rest is taken back, as after a rejection
        pair.observe(text[at : at + step])
        at += step


@settings(max_examples=100, deadline=None)
@given(
    matches=st.lists(st.integers(0, 20), max_size=10),
    seconds=st.lists(st.floats(0.1, 3.0), min_size=14, max_size=14),
    rows=st.integers(1, 3),
)
def test_the_number_of_guesses_is_the_argmax_of_its_formula(matches, seconds, rows):
    guessing = Guessing(lambda width, context: seconds[width])
    features = [Features(match=m) for m in matches]
    paces = []
    for g in range(min(len(matches), MOST) + 1):
        tokens = survival = 1.0
        for m in matches[:g]:
            survival *= 0.35 + 0.05 * min(m, 10)
            tokens += survival
        paces.append(tokens / seconds[rows + g])
    assert paces[guessing.count(features, 50, rows)] == pytest.approx(max(paces))


def test_guesses_that_fail_are_made_no_more():
    guessing = Guessing(lambda width, context: 1.0 + 0.3 * width)
    features = [Features(match=8)] * 4
    assert guessing.count(features, 10) > 0
    for _ in range(40):
        guessing.learn(features[: guessing.count(features, 10) or 1], 0)
    assert guessing.count(features, 10) == 0


@pytest.mark.parametrize("way", ["greedy", "coupled"])
def test_siblings_are_the_next_best_beside_the_main_chain(way):
    pair = Pair(False, way)
    pair.observe([5])
    draft = pair.propose(4, 9, siblings=3)
    plain = Pair(False, way)
    plain.observe([5])
    assert draft.main().tokens == plain.propose(4, 9).tokens
    assert len(draft.tokens) == 16
    node = -1
    for depth in range(4):
        children = draft.children(node)
        features = [draft.features[i] for i in children]
        assert [f.rank for f in features] == [0, 1, 2, 3]
        assert len({draft.tokens[i] for i in children}) == 4
        if way == "greedy":
            probs = [f.prob for f in features]
            assert probs == sorted(probs, reverse=True) and sum(probs) <= 1 + 1e-6
        else:
            assert [f.margin for f in features[1:]] == sorted(f.margin for f in features[1:])
            assert features[1].margin == pytest.approx(features[0].margin)
        node = children[0]
        assert depth < 4


def test_coupled_siblings_are_the_top_of_the_perturbed_scores():
    model = shared_model("llama", 1)
    pair = Pair(False, "coupled")
    pair.observe([5])
    draft = pair.propose(1, 0, siblings=3)
    engine = TransformersEngine(model)
    engine.open(0, ())
    from draftwise.engines.base import PrefillChunk

    row = engine.forward([PrefillChunk(0, (*PROMPT, 5))])[0].row(0)[:VOCABULARY]
    noisy = row.astype(np.float64) / 0.8 + gumbel(key(7, 1), VOCABULARY)
    assert list(draft.tokens) == np.argsort(-noisy)[:4].tolist()


def test_foretelling_is_what_would_have_been_chosen_and_leaves_others_alone():
    text = random_ids(20, seed=4)
    pair = Pair(True, "greedy")
    pair.observe(text[:1])
    before = pair.propose(3, 3)
    request = Request(1, tuple(PROMPT), SamplingParams(), 7)
    told = pair.model.foretell(request, text, 2)
    assert len(told) == len(text) - 1
    assert pair.propose(3, 3).tokens == before.tokens
    for at, choices in enumerate(told, start=1):
        if at > 1:
            pair.observe([text[at - 1]])
        draft = pair.propose(1, 0, siblings=2)
        assert [token for token, _ in choices] == list(draft.tokens)
