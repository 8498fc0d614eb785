"""Tables of a replay, for the terminal and as Markdown, and the report they are made from."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from draftwise.bench import studies
from draftwise.bench.captured import Recorded
from draftwise.bench.replayed import as_markdown, compared, tables
from draftwise.bench.studies import ReplayOptions, Report, run
from draftwise.core import UsageError
from recording import record


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("trace") / "trace.jsonl")


@pytest.fixture(scope="module")
def report(trace: Path) -> Report:
    options = ReplayOptions(trace, ("all",), ("trace", "flat"), calibration=True)
    return run(options, quiet())


def quiet() -> Console:
    return Console(file=io.StringIO())


def shown(report: Report, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(tables(report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_all_policies_and_references_are_in_the_tables(report: Report) -> None:
    text = shown(report)
    for name in ("auto", "plain", "fixed:5", "specdec++", "hindsight", "clairvoyant-greedy"):
        assert text.count(f" {name} ") >= 2, name  # for each cost curve
    assert "Costs trace" in text and "Costs flat" in text
    assert "copies" in text and "other" in text
    assert "Replaying auto takes" in text
    assert "calibration of auto" in text and "drafters: expected error" in " ".join(text.split())


def test_tables_fit_a_terminal(report: Report) -> None:
    assert max(map(len, shown(report).splitlines())) <= 80
    assert "…" not in shown(report)


def test_markdown_has_whole_tables_and_says_where_it_ran(report: Report) -> None:
    lines = as_markdown(report).splitlines()
    assert lines[0].startswith("- Trace `trace.jsonl` (sha256 ") and "3 requests" in lines[0]
    for word in ("Hardware", "Software", "commit"):
        assert any(word in line for line in lines[:5])
    grids = [line for line in lines if line.startswith("|")]
    assert any(line.startswith("| policy | speed | captured gain |") for line in grids)
    cells: dict[int, int] = {}
    for i, line in enumerate(lines):
        if line.startswith("|"):
            cells[i] = line.count("|")
            assert cells.get(i - 1, cells[i]) == cells[i]
    speeds = [row for row in grids if row.startswith("| auto |")]
    assert f"| auto | {report.studies[0].policies[1].speed:.2f} " in speeds[0]


def test_calibration_only_if_asked(report: Report) -> None:
    assert "calibration" not in shown(replace(report, calibration=False))


@pytest.mark.parametrize("seconds, steps, said", [(1.04, 96, ()), (1.06, 100, ("seconds",))])
def test_a_replay_far_from_the_record_is_said_to_be(
    seconds: float, steps: int, said: tuple[str, ...]
) -> None:
    text = compared(Recorded("auto", 1.0, seconds, 100, steps))
    assert f"{seconds - 1:+.1%}" in text
    assert ("more than 5% off" in text) == bool(said)
    assert all(f"In {word} the replay" in text for word in said)


def test_both_may_be_far_and_nothing_may_be_recorded() -> None:
    assert "In seconds and steps" in compared(Recorded("auto", 1.0, 2.0, 100, 50))
    text = compared(Recorded("auto", 0.0, 2.0, 100, 100))
    assert "2 seconds (none were recorded)" in text and "off" not in text


def test_a_drafter_without_shadow_is_left_out_and_named(tmp_path: Path) -> None:
    bare = record(tmp_path / "bare.jsonl", shadow=False, tokens=30)
    report = run(ReplayOptions(bare, ("auto", "fixed:3")), quiet())
    assert report.environment["drafters"] == ["lookup", "suffix"]
    assert "drafter model is left out" in report.notes[0] and "Note: " in shown(report)
    with pytest.raises(UsageError, match="no drafter 'model'"):
        run(ReplayOptions(bare, ("fixed:3:model",)), quiet())


def test_drafters_must_be_the_same_throughout(trace: Path, tmp_path: Path) -> None:
    lines = trace.read_text().splitlines()
    first = json.loads(lines[0])
    first["drafters"].pop("suffix")
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    with pytest.raises(UsageError, match="different drafters"):
        run(ReplayOptions(mixed), quiet())


def test_the_report_is_written_and_repeats_itself(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    made = run(ReplayOptions(trace, ("auto",), ("steep",), out=out), quiet())
    data = json.loads(out.read_text())
    assert data["environment"]["trace_sha256"] == made.environment["trace_sha256"]
    (study,) = data["studies"]
    assert [row["name"] for row in study["policies"]] == ["plain", "auto"]
    assert study["policies"][1]["speed"] == made.studies[0].policies[1].speed
    assert run(ReplayOptions(trace, ("auto",), ("steep",)), quiet()).studies == made.studies


def test_a_bar_only_where_it_takes_long_and_someone_watches(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bar(terminal: bool, patience: float) -> str:
        monkeypatch.setattr(studies, "PATIENCE", patience)
        console = Console(file=io.StringIO(), force_terminal=terminal)
        run(ReplayOptions(trace, ("auto",), ("flat",)), console)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    assert "Replaying" in bar(True, -1.0)
    assert bar(False, -1.0) == ""
    assert bar(True, 1e9) == ""
