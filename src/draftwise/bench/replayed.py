"""Showing a replay: tables for the terminal, or Markdown for the documentation.

Every cost curve has a table of policies, under them the references that nobody reaches (hindsight,
clairvoyant) or could only choose afterwards (best fixed), and a table by category. A speed below
0.98 of plain decoding is marked as a loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from . import report as benched
from .calibration import Reliability
from .captured import BEST, HEADROOM, HINDSIGHT, LONG, PLAIN, Category, Recorded, Row, Study
from .report import LOSS, MARK
from .studies import Report

ABREAST = 2  # policies beside each other in a table of categories
APART = 0.05  # a replay that is farther from what was recorded is reported


@dataclass(frozen=True)
class Grid:
    """A table of text; a line is drawn above the rows in `sections`."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    sections: Sequence[int] = ()


Part = Grid | str


def tables(report: Report) -> RenderableType:
    """For a rich console."""
    parts = [part for study in report.studies for part in _study(study, report.calibration)]
    shown = [_table(part) if isinstance(part, Grid) else Text(part) for part in parts]
    notes = [Text(f"Note: {note}", style="yellow") for note in report.notes]
    return Group(*notes, *shown, Text(_legend(), style="dim"))


def as_markdown(report: Report) -> str:
    env = report.environment
    recorded = ", ".join(f"`{policy}`" for policy in env["recorded"])
    lines = [
        f"- Trace `{env['trace']}` (sha256 {env['trace_sha256'][:12]}): {env['requests']} requests "
        f"of {env['tokens']} tokens, recorded with {recorded}, drafters "
        f"{', '.join(env['drafters'])}",
        benched.hardware(env),
        benched.software(env),
        benched.command(env),
        *(f"- Note: {note}" for note in report.notes),
        "",
    ]
    for study in report.studies:
        for part in _study(study, report.calibration):
            if isinstance(part, Grid):
                headings = [
                    heading.replace("\n/", "/").replace("\n", " ") for heading in part.headings
                ]
                lines += [f"**{part.title}**", "", *benched.grid(headings, part.rows), ""]
            else:
                lines += [part, ""]
    return "\n".join([*lines, _legend()])


def _table(grid: Grid) -> RenderableType:
    table = Table(title=grid.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, heading in enumerate(grid.headings):
        side: JustifyMethod = "right" if i else "left"
        table.add_column(heading, justify=side, overflow="fold", no_wrap=not i)
    for i, row in enumerate(grid.rows):
        if i in grid.sections:
            table.add_section()
        table.add_row(*(Text(cell, style="red" if MARK in cell else "") for cell in row))
    return table


def _study(study: Study, calibration: bool) -> Iterator[Part]:
    yield _policies(study)
    if study.recorded is not None:
        yield compared(study.recorded)
    names = [row.name for row in study.policies if row.name != PLAIN]
    for i in range(0, len(names), ABREAST):
        yield _categories(study, names[i : i + ABREAST])
    if calibration:
        yield from (_calibration(study, table) for table in study.calibration)
        if not study.calibration:
            yield f"Costs {study.world.name}: auto verified no node, so there is no calibration."


def _policies(study: Study) -> Grid:
    rows = (*study.policies, *study.references)
    long = any(row.worst_long is not None for row in rows)
    headings = ["policy", "speed", "captured gain", "worst"]
    return Grid(
        f"Costs {study.world.name}: {study.requests} requests, {study.tokens} tokens, speed over "
        "plain decoding",
        [*headings, *([f"worst\n{LONG}+"] if long else []), "tokens\n/step"],
        [_row(row, long) for row in rows],
        [len(study.policies)],
    )


def _row(row: Row, long: bool) -> list[str]:
    return [
        row.name,
        _speed(row.speed),
        _share(row.captured, row.interval),
        _speed(row.worst),
        *([_speed(row.worst_long)] if long else []),
        "–" if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}",
    ]


def _categories(study: Study, names: Sequence[str]) -> Grid:
    return Grid(
        f"Costs {study.world.name}, by category: speed over plain (captured gain)",
        ["category", "requests", "plain\ntokens/s", *names, "best\nfixed", HINDSIGHT],
        [_category(category, names) for category in study.categories],
    )


def _category(category: Category, names: Sequence[str]) -> list[str]:
    return [
        category.label or "–",
        str(category.requests),
        f"{category.tokens_per_second:.1f}",
        *(f"{_speed(category.speed[n])} ({_share(category.captured[n])})" for n in names),
        _speed(category.speed[BEST]),
        _speed(category.speed[HINDSIGHT]),
    ]


def compared(recorded: Recorded) -> str:
    """How the replay of a trace's own policy compares with what was recorded."""
    r, apart = recorded, []
    parts = []
    for word, then, now, form in (
        ("seconds", r.recorded_seconds, r.replayed_seconds, ".3g"),
        ("steps", r.recorded_steps, r.replayed_steps, ""),
    ):
        if not then:
            parts.append(f"{now:{form}} {word} (none were recorded)")
            continue
        off = now / then - 1
        parts.append(f"{now:{form}} {word} where {then:{form}} were recorded ({off:+.1%})")
        apart += [word] if abs(off) > APART else []
    text = f"Replaying {r.policy} takes {' and '.join(parts)}."
    if apart:
        text += (
            f" {MARK} In {' and '.join(apart)} the replay is more than {APART:.0%} off: take its "
            "figures with care."
        )
    return text


def _calibration(study: Study, table: Reliability) -> Grid:
    rows = [
        [f"{b.low:.1f} to {b.high:.1f}", str(b.nodes), f"{b.predicted:.3f}", f"{b.observed:.3f}"]
        for b in table.bins
    ]
    whole = ["all", str(table.nodes), f"{table.predicted:.3f}", f"{table.observed:.3f}"]
    return Grid(
        f"Costs {study.world.name}, calibration of auto, {table.drafter}: expected error "
        f"{table.error:.3f}",
        ["survival", "nodes", "predicted", "committed"],
        [*rows, whole],
        [len(rows)],
    )


def _speed(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}{f' {MARK}' if value < LOSS else ''}"


def _share(value: float | None, interval: Sequence[float] | None = None) -> str:
    if value is None:
        return "–"
    shown = [f"{x:.2f}" for x in (value, *(interval or ()))]
    return shown[0] + (f" [{shown[1]}, {shown[2]}]" if len(set(shown)) > 1 else "")


def _legend() -> str:
    return (
        "Captured gain: time saved against plain decoding, as a share of what hindsight saves; – "
        f"where hindsight is not {HEADROOM:.0%} faster. Brackets: 95 % bootstrap over requests. "
        f"Worst: the slowest request, and that of {LONG} tokens or more, where there are any. "
        f"{MARK}: under {LOSS} of plain. Hindsight, clairvoyant-greedy and best know the text."
    )
