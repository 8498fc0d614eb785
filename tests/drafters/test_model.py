"""The model drafter's cache follows the text exactly, and draft and target choose alike.

A drafter with the target's own weights is right every time, unless its cache, its positions or its
noise are off: acceptance below 100 % is a bug. After rejections its drafts must be what a fresh
model would write.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import entropy
from transformers import PreTrainedModel

import draftwise
from conftest import CONTEXT, VOCABULARY, plain_ids, random_ids, shared_model, tiny_model
from draftwise import Model, SamplingParams, UsageError
from draftwise.accept import RULES
from draftwise.core import Ask, Dense, Draft, Point, Request
from draftwise.drafters.model import PROMPT, ModelDrafter
from draftwise.engines.base import Verify
from draftwise.engines.transformers import TransformersEngine
from toy import Guess, ToyDrafter

SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 5}}


def drafter_of(model: PreTrainedModel, vocabulary: int = VOCABULARY) -> ModelDrafter:
    return ModelDrafter(TransformersEngine(model), vocabulary)


def request(prompt: Sequence[int], seq: int = 0, **params: Any) -> Request:
    return Request(seq, tuple(prompt), SamplingParams(**params), seed=1)


def drafted(drafter: ModelDrafter, depth: int, seq: int = 0) -> Draft:
    (draft,) = drafter.propose([Ask(seq, "model", depth)], lambda of, features: True)
    return draft


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("sampling", sorted(SAMPLING))
def test_the_targets_own_weights_are_accepted_every_time(
    chain_model: PreTrainedModel, sampling: str, length: int
) -> None:
    model = Model(chain_model, None, [chain_model])
    options: dict[str, Any] = {"max_new_tokens": 205, **SAMPLING[sampling]}
    result = model.generate(random_ids(10), policy=f"fixed:{length}", **options)
    assert result.stats.acceptance == 1.0
    assert result.stats.steps == 204 // (length + 1)
    assert result.token_ids == model.generate(random_ids(10), policy="plain", **options).token_ids


def test_the_targets_own_weights_are_accepted_under_every_processor(llama: PreTrainedModel) -> None:
    model = Model(llama, None, [llama])
    result = model.generate(
        random_ids(10),
        policy="fixed:4",
        max_new_tokens=100,
        temperature=0.7,
        top_k=30,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={3: 2.0},
        seed=8,
    )
    assert result.stats.acceptance == 1.0


def test_under_rejection_the_targets_own_weights_are_accepted_every_time(
    llama: PreTrainedModel,
) -> None:
    model = Model(llama, None, [llama], acceptance="rejection")
    result = model.generate(
        random_ids(10), policy="fixed:5", max_new_tokens=120, temperature=0.9, seed=5
    )
    assert result.stats.acceptance == 1.0


def test_greedy_features_are_those_of_the_softmax(llama: PreTrainedModel) -> None:
    prompt, eos = random_ids(10), 7
    for least in (0, 5):  # with tokens still wanted, the end of the text is forbidden
        drafter = drafter_of(llama)
        params = SamplingParams(min_new_tokens=least)
        drafter.open(0, Request(0, tuple(prompt), params, seed=1, eos=frozenset([eos])))
        (draft,) = drafter.propose([Ask(0, "model", 3)], lambda of, features: True)
        for n, feature in enumerate(draft.features):
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *draft.tokens[:n]]])
                row = llama(input_ids=ids).logits[0, -1].double()
            if least:
                row[eos] = -torch.inf
            p = row.softmax(-1)
            assert feature.prob == pytest.approx(float(p.max()), rel=1e-4)
            assert feature.entropy == pytest.approx(float(torch.special.entr(p).sum()), rel=1e-4)


def test_when_drawing_the_features_are_those_of_q(llama: PreTrainedModel) -> None:
    drafter = drafter_of(llama)
    params = SamplingParams(temperature=0.7, top_k=20)
    drafter.open(0, Request(0, tuple(random_ids(10)), params, seed=1, acceptance="rejection"))
    draft = drafted(drafter, 6)
    for feature, q in zip(draft.features, draft.q, strict=True):
        assert isinstance(q, Dense)
        assert feature.prob == q.probs.max()
        assert feature.entropy == pytest.approx(entropy(q.probs))


def test_under_coupled_sampling_only_the_margin_is_known(llama: PreTrainedModel) -> None:
    drafter = drafter_of(llama)
    drafter.open(0, request(random_ids(10), temperature=0.7))
    assert all(f.prob == f.entropy == -1 and f.margin >= 0 for f in drafted(drafter, 4).features)


@pytest.mark.parametrize("prompt", [1, 3, 20, PROMPT + 20])
def test_drafts_after_rejections_are_those_of_a_fresh_model(
    chain_model: PreTrainedModel, prompt: int
) -> None:
    drafter, dice = drafter_of(chain_model), random.Random(prompt)
    text = random_ids(prompt, seed=prompt)
    drafter.open(0, request(text))
    for _ in range(10):
        depth = dice.choice([1, 2, 4, 11])
        draft = list(drafted(drafter, depth).tokens)
        assert draft == plain_ids(chain_model, text, depth)
        committed = [*draft[: dice.choice([0, 0, 1, 2, depth])], dice.randrange(VOCABULARY)]
        for _ in range(dice.choice([0, 0, 1, 3])):  # steps at which it was not asked
            committed.append(dice.randrange(VOCABULARY))
        drafter.observe(0, committed)
        text += committed


@pytest.mark.parametrize("missed", [1, 2, 30, PROMPT - 1, PROMPT, PROMPT + 1, 3 * PROMPT])
def test_it_catches_up_with_any_number_of_missed_tokens(
    chain_model: PreTrainedModel, missed: int
) -> None:
    drafter, text = drafter_of(chain_model), random_ids(20, seed=2)
    drafter.open(0, request(text))
    assert drafter.stale(0) == 20
    drafted(drafter, 6)
    assert drafter.stale(0) == 1  # the last token is run again, for its logits
    new = random_ids(missed, seed=missed)
    drafter.observe(0, new[: missed // 2])
    drafter.observe(0, new[missed // 2 :])
    assert drafter.stale(0) in (missed, missed + 1)
    text += new
    assert list(drafted(drafter, 5).tokens) == plain_ids(chain_model, text, 5)


def test_only_tokens_it_lacks_are_run(chain_model: PreTrainedModel) -> None:
    drafter, rows = drafter_of(chain_model), list[int]()
    drafter.open(0, request(random_ids(20)))

    def watch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows.append(kwargs["input_ids"].shape[1])

    hook = chain_model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        draft = drafted(drafter, 6).tokens
        assert rows == [20, 1, 1, 1, 1, 1]
        # All accepted: the last drafted token was never run, nor was the bonus.
        # Some rejected: the bonus alone. Two steps without being asked: what came meanwhile.
        for committed, ran in ((6, 2), (2, 1), (0, 1), (6, 2), (1, 1)):
            drafter.observe(0, [*draft[:committed], (draft[committed % 6] + 1) % VOCABULARY])
            assert drafter.stale(0) == ran
            rows.clear()
            draft = drafted(drafter, 6).tokens
            assert rows == [ran, 1, 1, 1, 1, 1]
        drafter.observe(0, [draft[0], (draft[1] + 1) % VOCABULARY])
        drafter.observe(0, [3, 4])
        rows.clear()
        drafted(drafter, 1)
        assert rows == [3]
    finally:
        hook.remove()


def test_its_cache_serves_the_next_turn(chain_model: PreTrainedModel) -> None:
    target = shared_model("llama", 2)
    model = Model(target, None, [chain_model])
    prompt = random_ids(30, seed=7)
    for _ in range(3):
        options: dict[str, Any] = {"max_new_tokens": 16, "policy": "fixed:3"}
        result = model.generate(prompt, reuse=True, **options)
        fresh = Model(target, None, [chain_model]).generate(prompt, **options)
        assert list(result.token_ids) == plain_ids(target, prompt, 16)
        assert result.stats.verified == fresh.stats.verified
        assert result.stats.accepted == fresh.stats.accepted
        prompt = [*prompt, *result.token_ids, *random_ids(5, seed=len(prompt))]


def padded(model: PreTrainedModel, size: int, scale: float) -> PreTrainedModel:
    """The same model with its vocabulary padded to `size` by rows that are not zero."""
    made = tiny_model(model.config.model_type, vocab_size=size)
    weights = dict(model.state_dict())
    for key, own in made.state_dict().items():
        if own.shape != weights[key].shape:
            own = own.clone() * scale
            own[:VOCABULARY] = weights[key]
            weights[key] = own
    made.load_state_dict(weights)
    return made


@pytest.mark.parametrize("sampling", sorted(SAMPLING))
def test_a_draft_model_padded_beyond_the_target_proposes_no_padding(
    llama: PreTrainedModel, sampling: str
) -> None:
    draft = padded(llama, VOCABULARY + 30, 5.0)
    text = random_ids(10)
    assert any(t >= VOCABULARY for t in plain_ids(draft, text, 40))
    model = Model(llama, None, [draft])
    options: dict[str, Any] = {"max_new_tokens": 60, **SAMPLING[sampling]}
    result = model.generate(text, policy="fixed:5", **options)
    assert result.stats.acceptance == 1.0
    assert result.token_ids == model.generate(text, policy="plain", **options).token_ids


@pytest.mark.parametrize("sampling", sorted(SAMPLING))
def test_a_target_padded_beyond_the_draft_model_keeps_its_text(
    llama: PreTrainedModel, sampling: str
) -> None:
    target = padded(llama, VOCABULARY + 30, 2.0)
    model = Model(target, None, [llama])
    options: dict[str, Any] = {"max_new_tokens": 60, **SAMPLING[sampling]}
    prompt = [VOCABULARY + 3, *random_ids(10), VOCABULARY + 29]
    result = model.generate(prompt, policy="fixed:5", **options)
    assert any(t >= VOCABULARY for t in result.token_ids)
    assert result.token_ids == model.generate(prompt, policy="plain", **options).token_ids
    if sampling == "greedy":
        assert list(result.token_ids) == plain_ids(target, prompt, 60)


@pytest.mark.parametrize("policy", ["fixed:5", "auto"])
@pytest.mark.parametrize("prompt", [10, 47, 48, 49, 60])
def test_a_full_draft_context_ends_drafting_and_not_the_text(
    llama: PreTrainedModel, policy: str, prompt: int
) -> None:
    draft, most = tiny_model("llama", max_position_embeddings=48), 0

    def watch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal most
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        most = max(most, cache.get_seq_length() + kwargs["input_ids"].shape[1])

    model = Model(llama, None, [draft])
    draft.register_forward_pre_hook(watch, with_kwargs=True)
    text = random_ids(prompt, seed=prompt)
    result = model.generate(text, max_new_tokens=60, policy=policy)
    assert list(result.token_ids) == plain_ids(llama, text, 60)
    assert most <= 48
    assert (result.stats.verified > 0) or prompt >= 47 or policy == "auto"
    assert result.stats.plain_steps > 0


def test_drafting_goes_up_to_the_last_position_of_the_draft_context() -> None:
    draft = tiny_model("llama", max_position_embeddings=48)
    drafter = drafter_of(draft)
    drafter.open(0, request(random_ids(44)))
    assert drafter.room(0) == 4
    assert len(drafted(drafter, 20).tokens) == 4
    drafter.observe(0, [1, 2, 3, 4, 5])
    assert drafter.room(0) < 1
    assert drafter.propose([Ask(0, "model", 5)], lambda of, features: True) == []


class Counting:
    """A processor with state: it bans the token that its own call count names."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(ids.shape[1])
        scores = scores.clone()
        scores[:, len(self.lengths) % VOCABULARY] = 1e4 if len(self.lengths) % 3 == 0 else -1e4
        return scores


@pytest.mark.parametrize("policy", ["plain", "fixed:5", "auto"])
def test_a_users_processor_is_called_once_a_token_and_never_by_the_drafter(
    llama: PreTrainedModel, policy: str
) -> None:
    counting, twin = Counting(), Counting()
    result = draftwise.generate(
        llama,
        None,
        [1, 2, 3],
        drafters=[shared_model("llama", 0), "lookup"],
        policy=policy,
        logits_processor=[counting],
        max_new_tokens=40,
    )
    assert counting.lengths == list(range(3, 43))
    assert list(result.token_ids) == plain_ids(llama, [1, 2, 3], 40, logits_processor=[twin])


@pytest.mark.parametrize("sampling", sorted(SAMPLING))
@pytest.mark.parametrize("drafts", ["bfloat16 draft", "bfloat16 target"])
def test_draft_and_target_may_differ_in_dtype(
    llama: PreTrainedModel, drafts: str, sampling: str
) -> None:
    half = copy.deepcopy(llama).to(torch.bfloat16)
    if drafts == "bfloat16 target":
        # Rounding differs with the width in half precision, so only the machinery is checked.
        result = Model(half, None, [llama]).generate([1, 2, 3], policy="fixed:5", max_new_tokens=60)
        assert len(result.token_ids) == 60 and result.stats.accepted > 0
        return
    model = Model(llama, None, [half])
    options: dict[str, Any] = {"max_new_tokens": 60, **SAMPLING[sampling]}
    result = model.generate([1, 2, 3], policy="fixed:5", **options)
    assert result.stats.accepted > 0
    assert result.token_ids == model.generate([1, 2, 3], policy="plain", **options).token_ids


@pytest.mark.parametrize("sampling", sorted(SAMPLING))
def test_families_of_target_and_draft_may_differ(
    chain_model: PreTrainedModel, llama: PreTrainedModel, sampling: str
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, **SAMPLING[sampling]}
    model = Model(llama, None, [chain_model])
    result = model.generate(random_ids(20), policy="fixed:4", **options)
    assert result.token_ids == model.generate(random_ids(20), policy="plain", **options).token_ids


def test_a_draft_stops_at_its_own_eos(llama: PreTrainedModel) -> None:
    text = random_ids(10)
    ids = plain_ids(llama, text, 6)
    eos = ids[3]
    drafter = drafter_of(llama)
    drafter.open(0, Request(0, tuple(text), SamplingParams(), 1, eos=frozenset([eos])))
    assert list(drafted(drafter, 6).tokens) == ids[: ids.index(eos) + 1]


def test_confidence_is_reported_as_it_is(llama: PreTrainedModel) -> None:
    text = random_ids(10)
    with torch.inference_mode():
        logits = llama(input_ids=torch.tensor([text])).logits[0, -1]
    drafter = drafter_of(llama)
    drafter.open(0, request(text))
    best = float(logits.softmax(-1).max())
    assert drafted(drafter, 1).features[0].prob == pytest.approx(best, rel=1e-4)


def test_a_drafter_without_rollback_is_refused_in_one_line(
    recurrent_model: PreTrainedModel,
) -> None:
    with pytest.raises(UsageError, match="rolled back"):
        drafter_of(recurrent_model)


def test_closing_leaves_no_cache_behind(llama: PreTrainedModel) -> None:
    model = Model(llama, None, [shared_model("llama", 1)])
    for _ in range(3):
        model.generate([1, 2, 3], max_new_tokens=20, policy="fixed:3")
    drafter = model.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    assert not drafter.engine._sequences and not drafter._sequences  # type: ignore[attr-defined]


def test_the_draft_models_context_is_its_own() -> None:
    drafter = drafter_of(shared_model("llama"))
    drafter.open(0, request(random_ids(20)))
    assert drafter.room(0) == CONTEXT - 20


@pytest.mark.parametrize("acceptance", sorted(RULES))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_draws_only_for_the_rules_that_judge_by_q(
    llama: PreTrainedModel, acceptance: str, temperature: float
) -> None:
    drafter = drafter_of(llama)
    params = SamplingParams(temperature=temperature)
    drafter.open(0, Request(0, tuple(random_ids(8)), params, seed=1, acceptance=acceptance))
    draft = drafted(drafter, 4)
    draws = acceptance in ("rejection", "block") and temperature > 0
    assert all(isinstance(q, Dense if draws else Point) for q in draft.q)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "block"])
def test_only_common_ids_are_drafted_where_the_request_has_no_others(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, acceptance: str
) -> None:
    common = 120
    monkeypatch.setattr("draftwise.drafters.model.COMMON", common)
    drafter = drafter_of(llama)
    for seq, prompt in enumerate([[t % common for t in random_ids(40)], random_ids(40)]):
        params = SamplingParams(temperature=1.5)
        drafter.open(seq, Request(seq, tuple(prompt), params, seed=1, acceptance=acceptance))
        tokens = [t for _ in range(30) for t in _drafted_and_taken(drafter, seq)]
        assert (max(tokens) < common) == (seq == 0)


def _drafted_and_taken(drafter: ModelDrafter, seq: int) -> Sequence[int]:
    draft = drafted(drafter, 3, seq)
    drafter.observe(seq, draft.tokens)
    return draft.tokens


def test_leaving_rare_ids_out_leaves_the_text_as_it_is(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwise.drafters.model.COMMON", 120)
    prompt = [t % 120 for t in random_ids(20)]
    model = Model(llama, None, [llama])
    for options in SAMPLING.values():
        result = model.generate(prompt, policy="fixed:3", max_new_tokens=60, **options)
        plain = model.generate(prompt, policy="plain", max_new_tokens=60, **options)
        assert result.token_ids == plain.token_ids
        assert 0 < result.stats.accepted < result.stats.verified


def test_an_index_that_is_drafted_again_gets_new_noise(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long a draft became depends on what was drawn: a policy that remembers it would know the
    draw of an index that is drawn again with the same noise, and shift the text's distribution."""
    from draftwise.drafters import model as module

    keys: list[tuple[Any, ...]] = []
    real = module.key

    def noted(*args: Any, **kwargs: Any) -> int:
        keys.append((args, tuple(kwargs.items())))
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "key", noted)
    drafter = drafter_of(llama)
    params = SamplingParams(temperature=1.0)
    drafter.open(0, Request(0, tuple(random_ids(8)), params, seed=1, acceptance="rejection"))
    for _ in range(6):
        draft = drafted(drafter, 4)
        drafter.observe(0, [(draft.tokens[0] + 1) % VOCABULARY])
    assert len(keys) == 24
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("kind", ["empty", "deep", "tree"])
def test_whatever_guesses_the_draft_is_the_same(llama: PreTrainedModel, kind: str) -> None:
    text = random_ids(10)
    alone = drafter_of(llama)
    alone.open(0, request(text))
    expected = drafted(alone, 6)
    drafter, right = drafter_of(llama), expected.tokens

    def guess(generated: list[int], known: list[int], depth: int) -> Guess:
        at = len(known) - len(text)
        if kind == "empty":
            return Guess([])
        if kind == "deep":
            return Guess([*right[at:], *random_ids(100)])
        return Guess([7, *right[at : at + 1]], [-1, -1][: 1 + len(right[at : at + 1])])

    guesser = ToyDrafter(guess, "guesser")
    guesser.open(0, request(text))
    drafter.guess_with([guesser], lambda width, context: 1.0)
    drafter.open(0, request(text))
    assert drafted(drafter, 6).tokens == right
    assert max(drafted(drafter, 6).forwards) <= len(text) + 6


def test_several_sequences_are_drafted_for_in_the_same_forwards(llama: PreTrainedModel) -> None:
    """Level by level; each ends by itself, and each draft is the one it is alone."""
    work: list[list[int]] = []

    class Counted(TransformersEngine):
        def forward(self, some: Any) -> Any:
            work.append([w.seq for w in some if isinstance(w, Verify)])
            return super().forward(some)

    drafter = ModelDrafter(Counted(llama), VOCABULARY)
    params = SamplingParams(max_new_tokens=40, temperature=0.8, seed=3)
    prompts = {1: (5, 6, 7), 2: tuple(random_ids(90, 1)), 3: (9,)}
    for seq, prompt in prompts.items():
        drafter.open(seq, Request(seq, prompt, params, 3))
        drafter.observe(seq, [4])
    asks = [Ask(1, "model", 5), Ask(2, "model", 2), Ask(3, "model", 4)]
    together = drafter.propose(asks, lambda seq, features: True)
    assert [some for some in work if some] == [[1, 2, 3], [1, 2, 3], [1, 3], [1, 3], [1]]
    assert [draft.seq for draft in together] == [1, 2, 3]
    alone = [drafter.propose([ask], lambda seq, features: True)[0] for ask in asks]
    assert [draft.tokens for draft in alone] == [draft.tokens for draft in together]
    for seq in prompts:
        drafter.close(seq)
