"""Traces: what every step did, and what every drafter would have done, in JSON lines.

    with `Trace(path)`: a request's lines are written when it ends, in one piece:
      request   label, prompt length, cost curves, drafters, policy
      step      position, draft asked and verified with features and survival, accepted, seconds,
                and for *each* committed position what every retrieval drafter would have proposed
      end       finish reason; `shadow`: the model drafters' choice at every position of the text;
                `text`: the token ids, and only with `text=True`

A retrieval draft is kept as a tree of codes and features: 0 is the token that came, other tokens
are numbered by the position where they stood, so that drafters can be compared. No token id is
written, so a trace tells nothing of the text but its length and how predictable it was. Cost: one
proposal of each retrieval drafter per token, about 0.3 ms, which is taken off the seconds recorded;
the shadow is one pass of the draft model. Lossless: drafters are only asked more often than they
would be. bench/traces.py reads what is written here.
"""

from __future__ import annotations

import gzip
import json
import operator
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .core import DEEPEST, SIBLINGS, Ask, Draft, Features, Request, SeqId, StepResult, UsageError
from .drafters import LONGEST, Drafter, Go, Rehearsal, never
from .engines.base import Top
from .policy import Costs
from .policy.cost import CostCurve

VERSION = 1
Points = list[tuple[int, int, float]]  # width, context, seconds
_writing = threading.Lock()


@dataclass(frozen=True)
class Trace:
    """Where and what to record. `shadow`: also what model drafters would have chosen where they
    were not asked. `text`: the token ids too. `label`: kept with the request, such as a category.
    A path that ends in .gz is compressed; what the file holds already is kept."""

    path: Path | str
    shadow: bool = False
    text: bool = False
    label: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)):
            raise UsageError(f"a trace is written to a file, not {self.path!r}")
        if not self.file.parent.is_dir() or self.file.is_dir():
            raise UsageError(f"cannot write a trace to {str(self.path)!r}")

    @property
    def file(self) -> Path:
        return Path(self.path)


class Recorder:
    """Records one request: `watch` the drafters, `add` the results, `end` writes it all."""

    def __init__(self, trace: Trace, request: Request, costs: Costs, policy: str):
        self._trace, self._request, self._policy = trace, request, policy
        curves = {"target": costs.target, **costs.serial}
        self._costs = {name: _points(curve) for name, curve in curves.items()}
        self._watched: dict[str, _Watched] = {}
        self._results: list[StepResult] = []
        self._text: list[int] = []
        self.seconds = 0.0  # what recording took, all in all

    def watch(self, drafters: Mapping[str, Drafter]) -> Mapping[str, Drafter]:
        self._watched = {name: _Watched(d, self._trace.shadow) for name, d in drafters.items()}
        return self._watched

    def add(self, result: StepResult) -> None:
        spent = self._spent()
        if result.committed:
            self._text.extend(result.committed)
        if not result.prefill:
            rest = max(result.rest_seconds - spent, 0.0)
            self._results.append(replace(result, rest_seconds=rest))

    def _spent(self) -> float:
        spent = sum(w.take_seconds() for w in self._watched.values())
        self.seconds += spent
        return spent

    def end(self, reason: str) -> None:
        start = time.perf_counter()
        self._spent()
        codes = _Codes(self._text)
        lines = [self._opening(), *self._steps(codes), self._ending(reason, codes)]
        text = "".join(_dumped(line) + "\n" for line in lines)
        try:
            with _writing:
                append(self._trace.file, text.encode())
        except OSError as error:
            raise UsageError(f"cannot write a trace to {self._trace.path}: {error}") from error
        self.seconds += time.perf_counter() - start

    def _opening(self) -> dict[str, Any]:
        return {
            "kind": "request",
            "version": VERSION,
            "label": self._trace.label,
            "policy": self._policy,
            "acceptance": self._request.acceptance,
            "temperature": self._request.params.temperature,
            "prompt": len(self._request.prompt),
            "limit": self._request.limit,
            "drafters": {
                name: "serial" if w.serial else "retrieval" for name, w in self._watched.items()
            },
            "costs": self._costs,
            "rehearsed": {
                name: [_written(draft, 0, _Codes(came)) for draft, came in w.rehearsed]
                for name, w in self._watched.items()
            },
        }

    def _steps(self, codes: _Codes) -> Iterator[dict[str, Any]]:
        at = 1
        for r in self._results:
            yield {
                "kind": "step",
                "at": at,
                "context": r.context,
                "batch": 1,
                "asked": r.asked,
                "stale": r.stale,
                "drafted": [[d.drafter, len(d.tokens)] for d in r.drafted],
                "verified": _verified(r),
                "width": r.plan.width,
                "accepted": r.accepted,
                "committed": len(r.committed),
                "seconds": [round(s, 6) for s in (r.draft_seconds, r.verify_seconds)]
                + [round(r.rest_seconds, 6)],
                "free": [self._free(i, codes) for i in range(at, at + len(r.committed))],
            }
            at += len(r.committed)

    def _free(self, at: int, codes: _Codes) -> dict[str, Any]:
        found = {n: w.drafts[at] for n, w in self._watched.items() if at in w.drafts}
        return {name: _written(draft, at, codes) for name, draft in found.items()}

    def _ending(self, reason: str, codes: _Codes) -> dict[str, Any]:
        end: dict[str, Any] = {"kind": "end", "finish": reason, "tokens": len(self._text)}
        end["shadow"] = {
            name: [
                [
                    [codes.of(at, token), round(f.prob, 4), round(f.margin, 3), round(f.entropy, 4)]
                    for token, f in choices
                ]
                for at, choices in enumerate(watched.shadow, start=1)
            ]
            for name, watched in self._watched.items()
            if watched.shadow
        }
        if self._trace.text:
            end |= {"prompt_ids": list(self._request.prompt), "token_ids": self._text}
        return end


class _Watched:
    """A drafter, asked at every position of the text on top of what the loop asks of it."""

    def __init__(self, inner: Drafter, shadow: bool):
        self.name, self.serial, self._inner, self._shadow = inner.name, inner.serial, inner, shadow
        self.drafts: dict[int, Draft] = {}
        self.shadow: list[list[tuple[int, Features]]] = []
        self.rehearsed: list[Rehearsal] = []
        self._request: Request | None = None
        self._text: list[int] = []
        self._seconds = 0.0
        self.rows: int = getattr(inner, "rows", 0)
        self._rows: list[tuple[int, Top]] = []  # of the step that is about to be observed

    def open(self, seq: SeqId, request: Request) -> None:
        self._request = request
        self._inner.open(seq, request)

    def rehearse(self, seq: SeqId, request: Request) -> list[Rehearsal]:
        rehearse = getattr(self._inner, "rehearse", None)
        if rehearse is None:
            self.open(seq, request)
            return []
        self._request = request
        self.rehearsed = rehearse(seq, request)
        return self.rehearsed

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        return self._inner.propose(asks, go)

    def learn(self, seq: SeqId, tokens: Sequence[int], best: Top) -> None:
        rows = range(len(tokens))
        self._rows = [(tokens[i], Top(best.ids[i : i + 1], best.scores[i : i + 1])) for i in rows]

    def _learn(self, seq: SeqId, count: int) -> None:
        for token, best in self._rows[:count]:
            self._inner.learn(seq, [token], best)  # type: ignore[attr-defined]
        del self._rows[:count]

    def observe(self, seq: SeqId, committed: Sequence[int]) -> None:
        for i, token in enumerate(committed, start=1):
            # Row by row, as plain decoding would: a later row says what the text has yet to say.
            self._learn(seq, 1 if i < len(committed) else len(self._rows))
            self._inner.observe(seq, [token])
            self._text.append(token)
            if not self.serial:
                start = time.perf_counter()
                ask = Ask(seq, self.name, DEEPEST, siblings=SIBLINGS)
                for draft in self._inner.propose([ask], never):
                    self.drafts[len(self._text)] = draft
                self._seconds += time.perf_counter() - start

    def close(self, seq: SeqId) -> None:
        foretell = getattr(self._inner, "foretell", None)
        if self._shadow and foretell is not None and self._request is not None:
            start = time.perf_counter()
            self.shadow = foretell(self._request, self._text, SIBLINGS)
            self._seconds += time.perf_counter() - start
        self._inner.close(seq)

    def stale(self, seq: SeqId) -> int:
        return self._inner.stale(seq)

    def room(self, seq: SeqId) -> int:
        return self._inner.room(seq)

    def memory(self) -> int:
        return self._inner.memory()

    def take_seconds(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _Codes:
    """Numbers the tokens that stood at a position: 0 is the text's own."""

    def __init__(self, text: Sequence[int]):
        self.text = text
        self._known: dict[tuple[int, int], int] = {}
        self._count: dict[int, int] = {}

    def of(self, at: int, token: int) -> int:
        if at < len(self.text) and self.text[at] == token:
            return 0
        if (at, token) not in self._known:
            self._count[at] = self._known[at, token] = self._count.get(at, 0) + 1
        return self._known[at, token]


def _points(curve: CostCurve) -> Points:
    """The curve as it stands now: with the level of the machine."""
    points = [(shape, seconds * curve.drift) for shape, seconds in curve.points()]
    return [(shape.width, shape.context, round(seconds, 7)) for shape, seconds in points]


def _verified(r: StepResult) -> dict[str, Any] | None:
    draft = r.plan.draft
    if draft is None:
        return None
    return {
        "drafter": draft.drafter,
        "parents": None if draft.is_chain else draft.parents,
        "survival": [round(s, 3) for s in draft.survival],
        "features": [[round(float(x), 4) for x in f] for f in draft.features],
        "path": r.path,
    }


def _written(draft: Draft, at: int, codes: _Codes) -> list[list[list[Any]]]:
    """[runs, codes]: nodes in runs of [count, parent of the first, match, share, other, rank],
    within which each node continues the one before, its match is one longer and all else is the
    same; codes as [code, count], -1 where the node's parent is not the text."""
    runs: list[list[Any]] = []
    coded: list[list[int]] = []
    depths: list[int] = []
    right: list[bool] = []
    for i, (token, parent, f) in enumerate(
        zip(draft.tokens, draft.parents, draft.features, strict=True)
    ):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        code = codes.of(at + depths[i], token) if parent < 0 or right[parent] else -1
        right.append(code == 0)
        if coded and coded[-1][0] == code:
            coded[-1][1] += 1
        else:
            coded.append([code, 1])
        row = [round(f.share, 3), int(f.other), f.rank]
        last = runs[-1] if runs else None
        if last and parent == i - 1 and last[3:] == row and f.match == _grown(last[2], last[0]):
            last[0] += 1
        else:
            runs.append([1, parent, f.match, *row])
    return [runs, coded]


def _grown(match: int, nodes: int) -> int:
    """A match after so many further nodes: it is not counted beyond LONGEST."""
    return min(match + nodes, LONGEST)


def append(path: Path, data: bytes) -> None:
    """In one write, so that several processes may add to one file."""
    if path.suffix == ".gz":
        data = gzip.compress(data)
    with path.open("ab", buffering=0) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]


def _dumped(line: Mapping[str, Any]) -> str:
    # A drafter of the user's may have numbers of numpy's.
    return json.dumps(line, separators=(",", ":"), default=operator.methodcaller("item"))
