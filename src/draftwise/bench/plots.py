"""Plots of a replay, each as PNG and SVG: acceptance, costs, captured gain, where the time went.

  acceptance   of each drafter's drafts that reach a position, the share that is right up to there;
               all positions of the text, so no policy has a say
  costs        the target's cost curve, and how often the policy verified at each width
  captured     captured gain of every policy with its interval, one panel a cost curve
  time         seconds by what they brought, as a share of plain decoding's

Colours are those of Okabe and Ito, which stay apart for colour-blind eyes. matplotlib is an extra
(`pip install 'draftwise[plot]'`), and is imported only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import UsageError
from .captured import PLAIN, Row, Study
from .traces import Traced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
GREY = "#999999"
COLOURS, MARKERS = (BLUE, ORANGE, GREEN, PURPLE, RED), "os^Dv"
# What was useful is dark, what was lost light or hatched, so that grey prints tell them apart.
PARTS = (
    ("verify: anchor and accepted rows", BLUE, ""),
    ("verify: rejected rows", "#9ECAE9", "///"),
    ("draft: accepted tokens", RED, ""),
    ("draft: rejected tokens", "#F5C09A", "///"),
    ("all else", GREY, ""),
)
FARTHEST = 32  # positions of a draft that are shown
FEWEST = 30  # drafts that must reach a position
LOWEST = -1.0  # captured gain: bars beyond are cut off, and say their value


def check(folder: Path) -> None:
    """Raises UsageError unless plots can be drawn into the folder, which is made."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib: pip install 'draftwise[plot]', or matplotlib itself"
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from error


def draw(studies: Sequence[Study], traces: Sequence[Traced], folder: Path) -> list[Path]:
    """Writes all plots; their paths, PNG and SVG."""
    figures = {
        "acceptance": _acceptance(traces),
        "costs": _costs(studies),
        "captured": _captured(studies),
        "time": _time(studies),
    }
    paths = []
    try:
        for name, figure in figures.items():
            for suffix in ("png", "svg"):
                paths.append(folder / f"{name}.{suffix}")
                figure.savefig(paths[-1], dpi=144)
    except OSError as error:
        raise UsageError(f"cannot write plots to {folder}: {error.strerror}") from error
    return paths


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Axes side by side, on a figure that no window system knows of."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0].tolist()
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _acceptance(traces: Sequence[Traced]) -> Figure:
    figure, (ax,) = _panels(1, 7, 4.2)
    for i, name in enumerate(traces[0].drafters):
        points = by_position(traces, name)
        style: dict[str, Any] = {"marker": MARKERS[i % 5], "color": COLOURS[i % 5], "markersize": 4}
        ax.plot([x for x, _ in points], [y for _, y in points], label=name, **style)
    ax.set(xlabel="position in the draft", ylabel="share of drafts right up to here")
    ax.set(ylim=(0, 1), xlim=(0.5, None))
    ax.locator_params(axis="x", integer=True)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    ax.set_title("How far drafts are right, by drafter")
    return figure


def by_position(traces: Sequence[Traced], drafter: str) -> list[tuple[int, float]]:
    """(position, share of drafts right up to it) as far as FEWEST drafts go; a draft that the end
    of the text cuts off counts up to there."""
    reached, right = [0] * (FARTHEST + 1), [0] * (FARTHEST + 1)
    for t in traces:
        for at in range(1, t.tokens):
            length, hits = _draft(t, drafter, at)
            for k in range(1, min(length, t.tokens - at, FARTHEST) + 1):
                reached[k] += 1
                right[k] += hits >= k
    return [(k, right[k] / n) for k, n in enumerate(reached) if n >= FEWEST]


def _draft(t: Traced, drafter: str, at: int) -> tuple[int, int]:
    """Length of a drafter's draft at an index, and its tokens that are right."""
    if drafter in t.shadow:
        ahead = t.shadow[drafter][at - 1 : at - 1 + FARTHEST]
        wrong = (k for k, choices in enumerate(ahead) if choices[0][0] != 0)
        return FARTHEST, next(wrong, len(ahead))
    guess = t.guesses.get(at, {}).get(drafter)
    return (len(guess.main), guess.hits) if guess else (0, 0)


def _shown(study: Study) -> str:
    """The policy that plots of one policy show."""
    names = [row.name for row in study.policies if row.name != PLAIN]
    return "auto" if "auto" in names else next(iter(names), PLAIN)


def _costs(studies: Sequence[Study]) -> Figure:
    figure, axes = _panels(len(studies), 5.2, 4.2)
    for ax, study in zip(axes, studies, strict=True):
        widths = study.widths[_shown(study)]
        curve, steps = study.world.curve(), sum(widths.values())
        last = max([*widths, *(w for w, _, _ in study.world.target if w <= 32)])
        context = min(c for _, c, _ in study.world.target)
        xs = range(1, last + 1)
        ax.plot(xs, [1e3 * curve.seconds(w, context) for w in xs], color=GREY, zorder=1)
        for w, count in widths.items():
            at = (w, 1e3 * curve.seconds(w, context))
            ax.scatter(*at, s=900 * count / steps, color=BLUE, alpha=0.55, linewidths=0, zorder=2)
        ax.set(
            xlabel="width (rows of a forward)",
            ylabel="ms of a forward",
            xlim=(-0.05 * last, last + 1),
        )
        ax.set_ylim(0, 1e3 * max(curve.seconds(w, context) for w in xs) * 1.12)
        ax.grid(alpha=0.3)
        common = max(widths, key=lambda w: widths[w])
        ax.set_title(
            f"Costs {study.world.name}: where {_shown(study)} verifies\n"
            f"bubble: share of steps, {widths[common] / steps:.0%} at width {common}",
            fontsize=10,
        )
    return figure


def _captured(studies: Sequence[Study]) -> Figure:
    from matplotlib.ticker import MultipleLocator

    tall = max(len(s.policies) for s in studies)
    figure, axes = _panels(len(studies), 5.2, 1.4 + 0.34 * tall)
    for ax, study in zip(axes, studies, strict=True):
        rows = [r for r in study.policies if r.name != PLAIN and r.captured is not None]
        rows.sort(key=lambda r: r.captured or 0.0)
        for y, row in enumerate(rows):
            _bar(ax, y, row)
        ax.set_yticks(range(len(rows)), [row.name for row in rows])
        for x, word in ((0, "plain"), (1, "hindsight")):
            ax.axvline(x, color="black", linewidth=0.8)
            ax.text(x, 1.0, word, transform=ax.get_xaxis_transform(), ha="center", va="bottom")
        lows = [(row.interval or (row.captured or 0.0,))[0] for row in rows]
        ax.set(
            xlim=(max(min([0.0, *lows]), LOWEST) - 0.05, 1.1), ylim=(-0.6, max(len(rows), 1) - 0.4)
        )
        ax.set(xlabel="captured gain (95 % interval)")
        ax.xaxis.set_major_locator(MultipleLocator(0.5))
        ax.set_title(f"Costs {study.world.name}: captured gain", pad=20)
        if not rows:
            ax.text(0.5, 0.5, "nothing to capture", transform=ax.transAxes, ha="center")
    return figure


def _bar(ax: Axes, y: int, row: Row) -> None:
    value = row.captured or 0.0
    ax.barh(y, max(value, LOWEST), color=BLUE if value >= 0 else ORANGE, height=0.65)
    if value < LOWEST:
        ax.text(LOWEST + 0.04, y, f"{value:.1f}".replace("-", "−"), ha="left", va="center")
    elif row.interval:
        spread = [[value - row.interval[0]], [row.interval[1] - value]]  # the axes cut it off
        ax.errorbar(value, y, xerr=spread, color="black", linewidth=1, capsize=3)


def _time(studies: Sequence[Study]) -> Figure:
    tall = max(len(s.policies) for s in studies)
    figure, axes = _panels(len(studies), 5.6, 2.0 + 0.34 * tall)
    for ax, study in zip(axes, studies, strict=True):
        rows = list(study.policies)[::-1]
        plain = next(row.seconds for row in study.policies if row.name == PLAIN)
        left = [0.0] * len(rows)
        for place, (label, colour, hatch) in zip((2, 3, 0, 1, 4), PARTS, strict=True):
            part = [astuple(study.spent[row.name])[place] / plain for row in rows]
            style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white"}
            if any(astuple(one)[place] > 1e-9 for s in studies for one in s.spent.values()):
                ax.barh(range(len(rows)), part, left=left, label=label, height=0.7, **style)
            left = [a + b for a, b in zip(left, part, strict=True)]
        ax.axvline(1, color="black", linewidth=0.8, linestyle="--")
        ax.set_yticks(range(len(rows)), [row.name for row in rows])
        ax.set(xlabel="seconds ÷ plain decoding's", xlim=(0, max(left) * 1.04))
        ax.set_title(f"Costs {study.world.name}: what the time went to")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure
