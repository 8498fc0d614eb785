"""What each part of `auto` is worth: captured gain without it, by replay of a trace.

    python benchmarks/ablations.py TRACE [flat steep ...]

Each line takes one part, or one of the trace's retrieval drafters, away and leaves the rest; the
last column is the worst request.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import draftwise.bench.replay as replaying
import draftwise.policy.asking as asking
import draftwise.policy.tree as tree
import draftwise.run as running
import draftwise.step as stepping
from draftwise.bench.costs import world
from draftwise.bench.oracle import bounds
from draftwise.bench.traces import read
from draftwise.drafters.guessing import Guessing
from draftwise.policy.acceptance import Acceptance
from draftwise.policy.goodput import Auto
from draftwise.policy.reliability import Reliability


def _attribute(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, value)


WITHOUT: dict[str, list[Callable[[], Any]]] = {
    "(nothing)": [],
    "guesses inside the draft model": [
        _attribute(Guessing, "count", lambda self, features, context, rows=1: 0)
    ],
    "siblings of the draft model": [_attribute(asking, "SIBLINGS", 0)],
    "branches of retrieval drafts": [_attribute(running, "SIBLINGS", 0)],
    "continuations": [_attribute(stepping, "continued", lambda parts, runs, own: {})],
    "company": [_attribute(tree.Companies, "factor", lambda self, company, least: 1.0)],
    "reliability": [_attribute(Reliability, "corrected", lambda self, survival: list(survival))],
    "rehearsal": [_attribute(Acceptance, "rehearse", lambda self, seq, places: None)],
    "reading the prompt as skis are bought": [_attribute(asking, "BUY", 0.0)],
    "the usual speed as a new request's price": [
        _attribute(sys.modules[Auto.__module__], "BEGIN", 1e-3)
    ],
    "probes of a parked draft model": [_attribute(asking, "PROBE_SHARE", 0.0)],
}


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in WITHOUT.get(name, []):
            stack.enter_context(patch())
        yield


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    traces = read(Path(sys.argv[1]))
    serial = [name for name, kind in traces[0].drafters.items() if kind == "serial"]
    for cost in sys.argv[2:] or ["flat", "steep"]:
        where = world(cost, serial)
        known = [bounds(traced, where) for traced in traces]
        plain, best = sum(b.plain for b in known), sum(b.hindsight for b in known)
        print(f"\n| {cost}: without | speed over plain | captured gain | worst request |")
        print("| --- | ---: | ---: | ---: |")
        drafters = traces[0].drafters
        for name in (*WITHOUT, *(d for d in drafters if drafters[d] == "retrieval")):
            left = {d: kind for d, kind in drafters.items() if d != name}
            with without(name):
                fewer = [replace(traced, drafters=left) for traced in traces]
                done, _ = replaying.replay(fewer, "auto", where)
            spent = sum(one.seconds for one in done)
            worst = min(b.plain / one.seconds for b, one in zip(known, done, strict=True))
            gain = (plain - spent) / (plain - best)
            print(f"| {name} | {plain / spent:.3f} | {gain:.3f} | {worst:.2f} |", flush=True)


if __name__ == "__main__":
    main()
