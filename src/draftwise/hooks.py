"""Draftwise for people who already hold a transformers model.

`generate(model, tokenizer, prompt, ...)` is the full interface: it returns a Result and feeds a
transformers `streamer`. `custom_generate` goes into `model.generate(**inputs,
custom_generate=draftwise.custom_generate)` and returns what `generate` would: ids [B, L + new].

Both take batches. In the hook, padding on either side is left out of the prompts and kept in what
is returned, and rows that ended are filled up with the padding token. Where transformers would go
on after right padding as if it were text, the hook goes on after the prompt.

Limits of the hook: transformers drops the `tokenizer` of a call before it calls such a callable, so
`stop_strings` raise there (use `generate` above), and with cache_implementation="paged" it never
calls it. Unlike `model.generate`, the hook stops where the model's context is full. What it cannot
honour (beams, scores, a cache of the caller's) it refuses with a UsageError (refusals.py).
Streamers, logits processors and stopping criteria of the call are honoured: each of the latter is
called once for every token, in order, with a row's own ids [1, L], padding included. Those of a
batch see its rows by turns, so one that counts its calls belongs to a batch of one.

Lossless as in api.py. Greedy ids are those of `model.generate`; sampled ids have the same
distribution, from a seed drawn from torch's global generator (so torch.manual_seed holds), but are
not the ids that transformers would have drawn; row i has that seed + i. The model, its configs and
its caches are only read.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, overload

import torch
from transformers import GenerationMixin
from typing_extensions import Unpack

from .api import DEFAULT_DRAFTERS, Model
from .batches import BatchSampling, Prompts, each_params, is_batch, numbered
from .call import Batch
from .core import SamplingParams, UsageError
from .intake import Wish, eos_ids
from .options import Sampling, sampling_params
from .padding import PaddedRows, pad_id
from .prompts import Prompt
from .refusals import refuse
from .result import Result

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ONLY_MODEL = frozenset(["batch_size", "cancel", "reuse", "trace"])
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
    for name in ONLY_MODEL.intersection(sampling):
        raise UsageError(
            f"draftwise.generate does not take {name}: draftwise.Model(model, tokenizer) does"
        )
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
    batch = wrapped.start_batch(ids, wishes, policy=policy)
    _run(batch, streamer)
    return batch.results if several else batch.results[0]


def _run(batch: Batch, streamer: Any) -> None:
    """Runs requests to their end; a transformers streamer gets the tokens of one."""
    with batch:
        while results := batch.step():
            for token in results[0].committed if streamer is not None else ():
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()


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
    given = {"synced_gpus": synced_gpus, "streamer": streamer, **_arguments()}
    refuse(model, config, input_ids, model_kwargs, given)
    padded = PaddedRows(input_ids, model_kwargs.get("attention_mask"))
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
    _run(batch, given["streamer"])
    ids = padded.joined([result.token_ids for result in batch.results], pad)
    if not config.return_dict_in_generate:
        return ids
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=ids)  # type: ignore[arg-type]


def _arguments() -> dict[str, Any]:
    """The arguments of transformers' generate that called `custom_generate`: some of them it keeps
    to itself, but what it was given must be honoured or refused. Empty where it did not call."""
    frame = sys._getframe(2)
    for _ in range(3):  # a user's function may stand between
        if frame.f_code is inspect.unwrap(GenerationMixin.generate).__code__:
            return dict(frame.f_locals)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return {}
