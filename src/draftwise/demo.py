"""The demo: plain and auto by turns over a few prompts, side by side.

Both sides run the same weights in two `Model`s, since the suffix drafter learns from earlier texts
and plain must not teach it. Where two greedy texts differ, the plain logits at the first difference
say by how much: they come from plain decoding of the common beginning (width 1), the very forwards
that the plain text was made with.

Speeds are over decode seconds (result.py): time to the first token, loading and drawing are left
out. Ctrl-C ends the text that runs, and the prompts that were finished are summed up.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .api import DEFAULT_DRAFTERS, Model
from .core import SamplingParams
from .engines.base import PrefillChunk, Verify
from .models import load_model
from .result import Result, Stats
from .show import answer, interruptible, named, served, stream, waiting, watched
from .unpack import cache_dir
from .vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REDRAW = 0.15  # seconds between two redraws of a text that grows
TEACHER = -2  # the sequence of the teacher-forced check; -1 is the sweep's
WARM_UP = "Name three colours."
INTRODUCTION = (
    "The same model answers four prompts twice: `plain` writes one token a step, `auto` lets "
    "drafters guess ahead and checks the guesses, as many as pay. Both must write the same text. "
    "(The embedded model is tiny: judge the speed, not the content.)"
)
PROMPTS = (
    ("question", "Why does bread rise when it is baked? Answer in three sentences."),
    (
        "code edit",
        "Rename the variable `n` to `count` in this function and print all of it again.\n\n"
        "def mean(values):\n"
        "    n = 0\n"
        "    total = 0.0\n"
        "    for value in values:\n"
        "        total += value\n"
        "        n += 1\n"
        "    if n == 0:\n"
        '        raise ValueError("no values")\n'
        "    return total / n\n",
    ),
    (
        "summary",
        "Summarise this paragraph in two sentences.\n\n"
        "The old harbour was rebuilt in 1903 after a storm had broken its outer wall. The new wall "
        "was made of granite from a quarry nine kilometres inland, and carrying the stone took "
        "four years. Fishing boats used the harbour until the 1970s, when most of the fleet moved "
        "to a deeper port in the south. Today the old harbour is a museum, and the granite wall is "
        "a popular place for an evening walk.",
    ),
    (
        "extraction",
        "List each person in this note with phone number, one a line.\n\n"
        "Maria Lindqvist (555-0134) leads the survey. For access to the site call Tom Okafor at "
        "555-0178. Invoices go to Chen Wei, 555-0112, and press questions to Ana Duarte, 555-0199.",
    ),
)


@dataclass(frozen=True)
class Difference:
    """Where two texts part: the index of the generated token, both tokens (None: the text had
    ended), and what plain decoding says of them."""

    index: int
    plain: int | None
    auto: int | None
    plain_logit: float | None = None
    auto_logit: float | None = None

    @property
    def gap(self) -> float | None:
        if self.plain_logit is None or self.auto_logit is None:
            return None
        return self.plain_logit - self.auto_logit


@dataclass(frozen=True)
class Pair:
    kind: str
    plain: Result
    auto: Result
    difference: Difference | None

    @property
    def speedup(self) -> float:
        return _ratio(self.auto.stats.tokens_per_second, self.plain.stats.tokens_per_second)


class Demo:
    """The two sides, and the console that a person watches."""

    def __init__(
        self,
        console: Console,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafters: Sequence[str | PreTrainedModel],
        params: SamplingParams,
    ):
        self.console, self.tokenizer, self.params = console, tokenizer, params
        costs = cache_dir() / "costs"
        self.sides = {
            "plain": Model(model, tokenizer, (), policy="plain", costs=costs, kernels="auto"),
            "auto": Model(model, tokenizer, drafters, costs=costs, kernels="auto"),
        }
        self.step_of_dtype = float(_finfo(model).eps)
        self.dtype = str(model.dtype).removeprefix("torch.")

    def encode(self, text: str) -> list[int]:
        chat = getattr(self.tokenizer, "chat_template", None)
        return self.sides["plain"].encode([{"role": "user", "content": text}] if chat else text)

    def run(self, cancel: threading.Event) -> list[Pair]:
        """The prompts that were finished: all of them, unless `cancel` is set meanwhile."""
        self.console.print(Text(INTRODUCTION))
        warm_up = SamplingParams(max_new_tokens=min(16, self.params.max_new_tokens))
        for side in self.sides.values():
            with side.start(self.encode(WARM_UP), warm_up, cancel=cancel) as call:
                stream(call, silent=True)
        orders = [("plain", "auto"), ("auto", "plain")] * 2
        pairs: list[Pair] = []
        for (kind, text), order in zip(PROMPTS, orders, strict=True):
            pair = None if cancel.is_set() else self.pair(kind, text, order, cancel)
            if pair is None:
                break
            pairs.append(pair)
        return pairs

    def pair(
        self, kind: str, text: str, order: tuple[str, str], cancel: threading.Event
    ) -> Pair | None:
        """Both texts of a prompt, or None if `cancel` ended one of them."""
        self.console.rule(Text(kind))
        self.console.print(Text(text.strip(), style="dim"))
        ids = self.encode(text)
        texts, results = {"plain": "", "auto": ""}, {}
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            for name in order:
                results[name] = self.written(name, ids, texts, live, cancel)
        self.console.print(_columns(texts))
        if any(result.finish_reason == "cancelled" for result in results.values()):
            return None
        plain, auto = results["plain"], results["auto"]
        plain = self.unstalled(ids, plain, auto, cancel)
        pair = Pair(kind, plain, auto, self.difference(ids, plain.token_ids, auto.token_ids))
        self.console.print(Text(_verdict(pair)))
        self.console.print(Text(self.sameness(pair)))
        return pair

    def written(
        self,
        name: str,
        ids: Sequence[int],
        texts: dict[str, str],
        live: Live,
        cancel: threading.Event,
    ) -> Result:
        """One side's answer, drawn while it grows."""
        drawn = 0.0
        with self.sides[name].start(ids, self.params, cancel=cancel) as call:
            for piece in call:
                texts[name] += piece
                # Drawing happens between steps, so that no step pays for it.
                if time.monotonic() - drawn > REDRAW:
                    live.update(_columns(texts), refresh=True)
                    drawn = time.monotonic()
        return call.result

    def unstalled(
        self, ids: Sequence[int], plain: Result, auto: Result, cancel: threading.Event
    ) -> Result:
        """The faster of two plain runs, where the first gives a speed-up that cannot be: a step of
        auto is no cheaper than one of plain, so plain met a stall of the machine."""
        speedup = _ratio(auto.stats.tokens_per_second, plain.stats.tokens_per_second)
        if speedup <= 1.1 * auto.stats.tokens_per_step:
            return plain
        self.console.print(Text("the machine stalled: plain is run once more", style="dim"))
        with self.sides["plain"].start(ids, self.params, cancel=cancel) as call:
            again = stream(call, silent=True)
        if again.finish_reason == "cancelled":
            return plain
        return max(plain, again, key=lambda result: result.stats.tokens_per_second)

    def difference(
        self, prompt: Sequence[int], plain: Sequence[int], auto: Sequence[int]
    ) -> Difference | None:
        if plain == auto:
            return None
        both = min(len(plain), len(auto))
        at = next((i for i in range(both) if plain[i] != auto[i]), both)
        if at == both:
            ours, theirs = (tokens[at] if at < len(tokens) else None for tokens in (plain, auto))
            return Difference(at, ours, theirs)
        row = self.plain_logits(prompt, plain[:at])
        ours, theirs = plain[at], auto[at]
        return Difference(at, ours, theirs, float(row[ours]), float(row[theirs]))

    def plain_logits(self, prompt: Sequence[int], text: Sequence[int]) -> Any:
        engine = self.sides["plain"].engine
        with waiting("The texts differ: running plain decoding up to there"):
            start = engine.open(TEACHER, prompt)
            try:
                rows = engine.forward([PrefillChunk(TEACHER, tuple(prompt[start:]))])[0]
                for token in text:
                    rows = engine.forward([Verify(TEACHER, (token,))])[0]
                    engine.commit(TEACHER, (0,))
                return rows.row(0)
            finally:
                engine.close(TEACHER)

    def sameness(self, pair: Pair) -> str:
        different = pair.difference
        if different is None:
            return f"identical: all {len(pair.plain.token_ids)} tokens"
        plain, auto = (self.shown(token) for token in (different.plain, different.auto))
        line = f"differ from generated token {different.index} on: plain {plain}, auto {auto}"
        if different.gap is None:
            return line
        step = self.step_of_dtype * 2.0 ** math.floor(math.log2(abs(different.plain_logit or 1.0)))
        if different.gap == 0:
            return f"{line}; plain decoding has them tied, both at {different.plain_logit:.4g}"
        return (
            f"{line}; in plain decoding their logits are {different.plain_logit:.4g} and "
            f"{different.auto_logit:.4g}, a gap of {different.gap:.2g} "
            f"(one rounding step of {self.dtype} is {step:.2g} there)"
        )

    def shown(self, token: int | None) -> str:
        return "ends" if token is None else f"{self.tokenizer.decode([token])!r} ({token})"


def demo(
    target: str | None,
    draft: str | None,
    dtype: str | None,
    device: str | None,
    max_new_tokens: int,
    as_json: bool,
) -> dict[str, Any]:
    """Runs the demo, shows it (only to a person, if JSON is wanted) and returns its report."""
    console = Console(stderr=as_json, quiet=as_json and not sys.stderr.isatty(), highlight=False)
    watched(f"Loading {named(target)}")
    model, tokenizer = load_model(target, dtype=dtype, device=device)
    drafters: list[str | PreTrainedModel] = list(DEFAULT_DRAFTERS)
    if draft is not None:
        watched(f"Loading {draft}")
        draft_model, draft_tokenizer = load_model(draft, dtype=dtype, device=device)
        check_same_vocabulary(tokenizer, draft_tokenizer, draft)
        drafters.append(draft_model)
    watched("Measuring the cost curve unless it is stored, and warming up")
    params = SamplingParams(max_new_tokens=max_new_tokens)
    made = Demo(console, model, tokenizer, drafters, params)
    try:
        with interruptible() as cancel:
            pairs = made.run(cancel)
    finally:
        for side in made.sides.values():
            side.close()
    speeds = _total(pairs)
    if cancel.is_set():
        console.print(Text(f"interrupted after {len(pairs)} of {len(PROMPTS)} prompts"))
    if pairs:
        console.rule(Text("all prompts" if len(pairs) == len(PROMPTS) else "prompts finished"))
        console.print(_summary(pairs))
        console.print(Text(_conclusion(pairs, speeds)))
    return {
        "target": named(target),
        "draft": draft,
        "dtype": made.dtype,
        "max_new_tokens": max_new_tokens,
        "prompts": [_reported(pair) for pair in pairs],
        "tokens_per_second": speeds,
        "speedup": _ratio(speeds["auto"], speeds["plain"]) if pairs else None,
        "identical": all(pair.difference is None for pair in pairs) if pairs else None,
        "interrupted": cancel.is_set(),
    }


def _finfo(model: PreTrainedModel) -> Any:
    import torch

    return torch.finfo(model.dtype)


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs > 0 else 1.0


def _columns(texts: Mapping[str, str]) -> RenderableType:
    grid = Table.grid(expand=True)
    for _ in texts:
        grid.add_column(ratio=1)
    grid.add_row(*(Panel(Text(text), title=name) for name, text in texts.items()))
    return grid


def _verdict(pair: Pair) -> str:
    plain, auto = pair.plain.stats, pair.auto.stats
    return (
        f"plain {plain.tokens_per_second:.1f} tokens/s, auto {auto.tokens_per_second:.1f}: "
        f"{pair.speedup:.2f}× · {auto.tokens_per_step:.2f} tokens per step · {served(auto)}"
    )


def _total(pairs: Sequence[Pair]) -> dict[str, float]:
    speeds = {}
    for name in ("plain", "auto"):
        stats: list[Stats] = [getattr(pair, name).stats for pair in pairs]
        seconds = sum(s.decode_seconds for s in stats)
        speeds[name] = sum(s.tokens - 1 for s in stats) / seconds if seconds else 0.0
    return speeds


def _summary(pairs: Sequence[Pair]) -> Table:
    heads = ("prompt", "plain t/s", "auto t/s", "speed-up", "per step", "drafters", "text")
    table = Table(*heads, box=SIMPLE_HEAD)
    for column in table.columns[1:5]:
        column.justify = "right"
    for pair in pairs:
        counts = pair.auto.stats.by_drafter
        table.add_row(
            pair.kind,
            f"{pair.plain.stats.tokens_per_second:.1f}",
            f"{pair.auto.stats.tokens_per_second:.1f}",
            f"{pair.speedup:.2f}×",
            f"{pair.auto.stats.tokens_per_step:.2f}",
            ", ".join(sorted(counts, key=lambda name: -counts[name]["accepted"])) or "none",
            f"from {pair.difference.index}" if pair.difference else "same",
        )
    return table


def _conclusion(pairs: Sequence[Pair], speeds: Mapping[str, float]) -> str:
    ratio = _ratio(speeds["auto"], speeds["plain"])
    change = f"{speeds['plain']:.1f} → {speeds['auto']:.1f} tokens/s over {len(pairs)} prompts"
    caution = "One short run: figures vary from run to run; `draftwise bench` measures with care."
    if ratio >= 1.02:
        return f"auto was {ratio:.2f}× as fast as plain: {change}.\n{caution}"
    if ratio > 0.98:
        return f"auto was as fast as plain: {change}. Nothing was gained.\n{caution}"
    return f"auto was SLOWER than plain, {ratio:.2f}×: {change}.\n{caution}"


def _reported(pair: Pair) -> dict[str, Any]:
    different = pair.difference
    return {
        "kind": pair.kind,
        "plain": answer(pair.plain),
        "auto": answer(pair.auto),
        "speedup": pair.speedup,
        "difference": asdict(different) | {"gap": different.gap} if different else None,
    }
