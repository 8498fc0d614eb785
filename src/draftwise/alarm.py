"""Says so when a draft model is never right: a wrong template or a wrong model, as a rule.

A draft is *right* if one of its first nodes is the token that came, whether it was verified or
not: the text tells that of every draft. A draft model of which none of the first ASKS drafts was
right is reported once in the log and in `stats.note`, over requests, until one is. One that is
right in half of its drafts would be reported by mistake in one of 256 runs. Cost: nothing worth
naming, and none once a drafter was right.
"""

from __future__ import annotations

import logging
from collections import Counter

from .core import StepResult

ASKS = 8
logger = logging.getLogger("draftwise")


class Alarm:
    """Watches the serial drafters of one model over all its requests."""

    def __init__(self) -> None:
        self._asks: Counter[str] = Counter()
        self._right: set[str] = set()

    def add(self, r: StepResult) -> None:
        name = r.asked
        if name is None or name in self._right or not r.committed:
            return
        own = [draft for draft in r.drafted if draft.drafter == name and not draft.after]
        firsts = [d.tokens[node] for d in own for node in d.children(-1)]
        if r.committed[0] in firsts:
            self._right.add(name)
        elif firsts:
            self._asks[name] += 1
            if self._asks[name] == ASKS:
                logger.warning("%s", self._text(name))

    @property
    def notes(self) -> list[str]:
        late = [name for name, asks in self._asks.items() if asks >= ASKS]
        return [self._text(name) for name in late if name not in self._right]

    def _text(self, name: str) -> str:
        return (
            f"drafter {name} was wrong in all of its first {ASKS} drafts: check that prompts go "
            "through the chat template, and that it is of the target's family"
        )
