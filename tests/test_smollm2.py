"""A real model in float32: every way to speculate writes what plain decoding writes.

Plain decoding itself is compared with transformers' own `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from conftest import plain_ids
from draftwise import Model
from draftwise.drafters.suffix import Suffix
from draftwise.models import load_model

TOKENS = 24
LAYERS = 4  # of 30: poor drafts, quickly made
PROMPTS: dict[str, Any] = {
    "chat": [{"role": "user", "content": "What is the capital of France?"}],
    "code": "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return a - b\n\ndef mul",
    "copy": [
        {
            "role": "user",
            "content": "Repeat this text word by word: The brown fox lives in the old forest near "
            "the river. The brown fox eats berries near the river.",
        }
    ],
}
# A draft model is slow here, and the tiny models try it at length.
SERVED = {"greedy": ("chat", "code", "copy"), "sampled": ("code", "copy")}
SERVED_BY_MODEL = {"greedy": ("copy",), "sampled": ("code",)}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 4},
}


@pytest.fixture(scope="module")
def loaded(smollm2_path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_model(smollm2_path, dtype="float32", device="cpu", progress=False)


@pytest.fixture(scope="module")
def shallow(loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> PreTrainedModel:
    """The first layers of the same model."""
    target = loaded[0]
    config = LlamaConfig(**target.config.to_dict() | {"num_hidden_layers": LAYERS})
    draft = LlamaForCausalLM(config)
    assert not draft.load_state_dict(target.state_dict(), strict=False).missing_keys
    made: PreTrainedModel = draft.float().eval()
    return made


@pytest.fixture(scope="module")
def model(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase], shallow: PreTrainedModel
) -> Iterator[Model]:
    # Without a memory of earlier requests, which would hold the very texts of these tests.
    with Model(*loaded, ["lookup", Suffix(store=0), shallow]) as made:
        yield made


@pytest.fixture(scope="module")
def plain(model: Model) -> dict[tuple[str, str], tuple[int, ...]]:
    return {
        (kind, how): model.generate(
            PROMPTS[kind], policy="plain", max_new_tokens=TOKENS, **options
        ).token_ids
        for how, options in SAMPLING.items()
        for kind in SERVED[how]
    }


@pytest.mark.parametrize("kind", PROMPTS)
def test_plain_decoding_is_that_of_generate(
    model: Model,
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    plain: dict[tuple[str, str], tuple[int, ...]],
    kind: str,
) -> None:
    expected = plain_ids(loaded[0], model.encode(PROMPTS[kind]), TOKENS)
    assert list(plain[kind, "greedy"]) == expected


@pytest.mark.parametrize("how", SAMPLING)
@pytest.mark.parametrize("policy", ["auto", "fixed:5:lookup", "fixed:5:suffix", "fixed:5:model"])
def test_every_policy_writes_what_plain_decoding_writes(
    model: Model, plain: dict[tuple[str, str], tuple[int, ...]], policy: str, how: str
) -> None:
    verified = 0
    for kind in (SERVED_BY_MODEL if policy.endswith("model") else SERVED)[how]:
        result = model.generate(
            PROMPTS[kind], policy=policy, max_new_tokens=TOKENS, **SAMPLING[how]
        )
        assert result.token_ids == plain[kind, how], kind
        verified += result.stats.verified
    assert verified > 0 or policy == "auto"


def test_copied_text_is_drafted_well(model: Model) -> None:
    stats = model.generate(PROMPTS["copy"], policy="fixed:5:lookup", max_new_tokens=TOKENS).stats
    assert stats.acceptance is not None and stats.acceptance > 0.4
    assert stats.tokens_per_step > 2


def test_the_reply_to_a_chat_is_text(model: Model) -> None:
    result = model.generate(PROMPTS["chat"], max_new_tokens=TOKENS)
    assert "Paris" in result.text
    assert "<|im_" not in result.text


def test_recycling_keeps_the_text_and_gets_better_as_it_learns(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    plain: dict[tuple[str, str], tuple[int, ...]],
) -> None:
    accepted = []
    with Model(*loaded, ["recycling"], policy="fixed:3:recycling") as model:
        for _ in range(2):
            result = model.generate(PROMPTS["copy"], max_new_tokens=TOKENS)
            assert result.token_ids == plain["copy", "greedy"]
            accepted.append(result.stats.accepted)
    assert accepted[1] > accepted[0]
    assert accepted[1] >= TOKENS // 3
