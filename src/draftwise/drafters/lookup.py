"""Prompt lookup: copy what followed the last occurrence of the words just written.

The request's own text (prompt and generated) is indexed by its n-grams. The drafter takes the
latest few places where the last tokens stood before, extends each match backwards, and copies from
the longest (the latest, among equals). One token of match is enough to propose: whether such a
draft is worth verifying is the policy's decision, from the match length it reports.

If the copied run reaches the end of the text it goes on periodically, so a loop of any period is
drafted to full depth. Cost: O(1) dictionary writes per token, about 15 µs per proposal.
Lossless because drafts are only proposals. Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core import Ask, Draft, Features, Request, SeqId, chain
from . import LONGEST, Go, Retrieval

ORDERS = (3, 2, 1)
PLACES = 6  # candidate places per order: more found no longer matches on code edits, and cost time
ENTRY_BYTES, TOKEN_BYTES = 200, 9  # of an n-gram's entry and of a token, as tracemalloc finds them


class _Text:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        # For every n-gram, the positions just after its latest occurrences, oldest first.
        self.places: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        text, places = self.tokens, self.places
        for token in tokens:
            text.append(token)
            end = len(text)
            for n in ORDERS:
                if end >= n:
                    found = places.setdefault(tuple(text[end - n :]), [])
                    found.append(end)
                    if len(found) > PLACES + 1:
                        del found[0]

    def best_match(self, text: Sequence[int]) -> tuple[int, int]:
        """(length, position after it) of the longest earlier match of the end of `text`, which
        begins with these tokens and may go on; (0, 0) if there is none."""
        end = len(text)
        for n in ORDERS:
            longest, at = 0, 0
            found = self.places.get(tuple(text[end - n :]), ())
            for place in reversed(found[:-1] if found and found[-1] == end else found[-PLACES:]):
                length = n + _agree(text, place - n, end - n)
                if length > longest:
                    longest, at = length, place
            if longest:
                return longest, at
        return 0, 0


def _agree(text: Sequence[int], a: int, b: int) -> int:
    """How many tokens before positions a < b are the same, up to LONGEST."""
    most = min(a, LONGEST)
    return next((i for i in range(most) if text[a - 1 - i] != text[b - 1 - i]), most)


def _copy(text: Sequence[int], at: int, depth: int) -> list[int]:
    run = list(text[at : at + depth])
    while len(run) < depth:  # the run reached the end of the text: go on with its own beginning
        run.extend(run[: depth - len(run)])
    return run


class Lookup(Retrieval):
    name = "lookup"

    def __init__(self) -> None:
        self._texts: dict[SeqId, _Text] = {}

    def open(self, seq: SeqId, request: Request) -> None:
        text = self._texts[seq] = _Text()
        text.extend(request.prompt)

    def observe(self, seq: SeqId, committed: Sequence[int]) -> None:
        self._texts[seq].extend(committed)

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        drafts = []
        for ask in asks:
            known = self._texts.get(ask.seq)
            if known is None:
                continue
            text = known.tokens + list(ask.after) if ask.after else known.tokens
            match, at = known.best_match(text)
            if match:
                run = _copy(text, at, ask.depth)
                # If node j is reached, all before it agreed: the match has grown by j.
                features = [Features(match=min(match + j, LONGEST)) for j in range(len(run))]
                drafts.append(chain(ask.seq, self.name, run, features, after=ask.after))
        return drafts

    def memory(self) -> int:
        texts = self._texts.values()
        return sum(ENTRY_BYTES * len(t.places) + TOKEN_BYTES * len(t.tokens) for t in texts)

    def close(self, seq: SeqId) -> None:
        self._texts.pop(seq, None)
