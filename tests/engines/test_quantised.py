"""Quantised targets: named apart, measured, and decoded plainly where rows change each other.

The layers here stand for those of the libraries: packed weights in buffers, weights that are tensor
subclasses, activations quantised by row, and by forward.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import draftwise
from conftest import VOCABULARY, plain_ids, save_tiny, shared_model
from draftwise import Model
from draftwise.engines import quantised
from draftwise.engines.transformers import TransformersEngine
from draftwise.models import weight_bytes

OLD_NAME = "past_key_values"  # of the argument `cache`
PROMPT = [5, 6, 7, 8] * 4 + [9, 5, 6]


class Int8(nn.Module):
    """Weights of eight bits in a buffer. `scales`: of activations, by "row" or by "forward"."""

    def __init__(self, dense: nn.Linear, scales: str = ""):
        super().__init__()
        self.scales = scales
        scale = dense.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("packed", (dense.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_inference_mode_enabled()
        if self.scales:
            most = x.abs().amax(-1, keepdim=True) if self.scales == "row" else x.abs().max()
            step = most / 127 + 1e-12
            x = (x / step).round() * step
        return nn.functional.linear(x, self.packed * self.scale)


class Wrapped(torch.Tensor):
    """A weight without a storage of its own, as those of torchao and quanto."""

    packed: torch.Tensor

    @staticmethod
    def __new__(cls, packed: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, packed.shape, dtype=torch.float32
        )
        made.packed = packed
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed)
        opened = [a.packed.float() / 64 if isinstance(a, cls) else a for a in args]
        return func(*opened, **(kwargs or {}))


class Subclassed(nn.Linear):
    def __init__(self, dense: nn.Linear):
        super().__init__(dense.in_features, dense.out_features, bias=False)
        packed = (dense.weight.detach() * 64).round().clamp(-127, 127).to(torch.int8)
        self.weight = nn.Parameter(Wrapped(packed), requires_grad=False)


def made(kind: str, head: bool = False) -> PreTrainedModel:
    model = copy.deepcopy(shared_model("llama"))
    for layer in model.model.layers:
        for name, dense in list(layer.mlp.named_children()):
            if isinstance(dense, nn.Linear):
                new = Subclassed(dense) if kind == "subclass" else Int8(dense, kind)
                setattr(layer.mlp, name, new)
    if head:
        model.lm_head = Subclassed(model.lm_head)
    return model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_CACHE", str(tmp_path))


@pytest.mark.parametrize("kind", ["", "row", "subclass"])
def test_texts_are_those_of_plain_decoding(kind: str) -> None:
    model = made(kind)
    expected = plain_ids(model, PROMPT, 30)
    ours = Model(model, None, ["lookup", "suffix", model])
    assert ours.note is None
    for policy in ("plain", "fixed:4", "fixed:3:model", "auto"):
        assert list(ours.generate(PROMPT, max_new_tokens=30, policy=policy).token_ids) == expected
    assert ours.generate(PROMPT, max_new_tokens=30, policy="fixed:3:model").stats.acceptance == 1
    hooked: Any = model.generate(
        torch.tensor([PROMPT]),
        do_sample=False,
        max_new_tokens=30,
        custom_generate=draftwise.custom_generate,
    )
    assert hooked[0, len(PROMPT) :].tolist() == expected


def test_where_rows_change_each_other_nothing_is_drafted_and_that_is_said() -> None:
    model = made("forward")
    with pytest.warns(UserWarning, match="rows of a forward change each other"):
        ours = Model(model, None)
    assert "decoded plainly" in str(ours.note) and "recurrent" not in str(ours.note)
    result = ours.generate(PROMPT, max_new_tokens=30, policy="fixed:4")
    assert list(result.token_ids) == plain_ids(model, PROMPT, 30)
    assert result.stats.verified == 0


def test_rows_are_told_apart() -> None:
    def apart(model: PreTrainedModel) -> bool:
        named = "cache" if "cache" in inspect.signature(model.forward).parameters else OLD_NAME
        return quantised.rows_apart(model, DynamicCache, named, VOCABULARY)

    assert all(apart(made(kind)) for kind in ("", "row", "subclass"))
    assert apart(shared_model("llama"))
    assert not apart(made("forward"))


def test_outliers_of_the_first_token_do_not_hide_what_the_others_do() -> None:
    model = made("forward")
    with torch.no_grad():
        model.model.embed_tokens.weight[0] *= 1000
    with pytest.warns(UserWarning, match="change each other"):
        Model(model, None)


def test_a_cost_curve_is_not_shared_with_the_dense_model_or_another_scheme() -> None:
    with pytest.warns(UserWarning):
        Model(made("forward"), None)
    dense = shared_model("llama")
    models = [dense, made(""), made("subclass"), made("subclass", head=True)]
    first, second = made(""), made("")
    first.config.quantization_config = {"quant_method": "some", "bits": 8}
    second.config.quantization_config = {"quant_method": "some", "bits": 4}
    names = [TransformersEngine(model).name for model in [*models, first, second]]
    assert len(set(names)) == len(names) - 1  # the layers of `head` are of the same kind
    assert quantised.described(dense) == "" and "quantised" not in names[0]
    assert "Int8:int8" in names[1] and "Subclassed:Wrapped" in names[2]


def test_memory_is_that_of_the_packed_weights() -> None:
    for kind in ("", "subclass"):
        model = made(kind)
        packed = [b for n, b in model.named_buffers() if n.endswith("packed")]
        packed += [p.packed for p in model.parameters() if isinstance(p, Wrapped)]
        assert len(packed) == 9
        dense = TransformersEngine(shared_model("llama")).memory()
        scales = sum(b.nbytes for n, b in model.named_buffers() if n.endswith("scale"))
        got = TransformersEngine(model).memory()
        assert got == dense - 3 * sum(t.numel() for t in packed) + scales


def test_a_part_of_a_quantised_head_is_not_taken() -> None:
    model = made("subclass", head=True)
    assert not TransformersEngine(model)._partial
    assert TransformersEngine(made("subclass"))._partial


def test_packed_weights_weigh_what_they_are_whatever_the_dtype(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    tensors = {"a": torch.zeros(10, dtype=torch.uint8), "b": torch.zeros(10, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    assert weight_bytes(folder) == 10 + 20
    assert weight_bytes(folder, "float32") == 10 + 40
