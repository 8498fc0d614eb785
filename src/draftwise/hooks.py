"""Draftwise for people who already hold a transformers model.

`generate(model, tokenizer, prompt, ...)` is the full interface: it returns a Result and feeds a
transformers `streamer`. `custom_generate` goes into `model.generate(**inputs,
custom_generate=draftwise.custom_generate)` and returns what `generate` would: ids [B, L + new].

Both take batches. In the hook, padding on either side is left out of the prompts and kept in what
is returned, and rows that ended are filled up with the padding token. Where transformers would go
on after right padding as if it were text, the hook goes on after the prompt.

Limits of the hook: transformers hands such a callable neither `streamer` nor `tokenizer`, so a
streamer given there gets nothing after the prompt (use `generate` above), and `stop_strings` raise
in transformers before we are called; it drops `assistant_model` without a word. Unlike
`model.generate`, the hook stops where the model's context is full. What it cannot honour (beams,
several sequences a prompt, scores, a filled cache) it refuses with a UsageError. Logits processors
and stopping criteria of the call are honoured: each is called once for every token, in order, with
a row's own ids [1, L], padding included. Those of a batch see its rows by turns, so one that counts
its calls belongs to a batch of one.

Lossless as in api.py. Greedy ids are those of `model.generate`; sampled ids have the same
distribution, from a seed drawn from torch's global generator (so torch.manual_seed holds), but are
not the ids that transformers would have drawn; row i has that seed + i. The model, its configs and
its caches are only read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, overload

import torch
from typing_extensions import Unpack

from .api import DEFAULT_DRAFTERS, Model
from .batches import BatchSampling, Prompts, each_params, is_batch, numbered
from .core import SamplingParams, UsageError
from .intake import Wish, eos_ids
from .options import Sampling, sampling_params
from .padding import PaddedRows, counted, pad_id, unbroken
from .prompts import Prompt
from .result import Result

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Model inputs that transformers adds by itself, or that are looked at below.
KNOWN = (
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
_wrapped: weakref.WeakKeyDictionary[Any, tuple[Model, Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _wrap(model: PreTrainedModel) -> Model:
    """The Model around a user's model: made once, so that what it learns is kept, and gone with the
    user's last reference, since it holds the model weakly."""
    from .unpack import cache_dir

    with _lock:
        found, facts = _wrapped.get(model, (None, ()))
        if found is None or facts != _facts(model):
            costs = cache_dir() / "costs"
            found = Model(model, None, DEFAULT_DRAFTERS, costs=costs, borrowed=True)
            _wrapped[model] = found, _facts(model)
        return found


def _facts(model: PreTrainedModel) -> tuple[Any, ...]:
    """What a Model remembers of it: a model with resized embeddings, say, is wrapped anew."""
    text = model.config.get_text_config(decoder=True)
    limits = (text.vocab_size, getattr(text, "max_position_embeddings", None))
    return (*limits, model.dtype, model.device)


class _Options(TypedDict, total=False):
    drafters: Sequence[Any]
    policy: str
    acceptance: str
    quality_budget: float
    logits_processor: Sequence[Any]
    stopping_criteria: Sequence[Any]


class OneOptions(_Options, Sampling, total=False):
    """What `generate` takes beside one prompt, for type checkers."""

    streamer: Any


class SeveralOptions(_Options, BatchSampling, total=False):
    """What `generate` takes beside a list of prompts, for type checkers."""


@overload
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Prompt,
    **options: Unpack[OneOptions],
) -> Result: ...


@overload
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Prompts,
    **options: Unpack[SeveralOptions],
) -> list[Result]: ...


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Any,
    *,
    drafters: Sequence[Any] = DEFAULT_DRAFTERS,
    policy: str = "auto",
    acceptance: str = "coupled",
    quality_budget: float = 0.0,
    streamer: Any = None,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    **sampling: Any,
) -> Any:
    """Generates with a model that the caller holds, without changing it.

    `drafters` may hold loaded draft models; those other than the default are not kept between
    calls (make a `draftwise.Model` for that). `streamer` is a transformers streamer: it gets the
    prompt ids, then new ids as they are committed, then `end()`. A list of prompts gives a list of
    Results (see Model.stream_batch), without a streamer.
    """
    several = is_batch(prompt)
    prompts = list(prompt) if several else [prompt]
    # Of one prompt, a list is no list of options.
    params = each_params(sampling, len(prompts)) if several else [sampling_params(sampling)]
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"draftwise.generate takes a transformers model, then its tokenizer, not a "
            f"{type(model).__name__} (a draftwise.Model has its own generate)"
        )
    if several and streamer is not None:
        raise UsageError("a streamer takes one prompt, not a batch")
    if tuple(drafters) == DEFAULT_DRAFTERS:
        wrapped = _wrap(model)
    else:
        wrapped = Model(model, tokenizer, drafters, policy=policy, borrowed=True)
    ids = [
        numbered(i if several else None, wrapped.encode, each, tokenizer)
        for i, each in enumerate(prompts)
    ]
    wishes = [
        Wish(
            own,
            acceptance,
            quality_budget,
            processors=logits_processor,
            criteria=stopping_criteria,
            eos=eos_ids(model),
            tokenizer=tokenizer,
        )
        for own in params
    ]
    if streamer is not None:
        streamer.put(torch.tensor(ids))
    with wrapped.start_batch(ids, wishes, policy=policy) as batch:
        while results := batch.step():
            for token in results[0].committed if streamer is not None else ():
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return batch.results if several else batch.results[0]


def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """For `model.generate(..., custom_generate=draftwise.custom_generate)`; see the module."""
    config, (rows, width) = generation_config, input_ids.shape
    _refuse(config, input_ids, synced_gpus, model_kwargs)
    mask = model_kwargs.get("attention_mask")
    padded = PaddedRows(input_ids, mask)
    pad = pad_id(config, rows, stopping_criteria)
    seed = None if not config.do_sample else int(torch.randint(2**62, ()).item())
    wishes = [
        Wish(
            # Length limits, EOS and everything about probabilities come as processors and criteria
            # that transformers made from the config; only the draw itself is ours.
            SamplingParams(
                max_new_tokens=max(int(config.max_length) - width, 1),
                temperature=0.0 if seed is None else 1.0,
                seed=None if seed is None else seed + i,
            ),
            processors=padded.processors(i, logits_processor or ()),
            criteria=padded.criteria(i, stopping_criteria or ()),
            eos=frozenset(),
            device=input_ids.device,
        )
        for i in range(rows)
    ]
    batch = _wrap(model).start_batch(padded.prompts, wishes, batch_size=rows)
    for _ in batch:
        pass
    ids = padded.joined([result.token_ids for result in batch.results], pad)
    if not config.return_dict_in_generate:
        return ids
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=ids)  # type: ignore[arg-type]


def _refuse(config: Any, ids: torch.Tensor, synced: bool, kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    others = [n for n, value in kwargs.items() if n not in KNOWN and value is not None]
    refused = {
        "num_beams above 1": (config.num_beams or 1) > 1,
        "num_return_sequences above 1": (config.num_return_sequences or 1) > 1,
        "output_scores, output_logits, output_attentions and output_hidden_states": any(
            getattr(config, name, False) for name in OUTPUTS
        ),
        "an attention mask with gaps": not unbroken(ids, kwargs.get("attention_mask")),
        "positions other than 0, 1, 2, ...": not counted(
            ids, kwargs.get("attention_mask"), kwargs.get("position_ids")
        ),
        f"the model input {', '.join(others)}": bool(others),
        "inputs_embeds": kwargs.get("inputs_embeds") is not None,
        "a cache that already holds tokens": cache is not None and any(map(_filled, cache.layers)),
        "use_cache=False": config.use_cache is False,
        "prompt_lookup_num_tokens (draftwise drafts by itself)": bool(
            config.prompt_lookup_num_tokens
        ),
        "synced_gpus": bool(synced),
        **{
            f"{name} for several prompts": len(ids) > 1
            and getattr(config, name, None) not in (None, 0, 1)
            for name in ONE_ROW
        },
    }
    for what, present in refused.items():
        if present:
            raise UsageError(f"draftwise.custom_generate does not support {what}")


def _filled(layer: Any) -> bool:
    states = getattr(layer, "has_previous_state", None)  # of recurrent layers, which have no length
    return any(states.values()) if states is not None else layer.get_seq_length() > 0
