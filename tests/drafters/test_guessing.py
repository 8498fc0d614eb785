"""Guesses make a draft cheaper and change nothing in it.

A twin without guesses drafts first, so that the guesser can be given its very tokens, some of them
altered: then right and wrong guesses meet at every place of a draft.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from conftest import VOCABULARY, plain_ids, random_ids, shared_model
from draftwise import Model, SamplingParams
from draftwise.core import Ask, Dense, Draft, Features, Request, SeqId, chain
from draftwise.drafters import Go, Retrieval
from draftwise.drafters.guessing import DISCOUNT, LONG, MOST, WEIGHT, Guessing
from draftwise.drafters.lookup import Lookup
from draftwise.drafters.model import ModelDrafter
from draftwise.drafters.suffix import Suffix
from draftwise.engines.base import PrefillChunk, Rows, Verify
from draftwise.engines.transformers import TransformersEngine


class Hinting(Retrieval):
    """Proposes what it is told, as it goes on after the tokens already drafted."""

    name = "hint"

    def __init__(self) -> None:
        self.tokens: Sequence[int] = ()

    def open(self, seq: SeqId, request: Request) -> None:
        return

    def observe(self, seq: SeqId, committed: Sequence[int]) -> None:
        return

    def close(self, seq: SeqId) -> None:
        return

    def memory(self) -> int:
        return 0

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        (ask,) = asks
        tokens = self.tokens[len(ask.after) :][: ask.depth]
        features = [Features(match=4 + j) for j in range(len(tokens))]
        return [chain(ask.seq, self.name, tokens, features, after=ask.after)] if tokens else []


class Counted(TransformersEngine):
    """`rows` of every forward that verifies."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.rows: list[int] = []

    def forward(self, work: Sequence[PrefillChunk | Verify]) -> list[Rows]:
        self.rows += [len(w.tokens) for w in work if isinstance(w, Verify)]
        return super().forward(work)


def flat(width: int, context: int) -> float:
    """Rows are free, so that all that can be guessed is guessed."""
    return 1.0


def drafter_of(model: PreTrainedModel, *guessers: Retrieval) -> tuple[ModelDrafter, Counted]:
    engine = Counted(model)
    drafter = ModelDrafter(engine, VOCABULARY)
    drafter.guess_with(guessers, flat)
    return drafter, engine


def drafted(drafter: ModelDrafter, depth: int, siblings: int = 0) -> Draft:
    ask = Ask(0, "model", depth, siblings=siblings)
    (draft,) = drafter.propose([ask], lambda of, features: True)
    return draft


def assert_same(one: Draft, other: Draft) -> None:
    assert (one.tokens, one.parents) == (other.tokens, other.parents)
    for a, b in zip(one.features, other.features, strict=True):
        assert tuple(a) == pytest.approx(tuple(b), rel=1e-3, abs=1e-3)
    for p, q in zip(one.q, other.q, strict=True):
        assert type(p) is type(q)
        if isinstance(p, Dense) and isinstance(q, Dense):
            assert p.probs == pytest.approx(q.probs, abs=1e-4)


def altered(tokens: Sequence[int], dice: random.Random, share: float) -> list[int]:
    return [(t + 1) % VOCABULARY if dice.random() < share else t for t in tokens]


KINDS: dict[str, tuple[dict[str, Any], str, int]] = {
    "greedy": ({}, "coupled", 0),
    "greedy, siblings": ({}, "coupled", 3),
    "coupled": ({"temperature": 0.9}, "coupled", 2),
    "rejection": ({"temperature": 0.9, "top_k": 50}, "rejection", 0),
    "penalties": ({"repetition_penalty": 1.3, "frequency_penalty": 0.4}, "coupled", 0),
}


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_draft_is_the_same_with_guesses(
    llama: PreTrainedModel, kind: str, wrong: float
) -> None:
    params, acceptance, siblings = KINDS[kind]
    dice, hints = random.Random(7), Hinting()
    (twin, plain), (drafter, engine) = drafter_of(llama), drafter_of(llama, hints)
    request = Request(0, tuple(random_ids(12)), SamplingParams(**params), 1, acceptance=acceptance)
    twin.open(0, request)
    drafter.open(0, request)
    for _ in range(25):
        depth = dice.choice([1, 2, 5, 9, 12])
        draft = drafted(twin, depth, siblings)
        main = draft.main().tokens
        hints.tokens = altered(main, dice, wrong)
        assert_same(drafted(drafter, depth, siblings), draft)
        committed = [*main[: dice.choice([0, 0, 1, 3, depth])], dice.randrange(VOCABULARY)]
        committed += random_ids(dice.choice([0, 0, 2]), seed=depth)
        for d in (twin, drafter):
            d.observe(0, committed)
            assert d.stale(0) == twin.stale(0)
    assert sum(engine.rows) > sum(plain.rows) or wrong == 0.0  # wrong guesses were run
    assert (len(engine.rows) < len(plain.rows)) == (wrong < 1.0)


def test_every_right_guess_saves_a_forward(llama: PreTrainedModel) -> None:
    hints = Hinting()
    drafter, engine = drafter_of(llama, hints)
    prompt = random_ids(10)
    drafter.open(0, Request(0, tuple(prompt), SamplingParams(), 1))
    text = plain_ids(llama, prompt, 12)
    hints.tokens = text
    assert list(drafted(drafter, 12).tokens) == text
    # The last token is never run: 1 + MOST tokens from the first forward, the rest from a second.
    assert engine.rows == [10 + MOST, 1 + 12 - 2 - MOST]
    drafter.observe(0, [(text[0] + 1) % VOCABULARY])
    engine.rows.clear()
    hints.tokens = ()
    assert len(drafted(drafter, 4).tokens) == 4
    assert engine.rows == [1, 1, 1, 1]


def test_a_draft_that_may_not_go_on_takes_only_what_is_there(llama: PreTrainedModel) -> None:
    """Tokens that were guessed cost nothing more, so they stay; no forward follows."""
    hints, prompt = Hinting(), random_ids(10)
    text = plain_ids(llama, prompt, 8)
    for right in (0, 2):
        drafter, engine = drafter_of(llama, hints)
        drafter.open(0, Request(0, tuple(prompt), SamplingParams(), 1))
        hints.tokens = [*text[:right], (text[right] + 1) % VOCABULARY, 1, 1]
        asked: list[Features] = []

        def go(of: SeqId, features: Features, asked: list[Features] = asked) -> bool:
            asked.append(features)
            return False

        (draft,) = drafter.propose([Ask(0, "model", 8)], go)
        assert list(draft.tokens) == text[: right + 1]
        assert engine.rows == [10 + right + 3]
        assert asked == list(draft.features)


@pytest.mark.parametrize("wrong", [0.2, 1.0])
def test_wrong_guesses_never_stay_in_the_cache(llama: PreTrainedModel, wrong: float) -> None:
    dice, hints = random.Random(3), Hinting()
    drafter, engine = drafter_of(llama, hints)
    text = random_ids(10)
    drafter.open(0, Request(0, tuple(text), SamplingParams(), 1))
    for _ in range(30):
        right = plain_ids(llama, text, 7)
        hints.tokens = altered(right, dice, wrong)
        assert list(drafted(drafter, 7).tokens) == right
        held = engine._sequences[0].cache.get_seq_length()
        assert held == len(drafter._sequences[0].cached) <= len(text) + 6
        committed = [*right[: dice.choice([0, 2, 7])], dice.randrange(VOCABULARY)]
        drafter.observe(0, committed)
        text += committed


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}])
def test_the_targets_own_weights_are_accepted_every_time_with_guesses(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    run: list[tuple[int, int]] = []
    learn = Guessing.learn

    def noted(self: Guessing, features: Sequence[Features], right: int) -> None:
        run.append((len(features), right))
        learn(self, features, right)

    monkeypatch.setattr(Guessing, "count", lambda self, features, *_: len(features[:MOST]))
    monkeypatch.setattr(Guessing, "learn", noted)
    model = Model(llama, None, [llama, "lookup", "suffix"])
    prompt = [*random_ids(6), 5, 6, 7, 8] * 3
    result = model.generate(prompt, policy="fixed:6:model", max_new_tokens=250, **sampling)
    assert result.stats.acceptance == 1.0
    plain = model.generate(prompt, policy="plain", max_new_tokens=250, **sampling)
    assert result.token_ids == plain.token_ids
    assert sum(guesses for guesses, _ in run) > sum(right for _, right in run)
    assert any(right for _, right in run) or sampling  # this greedy text repeats itself


def test_retrieval_drafters_guess_from_the_text_as_it_is(llama: PreTrainedModel) -> None:
    retrieval = [Lookup(), Suffix()]
    (twin, plain), (drafter, engine) = drafter_of(llama), drafter_of(llama, *retrieval)
    few = SamplingParams(logit_bias={5: 500.0, 6: 500.0, 7: 500.0})  # a text that repeats itself
    request = Request(0, (5, 6, 7), few, 1)
    everyone = [twin, drafter, *retrieval]
    for d in everyone:
        d.open(0, request)
    for step in range(25):
        draft = drafted(twin, 8)
        assert_same(drafted(drafter, 8), draft)
        committed = draft.tokens if step % 8 else [draft.tokens[0], 5]
        for d in everyone:
            d.observe(0, committed)
    assert len(engine.rows) < 0.8 * len(plain.rows)


@pytest.mark.parametrize("family", ["mistral", "lfm2"])
def test_a_cache_that_cannot_drop_rows_does_without(family: str) -> None:
    hints = Hinting()
    drafter, engine = drafter_of(shared_model(family), hints)
    drafter.open(0, Request(0, tuple(random_ids(10)), SamplingParams(), 1))
    hints.tokens = random_ids(8)
    drafted(drafter, 5)
    assert engine.rows == [10, 1, 1, 1, 1]


# How many


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[int], int]]:
    """Guesses that were run, by their matches, and how many were right."""
    runs = draw(st.lists(st.lists(st.integers(1, 14), min_size=1, max_size=MOST), max_size=12))
    return [(run, draw(st.integers(0, len(run)))) for run in runs]


@given(
    history=histories(),
    matches=st.lists(st.integers(0, 14), max_size=10),
    prices=st.lists(st.floats(0.1, 3.0), min_size=20, max_size=20),
    rows=st.integers(1, 4),
)
def test_the_count_is_the_best_of_all(
    history: list[tuple[list[int], int]], matches: list[int], prices: list[float], rows: int
) -> None:
    asked: list[int] = []

    def price(width: int, context: int) -> float:
        asked.append(context)
        return prices[width]

    guessing = Guessing(price)
    judged: dict[int, list[bool]] = {m: [] for m in range(LONG + 1)}
    for run, right in history:
        guessing.learn([Features(match=m) for m in run], right)
        for j, m in enumerate(run[: right + 1]):  # what comes after the first wrong one is unknown
            judged[min(m, LONG)].append(j < right)

    def chance(match: int) -> float:
        m = min(match, LONG)
        hits, tries = WEIGHT * (0.35 + 0.05 * m), WEIGHT
        for right in judged[m]:
            hits, tries = DISCOUNT * hits + right, DISCOUNT * tries + 1
        return hits / tries

    def pace(g: int) -> float:
        expected = 1.0
        for last in range(1, g + 1):
            product = 1.0
            for m in matches[:last]:
                product *= chance(m)
            expected += product
        return expected / prices[rows + g]

    count = guessing.count([Features(match=m) for m in matches], 77, rows)
    most = min(len(matches), MOST)
    assert 0 <= count <= most
    assert pace(count) == pytest.approx(max(pace(g) for g in range(most + 1)))
    assert set(asked) == {77}


def test_what_was_learned_decides() -> None:
    """One guess at a price of half a token more pays above a chance of one half."""
    for right, count in ((True, 1), (False, 0)):
        guessing = Guessing(lambda width, context: 1.0 + 0.5 * (width - 1))
        for _ in range(30):
            guessing.learn([Features(match=3)], int(right))
        assert guessing.count([Features(match=3)], 0) == count


def test_what_follows_the_first_wrong_guess_tells_nothing() -> None:
    guessing = Guessing(lambda width, context: 1.0 + 0.5 * (width - 1))
    for _ in range(30):
        guessing.learn([Features(match=3), Features(match=5)], 0)
    assert guessing.count([Features(match=5)], 0) == 1  # as at the start
