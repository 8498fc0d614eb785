"""Recurrent state is put back exactly, kept rows are fed again, and nothing of a rejected draft,
another sequence or an earlier request stays in it.

The reference is one forward over the whole text without any cache.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.engines.test_transformers import prefill, reference, verify, wrong
from transformers import PreTrainedModel

from conftest import CONTEXT, RECURRENT, VOCABULARY, plain_ids, random_ids, shared_model, tiny_model
from draftwise import Model, UsageError
from draftwise.engines import recurrent, trees
from draftwise.engines.base import UNFED, PrefillChunk, Shape, Verify, sweep
from draftwise.engines.transformers import TransformersEngine

EVERY = (*RECURRENT, "bamba")
# Linear attention in chunks and row by row differ by 2e-4 in the library itself; a state that is
# off by one row, by more than 1e-2.
TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=EVERY)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return shared_model(request.param)


def assert_rows(got: Sequence[np.ndarray], expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.stack(got), expected, atol=TOLERANCE)


@pytest.mark.parametrize("start", [1, 3, 40])
def test_rows_are_those_of_one_uncached_forward_after_any_rejections(
    model: PreTrainedModel, start: int
) -> None:
    engine, dice = TransformersEngine(model), random.Random(start)
    assert engine.caps.rollback == "refeed"
    text = random_ids(start + 70, seed=start)
    _, rows = prefill(engine, 7, text[:start])
    np.testing.assert_allclose(rows.row(0), reference(model, text[:start])[-1], atol=TOLERANCE)
    at, rejections, unfed = start, 0, 0
    while at < len(text):
        right = text[at : at + dice.choice([1, 1, 2, 4, 9])]
        rejected = wrong(text[at + len(right) :][: dice.choice([0, 1, 3, 10])])
        got = verify(engine, 7, [*right, *rejected], len(right), dice.choice([0, 30]))
        assert_rows(got, reference(model, [*text[:at], *right, *rejected])[at:])
        at, rejections = at + len(right), rejections + len(rejected)
        unfed = unfed + len(right) if rejected else 0
        assert engine.unfed(7) == unfed
    assert rejections > 20


def test_positions_stay_right_at_long_context_after_rejections(model: PreTrainedModel) -> None:
    engine, text = TransformersEngine(model), random_ids(430, seed=3)
    expected = reference(model, text)
    prefill(engine, 0, text[:400])
    for at in range(400, 430):
        draft = wrong(text[at : at + 5]) if at % 7 else []
        got = verify(engine, 0, [text[at], *draft], 1)
        np.testing.assert_allclose(got[0], expected[at], atol=TOLERANCE)


def test_a_cache_holds_what_was_fed_and_nothing_rejected(model: PreTrainedModel) -> None:
    engine, text = TransformersEngine(model), random_ids(30, seed=1)
    prefill(engine, 0, text[:20])
    before = states_of(engine, 0)
    sequence = engine._sequences[0]
    verify(engine, 0, [*text[20:22], 5, 6], 2)
    assert sequence.tokens == text[:20] and engine.unfed(0) == 2
    assert all(torch.equal(a, b) for a, b in zip(before, states_of(engine, 0), strict=True))
    verify(engine, 0, [text[22], 5], 1)
    assert sequence.tokens == text[:20] and engine.unfed(0) == 3
    verify(engine, 0, [text[23]], 1)
    assert sequence.tokens == text[:24] and engine.unfed(0) == 0
    verify(engine, 0, text[24:27], 3)
    assert sequence.tokens == text[:27] and engine.unfed(0) == 0
    for layer in sequence.cache.layers:
        if getattr(layer, "keys", None) is not None:
            assert layer.keys.shape[-2] == 27
        for state in (getattr(layer, "conv_states", None) or {}).values():
            assert state.shape[-1] == layer.conv_kernel_size[0]


def states_of(engine: TransformersEngine, seq: int) -> list[torch.Tensor]:
    layers = engine._sequences[seq].cache.layers
    return [
        state.clone()
        for layer in layers
        for kind in ("recurrent_states", "conv_states")
        for state in (getattr(layer, kind, None) or {}).values()
    ]


def test_plain_steps_copy_nothing(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, text, copies = TransformersEngine(model), random_ids(20), list[Any]()
    prefill(engine, 0, text[:10])
    saved = recurrent.saved
    monkeypatch.setattr(recurrent, "saved", lambda cache: copies.append(cache) or saved(cache))
    for token in text[10:]:
        verify(engine, 0, [token], 1)
    assert not copies
    for kept in (1, 2):
        verify(engine, 0, [1, 2], kept)
        layers = engine._sequences[0].cache.layers
        # Recording would take plain steps off their fast path.
        assert not any(getattr(layer, "record_past", False) for layer in layers)
    assert len(copies) == 2


def test_what_cannot_be_put_back_is_refused(model: PreTrainedModel) -> None:
    engine = TransformersEngine(model)
    prefill(engine, 0, [1, 2, 3])
    engine.forward([Verify(0, (4, 5))])
    with pytest.raises(ValueError, match="committed"):
        engine.forward([Verify(0, (4, 5))])
    with pytest.raises(ValueError, match="keep"):
        engine.commit(0, (0, 1, 2))
    prefill(engine, 1, [1, 2, 3])
    engine.forward([Verify(1, (4,))])
    with pytest.raises(ValueError, match="plain step"):
        engine.commit(1, ())
    prefill(engine, 2, [1, 2, 3])
    verify(engine, 2, [4, 5], 1)
    with pytest.raises(ValueError, match="prefill"):
        engine.forward([PrefillChunk(2, (7, 8))])


@pytest.mark.parametrize("last", [0, 1])
def test_a_warm_cache_gives_the_rows_of_a_cold_one(model: PreTrainedModel, last: int) -> None:
    """`last`: rows of the last draft that were rejected, so that some kept rows are unfed."""
    engine, text = TransformersEngine(model), random_ids(60, seed=8)
    prefill(engine, 0, text[:20])
    for at in range(20, 31, 2):
        verify(engine, 0, [*text[at : at + 2], *wrong(text[:2])[:last]], 2)
    engine.close(0, keep=True)
    reused, rows = prefill(engine, 1, text[:50])
    assert reused == (20 if last else 32)
    np.testing.assert_allclose(rows.row(0), reference(model, text[:50])[-1], atol=TOLERANCE)
    got = verify(engine, 1, [*text[50:53], 1, 2], 3)
    assert_rows(got[:3], reference(model, text[:53])[50:])
    got = verify(engine, 1, text[53:], 7)
    assert_rows(got, reference(model, text)[53:])


@pytest.mark.parametrize("same", [0, 1, 10, 30])
def test_a_warm_cache_that_goes_on_otherwise_is_dropped(model: PreTrainedModel, same: int) -> None:
    engine, text = TransformersEngine(model), random_ids(31, seed=9)
    prefill(engine, 0, text)
    engine.close(0, keep=True)
    turned = [*text[:same], *wrong(text[same:]), 5, 6]
    reused, rows = prefill(engine, 1, turned)
    assert reused == 0
    np.testing.assert_allclose(rows.row(0), reference(model, turned)[-1], atol=TOLERANCE)


@pytest.mark.parametrize("draft", [0, 2])
def test_rows_between_forward_and_commit_are_not_kept(model: PreTrainedModel, draft: int) -> None:
    engine, text = TransformersEngine(model), random_ids(40, seed=4)
    prefill(engine, 0, text[:20])
    verify(engine, 0, text[20:22], 2)
    engine.forward([Verify(0, (1,) * (1 + draft))])
    engine.close(0, keep=True)
    reused, rows = prefill(engine, 1, text)
    assert reused == (22 if draft else 0)
    np.testing.assert_allclose(rows.row(0), reference(model, text)[-1], atol=TOLERANCE)


def test_nothing_of_a_request_is_left_in_the_next(model: PreTrainedModel) -> None:
    engine = TransformersEngine(model)
    for length in (30, 12, 4):
        text = random_ids(length + 6, seed=length)
        prefill(engine, 0, text[:length])
        assert engine.unfed(0) == 0
        got = verify(engine, 0, [text[length], *wrong(text[length + 1 :])], 1)
        np.testing.assert_allclose(got[0], reference(model, text)[length], atol=TOLERANCE)
        engine.close(0)


def test_several_sequences_do_not_touch_each_other(model: PreTrainedModel) -> None:
    engine = TransformersEngine(model)
    texts = {seq: random_ids(40, seed=seq) for seq in range(3)}
    expected = {seq: reference(model, text) for seq, text in texts.items()}
    for seq, text in texts.items():
        prefill(engine, seq, text[: 5 + 7 * seq])
    for offset in range(12):
        rows = {}
        for seq, text in texts.items():  # all forwards before all commits
            at = 5 + 7 * seq + offset
            tokens = (text[at], *wrong(text[at : at + seq]))
            rows[seq] = engine.forward([Verify(seq, tokens)])[0].row(0)
        for seq in texts:
            engine.commit(seq, (0,))
            at = 5 + 7 * seq + offset
            np.testing.assert_allclose(rows[seq], expected[seq][at], atol=TOLERANCE)


def test_the_sweep_measures_every_width(model: PreTrainedModel) -> None:
    engine, widths, seen = TransformersEngine(model), list[int](), list[Shape]()
    hook = model.register_forward_pre_hook(
        lambda m, a, k: widths.append(k["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        sweep(engine, 20.0, lambda shape, seconds: seen.append(shape))
    finally:
        hook.remove()
    assert {s.width for s in seen} == set(widths) == {1, 2, 4, 8, 16, 32, 64}
    assert not engine._sequences


def test_text_is_that_of_transformers_generate(
    model: PreTrainedModel, recwarn: pytest.WarningsRecorder
) -> None:
    made = Model(model, None)
    assert made.note is None and not [w for w in recwarn if "recurrent" in str(w.message)]
    for prompt in ([9], [5, 6, 7, 8] * 6, random_ids(40, seed=5)):
        expected = plain_ids(model, prompt, 60)
        for policy in ("plain", "fixed:1", "fixed:7", "fixed:3:suffix", "auto"):
            result = made.generate(prompt, max_new_tokens=60, policy=policy)
            assert list(result.token_ids) == expected
    assert not made.engine._sequences


def test_chat_turns_read_only_what_is_new(model: PreTrainedModel) -> None:
    made, prompt = Model(model, None), random_ids(12)
    for _ in range(3):
        result = made.generate(prompt, max_new_tokens=16, policy="fixed:4", reuse=True)
        assert list(result.token_ids) == plain_ids(model, prompt, 16)
        known = result.stats.reused_tokens
        assert len(prompt) == 12 or known >= len(prompt) - 5 - 1 - UNFED - 5
        prompt = [*prompt, *result.token_ids, *random_ids(5, seed=len(prompt))]


def test_positions_are_given_where_a_model_would_begin_anew() -> None:
    assert TransformersEngine(shared_model("bamba"))._can.positions
    assert not TransformersEngine(shared_model("granite_hybrid"))._can.positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_a_state_that_several_rows_do_not_read_is_found_out(dtype: torch.dtype, seed: int) -> None:
    for family, rollback in (("mamba", "none"), ("jamba", "none"), ("mamba2", "refeed")):
        engine = TransformersEngine(tiny_model(family, seed).to(dtype))
        assert engine.caps.rollback == rollback
        assert engine._can.one_by_one == (rollback == "none")


def test_a_state_that_cannot_be_put_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "restore", lambda cache, states, rows: cache.crop(-rows))
    assert TransformersEngine(shared_model("mamba2")).caps.rollback == "none"


@pytest.mark.parametrize("family", ["mistral", "gemma3", "lfm2", "bloom"])
def test_a_cache_that_does_not_crop_what_it_says_is_found_out(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model(family)
    assert TransformersEngine(model).caps.rollback == "free"
    monkeypatch.setattr(transformers.DynamicCache, "crop", lambda cache, rows: None)
    assert TransformersEngine(model).caps.rollback == "none"


def test_rounding_alone_takes_no_rollback_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "close", lambda *a: False)
    for family, rollback in (("llama", "free"), ("mistral", "free"), ("mamba2", "none")):
        assert TransformersEngine(shared_model(family)).caps.rollback == rollback


def test_a_state_inside_the_model_itself_is_refused() -> None:
    with pytest.raises(UsageError, match="outside of a cache"):
        TransformersEngine(tiny_model("recurrent_gemma"))


def test_the_model_is_left_as_it_was(model: PreTrainedModel) -> None:
    config, before = copy.deepcopy(model.config.to_dict()), set(vars(model))
    made = Model(model, None)
    made.generate([4, 5] * 8, max_new_tokens=30, policy="fixed:5")
    assert model.config.to_dict() == config and set(vars(model)) == before
    assert made.engine.caps.context == CONTEXT or model.config.model_type == "mamba2"
    assert made.engine.caps.vocabulary == VOCABULARY
