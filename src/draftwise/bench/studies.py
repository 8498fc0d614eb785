"""From a recorded trace to a report: policies replayed on every cost curve that was asked for.

All options are checked before the trace is read, and what plots need before anything is replayed.
A model drafter whose choices were not recorded throughout (`--trace-shadow`) cannot be replayed and
is left out, of the policies and of the references alike; the report says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from .. import policy as policies
from ..core import UsageError
from . import costs, environment
from .captured import Study, study
from .costs import World
from .journal import write_whole
from .traces import Traced, read

ALL = "all"
ARGUMENTS = {"fixed": "fixed:5"}  # of policies that need one
PATIENCE = 2.0  # seconds without a progress bar


@dataclass(frozen=True)
class ReplayOptions:
    """`policies`: as in draftwise.load, or `all`. `costs`: `trace`, `flat`, `steep` or files.
    `calibration`: report it. `plot`: a folder for plots. `out`: a file for the report."""

    trace: Path
    policies: tuple[str, ...] = ("auto",)
    costs: tuple[str, ...] = ("trace",)
    calibration: bool = False
    plot: Path | None = None
    out: Path | None = None


@dataclass(frozen=True)
class Report:
    environment: dict[str, Any]
    notes: tuple[str, ...]
    studies: tuple[Study, ...]
    calibration: bool


def run(options: ReplayOptions, console: Console) -> Report:
    """`console`: for the progress bar, normally one on stderr."""
    chosen = _check(options)
    traces = [t for t in read(options.trace) if t.tokens > 1]
    if not traces:
        raise UsageError(f"{options.trace}: no request has more than one token")
    left_out, traces = _replayable(traces)
    serial = [name for name, kind in traces[0].drafters.items() if kind == "serial"]
    worlds = [_world(name, traces, serial) for name in dict.fromkeys(options.costs)]
    notes = (*left_out, *(_GUESSED for w in worlds if w.name == "trace" and costs.guessed(w)))
    rounds = len(dict.fromkeys(("plain", *chosen))) + 1
    facts = _facts(options, traces)
    with _progress(console, len(worlds) * rounds) as advance:
        studies = tuple(study(traces, chosen, world, advance) for world in worlds)
    facts["load_end"] = environment.load_average()
    report = Report(facts, notes, studies, options.calibration)
    if options.out is not None:
        write_whole(options.out, json.dumps(asdict(report), indent=1) + "\n")
    if options.plot is not None:
        from .plots import draw

        draw(report.studies, traces, options.plot)
    return report


_GUESSED = (
    "the target's cost curve was never measured where this trace was recorded: costs `trace` are "
    "a guess"
)


def _check(options: ReplayOptions) -> tuple[str, ...]:
    """The policies, by name."""
    every = [ARGUMENTS.get(name, name) for name in policies.REGISTRY]
    asked = [n for name in options.policies for n in (every if name == ALL else [name])]
    chosen = tuple(dict.fromkeys(asked))
    for name in chosen:
        policies.check(name)
    if options.calibration and "auto" not in chosen:
        raise UsageError("--calibration looks at auto: replay it with --policy auto")
    if options.out is not None and not options.out.parent.is_dir():
        raise UsageError(f"cannot write {options.out}: there is no such folder")
    if options.plot is not None:
        from .plots import check

        check(options.plot)
    return chosen


def _replayable(traces: Sequence[Traced]) -> tuple[list[str], list[Traced]]:
    """The traces without model drafters whose choices are not known, and what to say of it. All
    requests must have been recorded with the same drafters."""
    if any(t.drafters != traces[0].drafters for t in traces):
        raise UsageError("the trace mixes requests with different drafters: record them apart")
    serial = [name for name, kind in traces[0].drafters.items() if kind == "serial"]
    unknown = [name for name in serial if any(name not in t.shadow for t in traces)]
    notes = [
        f"drafter {name} is left out: record its choices with --trace-shadow" for name in unknown
    ]
    kept = {n: kind for n, kind in traces[0].drafters.items() if n not in unknown}
    shadows = [{n: s for n, s in t.shadow.items() if n not in unknown} for t in traces]
    pairs = zip(traces, shadows, strict=True)
    return notes, [replace(t, drafters=kept, shadow=shadow) for t, shadow in pairs]


def _world(name: str, traces: Sequence[Traced], serial: Sequence[str]) -> World:
    return costs.recorded(traces, serial) if name == "trace" else costs.world(name, serial)


def _facts(options: ReplayOptions, traces: Sequence[Traced]) -> dict[str, Any]:
    return environment.describe(torch.device("cpu")) | {
        "trace": options.trace.name,
        "trace_sha256": sha256(options.trace.read_bytes()).hexdigest(),
        "recorded": sorted({t.policy for t in traces}),
        "drafters": list(traces[0].drafters),
        "requests": len(traces),
        "tokens": sum(t.tokens for t in traces),
        "load_start": environment.load_average(),
    }


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[], None]]:
    """A bar once it takes longer than PATIENCE, if a person is watching."""
    bar = Progress(console=console, transient=True)
    task = bar.add_task("Replaying", total=total)
    start = time.monotonic()

    def advance() -> None:
        bar.advance(task)
        if console.is_terminal and time.monotonic() - start > PATIENCE:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
