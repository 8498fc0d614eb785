"""A draft model that is never right is reported within fifty steps, and no other is."""

from __future__ import annotations

import logging

import pytest
from transformers import PreTrainedModel

from conftest import random_ids, shared_model
from draftwise import Model
from draftwise.alarm import ASKS, Alarm
from draftwise.core import Features, StepPlan, StepResult, chain


def step(first: int, asked: str | None = "model") -> StepResult:
    draft = chain(0, "model", [first, 1], [Features()] * 2)
    return StepResult(0, StepPlan(0, None, 1), 5, (7,), 0, (draft,), asked)


def test_a_wrong_draft_model_is_reported_within_fifty_steps(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    draft = shared_model("llama", 1)
    model = Model(llama, None, ["lookup", draft], policy="fixed:4:model")
    with caplog.at_level(logging.WARNING, "draftwise"):
        first = model.generate(random_ids(20), max_new_tokens=50)
    assert first.stats.steps <= 50
    assert "wrong in all of its first" in str(first.stats.note) and first.stats.note == model.note
    assert [r.getMessage() for r in caplog.records] == [model.note]


def test_a_right_one_is_not(llama: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(llama, None, [llama], policy="fixed:4:model")
    assert model.generate(random_ids(20), max_new_tokens=60).stats.note is None
    assert not caplog.records


def test_it_counts_drafts_over_requests_until_one_is_right() -> None:
    alarm = Alarm()
    for _ in range(ASKS - 1):
        alarm.add(step(3))
        alarm.add(step(3, asked=None))
    assert not alarm.notes
    alarm.add(step(3))
    assert len(alarm.notes) == 1
    alarm.add(step(7))
    assert not alarm.notes
    once = Alarm()
    once.add(step(7))
    for _ in range(2 * ASKS):
        once.add(step(3))
    assert not once.notes
