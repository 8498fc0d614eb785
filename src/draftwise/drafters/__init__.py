"""Drafters: anything that proposes tokens. One file each; `REGISTRY` names them all.

The contract. `open(seq, request)` starts a sequence with its prompt, `observe(seq, committed)`
tells it the text as it grows, `propose(asks, go)` returns at most one draft an ask, of at most
`ask.depth` nodes, and must not change what later proposals would be; `close(seq)` forgets the
sequence. A drafter marked `serial` pays for every token it drafts and calls `go(seq, features)`
before each further one, where `features` are those of the last one drafted. Retrieval drafters
draft in microseconds, are asked at every step and ignore `go`.

Drafts may be as wrong as they like: acceptance keeps the text right. Adding a class here enrols it
in the conformance tests (tests/drafters/test_conformance.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..core import Ask, Draft, Features, Request, SeqId

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


class Retrieval:
    """What drafters without a model share: nothing to catch up with, no context to fill, and a
    reach. Most drafts fail early, and 64 nodes take 0.1 ms to write down, so a draft is four times
    as long as the last step's tokens, at least REACH: a copy that goes well is at full length
    within two steps."""

    serial = False
    REACH = 16

    def __init__(self) -> None:
        self._reach: dict[SeqId, int] = {}

    def reach(self, ask: Ask) -> int:
        return min(ask.depth, self._reach.get(ask.seq, self.REACH))

    def stepped(self, seq: SeqId, committed: Sequence[int]) -> None:
        self._reach[seq] = max(self.REACH, 4 * len(committed))

    def stale(self, seq: SeqId) -> int:
        return 0

    def room(self, seq: SeqId) -> int:
        return 1 << 30


def _registry() -> dict[str, Callable[..., Any]]:
    from .lookup import Lookup
    from .model import ModelDrafter
    from .suffix import Suffix

    return {"lookup": Lookup, "suffix": Suffix, "model": ModelDrafter}


REGISTRY: dict[str, Callable[..., Any]] = _registry()
