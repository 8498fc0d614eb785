"""Text as it may be shown, and when it ends.

`Stopper.push(token)` is called once for every committed token, in order, and returns the finish
reason or None. `take()` gives the text that is safe to show: never half a UTF-8 character, never
the beginning of what may become a stop string. Pieces taken add up to `text`.

A stop string is looked for in the text, not in tokens, so it may begin or end inside one, span
steps, or lie in a bonus token. The token that completes it is the last of the ids; the text ends
before the string. Detokenising looks back a few tokens, since what a token reads as can depend on
those before it (spaces in sentencepiece, bytes of one character). Cost: about 30 µs a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

HALF = "\ufffd"  # what an unfinished UTF-8 sequence decodes to
PATIENCE = 8  # so many of them in a row are broken bytes, not a character that is unfinished
INVISIBLE = 64  # special tokens in a row that a piece is read together with


class Decoder(Protocol):
    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any: ...


class Stopper:
    """`limit`: generated tokens at most. `criteria`: transformers stopping criteria, called with
    (ids [1, L], None) for every token."""

    def __init__(
        self,
        tokenizer: Decoder | None,
        prompt: Sequence[int],
        limit: int,
        eos: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        criteria: Sequence[Callable[[Any, Any], Any]] = (),
        device: torch.device | None = None,
    ):
        self._tokenizer, self._limit, self._eos = tokenizer, limit, eos
        self._stop, self._criteria, self._prompt = tuple(stop), tuple(criteria), list(prompt)
        self._device = device
        self._cut = False
        self.tokens: list[int] = []
        self.text = ""
        self.finish: str | None = None
        self._shown = 0
        # The next piece is decoded from token `_from` on, of which up to `_whole` ended in a whole
        # character, and `_read` characters of that are in `text`.
        self._from = self._whole = self._read = 0

    def push(self, token: int) -> str | None:
        self.tokens.append(token)
        stopped, met = self._stopped_by(self._decoded()), self._met()
        if token in self._eos or stopped or met:
            self.finish = "stop"
        elif len(self.tokens) >= self._limit:
            self.finish = "length"
        if self.finish is not None:
            self.end(self.finish)
        return self.finish

    def end(self, reason: str) -> None:
        """Ends the text; bytes of an unfinished character become what they decode to."""
        self.finish = reason
        if self._whole < len(self.tokens) and not self._cut:
            self._stopped_by(self._decoded(final=True))

    def _decoded(self, final: bool = False) -> int:
        """Appends what can be read of the tokens so far to `text`; where the addition begins."""
        start = len(self.text)
        if self._tokenizer is None:
            return start
        read = self._decode(self.tokens[self._from :])
        whole = not read.endswith(HALF)
        if not (whole or final):
            # The tokens to come may mend what is not whole; of a long row, the last one only.
            sure = read.rstrip(HALF)
            read = sure if len(read) - len(sure) < PATIENCE else read[:-1]
        grown = len(read) > self._read
        if grown:
            self.text += read[self._read :]
            self._read = len(read)
        # The next piece is read after a visible one, but not after thousands of invisible ones.
        if whole and (grown or len(self.tokens) - self._from > INVISIBLE):
            self._from, self._whole = self._whole, len(self.tokens)
            self._read = len(self._decode(self.tokens[self._from :]))
        return start

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _stopped_by(self, start: int) -> bool:
        """Cuts `text` before the earliest stop string that ends after `start`."""
        found = [
            at for s in self._stop if (at := self.text.find(s, max(start - len(s) + 1, 0))) >= 0
        ]
        if found:
            self.text = self.text[: min(found)]
            self._cut = True
        return bool(found)

    def _met(self) -> bool:
        if not self._criteria:
            return False
        ids = torch.tensor([[*self._prompt, *self.tokens]], dtype=torch.long, device=self._device)
        # All are called, as transformers does: some of them count.
        return any([bool(torch.as_tensor(c(ids, None)).all()) for c in self._criteria])

    def take(self) -> str:
        """The text not taken yet that is safe to show."""
        end = len(self.text)
        if self.finish is None:
            end -= max((_overlap(self.text, s) for s in self._stop), default=0)
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
