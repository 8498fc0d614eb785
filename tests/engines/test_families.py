"""Every kind of model gives its own text, whatever was drafted, accepted and rejected.

The reference is transformers' own `generate` for greedy texts, and plain decoding for sampled ones.
Drafts come from a script: right tokens for a random number of them, then wrong ones, as chains, and
as trees where the model takes them. Windows are 8 tokens, and texts go well past them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from tests.toy import Everything, Guess, Guesser, ToyDrafter, stopper
from transformers import PreTrainedModel

from conftest import VOCABULARY, WINDOW, plain_ids, random_ids, tiny_model
from draftwise.core import Ask, Request, SamplingParams, StepResult
from draftwise.decode import Parts, decode_batch
from draftwise.drafters.model import ModelDrafter
from draftwise.engines.transformers import TransformersEngine
from draftwise.policy.fixed import Plain

ROLLBACK = {
    "llama": "trees",
    "qwen2": "trees",
    "qwen3": "trees",
    "qwen3_moe": "trees",
    "gpt2": "trees",
    "gpt_neox": "trees",
    "olmo2": "trees",
    "granite": "trees",
    "mixtral": "trees",
    "gemma3": "free",
    "mistral": "free",
    "phi3": "free",
    "gpt_oss": "free",
    "lfm2": "free",
    "bloom": "free",
    "gpt_neo": "free",
    "mamba2": "refeed",
    "qwen3_next": "refeed",
    "falcon_h1": "refeed",
    "granite_hybrid": "refeed",
    "bamba": "refeed",
    "mamba": "none",
    "jamba": "none",
}
TOKENS = 44
BATCHES = (1, 3)
GAP = 2e-4  # float32 rounds far below this: a text with closer calls could differ for no fault


@pytest.fixture(params=ROLLBACK)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@functools.cache
def lively(family: str) -> PreTrainedModel:
    """Weights large enough that texts vary."""
    return tiny_model(family, seed=2, initializer_range=0.5)


def asked(seq: int, temperature: float) -> Request:
    prompt = tuple(random_ids(9 + seq, seed=3 + seq))
    params = SamplingParams(max_new_tokens=TOKENS, temperature=temperature)
    return Request(seq, prompt, params, seed=0, limit=TOKENS)


def texts(
    engine: TransformersEngine,
    drafters: Sequence[ToyDrafter],
    policy: object,
    batch: int,
    temperature: float,
) -> tuple[list[list[int]], list[StepResult]]:
    """The texts of `batch` requests that run together, and all of their steps."""
    parts = Parts(engine, {d.name: d for d in drafters}, policy, nullcontext())  # type: ignore[arg-type]
    requests = [asked(seq, temperature) for seq in range(batch)]
    made: list[list[int]] = [[] for _ in requests]
    steps = []
    for results in decode_batch(parts, [(r, stopper(r)) for r in requests], batch):
        for result in results:
            made[result.seq] += result.committed
            steps.append(result)
    assert not engine._sequences
    return made, steps


def half_right(scripts: Sequence[Sequence[int]], seed: int, branching: bool) -> Guesser:
    """Right tokens of the script, then wrong ones; as a tree, with wrong siblings in any order."""
    dice = random.Random(seed)

    def guess(generated: list[int], text: list[int], depth: int) -> Guess:
        script = scripts[len(text) - len(generated) - 9]  # prompts differ in length
        right = dice.choice([0, 1, 2, 3, WINDOW, WINDOW + 3])
        ahead = script[len(generated) : len(generated) + min(depth, right + dice.randint(0, 4))]
        tokens: list[int] = []
        parents: list[int] = []
        end = -1
        for i, token in enumerate(ahead):
            for _ in range(dice.randint(0, 2) if branching else 0):
                tokens.append((token + dice.randint(1, 99)) % VOCABULARY)
                parents.append(dice.choice([end, len(tokens) - 2]))
            wrong = dice.randint(1, VOCABULARY - 1) if i >= right else 0
            tokens.append((token + wrong) % VOCABULARY)
            parents.append(end)
            end = len(tokens) - 1
        return Guess(tokens, parents)

    return guess


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_that_of_plain_decoding(family: str, temperature: float, batch: int) -> None:
    model = lively(family)
    engine = TransformersEngine(model)
    plain, _ = texts(engine, [], Plain(), batch, temperature)
    for seq, text in enumerate(plain):
        assert len(set(text)) > 10, "a text that repeats itself shows little"
        if not temperature:
            prompt = asked(seq, 0.0).prompt
            assert text == plain_ids(model, prompt, TOKENS)
            assert closest_call(model, prompt, text) > GAP
    for branching in (False, True) if engine.caps.trees else (False,):
        drafter = ToyDrafter(half_right(plain, 5, branching))
        text, steps = texts(engine, [drafter], Everything(), batch, temperature)
        assert text == plain
        if ROLLBACK[family] == "none":
            assert not any(r.verified for r in steps)
            continue
        accepted = sum(r.accepted for r in steps)
        rejected = sum(r.plan.draft is not None and r.accepted < r.verified for r in steps)
        whole = sum(0 < r.accepted == r.verified for r in steps)
        assert accepted > batch * TOKENS / 4 and rejected > 4 * batch
        assert branching or whole > 0


def closest_call(model: PreTrainedModel, prompt: Sequence[int], text: Sequence[int]) -> float:
    """The least distance between the two best logits over a text, from one uncached forward."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *text]]), use_cache=False).logits[0]
    best = logits[len(prompt) - 1 : -1].float().topk(2, -1).values
    return float((best[:, 0] - best[:, 1]).min())


def test_what_the_engine_says_of_a_family(family: str) -> None:
    caps = TransformersEngine(lively(family)).caps
    expected = ROLLBACK[family]
    assert caps.trees == (expected == "trees")
    assert caps.rollback == ("free" if caps.trees else expected)


DRAFTERS = [family for family, rollback in ROLLBACK.items() if rollback in ("trees", "free")]


@pytest.mark.parametrize("family", DRAFTERS)
def test_a_drafter_is_right_after_any_rejections_at_long_context(family: str) -> None:
    """Its cache, positions and windows: one that is trimmed too far, or not enough, shows late."""
    model, dice = lively(family), random.Random(4)
    drafter = ModelDrafter(TransformersEngine(model), VOCABULARY)
    text = random_ids(300, seed=6)
    drafter.open(0, Request(0, tuple(text), SamplingParams(), seed=0))
    rejections = 0
    for _ in range(16):
        asked = Ask(0, "model", dice.choice([1, 3, WINDOW + 1]))
        (draft,) = drafter.propose([asked], lambda seq, features: True)
        right = plain_ids(model, text, asked.depth)
        assert list(draft.tokens) == right
        kept = dice.randint(0, asked.depth)
        wrong = (right[kept] + 1) % VOCABULARY if kept < asked.depth else 7
        rejections += kept < asked.depth
        drafter.observe(0, [*right[:kept], wrong])
        text += [*right[:kept], wrong]
    assert rejections > 8
