"""Groups of prompts that are generated together.

Without batches every prompt is a group of its own, in its own category. With batch sizes, the
prompts are shuffled once (by the run's seed), so that kinds and lengths mix, and cut into groups of
each size in turn; the category says how many. What does not fill a group is left out, so that a
size's figures are of full batches only, until texts begin to end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..core import UsageError
from .suites import Prompt, Suite


@dataclass(frozen=True)
class Group:
    id: int | str
    category: str
    prompts: tuple[Prompt, ...]


def groups(suite: Suite, sizes: Sequence[int], seed: int) -> list[Group]:
    """`sizes` empty: every prompt alone."""
    if not sizes:
        return [Group(p.question_id, p.category, (p,)) for p in suite.prompts]
    prompts = list(suite.prompts)
    random.Random(seed).shuffle(prompts)
    if max(sizes) > len(prompts):
        raise UsageError(f"a batch of {max(sizes)} needs as many prompts, not {len(prompts)}")
    return [
        Group(f"{size}:{i}", f"batch {size}", tuple(prompts[i : i + size]))
        for size in sizes
        for i in range(0, len(prompts) - size + 1, size)
    ]


def check_sizes(sizes: Sequence[int]) -> None:
    for size in sizes:
        if not 1 <= size <= 256:
            raise UsageError(f"a batch size must be between 1 and 256, not {size}")
    if len(set(sizes)) < len(sizes):
        raise UsageError("a batch size is named twice")
