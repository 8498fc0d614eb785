"""Padded batches through the hook: what transformers' own `generate` returns for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextStreamer

import draftwise
from conftest import plain_ids, random_ids, shared_model
from draftwise import Result, UsageError
from draftwise.padding import counted, unbroken

PAD = 0
PROMPTS = [[5, 6, 7, 8] * 4, [9, 5, 6], random_ids(11, 4), [40, 41] * 3]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_CACHE", str(tmp_path))


def padded(
    prompts: Sequence[Sequence[int]] = PROMPTS, side: str = "left"
) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        pads = longest - len(prompt)
        left = pads if side == "left" else pads // 2 if side == "both" else 0
        ids.append([PAD] * left + list(prompt) + [PAD] * (pads - left))
        mask.append([0] * left + [1] * len(prompt) + [0] * (pads - left))
    return torch.tensor(ids), torch.tensor(mask)


def both(model: PreTrainedModel, side: str = "left", **options: Any) -> tuple[Any, Any]:
    """(by the hook, by transformers)."""
    ids, mask = padded(side=side)
    options = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": PAD} | options
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    hooked: Any = model.generate(**inputs, custom_generate=draftwise.custom_generate, **options)
    return hooked, model.generate(**inputs, **options)


def eos_of(model: PreTrainedModel, row: int, at: int) -> int:
    return plain_ids(model, PROMPTS[row], at + 1)[at]


LLAMA = shared_model("llama")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token": {"max_new_tokens": 1},
    "eos in one row": {"eos_token_id": eos_of(LLAMA, 1, 4)},
    "eos of each": {"eos_token_id": [eos_of(LLAMA, i, 3 + 2 * i) for i in range(4)]},
    "pad is eos": {"eos_token_id": eos_of(LLAMA, 2, 5), "pad_token_id": eos_of(LLAMA, 2, 5)},
    "repetition penalty": {"repetition_penalty": 1.3},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "min new tokens": {"eos_token_id": eos_of(LLAMA, 1, 2), "min_new_tokens": 9},
    "min length": {"eos_token_id": eos_of(LLAMA, 1, 2), "min_length": 22},
    "max length": {"max_length": 20, "max_new_tokens": None},
    "forced": {"forced_eos_token_id": 3, "eos_token_id": 3},
    "begin suppressed": {"begin_suppress_tokens": [eos_of(LLAMA, 0, 0)]},
    "decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 3},
    "rows of their own": {
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(50 * row, 50 * row + 40))
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_left_padded_rows_are_those_of_generate(llama: PreTrainedModel, name: str) -> None:
    hooked, expected = both(llama, **OPTIONS[name])
    assert torch.equal(hooked, expected)


def test_every_family_gives_what_generate_gives(chain_model: PreTrainedModel) -> None:
    hooked, expected = both(chain_model, eos_token_id=7)
    width = padded()[0].shape[1]
    for i, prompt in enumerate(PROMPTS):
        text = plain_ids(chain_model, prompt, 24, eos_token_id=7, pad_token_id=PAD)
        longer = [*text, *[PAD] * (hooked.shape[1] - width - len(text))]
        assert hooked[i, width:].tolist() == longer
    assert hooked.shape == expected.shape


@pytest.mark.parametrize("side", ["right", "both"])
def test_padding_after_a_prompt_is_no_text(llama: PreTrainedModel, side: str) -> None:
    """transformers would go on from the last padding token."""
    hooked, _ = both(llama, side)
    ids, _ = padded(side=side)
    assert torch.equal(hooked[:, : ids.shape[1]], ids)
    assert hooked[:, ids.shape[1] :].tolist() == [plain_ids(llama, p, 24) for p in PROMPTS]


def test_one_padded_prompt_is_that_prompt(llama: PreTrainedModel) -> None:
    ids, mask = torch.tensor([[0, 0, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1, 1]])
    made: Any = llama.generate(
        ids,
        attention_mask=mask,
        custom_generate=draftwise.custom_generate,
        max_new_tokens=6,
        do_sample=False,
    )
    assert made.tolist() == [[0, 0, 5, 6, 7, *plain_ids(llama, [5, 6, 7], 6)]]


def test_sampled_rows_are_those_of_seeds_in_a_row(llama: PreTrainedModel) -> None:
    torch.manual_seed(3)
    hooked, _ = both(llama, do_sample=True, temperature=0.8)
    torch.manual_seed(3)
    again, _ = both(llama, do_sample=True, temperature=0.8)
    assert torch.equal(hooked, again)
    torch.manual_seed(3)
    seed = int(torch.randint(2**62, ()).item())
    for i, prompt in enumerate(PROMPTS):
        alone = draftwise.generate(
            llama, None, prompt, max_new_tokens=24, temperature=0.8, top_k=50, seed=seed + i
        )
        assert hooked[i, -24:].tolist() == list(alone.token_ids)


def test_criteria_see_each_row_s_tokens_in_order_with_its_padding(llama: PreTrainedModel) -> None:
    seen: dict[tuple[int, ...], list[int]] = {}
    ids, mask = padded()

    class Watches:
        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            assert ids.shape[0] == 1
            row = tuple(ids[0, :16].tolist())
            seen.setdefault(row, []).append(ids.shape[1])
            return torch.zeros(1, dtype=torch.bool)

    options: Any = {"stopping_criteria": [Watches()], "pad_token_id": PAD, "do_sample": False}
    llama.generate(
        ids,
        attention_mask=mask,
        custom_generate=draftwise.custom_generate,
        max_new_tokens=7,
        **options,
    )
    assert seen == {tuple(row.tolist()): list(range(17, 24)) for row in ids}


REFUSED: dict[str, dict[str, Any]] = {
    "guidance_scale": {"guidance_scale": 1.5},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.2},
    "pad_token_id": {"pad_token_id": None, "max_time": 60.0},
    "positions": {"position_ids": torch.arange(16).expand(4, -1)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_batch_cannot_honour_is_refused(llama: PreTrainedModel, name: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        both(llama, **REFUSED[name])
    assert "\n" not in str(caught.value)


def test_nothing_needs_a_padding_token_where_all_rows_are_equally_long(
    llama: PreTrainedModel,
) -> None:
    hooked, expected = both(llama, pad_token_id=None)
    assert torch.equal(hooked, expected)


def test_masks_and_positions() -> None:
    ids, mask = padded()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    assert unbroken(ids, None) and unbroken(ids, mask) and unbroken(ids, padded(side="both")[1])
    assert counted(ids, mask, None) and counted(ids, mask, positions)
    assert not counted(ids, mask, positions + 1)
    gap = mask.clone()
    gap[0, 5] = 0
    assert not unbroken(ids, gap) and not unbroken(ids, mask[:, 1:]) and not unbroken(ids, 2 * mask)


# draftwise.generate


def test_generate_takes_lists(
    llama: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = ["one two three", "four"]
    results = draftwise.generate(
        llama, byte_tokenizer, prompts, max_new_tokens=[9, 12], temperature=0.7, seed=4
    )
    alone = [
        draftwise.generate(
            llama, byte_tokenizer, prompt, max_new_tokens=n, temperature=0.7, seed=4 + i
        )
        for i, (prompt, n) in enumerate(zip(prompts, (9, 12), strict=True))
    ]
    assert [r.text for r in results] == [r.text for r in alone]
    assert all(isinstance(r, Result) for r in (*results, *alone))


def test_a_streamer_of_the_hook_takes_one_prompt(llama: PreTrainedModel) -> None:
    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            return

        def end(self) -> None:
            return

    ids = torch.tensor([[1, 2, 3], [7, 8, 9]])
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    options |= {"custom_generate": draftwise.custom_generate, "streamer": Streamer()}
    with pytest.raises(UsageError, match="a streamer for several prompts"):
        llama.generate(ids, **options)
    assert llama.generate(ids[:1], **options).shape == (1, 6)


def test_a_streamer_takes_one_prompt(
    llama: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UsageError, match="one prompt"):
        draftwise.generate(
            llama,
            byte_tokenizer,
            ["one", "two"],
            streamer=TextStreamer(byte_tokenizer),  # type: ignore[call-overload]
            max_new_tokens=2,
        )
