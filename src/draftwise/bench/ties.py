"""Whether a text differs from plain decoding only where rounding decides (docs/design.md §3.5).

The text is fed again through the model's own forwards of width 1, without an engine of ours. At
position i the *gap* is what plain decoding prefers its own choice by, over the text's token, in
perturbed scores: 0 where both are one. If all gaps are 0, plain decoding writes this very text. A
larger one is a tie if it is within the *allowance*, which our code cannot inflate:

    allowance = max over positions and rivals r of |(s₁(best) − s₁(r)) − (sₖ(best) − sₖ(r))|

s₁ and sₖ being the scores of the model's own forwards of width 1 and of widths 2 to 16 over the
same texts, r the next four tokens. An engine whose every single mistake is small is betrayed by
their number and size: of the own wide forwards, let f be the number of choices that rounding
changed, and L the sum of their gaps; then there may be f + 3·√(f + 1) + 2 ties, and gaps of
3·L + allowance in all.

`broken` makes an engine wrong in ways that have happened, as negative controls. Cost: n forwards of
width 1 and about n/6 wide ones for a text of n tokens, over one cache of the prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle, repeat
from math import sqrt
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from ..core import SeqId
from ..engines.base import Engine, Verify
from ..sampling import Sampler

WIDTHS = (2, 3, 5, 8, 16, 4)
RIVALS = 4
Rows = torch.Tensor  # [n, vocabulary], float32


@dataclass(frozen=True)
class Judged:
    """`gaps`: (position, gap) where the text's token is not plain decoding's choice; `noise`,
    `changed` and `lost`: the allowance of this text alone, the choices that own wide forwards
    change, and the sum of their gaps."""

    tokens: int
    gaps: tuple[tuple[int, float], ...]
    noise: float = 0.0
    changed: int = 0
    lost: float = 0.0
    compared: int = 0


class Teacher:
    """A model's own forwards over a prompt and texts that follow it."""

    def __init__(self, model: PreTrainedModel, prompt: Sequence[int]):
        self._model = model
        named = inspect.signature(model.forward).parameters
        self._named = "cache" if "cache" in named else "past_key_values"
        self._cache, self._held = DynamicCache(config=model.config), len(prompt)
        with torch.inference_mode():
            self._first = self._forward(prompt)[-1:].clone()

    def _forward(self, tokens: Sequence[int], masked: bool = False) -> Rows:
        device, held = self._model.device, self._cache.get_seq_length()
        options: dict[str, Any] = {self._named: self._cache, "use_cache": True}
        if masked:  # another kernel, which rounds differently, as for trees
            n, least = len(tokens), torch.finfo(self._model.dtype).min
            mask = torch.full((n, held + n), least, dtype=self._model.dtype, device=device)
            options["attention_mask"] = mask.triu(held + 1)[None, None]
        ids = torch.tensor([list(tokens)], device=device)
        logits: torch.Tensor = self._model(input_ids=ids, **options).logits[0]
        return logits.float().cpu()

    def rows(self, text: Sequence[int], widths: Sequence[int] = (1,)) -> Rows:
        """The row that each token of `text` is chosen from, in forwards of these widths in turn."""
        rows, at, fed = [self._first], 0, list(text[:-1])
        with torch.inference_mode():
            for turn, width in enumerate(cycle(widths)):
                if at >= len(fed):
                    break
                rows.append(self._forward(fed[at : at + width], width > 1 and turn % 2 == 1))
                at += width
            if fed:
                self._cache.crop(-len(fed))
        assert self._cache.get_seq_length() == self._held
        return torch.cat(rows)


def judge(sampler: Sampler, text: Sequence[int], own: Rows, wide: Rows | None = None) -> Judged:
    """`own` and `wide`: the rows of the text in own forwards of width 1, and of larger widths."""
    gaps, noise, changed, lost = [], 0.0, 0, 0.0
    wides = chain(() if wide is None else wide, repeat(None))
    for i, (token, row, other) in enumerate(zip(text, own, wides, strict=False)):
        support = sampler.support(row.numpy(), text[:i])
        best = sampler.choice(support, i)
        if best != token:
            gaps.append((i, sampler.gap(support, i, best, token)))
        if other is None:
            continue
        shaken = sampler.support(other.numpy(), text[:i])
        if (choice := sampler.choice(shaken, i)) != best:
            changed += 1
            lost += sampler.gap(support, i, best, choice)
        rivals, _ = sampler.ranking(row.numpy(), text[:i], 1 + RIVALS)
        before, after = (
            np.array([sampler.score(at, rival) for rival in rivals]) for at in (support, shaken)
        )
        noise = max(noise, float(np.abs((before[0] - before) - (after[0] - after)).max()))
    compared = 0 if wide is None else len(text)
    return Judged(len(text), tuple(gaps), noise, changed, lost, compared)


@dataclass(frozen=True)
class Verdict:
    texts: int
    tokens: int
    differing: int  # texts that are not plain decoding's
    ties: int
    errors: int  # gaps above the allowance
    worst: float
    allowance: float
    most: float  # so many ties may be rounding's
    nats: float  # all gaps
    most_nats: float  # so much of that may be rounding's

    @property
    def passed(self) -> bool:
        return self.errors == 0 and self.ties <= self.most and self.nats <= self.most_nats


def verdict(texts: Sequence[Judged], measured: Sequence[Judged]) -> Verdict:
    """Of `texts`, by the noise of `measured` (which may be the same)."""
    allowance = max((text.noise for text in measured), default=0.0)
    gaps = [gap for text in texts for _, gap in text.gaps]
    tokens = sum(text.tokens for text in texts)
    compared = sum(text.compared for text in measured)
    share = tokens / max(compared, 1)
    rounding = sum(text.changed for text in measured) * share
    errors = sum(gap > allowance for gap in gaps)
    return Verdict(
        len(texts),
        tokens,
        sum(bool(text.gaps) for text in texts),
        len(gaps) - errors,
        errors,
        max(gaps, default=0.0),
        allowance,
        rounding + 3 * sqrt(rounding + 1) + 2,
        sum(gaps),
        3 * sum(text.lost for text in measured) * share + allowance,
    )


# Negative controls

BREAKS = ("shift", "row")


@contextmanager
def broken(engine: Engine, model: PreTrainedModel, how: str) -> Iterator[None]:
    """While it lasts the engine is wrong after rejections: "shift" runs all later rows one position
    too far, "row" leaves one wrong row in the cache each time."""
    rows: dict[SeqId, int] = {}
    forward, commit = engine.forward, engine.commit
    rejected = once = False

    def watched_forward(work: Sequence[Any]) -> Any:
        rows.update({w.seq: len(w.tokens) for w in work if isinstance(w, Verify)})
        return forward(work)

    def watched_commit(seq: SeqId, path: Sequence[int]) -> None:
        nonlocal rejected, once
        commit(seq, path)
        if len(path) < rows.pop(seq, 0):
            rejected = once = True

    def spoil(module: Any, args: Any, options: dict[str, Any]) -> Any:
        nonlocal once
        cache: Any = options.get("cache", options.get("past_key_values"))
        if how == "shift" and rejected:
            ids, held = options["input_ids"], cache.get_seq_length()
            at = options.get("position_ids")
            if at is None:
                at = torch.arange(held, held + ids.shape[1], device=ids.device)[None]
            options["position_ids"] = at + 1
        elif how == "row" and once:
            once = False
            for layer in cache.layers:
                for states in (layer.keys, layer.values):
                    states[..., -1, :] = states[..., -2, :]
        return args, options

    hook = model.base_model.register_forward_pre_hook(spoil, with_kwargs=True)
    vars(engine).update(forward=watched_forward, commit=watched_commit)
    try:
        yield
    finally:
        hook.remove()
        for name in ("forward", "commit"):
            del vars(engine)[name]
