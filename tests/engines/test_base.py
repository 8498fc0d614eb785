"""The best tokens of rows, against sorting them whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwise.engines.base import STRIPES, top_of
from draftwise.engines.rows import Logits, TensorRows

SIZES = (1, 5, STRIPES - 1, STRIPES, 2 * STRIPES + 3, 9 * STRIPES, 40 * STRIPES + 17)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("levels", [3, 10**6])
def test_the_best_are_those_of_a_whole_sort(size: int, k: int, levels: int) -> None:
    """Few levels: many tokens are as good as each other."""
    logits = np.random.default_rng(size).integers(0, levels, (4, size)).astype(np.float32)
    logits[1, :: max(size // 3, 1)] = -np.inf
    best = top_of(logits, k)
    expected = -np.sort(-logits, axis=1)[:, :k]
    assert best.ids.shape == best.scores.shape == expected.shape
    assert (best.scores == expected).all()
    assert (np.take_along_axis(logits, best.ids, 1) == best.scores).all()
    assert all(len(set(ids)) == len(ids) for ids in best.ids.tolist())


def test_all_of_the_best_may_lie_in_one_group() -> None:
    """The groups are told by their largest: here one group holds all of them, elsewhere none."""
    size = 20 * STRIPES
    logits = np.zeros((1, size), np.float32)
    group = np.arange(7, size, size // STRIPES)[:8]
    logits[0, group] = np.arange(8, 0, -1)
    assert top_of(logits, 8).ids.tolist() == [group.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_tensors_leave_out_what_is_no_token(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[:, 900:] = 99.0
    rows = TensorRows(Logits(logits[None], 900), 0, len(logits))
    best = rows.top(4)
    expected = logits[:, :900].float().topk(4)
    assert (best.scores == expected.values.numpy()).all()
    assert list(rows.argmax()) == logits[:, :900].float().argmax(-1).tolist()
    assert best.scores[:, 0].tolist() == [rows.row(i).max() for i in range(3)]
