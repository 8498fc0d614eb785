"""Padded batches, as transformers' users hand them over: prompts without their padding, and back.

The attention mask says what is padding, on either side of a row. A text goes on after its prompt;
what is returned has every row as it was given, then its new tokens, then padding. Processors and
criteria are shown a row's ids as transformers would show them, padding included: lengths and
positions that transformers has put into them then mean the same.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from .core import UsageError


class PaddedRows:
    def __init__(self, ids: torch.Tensor, mask: torch.Tensor | None):
        self._ids = ids
        kept = torch.ones_like(ids) if mask is None else mask
        self.prompts: list[list[int]] = [
            row[own.bool()].tolist() for row, own in zip(ids.cpu(), kept.cpu(), strict=True)
        ]

    def criteria(self, i: int, criteria: Sequence[Any]) -> list[Any]:
        """Criteria (or processors) as row i is to call them."""
        row, held = self._ids[i : i + 1], len(self.prompts[i])
        whole = held == row.shape[1]
        return [one if whole else _Whole(one, row, held) for one in criteria]

    def processors(self, i: int, processors: Sequence[Any]) -> list[Any]:
        return self.criteria(i, [_of_row(i, one) for one in processors])

    def joined(self, texts: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
        longest = max(map(len, texts))
        new = [[*text, *[pad] * (longest - len(text))] for text in texts]
        made = torch.tensor(new, dtype=self._ids.dtype, device=self._ids.device)
        return torch.cat([self._ids, made], dim=-1)


class _Whole:
    """A processor or criterion that is shown the row as it was given, then the new tokens."""

    def __init__(self, inner: Any, row: torch.Tensor, held: int):
        self._inner, self._row, self._held = inner, row, held

    def __call__(self, ids: torch.Tensor, scores: Any) -> Any:
        return self._inner(torch.cat([self._row, ids[:, self._held :]], dim=-1), scores)


def _of_row(i: int, processor: Any) -> Any:
    """One that knows rows by their place, which is 0 in all that it is shown, for row i."""
    from transformers import PrefixConstrainedLogitsProcessor

    if type(processor) is PrefixConstrainedLogitsProcessor and i:
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(i, ids), 1)
    ignored = getattr(processor, "prompt_ignore_length", None)  # of the repetition penalty
    if isinstance(ignored, torch.Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[i : i + 1]
    return processor


def unbroken(ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Is every row one run of tokens with padding before and after it?"""
    if mask is None:
        return True
    if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        return False
    edges = torch.nn.functional.pad(mask.long(), (1, 1)).diff(dim=-1)
    return bool(((edges == 1).sum(-1) == 1).all())


def counted(ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> bool:
    """Are positions those of each row's tokens, from 0 on?"""
    if positions is None:
        return True
    kept = torch.ones_like(ids) if mask is None else mask
    if kept.shape != ids.shape or positions.shape[-1] != ids.shape[1]:
        return False
    own = (kept.cumsum(-1) - 1)[kept == 1]
    # Models of images have several rows of them for each row of ids: [3 or 4, rows, length].
    layers = (
        positions.reshape(-1, *ids.shape) if positions.dim() > 2 else positions.expand_as(ids)[None]
    )
    return all(torch.equal(own, layer[kept == 1].to(own)) for layer in layers)


def pad_id(config: Any, rows: int, criteria: Any) -> int:
    """What fills up rows that end before others."""
    pad = getattr(config, "_pad_token_tensor", None)
    pad = config.pad_token_id if pad is None else pad
    if pad is not None:
        return int(pad)
    names = {type(one).__name__ for one in criteria or ()}
    if rows > 1 and not names <= {"MaxLengthCriteria"}:
        raise UsageError(
            "draftwise.custom_generate needs a pad_token_id for rows that end before others"
        )
    return 0
