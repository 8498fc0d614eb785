"""The real loop and policies over a known text, on a clock that forwards alone advance.

An engine's forward of width w takes `curve(w)` seconds of virtual time and its rows say what the
text goes on with, so speed-ups are exact numbers and do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

import draftwise.decode as loop
from draftwise.core import Ask, Draft, Features, Request, SamplingParams, StepResult, chain
from draftwise.drafters import Drafter, Go, Retrieval
from draftwise.engines.base import WIDTHS, Caps, PrefillChunk, Shape, Verify
from draftwise.policy import Costs, Policy, make
from draftwise.policy.cost import CostCurve
from draftwise.stopping import Stopper
from draftwise.turns import Turn

Curve = Callable[[int], float]
CAPS = Caps(False, "free", "packed", None, 1 << 20)
POINTS = {  # docs/design.md §2: 1.5B, seconds
    "flat": ([1, 2, 4, 8, 16, 32, 64], [0.202, 0.218, 0.224, 0.267, 0.342, 0.471, 0.78]),
    "steep": ([1, 2, 4, 8, 16, 32, 64], [0.036, 0.057, 0.096, 0.229, 0.277, 0.48, 0.9]),
}


def curve(name: str) -> Curve:
    widths, seconds = POINTS[name]
    return lambda w: float(np.interp(w, widths, seconds))


@dataclass
class Clock:
    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Rows:
    tokens: list[int]

    def argmax(self) -> Sequence[int]:
        return self.tokens

    def row(self, i: int) -> np.ndarray:
        row = np.zeros(max(self.tokens) + 1, np.float32)
        row[self.tokens[i]] = 9.0
        return row


@dataclass
class TextEngine:
    """Continues `text` wherever it is, whatever was fed."""

    text: list[int]
    curve: Curve
    clock: Clock
    caps: Caps = CAPS
    name: str = "text"
    held: dict[int, int] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)

    def open(self, seq: int, tokens: Sequence[int], share: int | None = None) -> int:
        self.held[seq] = 0
        return 0

    def forward(self, work: Sequence[PrefillChunk | Verify]) -> list[Rows]:
        (w,) = work
        width, start = max(len(w.tokens), getattr(w, "width", 0)), self.held[w.seq]
        self.clock.now += self.curve(width)
        self.widths.append(width)
        if isinstance(w, PrefillChunk):
            self.held[w.seq] += len(w.tokens)
            return [Rows([self.text[start + len(w.tokens)]])]
        padded = self.text + [0] * 100
        return [Rows([padded[start + j + 1] for j in range(len(w.tokens))])]

    def commit(self, seq: int, path: Sequence[int]) -> None:
        self.held[seq] += len(path)

    def close(self, seq: int, keep: bool = False) -> None:
        del self.held[seq]

    def shape(self, widths: Sequence[int], contexts: Sequence[int]) -> Shape:
        return Shape(max(widths), max(contexts))


class Guesser(Retrieval):
    """Free drafts of 16 tokens, each right with a probability that only the text's kind tells."""

    def __init__(self, name: str, text: list[int], right: float, seed: int = 0):
        self.name, self.text, self.right = name, text, right
        self.rng, self.at = np.random.default_rng(seed), 0

    def open(self, seq: int, request: Request) -> None:
        self.at = len(request.prompt)

    def observe(self, seq: int, committed: Sequence[int]) -> None:
        self.at += len(committed)

    def _tokens(self, n: int) -> list[int]:
        true = (self.text + [0] * 100)[self.at : self.at + n]
        return [t if self.rng.random() < self.right else t + 1 for t in true]

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        tokens = self._tokens(min(asks[0].depth, 16))
        return [chain(asks[0].seq, self.name, tokens, [Features(match=3)] * len(tokens))]

    def close(self, seq: int) -> None:
        return


class SerialGuesser(Guesser):
    """The same with a price for every token, and `go` before each further one."""

    serial = True

    def __init__(self, name: str, text: list[int], right: float, price: float, clock: Clock):
        super().__init__(name, text, right)
        self.price, self.clock, self.asked = price, clock, 0

    def stale(self, seq: int) -> int:
        return 1

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        seq, depth = asks[0].seq, asks[0].depth
        tokens, feature, n = self._tokens(depth), Features(prob=0.8), 1
        self.asked += 1
        self.clock.now += self.price
        while n < depth and go(seq, feature):
            n += 1
            self.clock.now += self.price
        return [chain(seq, self.name, tokens[:n], [feature] * n)]


@dataclass
class Outcome:
    seconds: float
    plain: float
    steps: list[StepResult]
    policy: Policy
    requests: list[float]  # speed-up of each

    @property
    def speedup(self) -> float:
        return self.plain / self.seconds


def simulate(
    monkeypatch: pytest.MonkeyPatch,
    price: Curve,
    make_drafters: Callable[[list[int], Clock], list[Drafter]],
    policy: str = "auto",
    tokens: int = 400,
    requests: int = 1,
    serial_price: float = 0.08,
    rest: float = 0.0,
    change: Callable[[int, TextEngine], None] | None = None,
    told: Curve | None = None,
    kind: type[TextEngine] = TextEngine,
) -> Outcome:
    """Generates `requests` texts of `tokens` each. `change(step, engine)` may alter the world;
    `told` is the curve that the policy begins with, if it is not the true one."""
    clock = Clock()
    text = [int(t) for t in np.random.default_rng(5).integers(10, 99, tokens + 8)]
    engine = kind(text, price, clock)
    drafters = {d.name: d for d in make_drafters(text, clock)}
    draft_curve = CostCurve([(Shape(1, 4), serial_price), (Shape(32, 4), 2 * serial_price)])
    serial = {name: draft_curve for name, d in drafters.items() if d.serial}
    target = CostCurve([(Shape(w, 4), (told or price)(w)) for w in WIDTHS])
    refeed = engine.caps.rollback == "refeed"
    chosen = make(policy, Costs(target, serial, tuple(drafters), refeed=refeed))
    parts = loop.Parts(engine, drafters, chosen, Turn(), clock.perf_counter)
    seconds, steps, speedups = 0.0, [], []
    once = (tokens - 1) * price(1)
    for seq in range(requests):
        request = Request(seq, tuple(text[:4]), SamplingParams(), 0, limit=tokens)
        stopper = Stopper(None, text[:4], tokens)
        for result in loop.decode(parts, request, stopper):
            if result.prefill:
                start = clock.now
                continue
            clock.now += rest
            steps.append(result)
            if change is not None:
                change(len(steps), engine)
        seconds += clock.now - start
        speedups.append(once / (clock.now - start))
        assert stopper.tokens == text[4 : 4 + tokens]
    return Outcome(seconds, requests * once, steps, chosen, speedups)
