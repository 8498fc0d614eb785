"""Plots of a replay: files that open, and the numbers behind them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from draftwise.bench.captured import Study, study
from draftwise.bench.costs import World, named
from draftwise.bench.plots import by_position, check, draw
from draftwise.bench.traces import Traced, read
from draftwise.core import UsageError
from recording import record

NAMES = ("acceptance", "captured", "costs", "time")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Traced]:
    return read(record(tmp_path_factory.mktemp("trace") / "trace.jsonl"))


@pytest.fixture(scope="module")
def made(traces: list[Traced]) -> list[Study]:
    policies = ["auto", "fixed:3:lookup"]
    return [study(traces, policies, named(name, ["model"])) for name in ("flat", "steep")]


def test_every_plot_is_a_png_and_an_svg(
    made: list[Study], traces: list[Traced], tmp_path: Path
) -> None:
    check(tmp_path / "new" / "plots")
    paths = draw(made, traces, tmp_path / "new" / "plots")
    assert sorted(p.name for p in paths) == [f"{n}.{s}" for n in NAMES for s in ("png", "svg")]
    for path in paths:
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") or b"<?xml" in start


def test_plots_without_anything_to_show(traces: list[Traced], tmp_path: Path) -> None:
    dear = World("dear", [(1, 0, 0.01), (64, 0, 6.4)], {"model": [(1, 0, 1.0)]})
    cut = [replace(traces[0], guesses={})]
    draw([study(cut, [], dear)], cut, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 * len(NAMES)


def test_acceptance_by_position(traces: list[Traced]) -> None:
    model = by_position(traces, "model")
    assert [k for k, _ in model] == list(range(1, 33))
    assert all(share == 1 for _, share in model)  # it is the target itself
    lookup = dict(by_position(traces, "lookup"))
    assert 0 < lookup[1] < 1
    first = sum(
        guess["lookup"].codes[0] == 0
        for t in traces
        for at, guess in t.guesses.items()
        if "lookup" in guess and at < t.tokens
    )
    drafts = sum(
        "lookup" in guess for t in traces for at, guess in t.guesses.items() if at < t.tokens
    )
    assert lookup[1] == pytest.approx(first / drafts)
    assert by_position(traces[:1], "nobody") == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot make the folder"):
        check(tmp_path / "file" / "plots")


def test_without_matplotlib_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'draftwise\[plot\]'"):
        check(tmp_path)
