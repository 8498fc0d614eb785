"""Sampling options by name, as the API and the command line take them.

`Sampling` tells type checkers the names and types; `sampling_params` refuses what SamplingParams
does not know, with the nearest name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypedDict

from .core import SamplingParams, UsageError

ELSEWHERE = {
    "do_sample": ": a temperature above 0 samples",
    "max_length": ": max_new_tokens counts new tokens only",
    "num_beams": ": beam search is not supported",
    "batch_size": ": it goes with a list of prompts",
    "reuse": ": it goes with a single prompt",
    "trace": ": it goes with a single prompt",
    "num_return_sequences": ": call it once for each text, with a seed of its own",
}


class Alike(TypedDict, total=False):
    """Those that are the same for all prompts of a batch."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_new_tokens: int
    ignore_eos: bool


class Sampling(Alike, total=False):
    """The names of SamplingParams, for type checkers."""

    max_new_tokens: int
    stop: str | Sequence[str]
    seed: int | None


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from named options; an unknown name is refused."""
    known = [f.name for f in fields(SamplingParams)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f": did you mean {near[0]!r}?" if near else ELSEWHERE.get(name, "")
            raise UsageError(f"unknown option {name!r}{hint}")
    return SamplingParams(**{k: v for k, v in options.items() if v is not None or k == "seed"})
