"""The nouns that every part shares: what is asked, drafted, planned and committed.

A *request* is a prompt with its sampling parameters. A *draft* is a tree of proposed tokens (a
chain is a tree): `parents[i]` is the index of node i's parent, -1 for the root, and parents come
before children. A *step plan* says which nodes the target verifies, a *step result* what came of
it. All of them are frozen: a step passes values on, it never edits them. The words are defined in
docs/design.md §1; imports run one way, and everything may import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

SeqId = int
DEEPEST = 64  # nodes of a draft at most: wider forwards pay nowhere, and long drafts cost time
SIBLINGS = 3  # next best tokens beside a node, where trees are verified: a row each, soon drafted
FloatRow = npt.NDArray[np.floating[Any]]


class UsageError(ValueError):
    """Something the caller can mend; its message is one clear line."""


class Point:
    """q of a node whose drafter proposed exactly this token: all mass on it."""

    __slots__ = ()


POINT = Point()


@dataclass(frozen=True)
class Dense:
    """q of a node drawn from `probs` ([V], float64, sums to 1): the numbers it was drawn with."""

    probs: FloatRow


@dataclass(frozen=True)
class Sparse:
    """q of a node drawn from a few tokens: `ids` ([K]) with `probs` ([K], float64, sums to 1)."""

    ids: npt.NDArray[np.int64]
    probs: FloatRow


Q = Point | Dense | Sparse


class Features(NamedTuple):
    """What a drafter knows of a node for nothing, from which the policy estimates acceptance.

    `match`: context tokens that agree with the place the node was copied from (retrieval).
    `share`: share of the known continuations that agree with the node, 0 to 1 (retrieval).
    `other`: the node was copied from another request's text (retrieval).
    `prob`: the drafter's own probability of its best token, after processing (models, greedy).
    `margin`: gap between the drafter's two best perturbed scores, in nats (models, sampling).
    `entropy`: of the drafter's processed distribution, in nats (models, where `prob` is known).
    These three are -1 where they are not known; `prob` and `entropy` depend on the distribution
    alone, never on the token drawn from it, so that a draft may end by them.
    `rank`: 0 for the drafter's choice, 1 and up for its next best (then `prob` is the node's own
    and `margin` what it lacks to the choice).
    """

    match: int = 0
    share: float = 1.0
    other: bool = False
    prob: float = -1.0
    margin: float = -1.0
    entropy: float = -1.0
    rank: int = 0


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of one sequence; all tuples have one entry a node (see the module).

    `after`: tokens that must come before the draft's first node and are not part of it; such a
    draft continues another one. `sources`: who proposed each node, where drafts were merged.
    `forwards`: the widths of the forwards that a model ran for it, catching up included.
    """

    seq: SeqId
    drafter: str
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    features: tuple[Features, ...]
    q: tuple[Q, ...]
    survival: tuple[float, ...] = ()
    after: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    forwards: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if not (len(self.parents) == len(self.features) == len(self.q) == n):
            raise ValueError("a draft has one parent, feature and q for every token")

    @property
    def points(self) -> bool:
        """True if no node was drawn at random: dropping some cannot shift a distribution."""
        return all(isinstance(q, Point) for q in self.q)

    @property
    def whose(self) -> tuple[str, ...]:
        """Who proposed each node."""
        return self.sources or (self.drafter,) * len(self.tokens)

    def head(self, n: int, survival: Sequence[float] = ()) -> Draft:
        """The first n nodes (parents come before children, so every head is a tree)."""
        return Draft(
            self.seq,
            self.drafter,
            self.tokens[:n],
            self.parents[:n],
            self.features[:n],
            self.q[:n],
            tuple(survival[:n]),
            self.after,
            self.sources[:n],
        )

    def main(self) -> Draft:
        """The main chain: from the root to each node's first child."""
        if self.is_chain:
            return self
        kept = main_chain(self.parents)
        return chain(
            self.seq,
            self.drafter,
            [self.tokens[i] for i in kept],
            [self.features[i] for i in kept],
            [self.q[i] for i in kept],
            self.after,
        )

    def children(self, node: int) -> Sequence[int]:
        if self.is_chain:
            return (node + 1,) if node + 1 < len(self.tokens) else ()
        return self._children.get(node, ())

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for i, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(i)
        return children


def main_chain(parents: Sequence[int]) -> list[int]:
    """Nodes from the root to each node's first child; `parents` as in Draft."""
    first: dict[int, int] = {}
    for node, parent in enumerate(parents):
        first.setdefault(parent, node)
    kept: list[int] = []
    while (at := kept[-1] if kept else -1) in first:
        kept.append(first[at])
    return kept


def chain(
    seq: SeqId,
    drafter: str,
    tokens: Sequence[int],
    features: Sequence[Features],
    q: Sequence[Q] | None = None,
    after: tuple[int, ...] = (),
) -> Draft:
    """A draft in which every node continues the one before it; point masses unless q is given."""
    n = len(tokens)
    return Draft(
        seq,
        drafter,
        tuple(tokens),
        tuple(range(-1, n - 1)),
        tuple(features),
        tuple(q or [POINT] * n),
        after=after,
    )


@dataclass(frozen=True)
class SamplingParams:
    """How the target's logits become tokens, and when to stop.

    temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` None draws one.
    `repetition_penalty` divides (or multiplies) the logits of tokens already in prompt or text, as
    transformers does; `presence_penalty` and `frequency_penalty` subtract, over generated tokens,
    as OpenAI does. `logit_bias` maps token ids to what is added. `min_new_tokens` forbids EOS
    before. `stop` strings end the text and are not part of it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop: Any = self.stop
        if isinstance(stop, str):
            stop = (stop,)
        if not isinstance(stop, Iterable):
            raise UsageError(f"stop must be a string or a list of strings, not {stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        checks: list[tuple[str, Callable[[Any], bool], str]] = [
            ("max_new_tokens", lambda v: _whole(v) and v >= 1, "a whole number of at least 1"),
            ("min_new_tokens", lambda v: _whole(v) and v >= 0, "a whole number of at least 0"),
            ("temperature", lambda v: _number(v) and 0 <= v <= 1000, "a number between 0 and 1000"),
            ("top_k", lambda v: _whole(v) and v >= 0, "a whole number of at least 0 (0 is off)"),
            ("top_p", lambda v: _number(v) and 0 < v <= 1, "above 0 and at most 1"),
            ("min_p", lambda v: _number(v) and 0 <= v <= 1, "between 0 and 1"),
            ("repetition_penalty", lambda v: _number(v) and 1e-3 <= v <= 1e3, "0.001 to 1000"),
            ("presence_penalty", _modest, "between -1000 and 1000"),
            ("frequency_penalty", _modest, "between -1000 and 1000"),
            ("ignore_eos", lambda v: isinstance(v, bool), "True or False"),
            ("logit_bias", lambda v: isinstance(v, Mapping), "a mapping of token ids to numbers"),
            ("seed", lambda v: v is None or _whole(v), "a whole number or None"),
            ("stop", lambda v: all(isinstance(s, str) and s for s in v), "non-empty strings"),
        ]
        for name, valid, need in checks:
            value = getattr(self, name)
            if not valid(value):
                raise UsageError(f"{name} must be {need}, not {value!r}")
        for token, bias in self.logit_bias.items():
            if not (_whole(token) and token >= 0 and _modest(bias)):
                need = "logit_bias maps token ids to numbers between -1000 and 1000"
                raise UsageError(f"{need}, not {token!r} to {bias!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _modest(value: object) -> bool:
    # What overflows in float32 would not forbid or force a token but make its score nonsense.
    return _number(value) and -1000 <= value <= 1000  # type: ignore[operator]


def _number(value: object) -> bool:
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return real and bool(np.isfinite(value))  # type: ignore[call-overload]


class LogitsProcessor(Protocol):
    """A transformers logits processor: (ids [1, L], scores [1, V]) -> scores [1, V]."""

    def __call__(self, input_ids: Any, scores: Any) -> Any: ...


@dataclass(frozen=True)
class Request:
    """One text to generate. `processors` are transformers objects, called once for every committed
    token, in order, with that token's own history: stateful ones work too."""

    seq: SeqId
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos: frozenset[int] = frozenset()
    acceptance: str = "coupled"
    limit: int = 1 << 30  # generated tokens, context already counted in
    reuse: bool = False  # keep the caches for a later request with the same beginning
    processors: tuple[LogitsProcessor, ...] = ()
    device: Any = None  # where processors expect their tensors
    quality_budget: float = 0.0  # nats a token that may be given up (accept/loosen.py)

    @property
    def draws(self) -> bool:
        """Does its rule judge drafts by the q that they were drawn from?"""
        return self.acceptance in ("rejection", "block") and not self.params.greedy


@dataclass(frozen=True)
class Ask:
    """The policy's wish: this drafter, at most `depth` tokens in a row, continuing the text and the
    tokens `after` it; beside every node of its main chain also its `siblings` next best."""

    seq: SeqId
    drafter: str
    depth: int
    after: tuple[int, ...] = ()
    siblings: int = 0


@dataclass(frozen=True)
class State:
    """What the policy sees of a sequence before a step.

    `context`: tokens in text (prompt included); `wanted`: tokens that may still be generated;
    `free`: the drafts of the retrieval drafters, which cost next to nothing; for each serial
    drafter, `stale`: the committed tokens its cache lacks, `room`: tokens its context still takes.
    """

    seq: SeqId
    context: int
    wanted: int
    free: tuple[Draft, ...] = ()
    stale: Mapping[str, int] = field(default_factory=dict)
    room: Mapping[str, int] = field(default_factory=dict)
    unfed: int = 0  # committed rows that the target's next forward must run before the anchor


@dataclass(frozen=True)
class StepPlan:
    """Which nodes the target verifies (None: plain) and the forward's rows, padding included."""

    seq: SeqId
    draft: Draft | None
    width: int


class Share(NamedTuple):
    """What a step did with the nodes of one drafter."""

    verified: int
    accepted: int
    loosened: int


@dataclass(frozen=True)
class StepResult:
    """What one step did. Seconds: `draft` (serial drafters), `verify` (target forward and commit),
    `rest` (retrieval, policy, acceptance). `drafted` are the drafts that existed, verified or not;
    `accepted` counts draft tokens in `committed`, `verified` those in the forward; `asked` is the
    serial drafter that drafted and `stale` what it had to catch up with. `prefill` marks the result
    that carries the prompt's pass and the first token, of which `reused` tokens were cached.
    `path` are the accepted nodes of the plan's draft, `strays` those among them that were not the
    target's own choice, and `spent` the nats that they gave up. `batch`: the sequences of its
    forward. They share the step's seconds, of which each result carries all; the results of one
    step are learned from together. `unfed`: rows that the forward ran before the anchor, beside the
    plan's width."""

    seq: SeqId
    plan: StepPlan
    context: int
    committed: tuple[int, ...]
    accepted: int
    drafted: tuple[Draft, ...] = ()
    asked: str | None = None
    stale: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rest_seconds: float = 0.0
    finish: str | None = None
    prefill: bool = False
    reused: int = 0
    spent: float = 0.0
    path: tuple[int, ...] = ()
    strays: tuple[int, ...] = ()
    batch: int = 1
    unfed: int = 0

    @property
    def loosened(self) -> int:
        return len(self.strays)

    @property
    def shares(self) -> dict[str, Share]:
        """Of every drafter with a node in the forward; a merged draft has several. Their sums are
        `verified`, `accepted` and `loosened`."""
        whose = self.plan.draft.whose if self.plan.draft else ()
        accepted = [whose[node] for node in self.path]
        loosened = [whose[node] for node in self.strays]
        return {
            name: Share(whose.count(name), accepted.count(name), loosened.count(name))
            for name in dict.fromkeys(whose)
        }

    @property
    def verified(self) -> int:
        return len(self.plan.draft.tokens) if self.plan.draft else 0

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.rest_seconds
