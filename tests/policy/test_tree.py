"""Merged drafts: the tree, its order, and the plan that is the best of all plans."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core import POINT, Draft, Features, State, chain
from draftwise.engines.base import Shape
from draftwise.policy import Costs
from draftwise.policy.cost import CostCurve
from draftwise.policy.goodput import Auto
from draftwise.policy.tree import LESSER, SUREST, Companies, Tree

Path = tuple[int, ...]


@st.composite
def drafts(draw, most=4, trees=True):
    """Up to three small drafts over few tokens, so that they share nodes and part again."""
    made = []
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)):
        n = draw(st.integers(1, most))
        parents, tokens = [], []
        for i in range(n):
            parent = draw(st.integers(-1, i - 1)) if trees else i - 1
            taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            free = [t for t in range(4) if t not in taken]
            if not free:
                break
            parents.append(parent)
            tokens.append(draw(st.sampled_from(free)))
        n = len(tokens)
        features = tuple(Features(match=draw(st.integers(1, 9))) for _ in range(n))
        made.append(Draft(0, name, tuple(tokens), tuple(parents), features, (POINT,) * n))
    return made


estimates = st.lists(st.floats(0.02, 0.98), min_size=30, max_size=30)


def estimator(table):
    return lambda draft, node: table[(ord(draft.drafter) - ord("a")) * 10 + node]


def merged(made, estimate) -> dict[Path, float]:
    """Survival of every node by the tokens on its path, worked out one by one."""
    found: dict[Path, float] = {}

    def expand(path, survival, members):
        children: dict[int, list[tuple[float, Draft, int]]] = {}
        for draft, node in members:
            for child in draft.children(node):
                children.setdefault(draft.tokens[child], []).append(
                    (estimate(draft, child), draft, child)
                )
        left = SUREST
        ranked = sorted(children.items(), key=lambda item: -max(b for b, *_ in item[1]))
        for place, (token, own) in enumerate(ranked):
            b = max(b for b, *_ in own)
            chance = min(b if place == 0 else b * LESSER, left)
            left -= chance
            found[(*path, token)] = survival * chance
            expand((*path, token), survival * chance, [(d, c) for _, d, c in own])

    expand((), 1.0, [(draft, -1) for draft in made])
    return found


def paths_of(tree: Tree) -> list[Path]:
    paths: list[Path] = []
    for node in tree.nodes:
        paths.append((*(paths[node.parent] if node.parent >= 0 else ()), node.token))
    return paths


def closed(paths) -> bool:
    return all(path[:-1] in paths or len(path) == 1 for path in paths)


@settings(max_examples=150, deadline=None)
@given(made=drafts(), table=estimates)
def test_nodes_are_those_of_the_drafts_with_the_survival_that_the_formula_says(made, table):
    tree = Tree(made, estimator(table), Companies(), 64, 0.0)
    expected = merged(made, estimator(table))
    assert len(set(paths_of(tree))) == len(tree.nodes) == len(expected)
    for path, node in zip(paths_of(tree), tree.nodes, strict=True):
        assert node.survival == pytest.approx(expected[path], abs=1e-12)
        assert node.depth == len(path)


@settings(max_examples=150, deadline=None)
@given(made=drafts(), table=estimates)
def test_every_beginning_of_the_nodes_is_the_best_tree_of_its_size(made, table):
    tree = Tree(made, estimator(table), Companies(), 64, 0.0)
    survival = merged(made, estimator(table))
    for n in range(1, min(len(tree.nodes), 4) + 1):
        best = max(
            sum(survival[p] for p in some)
            for some in itertools.combinations(survival, n)
            if closed(some)
        )
        assert sum(node.survival for node in tree.nodes[:n]) == pytest.approx(best, abs=1e-12)
        draft = tree.draft(0, n)
        assert all(-1 <= parent < i for i, parent in enumerate(draft.parents))
        assert len(draft.sources) == len(draft.survival) == n


def auto_for(table, prices, trees):
    points = [(Shape(w + 1, 0), price) for w, price in enumerate(prices)]
    auto = Auto(Costs(CostCurve(points), {}, ("a", "b", "c"), trees=trees))
    auto.acceptance.estimator = lambda seq: estimator(table)  # type: ignore[method-assign]
    auto.open(0)
    auto.guard.plain = 1e9  # the meters have their own tests
    auto.guard.allows_request = lambda seq, risk, plain: True  # type: ignore[method-assign]
    return auto


prices = st.lists(st.floats(0.001, 1.0), min_size=9, max_size=9)


@settings(max_examples=200, deadline=None)
@given(made=drafts(most=3), table=estimates, prices=prices, wanted=st.integers(1, 6))
def test_the_plan_is_that_of_brute_force_over_all_trees(made, table, prices, wanted):
    auto = auto_for(table, prices, trees=True)
    state = State(0, 5, wanted, tuple(made))
    auto.choose([state])
    plan = auto.select([(state, made)])[0]

    survival = {p: s for p, s in merged(made, estimator(table)).items() if len(p) < wanted}
    row = auto.costs.target.row(65, 5)
    rho = auto.price(0, 5)
    gains = [1 - rho * row[1]]
    for n in range(1, min(len(survival), wanted - 1) + 1):
        for some in itertools.combinations(survival, n):
            if closed(some):
                gains.append(1 + sum(survival[p] for p in some) - rho * row[1 + n])
    n = len(plan.draft.tokens) if plan.draft else 0
    chosen = 1 + sum(plan.draft.survival if plan.draft else ()) - rho * row[1 + n]
    # Nodes of next to no survival are left out, whatever they would cost.
    assert chosen == pytest.approx(max(gains), abs=0.01 * 9 + 1e-9) and chosen <= max(gains) + 1e-9
    if min(survival.values(), default=1.0) > 0.01:
        assert chosen == pytest.approx(max(gains), abs=1e-9)
    assert plan.width >= 1 + n


@settings(max_examples=200, deadline=None)
@given(made=drafts(trees=False), table=estimates, prices=prices, wanted=st.integers(1, 6))
def test_the_plan_is_that_of_brute_force_over_all_chains(made, table, prices, wanted):
    auto = auto_for(table, prices, trees=False)
    state = State(0, 5, wanted, tuple(made))
    auto.choose([state])
    plan = auto.select([(state, made)])[0]

    survival = merged(made, estimator(table))
    row, rho = auto.costs.target.row(65, 5), auto.price(0, 5)
    gains = [1 - rho * row[1]]
    for path in survival:
        if len(path) < wanted and min(survival[path[:k]] for k in range(1, len(path) + 1)) > 0.01:
            tokens = 1 + sum(survival[path[:k]] for k in range(1, len(path) + 1))
            gains.append(tokens - rho * row[1 + len(path)])
    n = len(plan.draft.tokens) if plan.draft else 0
    assert plan.draft is None or plan.draft.is_chain
    chosen = 1 + sum(plan.draft.survival if plan.draft else ()) - rho * row[1 + n]
    assert chosen == pytest.approx(max(gains), abs=1e-9)


def test_a_continuation_hangs_from_the_end_of_the_main_chain():
    features = [Features(prob=0.9)] * 2
    model = Draft(0, "model", (1, 7, 2), (-1, -1, 0), (*features, Features(prob=0.9)), (POINT,) * 3)
    tail = chain(0, "suffix", (3, 4), [Features(match=5)] * 2, after=(1, 2))
    stray = chain(0, "lookup", (8,), [Features(match=5)], after=(9,))
    tree = Tree([model, tail, stray], lambda draft, node: 0.9, Companies(), 64, 0.0)
    assert {(1,), (7,), (1, 2), (1, 2, 3), (1, 2, 3, 4)} == set(paths_of(tree))
    assert tree.draft(0, 5).sources.count("suffix") == 2


def test_company_teaches_that_both_rivals_cannot_be_right():
    companies = Companies()
    a, b = (chain(0, name, (t,), [Features(match=3)]) for name, t in (("a", 1), ("b", 2)))

    def chances():
        tree = Tree([a, b], lambda draft, node: 0.8 if draft is a else 0.7, companies, 64, 0.0)
        return [node.survival for node in tree.nodes], tree

    before, _ = chances()
    assert before[0] == pytest.approx(0.8) and before[1] < 0.3
    for i in range(200):  # where they differ, the one that looks worse is right three times in four
        chances()[1].learn(companies, [1] if i % 4 == 0 else [2])
    after, _ = chances()
    assert max(after) == pytest.approx(0.75, abs=0.1) and min(after) == pytest.approx(0.25, abs=0.1)
