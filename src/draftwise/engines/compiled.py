"""A model's forward through `torch.compile`: fewer, larger kernels, and no Python between them.

One graph serves every width and context, since both are symbolic: rows are padded to two at least
(a size of one would be compiled apart), keys are written at given positions into a storage of fixed
address (slots.py), and a mask stands for everything else. Compiling takes one to several minutes
the first time; inductor keeps its kernels on disk, and a later load only traces the model again.

Whether it pays is measured: `compiled` times both forwards at a few widths and returns the reason
where the plain one stays, because there is no C++ compiler, the model cannot be traced, or nothing
is gained. A forward that fails later goes back to the plain one for good. Lossless as in
prepacked.py: sums are taken in another order, and plain decoding runs on the same graph.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

GAIN = 1.03
LEAST = 2  # rows of a compiled forward
WIDTHS = (LEAST, 8)  # that are timed
HELD = 64  # tokens before them
Forward = Callable[..., Any]


class Compiled:
    """Calls the compiled forward until it fails once; then `failure` says why, and it calls the
    plain one. A forward that failed is run again: it writes the same keys to the same places."""

    def __init__(self, forward: Forward, backend: str = "inductor"):
        self._plain = forward
        self._compiled: Forward | None = torch.compile(
            forward, dynamic=True, fullgraph=True, backend=backend
        )
        self.failure: str | None = None

    def __call__(self, **inputs: Any) -> Any:
        if self._compiled is not None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the tracer, about the library's own code
                    return self._compiled(**inputs)
            except Exception as error:
                self._compiled = None
                error = getattr(error, "inner_exception", error)  # the tracer wraps the backend's
                lines = [line for line in str(error).splitlines() if line.strip()] or [""]
                self.failure = f"{type(error).__name__}: {lines[0].strip()[:200]}"
        return self._plain(**inputs)

    @property
    def runs(self) -> bool:
        return self._compiled is not None


def gain(made: Compiled, compiled: Callable[[int], Any], plain: Callable[[int], Any]) -> float:
    """How many times as fast `compiled` is as `plain`, each called with a width, in turns; 0 if
    `made`, which it runs, fails."""
    least = {(f, w): float("inf") for f in (compiled, plain) for w in WIDTHS}
    for turn in range(4):
        for forward, width in least:
            start = time.perf_counter()
            forward(width)
            if not made.runs:
                return 0.0
            if turn:  # the first compiles
                seconds = time.perf_counter() - start
                least[forward, width] = min(seconds, least[forward, width])
    theirs, ours = (sum(least[f, w] for w in WIDTHS) for f in (plain, compiled))
    return theirs / ours
