"""`Call` and `Batch`: requests while they run, seen as iterators of text.

Text is handed over as it is committed, in pieces that never split a character or a stop string.
Closing, cancelling, or an error in a step ends all that still runs and frees its caches at once;
what was generated until then stays in the results. A call is a batch of one prompt.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from .core import SeqId, StepResult, UsageError
from .result import Result, Tally
from .stopping import Stopper
from .trace import Recorder

Steps = Generator[list[StepResult], None, None]


@dataclass
class Text:
    """One request's text and figures while it runs. `ended` hears of its steps."""

    seq: SeqId
    stopper: Stopper
    tally: Tally
    ended: Callable[[int], None]
    recorder: Recorder | None = None
    result: Result | None = None

    def add(self, result: StepResult) -> None:
        self.tally.add(result)
        if self.recorder is not None:
            self.recorder.add(result)

    def end(self, reason: str) -> None:
        if self.result is not None:
            return
        stopper = self.stopper
        if stopper.finish is None:
            stopper.end(reason)
        stats = self.tally.stats()
        self.result = Result(stopper.text, tuple(stopper.tokens), stopper.finish or reason, stats)
        self.ended(stats.steps)
        if self.recorder is not None:
            self.recorder.end(self.result.finish_reason)


class _Running:
    """What calls and batches share: steps until every text has ended."""

    def __init__(self, steps: Steps, texts: Sequence[Text], cancel: threading.Event | None):
        self._steps, self._texts, self._cancel = steps, list(texts), cancel
        self._going = {text.seq: text for text in self._texts}  # that have not ended
        # Another thread, or a step's own callbacks, may close it within a step, which then ends it.
        self._running, self._closing = threading.Lock(), False

    def _next(self) -> list[StepResult]:
        """One step; empty once all have ended."""
        with self._running:
            results = self._step()
        if self._closing:  # whoever closed it could not wait
            self.close()
        return results

    def _step(self) -> list[StepResult]:
        if not self._going:
            return []
        if self._closing or (self._cancel is not None and self._cancel.is_set()):
            self._stop()
            return []
        try:
            results = next(self._steps)
        except BaseException:
            with contextlib.suppress(UsageError):  # a trace that cannot be written is no cause
                self._end("cancelled")
            raise
        for result in results:
            self._going[result.seq].add(result)
        ended = [result for result in results if result.finish is not None]
        if len(ended) == len(self._going):
            next(self._steps, None)  # runs the generator to its end, which frees the caches
        for result in ended:
            self._going.pop(result.seq).end(result.finish or "")
        return results

    def _end(self, reason: str) -> None:
        while self._going:
            self._going.popitem()[1].end(reason)

    def _stop(self) -> None:
        if self._going:
            self._steps.close()
            self._end("cancelled")

    def close(self) -> None:
        """Ends all that runs, after the step that another thread may be in; what was generated
        until then is in the results, with reason "cancelled"."""
        self._closing = True
        if self._running.acquire(blocking=False):
            try:
                self._stop()
            finally:
                self._running.release()

    def __exit__(self, *_: object) -> None:
        self.close()


class Call(_Running, Iterator[str]):
    """A running request: an iterator of text. `close()` ends it; `result` is set at its end."""

    def __init__(self, steps: Steps, text: Text, cancel: threading.Event | None):
        super().__init__(steps, [text], cancel)
        self._text = text

    def __next__(self) -> str:
        while self._text.result is None:
            step = self.step()
            piece = self.take()
            if piece:
                return piece
            if step is None:
                break
        raise StopIteration

    def take(self) -> str:
        """The text that became safe to show and was not taken yet, for callers of `step`."""
        return self._text.stopper.take()

    def step(self) -> StepResult | None:
        """One step of the request; None once it has ended."""
        results = self._next()
        return results[0] if results else None

    @property
    def recording_seconds(self) -> float:
        """What recording a trace took, which the result's seconds contain."""
        return self._text.recorder.seconds if self._text.recorder is not None else 0.0

    @property
    def result(self) -> Result:
        if self._text.result is None:
            raise UsageError("this call has not ended: iterate over it, or close it")
        return self._text.result

    def __enter__(self) -> Call:
        return self


class Batch(_Running, Iterator[tuple[int, str]]):
    """Running requests: an iterator of (number of the prompt, text). `close()` ends them all;
    `results` is set at their end, in the prompts' order."""

    def __init__(self, steps: Steps, texts: Sequence[Text], cancel: threading.Event | None):
        super().__init__(steps, texts, cancel)
        self._pieces: deque[tuple[int, str]] = deque()
        self._numbers = {text.seq: i for i, text in enumerate(self._texts)}
        self._grown: set[int] = set()  # numbers of those with steps since `take`

    def __next__(self) -> tuple[int, str]:
        while not self._pieces:
            if not self._going:
                raise StopIteration
            self.step()
            self._pieces.extend(self.take())
        return self._pieces.popleft()

    def take(self) -> list[tuple[int, str]]:
        """The texts that became safe to show and were not taken yet, for callers of `step`."""
        grown, self._grown = sorted(self._grown), set()
        if not self._going:  # what was held back comes out, wherever it was
            grown = list(range(len(self._texts)))
        pieces = ((i, self._texts[i].stopper.take()) for i in grown)
        return [(i, piece) for i, piece in pieces if piece]

    def step(self) -> list[StepResult]:
        """One step of those that run, or one's pass over its prompt; empty once all have ended."""
        results = self._next()
        self._grown.update(self._numbers[result.seq] for result in results)
        return results

    @property
    def results(self) -> list[Result]:
        found = [text.result for text in self._texts if text.result is not None]
        if len(found) < len(self._texts):
            raise UsageError("this batch has not ended: iterate over it, or close it")
        return found

    def __enter__(self) -> Batch:
        return self
