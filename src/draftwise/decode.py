"""The loop, as a generator: requests become results.

    prefill the prompt, and accept one token from its last row       (run.py)
    until a stop: propose, verify, accept, commit, learn             (step.py)

One request is a batch of one: who is in a forward is the scheduler's business (scheduler.py). Every
exit, by a stop, an error or a closed generator, closes all sequences everywhere.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

from .core import Request, StepResult
from .run import REACH, Parts
from .scheduler import Scheduler
from .stopping import Stopper

__all__ = ["REACH", "Parts", "decode", "decode_batch"]


def decode(parts: Parts, request: Request, stopper: Stopper) -> Generator[StepResult, None, None]:
    """Yields a result for every chunk of the prompt, the last with the first token, and for every
    step after it. Closing the generator ends the request between two of them; other sequences are
    not affected."""
    batch = decode_batch(parts, [(request, stopper)], 1)
    try:
        for results in batch:
            yield from results
    finally:
        batch.close()


def decode_batch(
    parts: Parts, requests: Iterable[tuple[Request, Stopper]], size: int
) -> Generator[list[StepResult], None, None]:
    """The same for several requests, of which `size` run at once: the results of one forward after
    the other. A request whose result has a finish reason is in no later one."""
    scheduler = Scheduler(parts, size)
    for request, stopper in requests:
        scheduler.add(request, stopper)
    whole = False
    try:
        while scheduler.busy:
            results = scheduler.step()
            if results:
                yield results
        whole = True
    except GeneratorExit:
        whole = True
        raise
    finally:
        scheduler.close(keep=whole)
