"""Reading traces: what trace.py has written, as a replay needs it."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from ..core import Features, UsageError, main_chain
from ..drafters import LONGEST
from ..trace import VERSION, Points

Choices = tuple[tuple[int, Features], ...]  # (code, features), best first


@dataclass(frozen=True)
class Guess:
    """What a retrieval drafter would have proposed: a tree of nodes with the codes of their tokens.
    Code 0 is the text that came; -1 is a node that hangs from a wrong one."""

    codes: tuple[int, ...]
    parents: tuple[int, ...]
    features: tuple[Features, ...]

    @cached_property
    def main(self) -> tuple[int, ...]:
        """The nodes of the main chain."""
        return tuple(main_chain(self.parents))

    @cached_property
    def hits(self) -> int:
        """Nodes of the main chain that are the text, up to the first that is not."""
        codes = [self.codes[i] for i in self.main]
        return next((j for j, code in enumerate(codes) if code), len(codes))


@dataclass(frozen=True)
class Step:
    """One step as it was served. `seconds`: draft, verify, rest."""

    at: int
    context: int
    asked: str | None
    drafter: str | None
    survival: tuple[float, ...]
    width: int
    accepted: int
    committed: int
    seconds: tuple[float, float, float]


@dataclass(frozen=True)
class Traced:
    """One request. `guesses[i]`: of the retrieval drafters once i tokens were generated, 1 <= i <
    tokens. `shadow[name][i - 1]`: (code, features) of a model drafter's choice at index i, given
    the text before it, and of its next best. `rehearsed`: guesses at places in the prompt."""

    label: str
    policy: str
    acceptance: str
    prompt: int
    limit: int
    tokens: int
    finish: str
    drafters: Mapping[str, str]
    costs: Mapping[str, Points]
    steps: tuple[Step, ...]
    guesses: Mapping[int, Mapping[str, Guess]]
    shadow: Mapping[str, tuple[Choices, ...]] = field(default_factory=dict)
    rehearsed: Mapping[str, tuple[Guess, ...]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(sum(step.seconds) for step in self.steps)


_WRONG = (
    AttributeError,
    IndexError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
    zlib.error,
)


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def read(path: Path) -> list[Traced]:
    """All requests of a trace that were recorded to their end: what a write left unfinished at the
    end of the file is skipped. Raises UsageError for a file that is no trace."""
    found: list[Traced] = []
    opening: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = []
    number = 0
    try:
        with _opened(path) as file:
            for text in file:
                number += 1
                try:
                    line = json.loads(text)
                except ValueError:
                    if found and not text.endswith("\n"):
                        break
                    raise
                if line["kind"] == "request":
                    if line["version"] != VERSION:
                        raise UsageError(f"{path} has version {line['version']}, not {VERSION}")
                    opening, steps = line, []
                elif line["kind"] == "step":
                    steps.append(line)
                elif line["kind"] == "end" and opening is not None:
                    found.append(_traced(opening, steps, line))
                    opening = None
    except UsageError:
        raise
    except EOFError as error:  # of a compressed file
        if not found:
            raise UsageError(f"{path} ends too early") from error
    except _WRONG as error:
        raise UsageError(f"{path}, line {number}: not a trace ({error!r})") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not found:
        raise UsageError(f"{path} holds no finished request")
    return found


def check_writable(path: Path) -> None:
    """Raises UsageError unless a trace can be added to this file; leaves no file behind."""
    new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if new:
            path.unlink()
        elif path.stat().st_size:
            with _opened(path) as file:
                if json.loads(file.readline())["kind"] != "request":
                    raise ValueError("no request")
    except OSError as error:
        raise UsageError(f"cannot write a trace to {path}: {error.strerror or error}") from error
    except (*_WRONG, EOFError) as error:
        raise UsageError(f"{path} holds something else than a trace") from error


def _traced(opening: dict[str, Any], steps: list[dict[str, Any]], end: dict[str, Any]) -> Traced:
    guesses: dict[int, dict[str, Guess]] = {}
    for step in steps:
        for at, free in enumerate(step["free"], start=step["at"]):
            guesses[at] = {name: _guess(runs, codes) for name, (runs, codes) in free.items()}
    tokens, prompt = int(end["tokens"]), int(opening["prompt"])
    if prompt < 1 or any(len(rows) < tokens - 1 for rows in end["shadow"].values()):
        raise ValueError("lengths that cannot be")
    return Traced(
        str(opening["label"]),
        opening["policy"],
        opening["acceptance"],
        prompt,
        opening["limit"],
        tokens,
        end["finish"],
        opening["drafters"],
        {name: [(w, c, float(s)) for w, c, s in rows] for name, rows in opening["costs"].items()},
        tuple(map(_step, steps)),
        guesses,
        {
            name: tuple(
                tuple(
                    (code, Features(prob=prob, margin=margin, entropy=entropy, rank=rank))
                    for rank, (code, prob, margin, entropy) in enumerate(choices)
                )
                for choices in rows
            )
            for name, rows in end["shadow"].items()
        },
        {
            name: tuple(_guess(runs, codes) for runs, codes in found)
            for name, found in opening.get("rehearsed", {}).items()
        },
    )


def _step(s: dict[str, Any]) -> Step:
    verified = s["verified"] or {"drafter": None, "survival": []}
    draft, verify, rest = s["seconds"]
    return Step(
        s["at"],
        s["context"],
        s["asked"],
        verified["drafter"],
        tuple(verified["survival"]),
        s["width"],
        s["accepted"],
        s["committed"],
        (draft, verify, rest),
    )


def _guess(runs: list[list[Any]], coded: list[list[int]]) -> Guess:
    parents: list[int] = []
    features: list[Features] = []
    for count, parent, match, share, other, rank in runs:
        for j in range(count):
            parents.append(parent if j == 0 else len(parents) - 1)
            features.append(Features(min(match + j, LONGEST), share, bool(other), rank=rank))
    codes = tuple(code for code, count in coded for _ in range(count))
    return Guess(codes, tuple(parents), tuple(features))
