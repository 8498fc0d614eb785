"""What is asked for a text becomes a Request, checked against what the model can do.

`Wish` holds what one text may have of its own beside its prompt. The acceptance rule is settled
here, before the first token and from earlier requests only; a limit is the smaller one of what is
wanted and what the model's context leaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .accept import Criterion
from .accept import check as check_acceptance
from .core import Request, SamplingParams, UsageError
from .engines.base import Caps
from .prompts import special_ids
from .sampling import new_seed
from .stopping import Stopper

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Wish:
    """`processors` and `criteria` are transformers objects, called once for every token of the
    text, in order, with ids on `device`. None: as the model has it."""

    params: SamplingParams = field(default_factory=SamplingParams)
    acceptance: str | None = None
    quality_budget: float | None = None
    reuse: bool = False
    processors: Sequence[Any] = ()
    criteria: Sequence[Any] = ()
    eos: frozenset[int] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    device: torch.device | None = None


class Intake:
    """Makes requests for one model, whose own ways the arguments are."""

    def __init__(
        self,
        caps: Caps,
        tokenizer: PreTrainedTokenizerBase | None,
        eos: frozenset[int],
        acceptance: str,
        quality_budget: float,
    ):
        check_acceptance(acceptance, quality_budget)
        self._caps, self._tokenizer, self._eos = caps, tokenizer, eos
        self._acceptance, self._budget = acceptance, quality_budget
        self.criterion = Criterion()
        self._numbers = itertools.count()

    def request(self, prompt: Sequence[int], wish: Wish, serial: bool) -> tuple[Request, Stopper]:
        """`serial`: whether a drafter will draw tokens, so that rules differ."""
        params, tokenizer = wish.params, wish.tokenizer or self._tokenizer
        acceptance = self._acceptance if wish.acceptance is None else wish.acceptance
        budget = self._budget if wish.quality_budget is None else wish.quality_budget
        check_acceptance(acceptance, budget)
        if params.stop and tokenizer is None:
            raise UsageError("stop strings need a tokenizer")
        limit = self._limit(prompt, params.max_new_tokens)
        eos = self._eos if wish.eos is None else wish.eos
        stops = frozenset() if params.ignore_eos else eos
        endings = stops | special_ids(params.stop, tokenizer)
        if acceptance == "auto":
            differ = serial and not (params.greedy or budget)
            acceptance = self.criterion.choose() if differ else "coupled"
        request = Request(
            next(self._numbers),
            tuple(prompt),
            params,
            new_seed() if params.seed is None else int(params.seed),
            stops,
            acceptance,
            limit,
            wish.reuse,
            tuple(wish.processors),
            wish.device,
            float(budget),
        )
        return request, Stopper(
            tokenizer, prompt, limit, endings, params.stop, wish.criteria, wish.device
        )

    def _limit(self, prompt: Sequence[int], wanted: int) -> int:
        size, context = self._caps.vocabulary, self._caps.context
        if len(prompt) == 0:
            raise UsageError("the prompt is empty")
        if min(prompt) < 0 or max(prompt) >= size:
            raise UsageError(f"token ids must be between 0 and {size - 1}")
        if context is None:
            return wanted
        if len(prompt) >= context:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, and the model's context holds {context}: "
                "one must be left to generate"
            )
        return min(wanted, context - len(prompt))


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end a text, as transformers finds them; none if none is defined."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids) if isinstance(ids, (list, tuple)) else frozenset([ids])
    return frozenset()
