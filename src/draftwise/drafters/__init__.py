"""Drafters: anything that proposes tokens. One file each; `REGISTRY` names them all.

The contract. `open(seq, request)` starts a sequence with its prompt, `observe(seq, committed)`
tells it the text as it grows, `propose(asks, go)` returns at most one draft an ask, of at most
`ask.depth` tokens in a row, and must not change what later proposals would be; `close(seq)` forgets
the sequence. Branches (`ask.siblings`) and continuations (`ask.after`, repeated in the draft) are
optional. A drafter marked `serial` pays for every token it drafts and calls `go(seq, features)`
before each further one, where `features` are those of the last one drafted. Retrieval drafters
draft in microseconds, are asked at every step and ignore `go`.

A drafter that learns from what the target thought has `rows`, the number of best tokens that it
wants to know of every verified row, and `learn(seq, tokens, best)`, called before `observe`: the
verified tokens and, for each, the target's best next ones. Those that the committed text came from
are the first, in its order, then the rejected ones. Where no drafter has `rows`, nothing is
computed.

Drafts may be as wrong as they like: acceptance keeps the text right. Adding a class here enrols it
in the conformance tests (tests/drafters/test_conformance.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from ..core import Ask, Draft, Features, Request, SeqId
from ..engines.base import Rows, Top

Go = Callable[[SeqId, Features], bool]


class Drafter(Protocol):
    name: str
    serial: bool

    def open(self, seq: SeqId, request: Request) -> None: ...

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]: ...

    def observe(self, seq: SeqId, committed: Sequence[int]) -> None: ...

    def close(self, seq: SeqId) -> None: ...

    def stale(self, seq: SeqId) -> int:
        """Committed tokens that must be run through the drafter before it can draft."""

    def room(self, seq: SeqId) -> int:
        """Tokens the drafter can still take, its own context counted in."""

    def memory(self) -> int:
        """Bytes that it takes: weights, caches and indexes."""


class Learner(Protocol):
    """A drafter that has `rows`."""

    rows: int

    def learn(self, seq: SeqId, tokens: Sequence[int], best: Top) -> None: ...


def teach(
    drafters: Iterable[Drafter],
    seq: SeqId,
    tokens: Sequence[int],
    kept: Sequence[int],
    rows: Rows,
) -> None:
    """Tells learners of the verified tokens; `kept`: the rows that the committed text came from."""
    learners = [cast(Learner, drafter) for drafter in drafters if getattr(drafter, "rows", 0)]
    if not learners:
        return
    order = [*kept, *sorted(set(range(len(tokens))).difference(kept))]
    best = rows.top(max(learner.rows for learner in learners))
    best = Top(best.ids[order], best.scores[order])
    for learner in learners:
        learner.learn(seq, [tokens[i] for i in order], best)


LONGEST = 32  # match lengths beyond this tell nothing more
REHEARSED, AHEAD = 64, 8  # positions of the prompt, and nodes at each: 5 ms a request
Rehearsal = tuple[Draft, tuple[int, ...]]  # what would have been proposed, what came


def never(seq: SeqId, features: Features) -> bool:
    """`go` for a drafter that is to draft no further, or that does not ask."""
    return False


class Retrieval(ABC):
    """What drafters without a model share: nothing to catch up with, no context to fill."""

    name: str
    serial = False

    @abstractmethod
    def open(self, seq: SeqId, request: Request) -> None: ...

    @abstractmethod
    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]: ...

    @abstractmethod
    def observe(self, seq: SeqId, committed: Sequence[int]) -> None: ...

    def rehearse(self, seq: SeqId, request: Request) -> list[Rehearsal]:
        """Opens the sequence as `open` does, and says what would have been proposed at the prompt's
        last positions, with what followed there."""
        prompt = request.prompt
        found: list[Rehearsal] = []
        start = max(len(prompt) - REHEARSED, len(prompt) // 3, 1)
        self.open(seq, replace(request, prompt=prompt[:start]))
        for at in range(start, len(prompt)):
            if at + AHEAD <= len(prompt):
                for draft in self.propose([Ask(seq, self.name, AHEAD)], never):
                    found.append((draft, prompt[at : at + AHEAD]))
            self.observe(seq, prompt[at : at + 1])
        return found

    def stale(self, seq: SeqId) -> int:
        return 0

    def room(self, seq: SeqId) -> int:
        return 1 << 30


def _registry() -> dict[str, Callable[..., Any]]:
    from .lookup import Lookup
    from .model import ModelDrafter
    from .recycling import Recycling
    from .suffix import Suffix

    return {"lookup": Lookup, "suffix": Suffix, "recycling": Recycling, "model": ModelDrafter}


REGISTRY: dict[str, Callable[..., Any]] = _registry()
