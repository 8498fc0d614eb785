"""Rules with loss: what they accept is what they say, and a budget is never overspent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.accept import RULES, Choice, NodeRows, Rule, rule_of
from draftwise.accept.loosen import SAVING, Budget, brings
from draftwise.core import Draft, FloatRow, SamplingParams
from draftwise.policy.acceptance import Acceptance
from draftwise.sampling import Sampler, gumbel, key
from toy import (
    PROMPT,
    Guess,
    Guesser,
    Target,
    ToyDrafter,
    ToyEngine,
    ToyRows,
    best_tree,
    distribution,
    parts,
    random_trees,
    request,
    run,
    text_of,
)

SIZE = 6
GREEDY = SamplingParams(max_new_tokens=40)
WARM = SamplingParams(temperature=0.8, max_new_tokens=40, seed=1)


def steps(
    rule: Rule, target: Target, guess: Guesser, sampler: Sampler, n: int, survival: float = 0.6
) -> list[list[Choice]]:
    """The rule over n tokens, step by step; a node's survival is `survival` per level."""
    generated: list[int] = []
    taken: list[list[Choice]] = []
    while len(generated) < n:
        text = [*PROMPT, *generated]
        draft = guess(generated, text, n - len(generated)).draft(0, "toy")
        paths, chances = [text], [1.0]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            paths.append([*paths[parent + 1], token])
            chances.append(chances[parent + 1] * survival)
        draft = draft.head(len(draft.tokens), chances[1:])
        rows = ToyRows(target, paths)
        step = list(rule(draft, NodeRows(rows.argmax, rows.row), sampler, generated))
        generated = [*generated, *(c.token for c in step)]
        taken.append(step)
    return taken


def perturbed(target: Target, params: SamplingParams, seed: int, text: Sequence[int]) -> FloatRow:
    row = target.logits([*PROMPT, *text]).astype(np.float64)
    if params.greedy:
        return row
    return row / params.temperature + gumbel(key(seed, len(text)), len(row))


ALL: dict[str, Any] = {
    "typical": lambda: RULES["typical"],
    "topk": lambda: RULES["topk"],
    "budget": lambda: Budget(0.4),
}


@given(
    rule=st.sampled_from(sorted(ALL)),
    table=st.integers(0, 2**32),
    warm=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_what_was_given_up_is_what_is_said(rule: str, table: int, warm: bool, seed: int) -> None:
    target, params = Target(SIZE, table), WARM if warm else GREEDY
    sampler = Sampler(params, seed, PROMPT)
    text: list[int] = []
    for step in steps(ALL[rule](), target, random_trees(SIZE, seed), sampler, 30):
        for choice in step:
            scores = perturbed(target, params, seed, text)
            assert choice.loosened == (choice.token != int(scores.argmax()))
            assert choice.spent == pytest.approx(scores.max() - scores[choice.token], abs=1e-5)
            assert choice.node >= 0 or not choice.loosened
            text.append(choice.token)


def test_they_do_loosen() -> None:
    target = Target(SIZE, 2)
    for params in (WARM, GREEDY):
        for rule in ALL.values():
            sampler = Sampler(params, 1, PROMPT)
            taken = steps(rule(), target, random_trees(SIZE, 0), sampler, 200)
            assert sum(c.loosened for step in taken for c in step) > 5


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_typical_and_topk_by_their_definition(params: SamplingParams) -> None:
    """One node, of every token, under rows of every kind: accepted as the formula says."""
    warm = SamplingParams(temperature=params.temperature or 1.0)
    seen: set[tuple[str, bool]] = set()
    for seed in range(60):
        target = Target(12, seed, spread=0.5 + 0.1 * (seed % 30))
        row = target.logits(PROMPT)
        p = distribution(row, warm)
        entropy = -float((p * np.log(p)).sum())
        best = set(np.argsort(-row)[:3].tolist())
        sampler = Sampler(params, seed, PROMPT)
        own = int(perturbed(target, params, seed, []).argmax())
        for x in range(12):
            allowed = {
                "typical": bool(p[x] > min(0.09, 0.3 * np.exp(-entropy))),
                "topk": x in best,
            }
            rows = ToyRows(target, [PROMPT, [*PROMPT, x]])
            for name, allows in allowed.items():
                draft = Guess([x]).draft(0, "toy")
                lazy = NodeRows(rows.argmax, rows.row)
                first = next(RULES[name](draft, lazy, sampler, []))
                assert (first.token == x) == (allows or x == own)
                seen.add((name, allows))
    assert len(seen) == 4


@given(
    options=st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 1.5]), "min_new_tokens": st.integers(0, 12)},
        optional={"top_k": st.integers(1, 3), "top_p": st.floats(0.2, 0.9)},
    ),
    rule=st.sampled_from(["typical", "topk", "budget"]),
    table=st.integers(0, 2**32),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_what_is_forbidden_is_never_accepted(
    options: dict[str, Any], rule: str, table: int, seed: int
) -> None:
    """Not before min_new_tokens, not outside top-k and top-p; the end of the text is the target's
    own choice alone."""
    target, eos = Target(SIZE, table), frozenset([2])
    params = SamplingParams(max_new_tokens=25, seed=seed, **options)
    sampler = Sampler(params, seed, PROMPT, eos)
    text: list[int] = []
    chosen = Budget(2.0) if rule == "budget" else RULES[rule]
    for step in steps(chosen, target, random_trees(SIZE, seed), sampler, 25):
        for choice in step:
            row = target.logits([*PROMPT, *text])
            support, scores = sampler.support(row, text)
            allowed = range(support) if isinstance(support, int) else support.tolist()
            assert choice.token in allowed
            assert np.isfinite(scores[list(allowed).index(choice.token)])
            own = sampler.token(row, text)
            assert not choice.loosened or (own not in eos and choice.token not in eos)
            text.append(choice.token)


@given(
    budget=st.floats(1e-3, 2.0),
    warm=st.booleans(),
    table=st.integers(0, 2**32),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_the_budget_holds_at_every_token(budget: float, warm: bool, table: int, seed: int) -> None:
    sampler = Sampler(WARM if warm else GREEDY, seed, PROMPT)
    rule, spent, tokens = Budget(budget), 0.0, 0
    for step in steps(rule, Target(SIZE, table), random_trees(SIZE, seed), sampler, 60):
        for choice in step:
            tokens, spent = tokens + 1, spent + choice.spent
            assert spent <= budget * tokens
    assert rule.spent == pytest.approx(spent)


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_no_budget_is_the_coupled_text_and_a_small_one_buys_nothing_dear(
    params: SamplingParams,
) -> None:
    target = Target(SIZE, 3)
    plain = text_of(target, [], request(params))
    made = [ToyDrafter(best_tree(Target(SIZE, 4)))]
    assert rule_of(request(params)) is RULES["coupled"]
    assert text_of(target, made, request(params)) == plain
    loose = run(parts(ToyEngine(target), made), request(params, quality_budget=1.0))
    assert loose.tokens != plain
    spent = sum(r.spent for r in loose.results)
    assert 0 < spent <= 40 and sum(r.loosened for r in loose.results) > 0


def test_the_price_falls_with_every_purchase_and_recovers() -> None:
    rule = Budget(0.1)
    assert rule.price(0.0) == 0.1
    assert rule.price(0.8) == pytest.approx(0.1 + 0.8 / SAVING)
    assert rule.price(2.0) > rule.price(0.8)


def test_what_a_node_brings_is_the_survival_below_it() -> None:
    tree = Guess([5, 6, 7, 8, 9], [-1, 0, 0, 1, -1]).draft(0, "toy")
    known = tree.head(5, [0.5, 0.4, 0.05, 0.2, 0.3])
    assert brings(known, 0) == pytest.approx(1 + 0.8 + 0.1 + 0.4)
    assert brings(known, 1) == pytest.approx(1 + 0.5)
    assert brings(known, 4) == 1.0
    assert brings(tree, 0) == pytest.approx(1 + 0.5 + 0.5 + 0.25), "unknown: one half a level"
    short = Guess([5, 6, 7]).draft(0, "toy").head(3, [0.5, 0.001])
    assert brings(short, 0) == pytest.approx(1.002), "nothing is left where the list ends"


class FirstCome(Budget):
    """Buys whatever the budget still allows."""

    def _allows(self, row: Any, draft: Draft, child: int, gap: float) -> bool:
        return gap <= self.budget * (row.index + 1) - self.spent


def uneven(target: Target, right: float, seed: int) -> Guesser:
    """Chains of one to eight tokens: the target's greedy choice, or any other."""
    rng = np.random.default_rng(seed)

    def guess(generated: list[int], text: list[int], depth: int) -> Guess:
        path = list(text)
        for _ in range(rng.integers(1, 9)):
            best = int(target.logits(path).argmax())
            path.append(best if rng.random() < right else int(rng.integers(target.size)))
        return Guess(path[len(text) :])

    return guess


def test_prices_buy_more_for_a_nat_than_first_come() -> None:
    right = 0.6

    def outcome(rule: Rule) -> tuple[int, int, float]:
        tokens, forwards, spent = 0, 0, 0.0
        for seed in range(60):
            target = Target(12, seed)
            sampler = Sampler(GREEDY, 0, PROMPT)
            if isinstance(rule, Budget):
                rule.spent = 0.0
            taken = steps(rule, target, uneven(target, right, seed), sampler, 120, right)
            forwards += len(taken)
            tokens += sum(len(step) for step in taken)
            spent += sum(c.spent for step in taken for c in step)
        return tokens, forwards, spent

    tokens, forwards, _ = outcome(RULES["coupled"])
    usual = tokens / forwards
    bought: dict[str, tuple[float, float]] = {}
    for rule in (Budget(0.1), FirstCome(0.1)):
        tokens, forwards, spent = outcome(rule)
        saved = tokens / usual - forwards  # forwards that the deviations made needless
        bought[type(rule).__name__] = saved / spent, saved / tokens
    assert bought["Budget"][0] > 1.2 * bought["FirstCome"][0]
    assert bought["Budget"][1] > 0.9 * bought["FirstCome"][1], "and about as much of it"


def test_greedy_reads_a_row_only_where_no_child_is_the_choice() -> None:
    target = Target(SIZE, 0)
    best = int(target.logits(PROMPT).argmax())
    then = int(target.logits([*PROMPT, best]).argmax())
    tokens = [best, (then + 1) % SIZE]
    rows = ToyRows(target, [[*PROMPT, *tokens[:i]] for i in range(3)])
    draft = Guess(tokens).draft(0, "toy")
    walked = Budget(1e-6)(draft, NodeRows(rows.argmax, rows.row), Sampler(GREEDY, 0, PROMPT), [])
    assert [c.token for c in walked] == [best, then]
    assert rows.read == [1]


def test_acceptance_learns_what_a_budget_allows() -> None:
    target, chance = Target(SIZE, 5), {}
    for budget in (0.0, 2.0):
        made = [ToyDrafter(uneven(target, 0.3, 1))]
        asked = request(SamplingParams(max_new_tokens=300), quality_budget=budget)
        acceptance = Acceptance()
        for result in run(parts(ToyEngine(target), made), asked).results:
            for draft in result.drafted:
                assert acceptance.learn(draft, result.committed) >= result.accepted
        chance[budget] = acceptance.chance(0, "toy", draft.features[0])
    assert chance[2.0] > chance[0.0] + 0.2
