"""Who takes part in the next forward: runs join when there is a place, and leave when they end.

    step:  runs that have ended leave, and free what they held
           those that wait join, up to `size`
           either one chunk of one prompt is read, or all runs that have their first token take a
           step together (step.py)

Prompts go first, since full forwards are worth more than early ones, but never more than
PREFILL_CHUNK tokens of them between two steps: no run waits for another's long prompt, and none
for another's end, as it is out of the forward with its last token. An error in any run is an error
of the step; closing the scheduler then frees all of them. Nothing here knows the engine.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

import numpy as np

from .core import Request, SeqId, StepResult, UsageError
from .engines.base import PREFILL_CHUNK
from .run import Parts, Run
from .step import step
from .stopping import Stopper

BATCH_SIZE = 8


def check_size(size: object) -> None:
    whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
    if not whole or size < 1:  # type: ignore[operator]
        raise UsageError(f"batch_size must be a whole number of at least 1, not {size!r}")


class Scheduler:
    """Steps for at most `size` runs at once. Not for several threads at a time, but its steps take
    turns with those of other schedulers over the same parts."""

    def __init__(self, parts: Parts, size: int = BATCH_SIZE):
        self.parts, self.size = parts.usable(), size
        self._apart = parts.engine.caps.batch == "single"
        self._waiting: deque[Run] = deque()
        self._runs: list[Run] = []
        self._read = 0  # tokens of prompts since the last step that all took
        self._unpaid = 0.0

    def add(self, request: Request, stopper: Stopper) -> None:
        """Lets a request join as soon as there is a place."""
        self._waiting.append(Run(self.parts, request, stopper))

    @property
    def busy(self) -> bool:
        return bool(self._runs or self._waiting)

    def step(self) -> list[StepResult]:
        """What one forward came to; empty if all that was left was to let the last runs go."""
        with self.parts.turn:
            self._leave()
            while self._waiting and len(self._runs) < self.size:
                self._runs.append(self._waiting.popleft())
            ready = [run for run in self._runs if not run.reading]
            reading = next((run for run in self._runs if run.reading), None)
            if reading is not None and (self._read < PREFILL_CHUNK or not ready):
                result, tokens = reading.read()
                self._read += tokens
                return [result]
            if not ready:
                return []
            self._read = 0
            if self._apart:  # each forward is one run's, so each run has steps of its own
                ready = ready[:1]
                self._runs = [run for run in self._runs if run not in ready] + ready
            results, self._unpaid = step(self.parts, ready, self._unpaid)
            return results

    def _leave(self) -> None:
        ended = [run for run in self._runs if run.finish is not None]
        self._close(ended, keep=True)
        self._runs = [run for run in self._runs if run.finish is None]

    def drop(self, seq: SeqId) -> None:
        """Ends one request between two steps, whether it runs or waits."""
        with self.parts.turn:
            self._close([run for run in self._runs if run.seq == seq], keep=True)
            self._runs = [run for run in self._runs if run.seq != seq]
            self._waiting = deque(run for run in self._waiting if run.seq != seq)

    def close(self, keep: bool) -> None:
        """Ends all; `keep`: caches that a request wants kept are."""
        with self.parts.turn:
            runs, self._runs = self._runs, []
            self._waiting.clear()
            self._close(runs, keep)

    def _close(self, runs: list[Run], keep: bool) -> None:
        with ExitStack() as stack:  # one that fails to close does not keep the others open
            for run in reversed(runs):
                stack.callback(run.close, keep)
