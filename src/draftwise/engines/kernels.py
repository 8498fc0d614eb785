"""What a model's forward is made of: the library's own layers, or something faster.

`eager` runs the model as it is. `prepacked` lays the weights out anew for the processor
(prepacked.py), `compiled` goes through torch.compile on top of that (compiled.py). Both take the
model over: its layers are replaced in place, so nobody else may hold it. `auto` takes what gains
something within the seconds of a load, which leaves compiling out. Whatever does not work or gain
here is left out, with the reason; the text is the same, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..core import UsageError
from ..unpack import first_line
from . import prepacked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KERNELS = ("auto", "eager", "prepacked", "compiled")
PROBE = (1, 2, 3)


@dataclass
class Kernels:
    """`used`: what is in use beyond eager; `left_out`: why something asked for is not."""

    asked: str
    used: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    def without(self, what: str, reason: str) -> None:
        self.left_out[what] = reason

    @property
    def note(self) -> str | None:
        """For a user who asked by name."""
        reason = self.left_out.get(self.asked)
        return f"kernels {self.asked} are not used: {reason}" if reason else None


def check(kernels: str) -> None:
    if kernels not in KERNELS:
        raise UsageError(f"unknown kernels {kernels!r}: choose among {', '.join(KERNELS)}")


def choose(model: PreTrainedModel, kernels: str) -> Kernels:
    """Prepacks the model unless `kernels` is "eager". Compiling comes later, once there is an
    engine to run it."""
    check(kernels)
    made = Kernels(kernels)
    if prepacked.is_prepacked(model):
        made.used = ("prepacked",)
        return made
    if kernels == "eager":
        return made
    before = _logits(model)
    try:
        reason = prepacked.prepack(model)
    except Exception as error:  # a form of weights that oneDNN does not take, or no memory
        prepacked.restore(model)
        reason = f"{type(error).__name__}: {first_line(error)}"
    if reason is None and not _alike(model, before):
        prepacked.restore(model)
        reason = "this model computes something else with them"
    if reason is None:
        made.used = ("prepacked",)
    else:
        made.without("prepacked", reason)
    return made


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        ids = torch.tensor([[t % model.config.get_text_config().vocab_size for t in PROBE]])
        return model(input_ids=ids.to(model.device), use_cache=False).logits[0].float()


def _alike(model: PreTrainedModel, before: torch.Tensor) -> bool:
    try:
        after = _logits(model)
    except Exception:  # a layer that reads the matrix itself
        return False
    spread = (before - before.mean(-1, keepdim=True)).abs().max().item()
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    return (after - before).abs().max().item() <= tolerance * spread
