"""What speculation costs beside the forwards: at load, before the first token, and every step.

    python benchmarks/overhead.py [--json FILE]

Measures on the embedded model, two threads: seconds that the cost curve takes at load, measured and
stored; time to first token with drafters and policy `auto` against plain (interleaved, medians);
milliseconds a greedy step spends on retrieval, policy and acceptance; and milliseconds a sampled
token costs over a vocabulary of 152k. These are the project's limits: 5 s and 0.2 s; 2 %; 0.5 ms;
1 ms. A drafter that is always wrong (random tokens) is run over at least 1,000 tokens: 0.98x plain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import draftwise
from draftwise.core import Ask, Draft, Features, Request, SamplingParams, chain
from draftwise.drafters import Go, Retrieval
from draftwise.models import load_model
from draftwise.sampling import Sampler

PROMPTS = (
    "List ten everyday objects and say in one sentence each what they are used for.",
    "Write a Python function that counts the vowels of a text, then explain it line by line.",
    "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a child why the sky is blue, and then why sunsets are red.",
)


class Random(Retrieval):
    """A useless drafter: random tokens, offered with the confidence of a long match."""

    name = "random"

    def __init__(self, vocabulary: int):
        self._rng, self._vocabulary = np.random.default_rng(0), vocabulary

    def open(self, seq: int, request: Request) -> None:
        return

    def observe(self, seq: int, committed: Sequence[int]) -> None:
        return

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        n = min(asks[0].depth, 16)
        tokens = self._rng.integers(0, self._vocabulary, n).tolist()
        return [chain(asks[0].seq, self.name, tokens, [Features(match=20)] * n)]

    def close(self, seq: int) -> None:
        return


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def load_seconds(hf: object, tokenizer: object) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        seconds = {}
        for name in ("measured", "stored"):
            start = time.perf_counter()
            draftwise.Model(hf, tokenizer, costs=Path(folder))  # type: ignore[arg-type]
            seconds[name] = time.perf_counter() - start
    return seconds


def interleaved(models: dict[str, draftwise.Model], tokens: int, rounds: int) -> dict[str, list]:
    """(policy name -> results), prompt by prompt, the order alternating."""
    done: dict[str, list] = {name: [] for name in models}
    for name, model in models.items():
        model.generate(chat(PROMPTS[0]), max_new_tokens=8, policy=name.split("/")[0])
    for i in range(rounds):
        order = list(models) if i % 2 else list(models)[::-1]
        for prompt in PROMPTS:
            for name in order:
                result = models[name].generate(
                    chat(prompt), max_new_tokens=tokens, ignore_eos=True, policy=name.split("/")[0]
                )
                done[name].append(result.stats)
    return done


def sampling_ms(vocabulary: int = 151_936, tokens: int = 200) -> float:
    rng = np.random.default_rng(0)
    row = (rng.standard_normal(vocabulary) * 3).astype(np.float32)
    sampler = Sampler(SamplingParams(temperature=0.8), seed=1)
    times = []
    for i in range(tokens):
        start = time.perf_counter()
        sampler.token(row, [0] * i)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(2)
    hf, tokenizer = load_model(None)
    load = load_seconds(hf, tokenizer)
    folder = Path(tempfile.mkdtemp())

    def model(*drafters: object) -> draftwise.Model:
        return draftwise.Model(hf, tokenizer, drafters, costs=folder)  # type: ignore[arg-type]

    speed = interleaved({"plain": model(), "auto": model("lookup", "suffix")}, 96, 2)
    steps = sum(s.steps for s in speed["auto"])
    first = {name: statistics.median(s.first_token_seconds for s in speed[name]) for name in speed}
    useless = {"plain": model(), "auto/random": model(Random(len(tokenizer)))}
    wrong = interleaved(useless, 128, 3)
    wrong_seconds = {name: sum(s.decode_seconds for s in wrong[name]) for name in wrong}
    report = {
        "cost curve at load, measured (s)": load["measured"],
        "cost curve at load, stored (s)": load["stored"],
        "time to first token, auto over plain": first["auto"] / first["plain"],
        "retrieval, policy, acceptance a greedy step (ms)": 1000
        * sum(s.rest_seconds for s in speed["auto"])
        / steps,
        "the same, plain (ms)": 1000
        * sum(s.rest_seconds for s in speed["plain"])
        / sum(s.steps for s in speed["plain"]),
        "a sampled token over 152k ids (ms)": sampling_ms(),
        "useless drafter: speed over plain": wrong_seconds["plain"] / wrong_seconds["auto/random"],
        "useless drafter: tokens": sum(s.tokens for s in wrong["auto/random"]),
    }
    for name, value in report.items():
        print(f"{name:52s} {value:10.4g}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
