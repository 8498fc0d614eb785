"""Choices of the draft model: its main chain, and the next best tokens beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from conftest import VOCABULARY, random_ids
from draftwise import SamplingParams
from draftwise.core import POINT, Ask, Draft, Request
from draftwise.drafters.model import ModelDrafter
from draftwise.engines.transformers import TransformersEngine
from draftwise.sampling import gumbel, key

PROMPT, GENERATED, SEED = random_ids(10), [4, 9], 3


def drafted(
    model: PreTrainedModel, siblings: int, acceptance: str = "coupled", **params: Any
) -> Draft:
    drafter = ModelDrafter(TransformersEngine(model), VOCABULARY)
    sampling = SamplingParams(**params)
    drafter.open(0, Request(0, tuple(PROMPT), sampling, SEED, acceptance=acceptance))
    drafter.observe(0, GENERATED)
    (draft,) = drafter.propose([Ask(0, "model", 6, siblings=siblings)], lambda of, features: True)
    return draft


def families(draft: Draft) -> list[tuple[list[int], list[int]]]:
    """(text of the main chain before it, its children) for the root and each node of the chain."""
    found, at, before = [], -1, list[int]()
    while children := list(draft.children(at)):
        found.append((before, children))
        at, before = children[0], [*before, draft.tokens[children[0]]]
    return found


def logits(model: PreTrainedModel, before: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        row: torch.Tensor = model(input_ids=torch.tensor([PROMPT + GENERATED + before])).logits
    return row[0, -1].double()


@pytest.mark.parametrize("siblings", [0, 1, 3])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8}], ids=["greedy", "coupled"])
def test_siblings_stand_beside_the_main_chain(
    llama: PreTrainedModel, params: dict[str, Any], siblings: int
) -> None:
    draft = drafted(llama, siblings, **params)
    assert draft.main().tokens == drafted(llama, 0, **params).tokens
    assert len(draft.tokens) == 6 * (1 + siblings) and set(draft.q) == {POINT}
    assert len(families(draft)) == 6
    for _, children in families(draft):
        assert [draft.features[i].rank for i in children] == list(range(1 + siblings))
        assert len({draft.tokens[i] for i in children}) == 1 + siblings
        assert not any(draft.children(i) for i in children[1:])


def test_greedy_siblings_are_the_next_most_probable(llama: PreTrainedModel) -> None:
    draft = drafted(llama, 3)
    for before, children in families(draft):
        best = logits(llama, before).softmax(-1).topk(4)
        assert [draft.tokens[i] for i in children] == best.indices.tolist()
        probs = [draft.features[i].prob for i in children]
        assert probs == pytest.approx(best.values.tolist(), rel=1e-3)
        assert probs == sorted(probs, reverse=True)
        assert len({draft.features[i].entropy for i in children}) == 1


def test_coupled_siblings_are_the_top_of_the_perturbed_scores(llama: PreTrainedModel) -> None:
    draft = drafted(llama, 3, temperature=0.8)
    for n, (before, children) in enumerate(families(draft)):
        noise = gumbel(key(SEED, len(GENERATED) + n), np.arange(VOCABULARY))
        scores = logits(llama, before) / 0.8 + torch.from_numpy(noise)
        best = scores.topk(4)
        assert [draft.tokens[i] for i in children] == best.indices.tolist()
        values = best.values.tolist()
        lacks = [values[0] - values[1], *(values[0] - v for v in values[1:])]
        assert [draft.features[i].margin for i in children] == pytest.approx(lacks, abs=1e-3)


def test_what_may_not_be_drawn_is_no_sibling(llama: PreTrainedModel) -> None:
    draft = drafted(llama, 3, temperature=0.8, top_k=2)
    for before, children in families(draft):
        assert len(children) == 2
        assert {draft.tokens[i] for i in children} == set(logits(llama, before).topk(2)[1].tolist())
    alone = drafted(llama, 3, temperature=0.8, top_k=1)
    assert len(alone.tokens) == 6 and all(f.margin == 30.0 for f in alone.features)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_drawn_tokens_have_no_siblings(llama: PreTrainedModel, acceptance: str) -> None:
    assert drafted(llama, 3, acceptance, temperature=0.8).is_chain
