"""Prompt sets: files in the form of Spec-Bench, one JSON object a line.

Each line has `question_id` (unique), `category` and `turns`, a list of user messages. Only the
first turn is used: a later one would depend on each method's own answer. Lines of a category are
taken in file order, so `--per-category 5` measures the same prompts everywhere.

Without a file, the set beside this module is used: four prompts each of seven kinds, from free
chat, where little can be guessed, to code edits, where nearly all of the answer is in the prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..core import UsageError

DEFAULT = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Prompt:
    question_id: int | str
    category: str
    text: str


@dataclass(frozen=True)
class Suite:
    """Prompts chosen from `path`, and the digest of that whole file."""

    path: Path
    sha256: str
    prompts: tuple[Prompt, ...]

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.category for p in self.prompts))


def load_suite(path: Path | None, per_category: int) -> Suite:
    """The first `per_category` prompts of every category of a file (None: the default set)."""
    if per_category < 1:
        raise UsageError(f"prompts per category must be at least 1, not {per_category}")
    path = path or DEFAULT
    try:
        data = path.read_bytes()
        text = data.decode()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a UTF-8 text") from error
    prompts: list[Prompt] = []
    seen: set[int | str] = set()
    taken: Counter[str] = Counter()
    # Not splitlines(): it would also cut at the line separators that JSON texts may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        prompt = _prompt(line, f"{path}, line {number}")
        if prompt.question_id in seen:
            raise UsageError(
                f"{path}, line {number}: question_id {prompt.question_id} is there twice"
            )
        seen.add(prompt.question_id)
        taken[prompt.category] += 1
        if taken[prompt.category] <= per_category:
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    return Suite(path, hashlib.sha256(data).hexdigest(), tuple(prompts))


def _prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise UsageError(f"{where}: not a JSON object")
    question, category, turns = (record.get(k) for k in ("question_id", "category", "turns"))
    if not isinstance(question, (int, str)) or isinstance(question, bool):
        raise UsageError(f"{where}: question_id must be a number or a text")
    if not isinstance(category, str) or not category:
        raise UsageError(f"{where}: category must be a text")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
        raise UsageError(f"{where}: turns must be a list that begins with a text")
    return Prompt(question, category, turns[0])
