"""Weights in the order in which the processor's kernels read them.

A matrix of a CPU model lies row by row, and every product with a few rows re-orders it on the way:
at the widths of decoding that takes about as long as the product. oneDNN can do it once: the same
product then reads memory at its full speed, at every width (2 cores, bf16, Qwen2.5-Coder-1.5B: 1.25
times as fast at one row, 1.5 times at 4 to 16). No compiler is needed. Where its kernels take
longer over one row than over four, one row is padded.

`prepack` replaces the linear layers of a model that nobody else holds, one by one, so memory stays
what it was; only an output layer that shares the embedding's matrix is held twice. It first times
some layers both ways and does nothing where that gains less than GAIN. The products are the same up
to the order of summation, as they are between widths (docs/design.md §3.5), and plain decoding runs
on the same weights as speculation.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GAIN = 1.05
TRIAL = 24  # layers that are timed: some three blocks of a transformer
ROWS = (1, 4, 8)
WORTH = 0.95  # padding takes some time itself
_NUMBERS = itertools.count()
_LAYERS: WeakValueDictionary[int, Prepacked] = WeakValueDictionary()


# Looked up when called, since some builds of torch have no such operators.


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    ordered: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return ordered


def _product(states: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")
    return made


class Prepacked(nn.Module):
    """A linear layer without gradients; `weight`, where it is kept, is the matrix as it was, and
    fewer rows than `least` are padded up to it."""

    def __init__(self, linear: nn.Linear, weight: torch.Tensor | None = None, least: int = 1):
        super().__init__()
        self.least = least
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = weight
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._packed = _reorder(linear.weight.detach())
        self._number = next(_NUMBERS)
        _LAYERS[self._number] = self

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            traced: torch.Tensor = _traced(states, self._number, self.out_features)
            return traced
        return self.product(states)

    def product(self, states: torch.Tensor) -> torch.Tensor:
        rows = states.numel() // self.in_features
        if rows >= self.least or not rows:  # no token went to an expert
            return _product(states, self._packed, self.bias)
        flat = nn.functional.pad(states.reshape(rows, -1), (0, 0, 0, self.least - rows))
        padded = _product(flat, self._packed, self.bias)
        return padded[:rows].reshape(*states.shape[:-1], self.out_features)

    def first(self, ids: int) -> Prepacked | None:
        """A layer of the first so many outputs, where the matrix is still there."""
        if self.weight is None:
            return None
        part = nn.Linear(1, 1, device="meta")
        part.in_features, part.out_features = self.in_features, ids
        part.weight = nn.Parameter(self.weight[:ids], requires_grad=False)
        part.bias = None if self.bias is None else nn.Parameter(self.bias[:ids], False)
        return Prepacked(part, least=self.least)

    def linear(self) -> nn.Linear:
        """The layer as it was."""
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.in_features, linear.out_features = self.in_features, self.out_features
        if isinstance(self.weight, nn.Parameter):  # the embedding's very own
            linear.weight = self.weight
        else:
            linear.weight = nn.Parameter(self._packed.to_dense(), requires_grad=False)
        linear.bias = None if self.bias is None else nn.Parameter(self.bias, requires_grad=False)
        return linear

    @property
    def nbytes(self) -> int:
        return int(self._packed.numel() * self._packed.element_size())


@torch.library.custom_op("draftwise::prepacked", mutates_args=())
def _traced(states: torch.Tensor, number: int, outputs: int) -> torch.Tensor:
    """The product as compilers see it: they cannot hold a tensor in oneDNN's own order."""
    return _LAYERS[number].product(states)


@_traced.register_fake
def _(states: torch.Tensor, number: int, outputs: int) -> torch.Tensor:
    return states.new_empty((*states.shape[:-1], outputs))


def why_not(model: PreTrainedModel) -> str | None:
    """Why this model's weights cannot be packed; None if they can."""
    if model.device.type != "cpu":
        return "prepacked weights are for the CPU"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if model.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no bfloat16 products"
    if model.dtype not in (torch.bfloat16, torch.float32):
        return f"weights of {str(model.dtype).removeprefix('torch.')} are not packed"
    if not _linears(model):
        return "this model has no plain linear layers"
    return None


def _linears(model: nn.Module) -> Sequence[tuple[nn.Module, str, nn.Linear]]:
    """Plain linear layers, with who holds them; wrapped and quantised ones are left alone."""
    return [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear
        and "forward" not in vars(child)
        and not (child._forward_hooks or child._forward_pre_hooks)
        and child.weight.dtype == getattr(model, "dtype", child.weight.dtype)
    ]


def prepack(model: PreTrainedModel) -> str | None:
    """Packs the model's linear layers in place, if that pays; else says why not."""
    reason = why_not(model)
    if reason is not None:
        return reason
    with torch.inference_mode():
        gain, least = _trial([linear for _, _, linear in _linears(model)[:TRIAL]])
        if gain < GAIN:
            return f"prepacked weights gain nothing here ({gain:.2f}x)"
        shared = {
            id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in (m.weight,)
        }
        for holder, name, linear in _linears(model):
            kept = linear.weight if id(linear.weight) in shared else None
            setattr(holder, name, Prepacked(linear, kept, least))
    return None


def is_prepacked(model: PreTrainedModel) -> bool:
    return any(isinstance(module, Prepacked) for module in model.modules())


def parameters(model: PreTrainedModel) -> int:
    """How many the model has, prepacked ones included."""
    layers = [m for m in model.modules() if isinstance(m, Prepacked)]
    relaid = sum(m.in_features * m.out_features for m in layers if m.weight is None)
    biases = sum(m.out_features for m in layers if m.bias is not None)
    return relaid + biases + sum(p.numel() for p in model.parameters())


def restore(model: PreTrainedModel) -> None:
    """Undoes `prepack`."""
    with torch.inference_mode():
        for holder in list(model.modules()):
            for name, child in list(holder.named_children()):
                if isinstance(child, Prepacked):
                    setattr(holder, name, child.linear())


def _trial(linears: Sequence[nn.Linear]) -> tuple[float, int]:
    """(how many times as fast these layers are prepacked, the rows they should have at least)."""
    packed = [Prepacked(linear) for linear in linears]
    dtype = linears[0].weight.dtype
    dense = {rows: _seconds(linears, rows, dtype) for rows in ROWS}
    relaid = {rows: _seconds(packed, rows, dtype) for rows in ROWS}
    cheapest = min(ROWS, key=lambda rows: relaid[rows])
    # Of Qwen2.5-Coder-1.5B's matrices a row takes 1.23 ms, and four take 0.98.
    least = cheapest if relaid[cheapest] < WORTH * relaid[1] else 1
    relaid[1] = min(relaid[1], relaid[least])
    return sum(dense.values()) / sum(relaid.values()), least


def _seconds(layers: Sequence[Any], rows: int, dtype: torch.dtype) -> float:
    inputs = [torch.ones((rows, one.in_features), dtype=dtype) for one in layers]
    return _least(layers, inputs)


def _least(
    layers: Sequence[Callable[[torch.Tensor], Any]], inputs: Sequence[torch.Tensor]
) -> float:
    least = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        for layer, states in zip(layers, inputs, strict=True):
            layer(states)
        least = min(least, time.perf_counter() - start)
    return least
