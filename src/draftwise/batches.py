"""Batches of prompts: what counts as one, and the options of each of its prompts.

Options hold for all prompts. `seed`, `max_new_tokens` and `stop` may be lists with an entry for
each (of `stop`, a list of lists); one seed stands for prompt i as seed + i, so that a prompt can be
run again alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar

from .core import SamplingParams, UsageError
from .options import Alike, Sampling, sampling_params
from .trace import Trace

Prompts = list[str] | Sequence[Sequence[int]] | Sequence[Sequence[Mapping[str, Any]]]

P = ParamSpec("P")
T = TypeVar("T")


class BatchSampling(Alike, total=False):
    """The names of SamplingParams, of which these may be lists, for type checkers."""

    max_new_tokens: int | Sequence[int]
    stop: str | Sequence[str] | Sequence[Sequence[str]]
    seed: int | Sequence[int | None] | None


class _Common(TypedDict, total=False):
    policy: str | None
    acceptance: str | None
    quality_budget: float | None
    cancel: threading.Event | None


class BatchOptions(BatchSampling, _Common, total=False):
    """What `generate` takes beside its prompts, for type checkers."""

    batch_size: int


class CallOptions(Sampling, _Common, total=False):
    """What `generate` takes beside one prompt, for type checkers."""

    reuse: bool
    trace: Trace | Path | str | None


def is_batch(prompt: Any) -> bool:
    """A list of prompts? A text, a list of ids or of messages, and an array are one prompt each."""
    if not isinstance(prompt, (list, tuple)) or not prompt:
        return False
    return all(
        isinstance(item, (str, list, tuple)) or getattr(item, "ndim", 0) > 0 for item in prompt
    )


def each_params(options: Mapping[str, Any], count: int) -> list[SamplingParams]:
    """The sampling parameters of each of `count` prompts."""
    options = dict(options)
    listed: dict[str, Sequence[Any]] = {}
    for name in ("seed", "max_new_tokens", "stop"):
        value = options.get(name)
        texts = name == "stop"  # of which a list is one prompt's own
        if isinstance(value, (list, tuple)) and not (
            texts and all(isinstance(item, str) for item in value)
        ):
            if len(value) != count:
                raise UsageError(f"{name} has {len(value)} entries for {count} prompts")
            listed[name] = options.pop(name)
    params = [
        sampling_params(options | {name: values[i] for name, values in listed.items()})
        for i in range(count)
    ]
    seed = options.get("seed")
    if seed is None:
        return params
    return [replace(own, seed=int(seed) + i) for i, own in enumerate(params)]


def numbered(i: int | None, make: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """make(...), whose refusal tells which prompt it is about (None: the only one)."""
    try:
        return make(*args, **named)
    except UsageError as error:
        if i is None:
            raise
        raise UsageError(f"prompt {i}: {error}") from error
