"""One token from one row: the noise, the argmax over it, and what the row goes through before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftwise import sampling
from draftwise.core import FloatRow, SamplingParams
from draftwise.sampling import ACCEPT, DRAFT, RESIDUAL, TOKEN, Sampler, gumbel, key, mix, uniform
from toy import distribution, fit

WIDE = 151_936


def rows(seed: int, size: int = WIDE) -> list[FloatRow]:
    """Rows of several kinds: a model's, flat, peaked, with ties, mostly masked."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(0.0, 3.0, size).astype(np.float32)
    flat = rng.normal(0.0, 0.01, size).astype(np.float32)
    peaked = normal.copy()
    peaked[rng.integers(size)] = 40.0
    tied = np.round(normal)
    masked = np.full(size, -np.inf, np.float32)
    some = rng.choice(size, 5, replace=False)
    masked[some] = normal[some]
    return [normal, flat, peaked, tied, masked]


def naive(row: FloatRow, temperature: float, k: int) -> tuple[int, float]:
    """(token, lead) by the definition: noise on every token, no pruning."""
    noisy = (row / np.float32(temperature)).astype(np.float64) + gumbel(k, len(row))
    best = int(noisy.argmax())
    lead = float(noisy[best] - np.delete(noisy, best).max())
    return best, min(lead, 30.0)


def ranked(sampler: Sampler, row: FloatRow, generated: Sequence[int] = ()) -> tuple[int, float]:
    """(token, lead), from the two best."""
    (token, _), (first, second) = sampler.ranking(row, generated, 2)
    return token, min(first - second, 30.0)


# noise


def test_noise_is_standard_gumbel() -> None:
    for seed in range(5):
        assert stats.kstest(gumbel(key(seed, 3), 50_000), "gumbel_r").pvalue > 1e-3


def test_the_ks_test_sees_noise_that_is_scaled_or_coarse() -> None:
    noise = gumbel(key(0, 3), 50_000)
    assert stats.kstest(noise * 1.05, "gumbel_r").pvalue < 1e-4
    coarse = np.floor(np.exp(-np.exp(-noise)) * 32) / 32 + 1 / 64
    assert stats.kstest(-np.log(-np.log(coarse)), "gumbel_r").pvalue < 1e-4


def test_the_tail_reaches_beyond_what_float32_can_say_and_stays_finite() -> None:
    least, most = sampling._to_gumbel(np.array([0, 2**53 - 1], np.uint64))
    assert np.isfinite([least, most]).all() and least < -3.6 and most > 36.0


@pytest.mark.parametrize("other", [(7, 4), (8, 3), (7, 3, DRAFT), (7, 3, TOKEN, 1)])
def test_noise_is_independent_across_index_seed_stream_and_choice(other: tuple[int, ...]) -> None:
    a, b = gumbel(key(7, 3), 50_000), gumbel(key(*other), 50_000)
    assert stats.spearmanr(a, b).pvalue > 1e-3
    assert stats.spearmanr(a[1:], b[:-1]).pvalue > 1e-3
    assert stats.spearmanr(a[1:], a[:-1]).pvalue > 1e-3


def test_keys_of_all_positions_and_streams_differ() -> None:
    keys = {
        key(seed, index, stream, choice)
        for seed in (-1, 0, 1, 2**62)
        for index in range(200)
        for stream in (TOKEN, DRAFT, ACCEPT, RESIDUAL)
        for choice in range(3)
    }
    assert len(keys) == 4 * 200 * 4 * 3


def test_the_generator_is_splitmix64() -> None:
    # Its published first outputs for seed 0: a seed must mean the same text on every machine.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix(i * 0x9E3779B97F4A7C15 % 2**64) for i in range(3)] == published
    assert sampling._bits(0, np.arange(1, 4)).tolist() == [p >> 11 for p in published]


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked() -> None:
    every = gumbel(key(5, 9), 10_000)
    ids = np.array([0, 17, 4095, 4096, 9999])
    assert (gumbel(key(5, 9), ids) == every[ids]).all()
    assert (gumbel(key(5, 9), 3) == every[:3]).all()


def test_uniforms_are_uniform_and_inside_the_open_interval() -> None:
    draws = [uniform(key(i, 2, ACCEPT), j) for i in range(3_000) for j in range(3)]
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    assert stats.spearmanr(draws[0::3], draws[1::3]).pvalue > 1e-3
    assert all(0.0 < u < 1.0 for u in draws)


# the argmax


def best(sampler: Sampler, row: np.ndarray, generated: list[int]) -> tuple[int, float]:
    """The token and its lead over the next, as `ranking` has them."""
    tokens, scores = sampler.ranking(row, generated, 2)
    assert tokens[0] == sampler.token(row, generated)
    return tokens[0], min(scores[0] - scores[1], 30.0) if len(scores) > 1 else 30.0


@pytest.mark.parametrize("seed", range(12))
def test_pruning_equals_the_full_argmax_and_its_lead(seed: int) -> None:
    for row in rows(seed):
        for temperature in (0.3, 1.0, 1.7):
            sampler = Sampler(SamplingParams(temperature=temperature), seed)
            generated = [0] * (3 * seed)
            expected = naive(row, temperature, key(seed, len(generated)))
            assert best(sampler, row, generated) == pytest.approx(expected)
            assert sampler.token(row, generated) == expected[0]


def test_pruning_holds_where_tail_tokens_win() -> None:
    # One token at the top and so many far below that one of them is drawn now and then.
    row = np.zeros(WIDE, np.float32)
    row[1234] = 11.0
    sampler = Sampler(SamplingParams(temperature=1.0), 3)
    drawn = [best(sampler, row, [0] * i) for i in range(60)]
    for i, found in enumerate(drawn):
        assert found == pytest.approx(naive(row, 1.0, key(3, i)))
    assert 5 < sum(token != 1234 for token, _ in drawn) < 55


@pytest.mark.parametrize("options", [{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.05}])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_ranking_is_that_of_all_perturbed_scores(options: dict[str, float], count: int) -> None:
    for seed, row in enumerate(rows(count, 3_000)):
        sampler = Sampler(SamplingParams(temperature=0.9, **options), seed)
        ids, scores = sampler.support(row, [0, 0])
        known = np.arange(ids) if isinstance(ids, int) else ids
        noisy = scores.astype(np.float64) + gumbel(key(seed, 2), known)
        order = np.argsort(-noisy, kind="stable")[:count]
        order = order[noisy[order] > -np.inf]
        tokens, found = sampler.ranking(row, [0, 0], count)
        assert tokens == known[order].tolist()
        assert found == pytest.approx(noisy[order].tolist())


def test_greedy_is_the_argmax_and_its_lead() -> None:
    for row in rows(1, 4_000):
        token, lead = best(Sampler(SamplingParams(), 0), row, [])
        assert token == int(row.argmax())
        assert lead == min(float(row[token]) - float(np.delete(row, token).max()), 30.0)


@pytest.mark.parametrize("low", [-np.inf, -1e30, -200.0])
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.02}, {"temperature": 0.0}]
)
def test_padding_the_vocabulary_changes_no_token(low: float, options: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 1.2, **options})
    rng = np.random.default_rng(0)
    for seed in range(40):
        row = rng.normal(0.0, 2.0, 300).astype(np.float32)
        padded = np.concatenate([row, np.full(128, low, np.float32)])
        sampler = Sampler(params, seed)
        assert sampler.token(row, [1, 2]) == sampler.token(padded, [1, 2])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-4},
        {"temperature": 1e-30},
        {"temperature": 5e-324},
        {"temperature": 1.5, "top_k": 1},
        {"temperature": 1.5, "top_p": 1e-9},
        {"temperature": 1.5, "min_p": 1.0},
    ],
)
def test_extremes_are_greedy(options: dict[str, float]) -> None:
    for seed in range(50):
        row = np.random.default_rng(seed).normal(0.0, 2.0, 500).astype(np.float32)
        row[row.argmax()] += 0.1
        sampler = Sampler(SamplingParams(**options), seed)
        assert sampler.token(row, []) == int(row.argmax())
        assert sampler.probabilities(row, [])[row.argmax()] == 1.0


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_what_is_masked_is_never_drawn(options: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 3.0, **options})
    row = np.full(50, -np.inf, np.float32)
    row[31] = -5.0
    for seed in range(50):
        assert best(Sampler(params, seed), row, []) == (31, 30.0)
    row[[4, 40]] = 0.0
    assert {Sampler(params, seed).token(row, []) for seed in range(300)} <= {4, 31, 40}
    assert (
        Sampler(params, 0).probabilities(row, [])[[i for i in range(50) if row[i] < -9]].max() == 0
    )


# the distribution

FIT_ROW = np.array([0.0, 1.0, -1.0, 0.5, -3.0, 2.0, -np.inf, 0.2], np.float32)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8}])
def test_draws_follow_the_softmax(options: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **options})
    counts = np.bincount(
        [Sampler(params, seed).token(FIT_ROW, [0] * (seed % 7)) for seed in range(12_000)],
        minlength=8,
    )
    assert fit(counts, distribution(FIT_ROW, params)) > 1e-3


Noise = Callable[[np.ndarray], np.ndarray]


@pytest.mark.parametrize(
    "broken",
    [
        lambda noise: noise * 1.15,
        lambda noise: noise + np.linspace(0.0, 0.3, len(noise)),
        lambda noise: np.round(noise),
        lambda noise: -noise,
    ],
    ids=["scaled", "tilted", "coarse", "negated"],
)
def test_the_fit_sees_noise_that_is_wrong(broken: Noise, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sampling._to_gumbel
    monkeypatch.setattr(sampling, "_to_gumbel", lambda bits: broken(right(bits)))
    params = SamplingParams(temperature=1.0)
    counts = np.bincount(
        [Sampler(params, seed).token(FIT_ROW, []) for seed in range(12_000)], minlength=8
    )
    assert fit(counts, distribution(FIT_ROW, params)) < 1e-6


def pairs(params: SamplingParams) -> tuple[FloatRow, FloatRow]:
    """Counts of the first two tokens together, and their probabilities."""
    counts = np.zeros((8, 8))
    for seed in range(12_000):
        sampler = Sampler(params, seed)
        counts[sampler.token(FIT_ROW, []), sampler.token(FIT_ROW, [0])] += 1
    one = distribution(FIT_ROW, params)
    return counts, np.outer(one, one)


def test_successive_draws_are_independent() -> None:
    assert fit(*pairs(SamplingParams(temperature=1.0))) > 1e-3


def test_the_fit_sees_noise_that_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "key", lambda seed, index: key(seed, 0))
    assert fit(*pairs(SamplingParams(temperature=1.0))) < 1e-6


def test_probabilities_are_those_of_the_draw() -> None:
    for options in ({}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 0.0}):
        params = SamplingParams(**{"temperature": 0.8, **options})
        got = Sampler(params, 0).probabilities(FIT_ROW, [])
        assert got == pytest.approx(distribution(FIT_ROW, params), abs=1e-6)
        assert got.dtype == np.float64 and got.sum() == pytest.approx(1.0, abs=1e-12)


# truncation and processors, against transformers


def warped(row: FloatRow, p: SamplingParams) -> FloatRow:
    chain = LogitsProcessorList([TemperatureLogitsWarper(p.temperature)])
    if p.top_k:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1.0:
        chain.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        chain.append(MinPLogitsWarper(p.min_p))
    warped: FloatRow = chain(torch.zeros(1, 1, dtype=torch.long), torch.tensor(row)[None])[
        0
    ].numpy()
    return warped


def supported(row: FloatRow, params: SamplingParams) -> FloatRow:
    """What `support` says, spread over the vocabulary as transformers does it."""
    ids, scores = Sampler(params, 0).support(row, [])
    spread = np.full(len(row), -np.inf, np.float32)
    spread[slice(None) if isinstance(ids, int) else ids] = scores
    return spread


def truncations(seed: int) -> SamplingParams:
    rng = np.random.default_rng(seed)
    return SamplingParams(
        temperature=float(rng.choice([1e-4, 0.5, 1.0, 1.3, 4.0])),
        top_k=int(rng.choice([0, 0, 1, 2, 20, 5_000])),
        top_p=float(rng.choice([1.0, 1e-6, 0.3, 0.9, 0.99, 0.9999])),
        min_p=float(rng.choice([0.0, 0.0, 1e-3, 0.1, 1.0])),
    )


@pytest.mark.parametrize("size", [3, 40, 2_000])
def test_supports_are_those_of_transformers(size: int) -> None:
    for seed in range(150):
        row = np.random.default_rng(seed).normal(0.0, 3.0, size).astype(np.float32)
        if seed % 3 == 0:
            row[:: max(size // 7, 2)] = -np.inf
        params = truncations(seed)
        ours, theirs = supported(row, params), warped(row, params)
        both = np.isfinite(ours) & np.isfinite(theirs)
        assert (ours[both] == theirs[both]).all()
        # They add probabilities up in float32: only a token at the very edge may differ.
        edge = np.flatnonzero(np.isfinite(ours) != np.isfinite(theirs))
        chance = Sampler(SamplingParams(temperature=params.temperature), 0).probabilities(row, [])
        assert chance[edge].sum() < 2e-5, f"{params}: {edge}"


def test_ties_at_the_edge_keep_as_many_as_transformers_does() -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        # Eighths: sums of probabilities do not fall on the edge by chance.
        row = (rng.integers(-8, 8, 50) / 8).astype(np.float32)
        params = truncations(seed)
        ours, theirs = supported(row, params), warped(row, params)
        assert (np.sort(ours) == np.sort(theirs)).all(), params


def test_a_support_is_never_empty() -> None:
    for seed in range(100):
        for row in rows(seed, 60):
            assert np.isfinite(supported(row, truncations(seed))).any()


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3, 5.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    rng = np.random.default_rng(0)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    for _ in range(30):
        row = rng.normal(0.0, 3.0, 100).astype(np.float32)
        prompt, generated = rng.integers(0, 100, 20).tolist(), rng.integers(0, 100, 9).tolist()
        ids = torch.tensor([[*prompt, *generated]])
        expected = theirs(ids, torch.tensor(row)[None])[0].numpy()
        sampler = Sampler(SamplingParams(repetition_penalty=penalty), 0, prompt)
        before = row.copy()
        _, scores = sampler.support(row, generated)
        assert (scores == expected).all()
        assert (row == before).all(), "the engine's row is not ours to change"


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    row = np.zeros(6, np.float32)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    _, scores = Sampler(params, 0, prompt=[5, 5]).support(row, [2, 3, 2])
    assert scores.tolist() == [0.0, 0.0, -1.0, -0.75, 0.0, 0.0]
    assert not row.any()


def test_logit_bias_adds_and_ignores_ids_beyond_the_row() -> None:
    row = np.zeros(4, np.float32)
    sampler = Sampler(SamplingParams(logit_bias={1: 2.5, 3: -1.0, 9: 50.0}), 0)
    assert sampler.support(row, [])[1].tolist() == [0.0, 2.5, 0.0, -1.0]
    assert sampler.token(row, []) == 1 and not row.any()


def test_min_new_tokens_is_that_of_transformers() -> None:
    row = np.array([3.0, 1.0, 5.0, 2.0], np.float32)
    theirs = MinNewTokensLengthLogitsProcessor(2, 3, [0, 2])
    sampler = Sampler(SamplingParams(min_new_tokens=3), 0, [1, 1], frozenset([0, 2, 900]))
    for n in range(5):
        expected = theirs(torch.tensor([[1, 1, *[3] * n]]), torch.tensor(row)[None])[0].numpy()
        assert (sampler.support(row, [3] * n)[1] == expected).all()
        assert sampler.token(row, [3] * n) == (3 if n < 3 else 2)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {3: 1.0}},
        {"min_new_tokens": 1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"temperature": 0.7},
    ],
)
def test_a_row_is_needed_wherever_the_raw_argmax_is_not_the_token(
    options: dict[str, float],
) -> None:
    assert Sampler(SamplingParams(**options), 0).needs_row(0)
    assert not Sampler(SamplingParams(), 0).needs_row(0)
    assert Sampler(SamplingParams(), 0, processors=[lambda ids, scores: scores]).needs_row(0)


def test_processors_see_the_history_and_may_write_to_what_they_get() -> None:
    seen: list[list[int]] = []

    def forbid(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.extend(ids.tolist())
        scores[:, 0] = -torch.inf
        return scores

    row = np.array([9.0, 1.0, 2.0], np.float32)
    sampler = Sampler(SamplingParams(), 0, [7, 8], processors=[forbid])
    assert sampler.token(row, [1]) == 2
    assert seen == [[7, 8, 1]] and row[0] == 9.0
