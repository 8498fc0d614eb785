"""Sampling options by name, as the API and the command line take them.

`Sampling` tells type checkers the names and types; `sampling_params` refuses what SamplingParams
does not know, with what to do instead (refusals.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from .core import SamplingParams, UsageError
from .refusals import unknown


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
            raise UsageError(f"unknown option {name!r}{unknown(name, known)}")
    return SamplingParams(**{k: v for k, v in options.items() if v is not None or k == "seed"})
