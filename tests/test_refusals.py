"""Every option that transformers' generate knows is honoured, changes no text, or is refused.

The lists name all fields of a generation config and all arguments of `generate`; an option that is
in none of them fails the first test, so that a new one of transformers is not ignored.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    StoppingCriteriaList,
    WatermarkingConfig,
)

import draftwise
from conftest import Run, assert_refused, plain_ids, shared_model
from draftwise import Model, SamplingParams, UsageError
from draftwise.refusals import FIELDS, INSTEAD

PROMPT = [5, 6, 7, 8] * 4 + [9, 5, 6]
SAMPLED = {"do_sample": True, "top_k": 50}
Options = dict[str, Any]

# Under the hook: what gives transformers' own text. Sampled ones are compared with one token left.
HONOURED: dict[str, Options] = {
    "max_length": {"max_length": len(PROMPT) + 9, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 7},
    "min_length": {"min_length": 40, "eos_token_id": 71, "pad_token_id": 0},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": 71, "pad_token_id": 0},
    "max_time": {"max_time": 3600.0},
    "do_sample": {"do_sample": True, "top_k": 1},
    "temperature": {"do_sample": True, "temperature": 0.7, "top_k": 1},
    "top_k": {"do_sample": True, "top_k": 1},
    "top_p": {"do_sample": True, "top_p": 1e-6},
    "min_p": {"do_sample": True, "min_p": 1.0},
    "top_h": {"do_sample": True, "top_h": 1e-6},
    "typical_p": {"do_sample": True, "typical_p": 1e-6},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 0.99},
    "eta_cutoff": {"do_sample": True, "eta_cutoff": 0.99, "top_k": 1},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 9.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {
        "encoder_no_repeat_ngram_size": 1,
        "sequence_bias": [[[7], 90.0]],
    },
    "bad_words_ids": {"bad_words_ids": [[71], [142, 39]]},
    "renormalize_logits": {"renormalize_logits": True},
    "forced_eos_token_id": {"forced_eos_token_id": 3},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (5, 1.5),
        "eos_token_id": 3,
        "pad_token_id": 0,
    },
    "suppress_tokens": {"suppress_tokens": [71, 142]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [278]},
    "sequence_bias": {"sequence_bias": [[[7], 9.0]]},
    "guidance_scale": {"guidance_scale": 1.7},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "eos_token_id": {"eos_token_id": [71], "pad_token_id": 0},
    # arguments
    "logits_processor": {
        "logits_processor": LogitsProcessorList(
            [MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, 71, device="cpu")]
        )
    },
    "stopping_criteria": {
        "stopping_criteria": StoppingCriteriaList([lambda ids, scores: ids[:, -1] == 209])
    },
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda batch, ids: range(9, 99)},
    "negative_prompt_ids": {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([[3, 4]])},
    "negative_prompt_attention_mask": {
        "guidance_scale": 1.7,
        "negative_prompt_ids": torch.tensor([[3, 4]]),
        "negative_prompt_attention_mask": torch.tensor([[0, 1]]),
    },
    "generation_config": {
        "generation_config": GenerationConfig(max_new_tokens=5),
        "max_new_tokens": None,
    },
}
# What cannot change a text that is not of a mode that is refused.
HARMLESS: dict[str, Options] = {
    "early_stopping": {"early_stopping": True},
    "length_penalty": {"length_penalty": 2.0},
    "diversity_penalty": {"diversity_penalty": 0.5},
    "num_beam_groups": {"num_beam_groups": 1},
    "low_memory": {"low_memory": True},
    "cache_implementation": {"cache_implementation": "static"},
    "max_cache_len": {"cache_implementation": "static", "max_cache_len": 100},
    "cache_config": {"cache_config": {}},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "compile_config": {"compile_config": CompileConfig()},
    "disable_compile": {"disable_compile": True},
    "continuous_batching_config": {"continuous_batching_config": None},
    "forced_bos_token_id": {"forced_bos_token_id": 4},  # after a prompt of one token only
    "pad_token_id": {"pad_token_id": 3},
    "bos_token_id": {"bos_token_id": 3},
    "decoder_start_token_id": {"decoder_start_token_id": 3},
    "num_assistant_tokens": {"num_assistant_tokens": 3},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "constant"},
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.9},
    "max_matching_ngram_size": {"max_matching_ngram_size": 3},
    "assistant_lookbehind": {"assistant_lookbehind": 3},
    "target_lookbehind": {"target_lookbehind": 3},
    "assistant_ensemble_weight": {},  # of assisted generation, which is refused
    "speculation_type": {},
    "output_attentions": {"output_attentions": False},
    "transformers_version": {},
    "trust_remote_code": {"trust_remote_code": False},
    "custom_generate": {},
}
REFUSED: dict[str, tuple[Options, str]] = {
    "num_beams": ({"num_beams": 2}, "beam search is not supported"),
    "num_return_sequences": (
        {"num_return_sequences": 2, "do_sample": True},
        r"generate\(\[prompt\] \* n, seed=",
    ),
    "use_mtp": ({"use_mtp": True}, "`drafters`"),
    "prompt_lookup_num_tokens": ({"prompt_lookup_num_tokens": 3}, "`drafters`"),
    "assistant_early_exit": ({"assistant_early_exit": 1}, "`drafters`"),
    "is_assistant": ({"is_assistant": True}, "`drafters`"),
    "assistant_model": ({"assistant_model": None}, "`drafters`"),  # made in the test
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
    "dola_layers": ({"dola_layers": "high"}, "dola"),
    "force_words_ids": ({"force_words_ids": [[3]]}, "constrained beam search"),
    "constraints": ({"constraints": [3]}, "constrained beam search"),
    "use_cache": ({"use_cache": False}, "caches are Draftwise's own"),
    "offloaded": ({"cache_implementation": "offloaded"}, "caches are Draftwise's own"),
    "offloaded_static": ({"cache_implementation": "offloaded_static"}, "caches are Draftwise's"),
    "output_scores": ({"output_scores": True}, "transformers' generate has the rest"),
    "output_logits": ({"output_logits": True}, "transformers' generate has the rest"),
    "output_hidden_states": ({"output_hidden_states": True}, "transformers' generate"),
    "cache": ({"cache": None}, "would stay empty"),
    "synced_gpus": ({"synced_gpus": True}, "one process"),
    "attention_mask": (
        {"attention_mask": torch.tensor([[1, 0] + [1] * (len(PROMPT) - 2)])},
        "gaps: padding may be on either side only",
    ),
    "a new option": ({"foretells": 3}, "not known to this version"),
}
# What transformers refuses before it calls us, honours itself, or never shows us.
BEFORE = {"stop_strings", "token_healing", "inputs", "self", "kwargs", "streamer"}


def hooked(model: PreTrainedModel, options: Options) -> list[int]:
    options = {"do_sample": False, "max_new_tokens": 30} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = model.generate(
            torch.tensor([PROMPT]), custom_generate=draftwise.custom_generate, **options
        )
    return [int(t) for t in getattr(made, "sequences", made)[0, len(PROMPT) :]]


def plainly(model: PreTrainedModel, options: Options) -> list[int]:
    options = {"do_sample": False, "max_new_tokens": 30} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = model.generate(torch.tensor([PROMPT]), **options)
    return [int(t) for t in getattr(made, "sequences", made)[0, len(PROMPT) :]]


def test_every_option_of_transformers_is_in_one_of_the_lists() -> None:
    known = {*HONOURED, *HARMLESS, *REFUSED, *BEFORE}
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    names |= set(inspect.signature(inspect.unwrap(GenerationMixin.generate)).parameters)
    assert names - known == set()
    assert names - {"self", "kwargs", "transformers_version"} <= FIELDS


@pytest.mark.parametrize("name", [*HONOURED, *HARMLESS])
def test_an_option_of_the_hook_gives_the_text_of_generate(
    llama: PreTrainedModel, name: str
) -> None:
    options = HONOURED[name] if name in HONOURED else HARMLESS[name]
    assert hooked(llama, options) == plainly(llama, options)


# In the others the example is more than the option: it would show in the test above.
SHOWN = {n for n, o in HONOURED.items() if "do_sample" not in o or "top_k" in o or "top_p" in o}
SHOWN -= {
    "max_time",
    "encoder_no_repeat_ngram_size",
    "remove_invalid_values",
    "return_dict_in_generate",
    "renormalize_logits",
}


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_the_examples_would_show_an_option_that_is_ignored(
    llama: PreTrainedModel, name: str
) -> None:
    """Each changes the greedy text, or makes a sampled one greedy, which is the same."""
    changed = hooked(llama, HONOURED[name])
    if "do_sample" in HONOURED[name]:
        assert changed == plain_ids(llama, PROMPT, 30)
    else:
        assert changed != plain_ids(llama, PROMPT, 30)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_hook_cannot_honour_is_refused_with_what_to_do(
    llama: PreTrainedModel, name: str
) -> None:
    options, says = REFUSED[name]
    if name.startswith("output"):
        options = options | {"return_dict_in_generate": True}
    if name == "assistant_model":
        options = {"assistant_model": shared_model("llama", 1)}
    if name == "cache":
        options = {"cache": DynamicCache(config=llama.config)}
    if name == "a new option":
        config = GenerationConfig(max_new_tokens=4)
        config.foretells = 3  # type: ignore[attr-defined]
        options = {"generation_config": config, "max_new_tokens": None}
    with pytest.raises(UsageError, match=f"custom_generate does not support .*{says}") as caught:
        hooked(llama, options)
    assert "\n" not in str(caught.value)


def test_a_quantised_cache_is_refused_by_the_hook(llama: PreTrainedModel) -> None:
    config = GenerationConfig(max_length=40, cache_implementation="quantized")
    with pytest.raises(UsageError, match="cache_implementation='quantized': caches are"):
        draftwise.custom_generate(llama, torch.tensor([PROMPT]), generation_config=config)


@pytest.mark.parametrize("name", ["pixel_values", "input_features", "token_type_ids"])
def test_inputs_beside_ids_are_refused_by_the_hook(llama: PreTrainedModel, name: str) -> None:
    with pytest.raises(UsageError, match=f"the model input {name}: only token ids"):
        draftwise.custom_generate(
            llama,
            torch.tensor([PROMPT]),
            generation_config=GenerationConfig(max_length=40),
            **{name: torch.zeros(1, 3)},
        )


def test_every_name_of_transformers_is_refused_by_name_with_what_to_do(
    llama: PreTrainedModel,
) -> None:
    known = {f.name for f in fields(SamplingParams)}
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    names |= set(inspect.signature(inspect.unwrap(GenerationMixin.generate)).parameters)
    names -= {"self", "kwargs", "transformers_version", *known}
    taken = {"logits_processor", "stopping_criteria", "streamer"}
    model = Model(llama, None, policy="plain")
    for name in sorted(names | {"pixel_values", "input_features", "cache", "past_key_values"}):
        for call in (model.generate, model.stream):
            with pytest.raises(UsageError, match=f"unknown option '{name}': ") as caught:
                call(PROMPT, **{name: 1})  # type: ignore[operator]
            assert str(caught.value).endswith(INSTEAD[name]) and "\n" not in str(caught.value)
        if name not in taken:
            with pytest.raises(UsageError, match=f"unknown option '{name}': "):
                draftwise.generate(llama, None, PROMPT, **{name: 1})


@pytest.mark.parametrize("name", ["num_beams", "max_length", "num_return_sequences", "do_sample"])
def test_the_command_line_refuses_by_name_with_what_to_do(
    run: Run, tmp_path: Path, name: str
) -> None:
    option = "--" + name.replace("_", "-")
    assert_refused(run("generate", "x", option, "2"), option, INSTEAD[name])
    (tmp_path / "c.json").write_text(f'{{"{name}": 2}}')
    ran = run("generate", "x", "--config", tmp_path / "c.json")
    assert_refused(ran, f"unknown option '{name}'", INSTEAD[name].replace("_", "-"))
