"""Replay: the real loop and any policy over recorded texts, on a clock that forwards alone advance.

The trace says what every drafter would have proposed at every position and how much of it was
right, so a policy can be run on it without a model: a target forward of width w takes T(w, context)
of the given cost curves, a serial drafter's token its own price, and a step's `rest` is added. The
policy is told the true curves at the start, as after a sweep.

Tokens are stand-ins: the text's own at index p is `STRIDE · p`, the c-th other one that some
drafter had there `STRIDE · p + c`, so that drafts agree here where they agreed. What a model
drafter would have looked like *after* its first wrong token was not recorded: its features at that
position, given the right text, stand in. Retrieval drafts are as they were. Each request is run
once; policies learn across requests in the order of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..core import POINT, Ask, Draft, Features, FloatRow, Request, SamplingParams, SeqId, StepResult
from ..decode import Parts, decode
from ..drafters import AHEAD, Drafter, Go, Rehearsal, Retrieval
from ..drafters.growing import Choice, Growing
from ..drafters.guessing import MOST, Guessing
from ..engines.base import Caps, PrefillChunk, Rows, Shape, Top, Verify
from ..policy import Costs, Policy, make
from ..policy.cost import CostCurve
from ..stopping import Stopper
from ..turns import Turn
from .costs import World
from .traces import Choices, Guess, Traced

STRIDE = 1024
DEAD = 512  # stand-ins from here on hang from a wrong node, so they are never compared
_CAPS = Caps(True, "free", "packed", None, 1 << 40)


@dataclass
class Clock:
    now: float = 0.0

    def read(self) -> float:
        return self.now


class _Rows:
    def __init__(self, tokens: Sequence[int]):
        self._tokens = tokens

    def argmax(self) -> Sequence[int]:
        return self._tokens

    def row(self, i: int) -> FloatRow:
        raise NotImplementedError("a replayed target has no logits")

    def top(self, k: int) -> Top:
        raise NotImplementedError("a replayed target has no logits")


@dataclass
class _Target:
    """Goes on with the recorded text wherever it is."""

    clock: Clock
    curve: CostCurve
    prompt: int
    caps: Caps = _CAPS
    name: str = "replay"
    held: int = 0

    def open(self, seq: SeqId, tokens: Sequence[int], share: SeqId | None = None) -> int:
        return 0

    def forward(self, work: Sequence[PrefillChunk | Verify]) -> list[Rows]:
        (w,) = work
        if isinstance(w, PrefillChunk):
            self.held += len(w.tokens)
            return [_Rows([0])]
        width = max(len(w.tokens), w.width)
        self.clock.now += self.curve.seconds(width, self.held)
        at = self.held - self.prompt  # the index of the anchor
        depth = [0]
        for parent in w.parents[: len(w.tokens) - 1]:
            depth.append(depth[parent] + 1)
        return [_Rows([STRIDE * (at + 1 + d) for d in depth])]

    def commit(self, seq: SeqId, path: Sequence[int]) -> None:
        self.held += len(path)

    def unfed(self, seq: SeqId) -> int:
        return 0

    def drop(self, seq: SeqId, rows: int) -> None:
        return

    def shape(self, widths: Sequence[int], contexts: Sequence[int]) -> Shape:
        return Shape(max(widths), max(contexts))

    def close(self, seq: SeqId, keep: bool = False) -> None:
        return

    def blank(self, seq: SeqId, length: int) -> int:
        return 0

    def free(self) -> None:
        return

    def memory(self) -> int:
        return 0


class _Replayed(Retrieval):
    """A retrieval drafter as it was recorded."""

    def __init__(self, name: str, traced: Traced, clock: Clock, rest: float):
        self.name, self._traced, self._clock, self._rest, self._at = name, traced, clock, rest, 0

    def open(self, seq: SeqId, request: Request) -> None:
        return

    def rehearse(self, seq: SeqId, request: Request) -> list[Rehearsal]:
        self.open(seq, request)
        ask = Ask(seq, self.name, AHEAD)
        came = tuple(STRIDE * j for j in range(AHEAD))
        return [
            (_drafted(guess, ask, self.name, 0), came)
            for guess in self._traced.rehearsed.get(self.name, ())
        ]

    def observe(self, seq: SeqId, committed: Sequence[int]) -> None:
        self._at += len(committed)

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        (ask,) = asks
        if not ask.after:
            self._clock.now += self._rest
        guess = self._traced.guesses.get(self._at + len(ask.after), {}).get(self.name)
        if guess is None:
            return []
        return [_drafted(guess, ask, self.name, self._at + len(ask.after))]

    def close(self, seq: SeqId) -> None:
        return

    def memory(self) -> int:
        return 0


def _drafted(guess: Guess, ask: Ask, drafter: str, at: int) -> Draft:
    """The recorded draft, as deep as asked and with branches only if asked for."""
    kept: list[int] = []
    place: dict[int, int] = {-1: -1}
    depths: dict[int, int] = {-1: 0}
    for node in range(len(guess.codes)) if ask.siblings else guess.main:
        parent = guess.parents[node]
        if parent in place and depths[parent] < ask.depth:
            place[node], depths[node] = len(kept), depths[parent] + 1
            kept.append(node)
    codes = [guess.codes[i] if guess.codes[i] >= 0 else DEAD + i for i in kept]
    tokens = [STRIDE * (at + depths[i] - 1) + code for i, code in zip(kept, codes, strict=True)]
    return Draft(
        ask.seq,
        drafter,
        tuple(tokens),
        tuple(place[guess.parents[i]] for i in kept),
        tuple(guess.features[i] for i in kept),
        (POINT,) * len(kept),
        after=ask.after,
    )


class _Serial:
    """A model drafter, from what it would have chosen at each position given the right text, with
    retrieval drafters guessing its tokens as drafters/guessing.py does."""

    serial = True

    def __init__(self, name: str, traced: Traced, clock: Clock, curve: CostCurve, thrift: Guessing):
        self.name, self._clock, self._curve, self._guessing = name, clock, curve, thrift
        self._traced, self._prompt = traced, traced.prompt
        self._shadow = traced.shadow.get(name, ())
        self._at = 0
        self._cached = 0  # tokens of prompt and text that its cache holds

    def open(self, seq: SeqId, request: Request) -> None:
        return

    def observe(self, seq: SeqId, committed: Sequence[int]) -> None:
        self._at += len(committed)

    def close(self, seq: SeqId) -> None:
        return

    def memory(self) -> int:
        return 0

    def stale(self, seq: SeqId) -> int:
        return self._prompt + self._at - self._known()

    def room(self, seq: SeqId) -> int:
        return 1 << 30

    def _known(self) -> int:
        return min(self._cached, self._prompt + self._at - 1)

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        (ask,) = asks
        growing = Growing(ask)
        self._widths: list[int] = []
        ahead = self._forward(self.stale(ask.seq), 0, ask.depth)
        right = 0
        while True:
            at = self._at + len(growing.main)
            choices = self._chosen(at)[: 1 + ask.siblings]
            code, feature = choices[0]
            right += code == 0 and right == len(growing.main)
            growing.grow([Choice(STRIDE * at + c, f, POINT) for c, f in choices])
            if len(growing.main) >= ask.depth:
                break
            further = go(ask.seq, feature)
            if ahead and ahead[0] == code:
                ahead = ahead[1:]
                continue
            if not further:
                break
            ahead = self._forward(1, len(growing.main), ask.depth)
        # The last token was not run through the drafter, and what follows a wrong one is dropped.
        self._cached = self._prompt + self._at + min(right, len(growing.main) - 1)
        return [growing.done(self.name, self._widths)]

    def _forward(self, rows: int, drafted: int, depth: int) -> list[int]:
        """Pays for a forward of `rows` tokens and of guesses; the codes of these."""
        at, context = self._at + drafted, self._prompt + self._at + drafted
        found = max(
            self._traced.guesses.get(at, {}).values(),
            key=lambda guess: guess.features[0].match,
            default=None,
        )
        codes: list[int] = []
        if found is not None:
            main = found.main[: min(MOST, depth - 1 - drafted)]
            features = [found.features[i] for i in main]
            count = self._guessing.count(features, context, rows)
            codes = [found.codes[i] for i in main[:count]]
            right = next((j for j in range(count) if codes[j] != self._chosen(at + j)[0][0]), count)
            if count:
                self._guessing.learn(features[:count], right)
        self._widths.append(rows + len(codes))
        self._clock.now += self._curve.seconds(rows + len(codes), max(context - rows, 0))
        return codes

    def _chosen(self, at: int) -> Choices:
        # Beyond the end of the text nothing was recorded, and nothing is compared.
        return self._shadow[at - 1] if at - 1 < len(self._shadow) else ((1, Features(prob=0.5)),)


@dataclass(frozen=True)
class Replayed:
    """What a policy made of one request: seconds of decoding, steps, rows verified, and how much of
    the drafting and of the rows was for nothing."""

    seconds: float
    steps: int
    verified: int
    accepted: int
    draft_seconds: float


Watch = Callable[[StepResult], None]


def replay(
    traces: Sequence[Traced], policy: str, world: World, watch: Watch | None = None
) -> tuple[list[Replayed], Policy]:
    """Runs a policy over all requests, in their order. `watch` sees every step, whose `seq` is the
    place of the request."""
    serial = [n for n in world.serial if all(n in t.shadow or t.tokens < 2 for t in traces)]
    names = [n for n in traces[0].drafters if n in serial or traces[0].drafters[n] == "retrieval"]
    drafting = {n: c for n, c in world.drafting().items() if n in serial}
    chosen = make(policy, Costs(world.curve(), drafting, tuple(names), trees=True))
    thrift = {name: Guessing(curve.seconds) for name, curve in world.drafting().items()}
    return [_one(i, t, chosen, names, world, thrift, watch) for i, t in enumerate(traces)], chosen


def _one(
    seq: int,
    traced: Traced,
    policy: Policy,
    names: Sequence[str],
    world: World,
    thrift: Mapping[str, Guessing],
    watch: Watch | None,
) -> Replayed:
    if traced.tokens < 2:  # ended within the prompt, or with the first token
        return Replayed(0.0, 0, 0, 0, 0.0)
    clock = Clock()
    target = _Target(clock, world.curve(), traced.prompt)
    drafters = _drafters(traced, names, world, clock, thrift) if policy.name != "plain" else {}
    parts = Parts(target, drafters, policy, Turn(), clock.read)
    request = Request(seq, (0,) * traced.prompt, SamplingParams(), 0, limit=traced.limit)
    stopper = Stopper(None, (), traced.tokens)
    start, steps, verified, accepted, drafting = 0.0, 0, 0, 0, 0.0
    for result in decode(parts, request, stopper):
        if result.prefill:
            start = clock.now
            continue
        steps += 1
        verified += result.verified
        accepted += result.accepted
        drafting += result.draft_seconds
        if watch is not None:
            watch(result)
    return Replayed(clock.now - start, steps, verified, accepted, drafting)


def _drafters(
    traced: Traced,
    names: Sequence[str],
    world: World,
    clock: Clock,
    thrift: Mapping[str, Guessing],
) -> Mapping[str, Drafter]:
    drafting = world.drafting()
    retrieval = [n for n in names if n not in drafting]
    made: dict[str, Drafter] = {}
    for name in names:
        if name in drafting:
            made[name] = _Serial(name, traced, clock, drafting[name], thrift[name])
        else:
            made[name] = _Replayed(name, traced, clock, world.rest / len(retrieval))
    return made
