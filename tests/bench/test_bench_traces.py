"""Reading traces: files that are whole, cut off, damaged or written by several."""

from __future__ import annotations

import gzip
import json
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from draftwise import UsageError
from draftwise.bench.traces import check_writable, read
from draftwise.trace import append
from recording import record


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return record(tmp_path_factory.mktemp("traces") / "t.jsonl", tokens=20).read_bytes()


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_what_a_write_left_unfinished_is_skipped(whole: bytes, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    append(path, whole)
    assert len(read(path)) == 3
    append(path, whole)
    assert len(read(path)) == 6
    path.write_bytes(path.read_bytes()[:-60])
    assert len(read(path)) == 5
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(UsageError):
        read(path)


def test_a_damaged_archive_is_no_trace(whole: bytes, tmp_path: Path) -> None:
    path, packed = tmp_path / "t.jsonl.gz", gzip.compress(whole)
    path.write_bytes(packed[:20] + b"nonsense" + packed[28:])
    for use in (read, check_writable):
        with pytest.raises(UsageError):
            use(path)


@pytest.mark.parametrize(
    "change",
    [
        {"shadow": []},
        {"shadow": {"model": []}},
        {"tokens": 4000},
        {"prompt": 0},
        {"prompt": "five"},
        {"costs": {"target": "none"}},
        {"costs": {"target": [[1, 2]]}},
    ],
)
def test_lines_that_cannot_be_are_no_trace(
    whole: bytes, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "t.jsonl"
    lines = [json.loads(line) for line in whole.splitlines()]
    changed = [line | {k: v for k, v in change.items() if k in line} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    with pytest.raises(UsageError, match="not a trace"):
        read(path)


def _add(path: Path, data: bytes) -> None:
    for _ in range(20):
        append(path, data)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_several_processes_may_add_to_one_trace(whole: bytes, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    made = [get_context("fork").Process(target=_add, args=(path, whole)) for _ in range(2)]
    for process in made:
        process.start()
    for process in made:
        process.join()
    assert len(read(path)) == 2 * 20 * 3
