"""What `generate` of transformers takes and Draftwise does not, and what to do instead.

Nothing is ignored in silence. Of the names that transformers knows, SamplingParams has some; the
others are refused by Draftwise's own calls with a line of `INSTEAD`. Under `custom_generate` the
options arrive through transformers: what becomes a logits processor or a stopping criterion is
honoured, what only changes speed or memory of plain decoding (static caches, chunks of the prompt,
compilation) cannot change the text, and the rest is refused by `refuse`. An option that a later
version of transformers adds is refused there too, once it is set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from .core import UsageError
from .padding import counted, unbroken

if TYPE_CHECKING:
    import torch

_BEAMS = "beam search is not supported, leave it out or call transformers' generate"
_DRAFTS = "name what drafts in `drafters`, such as a draft model"
_OTHER = "only greedy decoding and sampling are supported, other modes are transformers' own"
_OUTPUTS = "only ids and text are returned, transformers' generate has the rest"
_CACHES = "caches are Draftwise's own, and `reuse` keeps them for a text that goes on"
_HOOK = "give it to model.generate(..., custom_generate=draftwise.custom_generate)"
_TEXT = "prompts are texts, token ids or chat messages"
_IDS = "special tokens are those of the model's generation config and its tokenizer"
_GROUPS: dict[str, str] = {
    "num_beams num_beam_groups early_stopping length_penalty diversity_penalty constraints "
    "force_words_ids": _BEAMS,
    "assistant_model assistant_tokenizer is_assistant num_assistant_tokens "
    "num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit "
    "assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type use_mtp": (
        _DRAFTS
    ),
    "prompt_lookup_num_tokens max_matching_ngram_size": (
        "the drafter `lookup` is used by default, and how many tokens is decided at every step"
    ),
    "penalty_alpha low_memory dola_layers": _OTHER,
    "output_scores output_logits output_attentions output_hidden_states": _OUTPUTS,
    "return_dict_in_generate": "a Result is returned always",
    "past_key_values cache use_cache cache_implementation cache_config max_cache_len "
    "prefill_chunk_size compile_config disable_compile continuous_batching_config": _CACHES,
    "top_h typical_p epsilon_cutoff eta_cutoff encoder_repetition_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens guidance_scale negative_prompt_ids negative_prompt_attention_mask "
    "watermarking_config prefix_allowed_tokens_fn": _HOOK,
    "logits_processor stopping_criteria streamer": (
        "draftwise.generate(model, tokenizer, prompt, ...) takes it"
    ),
    "inputs input_ids attention_mask position_ids token_type_ids inputs_embeds": _TEXT,
    "pixel_values pixel_values_videos input_features input_values": f"text only: {_TEXT}",
    "eos_token_id pad_token_id bos_token_id decoder_start_token_id": _IDS,
    "synced_gpus": "one process runs the model",
    "batch_size": "it goes with a list of prompts",
    "reuse trace": "it goes with a single prompt",
    "do_sample": "a temperature above 0 samples",
    "max_length": "max_new_tokens counts new tokens only",
    "min_length": "min_new_tokens counts new tokens only",
    "max_time": "`cancel` ends a text, or give stopping_criteria to draftwise.generate",
    "stop_strings": "`stop` takes a text or a list of texts",
    "sequence_bias": "`logit_bias` takes single tokens",
    "token_healing": "give the prompt with its last word whole",
    "tokenizer": "the model's own is used, or draftwise.generate's second argument",
    "generation_config": "give its options by name",
    "num_return_sequences n best_of": (
        "call generate([prompt] * n, seed=[...]), or once for each with a seed of its own"
    ),
    "custom_generate trust_remote_code": "it is an option of transformers' generate",
}
INSTEAD = {name: hint for names, hint in _GROUPS.items() for name in names.split()}


def unknown(name: str, known: Collection[str]) -> str:
    """The end of a refusal of `name`: what to do instead, or the nearest of the known names."""
    if name in INSTEAD:
        return f": {INSTEAD[name]}"
    near = get_close_matches(name, known, 1)
    return f": did you mean {near[0]!r}?" if near else ""


# Under `custom_generate`


OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
TAMPERING = ("quantized", "offloaded", "offloaded_static")  # caches whose kind the user wants
# Model inputs that transformers adds by itself, or that are looked at below.
INPUTS = (
    "attention_mask",
    "cache",
    "inputs_embeds",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
)
# What transformers makes processors of that remember, or count on, all rows of a batch.
ONE_ROW = (
    "guidance_scale",
    "watermarking_config",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
)
# Fields of a generation config that make processors, criteria or a prompt, or change no text.
_OWN = "max_new_tokens min_new_tokens temperature top_k top_p min_p repetition_penalty"
FIELDS = frozenset([*INSTEAD, *_OWN.split(), "transformers_version"])


def refuse(
    model: Any, config: Any, ids: torch.Tensor, inputs: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Raises UsageError for what the hook cannot honour. `inputs`: those of the model, `given`: the
    arguments of transformers' generate, as far as they are known."""
    for what, present in _refused(model, config, ids, inputs, given).items():
        if present:
            raise UsageError(f"draftwise.custom_generate does not support {what}")


def _refused(
    model: Any, config: Any, ids: torch.Tensor, inputs: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, bool]:
    cache = inputs.get("cache", inputs.get("past_key_values"))
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    others = [n for n, v in inputs.items() if n not in INPUTS and v is not None and _holds(v)]
    mode = str(getattr(config.get_generation_mode(), "value", ""))
    later = _later(config)
    alone = [n for n in ONE_ROW if len(ids) > 1 and getattr(config, n, None) not in (None, 0, 1)]
    return {
        "encoder-decoder models: take a causal language model": model.config.is_encoder_decoder,
        f"num_beams above 1: {_BEAMS}": (config.num_beams or 1) > 1,
        "num_return_sequences above 1: draftwise.Model(model, tokenizer).generate([prompt] * n, "
        "seed=[...]) draws several": (config.num_return_sequences or 1) > 1,
        f"{', '.join(OUTPUTS)}: {_OUTPUTS}": bool(config.return_dict_in_generate)
        and any(getattr(config, name, False) for name in OUTPUTS),
        "an attention mask with gaps: padding may be on either side only": not unbroken(ids, mask),
        "positions other than 0, 1, 2, ...: leave them out": not counted(ids, mask, positions),
        f"the model input {', '.join(others)}: only token ids": bool(others),
        "inputs_embeds: only token ids": inputs.get("inputs_embeds") is not None,
        f"a cache that already holds tokens: {_CACHES}": cache is not None
        and any(map(_filled, getattr(cache, "layers", ()))),
        f"a cache of yours, which would stay empty: {_CACHES}": getattr(
            cache, "_is_user_defined", False
        ),
        f"use_cache=False: {_CACHES}": config.use_cache is False,
        f"cache_implementation={config.cache_implementation!r}: {_CACHES}": (
            config.cache_implementation in TAMPERING
        ),
        f"assisted generation: {_DRAFTS} of draftwise.generate": mode == "assisted_generation"
        or given.get("assistant_model") is not None
        or bool(config.is_assistant),
        f"{mode.replace('_', ' ')}: {_OTHER}": mode not in ("greedy_search", "sample"),
        f"{', '.join(alone)} for several prompts: call it once for each": bool(alone),
        "a streamer for several prompts: their texts end apart, call it once for each": len(ids) > 1
        and given.get("streamer") is not None,
        "synced_gpus: one process runs the model": bool(given.get("synced_gpus")),
        f"{', '.join(later)}: not known to this version of Draftwise": bool(later),
    }


def _later(config: Any) -> list[str]:
    """Options that are set and unknown here: a later transformers may have added them."""
    defaults: Mapping[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    own = {n: value for n, value in vars(config).items() if n not in FIELDS and n[0] != "_"}
    return [n for n, value in own.items() if value is not None and value != defaults.get(n)]


def _holds(value: Any) -> bool:
    """Whether there is anything in it; models of images get an empty mapping of them."""
    return not isinstance(value, Mapping) or len(value) > 0


def _filled(layer: Any) -> bool:
    states = getattr(layer, "has_previous_state", None)  # of recurrent layers, which have no length
    return any(states.values()) if states is not None else layer.get_seq_length() > 0
