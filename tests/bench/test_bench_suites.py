"""Prompt files: what is taken from them, and what is said about broken ones."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from draftwise.bench.suites import DEFAULT, load_suite
from draftwise.core import UsageError

GOOD = {"question_id": 1, "category": "chat", "turns": ["Hello"]}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_takes_the_first_turn_of_the_first_prompts_of_every_category(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"question_id": 1, "category": "b", "turns": ["one", "later"]},
        "",
        {"question_id": "x", "category": "a", "turns": ["two"], "reference": [1]},
        {"question_id": 3, "category": "b", "turns": ["three\u2028still three"]},
        {"question_id": 4, "category": "b", "turns": ["four"]},
    )
    suite = load_suite(path, 2)
    assert [p.text for p in suite.prompts] == ["one", "two", "three\u2028still three"]
    assert suite.categories == ("b", "a")
    assert len(suite.sha256) == 64


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ([1], "not a JSON object"),
        (GOOD | {"question_id": None}, "question_id"),
        (GOOD | {"question_id": True}, "question_id"),
        (GOOD | {"category": ""}, "category"),
        (GOOD | {"turns": []}, "turns"),
        (GOOD | {"turns": "Hello"}, "turns"),
        (GOOD | {"turns": [3]}, "turns"),
        (GOOD | {"question_id": 0}, "there twice"),
    ],
)
def test_names_the_line_that_is_wrong(tmp_path: Path, line: object, why: str) -> None:
    path = written(tmp_path, GOOD | {"question_id": 0}, line)
    with pytest.raises(UsageError, match="line 2") as caught:
        load_suite(path, 1)
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_refuses_what_holds_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no prompts"):
        load_suite(written(tmp_path), 1)
    with pytest.raises(UsageError, match="cannot read"):
        load_suite(tmp_path / "absent", 1)
    with pytest.raises(UsageError, match="at least 1"):
        load_suite(None, 0)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        load_suite(tmp_path / "binary", 1)


def test_the_default_set_has_four_prompts_of_seven_kinds() -> None:
    suite = load_suite(None, 100)
    assert suite.path == DEFAULT
    kinds = ("chat", "code", "code_edit", "summary", "translation", "retrieval", "maths")
    assert Counter(p.category for p in suite.prompts) == dict.fromkeys(kinds, 4)
    long = {"code_edit": 100, "summary": 200, "translation": 50, "retrieval": 150}
    for prompt in suite.prompts:
        words = len(prompt.text.split())
        assert long.get(prompt.category, 8) <= words <= 450, (prompt.question_id, words)
