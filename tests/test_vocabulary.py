"""Tokenizers are one if their ids mean the same tokens, whatever their sizes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from draftwise.core import UsageError
from draftwise.vocabulary import check_same_vocabulary

WORDS = [f"w{i}" for i in range(100)]


def tokenizer(words: Iterable[str], added: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(words)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "w0")))
    made.add_tokens(list(added))
    return made


def test_the_same_tokenizer_is_accepted() -> None:
    check_same_vocabulary(tokenizer(WORDS), tokenizer(WORDS), "draft")


@pytest.mark.parametrize("more", [1, 5, 11])
def test_a_tokenizer_padded_by_other_tokens_is_accepted_either_way(more: int) -> None:
    long = tokenizer(WORDS, [f"<pad{i}>" for i in range(more)])
    check_same_vocabulary(tokenizer(WORDS), long, "draft")
    check_same_vocabulary(long, tokenizer(WORDS), "draft")


def test_other_tokens_in_a_vocabulary_of_the_same_size_are_refused() -> None:
    with pytest.raises(UsageError, match=r"draft model tiny does not match.*100 of 100 ids differ"):
        check_same_vocabulary(tokenizer(WORDS), tokenizer(w.upper() for w in WORDS), "tiny")


def test_the_same_tokens_in_another_order_are_refused() -> None:
    swapped = [WORDS[1], WORDS[0], *WORDS[2:]]
    with pytest.raises(UsageError, match="2 of 100 ids differ"):
        check_same_vocabulary(tokenizer(WORDS), tokenizer(swapped), "tiny")


def test_one_differing_token_is_refused() -> None:
    with pytest.raises(UsageError, match="1 of 100 ids differ"):
        check_same_vocabulary(tokenizer(WORDS), tokenizer([*WORDS[:-1], "other"]), "tiny")


def test_added_tokens_that_differ_at_the_same_id_are_refused() -> None:
    with pytest.raises(UsageError, match="1 of 101 ids differ"):
        check_same_vocabulary(tokenizer(WORDS, ["<a>"]), tokenizer(WORDS, ["<b>"]), "tiny")


def test_a_vocabulary_that_is_only_a_part_of_the_other_is_refused() -> None:
    with pytest.raises(UsageError, match="50 of 100 ids are shared") as caught:
        check_same_vocabulary(tokenizer(WORDS), tokenizer(WORDS[:50]), "tiny")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError):
        check_same_vocabulary(tokenizer(WORDS[:50]), tokenizer(WORDS), "tiny")
