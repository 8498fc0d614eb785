"""`--explain`: how each token of a text came, while it is written.

A token's *origin* is the drafter whose draft had it accepted, or, for the token that the target
itself chose: `plain` (nothing was verified), `bonus` (the whole draft was accepted before it) or
`rejection` (it stands where a draft was wrong).

Text is shown in pieces that never split a character or a stop string (stopping.py). A second reader
of the same tokens, without stop strings, says where in the text each token ends, so a piece can be
coloured token by token; a character of several tokens belongs to the last of them.

Time lost to rejected drafts, from a step's seconds:

    (1 − accepted / verified) · (verify − T(1)) + (1 − accepted / drafted when asked) · draft
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple

from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style

from .api import Model
from .call import Call
from .core import StepResult
from .result import Result
from .show import say, waiting
from .stopping import Decoder, Stopper

PLAIN, BONUS, REJECTION = "plain", "bonus", "rejection"
COLOURS = ("cyan", "green", "magenta", "blue")  # of drafters, in their order
MEANINGS = {PLAIN: "plain", BONUS: "bonus after a whole draft", REJECTION: "after a rejection"}
HEAD = (
    f"{'step':>5} {'at':>5}  {'asked':<7} {'drafted':<20} {'width':>5} {'accepted':>22} "
    f"{'draft':>7} {'verify':>7} {'rest':>7}  committed (times in ms)"
)


class Token(NamedTuple):
    origin: str
    text: str
    id: int


@dataclass(frozen=True)
class Explained:
    """One step. `step` 0 is the prompt's pass, `position` counts the generated tokens before it,
    `drafted` the tokens of every draft that existed, `by_drafter` each drafter's verified and
    accepted ones."""

    step: int
    position: int
    asked: str | None
    drafted: Mapping[str, int]
    by_drafter: Mapping[str, tuple[int, int]]
    verified: int
    width: int
    accepted: int
    tokens: tuple[Token, ...]
    draft_ms: float
    verify_ms: float
    rest_ms: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens": [token._asdict() for token in self.tokens]}

    def line(self) -> str:
        drafted = ", ".join(f"{name} {n}" for name, n in self.drafted.items()) or "-"
        accepted = ", ".join(f"{name} {a}/{v}" for name, (v, a) in self.by_drafter.items()) or "-"
        runs = [
            f"{origin} {json.dumps(''.join(t.text for t in run), ensure_ascii=False)}"
            for origin, run in groupby(self.tokens, key=lambda token: token.origin)
        ]
        return (
            f"{self.step:>5} {self.position:>5}  {self.asked or '-':<7} {drafted:<20} "
            f"{self.width:>5} {accepted:>22} {self.draft_ms:>7.1f} {self.verify_ms:>7.1f} "
            f"{self.rest_ms:>7.1f}  {' · '.join(runs)}"
        )


def origins(r: StepResult) -> list[str]:
    """The origin of every committed token; a stop may have cut off the target's own."""
    draft = r.plan.draft
    if draft is None or not r.verified:
        return [PLAIN] * len(r.committed)
    own = BONUS if r.accepted == r.verified else REJECTION
    return [draft.whose[node] for node in r.path] + [own] * (len(r.committed) - r.accepted)


def lost(r: StepResult, plain: float) -> float:
    """Seconds that went into what was rejected; `plain`: those of a forward of width 1."""
    draft, seconds = r.plan.draft, 0.0
    if draft is not None and r.verified:
        seconds += (1 - r.accepted / r.verified) * max(r.verify_seconds - plain, 0.0)
    if r.asked is not None:
        drafted = sum(len(d.tokens) for d in r.drafted if d.drafter == r.asked)
        used = r.shares[r.asked].accepted if r.asked in r.shares else 0
        seconds += (1 - used / max(drafted, used, 1)) * r.draft_seconds
    return seconds


class Explainer:
    """Explains a request's steps, in order. `plain`: T(1) at a context."""

    def __init__(self, tokenizer: Decoder | None, plain: Callable[[int], float]):
        self.steps: list[Explained] = []
        self.lost = self.seconds = 0.0
        self._plain = plain
        self._reader = Stopper(tokenizer, (), 1 << 30)
        self._ends: list[int] = []  # of each token's text
        self._origins: list[str] = []
        self._read = 0.0  # seconds of reading the prompt so far

    def add(self, r: StepResult) -> Explained | None:
        """The step, explained; None for a chunk of the prompt that brings no token yet."""
        if r.prefill:
            self._read += r.seconds
            if not r.committed:
                return None
        else:
            self.seconds += r.seconds
            self.lost += lost(r, self._plain(r.context))
        position = len(self._ends)
        verify = self._read if r.prefill else r.verify_seconds
        step = Explained(
            len(self.steps),
            position,
            r.asked,
            {d.drafter: len(d.tokens) for d in r.drafted},
            {name: (share.verified, share.accepted) for name, share in r.shares.items()},
            r.verified,
            r.plan.width,
            r.accepted,
            tuple(self._tokens(r)),
            1000 * r.draft_seconds,
            1000 * verify,
            1000 * r.rest_seconds,
        )
        self.steps.append(step)
        return step

    def _tokens(self, r: StepResult) -> Iterator[Token]:
        reader, start = self._reader, len(self._reader.text)
        for i, (token, origin) in enumerate(zip(r.committed, origins(r), strict=True)):
            reader.push(token)
            if r.finish is not None and i == len(r.committed) - 1:
                reader.end(r.finish)
            self._ends.append(len(reader.text))
            self._origins.append(origin)
            yield Token(origin, reader.text[start:], token)
            start = len(reader.text)

    def runs(self, start: int, text: str) -> Iterator[tuple[str, str]]:
        """(origin, part) of a piece that begins at character `start` of the text."""
        at, end = start, start + len(text)
        while at < end:
            # What was cut short by an interruption may exceed what the tokens read as.
            i = min(bisect_right(self._ends, at), len(self._ends) - 1)
            stop = min(self._ends[i], end) if self._ends[i] > at else end
            yield self._origins[i], text[at - start : stop - start]
            at = stop

    def summary(self) -> list[str]:
        counts = Counter(self._origins)
        steps = len(self.steps) - 1
        shares = [f"{name} {n / len(self._origins):.0%}" for name, n in counts.most_common()]
        per_step = (len(self._origins) - 1) / steps if steps > 0 else 1.0
        return [
            f"{len(self._origins)} tokens: {', '.join(shares) or 'none'}",
            f"{per_step:.2f} tokens per step · {self.lost:.2f} s of {self.seconds:.2f} s lost to "
            "rejected drafts",
        ]


class Painter:
    """Colours for one console, as rich finds that it can show them."""

    def __init__(self, console: Console, drafters: Sequence[str]):
        name = console.color_system
        able = name is not None and not console.no_color and not console.legacy_windows
        self.system: ColorSystem | None = COLOR_SYSTEMS[name] if able and name else None
        self._styles = {
            drafter: Style(color=COLOURS[i % len(COLOURS)]) for i, drafter in enumerate(drafters)
        } | {PLAIN: Style(), BONUS: Style(color="yellow"), REJECTION: Style(color="red")}

    def paint(self, origin: str, text: str) -> str:
        if self.system is None or origin not in self._styles:
            return text
        return self._styles[origin].render(text, color_system=self.system)

    def legend(self) -> str:
        return " · ".join(self.paint(name, MEANINGS.get(name, name)) for name in self._styles)


class Screen:
    """Text on stdout, log on stderr. Where both are one terminal the log waits for the text's end,
    or its lines would tear the text."""

    def __init__(self, drafters: Sequence[str]):
        self._painter = Painter(Console(), drafters)
        self._apart = not (sys.stdout.isatty() and sys.stderr.isatty())
        self._held: list[str] = []
        self._written = 0
        if self._painter.system is not None:
            say(Painter(Console(stderr=True), drafters).legend())
        self.log(HEAD)

    def text(self, explainer: Explainer, piece: str) -> None:
        runs = explainer.runs(self._written, piece)
        for origin, parts in groupby(runs, key=lambda run: run[0]):
            sys.stdout.write(self._painter.paint(origin, "".join(part for _, part in parts)))
        self._written += len(piece)
        sys.stdout.flush()

    def log(self, line: str) -> None:
        if self._apart:
            say(line)
        else:
            self._held.append(line)

    def end(self, summary: Sequence[str]) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()
        for line in [*self._held, *summary]:
            say(line)


def stream(call: Call, model: Model, silent: bool = False) -> tuple[Result, list[dict[str, Any]]]:
    """Runs a request to its end and shows each token and step as it comes; `silent` shows nothing.
    The result, and its steps for JSON."""
    curve = model.costs.target
    explainer = Explainer(model.tokenizer, lambda context: curve.seconds(1, context))
    steps = iter(call.step, None)
    if silent:
        with waiting("Generating"):
            for result in steps:
                explainer.add(result)
        return call.result, [step.to_dict() for step in explainer.steps]
    with waiting("Reading the prompt"):
        first = next((step for r in steps if (step := explainer.add(r)) is not None), None)
    screen = Screen(tuple(model.drafters))
    screen.text(explainer, call.take())
    if first is not None:
        screen.log(first.line())
    for result in steps:
        step = explainer.add(result)
        screen.text(explainer, call.take())
        if step is not None:
            screen.log(step.line())
    screen.text(explainer, call.take())
    screen.end(explainer.summary())
    return call.result, [step.to_dict() for step in explainer.steps]
