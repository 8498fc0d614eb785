"""Whether two tokenizers are one: a draft model must mean the same tokens by the same ids.

Sizes prove nothing: one tokenizer is padded differently by different models (152,064 and 151,936),
and different tokenizers can have the same size. So tokens are compared, id by id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_same_vocabulary(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, name: str
) -> None:
    """Raises UsageError if an id that both have stands for different tokens."""
    ours = {i: token for token, i in target.get_vocab().items()}
    theirs = {i: token for token, i in draft.get_vocab().items()}
    both = ours.keys() & theirs.keys()
    differ = sum(ours[i] != theirs[i] for i in both)
    # Ids that only one of them has are padding or added tokens: they are never drafted, or never
    # accepted. A vocabulary that shares only a part of the other's ids is another tokenizer.
    if differ or len(both) < 0.9 * max(len(ours), len(theirs)):
        raise UsageError(
            f"the vocabulary of draft model {name} does not match the target's: "
            f"{differ or len(both)} of {len(both) if differ else max(len(ours), len(theirs))} ids "
            f"{'differ' if differ else 'are shared'}"
        )
