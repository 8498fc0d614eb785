"""A lock that is granted in the order it was asked for.

Requests from several threads share one model step by step. A plain lock would let the thread that
just released it take it again at once, so that others starve behind a long text. The thread that
holds it may take it again: an abandoned generator is closed wherever the garbage collector runs.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turn:
    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._owner, self._depth = 0, 0

    def __enter__(self) -> Turn:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return self
        ticket = threading.Event()
        try:
            with self._mutex:
                self._waiting.append(ticket)
                if self._waiting[0] is ticket:
                    ticket.set()
            ticket.wait()
        except BaseException:  # Ctrl-C while queued: leave the queue, do not block it
            self._leave(ticket)
            raise
        self._owner, self._depth = me, 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = 0
            self._leave(self._waiting[0])

    def _leave(self, ticket: threading.Event) -> None:
        with self._mutex:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            if self._waiting:
                self._waiting[0].set()
