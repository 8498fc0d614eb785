"""What the commands show: streamed text, figures and cost curves.

What a program may read goes to stdout, all else to stderr.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .api import Call
from .engines.base import Shape, sweep
from .engines.kernels import check as check_kernels
from .engines.transformers import TransformersEngine
from .models import load_model
from .policy.cost import CostCurve, CostStore
from .result import Result, Stats
from .unpack import cache_dir

PROFILE = 10.0  # seconds that measuring a cost curve may take; loading a model spends fewer


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def watched(line: str) -> None:
    """Progress: only shown if a person is watching."""
    if sys.stderr.isatty():
        say(f"{line} ...")


def named(target: str | None) -> str:
    return target or "the embedded SmolLM2-135M-Instruct"


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on stderr, if a person is watching."""
    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield


def stream(call: Call, silent: bool = False) -> Result:
    """Writes a text to stdout as it is committed; `silent` only runs it to its end."""
    if silent:
        with waiting("Generating"):
            for _ in call:
                pass
        return call.result
    # The spinner would rewrite what is printed beside it, so it ends before the text begins; from
    # then on the growing text shows that something happens.
    with waiting("Reading the prompt"):
        first = next(call, "")
    _write(first)
    for piece in call:
        _write(piece)
    _write("\n")
    return call.result


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def answer(result: Result) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_dict(),
    }


def figures(stats: Stats) -> str:
    """One line of what a request came to."""
    parts = [
        f"{stats.tokens} tokens",
        f"{stats.tokens_per_second:.1f} tokens/s",
        f"{stats.tokens_per_step:.2f} tokens per step",
        f"first token after {stats.first_token_seconds:.2f} s",
    ]
    if stats.reused_tokens:
        parts.append(f"{stats.reused_tokens} of {stats.prompt_tokens} prompt tokens reused")
    if stats.acceptance is not None:
        parts.append(f"acceptance {stats.acceptance:.0%}")
    if stats.loosened:
        parts.append(f"{stats.nats_per_token:.3f} nats a token given up")
    return " · ".join([*parts, served(stats)])


def served(stats: Stats) -> str:
    """Which drafters served, and how many of their verified tokens were accepted."""
    counts = [
        f"{name} had {c['accepted']} of {c['verified']} drafted tokens accepted"
        for name, c in sorted(stats.by_drafter.items(), key=lambda item: -item[1]["accepted"])
    ]
    return ", ".join(counts) or "no drafts"


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that a text ends between two steps; pressed twice it interrupts."""
    cancel = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, previous)


# The cost curve.


def profile(
    source: str | None, dtype: str | None, device: str | None, kernels: str, refresh: bool
) -> dict[str, Any]:
    """The stored cost curve of a model, measured first if there is none, or to `refresh` it."""
    check_kernels(kernels)
    watched(f"Loading {named(source)}")
    model, _ = load_model(source, dtype=dtype, device=device)
    engine = TransformersEngine(model, kernels=kernels)
    store = CostStore(cache_dir() / "costs")
    curve = None if refresh else store.load(engine.name)
    stored, note = curve is not None, None
    if engine.caps.rollback == "none":
        curve, note = None, "this model's cache cannot be rolled back: it is only decoded plainly"
    elif curve is None:
        points: list[tuple[Shape, float]] = []
        with waiting("Measuring the cost curve"):
            sweep(engine, PROFILE, lambda shape, seconds: points.append((shape, seconds)))
        if points:
            curve = CostCurve(points)
            store.save(engine.name, curve)
        else:
            note = f"one forward takes longer than {PROFILE:.0f} s: nothing was measured"
    rows = [] if curve is None else [_priced(curve, *p) for p in curve.points()]
    engine.free()
    return {"model": named(source), "engine": engine.name, "stored": stored, "note": note} | {
        "points": rows
    }


def _priced(curve: CostCurve, shape: Shape, seconds: float) -> dict[str, float]:
    return {
        "width": shape.width,
        "context": shape.context,
        "ms": 1000 * seconds,
        "relative": seconds / curve.seconds(1, shape.context),
    }


def profiles(report: Mapping[str, dict[str, Any]]) -> None:
    console = Console(highlight=False)
    for role, curve in report.items():
        console.print(Text(f"{role}: {curve['engine']}"))
        if curve["note"]:
            console.print(Text(curve["note"]))
            continue
        table = Table("width", "context", "ms", "× width 1", box=SIMPLE_HEAD)
        for column in table.columns:
            column.justify = "right"
        for point in curve["points"]:
            table.add_row(
                f"{point['width']}",
                f"{point['context']}",
                f"{point['ms']:.1f}",
                f"{point['relative']:.2f}",
            )
        console.print(table)
        console.print(
            "stored earlier, --refresh measures again" if curve["stored"] else "measured now"
        )
