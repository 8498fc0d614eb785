"""Measurements on disk while a benchmark runs, so that a killed one goes on where it was.

Beside the report, `OUT.partial.jsonl` holds a header that identifies the run and one line for
every finished (prompt, method) pair, written and flushed at once. A run with the same header takes
them over; another one refuses, rather than mix measurements or destroy them. A last line that a
kill cut short is dropped. The file goes when the report, written beside its place and moved there
whole, is on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from ..core import UsageError


@dataclass(frozen=True)
class Measurement:
    """One method's turn at one prompt, or at `texts` of them together; see methods.Outcome."""

    question_id: int | str
    category: str
    method: str
    token_ids: tuple[int, ...]
    decode_seconds: float
    ttft: float
    wall_seconds: float
    steps: int | None
    accepted: int | None
    verified: int | None
    by_drafter: Mapping[str, Mapping[str, int]]
    texts: int = 1

    @property
    def key(self) -> tuple[int | str, str]:
        return self.question_id, self.method

    @property
    def decoded(self) -> int:
        """Tokens after each text's first one, which belongs to the prefill."""
        return max(len(self.token_ids) - self.texts, 0)


class Journal:
    """What is measured so far, in `done`; `path` None keeps nothing on disk."""

    def __init__(self, path: Path | None, header: Mapping[str, Any], fresh: bool = False):
        self.done: dict[tuple[int | str, str], Measurement] = {}
        self._path = path
        # Through JSON, so that tuples compare equal to what is read back.
        self._header: dict[str, Any] = json.loads(json.dumps(header))
        self._file: IO[str] | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                raise UsageError(f"cannot write to {path.parent}")
            if not fresh and path.exists():
                self._take_over(path)
        except OSError as error:
            raise UsageError(f"cannot use {path}: {error.strerror}") from error

    def _take_over(self, path: Path) -> None:
        lines = path.read_text().split("\n")
        if _read(lines[0]) != self._header:
            raise UsageError(
                f"{path} belongs to a run with other options: ask for a fresh start to discard it"
            )
        known = {f.name for f in fields(Measurement)}
        for line in lines[1:]:
            record = _read(line)
            if record is not None and record.keys() == known:
                record["token_ids"] = tuple(record["token_ids"])
                measurement = Measurement(**record)
                self.done[measurement.key] = measurement

    def add(self, measurement: Measurement) -> None:
        self.done[measurement.key] = measurement
        if self._path is None:
            return
        if self._file is None:
            # Anew and whole: what was taken over may have ended in half a line. Not sooner, or a
            # run that fails before its first measurement would leave a file.
            lines = [self._header, *(asdict(m) for m in self.done.values())]
            write_whole(self._path, "".join(json.dumps(line) + "\n" for line in lines))
            self._file = self._path.open("a")
            return
        self._file.write(json.dumps(asdict(measurement)) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        self.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that appears whole or not at all."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _read(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
