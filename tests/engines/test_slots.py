"""Sequences in one forward: every row is the row of its own sequence run alone.

The reference is one forward over a path without any cache.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from conftest import NO_TREES, TREES, VOCABULARY, random_ids, shared_model, tiny_model
from draftwise.engines import slots
from draftwise.engines.base import BATCHES, PrefillChunk, Verify, sweep_batches
from draftwise.engines.transformers import TransformersEngine

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=TREES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return shared_model(request.param)


def logits_of(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    with torch.inference_mode():
        row = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
    made: np.ndarray = row[:VOCABULARY].float().numpy()
    return made


def start(engine: TransformersEngine, texts: dict[int, list[int]]) -> None:
    for seq, text in texts.items():
        engine.open(seq, text)
        engine.forward([PrefillChunk(seq, tuple(text))])


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    path = [row]
    while path[0]:
        path.insert(0, parents[path[0] - 1])
    return path


def random_work(seq: int, dice: random.Random) -> Verify:
    nodes = dice.choice([0, 0, 1, 3, 7, 12])
    tree = dice.random() < 0.5
    parents = tuple(dice.randint(0, row) if tree else row for row in range(nodes))
    tokens = tuple(random_ids(nodes + 1, seed=dice.randrange(1 << 30)))
    return Verify(seq, tokens, parents, width=dice.choice([0, nodes + 3]))


def step(
    model: PreTrainedModel,
    engine: TransformersEngine,
    texts: dict[int, list[int]],
    members: Sequence[int],
    dice: random.Random,
) -> None:
    """One forward for `members`; checks a random path of each, and keeps it."""
    work = [random_work(seq, dice) for seq in members]
    got = engine.forward(work)
    for w, rows in zip(work, got, strict=True):
        path = path_to(dice.randint(0, len(w.parents)), w.parents)
        text = texts[w.seq]
        assert len(rows.argmax()) == len(w.tokens)
        for row in path:
            text.append(w.tokens[row])
            np.testing.assert_allclose(rows.row(row), logits_of(model, text), atol=TOLERANCE)
            assert rows.argmax()[row] == int(rows.row(row).argmax())
        engine.commit(w.seq, path)
        assert engine._sequences[w.seq].tokens == text


def test_rows_of_several_sequences_are_their_own_while_they_join_and_leave(
    model: PreTrainedModel,
) -> None:
    engine, dice = TransformersEngine(model), random.Random(1)
    texts = {seq: random_ids(n, seed=seq) for seq, n in enumerate((1, 40, 7, 19))}
    start(engine, texts)
    for members in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 0, 2], [1, 3], [1], [0, 2], [3, 1, 2, 0]):
        step(model, engine, texts, members, dice)
    engine.close(1)
    del texts[1]
    texts[9] = random_ids(5, seed=9)
    start(engine, {9: texts[9]})
    for members in ([0, 2, 3], [9, 0, 2, 3], [2], [9, 0, 2, 3]):
        step(model, engine, texts, members, dice)


def test_the_same_sequences_are_not_copied_again_until_they_outgrow_their_room(
    model: PreTrainedModel,
) -> None:
    engine = TransformersEngine(model)
    texts = {0: random_ids(4, seed=0), 1: random_ids(100, seed=1)}
    start(engine, texts)
    groups, moves = [], 0
    for turn in range(30):
        tokens = [tuple(random_ids(10, seed=turn)) for _ in texts]
        engine.forward([Verify(seq, t) for seq, t in zip(texts, tokens, strict=True)])
        for seq, t in zip(texts, tokens, strict=True):
            engine.commit(seq, range(10))
            texts[seq] += t
        moves += not groups or groups[-1] is not engine._groups._groups[-1]
        groups.append(engine._groups._groups[-1])
    assert 1 <= moves <= 2 < slots.BLOCK
    for seq, text in texts.items():
        rows = engine.forward([Verify(seq, (5,))])[0]
        np.testing.assert_allclose(rows.row(0), logits_of(model, [*text, 5]), atol=TOLERANCE)


@pytest.mark.parametrize("away", [[1], [1, 2], [0], [3], [0, 1], [0, 3]])
def test_those_that_stay_away_for_a_while_are_neither_copied_nor_changed(
    model: PreTrainedModel, away: list[int]
) -> None:
    engine, dice = TransformersEngine(model), random.Random(4)
    texts = {seq: random_ids(n, seed=seq) for seq, n in enumerate((1, 40, 7, 19))}
    start(engine, texts)
    step(model, engine, texts, [0, 1, 2, 3], dice)
    (group,) = engine._groups._groups
    for _ in range(3):
        step(model, engine, texts, [seq for seq in texts if seq not in away], dice)
        step(model, engine, texts, [3, 1, 0, 2], dice)
    assert engine._groups._groups == [group]


def test_a_full_context_may_stay_away() -> None:
    model = tiny_model("gpt2", max_position_embeddings=16)
    engine = TransformersEngine(model)
    texts = {seq: random_ids(n, seed=seq) for seq, n in enumerate((3, 15, 4))}
    start(engine, texts)
    engine.forward([Verify(seq, (7,)) for seq in texts])
    for seq, text in texts.items():
        engine.commit(seq, (0,))
        text.append(7)
    for rows, text in zip(
        engine.forward([Verify(0, (8,)), Verify(2, (9,))]),
        ([*texts[0], 8], [*texts[2], 9]),
        strict=True,
    ):
        np.testing.assert_allclose(rows.row(0), logits_of(model, text), atol=TOLERANCE)


def test_batches_that_take_turns_are_not_copied_each_time(model: PreTrainedModel) -> None:
    engine, dice = TransformersEngine(model), random.Random(6)
    texts = {seq: random_ids(5 + seq, seed=seq) for seq in range(5)}
    start(engine, texts)
    seen = []
    for _ in range(3):
        step(model, engine, texts, [0, 1], dice)
        step(model, engine, texts, [2, 3, 4], dice)
        seen.append(list(engine._groups._groups))
    assert len(seen[0]) == 2 and seen[0] == seen[1] == seen[2]


def test_nothing_of_a_batch_stays_when_it_is_over(model: PreTrainedModel) -> None:
    engine, texts = TransformersEngine(model), {0: random_ids(9, seed=0), 1: random_ids(3, seed=1)}
    start(engine, texts)
    engine.forward([Verify(0, (4,)), Verify(1, (4,))])
    gone = [weakref.ref(states) for s in engine._groups._groups[0]._layers if s for states in s]
    assert gone
    engine.close(0)
    engine.close(1)
    gc.collect()
    assert not any(states() is not None for states in gone)


def test_a_sequence_kept_for_a_next_turn_is_not_written_over(model: PreTrainedModel) -> None:
    engine, dice = TransformersEngine(model), random.Random(2)
    texts = {seq: random_ids(12, seed=seq) for seq in range(3)}
    start(engine, texts)
    step(model, engine, texts, [0, 1, 2], dice)
    engine.close(1, keep=True)
    for _ in range(3):
        step(model, engine, texts, [0, 2], dice)
    assert engine.open(1, [*texts[1], 3]) == len(texts[1])
    rows = engine.forward([PrefillChunk(1, (3,))])[0]
    np.testing.assert_allclose(rows.row(0), logits_of(model, [*texts[1], 3]), atol=TOLERANCE)


def test_a_prefill_beside_running_sequences_leaves_them_alone(model: PreTrainedModel) -> None:
    engine, texts = TransformersEngine(model), {0: random_ids(9, seed=0), 1: random_ids(3, seed=1)}
    start(engine, texts)
    new = random_ids(6, seed=2)
    engine.open(2, new)
    work = [Verify(0, (4,)), PrefillChunk(2, tuple(new)), Verify(1, (8, 9), (0,))]
    got = engine.forward(work)
    ends = [([*texts[0], 4], 0), (new, 0), ([*texts[1], 8, 9], 1)]
    for rows, (text, row) in zip(got, ends, strict=True):
        np.testing.assert_allclose(rows.row(row), logits_of(model, text), atol=TOLERANCE)


def test_rows_that_hide_nothing_show(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: with keys written one place too far, what a sequence sees is off."""
    engine, dice = TransformersEngine(model), random.Random(1)
    texts = {0: random_ids(4, seed=0), 1: random_ids(30, seed=1)}
    start(engine, texts)
    layers = slots.Group.layers

    def too_far(self: slots.Group, span: range, new: int) -> list[Any]:
        made: list[Any] = layers(self, span, new)
        for layer in made:
            layer._at = (layer._at + 1).clamp(max=layer.keys.shape[-2] - 1)
        return made

    monkeypatch.setattr(slots.Group, "layers", too_far)
    with pytest.raises(AssertionError):
        step(model, engine, texts, [0, 1], dice)


@pytest.mark.parametrize("family", NO_TREES)
def test_models_without_trees_run_one_after_another(family: str) -> None:
    engine = TransformersEngine(shared_model(family))
    assert engine.caps.batch == "single"
    texts = {seq: random_ids(9 + seq, seed=seq) for seq in range(3)}
    start(engine, texts)
    got = engine.forward([Verify(seq, (7, 8)) for seq in texts])
    for rows, text in zip(got, texts.values(), strict=True):
        expected = logits_of(shared_model(family), [*text, 7, 8])
        np.testing.assert_allclose(rows.row(1), expected, atol=TOLERANCE)


def test_what_would_mix_sequences_up_is_refused(llama: PreTrainedModel) -> None:
    engine = TransformersEngine(llama)
    start(engine, {0: [1, 2, 3], 1: [4, 5]})
    with pytest.raises(ValueError, match="twice"):
        engine.forward([Verify(0, (1,)), Verify(0, (2,))])
    engine.forward([Verify(0, (1, 5, 6), (0, 0)), Verify(1, (2,))])
    with pytest.raises(ValueError, match="not committed"):
        engine.forward([Verify(0, (1,)), Verify(1, (2,))])
    engine.commit(0, (0, 2))
    with pytest.raises(ValueError, match="begins at committed rows"):
        engine.forward([Verify(0, (1,)), Verify(1, (1, 5, 6), (0, 0))])


def test_rows_may_follow_rows_that_are_not_committed_yet(model: PreTrainedModel) -> None:
    """As a draft model's do, token after token; padding of the earlier ones is not between."""
    engine, texts = TransformersEngine(model), {0: random_ids(4, seed=0), 1: random_ids(9, seed=1)}
    start(engine, texts)
    for turn in range(3):
        work = [Verify(0, (7 + turn,)), Verify(1, tuple(random_ids(1 + turn, seed=turn)))]
        for w, rows in zip(work, engine.forward(work), strict=True):
            texts[w.seq] += w.tokens
            row = rows.row(len(w.tokens) - 1)
            np.testing.assert_allclose(row, logits_of(model, texts[w.seq]), atol=TOLERANCE)
    engine.commit(0, (0, 1))
    engine.commit(1, ())
    texts = {0: texts[0][:6], 1: texts[1][:9]}
    for seq, text in texts.items():
        assert engine._sequences[seq].tokens == text
        row = engine.forward([Verify(seq, (3,))])[0].row(0)
        np.testing.assert_allclose(row, logits_of(model, [*text, 3]), atol=TOLERANCE)


def test_a_sequence_that_is_still_empty_runs_beside_others(model: PreTrainedModel) -> None:
    engine, texts = TransformersEngine(model), {0: random_ids(4, seed=0), 1: random_ids(9, seed=1)}
    start(engine, texts)
    engine.open(2, ())
    work = [Verify(0, (5,)), Verify(2, (6, 7)), Verify(1, (8,))]
    ends = ([*texts[0], 5], [6, 7], [*texts[1], 8])
    for rows, w, text in zip(engine.forward(work), work, ends, strict=True):
        row = rows.row(len(w.tokens) - 1)
        np.testing.assert_allclose(row, logits_of(model, text), atol=TOLERANCE)


def test_forwards_of_several_sequences_are_timed_and_nothing_stays_open(
    llama: PreTrainedModel,
) -> None:
    engine, points = TransformersEngine(llama), []
    sweep_batches(engine, 60.0, lambda shape, seconds: points.append((shape, seconds)))
    assert {(s.batch, s.width) for s, _ in points} == {(b, w) for b in BATCHES for w in (1, 4)}
    assert all(seconds > 0 for _, seconds in points)
    assert not engine._sequences and not engine._groups._groups
    sweep_batches(engine, 0.0, lambda *point: pytest.fail("no time was given"))
