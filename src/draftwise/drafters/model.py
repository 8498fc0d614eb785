"""Model drafter: a smaller causal model with the same tokenizer guesses token by token.

It is an engine of its own with its own cache, which may lag behind the text: the missing tokens
are run when it is next asked, so a request that never asks it never pays for its prompt. Before
each further token `go` is asked with the last one's confidence.

Coupled, and what loosens it: it takes the argmax of its own processed logits / T plus the
*target's* noise g for that position: both models choose alike wherever their distributions are
close (arXiv 2408.07978). Rejection and block: it draws from its processed distribution with noise
of its own and reports q, the very numbers it drew with; the confidence shown is then q's largest
entry and its entropy, which do not depend on the token drawn, so that stopping cannot shift the
distribution.

Retrieval drafters guess its next tokens, and a forward runs some of them along: the same draft in
fewer forwards (guessing.py). Several sequences are drafted for side by side, level by level in the
same forwards; each ends by itself.

Vocabularies padded to different sizes are cut to the smaller one, and large ones to their common
ids, where the request's own text is in those. Cost: one forward of the draft
model per token and one catch-up. Lossless because acceptance judges every token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from ..core import (
    POINT,
    Ask,
    Dense,
    Draft,
    Features,
    FloatRow,
    Request,
    SeqId,
    UsageError,
)
from ..engines.base import Engine, PrefillChunk, Rows, Verify
from ..sampling import DRAFT, Sampler, gumbel, key
from . import Drafter, Go, never
from .growing import Choice, Growing, surest
from .guessing import MOST, Guessing

# Byte-pair vocabularies are numbered by frequency, so that the first ids hold nearly all text: of
# 152k, leaving the others out makes a 0.5B model's token 14 % cheaper (89 against 77 ms, 2 cores).
COMMON = 65_536
PROMPT = 64  # more missing tokens than this are prefilled apart, so that windows can be trimmed


APART = -3  # the sequence of `foretell`
Drafting = Generator[Verify, Rows | None, Draft | None]


class _Lagging:
    """A sequence's text and the draft model's cache of it, which is behind and partly wrong."""

    def __init__(self, request: Request, vocabulary: int):
        self.request = request
        self.text: list[int] = list(request.prompt)
        self.cached: list[int] = []  # tokens in the engine's cache, drafted ones included
        self.base = 0  # how many of them the engine has been told to keep
        self.opened = False
        self.ids = 0
        self.widths: list[int] = []  # of the forwards run for the present draft
        # The user's own processors may carry state, so the drafter never calls them.
        eos = frozenset(t for t in request.eos if t < vocabulary)
        self.sampler = Sampler(request.params, request.seed, request.prompt, eos)

    def common(self) -> int:
        """How many cached tokens are text. The text's last token is never counted: it must be run
        to get its logits."""
        most = min(len(self.cached), len(self.text) - 1)
        for i in range(self.base, most):
            if self.cached[i] != self.text[i]:
                return i
        return most


class ModelDrafter:
    serial = True

    def __init__(self, engine: Engine, vocabulary: int, name: str = "model"):
        """`vocabulary`: the target's; ids from there on are never proposed."""
        if engine.caps.rollback != "free":
            raise UsageError(f"{name}: a draft model needs a cache that can be rolled back")
        self.name, self.engine = name, engine
        self._vocabulary = min(vocabulary, engine.caps.vocabulary)
        self.ids = COMMON if self._vocabulary >= 1.5 * COMMON else 0
        self._sequences: dict[SeqId, _Lagging] = {}
        self._guessers: Sequence[Drafter] = ()
        self._guessing: Guessing | None = None

    def guess_with(self, guessers: Sequence[Drafter], price: Callable[[int, int], float]) -> None:
        """Lets retrieval drafters that are told of the same sequences guess its next tokens.
        `price`: seconds of its forward by (width, context)."""
        if guessers and self.engine.caps.trees:  # wrong guesses must be dropped from its cache
            self._guessers, self._guessing = tuple(guessers), Guessing(price)

    def guess_without(self, guesser: Drafter) -> None:
        """For a drafter that is unloaded: nothing may hold it."""
        self._guessers = tuple(g for g in self._guessers if g is not guesser)

    def open(self, seq: SeqId, request: Request) -> None:
        self._sequences[seq] = self._begun(request)

    def _begun(self, request: Request) -> _Lagging:
        lagging = _Lagging(request, self._vocabulary)
        if self.ids:
            # The last hundredth are special tokens; text in other scripts needs the whole.
            rare = sum(self.ids <= t < 0.99 * self._vocabulary for t in request.prompt)
            lagging.ids = self.ids if rare <= 0.02 * len(request.prompt) else 0
        return lagging

    def observe(self, seq: SeqId, committed: Sequence[int]) -> None:
        self._sequences[seq].text.extend(committed)

    def close(self, seq: SeqId) -> None:
        lagging = self._sequences.pop(seq, None)
        if lagging is not None and lagging.opened:
            self.engine.close(seq, keep=lagging.request.reuse)

    def stale(self, seq: SeqId) -> int:
        lagging = self._sequences[seq]
        return len(lagging.text) - lagging.common()

    def room(self, seq: SeqId) -> int:
        return self._room(len(self._sequences[seq].text))

    def _room(self, held: int) -> int:
        context = self.engine.caps.context
        return (1 << 30) if context is None else context - held

    def memory(self) -> int:
        return self.engine.memory()

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        drafts: dict[int, Draft | None] = {}
        going = {i: self._draft(ask, go) for i, ask in enumerate(asks)}
        rows: dict[int, Rows | None] = dict.fromkeys(going)
        while rows:
            work: dict[int, Verify] = {}
            for i, own in rows.items():
                try:
                    work[i] = going[i].send(own)
                except StopIteration as end:
                    drafts[i] = end.value
            found = self.engine.forward(list(work.values())) if work else []
            rows = dict(zip(work, found, strict=True))
        return [draft for i in range(len(asks)) if (draft := drafts[i]) is not None]

    def _draft(self, ask: Ask, go: Go) -> Drafting:
        """Yields what it needs run, and returns the draft."""
        lagging = self._sequences[ask.seq]
        depth = min(ask.depth, self.room(ask.seq))
        if depth < 1:
            return None
        generated = lagging.text[len(lagging.request.prompt) :]
        draft = Growing(ask)
        lagging.widths = []
        tokens = self._catch_up(ask.seq, lagging)
        while True:
            ahead = yield from self._look_ahead(ask.seq, lagging, tokens, draft, depth)
            while True:
                known = [*generated, *draft.main]
                choices = self._choose(lagging, ahead.row, known, len(generated), ask.siblings)
                token, feature, _ = choices[0]
                draft.grow(choices)
                guessed = ahead.step(token)  # then the row after it is there already
                ended = len(draft.main) >= depth or token in lagging.request.eos
                further = not ended and go(ask.seq, feature)
                if ended or not guessed:
                    break
            self._settle(ask.seq, lagging, ahead)
            if not further:
                return draft.done(self.name, lagging.widths)
            tokens = [token]

    def _look_ahead(
        self, seq: SeqId, lagging: _Lagging, tokens: list[int], draft: Growing, depth: int
    ) -> Generator[Verify, Rows | None, _Ahead]:
        """Runs tokens, and guesses of what follows them."""
        guesses: tuple[int, ...] = ()
        features: tuple[Features, ...] = ()
        if self._guessing is not None:
            found = self._guessed(seq, draft.main, min(MOST, depth - 1 - len(draft.main)))
            if found is not None:
                count = self._guessing.count(found.features, len(lagging.text), len(tokens))
                guesses, features = found.tokens[:count], found.features[:count]
        run = [*tokens, *guesses]
        rows = yield Verify(seq, self._known(run), ids=lagging.ids)
        assert rows is not None
        lagging.cached.extend(run)
        lagging.widths.append(len(run))
        return _Ahead(rows, len(tokens) - 1, self._vocabulary, guesses, features)

    def _settle(self, seq: SeqId, lagging: _Lagging, ahead: _Ahead) -> None:
        """Drops the wrong guesses, and learns from them."""
        if ahead.guesses and self._guessing is not None:
            self._guessing.learn(ahead.features, ahead.at)
        if ahead.wrong:
            self.engine.drop(seq, ahead.wrong)
            del lagging.cached[-ahead.wrong :]

    def _guessed(self, seq: SeqId, drafted: Sequence[int], depth: int) -> Draft | None:
        if depth < 1:
            return None
        found = [
            draft
            for guesser in self._guessers
            for draft in guesser.propose([Ask(seq, guesser.name, depth, tuple(drafted))], never)
            if draft.tokens
        ]
        best = max(found, key=lambda draft: draft.features[0].match, default=None)
        return best.main().head(depth) if best is not None else None

    def foretell(
        self, request: Request, text: Sequence[int], siblings: int = 0
    ) -> list[list[tuple[int, Features]]]:
        """What it would choose at each index of `text` from 1 on, given all before it, and its next
        best: one pass over prompt and text, apart from every running sequence. For traces."""
        if len(text) < 2 or self._room(len(request.prompt) + len(text)) < 0:
            return []
        lagging = self._begun(request)
        self.engine.open(APART, ())
        try:
            self.engine.forward([PrefillChunk(APART, self._known(request.prompt))])
            found: list[list[tuple[int, Features]]] = []
            for start in range(0, len(text) - 1, PROMPT):
                part = self._known(text[start : min(start + PROMPT, len(text) - 1)])
                rows = self.engine.forward([Verify(APART, part, ids=lagging.ids)])[0]
                for i in range(len(part)):
                    row, before = rows.row(i)[: self._vocabulary], list(text[: start + i + 1])
                    choices = self._choose(lagging, row, before, len(before), siblings)
                    found.append([choice[:2] for choice in choices])
                self.engine.commit(APART, range(len(part)))
            return found
        finally:
            self.engine.close(APART)

    def _catch_up(self, seq: SeqId, lagging: _Lagging) -> list[int]:
        """Drops what was drafted in vain, and runs what is missing but for its end, returned."""
        if not lagging.opened:
            lagging.opened = True
            reused = self.engine.open(seq, self._known(lagging.text))
            lagging.cached, lagging.base = lagging.text[:reused], reused
        common = lagging.common()
        if len(lagging.cached) > lagging.base:
            self.engine.commit(seq, range(common - lagging.base))
        lagging.cached, lagging.base = lagging.text[:common], common
        missing = lagging.text[common:]
        if len(missing) > PROMPT:
            self.engine.forward([PrefillChunk(seq, self._known(missing[:-1]))])
            lagging.widths.append(len(missing) - 1)
            lagging.cached, lagging.base = lagging.text[:-1], len(lagging.text) - 1
            missing = missing[-1:]
        return missing

    def _known(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Ids that only the target's larger padding has are fed as 0: the draft is poor there, and
        the text is not affected."""
        size = self.engine.caps.vocabulary
        return tuple(t if 0 <= t < size else 0 for t in tokens)

    def _choose(
        self, lagging: _Lagging, row: FloatRow, generated: list[int], start: int, siblings: int
    ) -> list[Choice]:
        """Its token after `generated`, and its next best ones; the draft began at index `start`."""
        sampler = lagging.sampler
        if lagging.request.params.greedy:
            _, scores = sampler.support(row, generated)
            return surest(scores, siblings)
        if not lagging.request.draws:
            tokens, noisy = sampler.ranking(row, generated, max(1 + siblings, 2))
            lead = noisy[0] - noisy[1] if len(noisy) > 1 else 30.0
            behind = [min(lead, 30.0), *(noisy[0] - score for score in noisy[1:])]
            return [
                Choice(token, Features(margin=margin, rank=rank), POINT)
                for rank, (token, margin) in enumerate(zip(tokens, behind, strict=True))
            ][: 1 + siblings]
        probs = sampler.probabilities(row, generated)
        ids = np.flatnonzero(probs)
        # Keyed by where the draft began, too: an index drafted again after a rejection must get new
        # noise, or a policy that remembers the last draft's length would know of the draw.
        noise = gumbel(key(sampler.seed, len(generated), DRAFT, choice=start), ids)
        kept = probs[ids]
        logs = np.log(kept)
        token = int(ids[int((logs + noise).argmax())])
        sure = Features(prob=float(kept.max()), entropy=max(-float(np.dot(kept, logs)), 0.0))
        return [Choice(token, sure, Dense(probs))]


@dataclass
class _Ahead:
    """Rows of one forward: after the last known token, and after each guess of what follows."""

    rows: Rows
    first: int
    vocabulary: int
    guesses: tuple[int, ...] = ()
    features: tuple[Features, ...] = ()
    at: int = 0  # guesses that were right

    @property
    def row(self) -> FloatRow:
        return self.rows.row(self.first + self.at)[: self.vocabulary]

    @property
    def wrong(self) -> int:
        return len(self.guesses) - self.at

    def step(self, token: int) -> bool:
        right = self.at < len(self.guesses) and self.guesses[self.at] == token
        self.at += right
        return right
