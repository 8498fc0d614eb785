"""The hook gives what `model.generate` gives, or says that it cannot.

An argument that is silently ignored is a bug: each is honoured or refused.
"""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import draftwise
from conftest import VOCABULARY, plain_ids, random_ids, shared_model, tiny_model
from draftwise import UsageError

OLD_NAME = "past_key_values"  # of the argument `cache`
PROMPT = [5, 6, 7, 8] * 4 + [9, 5, 6]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost curves of models that nobody meets again do not go into the user's cache."""
    monkeypatch.setenv("DRAFTWISE_CACHE", str(tmp_path))


def hooked(model: PreTrainedModel, prompt: list[int] = PROMPT, **options: Any) -> Any:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": 40} | options
    options = {"custom_generate": draftwise.custom_generate} | options
    return model.generate(ids, **options)


def hooked_ids(model: PreTrainedModel, **options: Any) -> list[int]:
    made = hooked(model, **options)
    assert made.shape[0] == 1 and made.dtype == torch.long
    assert made[0, : len(PROMPT)].tolist() == PROMPT
    return [int(t) for t in made[0, len(PROMPT) :]]


class StopsAfter:
    """A user's criterion with state: true at its n-th call."""

    def __init__(self, n: int):
        self.n, self.lengths = n, list[int]()

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.lengths.append(ids.shape[1])
        return torch.full((ids.shape[0],), len(self.lengths) >= self.n)


class StopsOnSum:
    """A user's criterion on content: the last two ids sum up to a multiple of 7."""

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return ids[:, -2:].sum(-1) % 7 == 0


class Alternates:
    """A user's processor with state: every third call forbids the lower half of the ids."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 3:
            return scores
        scores = scores.clone()
        scores[:, : VOCABULARY // 2] = -float("inf")
        return scores


def written(n: int) -> list[int]:
    return plain_ids(shared_model("llama"), PROMPT, n)


GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"max_new_tokens": 1},
    "repetition penalty": {"repetition_penalty": 1.4},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[written(3)[2]], [written(8)[6], written(8)[7]]]},
    "forced": {"forced_eos_token_id": 3, "eos_token_id": 3},
    "suppressed": {"suppress_tokens": written(4), "begin_suppress_tokens": [1]},
    "bias": {"sequence_bias": [[[7], 9.0]]},
    "eos": {"eos_token_id": written(6)[5], "pad_token_id": 0},
    "eos list": {"eos_token_id": [written(9)[8], written(6)[5]], "pad_token_id": 0},
    "min new tokens": {"eos_token_id": written(6)[5], "min_new_tokens": 20, "pad_token_id": 0},
    "min length": {"eos_token_id": written(6)[5], "min_length": 30, "pad_token_id": 0},
    "max length": {"max_length": len(PROMPT) + 13, "max_new_tokens": None},
    "max time": {"max_time": 3600.0},
    "static cache": {"cache_implementation": "static"},
    "decay": {"exponential_decay_length_penalty": (5, 1.5), "eos_token_id": 3, "pad_token_id": 0},
}


@pytest.mark.parametrize("options", GREEDY.values(), ids=GREEDY)
def test_greedy_ids_are_those_of_generate(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    expected = plain_ids(llama, PROMPT, 40, **options)
    assert hooked_ids(llama, **options) == expected


def test_greedy_ids_are_those_of_generate_in_every_family(chain_model: PreTrainedModel) -> None:
    assert hooked_ids(chain_model) == plain_ids(chain_model, PROMPT, 40)


def test_a_model_that_cannot_roll_back_is_run_plainly(plain_model: PreTrainedModel) -> None:
    model = copy.deepcopy(plain_model)
    with pytest.warns(UserWarning, match="speculation is off"):
        ids = hooked_ids(model)
    assert ids == plain_ids(plain_model, PROMPT, 40)


def test_recurrent_models_give_the_ids_of_generate(recurrent_model: PreTrainedModel) -> None:
    model = copy.deepcopy(recurrent_model)
    assert hooked_ids(model) == plain_ids(recurrent_model, PROMPT, 40)


def test_a_users_criteria_see_every_token_once(llama: PreTrainedModel) -> None:
    for make in (lambda: StopsAfter(11), StopsOnSum):
        ours, theirs = make(), make()
        ids = hooked_ids(llama, stopping_criteria=StoppingCriteriaList([ours]))
        assert ids == plain_ids(llama, PROMPT, 40, stopping_criteria=StoppingCriteriaList([theirs]))
        assert len(ids) < 40
        assert vars(ours) == vars(theirs)


def test_a_users_stateful_processor_sees_every_token_once(llama: PreTrainedModel) -> None:
    ours, theirs = Alternates(), Alternates()
    ids = hooked_ids(llama, logits_processor=LogitsProcessorList([ours]))
    assert ids == plain_ids(llama, PROMPT, 40, logits_processor=LogitsProcessorList([theirs]))
    assert ours.calls == theirs.calls == 40


def test_allowed_tokens_are_honoured(llama: PreTrainedModel) -> None:
    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        return list(range(int(ids[-1]) % 5, VOCABULARY, 5))

    ids = hooked_ids(llama, prefix_allowed_tokens_fn=allowed)
    assert ids == plain_ids(llama, PROMPT, 40, prefix_allowed_tokens_fn=allowed)


def test_sampling_from_one_token_is_greedy(llama: PreTrainedModel) -> None:
    assert hooked_ids(llama, do_sample=True, top_k=1) == plain_ids(llama, PROMPT, 40)


def test_sampled_ids_follow_torchs_seed(llama: PreTrainedModel) -> None:
    def ids(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return hooked_ids(llama, do_sample=True, temperature=1.2, top_k=50)

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)
    torch.manual_seed(1)
    first, second = (hooked_ids(llama, do_sample=True, top_k=50) for _ in range(2))
    assert first != second


def test_sampled_texts_have_the_models_distribution(llama: PreTrainedModel) -> None:
    """Three tokens from the best two each time: eight texts, of known probabilities."""
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for ids, p in expected.items():
            with torch.inference_mode():
                logits = llama(input_ids=torch.tensor([[*PROMPT, *ids]])).logits[0, -1] / 1.5
            best = logits.topk(2)
            shares = best.values.softmax(-1).tolist()
            for token, share in zip(best.indices.tolist(), shares, strict=True):
                longer[(*ids, token)] = p * share
        expected = longer
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 2, "temperature": 1.5, "max_new_tokens": 3}
    n = 300
    seen = Counter(tuple(hooked_ids(llama, **options)) for _ in range(n))
    assert seen.keys() <= expected.keys()
    observed = [seen[ids] for ids in expected]
    assert stats.chisquare(observed, [n * p for p in expected.values()]).pvalue > 1e-3


def test_a_dictionary_is_returned_where_asked_for(llama: PreTrainedModel) -> None:
    made = hooked(llama, return_dict_in_generate=True)
    expected = llama.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, return_dict_in_generate=True
    )
    assert type(made) is type(expected)
    assert torch.equal(made.sequences, expected.sequences)


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "num_return_sequences": {"num_return_sequences": 2, "do_sample": True},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "gaps": {"attention_mask": torch.tensor([[1, 0] + [1] * (len(PROMPT) - 2)])},
    "no prompt": {"attention_mask": torch.zeros(1, len(PROMPT), dtype=torch.long)},
    "use_cache": {"use_cache": False},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "positions": {"position_ids": torch.arange(3, 3 + len(PROMPT))[None]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_hook_cannot_honour_it_refuses(llama: PreTrainedModel, name: str) -> None:
    with pytest.raises(UsageError, match=r"custom_generate does not support") as caught:
        hooked(llama, **REFUSED[name])
    assert "\n" not in str(caught.value)


def test_attention_outputs_are_refused() -> None:
    model = tiny_model("llama", attn_implementation="eager")
    with pytest.raises(UsageError, match="output_attentions"):
        hooked(model, output_attentions=True, return_dict_in_generate=True)


def test_embeddings_as_prompt_are_refused(llama: PreTrainedModel) -> None:
    embeds = llama.get_input_embeddings()(torch.tensor([PROMPT]))
    with pytest.raises(UsageError):
        llama.generate(
            inputs_embeds=embeds, custom_generate=draftwise.custom_generate, max_new_tokens=4
        )


def test_a_cache_of_the_callers_is_refused_and_not_touched(any_model: PreTrainedModel) -> None:
    """It would stay empty, and its owner means to go on from it."""
    named = "cache" if "cache" in inspect.signature(any_model.forward).parameters else OLD_NAME
    cache = DynamicCache(config=any_model.config)
    with pytest.raises(UsageError, match="would stay empty"):
        hooked(any_model, **{named: cache})
    with torch.inference_mode():
        expected = any_model(input_ids=torch.tensor([PROMPT[:5]])).logits
        logits = any_model(input_ids=torch.tensor([PROMPT[:5]]), **{named: cache}).logits
    assert torch.equal(logits, expected), "the empty cache was written to"
    with pytest.raises(UsageError, match="already holds tokens"):
        hooked(any_model, **{named: cache})


def test_unknown_model_inputs_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="token_type_ids"):
        draftwise.custom_generate(
            llama,
            torch.tensor([PROMPT]),
            generation_config=llama.generation_config,
            token_type_ids=torch.zeros(1, 3),
        )


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    model = tiny_model("llama", max_position_embeddings=len(PROMPT))
    with pytest.raises(UsageError, match="context holds"):
        hooked(model)


def test_the_users_objects_are_as_they_were() -> None:
    model = tiny_model("llama")
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens, config.repetition_penalty = 20, 1.2
    mask = torch.ones(1, len(PROMPT), dtype=torch.long)
    processors, criteria = LogitsProcessorList([Alternates()]), StoppingCriteriaList()
    before = copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict()))
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    attributes, given = sorted(vars(model)), config.to_dict()
    ids = torch.tensor([PROMPT])
    model.generate(
        ids,
        attention_mask=mask,
        generation_config=config,
        logits_processor=processors,
        stopping_criteria=criteria,
        custom_generate=draftwise.custom_generate,
    )
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before
    assert config.to_dict() == given
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    assert sorted(vars(model)) == attributes
    assert not model.training
    assert ids[0].tolist() == PROMPT and bool(mask.all())
    assert len(processors) == 1 and len(criteria) == 0


def test_the_users_model_goes_with_its_last_reference() -> None:
    model = tiny_model("llama")
    hooked(model)
    draftwise.generate(model, None, PROMPT, max_new_tokens=5)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_was_learned_is_kept_between_calls(llama: PreTrainedModel) -> None:
    hooked(llama)
    first = draftwise.hooks._wrap(llama)
    hooked(llama)
    draftwise.generate(llama, None, PROMPT, max_new_tokens=5)
    assert draftwise.hooks._wrap(llama) is first
    assert not first.engine._sequences  # type: ignore[attr-defined]


# draftwise.generate


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append((tuple(value.shape), value.dtype, value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("policy", ["plain", "fixed:5", "auto"])
@pytest.mark.parametrize("n", [1, 2, 40])
def test_a_streamer_gets_what_generate_would_give_it(
    llama: PreTrainedModel, policy: str, n: int
) -> None:
    ours, theirs = Recorder(), Recorder()
    plain_ids(llama, PROMPT, n, streamer=theirs)
    result = draftwise.generate(llama, None, PROMPT, max_new_tokens=n, policy=policy, streamer=ours)
    assert ours.calls == theirs.calls
    assert len(result.token_ids) == n


def test_a_streamer_of_the_hook_gets_what_generate_would_give_it(llama: PreTrainedModel) -> None:
    ours, theirs, direct = Recorder(), Recorder(), Recorder()
    plain_ids(llama, PROMPT, 40, streamer=theirs)
    assert hooked_ids(llama, streamer=ours) == written(40)
    assert ours.calls == theirs.calls

    def between(model: PreTrainedModel, *args: Any, **options: Any) -> Any:
        return draftwise.custom_generate(model, *args, **options)

    ours = Recorder()
    assert hooked_ids(llama, streamer=ours, custom_generate=between) == written(40)
    assert ours.calls == theirs.calls
    config = GenerationConfig(max_length=len(PROMPT) + 40)
    ids = torch.tensor([PROMPT])
    draftwise.custom_generate(llama, ids, generation_config=config, streamer=direct)
    assert direct.calls == theirs.calls[1:]  # the prompt is put by transformers


@pytest.mark.parametrize("policy", ["plain", "fixed:5"])
def test_a_streamer_gets_the_ids_of_a_text_that_a_stop_string_ends(
    llama: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast, policy: str
) -> None:
    """Inside a block, across tokens: as transformers, it is given the stop string's ids too."""
    for seed in itertools.count():
        prompt = random_ids(12, seed)
        ids = plain_ids(llama, prompt, 30)
        read = [byte_tokenizer.decode([i]) for i in ids]
        places = [i for i in range(5, 25) if (read[i] + read[i + 1]).isalpha()]
        if places:
            break
    stop = read[places[0]][-1] + read[places[0] + 1][0]
    ours, theirs = Recorder(), Recorder()
    plain_ids(llama, prompt, 30, streamer=theirs, stop_strings=[stop], tokenizer=byte_tokenizer)
    result = draftwise.generate(
        llama,
        byte_tokenizer,
        prompt,
        drafters=("lookup", llama),
        policy=policy,
        max_new_tokens=30,
        stop=[stop],
        streamer=ours,
    )
    assert ours.calls == theirs.calls
    assert len(result.token_ids) <= places[0] + 2 and stop not in result.text


def test_a_text_streamer_reads_as_with_generate(
    llama: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = []
    prompt = byte_tokenizer.encode("a story")
    for ours in (True, False):
        streamer = TextIteratorStreamer(byte_tokenizer, skip_prompt=True, timeout=60)
        if ours:
            draftwise.generate(
                llama, byte_tokenizer, "a story", max_new_tokens=30, streamer=streamer
            )
        else:
            plain_ids(llama, prompt, 30, streamer=streamer)
        texts.append("".join(streamer))
    assert texts[0] == texts[1] != ""


def test_generate_takes_texts_options_processors_and_criteria(
    llama: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = byte_tokenizer.encode("a story")
    ours, theirs = Alternates(), Alternates()
    result = draftwise.generate(
        llama,
        byte_tokenizer,
        "a story",
        max_new_tokens=30,
        repetition_penalty=1.3,
        logits_processor=[ours],
        stopping_criteria=[StopsAfter(17)],
    )
    expected = plain_ids(
        llama,
        prompt,
        30,
        repetition_penalty=1.3,
        logits_processor=LogitsProcessorList([theirs]),
        stopping_criteria=StoppingCriteriaList([StopsAfter(17)]),
    )
    assert len(expected) == 17
    assert list(result.token_ids) == expected
    assert result.text == byte_tokenizer.decode(expected)
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("drafters", [("lookup",), ("suffix", "lookup")])
def test_generate_takes_other_drafters(llama: PreTrainedModel, drafters: tuple[str, ...]) -> None:
    result = draftwise.generate(
        llama, None, PROMPT, drafters=drafters, policy="fixed:4", max_new_tokens=30
    )
    assert list(result.token_ids) == written(30)
    assert set(result.stats.by_drafter) <= set(drafters)


def test_generate_refuses_what_it_does_not_know(llama: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="did you mean 'max_new_tokens'"):
        draftwise.generate(llama, None, PROMPT, max_tokens=3)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="tokenizer"):
        draftwise.generate(llama, None, "text")


@pytest.mark.parametrize("name", ["batch_size", "cancel", "reuse", "trace"])
def test_what_a_model_of_ours_alone_takes_is_refused(llama: PreTrainedModel, name: str) -> None:
    options: dict[str, Any] = {name: 2}
    with pytest.raises(UsageError, match=rf"does not take {name}: draftwise.Model\("):
        draftwise.generate(llama, None, [[1], [2]], **options)


def test_the_hooks_documentation_states_its_limits() -> None:
    said = " ".join((draftwise.hooks.__doc__ or "").split())
    assert "`stop_strings` raise" in said


def test_the_limits_of_the_hook_are_as_documented(
    llama: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        hooked(llama, stop_strings=["x"], tokenizer=byte_tokenizer)


def test_what_the_user_changes_in_the_model_counts_from_the_next_call() -> None:
    model = tiny_model("llama", seed=3)
    first = draftwise.generate(model, None, PROMPT, max_new_tokens=20).token_ids
    model.generation_config.eos_token_id = first[4]
    again = draftwise.generate(model, None, PROMPT, max_new_tokens=20)
    assert again.token_ids == first[: first.index(first[4]) + 1]
    assert again.finish_reason == "stop"
    model.generation_config.eos_token_id = None
    model.resize_token_embeddings(VOCABULARY + 10)
    ids = [*PROMPT, VOCABULARY + 9]
    assert len(draftwise.generate(model, None, ids, max_new_tokens=5).token_ids) == 5


def test_a_wrong_model_is_told_from_a_right_one(llama: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="takes a transformers model"):
        draftwise.generate(draftwise.Model(llama, None), None, PROMPT)  # type: ignore[arg-type]
