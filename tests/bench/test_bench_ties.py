"""Judging texts against plain decoding: what is a tie, and that a broken engine is no tie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from conftest import plain_ids, random_ids, shared_model
from draftwise import Model, SamplingParams
from draftwise.bench.ties import BREAKS, WIDTHS, Judged, Teacher, broken, judge, verdict
from draftwise.sampling import Sampler

PROMPTS = [[5, 6, 7, 8] * 4 + [9, 5, 6], random_ids(30), [*random_ids(9, 1)] * 3]
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 11}]
LENGTH = 60


def texts(
    model: PreTrainedModel, ours: Model, how: str = "", draws: list[dict[str, Any]] = SAMPLINGS
) -> list[Judged]:
    judged = []
    for prompt in PROMPTS:
        teacher = Teacher(model, prompt)
        for sampling in draws:
            options = {"max_new_tokens": LENGTH, "policy": "fixed:4", **sampling}
            if how:
                with broken(ours.engine, model, how):
                    ids = ours.generate(prompt, **options).token_ids
            else:
                ids = ours.generate(prompt, **options).token_ids
            sampler = Sampler(SamplingParams(**sampling), sampling.get("seed", 0))
            own, wide = teacher.rows(ids), teacher.rows(ids, WIDTHS)
            judged.append(judge(sampler, ids, own, wide))
    return judged


@pytest.fixture(scope="module")
def ours() -> Model:
    return Model(shared_model("llama"), None)


def test_own_forwards_are_those_that_generate_chooses_from(llama: PreTrainedModel) -> None:
    for prompt in PROMPTS:
        ids = plain_ids(llama, prompt, 20)
        teacher = Teacher(llama, prompt)
        rows = teacher.rows(ids)
        assert rows.argmax(-1).tolist() == ids
        assert torch.allclose(teacher.rows(ids, WIDTHS), rows, atol=1e-4)
        assert torch.equal(teacher.rows(ids), rows)  # the cache is as it was
        assert teacher.rows(ids[:1]).shape[0] == 1


def test_texts_in_float32_are_those_of_plain_decoding(llama: PreTrainedModel, ours: Model) -> None:
    judged = texts(llama, ours)
    found = verdict(judged, judged)
    assert found.passed and found.differing == found.ties == found.errors == 0
    assert found.texts == 6 and found.tokens == 6 * LENGTH and 0 < found.allowance < 1e-3


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_engine_is_caught(llama: PreTrainedModel, ours: Model, how: str) -> None:
    judged = texts(llama, ours, how, [{}])
    assert not verdict(judged, judged).passed
    assert not verdict(texts(llama, ours), judged).errors  # it works again afterwards


def test_a_gap_is_that_of_perturbed_scores() -> None:
    rows = torch.tensor([[1.0, 3.0, 2.5, 0.0], [0.0, 1.0, 2.0, 3.0]])
    wide = torch.tensor([[1.0, 3.0, 3.1, 0.0], [0.0, 1.0, 2.0, 3.0]])
    greedy = judge(Sampler(SamplingParams(), 0), [2, 3], rows, wide)
    assert greedy.gaps == ((0, 0.5),) and greedy.changed == 1 and greedy.compared == 2
    assert greedy.noise == pytest.approx(0.6) and greedy.lost == 0.5
    assert judge(Sampler(SamplingParams(), 0), [1, 3], rows).compared == 0
    sampler = Sampler(SamplingParams(temperature=0.5, seed=3), 3)
    drawn = [sampler.token(row.numpy(), [0] * i) for i, row in enumerate(rows)]
    assert judge(sampler, drawn, rows, rows) == Judged(2, (), 0.0, 0, 0.0, 2)


def test_a_verdict_knows_ties_errors_and_too_many_ties() -> None:
    noise = [Judged(100, (), 0.2, 1, 0.05, 100)]
    tie = Judged(100, ((3, 0.1),), 0.2, 1, 0.05, 100)
    assert verdict([tie], noise).passed and verdict([tie], noise).ties == 1
    wrong = verdict([Judged(100, ((3, 0.1), (4, 0.3)))], noise)
    assert not wrong.passed and (wrong.ties, wrong.errors, wrong.worst) == (1, 1, 0.3)
    large = verdict([Judged(100, ((3, 0.19), (4, 0.19)))], noise)
    assert not large.passed and (large.ties, large.errors) == (2, 0)
    many = verdict([Judged(100, tuple((i, 0.01) for i in range(20)))], noise)
    assert not many.passed and many.errors == 0 and many.ties == 20 and many.differing == 1
    assert verdict([Judged(100, ())], []).passed
