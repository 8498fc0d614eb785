"""Texts of `auto` in bfloat16 against plain decoding: every difference must be a tie.

    python benchmarks/parity_bf16.py [PROMPTS.jsonl] [--prompts 100] [--out parity_bf16.jsonl]

PROMPTS is in Spec-Bench form (default: the own prompts of the benchmark). SmolLM2 writes an answer
to each, greedy and at temperature 0.8 with a seed, which is then judged by the model's own forwards
(draftwise/bench/ties.py; docs/design.md §3.5). Broken engines run on the first prompts too and must
be caught. Every finished prompt is written to OUT, and a later run with the same options goes on
from there. Prompts are dealt to one process a core, since a forward gains little from a second one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track

import draftwise
from draftwise.bench.suites import Prompt, load_suite
from draftwise.bench.ties import BREAKS, WIDTHS, Judged, Teacher, broken, judge, verdict
from draftwise.models import load_model
from draftwise.sampling import Sampler
from draftwise.unpack import cache_dir

SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "0.8": {"temperature": 0.8, "seed": 11}}


class Task(NamedTuple):
    id: int | str
    prompt: str
    how: str  # of SAMPLINGS
    broken: str  # of BREAKS, or nothing
    length: int

    @property
    def key(self) -> str:
        return f"{self.id} {self.broken or self.how}"


@cache
def loaded(broken: str) -> tuple[Any, draftwise.Model]:
    """The target and what runs it; a broken engine teaches its policy what is not so."""
    if broken:
        target, whole = loaded("")
        return target, draftwise.Model(target, whole.tokenizer, costs=cache_dir() / "costs")
    target, tokenizer = load_model(None, dtype="bfloat16", device="cpu")
    return target, draftwise.Model(target, tokenizer, costs=cache_dir() / "costs")


@cache
def teacher(prompt: str) -> tuple[list[int], Teacher]:
    target, model = loaded("")
    teacher.cache_clear()  # a prompt's texts are judged one after another
    ids = model.encode([{"role": "user", "content": prompt}])
    return ids, Teacher(target, ids)


def done(tasks: list[Task]) -> list[tuple[Task, dict[str, Any]]]:
    """The texts of one prompt."""
    torch.set_num_threads(1)
    lines = []
    for task in tasks:
        target, model = loaded(task.broken)
        ids, own = teacher(task.prompt)
        sampling = SAMPLINGS[task.how]
        options = {"max_new_tokens": task.length, "reuse": not task.broken, **sampling}
        if task.broken:
            with broken(model.engine, target, task.broken):
                result = model.generate(ids, **options)
        else:
            result = model.generate(ids, **options)
        sampler = Sampler(draftwise.SamplingParams(**sampling), sampling.get("seed", 0))
        text = result.token_ids
        wide = own.rows(text, WIDTHS) if not task.broken else None
        judged = judge(sampler, text, own.rows(text), wide)
        lines.append((task, asdict(judged) | {"accepted": result.stats.accepted}))
    return lines


def written(path: Path, header: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What an earlier run with the same options left."""
    if not path.exists() or not path.stat().st_size:
        path.write_text(json.dumps(header) + "\n")
        return {}
    first, *lines = path.read_text().splitlines()
    if json.loads(first) != header:
        raise SystemExit(f"{path} is of another run: name another --out, or remove it")
    found = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # cut short by a kill
            continue
        found[record.pop("key")] = record
    return found


def judged(record: dict[str, Any]) -> Judged:
    gaps = tuple((int(i), float(gap)) for i, gap in record["gaps"])
    rest = {name: record[name] for name in ("tokens", "noise", "changed", "lost", "compared")}
    return Judged(gaps=gaps, **rest)


def report(tasks: list[Task], records: dict[str, dict[str, Any]]) -> bool:
    passed = caught = True
    whole = {how: [judged(records[t.key]) for t in tasks if (t.how, t.broken) == (how, "")]
             for how in SAMPLINGS}  # fmt: skip
    for how, texts in whole.items():
        v = verdict(texts, texts)
        passed &= v.passed
        own = [t for t in tasks if (t.how, t.broken) == (how, "")]
        accepted = sum(records[task.key]["accepted"] for task in own)
        result = "passed" if v.passed else "FAILED"
        print(
            f"{how}: {v.texts - v.differing} of {v.texts} are plain decoding's; of {v.tokens} "
            f"tokens ({accepted} drafted) {v.ties} are ties (rounding makes at most {v.most:.0f}), "
            f"{v.errors} are not; worst gap {v.worst:.3f}, allowance {v.allowance:.3f}; "
            f"{v.nats:.2f} nats in all, at most {v.most_nats:.2f}: {result}"
        )
    for name in BREAKS:
        texts = [judged(records[t.key]) for t in tasks if t.broken == name]
        if not texts:
            continue
        v = verdict(texts, whole["greedy"])
        caught &= not v.passed
        print(
            f"control {name!r}: {v.differing} of {v.texts} texts differ, {v.ties} ties (at most "
            f"{v.most:.0f}), {v.errors} gaps above the allowance, the worst {v.worst:.3f}, "
            f"{v.nats:.2f} nats in all, at most {v.most_nats:.2f}: "
            f"{'NOT CAUGHT' if v.passed else 'caught'}"
        )
    found = "every difference from plain is a tie" if passed else "not every difference is a tie"
    print(f"bf16: {found} by design.md §3.5 on {len({task.id for task in tasks})} prompts")
    if not caught:
        print("a broken engine was not caught: take more --controls")
    return passed and caught


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", type=Path, nargs="?", metavar="PROMPTS")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--controls", type=int, default=6, help="prompts for each broken engine")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("parity_bf16.jsonl"))
    options = parser.parse_args()
    suite = load_suite(options.suite, options.prompts)
    prompts = list(spread(suite.prompts))[: options.prompts]
    length = options.max_new_tokens
    tasks = [Task(p.question_id, p.text, how, "", length) for p in prompts for how in SAMPLINGS]
    tasks += [
        Task(p.question_id, p.text, "greedy", name, length)
        for p in prompts[: options.controls]
        for name in BREAKS
    ]
    records = written(options.out, {"sha256": suite.sha256, "length": length})
    left: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        if task.key not in records:
            left[task.prompt].append(task)
    os.environ["OMP_NUM_THREADS"] = "1"
    pool = multiprocessing.get_context("spawn").Pool(min(options.processes, max(len(left), 1)))
    with pool, options.out.open("a") as out:
        for lines in track(pool.imap_unordered(done, left.values()), "judging", len(left)):
            for task, record in lines:
                records[task.key] = record
                out.write(json.dumps({"key": task.key, **record}) + "\n")
            out.flush()
    raise SystemExit(not report(tasks, records))


def spread(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """Those of all categories in turn, so that any beginning is of all kinds."""
    kinds: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        kinds[prompt.category].append(prompt)
    for place in range(max(map(len, kinds.values()))):
        yield from (own[place] for own in kinds.values() if place < len(own))


if __name__ == "__main__":
    main()
