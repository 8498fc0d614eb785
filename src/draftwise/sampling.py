"""Logits to token: one deterministic rule for plain decoding and for speculation.

    token = argmax over x of  logits'(x) / T + g(seed, choice, index, x)

`logits'` are the processed logits given the node's own history, `index` the number of tokens
generated before, and g standard Gumbel noise from a counter-based generator, so that the sum's
argmax is a draw from softmax(logits' / T) (Gumbel-max). T = 0 drops both the division and g.
Because the token depends on nothing but history, logits and seed, a draft node is right if and
only if it equals this token, and the text cannot depend on what was drafted (arXiv 2408.07978).

Noise: splitmix64 of (key + id), 53 bits kept, since float32 uniforms cap the tail at 17 nats.
Cost: one integer hash per token of the support; logarithms only where the noise could still win
(see `Sampler._argmax`): about 0.6 ms on a row of 152k, against 3 ms with logarithms everywhere.
Top-p sorts only the head of the distribution that it needs.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .core import FloatRow, LogitsProcessor, SamplingParams

Ids = npt.NDArray[np.int64]
Support = tuple[Ids | int, FloatRow]  # ids that may be drawn (or how many, for all), scores
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BELOW_ONE = 1.0 - 2.0**-53
# Separate streams, so that acceptance draws never share a number with token noise.
TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)


def new_seed() -> int:
    return secrets.randbits(63)


def mix(value: int) -> int:
    """splitmix64's finaliser on one Python integer."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(seed: int, index: int, stream: int = TOKEN, choice: int = 0) -> int:
    """The generator's key for one position: every argument changes all bits."""
    return mix(mix(mix(mix(seed & _MASK) ^ choice) ^ stream) ^ index)


_counters = np.arange(1 << 12, dtype=np.uint64) * np.uint64(_GOLDEN)


def _bits(k: int, ids: Ids | int) -> npt.NDArray[np.uint64]:
    """53 random bits for every id; an integer stands for the whole range 0..n-1."""
    global _counters
    if isinstance(ids, int):
        counters = _counters  # other threads may replace it meanwhile
        if ids > len(counters):
            _counters = counters = np.arange(ids, dtype=np.uint64) * np.uint64(_GOLDEN)
        z = counters[:ids] + np.uint64(k)
    else:
        z = ids.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(k)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z >> np.uint64(11)


def _to_gumbel(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    # The largest would round to 1, which has no finite noise.
    noise: npt.NDArray[np.float64] = -np.log(-np.log(np.minimum(uniform, _BELOW_ONE)))
    return noise


def gumbel(k: int, ids: Ids | int) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for token ids ([n], or 0..n-1) under a key from `key`."""
    return _to_gumbel(_bits(k, ids))


def uniform(k: int, counter: int = 0) -> float:
    """One uniform in (0, 1) under a key; `counter` tells draws of one position apart."""
    bits = mix((k + counter * _GOLDEN) & _MASK) >> 11
    return min((float(bits) + 0.5) * 2.0**-53, _BELOW_ONE)


class Sampler:
    """Turns rows of logits into tokens for one request; call `token` once per position, in order.

    `processors` are transformers objects, given (ids [1, L], scores [1, V]) on `device`.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int] = (),
        eos: frozenset[int] = frozenset(),
        processors: Sequence[LogitsProcessor] = (),
        device: Any = None,
    ):
        self.params, self.seed, self.eos = params, seed, eos
        self._prompt = tuple(prompt)
        self._processors, self._device = tuple(processors), device
        self.shows_rows = bool(self._processors)  # they may carry a state: each row once, in order
        self.plain_argmax = params.greedy and not (
            self._processors
            or params.logit_bias
            or params.min_new_tokens
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
        )

    def needs_row(self, index: int) -> bool:
        """False where the argmax of the raw logits is the token, so that no row need be copied."""
        return not self.plain_argmax

    def token(self, row: FloatRow, generated: Sequence[int]) -> int:
        """The target's token after prompt + `generated`, from its logits `row` ([V])."""
        return self.choice(self.support(row, generated), len(generated))

    def choice(self, support: Support, index: int) -> int:
        """The target's token at `index`, from what `support` returned for its row."""
        ids, scores = support
        if self.params.greedy:
            return _pick(ids, int(scores.argmax()))
        return self._argmax(ids, scores, key(self.seed, index))

    def score(self, support: Support, token: int) -> float:
        """Logit' / T of a token; -inf where it may not be drawn."""
        ids, scores = support
        if isinstance(ids, int):
            return float(scores[token]) if token < ids else -np.inf
        at = int(np.searchsorted(ids, token))
        return float(scores[at]) if at < len(ids) and ids[at] == token else -np.inf

    def gap(self, support: Support, index: int, best: int, other: int) -> float:
        """Nats by which the perturbed score of `best`, the choice, is above that of `other`."""
        gap = self.score(support, best) - self.score(support, other)
        if not self.params.greedy:
            noise = gumbel(key(self.seed, index), np.array([best, other]))
            gap += float(noise[0] - noise[1])
        return max(gap, 0.0) if gap == gap else np.inf

    def ranking(
        self, row: FloatRow, generated: Sequence[int], count: int
    ) -> tuple[list[int], list[float]]:
        """The `count` tokens with the largest perturbed scores, best first, and these scores: the
        first is `token`. Fewer where fewer may be drawn."""
        ids, scores = self.support(row, generated)
        if self.params.greedy:
            near = torch.from_numpy(scores).topk(min(count, len(scores))).indices.numpy()
            near = np.union1d(near, scores.argmax())  # of equals, the first is the token
            noisy = scores[near].astype(np.float64)
        else:
            near, noisy = self._leaders(ids, scores, key(self.seed, len(generated)), count)
        best = np.argsort(-noisy, kind="stable")[:count]
        best = best[noisy[best] > -np.inf]
        return [_pick(ids, int(near[i])) for i in best], noisy[best].tolist()

    def support(self, row: FloatRow, generated: Sequence[int]) -> Support:
        """Ids that may be drawn (or the vocabulary's size, for all) with their logits' / T."""
        scores = self._processed(row, generated)
        if self.params.greedy:
            return len(scores), scores
        if self.params.temperature != 1.0:
            # Any temperature so low means the argmax; dividing by less would leave float32.
            scores = scores / np.float32(max(self.params.temperature, 1e-30))
        return self._truncated(scores)

    def probabilities(self, row: FloatRow, generated: Sequence[int]) -> npt.NDArray[np.float64]:
        """The distribution that `token` draws from, over the whole vocabulary ([V], float64)."""
        ids, scores = self.support(row, generated)
        dense = np.zeros(len(row), dtype=np.float64)
        if self.params.greedy:
            dense[int(scores.argmax())] = 1.0
            return dense
        weights = np.exp(scores.astype(np.float64) - float(scores.max()))
        dense[slice(None) if isinstance(ids, int) else ids] = weights / weights.sum()
        return dense

    def _processed(self, row: FloatRow, generated: Sequence[int]) -> FloatRow:
        p = self.params
        if self._processors:
            text = [[*self._prompt, *generated]]
            history = torch.tensor(text, dtype=torch.long, device=self._device)
            scores = torch.tensor(row, device=self._device)[None]
            for processor in self._processors:
                scores = processor(history, scores)
            row = scores[0].float().cpu().numpy()
        if p.repetition_penalty != 1.0:
            row = row.copy()
            seen = np.unique(np.fromiter((*self._prompt, *generated), np.int64))
            seen = seen[seen < len(row)]
            value = row[seen]
            row[seen] = np.where(
                value < 0, value * p.repetition_penalty, value / p.repetition_penalty
            )
        if (p.presence_penalty or p.frequency_penalty) and len(generated):
            row = row.copy()
            ids, counts = np.unique(np.fromiter(generated, np.int64), return_counts=True)
            row[ids] -= (p.presence_penalty + p.frequency_penalty * counts).astype(row.dtype)
        if p.logit_bias:
            row = row.copy()
            for token, bias in p.logit_bias.items():
                if token < len(row):
                    row[token] += bias
        if len(generated) < p.min_new_tokens and self.eos:
            row = row.copy()
            row[[t for t in self.eos if t < len(row)]] = -np.inf
        return row

    def _truncated(self, scores: FloatRow) -> Support:
        p = self.params
        ids: Ids | int = len(scores)
        if 0 < p.top_k < len(scores):
            kth = torch.topk(torch.from_numpy(scores), p.top_k).values[-1].item()
            ids = np.flatnonzero(scores >= kth)
            scores = scores[ids]
        if p.top_p < 1.0:
            keep = _nucleus(scores, p.top_p)
            ids, scores = _take(ids, keep), scores[keep]
        if p.min_p > 0.0:
            keep = np.flatnonzero(scores >= scores.max() + np.log(p.min_p))
            ids, scores = _take(ids, keep), scores[keep]
        return ids, scores

    def _argmax(self, ids: Ids | int, scores: FloatRow, k: int) -> int:
        near, noisy = self._leaders(ids, scores, k, 1)
        return _pick(ids, int(near[int(noisy.argmax())]))

    def _leaders(
        self, ids: Ids | int, scores: FloatRow, k: int, count: int
    ) -> tuple[Ids, npt.NDArray[np.float64]]:
        """(indices, perturbed scores) that hold the `count` largest."""
        # Only noise above (count-th best so far - score) can win. The leaders, within 8 nats of the
        # top, are worked out; each of the others needs noise above `gap`, which few of them have,
        # and that is seen from the integer bits without a logarithm.
        top = float(scores.max())
        near = np.flatnonzero(scores >= top - 8.0)
        bits = _bits(k, ids)
        noisy = scores[near].astype(np.float64) + _to_gumbel(bits[near])
        if len(near) < len(scores):
            gap = _nth(noisy, count) - (top - 8.0)
            threshold = np.uint64(min(max(np.exp(-np.exp(-gap)) * 2.0**53 - 2.0, 0.0), 2.0**53 - 1))
            far = np.flatnonzero(bits >= threshold)
            far = far[scores[far] < top - 8.0]
            near = np.concatenate([near, far])
            noisy = np.concatenate([noisy, scores[far].astype(np.float64) + _to_gumbel(bits[far])])
        return near, noisy


def _nucleus(scores: FloatRow, top_p: float) -> Ids:
    """Indices of the smallest set of best scores with probability of at least top_p, ascending."""
    weights = np.exp(scores.astype(np.float64) - float(scores.max()))
    weights /= weights.sum()
    floor = 1e-3
    while True:  # sort only what is above the floor, and lower the floor until that is enough
        head = np.flatnonzero(weights >= floor) if floor > 1e-12 else np.arange(len(weights))
        order = head[np.argsort(-weights[head], kind="stable")]
        reach = np.cumsum(weights[order])
        if len(order) == len(weights) or (len(reach) and reach[-1] >= top_p):
            count = min(int(np.searchsorted(reach, top_p)) + 1, len(order))
            return np.sort(order[:count])
        floor *= 1e-2


def _take(ids: Ids | int, keep: Ids) -> Ids:
    return keep if isinstance(ids, int) else ids[keep]


def _pick(ids: Ids | int, at: int) -> int:
    return at if isinstance(ids, int) else int(ids[at])


def _nth(values: npt.NDArray[Any], n: int) -> float:
    """The n-th largest; -inf if there are fewer."""
    if n == 1:
        return float(values.max())
    return float(np.partition(values, -n)[-n]) if len(values) >= n else -np.inf
