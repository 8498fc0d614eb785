"""Models of images too: their text part runs as a causal language model; images are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
    ViTConfig,
    ViTForImageClassification,
)

import draftwise
from conftest import VOCABULARY, plain_ids, save_tiny
from draftwise import Model, UsageError
from draftwise.models import load_model

PROMPT = [5, 6, 7, 8] * 4 + [9, 5, 6]
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
IMAGES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def llava() -> PreTrainedModel:
    return LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=LlamaConfig(**TEXT),
            vision_config=CLIPVisionConfig(**IMAGES),
            image_token_id=299,
        )
    )


def gemma3() -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    text = Gemma3TextConfig(**TEXT, sliding_window=8, layer_types=layers)
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text.to_dict(),
            vision_config=SiglipVisionConfig(**IMAGES).to_dict(),
            mm_tokens_per_image=4,
            image_token_id=299,
            boi_token_id=298,
            eoi_token_id=297,
        )
    )


def qwen2_vl() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config=TEXT | {"rope_parameters": rope},
            vision_config={
                "depth": 1,
                "embed_dim": 32,
                "num_heads": 4,
                "hidden_size": 32,
                "patch_size": 8,
            },
            image_token_id=299,
            video_token_id=298,
            vision_start_token_id=297,
            vision_end_token_id=296,
        )
    )


MAKERS: tuple[Callable[[], PreTrainedModel], ...] = (llava, gemma3, qwen2_vl)


@functools.cache
def made(maker: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return maker().float().eval()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_CACHE", str(tmp_path))


def hooked(model: PreTrainedModel, **inputs: Any) -> list[int]:
    made: Any = model.generate(
        torch.tensor([PROMPT]),
        do_sample=False,
        max_new_tokens=30,
        custom_generate=draftwise.custom_generate,
        **inputs,
    )
    return [int(t) for t in made[0, len(PROMPT) :]]


@pytest.mark.parametrize("maker", MAKERS)
def test_texts_are_those_of_generate(maker: Callable[[], PreTrainedModel]) -> None:
    model = made(maker)
    expected = plain_ids(model, PROMPT, 30)
    for policy in ("plain", "fixed:4"):
        result = Model(model, None).generate(PROMPT, max_new_tokens=30, policy=policy)
        assert list(result.token_ids) == expected
    assert result.stats.accepted > 0
    assert hooked(model) == expected


def test_pictures_of_an_earlier_prompt_shift_no_text() -> None:
    model = made(qwen2_vl)
    expected = plain_ids(model, PROMPT, 30)
    ours = Model(model, None, policy="fixed:4")
    model.model.rope_deltas = torch.tensor([[7]])  # as a prompt with pictures leaves it
    assert list(ours.generate(PROMPT, max_new_tokens=30).token_ids) == expected


@pytest.mark.parametrize("maker", [llava, gemma3])
def test_pictures_are_refused(maker: Callable[[], PreTrainedModel]) -> None:
    with pytest.raises(UsageError, match="only token ids"):
        hooked(made(maker), pixel_values=torch.zeros(1, 3, 16, 16))


@pytest.mark.parametrize("maker", MAKERS)
def test_a_checkpoint_loads_by_name(
    maker: Callable[[], PreTrainedModel], tiny: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "m")  # for its tokenizer
    made(maker).save_pretrained(folder)
    model, _ = load_model(folder, device="cpu", progress=False)
    assert plain_ids(model, PROMPT, 10) == plain_ids(made(maker), PROMPT, 10)


def test_what_writes_no_text_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    ViTForImageClassification(ViTConfig(**IMAGES)).config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UsageError, match=r"\(vit\) writes no text: name a causal"):
        load_model(folder, device="cpu", progress=False)
