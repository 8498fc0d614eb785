"""Token ids of every policy and drafter against plain decoding, in float32, on real prompts.

    python benchmarks/parity.py PROMPTS.jsonl [--per-category N] [--max-new-tokens M]

PROMPTS is in Spec-Bench form (default: the own prompts of the benchmark). Each is decoded plainly,
then with `auto`, `fixed:5` and each drafter alone, greedy and at temperature 0.8 with a seed. The
draft model is the embedded model itself in bfloat16, so that it is often right and often not.
A float32 text may differ only where the best two perturbed scores are within 1e-4.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.progress import track

import draftwise
from draftwise.bench.suites import load_suite
from draftwise.models import load_model

SAMPLINGS: dict[str, dict[str, float]] = {"greedy": {}, "0.8": {"temperature": 0.8, "seed": 11}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, nargs="?")
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()
    torch.set_num_threads(2)
    target, tokenizer = load_model(None, dtype="float32")
    draft, _ = load_model(None, dtype="bfloat16")
    ways = {
        "plain": draftwise.Model(target, tokenizer, (), policy="plain"),
        "auto": draftwise.Model(target, tokenizer),
        "fixed:5": draftwise.Model(target, tokenizer, policy="fixed:5"),
        "lookup": draftwise.Model(target, tokenizer, ["lookup"], policy="fixed:4"),
        "suffix": draftwise.Model(target, tokenizer, ["suffix"], policy="fixed:4"),
        "model": draftwise.Model(target, tokenizer, [draft], policy="fixed:4"),
        "auto, all": draftwise.Model(target, tokenizer, ["lookup", "suffix", draft]),
    }
    prompts = load_suite(options.prompts, options.per_category).prompts
    same = {(way, how): 0 for way in ways for how in SAMPLINGS}
    accepted = dict.fromkeys(same, 0)
    for prompt in track(prompts, "comparing"):
        chat = [{"role": "user", "content": prompt.text}]
        for how, sampling in SAMPLINGS.items():
            ids = {}
            for way, model in ways.items():
                result = model.generate(chat, max_new_tokens=options.max_new_tokens, **sampling)
                ids[way] = result.token_ids
                same[way, how] += ids[way] == ids["plain"]
                accepted[way, how] += result.stats.accepted
    for (way, how), count in same.items():
        print(
            f"{way:9s} {how:7s} identical to plain on {count} of {len(prompts)} prompts, "
            f"{accepted[way, how]} drafted tokens accepted"
        )
    raise SystemExit(any(count < len(prompts) for count in same.values()))


if __name__ == "__main__":
    main()
