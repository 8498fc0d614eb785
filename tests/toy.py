"""A target small enough to enumerate, an engine that checks how it is used, and odd drafters.

The next-token logits of the toy target are a table over the last two tokens, so every probability
of its texts is known, and a row computed from the wrong path shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from draftwise.accept import NodeRows, Rule
from draftwise.core import (
    POINT,
    Ask,
    Dense,
    Draft,
    Features,
    FloatRow,
    Q,
    Request,
    SamplingParams,
    SeqId,
    Sparse,
    State,
    StepPlan,
    StepResult,
)
from draftwise.decode import Parts, decode
from draftwise.drafters import Drafter, Go
from draftwise.engines.base import Caps, PrefillChunk, Shape, Top, Verify, top_of
from draftwise.policy import Policy
from draftwise.sampling import Sampler
from draftwise.stopping import Stopper

PROMPT = (1, 0, 2)


class Target:
    """Logits [V] (float32) after a history, from its last two tokens."""

    def __init__(self, size: int = 6, seed: int = 0, spread: float = 1.5):
        rng = np.random.default_rng(seed)
        self.size = size
        self.table = rng.normal(0.0, spread, (size, size, size)).astype(np.float32)

    def logits(self, history: Sequence[int]) -> FloatRow:
        before = history[-2] if len(history) > 1 else 0
        row: FloatRow = self.table[before, history[-1]]
        return row


class ToyRows:
    """Rows of one forward; reading one that is padding fails, and reads are written down."""

    def __init__(self, target: Target, paths: Sequence[Sequence[int]]):
        self._target, self._paths = target, paths
        self.read: list[int] = []

    def argmax(self) -> list[int]:
        return [int(self._target.logits(path).argmax()) for path in self._paths]

    def top(self, k: int) -> Top:
        return top_of(np.stack([self._target.logits(path) for path in self._paths]), k)

    def row(self, i: int) -> FloatRow:
        assert 0 <= i < len(self._paths), f"row {i} of {len(self._paths)} is padding"
        self.read.append(i)
        return self._target.logits(self._paths[i]).copy()


@dataclass
class _Cache:
    tokens: list[int]
    pending: list[int] | None = None  # tokens of the rows of the forward not committed yet
    parents: tuple[int, ...] = ()


class ToyEngine:
    """An engine over `Target` that takes trees and asserts the contract of engines/base.py.

    `fail` names a method that raises Broken when it is called for the `after`-th time.
    """

    name = "toy"

    def __init__(self, target: Target, fail: str = "", after: int = 1, rollback: str = "free"):
        self.target = target
        self.caps = Caps(True, rollback, "packed", None, target.size)
        self.caches: dict[SeqId, _Cache] = {}
        self.kept: list[int] | None = None
        self.widths: list[int] = []
        self.commits = 0
        self.rows: ToyRows | None = None
        self._trip = Trip(fail, after)

    def open(self, seq: SeqId, tokens: Sequence[int], share: SeqId | None = None) -> int:
        assert seq not in self.caches and share is None
        self._trip("open")
        kept, self.kept = self.kept or [], None
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(kept, tokens[:-1], strict=False)
        )
        self.caches[seq] = _Cache([token for token, _ in same])
        return len(self.caches[seq].tokens)

    def forward(self, work: Sequence[PrefillChunk | Verify]) -> list[ToyRows]:
        self._trip("forward")
        return [self._prefill(w) if isinstance(w, PrefillChunk) else self._verify(w) for w in work]

    def _prefill(self, work: PrefillChunk) -> ToyRows:
        cache = self.caches[work.seq]
        assert cache.pending is None
        cache.tokens.extend(work.tokens)
        return ToyRows(self.target, [tuple(cache.tokens)])

    def _verify(self, work: Verify) -> ToyRows:
        cache = self.caches[work.seq]
        assert cache.pending is None, "a forward before the last one was committed"
        assert len(work.parents) == len(work.tokens) - 1, "one parent for every node"
        assert all(0 <= p <= i for i, p in enumerate(work.parents)), "parents come before children"
        cache.pending, cache.parents = list(work.tokens), work.parents
        self.widths.append(max(work.width, len(work.tokens)))
        paths = [(*cache.tokens, work.tokens[0])]
        for token, parent in zip(work.tokens[1:], work.parents, strict=True):
            paths.append((*paths[parent], token))
        self.rows = ToyRows(self.target, paths)
        return self.rows

    def commit(self, seq: SeqId, path: Sequence[int]) -> None:
        self._trip("commit")
        cache, kept = self.caches[seq], list(path)
        assert cache.pending is not None, "a commit without a forward"
        assert kept[:1] == [0], "the anchor is text"
        assert self.caps.rollback == "free" or len(kept) == len(cache.pending)
        for row, parent in zip(kept[1:], kept, strict=False):
            assert cache.parents[row - 1] == parent, "the kept rows are not one path of the tree"
        cache.tokens.extend(cache.pending[row] for row in kept)
        cache.pending = None
        self.commits += 1

    def shape(self, widths: Sequence[int], contexts: Sequence[int]) -> Shape:
        return Shape(sum(widths), max(contexts), len(widths))

    def close(self, seq: SeqId, keep: bool = False) -> None:
        cache = self.caches.pop(seq, None)
        if keep and cache and cache.pending is None:
            self.kept = cache.tokens
        self._trip("close")

    def blank(self, seq: SeqId, length: int) -> bool:
        return False

    def free(self) -> None:
        self.caches.clear()


class Broken(Exception):
    """What a part raises that is told to fail."""


class Trip:
    """Raises Broken at the `after`-th call for the method it is set on."""

    def __init__(self, method: str, after: int):
        self._method, self._left = method, after

    def __call__(self, method: str) -> None:
        if method == self._method:
            self._left -= 1
            if self._left == 0:
                raise Broken(method)


class Guess(NamedTuple):
    tokens: Sequence[int]
    parents: Sequence[int] | None = None  # None: a chain
    q: Sequence[Q] | None = None  # None: points
    features: Sequence[Features] | None = None  # None: nothing is known

    def draft(self, seq: SeqId, name: str) -> Draft:
        n = len(self.tokens)
        parents = range(-1, n - 1) if self.parents is None else self.parents
        q = [POINT] * n if self.q is None else self.q
        known = (Features(),) * n if self.features is None else tuple(self.features)
        return Draft(seq, name, tuple(self.tokens), tuple(parents), known, tuple(q))


# (generated so far, text with the prompt, depth asked for) -> guess
Guesser = Callable[[list[int], list[int], int], Guess]


class ToyDrafter:
    """A drafter around a guesser. It asserts the contract of drafters/__init__.py."""

    def __init__(
        self,
        guess: Guesser,
        name: str = "toy",
        serial: bool = False,
        fail: str = "",
        after: int = 1,
    ):
        self.name, self.serial, self._guess = name, serial, guess
        self.texts: dict[SeqId, list[int]] = {}
        self._prompts: dict[SeqId, int] = {}
        self._trip = Trip(fail, after)

    def open(self, seq: SeqId, request: Request) -> None:
        assert seq not in self.texts
        self.texts[seq] = list(request.prompt)
        self._prompts[seq] = len(request.prompt)
        self._trip("open")

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        self._trip("propose")
        drafts = []
        for ask in asks:
            assert ask.depth > 0 and ask.drafter == self.name
            text = self.texts[ask.seq]
            guess = self._guess(text[self._prompts[ask.seq] :], list(text), ask.depth)
            draft = guess.draft(ask.seq, self.name)
            if self.serial and len(draft.tokens):
                n = 1
                while n < len(draft.tokens) and go(ask.seq, draft.features[n - 1]):
                    n += 1
                draft = draft.head(n)
            drafts.append(draft)
        return drafts

    def observe(self, seq: SeqId, committed: Sequence[int]) -> None:
        self._trip("observe")
        self.texts[seq].extend(committed)

    def close(self, seq: SeqId) -> None:
        del self.texts[seq], self._prompts[seq]
        self._trip("close")

    def stale(self, seq: SeqId) -> int:
        return 1

    def room(self, seq: SeqId) -> int:
        return 1 << 30


def scripted(script: Sequence[int]) -> Guesser:
    """Goes on with `script` (the text of another run, say) from where the text is."""
    return lambda generated, text, depth: Guess(script[len(generated) : len(generated) + depth])


def wrong(script: Sequence[int], size: int) -> Guesser:
    """Never the token that `script` has."""
    return lambda generated, text, depth: Guess(
        [(t + 1) % size for t in script[len(generated) : len(generated) + depth]]
    )


def random_points(size: int, seed: int, longest: int = 5) -> Guesser:
    rng = random.Random(seed)
    return lambda generated, text, depth: Guess(
        [rng.randrange(size) for _ in range(rng.randint(0, min(depth, longest)))]
    )


def random_trees(size: int, seed: int, most: int = 9) -> Guesser:
    """Trees of any form, siblings with the same token included."""
    rng = random.Random(seed)

    def guess(generated: list[int], text: list[int], depth: int) -> Guess:
        n = rng.randint(0, most)
        parents = [rng.randint(-1, i - 1) for i in range(n)]
        return Guess([rng.randrange(size) for _ in range(n)], parents)

    return guess


def best_points(target: Target, depth: int = 3) -> Guesser:
    """What is most likely, token by token: greedy drafts."""

    def guess(generated: list[int], text: list[int], asked: int) -> Guess:
        path = list(text)
        for _ in range(min(depth, asked)):
            path.append(int(target.logits(path).argmax()))
        return Guess(path[len(text) :])

    return guess


def best_tree(target: Target, branch: int = 2, depth: int = 2) -> Guesser:
    """The `branch` most likely tokens after every node, `depth` deep."""

    def guess(generated: list[int], text: list[int], asked: int) -> Guess:
        tokens: list[int] = []
        parents: list[int] = []
        level = [(-1, list(text))]
        for _ in range(min(depth, asked)):
            deeper = []
            for node, path in level:
                for token in np.argsort(-target.logits(path))[:branch].tolist():
                    tokens.append(token)
                    parents.append(node)
                    deeper.append((len(tokens) - 1, [*path, token]))
            level = deeper
        return Guess(tokens, parents)

    return guess


def drawing(
    model: Target,
    params: SamplingParams,
    seed: int,
    depth: int = 3,
    *,
    sparse: bool = False,
    siblings: int = 1,
    told: Callable[[FloatRow, FloatRow, int], Q] | None = None,
    stop: Callable[[FloatRow, int], bool] = lambda q, token: False,
    drop: Callable[[FloatRow, int], bool] = lambda q, token: False,
) -> Guesser:
    """Draws every token from q, `model`'s distribution processed by `params`, and says so.

    `sparse` says it as a Sparse; `siblings` tokens are drawn after the root. `told` says something
    else instead, from (q, logits, token). `stop` ends the draft after the token, `drop` before it.
    """
    rng, sampler = random.Random(seed), Sampler(params, 0)
    known: dict[tuple[int, ...], FloatRow] = {}

    def guess(generated: list[int], text: list[int], asked: int) -> Guess:
        path = list(text)
        tokens: list[int] = []
        parents: list[int] = []
        said: list[Q] = []
        while len(tokens) < min(depth, asked) + siblings - 1:
            row, last = model.logits(path), tuple(path[-2:])
            q = known.get(last)
            if q is None:
                q = known[last] = sampler.probabilities(row, [])
            token = rng.choices(range(len(q)), q)[0]
            if drop(q, token):
                break
            if told is not None:
                said.append(told(q, row, token))
            elif sparse:
                ids = np.flatnonzero(q)
                said.append(Sparse(ids, q[ids]))
            else:
                said.append(Dense(q))
            parents.append(-1 if len(tokens) < siblings else len(tokens) - 1)
            tokens.append(token)
            if len(tokens) >= siblings:
                path.append(token)  # the last sibling is the one that goes on
            if stop(q, token):
                break
        return Guess(tokens, parents, said)

    return guess


class Everything:
    """Verifies all of the first draft that is not empty, however long it is."""

    name = "everything"

    def __init__(self, serial: Sequence[str] = (), fail: str = "", after: int = 1):
        self._serial, self._trip = tuple(serial), Trip(fail, after)
        self.seqs: set[SeqId] = set()
        self.learned: list[StepResult] = []

    def open(self, seq: SeqId) -> None:
        assert seq not in self.seqs
        self.seqs.add(seq)
        self._trip("open")

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        self._trip("choose")
        return [
            Ask(s.seq, name, s.wanted - 1) for s in batch if s.wanted > 1 for name in self._serial
        ]

    def go(self, seq: SeqId, features: Features) -> bool:
        self._trip("go")
        return True

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        self._trip("select")
        plans = []
        for state, drafts in batch:
            draft = next((d for d in drafts if d.tokens), None)
            plans.append(StepPlan(state.seq, draft, 1 + len(draft.tokens) if draft else 1))
        return plans

    def learn(self, results: Sequence[StepResult]) -> None:
        self._trip("learn")
        self.learned.extend(results)

    def close(self, seq: SeqId) -> None:
        self.seqs.remove(seq)
        self._trip("close")


class Whim(Everything):
    """Decides everything at random: what to ask, how far, which nodes, how much padding."""

    name = "whim"

    def __init__(self, seed: int, serial: Sequence[str] = ()):
        super().__init__(serial)
        self._rng = random.Random(seed)

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        return [ask for ask in super().choose(batch)[:1] if self._rng.random() < 0.7]

    def go(self, seq: SeqId, features: Features) -> bool:
        return self._rng.random() < 0.6

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        plans = []
        for state, drafts in batch:
            draft = self._rng.choice([None, *drafts])
            n = self._rng.randint(0, len(draft.tokens)) if draft else 0
            width = 1 + n + self._rng.choice([0, 0, 1, 5])
            plans.append(StepPlan(state.seq, draft.head(n) if draft and n else None, width))
        return plans


def parts(
    engine: ToyEngine,
    drafters: Sequence[Drafter] = (),
    policy: Policy | None = None,
    turn: Any = None,
) -> Parts:
    serial = [d.name for d in drafters if d.serial]
    chosen = Everything(serial) if policy is None else policy
    return Parts(engine, {d.name: d for d in drafters}, chosen, turn or nullcontext())


def request(
    params: SamplingParams, seq: SeqId = 0, prompt: Sequence[int] = PROMPT, **more: Any
) -> Request:
    more = {"limit": params.max_new_tokens, "seed": params.seed or 0, **more}
    return Request(seq, tuple(prompt), params, **more)


def stopper(asked: Request, **more: Any) -> Stopper:
    return Stopper(None, asked.prompt, asked.limit, asked.eos, **more)


@dataclass
class Run:
    tokens: list[int] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)


def steps(made: Parts, asked: Request, stop: Stopper | None = None) -> Iterator[StepResult]:
    """`decode`, checking after every step that the cache holds the text without its anchor."""
    engine = made.engine
    assert isinstance(engine, ToyEngine)
    text = list(asked.prompt)
    for result in decode(made, asked, stop or stopper(asked)):
        text.extend(result.committed)
        if result.finish is None:
            assert engine.caches[asked.seq].tokens == text[:-1]
            assert engine.caches[asked.seq].pending is None
        elif not result.prefill:
            # An accepted token that ended the text has a row already; nothing after it has.
            ends = result.accepted == len(result.committed)
            assert engine.caches[asked.seq].tokens == (text if ends else text[:-1])
        yield result


def run(made: Parts, asked: Request, stop: Stopper | None = None) -> Run:
    done = Run()
    for result in steps(made, asked, stop):
        done.results.append(result)
        done.tokens.extend(result.committed)
    engine = made.engine
    assert isinstance(engine, ToyEngine)
    assert not engine.caches and engine.commits == len(engine.widths)
    return done


def text_of(
    target: Target, drafters: Sequence[Drafter], asked: Request, policy: Policy | None = None
) -> list[int]:
    return run(parts(ToyEngine(target), drafters, policy), asked).tokens


def walk(
    rule: Rule, target: Target, guess: Guesser | None, sampler: Sampler, prompt: list[int], n: int
) -> tuple[int, ...]:
    """The first n tokens by an acceptance rule alone: no engine, no policy, thousands a second."""
    generated: list[int] = []
    while len(generated) < n:
        text = [*prompt, *generated]
        depth = n - len(generated) - 1
        draft = guess(generated, text, depth).draft(0, "toy") if guess and depth else None
        paths = [text]
        for token, parent in zip(draft.tokens, draft.parents, strict=True) if draft else ():
            paths.append([*paths[parent + 1], token])
        rows = ToyRows(target, paths)
        for choice in rule(draft, NodeRows(rows.argmax, rows.row), sampler, generated):
            generated = [*generated, choice.token]
            if len(generated) == n:
                break
    return tuple(generated)


def distribution(row: FloatRow, params: SamplingParams) -> FloatRow:
    """softmax(row / T) with top-k and top-p, spelled out."""
    if params.greedy:
        one: FloatRow = (np.arange(len(row)) == row.argmax()).astype(np.float64)
        return one
    weights = np.exp(row.astype(np.float64) / params.temperature)
    best = np.argsort(-weights)
    if params.top_k:
        weights[best[params.top_k :]] = 0.0
    chance: FloatRow = weights / weights.sum()
    before = np.cumsum(chance[best]) - chance[best]
    chance[best[before >= params.top_p]] = 0.0
    return chance / chance.sum()


def exact(target: Target, params: SamplingParams, prompt: list[int], n: int) -> FloatRow:
    """The probability of every text of n tokens, [V] * n."""
    chance = np.zeros((target.size,) * n)
    for text in itertools.product(range(target.size), repeat=n):
        history, p = list(prompt), 1.0
        for token in text:
            p *= float(distribution(target.logits(history), params)[token])
            history.append(token)
        chance[text] = p
    return chance


def fit(counts: FloatRow, chance: FloatRow) -> float:
    """p-value of chi-squared: do the counts come from these probabilities?

    Cells that expect fewer than 5 are one; a count where there is no chance settles it."""
    counts, chance = counts.ravel().astype(np.float64), chance.ravel()
    if counts[chance == 0.0].any():
        return 0.0
    expected = chance * counts.sum()
    small = expected < 5.0
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 5.0:
        counts[-2:], expected[-2:] = counts[-2:].sum() / 2, expected[-2:].sum() / 2
    if len(counts) < 3:
        return 1.0
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)
