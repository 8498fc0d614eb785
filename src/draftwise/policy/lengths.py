"""How many tokens a text still has, from the texts that have ended.

    E[left | n so far] = (Σ w_i · min(length_i − n, wanted) + W · wanted / 2) / (Σ w_i + W)

over earlier texts longer than n; w_i is larger the more alike the prompts' lengths are, since
requests of one kind (a chat, a summary, a question on passages) come with prompts of like length.
What must be paid once, such as a draft model's pass over the prompt, is worth it only for a text
that goes on.
"""

from __future__ import annotations

import math
from collections import deque

from ..core import SeqId

KEPT = 200
WEIGHT = 1.0


class Lengths:
    def __init__(self) -> None:
        self._ended: deque[tuple[int, int]] = deque(maxlen=KEPT)  # prompt, generated
        self._running: dict[SeqId, tuple[int, int]] = {}

    def open(self, seq: SeqId) -> None:
        self._running[seq] = (0, 1)

    def add(self, seq: SeqId, context: int, tokens: int) -> None:
        """`tokens` were committed after `context`."""
        prompt, generated = self._running[seq]
        prompt = prompt or context
        self._running[seq] = (prompt, generated + tokens)

    def close(self, seq: SeqId) -> None:
        prompt, generated = self._running.pop(seq, (0, 0))
        if prompt:
            self._ended.append((prompt, generated))

    def left(self, seq: SeqId, context: int, wanted: int) -> float:
        """Tokens expected from here on, of at most `wanted`."""
        prompt, generated = self._running[seq]
        prompt = prompt or context
        total, weights = 0.5 * wanted * WEIGHT, WEIGHT
        for other, length in self._ended:
            if length > generated:
                apart = 2.0 * math.log2(prompt / other)
                w = 1.0 / (1.0 + apart * apart)
                total += w * min(length - generated, wanted)
                weights += w
        return total / weights
