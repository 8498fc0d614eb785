"""Trees: every row is the row of its own path, and what is kept is the text, whatever was not.

The reference is one forward over a path without any cache, or transformers' own `generate`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from conftest import NO_TREES, TREES, VOCABULARY, plain_ids, random_ids, shared_model, tiny_model
from draftwise.core import SamplingParams
from draftwise.decode import Parts, decode
from draftwise.engines import trees
from draftwise.engines.base import PrefillChunk, Verify
from draftwise.engines.transformers import TransformersEngine
from draftwise.policy.fixed import Plain
from toy import Everything, Guess, ToyDrafter, request, stopper

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[*TREES, "llama eager"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    family, _, attention = request.param.partition(" ")
    if attention:
        return tiny_model(family, attn_implementation=attention)
    return shared_model(family)


def logits_of(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    with torch.inference_mode():
        row = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
    made: np.ndarray = row[:VOCABULARY].float().numpy()
    return made


def start(engine: TransformersEngine, seq: int, text: Sequence[int]) -> int:
    reused = engine.open(seq, text)
    engine.forward([PrefillChunk(seq, tuple(text[reused:]))])
    return reused


def random_parents(nodes: int, dice: random.Random) -> tuple[int, ...]:
    return tuple(dice.randint(0, row) for row in range(nodes))


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    path = [row]
    while path[0]:
        path.insert(0, parents[path[0] - 1])
    return path


def rows_of(
    engine: TransformersEngine, seq: int, tokens: Sequence[int], parents: Sequence[int], **more: int
) -> np.ndarray:
    rows = engine.forward([Verify(seq, tuple(tokens), tuple(parents), **more)])[0]
    got = np.stack([rows.row(i) for i in range(len(tokens))])
    assert list(rows.argmax()) == got.argmax(-1).tolist()
    return got


def expected_rows(
    model: PreTrainedModel, text: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> np.ndarray:
    paths = [path_to(row, parents) for row in range(len(tokens))]
    return np.stack([logits_of(model, [*text, *(tokens[i] for i in path)]) for path in paths])


@pytest.mark.parametrize("held", [1, 3, 40])
def test_rows_of_a_tree_are_those_of_each_path_run_as_a_chain(
    model: PreTrainedModel, held: int
) -> None:
    engine, dice, text = TransformersEngine(model), random.Random(held), random_ids(held, held)
    assert engine.caps.trees
    start(engine, 0, text)
    for nodes in (2, 5, 15):
        tokens = random_ids(nodes + 1, seed=nodes)
        parents = (0, 0, *random_parents(nodes, dice)[2:])
        expected = expected_rows(model, text, tokens, parents)
        for width in (0, nodes + 6):
            got = rows_of(engine, 0, tokens, parents, width=width)
            np.testing.assert_allclose(got, expected, atol=TOLERANCE)
            engine.commit(0, ())
            assert engine._sequences[0].cache.get_seq_length() == held
        if nodes == 15:  # the control: a wrong parent shows in the rows behind it, and only there
            wrong = (*parents[:-1], (parents[-1] + 1) % nodes)
            got = rows_of(engine, 0, tokens, wrong)
            assert np.abs(got[-1] - expected[-1]).max() > 100 * TOLERANCE
            np.testing.assert_allclose(got[:-1], expected[:-1], atol=TOLERANCE)


@pytest.mark.parametrize("seed", [1, 2])
def test_many_steps_of_random_trees_and_random_kept_paths(
    model: PreTrainedModel, seed: int
) -> None:
    engine, dice, text = TransformersEngine(model), random.Random(seed), random_ids(9, seed)
    start(engine, 0, text)
    sequence, moved = engine._sequences[0], 0
    for step in range(40):
        nodes = dice.choice([0, 1, 3, 8, 13])
        tokens = random_ids(nodes + 1, seed=100 * seed + step)
        chain = step % 4 == 0
        parents = tuple(range(nodes)) if chain else random_parents(nodes, dice)
        row = dice.randint(nodes // 2, nodes)
        got = rows_of(engine, 0, tokens, parents, width=dice.choice([0, nodes + 4]))
        path = path_to(row, parents)
        pointers = [layer.keys.data_ptr() for layer in sequence.cache.layers]
        engine.commit(0, path)
        # Rows move within the cache: it is not copied.
        assert pointers == [layer.keys.data_ptr() for layer in sequence.cache.layers]
        for i, kept in enumerate(path):
            text.append(tokens[kept])
            np.testing.assert_allclose(got[kept], logits_of(model, text), atol=TOLERANCE)
            moved += i != kept
        assert sequence.tokens == text
        assert {layer.keys.shape[-2] for layer in sequence.cache.layers} == {len(text)}
    assert moved > 15
    again = rows_of(engine, 0, [5, 6], [0])
    np.testing.assert_allclose(again, expected_rows(model, text, [5, 6], [0]), atol=TOLERANCE)


def test_text_after_a_kept_branch_is_that_of_a_new_start(model: PreTrainedModel) -> None:
    engine, text = TransformersEngine(model), random_ids(12, seed=4)
    start(engine, 0, text)
    tokens, parents = random_ids(7, seed=5), (0, 0, 1, 2, 3, 4)
    rows_of(engine, 0, tokens, parents)
    engine.commit(0, (0, 2, 4, 6))
    text += [tokens[i] for i in (0, 2, 4, 6)]
    expected = plain_ids(model, text, 20)
    token, written = expected[0], [expected[0]]
    while len(written) < 20:
        token = engine.forward([Verify(0, (token,))])[0].argmax()[0]
        engine.commit(0, (0,))
        written.append(token)
    assert written == expected


def test_keeping_other_rows_than_the_path_shows(llama: PreTrainedModel) -> None:
    """The control: with the siblings' keys left in place, later rows are off."""
    engine, text, tokens = TransformersEngine(llama), random_ids(12, seed=4), random_ids(4, seed=5)
    start(engine, 0, text)
    rows_of(engine, 0, tokens, (0, 0, 2))
    sequence = engine._sequences[0]
    sequence.cache.crop(-1)
    sequence.tokens.pop()
    sequence.pending, sequence.parents = 0, ()
    got = rows_of(engine, 0, [7], ())
    kept = [*text, tokens[0], tokens[2], tokens[3], 7]
    assert np.abs(got[0] - logits_of(llama, kept)).max() > 100 * TOLERANCE


def test_a_tree_left_uncommitted_is_not_kept(llama: PreTrainedModel) -> None:
    engine, text = TransformersEngine(llama), random_ids(12, seed=6)
    start(engine, 0, text)
    rows_of(engine, 0, [1, 2, 3], (0, 0), width=5)
    engine.close(0, keep=True)
    assert start(engine, 1, [*text, 1, 3]) == len(text)
    got = rows_of(engine, 1, [4], ())
    np.testing.assert_allclose(got[0], logits_of(llama, [*text, 1, 3, 4]), atol=TOLERANCE)


def test_what_is_no_path_is_refused_and_leaves_the_tree(llama: PreTrainedModel) -> None:
    engine, text = TransformersEngine(llama), random_ids(5)
    start(engine, 0, text)
    engine.forward([Verify(0, (4, 5, 6, 7), (0, 0, 2), width=6)])
    for path in ((1,), (0, 1, 2), (0, 3), (0, 1, 3), (0, 2, 2), (0, 2, 4), (0, -2)):
        with pytest.raises(ValueError, match="not one path"):
            engine.commit(0, path)
    with pytest.raises(ValueError, match="not committed"):
        engine.forward([Verify(0, (1,))])
    engine.commit(0, (0, 2, 3))
    assert engine._sequences[0].tokens == [*text, 4, 6, 7]


def test_logits_of_the_first_ids_of_a_tree(llama: PreTrainedModel) -> None:
    engine, text = TransformersEngine(llama), random_ids(8)
    start(engine, 0, text)
    got = rows_of(engine, 0, [1, 2, 3, 4], (0, 0, 1), ids=100)
    expected = expected_rows(llama, text, [1, 2, 3, 4], (0, 0, 1))[:, :100]
    assert got.shape == (4, 100)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_take_trees(dtype: torch.dtype) -> None:
    short = copy.deepcopy(shared_model("llama")).to(dtype)
    engine, text = TransformersEngine(short), random_ids(8)
    assert engine.caps.trees
    start(engine, 0, text)
    got = rows_of(engine, 0, [1, 2, 3, 4], (0, 0, 1))
    np.testing.assert_allclose(got, expected_rows(short, text, [1, 2, 3, 4], (0, 0, 1)), atol=0.1)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "lfm2", *NO_TREES])
def test_models_without_trees_say_so_and_verify_chains(family: str) -> None:
    model = shared_model(family)
    engine, text = TransformersEngine(model), random_ids(20, seed=7)
    assert not engine.caps.trees and engine.caps.rollback == "free"
    start(engine, 0, text)
    with pytest.raises(NotImplementedError, match="chains only"):
        engine.forward([Verify(0, (4, 5, 6), (0, 0))])
    for keep in (1, 3, 2):
        tokens = random_ids(4, seed=keep)
        got = rows_of(engine, 0, tokens, (0, 1, 2))
        expected = expected_rows(model, text, tokens, (0, 1, 2))
        np.testing.assert_allclose(got, expected, atol=TOLERANCE)
        engine.commit(0, range(keep))
        text += tokens[:keep]


def test_recurrent_models_take_no_trees(recurrent_model: PreTrainedModel) -> None:
    assert not TransformersEngine(recurrent_model).caps.trees


def without_mask(given: dict[str, Any]) -> None:
    given["attention_mask"] = None


def without_positions(given: dict[str, Any]) -> None:
    given.pop("position_ids")


def failing(given: dict[str, Any]) -> None:
    raise TypeError("unexpected keyword argument 'position_ids'")


@pytest.mark.parametrize("oddity", [without_mask, without_positions, failing])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_models_are_found_out_and_verify_chains(oddity: Any, dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)

    def odd(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("attention_mask") is not None:
            oddity(kwargs)
        return args, kwargs

    handle = model.register_forward_pre_hook(odd, with_kwargs=True)
    engine = TransformersEngine(model)
    assert not engine.caps.trees and engine.caps.rollback == "free"
    handle.remove()
    assert TransformersEngine(model).caps.trees


def test_kernels_without_a_mask_and_unseen_windows_take_no_trees() -> None:
    model = tiny_model("llama")
    assert trees.possible(model)
    model.config._attn_implementation = "flash_attention_2"
    assert not trees.possible(model)
    assert not trees.possible(shared_model("gpt_neo"))
    # Within the window nothing would show: rows are cut by index, not by depth.
    with torch.inference_mode():  # as the engine does: caches are written in place
        assert trees.honoured(*_probed(shared_model("gpt_neo")))


def _probed(model: PreTrainedModel) -> tuple[PreTrainedModel, Any, str, torch.Tensor]:
    engine = TransformersEngine(model)
    with torch.inference_mode():
        cache, ids = engine._new_cache(), torch.tensor([trees.probe(VOCABULARY)])
        logits = model(input_ids=ids, use_cache=True, **{engine._cache_name: cache}).logits[0]
    return model, cache, engine._cache_name, logits


@pytest.mark.parametrize("family", TREES)
@pytest.mark.parametrize("context", [1, 2, 4, 5, 8])
def test_a_tiny_context_is_never_overshot_by_the_probe(family: str, context: int) -> None:
    engine = TransformersEngine(tiny_model(family, max_position_embeddings=context))
    assert engine.caps.trees == (context >= 5)


def test_the_model_is_left_as_it_was(model: PreTrainedModel) -> None:
    config = copy.deepcopy(model.config.to_dict())
    attention = model.config._attn_implementation
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = TransformersEngine(model)
    start(engine, 0, random_ids(6))
    rows_of(engine, 0, [1, 2, 3], (0, 0))
    engine.commit(0, (0, 2))
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == attention
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def branching(script: Sequence[int], dice: random.Random) -> Any:
    """Drafts a tree in which the script is one path among wrong ones, in any order of rows."""

    def guess(generated: list[int], text: list[int], depth: int) -> Guess:
        right = list(script[len(generated) : len(generated) + min(depth, 4)])
        tokens: list[int] = []
        parents: list[int] = []
        end = -1
        for token in right:
            for _ in range(dice.randint(0, 2)):
                tokens.append((token + dice.randint(1, 99)) % VOCABULARY)
                parents.append(dice.choice([end, len(tokens) - 2]))
            tokens.append(token)
            parents.append(end)
            end = len(tokens) - 1
        return Guess(tokens, parents)

    return guess


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_decoding_with_trees_gives_the_text_of_plain_decoding(
    llama: PreTrainedModel, temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=80, temperature=temperature, seed=3)
    asked = request(params, prompt=random_ids(7, seed=2))

    def text_of(drafters: dict[str, ToyDrafter], policy: Any) -> tuple[list[int], list[Any]]:
        parts = Parts(TransformersEngine(llama), drafters, policy, nullcontext())
        results = list(decode(parts, asked, stopper(asked)))
        assert not parts.engine._sequences  # type: ignore[attr-defined]
        return [t for result in results for t in result.committed], results

    plain, _ = text_of({}, Plain())
    if not temperature:
        assert plain == plain_ids(llama, asked.prompt, 80)
    drafter = ToyDrafter(branching(plain, random.Random(8)))
    text, results = text_of({"toy": drafter}, Everything())
    assert text == plain
    drafts = [(r.plan.draft, r.accepted) for r in results if r.plan.draft]
    assert sum(accepted for draft, accepted in drafts if not draft.is_chain) > 40
