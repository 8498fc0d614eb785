"""Token recycling: the successor matrix, the tree that is drafted from it, and how it is taught."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from draftwise.core import Ask, Draft, Request, SamplingParams, SeqId
from draftwise.drafters import never
from draftwise.drafters.recycling import CHANCE, DEEPEST, HELD, NODES, A, K, Recycling
from draftwise.engines.base import Top
from toy import Target, ToyDrafter, ToyEngine, ToyRows, parts, random_trees, request, run

LIKELY = np.log([[0.6, 0.3, 0.1]])


def opened(last: int = 1, seq: SeqId = 0, **options: Any) -> Recycling:
    made = Recycling(**options)
    made.open(seq, Request(seq, (last,), SamplingParams(), 0))
    return made


def teach(drafter: Recycling, token: int, *found: int, seq: SeqId = 0) -> None:
    drafter.learn(seq, [token], Top(np.array([found]), LIKELY[:, : len(found)]))


def tree(drafter: Recycling, depth: int = 8, after: tuple[int, ...] = (), seq: int = 0) -> Draft:
    (draft,) = drafter.propose([Ask(seq, "recycling", depth, after, siblings=3)], never)
    return draft


def shares(draft: Draft) -> dict[int, float]:
    return {draft.tokens[i]: draft.features[i].share for i in draft.children(-1)}


def test_shares_are_the_softmax_of_a_row_and_move_with_later_rows() -> None:
    drafter = opened()
    teach(drafter, 1, 10, 11, 12)
    assert shares(tree(drafter)) == {10: 0.6, 11: 0.3, 12: 0.1}
    teach(drafter, 1, 11, 13, 10)
    expected = {
        10: 0.6 * (1 - A) + 0.1 * A,
        11: 0.3 * (1 - A) + 0.6 * A,
        12: 0.1 * (1 - A),
        13: 0.3 * A,
    }
    assert shares(tree(drafter)) == pytest.approx(expected, abs=0.006)
    assert [f.rank for f in tree(drafter).features] == [0, 1, 2, 3]
    assert tree(drafter).tokens == (10, 11, 13, 12)


def test_the_tree_grows_where_the_target_was_surest() -> None:
    drafter = opened()
    for token in range(1, 60):
        teach(drafter, token, token + 1, token + 20, token + 40)
    draft, likelihood = tree(drafter, DEEPEST + 4), []
    depths: list[int] = []
    for parent, features in zip(draft.parents, draft.features, strict=True):
        above = likelihood[parent] if parent >= 0 else 1.0
        likelihood.append(above * CHANCE * features.share)
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    assert likelihood == sorted(likelihood, reverse=True)
    assert len(draft.children(-1)) > 1 and 3 <= max(depths) <= DEEPEST
    assert len(draft.tokens) <= NODES
    assert list(draft.main().tokens) == [2 + i for i in range(len(draft.main().tokens))]
    (chain,) = drafter.propose([Ask(0, "recycling", 30)], never)
    assert chain.is_chain and chain.tokens == tuple(range(2, 2 + DEEPEST))


def test_a_tree_without_end_is_cut() -> None:
    drafter = opened()
    for token in range(6):
        drafter.learn(0, [token], Top(np.array([[(token + 1) % 6]]), np.zeros((1, 1))))
    assert len(tree(drafter, 64).tokens) == DEEPEST
    for token in range(60):
        ids = np.arange(K)[None] + 7 * token % 60
        drafter.learn(0, [token], Top(ids, np.zeros((1, K))))
    assert K < len(tree(drafter, 64).tokens) <= NODES


def test_a_draft_after_tokens_goes_on_from_their_end() -> None:
    asked, there = opened(last=1), opened(last=3)
    for drafter in (asked, there):
        teach(drafter, 1, 2)
        teach(drafter, 3, 4, 5)
    draft, same = tree(asked, after=(9, 3)), tree(there)
    assert draft.after == (9, 3) and same.after == ()
    assert (draft.tokens, draft.parents) == (same.tokens, same.parents)
    assert asked.propose([Ask(0, "recycling", 4, (3, 9), 3)], never) == []


@pytest.mark.parametrize("shared", [True, False])
def test_requests_share_one_matrix_unless_told_not_to(shared: bool) -> None:
    drafter = opened(shared=shared)
    drafter.open(1, Request(1, (1,), SamplingParams(), 0))
    teach(drafter, 1, 10)
    assert bool(drafter.propose([Ask(1, "recycling", 4)], never)) is shared
    for seq in (0, 1):
        drafter.close(seq)
    drafter.open(2, Request(2, (1,), SamplingParams(), 0))
    assert bool(drafter.propose([Ask(2, "recycling", 4)], never)) is shared
    drafter.close(2)
    assert (drafter.memory() > 0) is shared


def test_what_was_learned_longest_ago_is_forgotten_first() -> None:
    drafter = opened(most=3)
    for token in (1, 2, 3, 1, 4):
        teach(drafter, token, 9)
    assert [bool(drafter.propose([Ask(0, "", 1, (t,))], never)) for t in (1, 2, 3, 4)] == [
        True,
        False,
        True,
        True,
    ]
    for _ in range(5):
        teach(drafter, 1, *np.random.default_rng(0).integers(0, 99, 3).tolist())
    assert len(tree(drafter).children(-1)) <= HELD


def test_it_knows_about_how_much_memory_it_takes() -> None:
    drafter, rng = opened(), np.random.default_rng(1)
    tracemalloc.start()
    for token in range(2000):
        ids = rng.integers(0, 150_000, (1, K))
        drafter.learn(0, [token % 1000], Top(ids, rng.normal(0.0, 1.5, (1, K))))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert drafter.memory() == pytest.approx(taken, rel=0.5)


@pytest.mark.parametrize("scores", [[[-np.inf, -np.inf]], [[0.0, -np.inf]], [[np.nan, np.nan]]])
def test_forbidden_tokens_and_broken_rows_do_no_harm(scores: list[list[float]]) -> None:
    drafter = opened()
    drafter.learn(0, [1], Top(np.array([[5, 6]]), np.array(scores)))
    drafts = drafter.propose([Ask(0, "recycling", 4, siblings=3)], never)
    assert [d.tokens for d in drafts] == ([(5,)] if np.isfinite(scores[0][0]) else [])


# How it is taught by the loop


class Learning(ToyDrafter):
    """Drafts trees at random and writes down what it is taught."""

    rows = 2

    def __init__(self, seed: int):
        super().__init__(random_trees(6, seed))
        self.taught: list[tuple[list[int], Top]] = []
        self.anchors: list[int] = []

    def learn(self, seq: SeqId, tokens: Sequence[int], best: Top) -> None:
        self.anchors.append(self.texts[seq][-1])  # the text as it was before
        self.taught.append((list(tokens), best))


@pytest.mark.parametrize("seed", range(4))
def test_every_verified_row_is_told_those_of_the_text_first(seed: int) -> None:
    target, drafter = Target(), Learning(seed)
    done = run(parts(ToyEngine(target), [drafter]), request(SamplingParams(max_new_tokens=40)))
    results = [r for r in done.results if not r.prefill]
    assert len(drafter.taught) == len(results)
    branched = 0
    for (tokens, best), anchor, result in zip(
        drafter.taught, drafter.anchors, results, strict=True
    ):
        draft = result.plan.draft
        assert sorted(tokens) == sorted([anchor, *(draft.tokens if draft else ())])
        assert best.ids.shape == (len(tokens), 2)
        kept = len(result.committed)
        assert tokens[:kept] == [anchor, *result.committed[: kept - 1]]
        assert best.ids[:kept, 0].tolist() == list(result.committed)  # greedy
        for i, token in enumerate(tokens[kept:], kept):  # rejected rows are this token's own, too
            assert best.ids[i].tolist() in np.argsort(-target.table[:, token])[:, :2].tolist()
        branched += kept < len(tokens)
    assert branched > 5


def test_without_a_learner_no_row_is_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Top:
        raise AssertionError("looked through")

    monkeypatch.setattr(ToyRows, "top", fail)
    asked = request(SamplingParams(max_new_tokens=10))
    run(parts(ToyEngine(Target()), [ToyDrafter(random_trees(6, 1))]), asked)
    with pytest.raises(AssertionError, match="looked through"):
        run(parts(ToyEngine(Target()), [Learning(1)]), asked)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_it_foretells_a_target_whose_next_token_the_last_one_decides(temperature: float) -> None:
    """Where the last token says all, what was seen once is known; where it says nothing, not."""
    accepted = {}
    for kind in ("told", "untold"):
        target = Target(size=30, spread=4.0)
        if kind == "told":
            target.table[:] = target.table[0]
        drafter = Recycling()
        params = SamplingParams(max_new_tokens=200, temperature=temperature, seed=1)
        done = run(parts(ToyEngine(target), [drafter]), request(params))
        plain = run(parts(ToyEngine(target)), request(params))
        assert done.tokens == plain.tokens
        accepted[kind] = sum(r.accepted for r in done.results)
    assert accepted["told"] > 1.3 * accepted["untold"] > 0
    assert accepted["told"] > 100
