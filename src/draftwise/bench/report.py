"""Showing a benchmark's report: a table for the terminal, Markdown for the documentation.

Both show the speed-up of every method over plain decoding by category, with its 95 % interval, and
below it the figures that explain it. A ratio whose whole interval lies under 0.98 is a loss and
is marked as one; the Markdown lists the losses once more in words, since a mark in a large table is
easily passed over. `python -m draftwise.bench.report FILE.json` prints the Markdown of a report.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core import UsageError

Report = Mapping[str, Any]
LOSS = 0.98
MARK = "▼"
OVERALL = "overall"
TOGETHER = "Tokens per second of the whole batch"
DETAILS = ("tokens/s", "tokens/step", "acceptance", "identical", "first token", "tokens")


def table(report: Report) -> RenderableType:
    """For a rich console."""
    methods, base = report["methods"], report["environment"]["base"]
    shown = Table(title=f"Speed-up over {base or 'nothing'} (95 % interval)", title_justify="left")
    shown.add_column("")
    for name in methods:
        shown.add_column(name, justify="right")
    for part in (*_categories(report), OVERALL):
        if part == OVERALL:
            shown.add_section()
        shown.add_row(part, *(_cell(_speedup(report, name, part)) for name in methods))
    below = Table(title="All prompts", title_justify="left")
    for heading in ("", *DETAILS):
        below.add_column(heading, justify="right" if heading else "left")
    for name, own in methods.items():
        below.add_row(name, *_details(own[OVERALL]))
    legend = Text(_legend(report), style="dim")
    if not report["environment"].get("batch"):
        return Group(shown, below, legend)
    together = Table(title=TOGETHER, title_justify="left")
    for heading in ("", *methods):
        together.add_column(heading, justify="right" if heading else "left")
    for row in _throughput(report):
        together.add_row(*row)
    return Group(shown, together, below, legend)


def _throughput(report: Report) -> list[list[str]]:
    """Tokens per second by size of batch and method."""
    methods = list(report["methods"].values())
    return [
        [part, *(_number(_part(own, part)["tokens_per_second"], ".1f") for own in methods)]
        for part in _categories(report)
    ]


def _cell(compared: tuple[float | None, Sequence[float] | None]) -> Text:
    interval = compared[1]
    style = "red" if is_loss(interval) else "green" if interval and interval[0] > 1 else ""
    return Text(_ratio(*compared), style=style)


def markdown(report: Report) -> str:
    """A section for docs/benchmarks.md."""
    methods, env = report["methods"], report["environment"]
    parts = (*_categories(report), OVERALL)
    speedups = [
        [part, *(_ratio(*_speedup(report, name, part)) for name in methods)] for part in parts
    ]
    lines = [
        *_where(env),
        "",
        f"**Speed-up over `{env['base']}`** (95 % interval)" if env["base"] else "No base was run.",
        "",
        *grid(["category", *(f"`{name}`" for name in methods)], speedups),
        "",
    ]
    if env.get("batch"):
        headings = ["category", *(f"`{name}`" for name in methods)]
        lines += [f"**{TOGETHER}**", "", *grid(headings, _throughput(report)), ""]
    if report["comparisons"]:
        lines += ["**Ratios of `auto`** (95 % interval)", "", *_comparisons(report, parts), ""]
    details = [[f"`{name}`", *_details(own[OVERALL])] for name, own in methods.items()]
    lines += ["**All prompts**", "", *grid(["method", *DETAILS], details), ""]
    lines += [_legend(report), "", *_losses(report), ""]
    return "\n".join(lines)


def is_loss(interval: Sequence[float] | None) -> bool:
    return interval is not None and interval[1] < LOSS


def _where(env: Mapping[str, Any]) -> list[str]:
    sampling = "greedy" if env["temperature"] == 0 else f"temperature {env['temperature']}"
    draft = f", draft `{env['draft']}`" if env["draft"] else ""
    return [
        f"- Target `{env['target']}`{draft}, {env['dtype']}, "
        f"{env.get('kernels', 'eager')} kernels, {sampling}, "
        f"{env['max_new_tokens']} new tokens at most",
        hardware(env),
        software(env),
        f"- Prompts: `{env['prompts']}` (sha256 {env['prompts_sha256'][:12]}), "
        f"{env['per_category']} per category, seed {env['seed']}",
        command(env),
    ]


def hardware(env: Mapping[str, Any]) -> str:
    loads = " → ".join(str(load[0]) for k in ("start", "end") if (load := env.get(f"load_{k}")))
    return (
        f"- Hardware: {env['gpu'] or env['cpu']}, {env['cores']} cores, {env['threads']} threads; "
        f"load {loads or 'unknown'}"
    )


def software(env: Mapping[str, Any]) -> str:
    commit = (
        f"{env['commit'][:10]}{' with changes' if env['dirty'] else ''}" if env["commit"] else "–"
    )
    return (
        f"- Software: draftwise {env['draftwise']} (commit {commit}), transformers "
        f"{env['transformers']}, torch {env['torch']}, Python {env['python']}"
    )


def command(env: Mapping[str, Any]) -> str:
    return f"- {env['date'][:10]}: `{env['command']}`"


def _comparisons(report: Report, parts: Sequence[str]) -> list[str]:
    compared = report["comparisons"]
    rows = []
    for part in parts:
        found = (_part(compared[name], part) for name in compared)
        rows.append([part, *(_ratio(c["ratio"], c["interval"]) for c in found)])
    return grid(["category", *(f"`{name}`" for name in compared)], rows)


def _losses(report: Report) -> list[str]:
    """Every loss in words: methods against the base, then `auto` against the others."""
    env, found = report["environment"], []
    for part in (OVERALL, *_categories(report)):
        for name in report["methods"]:
            value, interval = _speedup(report, name, part)
            if is_loss(interval):
                found.append(f"- `{name}` on {part}: {value:.2f} of `{env['base']}`")
        for name, own in report["comparisons"].items():
            one, other = name.split("/", 1)
            compared = _part(own, part)
            if is_loss(compared["interval"]) and other != env["base"]:
                found.append(f"- `{one}` on {part}: {compared['ratio']:.2f} of `{other}`")
    return ["Losses:", "", *found] if found else ["No interval lies wholly under 0.98."]


def _legend(report: Report) -> str:
    return (
        f"{MARK} marks a loss: the whole interval lies under {LOSS}. Speed counts tokens after the "
        "first and the seconds after it, draft prefill included; intervals are paired bootstraps "
        f"over prompts. Identical: share of texts with the very tokens of "
        f"{report['environment']['base'] or 'the base'}; in 16-bit arithmetic near-ties fall "
        "either way."
    )


def _categories(report: Report) -> list[str]:
    some: Iterable[Mapping[str, Any]] = report["methods"].values()
    return list(dict.fromkeys(c for own in some for c in own["by_category"]))


def _part(own: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = own[OVERALL] if part == OVERALL else own["by_category"][part]
    return found


def _speedup(report: Report, name: str, part: str) -> tuple[float | None, Sequence[float] | None]:
    figures = _part(report["methods"][name], part)
    return figures["speedup_vs_plain"], figures["speedup_interval"]


def _ratio(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "–"
    if interval is None:
        return f"{value:.2f}"
    mark = f" {MARK}" if is_loss(interval) else ""
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]{mark}"


def _details(figures: Mapping[str, Any]) -> list[str]:
    first = figures["time_to_first_token"]
    return [
        _number(figures["tokens_per_second"], ".1f"),
        _number(figures["tokens_per_step"], ".2f"),
        _number(figures["acceptance"], ".0%"),
        _number(figures["identical_to_plain"], ".0%"),
        "–" if first is None else f"{1000 * first:.0f} ms",
        str(figures["tokens"]),
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in headings[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)]


def read(path: Path) -> Report:
    try:
        report = json.loads(path.read_text())
        if report["methods"] and report["environment"] and "comparisons" in report:
            return dict(report)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{path} is not a benchmark's report")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m draftwise.bench.report FILE.json", file=sys.stderr)
        return 2
    try:
        print(markdown(read(Path(arguments[0]))))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
