"""What a model can do, tried out at load with a few tokens: nothing else tells it reliably.

In this order: does it run on caches that append in place (slots.py), does it verify trees
(trees.py), do several rows on a warm cache give what token by token gives, with positions given or
without (recurrent.py), and do the rows of a forward leave each other alone (quantised.py)? A model
that fails where drafts could change its text is decoded plainly, and `obstacle` says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..core import UsageError
from ..unpack import first_line
from . import quantised, recurrent, slots, trees

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECURRENT = "has recurrent state, which cannot be rolled back"
ENTANGLED = "is quantised such that the rows of a forward change each other, drafted ones too"


@dataclass(frozen=True)
class Abilities:
    """`full`: every layer keeps all positions; `in_place`: caches append without a copy;
    `positions`: they must be given; `one_by_one`: a warm cache takes one row at a time."""

    rollback: str  # free | refeed | none
    trees: bool = False
    full: bool = False
    in_place: bool = False
    positions: bool = False
    one_by_one: bool = False
    obstacle: str = ""


def new_cache(model: PreTrainedModel, in_place: bool) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    if in_place:
        cache.layers = [slots.Row() for _ in cache.layers]
    return cache


def tried_out(
    model: PreTrainedModel, name: str, takes_positions: bool, context: int | None
) -> Abilities:
    """Runs some forwards of a few tokens. `name`: the argument that takes a cache."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    found = _rollback(model, name, takes_positions, vocabulary, context)
    long = context is None or context >= 2 * quantised.ROWS
    if long and quantised.described(model):
        cache = partial(new_cache, model, found.in_place)
        if not quantised.rows_apart(model, cache, name, vocabulary):
            return Abilities("none", full=found.full, obstacle=ENTANGLED)
    return found


def _rollback(
    model: PreTrainedModel, name: str, takes_positions: bool, vocabulary: int, context: int | None
) -> Abilities:
    tokens = trees.probe(vocabulary)[: context or None]
    ids = torch.tensor([tokens], dtype=torch.long, device=model.device)

    def run(cache: Any) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, use_cache=True, **{name: cache}).logits[0]
        return logits

    cache = new_cache(model, False)
    try:
        logits = run(cache)
    except ValueError as error:  # such as minimax's, whose cache is a class of its own
        reason = first_line(error)
        raise UsageError(f"this model takes no cache of the usual kind: {reason}") from error
    full = {type(layer).__name__ for layer in cache.layers} == {"DynamicLayer"}
    croppable = bool(cache.is_croppable) and cache.get_seq_length() == len(tokens)
    appended = _appended(model, run, logits) if full and croppable else None
    in_place = appended is not None
    if in_place and trees.possible(model) and trees.honoured(model, appended, name, logits):
        return Abilities("free", True, full, in_place)
    begun = partial(new_cache, model, in_place)
    for given in (False, True) if takes_positions else (False,):
        probe = recurrent.Probe(model, begun, name, logits, given)
        if probe.honoured():
            rollback = "free" if croppable else "refeed"
            return Abilities(rollback, False, full, in_place, given)
    short = len(tokens) < len(trees.probe(vocabulary))  # and nothing can be tried out
    if croppable and (short or probe.honoured(roughly=True)):
        return Abilities("free", False, full, in_place, given)
    if not probe.apart():
        raise UsageError("this model keeps its state outside of a cache: not supported")
    one_by_one = not probe.warm()
    return Abilities("none", False, full, in_place, given, one_by_one, RECURRENT)


def _appended(
    model: PreTrainedModel, run: Callable[[Any], torch.Tensor], logits: torch.Tensor
) -> Any:
    """A cache that appends in place, after `run`; None if the model does not take it as it took the
    library's own."""
    with contextlib.suppress(Exception):
        cache = new_cache(model, True)
        if torch.equal(run(cache), logits):
            return cache
    return None
