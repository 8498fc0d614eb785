"""Prompts: a text, token ids or chat messages become token ids.

Chat messages go through the tokenizer's chat template and end with the opening of a reply. The
template writes its own special tokens, so none are added to it; a bare text gets those that the
tokenizer adds by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .core import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = (
    "a prompt is one text, one list of token ids, or one list of chat messages "
    "({'role': ..., 'content': ...})"
)
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Token ids of a text, of chat messages with the reply's opening, or of ids themselves."""
    if isinstance(prompt, str):
        if not prompt:
            raise UsageError("the prompt is empty")
        return _ids(prompt, _needed(tokenizer), add_special_tokens=True)
    items: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(items, Sequence) and len(items) == 1 and isinstance(items[0], list):
        items = items[0]  # a batch of one, as tokenizers return it
    if not isinstance(items, Sequence) or isinstance(items, (bytes, bytearray)):
        raise UsageError(f"{FORMS}, not {type(prompt).__name__}")
    if items and all(isinstance(m, Mapping) for m in items):
        return _chat([dict(m) for m in items], _needed(tokenizer))
    if not all(isinstance(t, (int, np.integer)) and not isinstance(t, bool) for t in items):
        raise UsageError(FORMS)
    return [int(t) for t in items]


def _ids(text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not valid Unicode: {error.reason}") from error
    return [int(t) for t in tokenizer.encode(text, add_special_tokens=add_special_tokens)]


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
    return _ids(str(text), tokenizer, add_special_tokens=False)


def special_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Ids of those texts that are special tokens: they never show in a text, and so could not stop
    one otherwise."""
    if tokenizer is None or not texts:
        return frozenset()
    special = set(tokenizer.all_special_ids)
    for i, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special.add(i)
    names = {tokenizer.convert_ids_to_tokens(i): i for i in special}
    return frozenset(names[text] for text in texts if text in names)
