"""`Call`: a request while it runs, seen as an iterator of text.

Text is handed over as it is committed, in pieces that never split a character or a stop string.
Closing the call, cancelling it, or an error in a step ends the request and frees its caches at
once; what was generated until then stays in `result`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator

from .core import StepResult, UsageError
from .result import Result, Tally
from .stopping import Stopper
from .trace import Recorder


class Call(Iterator[str]):
    """A running request: an iterator of text. `close()` ends it; `result` is set at its end."""

    def __init__(
        self,
        steps: Generator[StepResult, None, None],
        stopper: Stopper,
        tally: Tally,
        cancel: threading.Event | None,
        ended: Callable[[int], None],
        recorder: Recorder | None = None,
    ):
        self._steps, self._stopper, self._tally = steps, stopper, tally
        self._cancel, self._ended, self._recorder = cancel, ended, recorder
        self._result: Result | None = None
        # Another thread may close the call while this one is in a step: the step then ends it.
        self._running, self._closing = threading.RLock(), False

    def __next__(self) -> str:
        while self._result is None:
            step = self.step()
            piece = self.take()
            if piece:
                return piece
            if step is None:
                break
        raise StopIteration

    def take(self) -> str:
        """The text that became safe to show and was not taken yet, for callers of `step`."""
        return self._stopper.take()

    def step(self) -> StepResult | None:
        """One step of the request; None once it has ended."""
        with self._running:
            step = self._step()
            if self._closing:
                self._stop()
            return step

    def _step(self) -> StepResult | None:
        if self._result is not None:
            return None
        if self._closing or (self._cancel is not None and self._cancel.is_set()):
            self._stop()
            return None
        try:
            result = next(self._steps)
        except BaseException:
            with contextlib.suppress(UsageError):  # a trace that cannot be written is not the cause
                self._end("cancelled")
            raise
        self._tally.add(result)
        if self._recorder is not None:
            self._recorder.add(result)
        if result.finish is not None:
            next(self._steps, None)  # runs the generator to its end, which frees the caches
            self._end(result.finish)
        return result

    def _end(self, reason: str) -> None:
        stopper = self._stopper
        if stopper.finish is None:
            stopper.end(reason)
        stats = self._tally.stats()
        self._result = Result(stopper.text, tuple(stopper.tokens), stopper.finish or reason, stats)
        self._ended(stats.steps)
        if self._recorder is not None:
            self._recorder.end(self._result.finish_reason)

    def close(self) -> None:
        """Ends the request, after the step that another thread may be in; what was generated until
        then is in `result`, with reason "cancelled"."""
        self._closing = True
        if self._running.acquire(blocking=False):
            try:
                self._stop()
            finally:
                self._running.release()

    def _stop(self) -> None:
        if self._result is None:
            self._steps.close()
            self._end("cancelled")

    @property
    def recording_seconds(self) -> float:
        """What recording a trace took, which the result's seconds contain."""
        return self._recorder.seconds if self._recorder is not None else 0.0

    @property
    def result(self) -> Result:
        if self._result is None:
            raise UsageError("this call has not ended: iterate over it, or close it")
        return self._result

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
