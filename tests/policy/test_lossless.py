"""A policy changes speed, never text: under every one of them the seed gives plain's tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.accept import RULES, Choice, NodeRows
from draftwise.core import Ask, Draft, Features, SamplingParams, State
from draftwise.engines.base import Shape
from draftwise.policy import REGISTRY, Costs, Policy, make
from draftwise.policy.cost import CostCurve
from draftwise.sampling import Sampler
from toy import (
    Guess,
    Guesser,
    Target,
    ToyDrafter,
    ToyEngine,
    Whim,
    best_points,
    parts,
    random_points,
    random_trees,
    request,
    run,
    scripted,
    text_of,
    wrong,
)

SIZE = 6
TARGET = Target(SIZE, 3)
SAMPLING = {"greedy": 0.0, "sampled": 0.8}
SERIAL = ("script", "wrong")
NAMES = (*SERIAL, "points", "trees", "best")
CURVE = CostCurve([(Shape(1, 4), 1e-4), (Shape(32, 4), 2e-4)])


class Caprice(Whim):
    """Whim that also asks any serial drafter for any depth."""

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        asks = [ask for ask in super().choose(batch) if ask.depth]
        return [
            Ask(a.seq, self._rng.choice(self._serial), self._rng.randint(1, a.depth)) for a in asks
        ]


def params(sampling: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=40, temperature=SAMPLING[sampling], seed=11)


PLAIN = {name: text_of(TARGET, [], request(params(name))) for name in SAMPLING}


def unsure(guess: Guesser, seed: int, right: float) -> Guesser:
    """The same guesses, some of them spoilt, with all that a model says of its tokens at random."""
    rng = random.Random(seed)

    def changed(generated: list[int], text: list[int], depth: int) -> Guess:
        tokens = guess(generated, text, depth).tokens
        spoilt = [t if rng.random() < right else rng.randrange(SIZE) for t in tokens]
        known = [Features(prob=rng.random(), entropy=3 * rng.random() ** 3) for _ in tokens]
        return Guess(spoilt, features=[f if rng.random() < 0.8 else Features() for f in known])

    return changed


def drafters(text: list[int], seed: int) -> list[ToyDrafter]:
    return [
        ToyDrafter(unsure(scripted(text), seed, 0.9), "script", serial=True),
        ToyDrafter(unsure(wrong(text, SIZE), seed, 1.0), "wrong", serial=True),
        ToyDrafter(random_points(SIZE, seed), "points"),
        ToyDrafter(random_trees(SIZE, seed), "trees"),
        ToyDrafter(best_points(TARGET, 9), "best"),
    ]


def policy_of(name: str, drafter: str, seed: int) -> Policy:
    if name == "random":
        return Caprice(seed, SERIAL)
    argument = [name, *(["3"] if name == "fixed" else [])]
    if drafter and name not in ("plain", "auto"):
        argument.append(drafter)
    return make(":".join(argument), Costs(CURVE, dict.fromkeys(SERIAL, CURVE), NAMES))


def runs(name: str, drafter: str, seed: int, sampling: str) -> tuple[list[list[int]], int]:
    """(texts, accepted tokens) of two requests after each other, under one policy."""
    policy, made = policy_of(name, drafter, seed), drafters(PLAIN[sampling], seed)
    texts, accepted = [], 0
    for seq in range(2):
        done = run(parts(ToyEngine(TARGET), made, policy), request(params(sampling), seq))
        texts.append(done.tokens)
        accepted += sum(r.accepted for r in done.results)
    return texts, accepted


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", [*REGISTRY, "random"])
@given(seed=st.integers(0, 2**32), drafter=st.sampled_from(["", *NAMES]))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_the_text_is_plain_s(name: str, sampling: str, seed: int, drafter: str) -> None:
    texts, _ = runs(name, drafter, seed, sampling)
    assert texts == [PLAIN[sampling]] * 2


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", sorted({*REGISTRY, "random"} - {"auto", "plain"}))
def test_there_was_something_to_get_wrong(name: str, sampling: str) -> None:
    """Drafts were accepted, and not all of them; what `auto` does depends on real seconds."""
    _, accepted = runs(name, "", 5, sampling)
    assert 5 < accepted < 2 * 39


def trusting(
    draft: Draft | None, rows: NodeRows, sampler: Sampler, generated: list[int]
) -> Iterator[Choice]:
    """Accepts a draft's first token whatever the target says: broken on purpose."""
    history, node = list(generated), -1
    if draft is not None:
        yield Choice(draft.tokens[0], 0)
        history, node = [*history, draft.tokens[0]], 0
    yield Choice(sampler.token(rows.row(node), history), -1)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", sorted({*REGISTRY, "random"} - {"auto", "plain"}))
def test_a_rule_that_trusts_drafts_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, sampling: str
) -> None:
    monkeypatch.setitem(RULES, "coupled", trusting)
    texts, _ = runs(name, "", 5, sampling)
    assert texts != [PLAIN[sampling]] * 2
