"""Trees of draft nodes in one forward of a transformers model with full attention.

The rows of a tree stand in the cache one after another, so a causal forward would let siblings see
each other. Instead, row i gets position held + depth(i), and an additive 4-D mask in which it sees
the `held` rows before the tree, its ancestors and itself (tree attention: SpecInfer, arXiv
2305.09781). Its logits are then those of its root-to-node path run as a chain, up to rounding, as
keys and values of other branches do not enter. After acceptance the kept rows move together: a copy
of those rows only, O(path) a layer, and the rest is cropped.

A model has to honour both mask and positions for that. Some compute positions from the mask or the
cache's length (ALiBi), some cut a window by row index inside the attention, some kernels take no
mask: `honoured` finds out on one tree of seven rows, and such models verify chains only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The probe, in kinds of tokens: two are held, then a chain of three, and a tree that has this chain
# as rows 0, 4 and 5. Siblings stand between; row 6 is row 5's token behind another parent.
HELD, CHAIN = (0, 1), (2, 3, 4)
NODES, PARENTS = (2, 5, 6, 7, 3, 4, 4), (0, 0, 0, 0, 4, 1)
DISTINCT = 8


def inputs(
    parents: Sequence[Sequence[int]],
    rows: int,
    held: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Mask [trees, 1, rows, longest held + rows] and positions of trees, one a sequence; rows past
    a tree's nodes are padding, which sees what is held and itself."""
    length = max(held) + rows
    seen = np.zeros((len(held), rows, length), dtype=bool)
    depths = np.zeros((len(held), rows), dtype=np.int64)
    for i, (tree, start) in enumerate(zip(parents, held, strict=True)):
        seen[i, :, :start] = True
        own = seen[i, :, start : start + rows]
        np.fill_diagonal(own, True)
        for row, parent in enumerate(tree, 1):
            own[row] |= own[parent]
            depths[i, row] = depths[i, parent] + 1
        depths[i] += start
    mask = torch.zeros(seen.shape, dtype=dtype)
    # Not -inf: a float mask of the library's own has the least number, too.
    mask.masked_fill_(~torch.from_numpy(seen), torch.finfo(dtype).min)
    return {
        "attention_mask": mask[:, None].to(device),
        "position_ids": torch.from_numpy(depths).to(device),
    }


def branches(parents: Sequence[int]) -> bool:
    """Whether these are the parents (as in Verify) of a tree, and not of a chain."""
    return any(parent != i for i, parent in enumerate(parents))


def is_path(path: Sequence[int], parents: Sequence[int]) -> bool:
    """Whether these rows lead from the anchor, row 0, down the tree; none at all do, too."""
    if not path:
        return True
    steps = zip(path[1:], path, strict=False)
    return path[0] == 0 and all(
        0 < row <= len(parents) and parents[row - 1] == before for row, before in steps
    )


def gather(cache: Any, path: Sequence[int], pending: int) -> None:
    """Moves rows `path` of the cache's last `pending` to the front of those, in place."""
    settled = next((i for i, row in enumerate(path) if row != i), len(path))
    if settled == len(path):
        return
    with torch.inference_mode():
        index = torch.tensor(path[settled:])
        for layer in cache.layers:
            for states in (layer.keys, layer.values) if layer.is_initialized else ():
                index = index.to(states.device)  # copies only where layers are on several devices
                rows = states[..., -pending:, :]
                rows[..., settled : len(path), :] = rows.index_select(-2, index)


def possible(model: PreTrainedModel) -> bool:
    """Whether attention takes a mask, and no window is cut that the cache does not know of."""
    config = model.config.get_text_config(decoder=True)
    # Other kernels read a 4-D mask as something else, or crash the device with it.
    if getattr(config, "_attn_implementation", None) not in ("eager", "sdpa"):
        return False
    ends = ("window", "window_size", "window_len", "local_attention")
    windows = [value for name, value in vars(config).items() if name.endswith(ends)]
    return not any(isinstance(value, int) and value > 0 for value in windows)


def ids(vocabulary: int, kinds: Sequence[int]) -> list[int]:
    """Ids spread over the vocabulary: its first ones are often never trained."""
    return [vocabulary * (2 * kind + 1) // (2 * DISTINCT) for kind in kinds]


def probe(vocabulary: int) -> list[int]:
    """The ids to run in an empty cache; their logits go to `honoured`, with that cache."""
    return ids(vocabulary, HELD + CHAIN)


def honoured(model: PreTrainedModel, cache: Any, name: str, logits: torch.Tensor) -> bool:
    """Whether a tree's rows have the logits of the chain that `probe` ran, at a distance from what
    another parent gives. `name`: the argument that takes `cache`. Never raises."""
    if len(logits) < len(HELD + CHAIN):
        return False
    try:
        cache.crop(-len(CHAIN))
        tokens = ids(model.config.get_text_config(decoder=True).vocab_size, NODES)
        options: dict[str, Any] = {
            name: cache,
            "input_ids": torch.tensor([tokens], device=model.device),
            **inputs([PARENTS], len(NODES), [len(HELD)], model.dtype, model.device),
        }
        rows = model(use_cache=True, **options).logits[0].float()
    except Exception:  # whatever a model does with inputs that it does not know
        return False
    return close(rows[[0, 4, 5]], logits[-len(CHAIN) :].float(), rows[6], model.dtype)


def close(
    rows: torch.Tensor, expected: torch.Tensor, other: torch.Tensor, dtype: torch.dtype
) -> bool:
    """Whether rows are as expected, up to rounding, and their last one is far from `other`."""
    spread = (expected - expected.mean(-1, keepdim=True)).abs().max().item()
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    error = (rows - expected).abs().max().item()
    return error <= tolerance * spread and nearer(rows, expected, other)


def nearer(rows: torch.Tensor, expected: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether rows are as expected rather than like `other` in their last one, if roughly so."""
    error = (rows - expected).abs().max().item()
    return error < (other - expected[-1]).abs().max().item() / 4
