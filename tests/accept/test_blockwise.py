"""`block` by exact enumeration: its law is the target's, and it never accepts less."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from draftwise.accept import RULES, blockwise
from draftwise.accept.base import NodeRows, mass
from draftwise.accept.blockwise import _judged
from draftwise.core import POINT, Dense, Draft, FloatRow, Q, SamplingParams, Sparse
from draftwise.sampling import Sampler
from toy import PROMPT, Guess, Target, ToyRows, exact

SIZE, DEPTH = 4, 3
WARM = SamplingParams(temperature=1.0)
COOL = SamplingParams(temperature=0.5, top_k=3)

# (tokens drawn so far, distribution of the next) -> does the draft end here?
Ends = Callable[[Sequence[int], FloatRow], bool]


def never(tokens: Sequence[int], q: FloatRow) -> bool:
    return False


def drafts(
    other: Target, params: SamplingParams, ends: Ends = never, point: Sequence[int] = ()
) -> list[tuple[float, Draft]]:
    """Every draft with its chance; nodes at depths in `point` are the argmax, and say so."""
    sampler = Sampler(params, 0)
    found: list[tuple[float, Draft]] = []

    def grow(chance: float, tokens: list[int], said: list[Q]) -> None:
        q = sampler.probabilities(other.logits([*PROMPT, *tokens]), [])
        if len(tokens) == DEPTH or ends(tokens, q):
            found.append((chance, Guess(tokens, None, said).draft(0, "toy")))
        elif len(tokens) in point:
            grow(chance, [*tokens, int(q.argmax())], [*said, POINT])
        else:
            ids = np.flatnonzero(q)
            mine: Q = Sparse(ids, q[ids]) if len(tokens) % 2 else Dense(q)
            for token in ids.tolist():
                grow(chance * float(q[token]), [*tokens, token], [*said, mine])

    grow(1.0, [], [])
    assert sum(chance for chance, _ in found) == pytest.approx(1.0)
    return found


def rows_of(target: Target, draft: Draft) -> NodeRows:
    paths = [[*PROMPT, *draft.tokens[:i]] for i in range(len(draft.tokens) + 1)]
    rows = ToyRows(target, paths)
    return NodeRows(rows.argmax, rows.row)


def law(target: Target, params: SamplingParams, all_: list[tuple[float, Draft]]) -> FloatRow:
    """The probability of every text of DEPTH + 1 tokens, by the rule's own numbers; what is left
    after the bonus comes from the target."""
    sampler = Sampler(params, 0, PROMPT)
    out = np.zeros((SIZE,) * (DEPTH + 1))
    for chance, draft in all_:
        chances, left = _judged(draft, rows_of(target, draft), sampler, [])
        later = 1.0
        for i in reversed(range(len(chances))):
            here = chance * later * (chances[i] if i else 1.0)
            later *= 1.0 - chances[i]
            if here <= 0:
                continue
            for token, share in enumerate(left[i] / left[i].sum()):
                begun = (*draft.tokens[:i], token)
                rest = DEPTH + 1 - len(begun)
                tail = exact(target, params, [*PROMPT, *begun], rest) if rest else 1.0
                out[begun] += here * share * tail
    return out


def far(target: Target, params: SamplingParams, all_: list[tuple[float, Draft]]) -> float:
    """The largest error of any text's probability."""
    wanted = exact(target, params, list(PROMPT), DEPTH + 1)
    return float(np.abs(law(target, params, all_) - wanted).max())


CASES = {
    "far": (WARM, WARM, never, ()),
    "cut in the target": (COOL, WARM, never, ()),
    "cut in both": (COOL, COOL, never, ()),
    "points": (WARM, WARM, never, (0, 1, 2)),
    "mixed": (WARM, WARM, never, (1,)),
    "ends by q": (WARM, WARM, lambda tokens, q: bool(q.max() > 0.6), ()),
    "ends by what was drawn before": (WARM, WARM, lambda tokens, q: 2 in tokens[-1:], ()),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_law_of_the_text_is_the_targets(case: str, seed: int) -> None:
    params, drawn, ends, point = CASES[case]
    target, other = Target(SIZE, seed), Target(SIZE, seed + 10)
    assert far(target, params, drafts(other, drawn, ends, point)) < 1e-12


def test_a_draft_from_the_targets_own_law_is_accepted_whole() -> None:
    target = Target(SIZE, 3)
    sampler = Sampler(WARM, 0, PROMPT)
    for _, draft in drafts(target, WARM):
        chances, _ = _judged(draft, rows_of(target, draft), sampler, [])
        assert chances[-1] == pytest.approx(1.0)


def accepted(chances: Sequence[float]) -> float:
    """Mean accepted tokens: the largest i with u_i <= h_i."""
    mean, later = 0.0, 1.0
    for i in reversed(range(1, len(chances))):
        mean += i * chances[i] * later
        later *= 1.0 - chances[i]
    return mean


def test_it_never_accepts_less_than_rejection() -> None:
    gained = 0
    for seed in range(25):
        target, other = Target(SIZE, seed), Target(SIZE, seed + 100)
        sampler = Sampler(WARM, 0, PROMPT)
        block = token = 0.0
        for chance, draft in drafts(other, WARM):
            rows = rows_of(target, draft)
            block += chance * accepted(_judged(draft, rows, sampler, [])[0])
            reach = 1.0
            for i, (x, q) in enumerate(zip(draft.tokens, draft.q, strict=True)):
                p = sampler.probabilities(rows.row(i - 1), list(draft.tokens[:i]))
                reach *= min(1.0, float(p[x]) / mass(q, x))
                token += chance * reach
        assert block >= token - 1e-12
        gained += block > token + 1e-3
    assert gained == 25, "the targets are too easy to tell the rules apart"


# ... and the enumeration sees what is wrong


def as_the_last(
    draft: Draft, rows: NodeRows, sampler: Sampler, generated: list[int]
) -> tuple[list[float], list[FloatRow]]:
    """h_i = p_i for all."""
    chances, left = blockwise._judged(draft, rows, sampler, generated)
    ends = [draft.head(i) for i in range(1, len(chances))]
    return [1.0, *(blockwise._judged(d, rows, sampler, generated)[0][-1] for d in ends)], left


@pytest.mark.parametrize("wrong", ["every node as the last", "no residual", "peeks"])
def test_a_wrong_rule_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, other = Target(SIZE, 0), Target(SIZE, 10)
    all_ = drafts(other, WARM)
    if wrong == "every node as the last":
        monkeypatch.setitem(globals(), "_judged", as_the_last)
    elif wrong == "no residual":
        monkeypatch.setattr(blockwise, "without", lambda p, q, token: None)
    else:  # a node is dropped for its own draw
        all_ = [(c, d.head(2) if d.tokens[2] == 1 else d) for c, d in all_]
    assert far(target, WARM, all_) > 1e-3


# what it reads, and when it leaves the judging to others


def test_rows_behind_a_hopeless_node_are_not_processed() -> None:
    target = Target(SIZE, 0)
    params = SamplingParams(temperature=1.0, top_k=1)
    best = int(target.logits(PROMPT).argmax())
    tokens = [best, 0, 0, 0]
    tokens[1] = (int(target.logits([*PROMPT, best]).argmax()) + 1) % SIZE
    rows = ToyRows(target, [[*PROMPT, *tokens[:i]] for i in range(5)])
    draft = Guess(tokens).draft(0, "toy")
    walked = list(
        RULES["block"](draft, NodeRows(rows.argmax, rows.row), Sampler(params, 1, PROMPT), [])
    )
    assert [c.node for c in walked] == [0, -1] and rows.read == [0, 1]


def test_a_tree_is_judged_as_by_rejection() -> None:
    target = Target(SIZE, 0)
    draft = Guess([0, 1, 2], [-1, -1, 0]).draft(0, "toy")
    paths = [[*PROMPT], [*PROMPT, 0], [*PROMPT, 1], [*PROMPT, 0, 2]]
    for seed in range(50):
        texts = []
        for rule in ("block", "rejection"):
            rows = ToyRows(target, paths)
            sampler = Sampler(WARM, seed, PROMPT)
            texts.append(list(RULES[rule](draft, NodeRows(rows.argmax, rows.row), sampler, [])))
        assert texts[0] == texts[1]


def test_every_subset_of_lengths_that_ends_by_the_past_is_lossless() -> None:
    """Whether a draft goes on may depend on any set of first tokens."""
    target, other = Target(SIZE, 4), Target(SIZE, 14)
    for n in range(SIZE + 1):
        for ending in itertools.combinations(range(SIZE), n):

            def ends(tokens: Sequence[int], q: FloatRow, ending: Sequence[int] = ending) -> bool:
                return len(tokens) == 1 and tokens[0] in ending

            assert far(target, WARM, drafts(other, WARM, ends)) < 1e-12
