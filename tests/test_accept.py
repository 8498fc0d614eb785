"""Acceptance keeps the promise: the same text (coupled), or the same distribution (rejection)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.accept import RULES, NodeRows, Rule, blockwise, tokenwise
from draftwise.accept.base import mass
from draftwise.accept.loosen import Budget
from draftwise.accept.tokenwise import rejection
from draftwise.core import (
    POINT,
    Ask,
    Dense,
    Draft,
    FloatRow,
    Q,
    SamplingParams,
    Sparse,
    State,
    StepPlan,
)
from draftwise.drafters.model import ModelDrafter
from draftwise.engines.base import Caps
from draftwise.sampling import ACCEPT, Sampler, gumbel, key, uniform
from toy import (
    PROMPT,
    Everything,
    Guess,
    Guesser,
    Target,
    ToyDrafter,
    ToyEngine,
    ToyRows,
    Whim,
    best_points,
    best_tree,
    distribution,
    drawing,
    exact,
    fit,
    parts,
    random_points,
    random_trees,
    request,
    run,
    scripted,
    text_of,
    walk,
    wrong,
)

SIZE = 6

# coupled: the same text


def plain(target: Target, params: SamplingParams) -> list[int]:
    """The text by its definition, without the loop."""
    text: list[int] = []
    while len(text) < params.max_new_tokens:
        row = target.logits([*PROMPT, *text])
        if not params.greedy:
            scores = row / np.float32(params.temperature)
            row = scores + gumbel(key(params.seed or 0, len(text)), len(row))
        text.append(int(row.argmax()))
    return text


options = st.fixed_dictionaries(
    {
        "max_new_tokens": st.one_of(st.integers(1, 7), st.integers(8, 30)),
        "temperature": st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.0]),
        "seed": st.integers(0, 2**63),
    },
    optional={
        "top_k": st.integers(1, SIZE),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.5),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-1.0, 1.0),
        "logit_bias": st.dictionaries(st.integers(0, SIZE), st.floats(-3.0, 3.0), max_size=3),
        "min_new_tokens": st.integers(0, 6),
    },
)
eos_sets = st.frozensets(st.integers(0, SIZE - 1), max_size=2)


@given(
    options=options,
    eos=eos_sets,
    table=st.integers(0, 2**32),
    kind=st.integers(0, 2**32),
    serial=st.booleans(),
    everything=st.booleans(),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_coupled_text_is_the_plain_text(
    options: dict[str, Any],
    eos: frozenset[int],
    table: int,
    kind: int,
    serial: bool,
    everything: bool,
) -> None:
    target, params = Target(SIZE, table), SamplingParams(**options)
    asked = request(params, eos=eos)
    text = text_of(target, [], asked)
    shifted = Target(SIZE, table, spread=1.0)
    shifted.table += np.random.default_rng(kind).normal(0.0, 1.0, shifted.table.shape)
    guesses = [
        scripted(text),
        wrong(text, SIZE),
        random_points(SIZE, kind),
        random_trees(SIZE, kind),
        best_points(target, 4),
        best_tree(shifted, 2, 3),
        drawing(shifted, params, kind, 5),
    ]
    first = kind % len(guesses)
    drafters = [
        ToyDrafter(guess, f"d{i}", serial=serial and i == 0)
        for i, guess in enumerate(guesses[first:] + guesses[:first])
    ]
    policy = Everything(["d0"] * serial) if everything else Whim(kind, ["d0"] * serial)
    assert text_of(target, drafters, asked, policy) == text


@given(
    wanted=st.integers(1, 20),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**63),
    table=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_plain_text_is_the_definition(
    wanted: int, temperature: float, seed: int, table: int
) -> None:
    target = Target(SIZE, table)
    params = SamplingParams(max_new_tokens=wanted, temperature=temperature, seed=seed)
    assert text_of(target, [], request(params)) == plain(target, params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_perfect_drafter_is_accepted_whole_and_a_wrong_one_never(temperature: float) -> None:
    target = Target(SIZE, 1)
    asked = request(SamplingParams(max_new_tokens=21, temperature=temperature, seed=4))
    text = text_of(target, [], asked)

    def five(guess: Guesser) -> Guesser:
        return lambda generated, history, depth: guess(generated, history, min(depth, 4))

    perfect = run(parts(ToyEngine(target), [ToyDrafter(five(scripted(text)))]), asked)
    assert [r.accepted for r in perfect.results[1:]] == [4, 4, 4, 4]
    missed = run(parts(ToyEngine(target), [ToyDrafter(five(wrong(text, SIZE)))]), asked)
    assert [r.accepted for r in missed.results[1:]] == [0] * 20
    assert perfect.tokens == missed.tokens == text


class Counting:
    """A transformers-style processor with a state: it counts its calls."""

    def __init__(self, prompt: tuple[int, ...]):
        self.histories: list[list[int]] = []
        self._prompt = prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        history = ids[0].tolist()
        assert history[: len(self._prompt)] == list(self._prompt)
        self.histories.append(history[len(self._prompt) :])
        scores[:, (history[-1] + len(self.histories)) % scores.shape[1]] = -torch.inf
        return scores


@given(
    wanted=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1.0]),
    table=st.integers(0, 2**32),
    kind=st.integers(0, 2**32),
    rule=st.sampled_from([*RULES, "budget"]),
    eos=eos_sets,
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_stateful_processors_are_called_once_for_every_token_of_the_text(
    wanted: int, temperature: float, table: int, kind: int, rule: str, eos: frozenset[int]
) -> None:
    target = Target(SIZE, table)
    params = SamplingParams(max_new_tokens=wanted, temperature=temperature, seed=kind)
    one, two = Counting(PROMPT), Counting(PROMPT)
    text = text_of(target, [], request(params, eos=eos, processors=(one,)))
    guesses = [random_trees(SIZE, kind), scripted(text), best_tree(target)]
    drafters = [ToyDrafter(guess, f"d{i}") for i, guess in enumerate(guesses)]
    budget = {"quality_budget": 0.5} if rule == "budget" else {"acceptance": rule}
    asked = request(params, eos=eos, processors=(two,), **budget)
    drafted = text_of(target, drafters, asked, Whim(kind))
    if rule == "coupled":
        assert drafted == text
    assert one.histories == [text[:i] for i in range(len(text))]
    assert two.histories == [drafted[:i] for i in range(len(drafted))]


def test_nothing_is_decided_beyond_what_is_asked_for() -> None:
    target = Target(SIZE, 3)
    params = SamplingParams(temperature=1.0)
    for rule in (*RULES.values(), Budget(2.0)):
        reads: list[int] = []

        def row(node: int, reads: list[int] = reads) -> FloatRow:
            reads.append(node)
            return target.logits([1, 2, node])

        draft = Guess(range(SIZE), [-1] * SIZE).draft(0, "all")
        walked = rule(draft, NodeRows(lambda: [], row), Sampler(params, 0), [])
        choice = next(walked)
        assert reads == [0] and draft.tokens[choice.node] == choice.token


# rejection and block: the same distribution

LENGTH = 3
VOCABULARY = 4
SAMPLES = 4_000
CONTROL = 3_000  # enough to see what is wrong
TARGET = Target(VOCABULARY, 11, spread=1.2)
OTHER = Target(VOCABULARY, 5, spread=1.2)  # what drafts are drawn from: far from the target
WARM = SamplingParams(temperature=1.0, max_new_tokens=LENGTH)
COOL = SamplingParams(temperature=0.6, max_new_tokens=LENGTH)
TOP_K = SamplingParams(temperature=1.3, top_k=3, max_new_tokens=LENGTH)
TOP_2 = SamplingParams(temperature=1.0, top_k=2, max_new_tokens=LENGTH)
TOP_P = SamplingParams(temperature=1.3, top_p=0.8, max_new_tokens=LENGTH)


def p_value(case: Case, samples: int, rule: Rule = rejection) -> float:
    """Are the first tokens those of the target? Joint counts against their exact probabilities."""
    params, guess = case[0], case[1]()
    counts = np.zeros((VOCABULARY,) * LENGTH)
    for seed in range(samples):
        sampler = Sampler(params, seed, PROMPT)
        counts[walk(rule, TARGET, guess, sampler, list(PROMPT), LENGTH)] += 1
    return fit(counts, exact(TARGET, params, list(PROMPT), LENGTH))


def as_point(q: FloatRow, row: FloatRow, token: int) -> Q:
    """Says no more than which token it is: right for any drafter that does not see the judge."""
    return POINT


# Made anew for every test, since they draw: (params, drafter).
Case = tuple[SamplingParams, Callable[[], Guesser]]
LOSSLESS: dict[str, Case] = {
    "no drafts": (WARM, lambda: lambda generated, text, depth: Guess(())),
    "random points": (WARM, lambda: random_points(VOCABULARY, 3)),
    "random trees": (WARM, lambda: random_trees(VOCABULARY, 4, most=6)),
    "greedy points": (WARM, lambda: best_points(TARGET)),
    "greedy points, cool": (COOL, lambda: best_points(TARGET)),
    "tree of points": (WARM, lambda: best_tree(TARGET, 2, 2)),
    "tree of points, top-k": (TOP_K, lambda: best_tree(OTHER, 3, 2)),
    "drawn, said to be points": (COOL, lambda: drawing(OTHER, WARM, 0, told=as_point)),
    "drawn, dense": (WARM, lambda: drawing(OTHER, WARM, 0)),
    "drawn, sparse": (COOL, lambda: drawing(OTHER, TOP_K, 1, sparse=True)),
    "drawn, siblings": (WARM, lambda: drawing(OTHER, WARM, 2, siblings=2)),
    "drawn from p itself": (WARM, lambda: drawing(TARGET, WARM, 3)),
    "top-k in both": (TOP_K, lambda: drawing(OTHER, TOP_K, 4)),
    "top-p in both": (TOP_P, lambda: drawing(OTHER, TOP_P, 5, sparse=True)),
    "top-p in the target only": (TOP_P, lambda: drawing(OTHER, WARM, 6)),
    "length by q": (WARM, lambda: drawing(OTHER, WARM, 7, stop=lambda q, t: bool(q.max() < 0.6))),
}


DRAWN = ["rejection", "block"]  # the rules that keep no more than the distribution


@pytest.mark.parametrize("rule", DRAWN)
@pytest.mark.parametrize("case", LOSSLESS)
def test_the_distribution_is_kept(case: str, rule: str) -> None:
    assert p_value(LOSSLESS[case], SAMPLES, RULES[rule]) > 1e-3


@pytest.mark.parametrize("rule", DRAWN)
@pytest.mark.parametrize("case", ["greedy points", "tree of points", "drawn, dense"])
def test_at_temperature_0_the_text_is_the_argmax(case: str, rule: str) -> None:
    greedy = SamplingParams(max_new_tokens=LENGTH)
    text = plain(TARGET, greedy)
    guess = LOSSLESS[case][1]()
    for seed in range(200):
        sampler = Sampler(greedy, seed, PROMPT)
        assert list(walk(RULES[rule], TARGET, guess, sampler, list(PROMPT), LENGTH)) == text


@pytest.mark.parametrize("rule", DRAWN)
def test_trees_and_draws_in_the_loop(rule: str) -> None:
    counts = np.zeros((VOCABULARY,) * LENGTH)
    engine = ToyEngine(TARGET)
    for seed in range(2_000):
        drafters = [
            ToyDrafter(drawing(OTHER, WARM, seed), "drawn", serial=True),
            ToyDrafter(best_tree(TARGET), "tree"),
        ]
        asked = request(WARM, seed=seed, acceptance=rule)
        counts[tuple(run(parts(engine, drafters[seed % 2 :]), asked).tokens)] += 1
    assert fit(counts, exact(TARGET, WARM, list(PROMPT), LENGTH)) > 1e-3


def cut(chance: FloatRow, end: int) -> FloatRow:
    """The law of texts that end with `end`; what would follow is written as more of it."""
    out = np.zeros_like(chance)
    for text in np.ndindex(chance.shape):
        at = text.index(end) if end in text else len(text)
        out[(*text[:at], *[end] * (len(text) - at))] += chance[text]
    return out


@pytest.mark.parametrize("rule", DRAWN)
def test_an_end_of_text_within_an_accepted_block(rule: str) -> None:
    """Drafts go on behind it; it is forbidden as the first token, and penalties see the history."""
    end = 2
    params = SamplingParams(
        temperature=1.0, max_new_tokens=3, min_new_tokens=1, frequency_penalty=0.7
    )
    law = Sampler(params, 0, PROMPT, frozenset([end]))
    chance = np.zeros((VOCABULARY,) * LENGTH)
    for text in np.ndindex(chance.shape):
        each = [
            law.probabilities(TARGET.logits([*PROMPT, *text[:i]]), text[:i])[text[i]]
            for i in range(LENGTH)
        ]
        chance[text] = np.prod(each)
    counts = np.zeros_like(chance)
    engine = ToyEngine(TARGET)
    for seed in range(2_500):
        made = [ToyDrafter(drawing(OTHER, WARM, seed), "drawn", serial=True)]
        asked = request(params, seed=seed, acceptance=rule, eos=frozenset([end]))
        done = run(parts(engine, made), asked)
        assert end not in done.tokens[:-1]
        counts[(*done.tokens, *[end] * (LENGTH - len(done.tokens)))] += 1
    assert fit(counts, cut(chance, end)) > 1e-3


class TinyEngine:
    """A draft model's engine over a toy target: a list of tokens for a cache."""

    name = "tiny"

    def __init__(self, target: Target):
        self.target = target
        self.caps = Caps(False, "free", "packed", None, target.size)
        self.cache: list[int] = []
        self.base = 0

    def open(self, seq: int, tokens: Sequence[int], share: int | None = None) -> int:
        self.cache, self.base = [], 0
        return 0

    def forward(self, work: Sequence[Any]) -> list[ToyRows]:
        paths = []
        for token in work[0].tokens:
            self.cache.append(token)
            paths.append(tuple(self.cache))
        return [ToyRows(self.target, paths)]

    def commit(self, seq: int, path: Sequence[int]) -> None:
        self.base += len(list(path))
        del self.cache[self.base :]

    def close(self, seq: int, keep: bool = False) -> None:
        return


class Rememberer(Everything):
    """It knows all that a policy may know of what was drawn: it asks as far as the last draft
    lasted, and not at all where that had a certain token at this index."""

    def __init__(self) -> None:
        super().__init__(["model"])
        self.depth, self.known = 3, -1

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        depth = 0 if self.known == 1 else min(batch[0].wanted - 1, self.depth)
        return [Ask(batch[0].seq, "model", depth)] if depth > 0 else []

    def go(self, seq: int, features: Any) -> bool:
        return True

    def learn(self, results: Sequence[Any]) -> None:
        tokens = results[0].plan.draft.tokens if results[0].plan.draft else ()
        self.depth = 3 if results[0].accepted == len(tokens) else 2
        self.known = dict(enumerate(tokens)).get(results[0].accepted + 1, -1)


REMEMBERED = SamplingParams(temperature=1.0, max_new_tokens=6)


def remembered(rule: str, samples: int, policy: Callable[[], Rememberer] = Rememberer) -> float:
    target, other = Target(2, 3), Target(2, 4)
    chance = exact(target, REMEMBERED, [1, 0], 6)
    counts = np.zeros_like(chance)
    engine = ToyEngine(target)
    drafter: Any = ModelDrafter(TinyEngine(other), 2)  # type: ignore[arg-type]
    for seed in range(samples):
        asked = request(REMEMBERED, 0, [1, 0], seed=seed, acceptance=rule)
        counts[tuple(run(parts(engine, [drafter], policy()), asked).tokens)] += 1
    return fit(counts, chance)


@pytest.mark.parametrize("rule", DRAWN)
def test_a_policy_that_remembers_what_was_drawn_does_not_shift_the_distribution(rule: str) -> None:
    assert remembered(rule, 3_000) > 1e-3


class Peeking(Rememberer):
    """It lets a draft go by what was drawn."""

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        return super().select([(s, [d for d in ds if d.tokens[0] != 1]) for s, ds in batch])


@pytest.mark.parametrize("rule", DRAWN)
def test_a_policy_that_peeks_is_seen(rule: str) -> None:
    assert remembered(rule, 2_000, Peeking) < 1e-6


@pytest.mark.parametrize("rule", DRAWN)
def test_identical_q_and_p_are_always_accepted(rule: str) -> None:
    guess = drawing(TARGET, WARM, 0, depth=2)
    drawn: list[tuple[int, ...]] = []

    def spy(generated: list[int], text: list[int], depth: int) -> Guess:
        made = guess(generated, text, depth)
        drawn.append(tuple(made.tokens))
        return made

    for seed in range(300):
        sampler = Sampler(WARM, seed, PROMPT)
        text = walk(RULES[rule], TARGET, spy, sampler, list(PROMPT), LENGTH)
        assert text[:2] == drawn[-1]
    assert len(drawn) == 300


def test_a_q_over_fewer_or_more_tokens_than_p_is_judged_token_by_token() -> None:
    p = np.array([0.5, 0.3, 0.2, 0.0])
    for q in (Dense(np.array([0.25, 0.75])), Sparse(np.array([1, 0]), np.array([0.75, 0.25]))):
        left = p.copy()
        tokenwise._subtract(left, q, 1)
        assert left == pytest.approx([0.25 / 0.45, 0.0, 0.2 / 0.45, 0.0])
    assert mass(Sparse(np.array([1, 3]), np.array([0.4, 0.6])), 2) == 0.0
    assert mass(POINT, 2) == 1.0


# ... and the same test sees what is not lossless


def unsubtracted(p: FloatRow, q: Q, token: int) -> None:
    return


def softmaxed(p: FloatRow, q: Q, token: int) -> None:
    RIGHT_SUBTRACT(p, q, token)
    p[:] = np.exp(p) / np.exp(p).sum()


def struck(p: FloatRow, q: Q, token: int) -> None:
    """Strikes the token out, as if q were a point."""
    RIGHT_SUBTRACT(p, POINT, token)


RIGHT_SUBTRACT = tokenwise._subtract


@pytest.mark.parametrize("broken", [unsubtracted, softmaxed, struck])
@pytest.mark.parametrize("case", ["drawn, dense", "top-k in both"])
def test_a_wrong_residual_is_seen(
    broken: Callable[[FloatRow, Q, int], None], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenwise, "_subtract", broken)
    assert p_value(LOSSLESS[case], CONTROL) < 1e-6


@pytest.mark.parametrize("broken", [unsubtracted, softmaxed])
@pytest.mark.parametrize("case", ["greedy points", "tree of points"])
def test_a_wrong_residual_of_points_is_seen(
    broken: Callable[[FloatRow, Q, int], None], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenwise, "_subtract", broken)
    assert p_value(LOSSLESS[case], CONTROL) < 1e-6


def raw(q: FloatRow, row: FloatRow, token: int) -> Q:
    return Dense(distribution(row, WARM))


def greedy_with_softmax(generated: list[int], text: list[int], depth: int) -> Guess:
    """Argmax drafts that say they were drawn from the softmax."""
    tokens = best_points(TARGET)(generated, text, depth).tokens
    paths = [[*text, *tokens[:i]] for i in range(len(tokens))]
    q = [Dense(distribution(TARGET.logits(path), WARM)) for path in paths]
    return Guess(tokens, None, q)


def two_bits(q: FloatRow, row: FloatRow, token: int) -> Q:
    return Dense(np.round(q * 3) / 3)


WRONG_Q: dict[str, Case] = {
    "raw q of a cooled draw": (WARM, lambda: drawing(OTHER, COOL, 0, told=raw)),
    "raw q of a top-k draw": (WARM, lambda: drawing(OTHER, TOP_2, 0, told=raw)),
    "point as q = p": (WARM, lambda: greedy_with_softmax),
    "q in two bits": (WARM, lambda: drawing(OTHER, WARM, 0, told=two_bits)),
    # Peeking: whether a node is kept depends on the token drawn for it.
    "kept by its draw": (WARM, lambda: drawing(OTHER, WARM, 0, drop=lambda q, t: bool(q[t] < 0.3))),
}


@pytest.mark.parametrize("rule", DRAWN)
@pytest.mark.parametrize("case", WRONG_Q)
def test_a_q_that_the_token_was_not_drawn_from_is_seen(case: str, rule: str) -> None:
    assert p_value(WRONG_Q[case], CONTROL, RULES[rule]) < 1e-6


def test_a_tree_whose_siblings_reuse_one_uniform_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tokenwise.uniform
    monkeypatch.setattr(tokenwise, "uniform", lambda k, counter=0: right(k, 0))
    assert p_value(LOSSLESS["tree of points"], CONTROL) < 1e-6


def test_a_threshold_in_place_of_a_draw_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenwise, "uniform", lambda k, counter=0: 0.5)
    assert p_value(LOSSLESS["drawn, dense"], CONTROL) < 1e-6


def test_uniforms_of_rejected_nodes_that_are_used_again_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block that stopped short knows the uniforms behind its end: a next one needs new ones."""

    def by_index(seed: int, index: int, stream: int) -> Any:
        return (seed, index) if stream == ACCEPT else key(seed, index, stream)

    def again(k: Any, i: int) -> float:
        return uniform(key(k[0], k[1] + i, ACCEPT))

    monkeypatch.setattr(blockwise, "key", by_index)
    monkeypatch.setattr(blockwise, "uniform", again)
    target, guess = Target(3, 6, spread=1.2), drawing(Target(3, 11, spread=1.2), WARM, 0)
    counts = np.zeros((3,) * LENGTH)
    for seed in range(6_000):
        sampler = Sampler(WARM, seed, PROMPT)
        counts[walk(RULES["block"], target, guess, sampler, list(PROMPT), LENGTH)] += 1
    assert fit(counts, exact(target, WARM, list(PROMPT), LENGTH)) < 1e-6


def test_a_block_whose_bonus_is_drawn_from_p_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "without", lambda p, q, token: None)
    assert p_value(LOSSLESS["drawn, dense"], CONTROL, RULES["block"]) < 1e-6
