"""Plain decoding under each kind of kernels against transformers' own generate, in one run.

    python benchmarks/plain_kernels.py [--target MODEL] [--kernels eager,prepacked] [--json FILE]

Every kind has a copy of the model; prompts are short, texts long, methods interleaved in an order
that changes. What is compared is the whole call, prompt included, per token: the median over
prompts and rounds, and its ratio to transformers'. Compiling takes minutes the first time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import draftwise
from draftwise.bench import environment
from draftwise.models import load_model

PROMPTS = (
    "List ten everyday objects and say in one sentence each what they are used for.",
    "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a child why the sky is blue, and then why sunsets are red.",
)
THEIRS = "transformers"
Write = Callable[[list[int], int], list[int]]


def theirs(target: str | None) -> Write:
    model, _ = load_model(target)
    loaded: Any = model

    def write(ids: list[int], tokens: int) -> list[int]:
        given = torch.tensor([ids])
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        with torch.inference_mode():
            made = loaded.generate(given, attention_mask=torch.ones_like(given), **options)
        text: list[int] = made[0, len(ids) :].tolist()
        return text

    return write


def ours(target: str | None, kernels: str) -> tuple[draftwise.Model, Write]:
    model, tokenizer = load_model(target)
    made = draftwise.Model(model, tokenizer, (), policy="plain", kernels=kernels)

    def write(ids: list[int], tokens: int) -> list[int]:
        result = made.generate(ids, max_new_tokens=tokens, ignore_eos=True)
        return list(result.token_ids)

    return made, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target")
    parser.add_argument("--kernels", default="eager,prepacked,compiled")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    methods: dict[str, Write] = {THEIRS: theirs(options.target)}
    loads: dict[str, float] = {}
    for name in options.kernels.split(","):
        start = time.perf_counter()
        model, methods[name] = ours(options.target, name)
        loads[name] = time.perf_counter() - start
        if model.note:
            Console(stderr=True).print(model.note)
    prompts = [model.encode([{"role": "user", "content": text}]) for text in PROMPTS]
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    same: dict[str, int] = dict.fromkeys(methods, 0)
    names = list(methods)
    for turn in track(range(options.rounds * len(prompts)), "Measuring"):
        ids, texts = prompts[turn % len(prompts)], {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            texts[name] = methods[name](ids, options.tokens)
            seconds[name].append((time.perf_counter() - start) / options.tokens)
        for name, text in texts.items():
            same[name] += text == texts[THEIRS]
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds[THEIRS], own, strict=True))
        for name, own in seconds.items()
    }
    report = {
        **environment.describe(torch.device("cpu")),
        "threads": options.threads,
        "ratios": ratios,
        "milliseconds": {name: 1e3 * statistics.median(own) for name, own in seconds.items()},
        "load_seconds": loads,
        "same_texts": same,
        "texts": options.rounds * len(prompts),
    }
    table = Table("kernels", "ms a token", "x transformers", "same texts")
    for name in methods:
        ms = f"{report['milliseconds'][name]:.1f}"
        table.add_row(name, ms, f"{ratios[name]:.2f}", f"{same[name]} of {report['texts']}")
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
