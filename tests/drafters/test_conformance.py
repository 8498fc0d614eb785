"""What every drafter must do. Registering one enrols it here: it needs a line in BUILDERS."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from conftest import VOCABULARY, plain_ids, random_ids, shared_model
from draftwise import Model, SamplingParams
from draftwise.core import Ask, Draft, Features, Request
from draftwise.drafters import REGISTRY, Drafter
from draftwise.drafters.lookup import Lookup
from draftwise.drafters.model import ModelDrafter
from draftwise.drafters.recycling import Recycling
from draftwise.drafters.suffix import Suffix
from draftwise.engines.base import Top
from draftwise.engines.transformers import TransformersEngine


class Taught(Recycling):
    """Told what a target thinks that foretells every text."""

    def open(self, seq: int, request: Request) -> None:
        super().open(seq, request)
        self._foretell(seq, request.prompt)

    def observe(self, seq: int, committed: Sequence[int]) -> None:
        self._foretell(seq, [self._last[seq], *committed])
        super().observe(seq, committed)

    def _foretell(self, seq: int, text: Sequence[int]) -> None:
        for token, following in itertools.pairwise(text):
            self.learn(seq, [token], Top(np.array([[following]]), np.zeros((1, 1))))


BUILDERS: dict[str, Callable[[], Drafter]] = {
    "lookup": Lookup,
    "suffix": Suffix,
    "recycling": Taught,
    "model": lambda: ModelDrafter(TransformersEngine(shared_model("llama", 1)), VOCABULARY),
}
# The same without what is meant to last from one request to the next.
FORGETFUL: dict[str, Callable[[], Drafter]] = BUILDERS | {
    "suffix": lambda: Suffix(store=0),
    "recycling": lambda: Taught(shared=False),
}

TEXT = [*random_ids(20, seed=1), 5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]


@pytest.fixture(params=sorted(REGISTRY))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    assert found in BUILDERS, f"give drafter {found!r} a line in BUILDERS"
    return found


def start(
    drafter: Drafter, text: Sequence[int], prompt: int | None = None, seq: int = 0, **params: Any
) -> None:
    """Opens a sequence whose first `prompt` tokens are the prompt and the rest was generated."""
    prompt = len(text) if prompt is None else prompt
    request = Request(seq, tuple(text[:prompt]), SamplingParams(**params), seed=3)
    drafter.open(seq, request)
    for token in text[prompt:]:
        drafter.observe(seq, [token])


def propose(drafter: Drafter, depth: int = 6, seq: int = 0, go: bool = True) -> Draft | None:
    def answer(of: int, features: Features) -> bool:
        assert of == seq and isinstance(features, Features)
        return go

    drafts = drafter.propose([Ask(seq, drafter.name, depth)], answer)
    assert len(drafts) <= 1
    return drafts[0] if drafts else None


def assert_same(one: Draft | None, other: Draft | None) -> None:
    """Equal up to the rounding of what a model computes."""
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert (one.tokens, one.parents) == (other.tokens, other.parents)
        for a, b in zip(one.features, other.features, strict=True):
            assert tuple(a) == pytest.approx(tuple(b), rel=1e-3, abs=1e-3)


def test_the_tests_know_every_drafter() -> None:
    assert BUILDERS.keys() == REGISTRY.keys()


def test_instances_bear_the_name_they_are_registered_by(name: str) -> None:
    assert BUILDERS[name]().name == name


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("depth", [1, 2, 5, 17])
def test_a_draft_is_a_tree_of_known_tokens_no_larger_than_asked(
    name: str, depth: int, temperature: float
) -> None:
    drafter = BUILDERS[name]()
    start(drafter, TEXT, 25, temperature=temperature)
    draft = propose(drafter, depth)
    assert draft is not None, "this text repeats itself, every drafter has something to say"
    assert 1 <= len(draft.tokens) <= depth
    assert (draft.seq, draft.drafter) == (0, drafter.name)
    assert all(0 <= t < VOCABULARY for t in draft.tokens)
    assert all(-1 <= parent < i for i, parent in enumerate(draft.parents))
    siblings = list(zip(draft.parents, draft.tokens, strict=True))
    assert len(set(siblings)) == len(siblings)
    for f in draft.features:
        assert f.match >= 0 and 0 <= f.share <= 1 and f.prob <= 1 + 1e-6


def test_a_serial_drafter_stops_when_told_and_retrieval_does_not_ask(name: str) -> None:
    drafter = BUILDERS[name]()
    start(drafter, TEXT)
    draft = propose(drafter, 4, go=False)
    assert draft is not None
    assert len(draft.tokens) == (1 if drafter.serial else 4)


def test_proposing_does_not_change_later_proposals(name: str) -> None:
    asked, silent = BUILDERS[name](), BUILDERS[name]()
    start(asked, TEXT[:10])
    start(silent, TEXT[:10])
    for i, token in enumerate(TEXT[10:]):
        first = propose(asked, 1 + i % 7)
        assert_same(propose(asked, 1 + i % 7), first)
        for drafter in (asked, silent):
            drafter.observe(0, [token])
    assert_same(propose(asked), propose(silent))


def test_a_rejected_draft_leaves_no_trace(name: str) -> None:
    drafter = BUILDERS[name]()
    start(drafter, TEXT[:12])
    text = TEXT[:12]
    for i in range(12):
        draft = propose(drafter, 5)
        kept = list(draft.tokens[: i % 4]) if draft else []
        committed = [*kept, (i * 37) % VOCABULARY]
        drafter.observe(0, committed)
        text += committed
    fresh = BUILDERS[name]()
    start(fresh, text, 12)
    assert_same(propose(drafter), propose(fresh))


# Places that a text may come back to: one that goes on in one way, one that goes on in two.
ONCE, TWICE = list(range(100, 140)), [11, 1, 2, 3, 13, 14, 15, 16, 17, 12, 1, 2, 4, 18, 19, 20, 21]


@pytest.mark.parametrize("siblings", [0, 3])
@pytest.mark.parametrize("place", [ONCE, TWICE])
def test_what_comes_after_tokens_is_as_if_they_had_been_observed(
    name: str, place: list[int], siblings: int
) -> None:
    """Where the text held what they repeat: they are not indexed themselves."""
    asked = BUILDERS[name]()
    if asked.serial or hasattr(asked, "rows"):
        return  # a model's draft begins at the end of the text, and what is observed teaches more
    start(asked, [*place, 50])
    for at in range(5):
        for length in range(1, 4):
            after, told = tuple(place[at : at + length]), BUILDERS[name]()
            start(told, [*place, 50, *place[: at + length]], len(place) + 1)
            (one,) = asked.propose([Ask(0, name, 4, after, siblings)], never)
            (two,) = told.propose([Ask(0, name, 4, siblings=siblings)], never)
            assert (one.tokens, one.parents) == (two.tokens, two.parents)
            assert one.features == two.features
            assert one.after == after and two.after == ()
            assert list(one.main().tokens) == place[at + length :][:4]
        asked.observe(0, place[at : at + 1])


def never(of: int, features: Features) -> bool:
    return False


def test_asking_for_more_changes_no_later_proposal(name: str) -> None:
    asked, silent = BUILDERS[name](), BUILDERS[name]()
    for drafter in (asked, silent):
        start(drafter, TEXT[:10])
    for i, token in enumerate(TEXT[10:]):
        after = () if asked.serial else tuple(TEXT[i : i + i % 4])
        for siblings in (0, 3):
            asked.propose([Ask(0, name, 1 + i % 7, after, siblings)], never)
        assert_same(propose(asked), propose(silent))
        for drafter in (asked, silent):
            drafter.observe(0, [token])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_siblings_stand_beside_the_same_main_chain(name: str, temperature: float) -> None:
    drafter = BUILDERS[name]()
    start(drafter, TEXT, 25, temperature=temperature)
    (bushy,) = drafter.propose([Ask(0, name, 6, siblings=3)], lambda of, features: True)
    bare = propose(drafter)
    assert bare is not None and bushy.main().tokens[: len(bare.tokens)] == bare.tokens
    children = list(zip(bushy.parents, bushy.tokens, strict=True))
    assert len(set(children)) == len(children)


def test_nothing_of_a_request_reaches_the_next_shorter_one(name: str) -> None:
    used, fresh = FORGETFUL[name](), FORGETFUL[name]()
    start(used, random_ids(200, seed=4) + TEXT)
    propose(used)
    used.observe(0, [9, 9, 9])
    used.close(0)
    for drafter in (used, fresh):
        start(drafter, [5, 6, 5])
    for token in (6, 7, 5, 6):
        assert_same(propose(used), propose(fresh))
        assert used.stale(0) == fresh.stale(0) and used.room(0) == fresh.room(0)
        for drafter in (used, fresh):
            drafter.observe(0, [token])


def test_open_sequences_do_not_see_each_other(name: str) -> None:
    both, alone = FORGETFUL[name](), FORGETFUL[name]()
    start(both, TEXT, seq=1)
    start(both, random_ids(50, seed=5), seq=2)
    start(alone, TEXT, seq=1)
    for token in (8, 5, 6):
        propose(both, seq=2)
        assert_same(propose(both, seq=1), propose(alone, seq=1))
        both.observe(2, [token + 1, 1, 2])
        for drafter in (both, alone):
            drafter.observe(1, [token])


def test_closing_forgets_the_sequence(name: str) -> None:
    drafter = BUILDERS[name]()
    request = Request(0, tuple(TEXT), SamplingParams(), seed=3)
    gone = weakref.ref(request)
    drafter.open(0, request)
    propose(drafter)
    drafter.close(0)
    del request
    gc.collect()
    assert gone() is None
    assert not [k for k, v in vars(drafter).items() if isinstance(v, dict) and 0 in v]
    drafter.close(0)  # a request that ends before it met the drafter is closed too
    start(drafter, [1, 2, 1])
    propose(drafter)


def test_memory_counts_what_a_sequence_holds(name: str) -> None:
    drafter = FORGETFUL[name]()
    before = drafter.memory()
    assert isinstance(before, int) and before >= 0
    start(drafter, random_ids(100))
    propose(drafter)
    short = drafter.memory()
    start(drafter, random_ids(400, seed=2), seq=1)
    propose(drafter, seq=1)
    assert drafter.memory() - short > short - before > 0
    drafter.close(1)
    drafter.close(0)
    assert drafter.memory() == before


@pytest.mark.parametrize("prompt", [[7], [7, 7], [0], [VOCABULARY - 1]])
def test_the_shortest_prompts_are_served(name: str, prompt: list[int]) -> None:
    drafter = BUILDERS[name]()
    start(drafter, prompt)
    for token in (7, 7, 3, 7):
        propose(drafter, 8)
        drafter.observe(0, [token])
    draft = propose(drafter, 8)
    assert draft is not None and len(draft.tokens) <= 8


def test_features_and_masses_are_immutable_values(name: str) -> None:
    drafter = BUILDERS[name]()
    start(drafter, TEXT)
    draft = propose(drafter)
    assert draft is not None
    assert isinstance(draft.tokens, tuple) and isinstance(draft.parents, tuple)
    assert all(type(t) is int for t in draft.tokens)


def build(names: Sequence[str], target: PreTrainedModel) -> Model:
    return Model(target, None, [BUILDERS[name]() for name in names])


PROMPTS = ([9], TEXT)
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 11}}


@pytest.mark.parametrize("sampling", sorted(SAMPLING))
@pytest.mark.parametrize("policy", ["fixed:5", "auto"])
def test_the_text_is_that_of_plain_decoding(
    name: str, policy: str, sampling: str, llama: PreTrainedModel
) -> None:
    model = build([name], llama)
    for prompt in PROMPTS:
        options: dict[str, Any] = {"max_new_tokens": 40, **SAMPLING[sampling]}
        result = model.generate(prompt, policy=policy, **options)
        if sampling == "greedy":
            assert list(result.token_ids) == plain_ids(llama, prompt, 40)
        else:
            plain = model.generate(prompt, policy="plain", **options)
            assert result.token_ids == plain.token_ids


@pytest.mark.parametrize("sampling", sorted(SAMPLING))
@pytest.mark.parametrize("policy", ["auto", *(f"fixed:5:{name}" for name in sorted(REGISTRY))])
def test_all_drafters_together_keep_the_text_of_plain_decoding(
    policy: str, sampling: str, llama: PreTrainedModel
) -> None:
    model = build(sorted(REGISTRY), llama)
    drafted = 0
    for prompt in PROMPTS:
        options: dict[str, Any] = {"max_new_tokens": 40, **SAMPLING[sampling]}
        result = model.generate(prompt, policy=policy, **options)
        drafted += result.stats.verified
        assert result.token_ids == model.generate(prompt, policy="plain", **options).token_ids
    assert drafted > 0 or policy == "auto"
