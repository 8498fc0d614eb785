"""Model drafter: a smaller causal model with the same tokenizer guesses token by token.

It is an engine of its own with its own cache, which may lag behind the text: the missing tokens
are run when it is next asked, so a request that never asks it never pays for its prompt. Before
each further token `go` is asked with the last one's confidence.

Coupled: it takes the argmax of its own processed logits / T plus the *target's* noise g for that
position: both models choose alike wherever their distributions are close (arXiv 2408.07978).
Rejection: it draws from its processed distribution with noise of its own and reports q, the very
numbers it drew with; the confidence shown is then q's largest entry, which does not depend on the
token drawn, so that stopping cannot shift the text's distribution.

Vocabularies padded to different sizes are cut to the smaller one, and large ones to their common
ids, where the request's own text is in those. Cost: one forward of the draft
model per token and one catch-up. Lossless because acceptance judges every token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core import (
    POINT,
    Ask,
    Dense,
    Draft,
    Features,
    FloatRow,
    Q,
    Request,
    SeqId,
    UsageError,
    chain,
)
from ..engines.base import Engine, PrefillChunk, Verify
from ..sampling import DRAFT, Sampler, gumbel, key
from . import Go

# Byte-pair vocabularies are numbered by frequency, so that the first ids hold nearly all text: of
# 152k, leaving the others out makes a 0.5B model's token 14 % cheaper (89 against 77 ms, 2 cores).
COMMON = 65_536
PROMPT = 64  # more missing tokens than this are prefilled apart, so that windows can be trimmed


class _Lagging:
    """A sequence's text and the draft model's cache of it, which is behind and partly wrong."""

    def __init__(self, request: Request, vocabulary: int):
        self.request = request
        self.text: list[int] = list(request.prompt)
        self.cached: list[int] = []  # tokens in the engine's cache, drafted ones included
        self.base = 0  # how many of them the engine has been told to keep
        self.opened = False
        self.ids = 0
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

    def open(self, seq: SeqId, request: Request) -> None:
        lagging = self._sequences[seq] = _Lagging(request, self._vocabulary)
        if self.ids:
            # The last hundredth are special tokens; text in other scripts needs the whole.
            rare = sum(self.ids <= t < 0.99 * self._vocabulary for t in request.prompt)
            lagging.ids = self.ids if rare <= 0.02 * len(request.prompt) else 0

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
        if self.engine.caps.context is None:
            return 1 << 30
        return self.engine.caps.context - len(self._sequences[seq].text)

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        return [draft for ask in asks if (draft := self._draft(ask, go)) is not None]

    def _draft(self, ask: Ask, go: Go) -> Draft | None:
        lagging = self._sequences[ask.seq]
        depth = min(ask.depth, self.room(ask.seq))
        if depth < 1:
            return None
        row = self._catch_up(ask.seq, lagging)
        generated = lagging.text[len(lagging.request.prompt) :]
        tokens: list[int] = []
        features: list[Features] = []
        q: list[Q] = []
        while True:
            token, feature, mass = self._choose(lagging, row, generated, tokens)
            tokens.append(token)
            features.append(feature)
            q.append(mass)
            if len(tokens) >= depth or token in lagging.request.eos or not go(ask.seq, feature):
                return chain(ask.seq, self.name, tokens, features, q)
            row = self._run(ask.seq, lagging, [token])

    def _catch_up(self, seq: SeqId, lagging: _Lagging) -> FloatRow:
        """Drops what was drafted in vain, runs what is missing; the row after the last token."""
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
            lagging.cached, lagging.base = lagging.text[:-1], len(lagging.text) - 1
            missing = missing[-1:]
        return self._run(seq, lagging, missing)

    def _run(self, seq: SeqId, lagging: _Lagging, tokens: Sequence[int]) -> FloatRow:
        rows = self.engine.forward([Verify(seq, self._known(tokens), ids=lagging.ids)])[0]
        lagging.cached.extend(tokens)
        return rows.row(len(tokens) - 1)[: self._vocabulary]

    def _known(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Ids that only the target's larger padding has are fed as 0: the draft is poor there, and
        the text is not affected."""
        size = self.engine.caps.vocabulary
        return tuple(t if t < size else 0 for t in tokens)

    def _choose(
        self, lagging: _Lagging, row: FloatRow, generated: list[int], drafted: list[int]
    ) -> tuple[int, Features, Q]:
        sampler, start = lagging.sampler, len(generated)
        generated = [*generated, *drafted]
        if lagging.request.params.greedy:
            _, scores = sampler.support(row, generated)
            best = int(scores.argmax())
            return best, Features(prob=1.0 / float(np.exp(scores - scores[best]).sum())), POINT
        if lagging.request.acceptance == "coupled":
            token, lead = sampler.ranked(row, generated)
            return token, Features(margin=lead), POINT
        probs = sampler.probabilities(row, generated)
        ids = np.flatnonzero(probs)
        # Keyed by where the draft began, too: an index drafted again after a rejection must get new
        # noise, or a policy that remembers the last draft's length would know of the draw.
        noise = gumbel(key(sampler.seed, len(generated), DRAFT, choice=start), ids)
        token = int(ids[int((np.log(probs[ids]) + noise).argmax())])
        return token, Features(prob=float(probs.max())), Dense(probs)
