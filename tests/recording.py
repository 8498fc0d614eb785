"""A small trace for tests of replays: a tiny model's texts, with a draft model's shadow."""

from __future__ import annotations

from pathlib import Path

from conftest import shared_model
from draftwise import Model
from draftwise.trace import Trace

PROMPTS = (
    ("copies", [5, 6, 7, 8, 9, 10, 11, 12] * 3),
    ("copies", [40, 41, 42, 43] * 5),
    ("other", list(range(60, 90))),
)


def record(path: Path, shadow: bool = True, policy: str = "auto", tokens: int = 70) -> Path:
    """Records PROMPTS; the draft model is the target itself, so it is always right."""
    drafters = ["lookup", "suffix", shared_model("llama")]
    with Model(shared_model("llama"), None, drafters) as model:
        for label, prompt in PROMPTS:
            trace = Trace(path, shadow=shadow, label=label)
            model.generate(prompt, policy=policy, max_new_tokens=tokens, trace=trace)
    return path
