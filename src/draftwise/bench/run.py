"""The benchmark's loop: every method takes its turn at every prompt.

Weights are loaded once, the cost curves measured, and each method run on a short text that is not
counted. Then, prompt by prompt, all methods generate, in an order shuffled for each prompt: what
else happens on the machine hits all of them alike. The shuffle, the sampling and the bootstrap are
seeded. A prompt's first turn goes through the tokenizer's chat template where there is one.

Speed is tokens after the first ÷ decode seconds, draft prefill included; time to first token is
apart. A method that cannot run raises a UsageError before anything is loaded.

With `out` set, a killed run goes on where it was (journal.py), though a method that learns then
starts unlearned. Cost curves are measured for this run and kept out of the user's cache, so that
no earlier run has a say in the figures.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .. import __version__
from ..api import Model
from ..core import SamplingParams, UsageError
from ..trace import Trace
from ..unpack import quiet
from . import environment, summary
from .groups import Group, check_sizes, groups
from .journal import Journal, Measurement, write_whole
from .methods import (
    HF,
    Loaded,
    Method,
    Outcome,
    Sampled,
    Spec,
    check_batches,
    check_drafters,
    make,
    parse,
)
from .suites import Suite, load_suite

WARM_UP = "Name three kinds of bread."
WARM_UP_TOKENS = 12


@dataclass(frozen=True)
class BenchOptions:
    """`target`, `draft`: names as in draftwise.load; None is the embedded model and no draft model.
    `prompts` None: the default set. `methods`: see methods.py. `out`: where the report goes, if
    anywhere. `fresh`: discard what a killed run has left. `drafters`: those beside the draft model.
    `trace`: records the first method of Draftwise that is not plain, with categories as labels.
    `batch`: sizes of batches to measure instead of single prompts (groups.py).
    """

    target: str | None
    draft: str | None
    prompts: Path | None
    per_category: int
    max_new_tokens: int
    methods: tuple[str, ...]
    out: Path | None
    temperature: float = 0.0
    seed: int = 0
    dtype: str | None = None
    kernels: str = "auto"
    threads: int | None = None
    fresh: bool = False
    drafters: tuple[str, ...] = ("lookup", "suffix", "recycling")
    trace: Trace | None = None
    batch: tuple[int, ...] = ()


def run(options: BenchOptions, console: Console, loaded: Loaded | None = None) -> dict[str, Any]:
    """Measures and returns the report; it is also written to `options.out`. `console`: for the
    progress bar, normally one on stderr. `loaded`: models to use instead of loading them."""
    specs = _check(options, loaded)
    suite = load_suite(options.prompts, options.per_category)
    made = groups(suite, options.batch, options.seed)
    partial = options.out.with_name(f"{options.out.name}.partial.jsonl") if options.out else None
    journal = Journal(partial, _header(options, suite), options.fresh)
    taken_over = len(journal.done)
    try:
        with (
            _threads(options.threads),
            tempfile.TemporaryDirectory() as costs,
            quiet(bars=True),  # transformers warns of what its own assisted generation does
        ):
            kernels = "eager" if loaded else options.kernels  # a caller's models stay as they are
            loaded = loaded or _load(options, console)
            with _Bench(options, specs, loaded, Path(costs), kernels) as bench:
                facts = bench.facts(suite) | {"resumed": taken_over}
                bench.measure(made, journal, console)
        facts["load_end"] = environment.load_average()
        text = json.dumps(_report(facts, list(journal.done.values()), specs, made), indent=1)
        if options.out is not None:
            write_whole(options.out, text + "\n")
        journal.remove()
        report: dict[str, Any] = json.loads(text)  # as a reader of the file will see it
        return report
    finally:
        journal.close()


def _check(options: BenchOptions, loaded: Loaded | None) -> list[Spec]:
    if not options.methods:
        raise UsageError("name at least one method")
    if len(set(options.methods)) < len(options.methods):
        raise UsageError("a method is named twice")
    if options.threads is not None and options.threads < 1:
        raise UsageError(f"threads must be at least 1, not {options.threads}")
    SamplingParams(options.max_new_tokens, options.temperature, seed=options.seed)
    check_drafters(options.drafters)
    if options.out is not None and options.out.is_dir():
        raise UsageError(f"{options.out} is a folder: name a file for the report")
    draft = options.draft is not None or (loaded is not None and loaded.draft is not None)
    specs = [parse(name, options.drafters, draft) for name in options.methods]
    check_sizes(options.batch)
    check_batches(specs, options.batch)
    if options.trace is not None and options.batch:
        raise UsageError("a trace records single prompts, not batches")
    if options.trace is not None and traced(specs) is None:
        raise UsageError("a trace needs a method of Draftwise that is not plain")
    return specs


def traced(specs: Sequence[Spec]) -> str | None:
    """The method whose requests a trace records."""
    return next((s.name for s in specs if s.policy not in (None, "plain")), None)


def _header(options: BenchOptions, suite: Suite) -> dict[str, Any]:
    """What must agree for measurements to belong together."""
    return {"draftwise": __version__, "sha256": suite.sha256, **_asked(options)}


def _asked(options: BenchOptions) -> dict[str, Any]:
    apart = ("out", "fresh", "prompts", "trace")
    return {k: v for k, v in asdict(options).items() if k not in apart}


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load(options: BenchOptions, console: Console) -> Loaded:
    ours = _read(options, console)
    # Weights that Draftwise re-lays for itself would make transformers' methods faster, too.
    apart = options.kernels != "eager" and any(m in HF for m in options.methods)
    if not apart:
        return ours
    theirs = _read(options, console)
    for model in (theirs.target, theirs.draft):
        # Ours are copies in memory by now; a file's mapping may be paged out while others run.
        for parameter in model.parameters() if model is not None else ():
            parameter.data = parameter.data.clone()
    return replace(ours, theirs=theirs)


def _read(options: BenchOptions, console: Console) -> Loaded:
    from ..models import load_model
    from ..vocabulary import check_same_vocabulary

    seen = console.is_terminal
    target, tokenizer = load_model(options.target, dtype=options.dtype, progress=seen)
    if options.draft is None:
        return Loaded(target, tokenizer)
    draft, draft_tokenizer = load_model(options.draft, dtype=options.dtype, progress=seen)
    check_same_vocabulary(tokenizer, draft_tokenizer, options.draft)
    return Loaded(target, tokenizer, draft)


class _Bench:
    """The methods, ready to run, and a plain model that encodes prompts and has measured costs."""

    def __init__(
        self,
        options: BenchOptions,
        specs: Sequence[Spec],
        loaded: Loaded,
        costs: Path,
        kernels: str,
    ):
        self._options, self._loaded = options, loaded
        self._traced = traced(specs) if options.trace is not None else None
        draft = [loaded.draft] if loaded.draft is not None else []
        # First, so that the cost curves are measured once and stored for the methods' models.
        self._plain = Model(
            loaded.target, loaded.tokenizer, draft, policy="plain", costs=costs, kernels=kernels
        )
        self._specs, self._costs = specs, costs
        self._methods: dict[str, Method] = {}

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._plain.close()
        self._close()

    def _begin(self, size: int) -> None:
        """New methods, warmed up: what one learned of a prompt, its text above all, must not serve
        it in another size of batch."""
        self._close()
        sampled = Sampled(self._options.temperature, self._options.seed)
        self._methods = {
            spec.name: make(spec, self._loaded, self._plain.eos, sampled, self._costs)
            for spec in self._specs
        }
        ids = self._encode(WARM_UP)
        for method in self._methods.values():
            if self._options.batch:
                method.together([ids] * size, WARM_UP_TOKENS)
            else:
                method.generate(ids, WARM_UP_TOKENS)

    def _close(self) -> None:
        for method in self._methods.values():
            method.close()

    def facts(self, suite: Suite) -> dict[str, Any]:
        options, target, draft = self._options, self._loaded.target, self._loaded.draft
        costs = self._plain.costs
        return {
            **environment.describe(target.device),
            **_asked(options),
            "target": options.target or target.config.name_or_path,
            "draft": options.draft or (draft.config.name_or_path if draft is not None else None),
            "kernels": ["eager", *self._plain.engine.kernels.used][-1],
            "dtype": str(target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "prompts": suite.path.name,
            "prompts_sha256": suite.sha256,
            "traced": self._traced,
            "base": summary.base_of(options.methods),
            "target_costs": environment.curve(costs.target),
            "draft_costs": next(map(environment.curve, costs.serial.values()), None),
            "load_start": environment.load_average(),
        }

    def measure(self, made: Sequence[Group], journal: Journal, console: Console) -> None:
        encoded = [(group, *self._encoded(group)) for group in made]
        size = 0
        with _bar(console) as bar:
            total = len(encoded) * len(self._specs)
            task = bar.add_task("", total=total, completed=len(journal.done))
            for group, ids, limit in encoded:
                if len(group.prompts) != size:
                    size = len(group.prompts)
                    self._begin(size)
                for name in self._order(group):
                    if (group.id, name) in journal.done:
                        continue
                    bar.update(task, description=f"{group.category}: {name}")
                    outcome = self._outcome(name, group, ids, limit)
                    where = (group.id, group.category, name)
                    journal.add(Measurement(*where, **vars(outcome)))
                    bar.advance(task)

    def _outcome(self, name: str, group: Group, ids: list[list[int]], limit: int) -> Outcome:
        method = self._methods[name]
        if self._options.batch:
            return method.together(ids, limit)
        return method.generate(ids[0], limit, self._trace(name, group))

    def _trace(self, method: str, group: Group) -> Trace | None:
        trace = self._options.trace
        return replace(trace, label=group.category) if trace and method == self._traced else None

    def _encoded(self, group: Group) -> tuple[list[list[int]], int]:
        """The prompts' token ids, and how many tokens may follow each."""
        ids = [self._encode(prompt.text) for prompt in group.prompts]
        context, wanted = self._plain.engine.caps.context, self._options.max_new_tokens
        if context is None:
            return ids, wanted
        for own, prompt in zip(ids, group.prompts, strict=True):
            if len(own) >= context:
                raise UsageError(
                    f"prompt {prompt.question_id} has {len(own)} tokens, and the target's context "
                    f"holds {context}"
                )
        return ids, min(wanted, context - max(map(len, ids)))

    def _encode(self, text: str) -> list[int]:
        if getattr(self._loaded.tokenizer, "chat_template", None):
            return self._plain.encode([{"role": "user", "content": text}])
        return self._plain.encode(text)

    def _order(self, group: Group) -> list[str]:
        order = list(self._methods)
        # By prompt, so that a run that was killed goes on with the same order.
        random.Random(f"{self._options.seed} {group.id}").shuffle(order)
        return order


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


def _report(
    facts: Mapping[str, Any],
    done: Sequence[Measurement],
    specs: Sequence[Spec],
    made: Sequence[Group],
) -> dict[str, Any]:
    rank = {spec.name: i for i, spec in enumerate(specs)}
    place = {group.id: i for i, group in enumerate(made)}
    ordered = sorted(done, key=lambda m: (place[m.question_id], rank[m.method]))
    table = summary.by_method(ordered)
    return {
        "environment": dict(facts),
        "methods": summary.methods(table),
        "comparisons": summary.comparisons(table),
        "runs": [_run(m, summary.identical(m, table, facts["base"])) for m in ordered],
    }


def _run(m: Measurement, same: bool | None) -> dict[str, Any]:
    return {
        "question_id": m.question_id,
        "category": m.category,
        "method": m.method,
        "tokens": len(m.token_ids),
        "decode_seconds": m.decode_seconds,
        "ttft": m.ttft,
        "wall_seconds": m.wall_seconds,
        "steps": m.steps,
        "tokens_per_step": m.decoded / m.steps if m.steps else None,
        "accepted": m.accepted,
        "verified": m.verified,
        "identical": same,
        "by_drafter": m.by_drafter,
        "texts": m.texts,
    }
