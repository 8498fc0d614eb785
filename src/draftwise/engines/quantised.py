"""Models whose weights are quantised: how they are named, measured and probed.

Whatever transformers loads runs as it is; nothing here quantises. Three things differ from a dense
model. Its cost curve is not that of the dense model of the same name, so `described` becomes part
of the engine's name. Its weights may be tensor subclasses, which have no storage of their own
(`parts`) and do not run in inference mode. And its rows may depend on each other: some schemes take
the scale or the outliers of activations from all rows of a forward together, so that verified
drafts would change the logits, and the text.

`rows_apart` finds that out: two forwards of one width that differ in their later tokens only. Later
rows cannot reach earlier ones through attention, and equal shapes round alike, so the earlier rows'
logits are the same to the bit, unless something was shared (tiny Llama: 0 for dense weights,
torchao, quanto and 4-bit bitsandbytes, 0.1 to 0.5 of the logits' spread for 8-bit bitsandbytes and
torch's dynamic quantisation). Cost: four forwards of eight rows at load, for quantised models only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN = (torch.Tensor, torch.nn.Parameter)
PACKED = (torch.int8, torch.uint8, torch.int16, torch.int32)  # what quantised numbers are kept in
ROWS = 8


def described(model: PreTrainedModel) -> str:
    """Which modules and tensors are quantised, and with what options; empty for a dense model."""
    found = sorted({kind for module in model.modules() for kind in _kinds(module)})
    options = getattr(model.config, "quantization_config", None)
    if not found and options is None:
        return ""
    text = repr(options if options is None or isinstance(options, dict) else options.to_dict())
    return " ".join(["quantised", *found, hashlib.sha256(text.encode()).hexdigest()[:8]])


def _kinds(module: torch.nn.Module) -> Iterator[str]:
    name = type(module).__name__
    if ".quantized." in type(module).__module__:
        yield name
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if type(tensor) not in PLAIN:
            yield f"{name}:{type(tensor).__name__}"
        elif tensor.dim() > 1 and (
            tensor.dtype in PACKED or (tensor.is_floating_point() and tensor.itemsize == 1)
        ):
            yield f"{name}:{str(tensor.dtype).removeprefix('torch.')}"


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold a tensor's numbers: itself, or what a subclass is made of."""
    if type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts(getattr(tensor, name))
    else:
        yield tensor


def rows_apart(
    model: PreTrainedModel, cache: Callable[[], Any], named: str, vocabulary: int
) -> bool:
    """Whether a row's logits depend on its own and earlier tokens alone. `cache` makes an empty
    one, `named` is the argument for it."""
    ids = torch.arange(3 * ROWS).mul(vocabulary).div(3 * ROWS).long().to(model.device)
    held, one, other = ids[:ROWS], ids[ROWS : 2 * ROWS], ids[2 * ROWS :]
    half, rows = ROWS // 2, []
    for later in (one, other):
        # The first tokens of a text have activations that hide all others: they come before.
        options: dict[str, Any] = {named: cache(), "use_cache": True}
        with torch.no_grad():
            model(input_ids=held[None], **options)
            asked = torch.cat([one[:half], later[half:]])
            rows.append(model(input_ids=asked[None], **options).logits[0, :half].float())
    allowed = (1e-3 + 2 * torch.finfo(model.dtype).eps) * float(rows[0].std())
    return bool((rows[0] - rows[1]).abs().max() <= allowed)


def plain_weight(module: Any) -> bool:
    """Whether a layer's weight is an ordinary matrix, of which rows can be taken."""
    weight: Any = getattr(module, "weight", None)
    return type(weight) in PLAIN and weight.is_floating_point() and weight.itemsize > 1
