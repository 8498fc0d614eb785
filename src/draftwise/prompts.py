"""Prompts: a text, token ids or chat messages become token ids.

Chat messages go through the tokenizer's chat template and end with the opening of a reply. The
template writes its own special tokens, so none are added to it; a bare text gets those that the
tokenizer adds by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .core import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Token ids of a text, of chat messages with the reply's opening, or of ids themselves."""
    if isinstance(prompt, str):
        if not prompt:
            raise UsageError("the prompt is empty")
        return [int(t) for t in _needed(tokenizer).encode(prompt)]
    items = list(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
    if items and all(isinstance(m, Mapping) for m in items):
        return _chat([dict(m) for m in items], _needed(tokenizer))
    if not all(isinstance(t, int) and not isinstance(t, bool) for t in items):
        raise UsageError(
            "a prompt is one text, one list of token ids, or one list of chat messages "
            "({'role': ..., 'content': ...})"
        )
    return items


def _needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise UsageError("without a tokenizer, prompts must be token ids")
    return tokenizer


def _chat(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not all("role" in m and "content" in m for m in messages):
        raise UsageError("every chat message needs 'role' and 'content'")
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("this model has no chat template: give it a text")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise errors of their own, about roles mostly
        raise UsageError(f"the chat template refuses these messages: {error}") from error
    return [int(t) for t in tokenizer.encode(str(text), add_special_tokens=False)]
