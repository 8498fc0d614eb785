"""Other kernels compute the same: what is replaced, undone, refused and fallen back from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from conftest import plain_ids, random_ids, shared_model, tiny_model
from draftwise import Model, UsageError
from draftwise.engines import kernels, prepacked
from draftwise.engines.base import PrefillChunk, Verify
from draftwise.engines.compiled import Compiled
from draftwise.engines.transformers import TransformersEngine

FAMILIES = ("llama", "qwen2", "gpt_neo", "lfm2", "gemma3", "qwen3_next", "falcon_h1")
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _whatever_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on how fast this machine is."""
    monkeypatch.setattr(prepacked, "GAIN", 0.0)


def logits(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        made: np.ndarray = model(input_ids=torch.tensor([tokens])).logits[0].float().numpy()
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_prepacked_weights_give_the_same_text(family: str) -> None:
    model, prompt = tiny_model(family), random_ids(9, seed=1)
    expected = plain_ids(shared_model(family), prompt, 40)
    with Model(model, None, kernels="prepacked") as made:
        assert made.engine.kernels.used == ("prepacked",)
        assert list(made.generate(prompt, max_new_tokens=40).token_ids) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_prepacking_can_be_undone_bit_for_bit(tied: bool) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert prepacked.prepack(model) is None
    assert prepacked.is_prepacked(model)
    assert len(list(model.parameters())) < len(before)
    prepacked.restore(model)
    after = dict(model.named_parameters())
    assert set(after) | {"lm_head.weight"} == set(before) | {"lm_head.weight"}
    for name, weight in before.items():
        assert torch.equal(after[name], weight)


def test_memory_counts_prepacked_weights_once() -> None:
    model = tiny_model("llama")
    before = TransformersEngine(model).memory()
    engine = TransformersEngine(model, kernels="prepacked")
    # oneDNN pads odd sizes; nothing may be held twice.
    assert 0.9 * before < engine.memory() < 1.5 * before


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_padding_up_to_the_least_rows_changes_no_row(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(24, 7, bias=bias)
    layer = prepacked.Prepacked(linear, least=4)
    with torch.inference_mode():
        for states in (torch.randn(rows, 24), torch.randn(1, rows, 24)):
            torch.testing.assert_close(layer(states), linear(states), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("seconds", "least"), [({1: 2.0, 4: 1.5, 8: 1.8}, 4), ({1: 2.0, 4: 1.95, 8: 2.2}, 1)]
)
def test_the_least_rows_are_those_that_take_the_least_time(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], least: int
) -> None:
    def took(layers: Any, rows: int, dtype: torch.dtype) -> float:
        return 2.0 * seconds[rows] if type(layers[0]) is torch.nn.Linear else seconds[rows]

    monkeypatch.setattr(prepacked, "_seconds", took)
    gain, rows = prepacked._trial([torch.nn.Linear(8, 8)])
    assert (rows, gain >= 2.0) == (least, True)


def test_a_layer_that_was_replaced_is_computed_from_its_own_weights() -> None:
    """The control: with one weight changed before packing, the logits change."""
    model, tokens = tiny_model("llama"), random_ids(5, seed=2)
    right = logits(model, tokens)
    changed = tiny_model("llama")
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 5] += 1.0
    prepacked.prepack(model)
    prepacked.prepack(changed)
    np.testing.assert_allclose(logits(model, tokens), right, atol=TOLERANCE)
    assert np.abs(logits(changed, tokens) - right).max() > 100 * TOLERANCE


class _ReadsItsWeight(torch.nn.Module):
    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(states, self.inner.weight)


def test_a_model_that_reads_its_matrices_itself_stays_eager() -> None:
    model, tokens = tiny_model("llama"), random_ids(5, seed=2)
    before = logits(model, tokens)
    mlp = model.model.layers[0].mlp
    mlp.up_proj = _ReadsItsWeight(mlp.up_proj)
    engine = TransformersEngine(model, kernels="prepacked")
    assert engine.kernels.used == ()
    assert "something else" in str(engine.kernels.note)
    np.testing.assert_array_equal(logits(model, tokens), before)


def test_without_a_gain_the_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "GAIN", float("inf"))
    with Model(tiny_model("llama"), None, kernels="prepacked") as model:
        assert model.engine.kernels.used == ()
        assert "gain nothing" in str(model.note)
    with Model(tiny_model("llama"), None, kernels="auto") as model:
        assert model.note is None  # nobody asked for them by name


def test_a_layer_that_cannot_be_packed_leaves_all_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokens = tiny_model("llama", tie_word_embeddings=True), random_ids(5, seed=2)
    before, real, left = logits(model, tokens), prepacked._reorder, [30]

    def flaky(weight: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("no memory\nand more")
        packed: torch.Tensor = real(weight)
        return packed

    monkeypatch.setattr(prepacked, "_reorder", flaky)
    with Model(model, None, kernels="prepacked") as made:
        assert made.note == "kernels prepacked are not used: RuntimeError: no memory"
    assert left[0] <= 0 and not prepacked.is_prepacked(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    np.testing.assert_array_equal(logits(model, tokens), before)


@pytest.mark.parametrize("least", [1, 4])
def test_no_rows_are_no_rows(least: int) -> None:
    layer = prepacked.Prepacked(torch.nn.Linear(24, 7), least=least)
    with torch.inference_mode():
        assert layer(torch.zeros(0, 24)).shape == (0, 7)


def test_a_callers_model_is_left_alone() -> None:
    model = tiny_model("llama")
    with Model(model, None):
        pass
    assert not prepacked.is_prepacked(model)


def test_other_names_are_refused_before_a_weight_is_touched() -> None:
    model = tiny_model("llama")
    with pytest.raises(UsageError, match="unknown kernels 'fast': choose among auto, eager"):
        Model(model, None, kernels="fast")
    assert not prepacked.is_prepacked(model)


def test_engines_with_other_kernels_have_cost_curves_of_their_own() -> None:
    names = {
        TransformersEngine(tiny_model("llama"), kernels=k).name for k in ("eager", "prepacked")
    }
    assert len(names) == 2


def test_a_second_engine_on_a_prepacked_model_says_so() -> None:
    model = tiny_model("llama")
    one = TransformersEngine(model, kernels="prepacked")
    other = TransformersEngine(model)
    assert one.name == other.name


# Compiling. The tracer is the same for every backend; one test goes through inductor.


def traced(model: PreTrainedModel, backend: str) -> TransformersEngine:
    engine = TransformersEngine(model, kernels="prepacked")
    engine._compiled = Compiled(model.forward, backend)
    return engine


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_rows_are_those_of_the_model(backend: str) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    reference = tiny_model("llama", num_hidden_layers=1)
    engine, text = traced(model, backend), random_ids(9, seed=3)
    engine.open(0, text)
    engine.forward([PrefillChunk(0, tuple(text))])
    shapes = [((0, 0, 1), (0, 2)), ((0, 1, 2, 3, 4), (0, 1, 2)), ((), (0,)), ((0,), (0, 1))]
    for turn, (parents, path) in enumerate(shapes):
        tokens = random_ids(len(parents) + 1, seed=turn)
        rows = engine.forward([Verify(0, tuple(tokens), parents)])[0]
        for row in path:
            text.append(tokens[row])
            expected = logits(reference, text)[-1]
            np.testing.assert_allclose(rows.row(row), expected, atol=TOLERANCE)
        engine.commit(0, path)
    assert engine._compiled is not None and engine._compiled.runs
    torch.compiler.reset()


def test_a_compiled_forward_that_fails_is_run_again_without() -> None:
    calls = []

    def forward(**inputs: Any) -> Any:
        calls.append(inputs)
        return inputs["x"] + 1

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    compiled = Compiled(forward)
    compiled._compiled = torch.compile(forward, backend=broken)
    assert compiled(x=torch.ones(1)) == 2
    assert not compiled.runs
    assert "no compiler here" in str(compiled.failure)
    assert compiled(x=torch.zeros(1)) == 1


def test_where_compiling_does_not_work_the_model_runs_without_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        def fails(**inputs: Any) -> Any:
            raise RuntimeError("g++ is missing\nand more")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    model, prompt = tiny_model("llama"), random_ids(9, seed=1)
    with Model(model, None, kernels="compiled") as made:
        assert made.note == "kernels compiled are not used: RuntimeError: g++ is missing"
        assert made.engine.kernels.used == ("prepacked",)
        expected = plain_ids(shared_model("llama"), prompt, 30)
        assert list(made.generate(prompt, max_new_tokens=30).token_ids) == expected


def test_compiled_kernels_that_gain_are_used_and_give_the_same_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draftwise.engines.transformers.COMPILED_GAIN", 0.0)
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: real(f, **{**options, "backend": "aot_eager"})
    )
    model, prompt = tiny_model("llama"), [*random_ids(9, seed=1), *random_ids(9, seed=1)]
    with Model(model, None, kernels="compiled") as made:
        assert made.engine.kernels.used == ("prepacked", "compiled")
        expected = plain_ids(shared_model("llama"), prompt, 60)
        assert list(made.generate(prompt, max_new_tokens=60).token_ids) == expected
        engine: Any = made.engine
        assert engine._compiled.runs
    torch.compiler.reset()


def test_a_context_that_is_too_short_is_not_compiled() -> None:
    model = tiny_model("gpt2", max_position_embeddings=66)
    engine = TransformersEngine(model, kernels="compiled")
    assert "too short" in engine.kernels.left_out["compiled"] and engine._compiled is None


def test_kernels_are_chosen_once_for_models_that_share_weights() -> None:
    model = tiny_model("llama")
    assert kernels.choose(model, "auto").used == kernels.choose(model, "eager").used
