"""Several sequences in one forward, against brute force over all plans."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core import DEEPEST, Features, State, chain
from draftwise.engines.base import Shape
from draftwise.policy import Costs
from draftwise.policy.cost import CostCurve
from draftwise.policy.goodput import Auto
from draftwise.policy.pool import share

rows = st.lists(st.floats(0.0, 1.0), max_size=4).map(lambda row: sorted(row, reverse=True))
costs = st.lists(st.floats(0.0, 2.0), min_size=40, max_size=40)


@settings(max_examples=200, deadline=None)
@given(
    survivals=st.lists(rows, min_size=1, max_size=3),
    cost=costs,
    rho=st.floats(0.1, 5.0),
    padded=st.booleans(),
    data=st.data(),
)
def test_the_shares_are_those_of_brute_force(survivals, cost, rho, padded, data):
    least = [data.draw(st.sampled_from([0, 0, len(row)])) for row in survivals]

    def gain(counts):
        rows = len(counts) * (1 + max(counts)) if padded else len(counts) + sum(counts)
        tokens = sum(sum(row[:n]) for row, n in zip(survivals, counts, strict=True))
        return tokens - rho * cost[rows]

    ranges = [range(m, len(row) + 1) for row, m in zip(survivals, least, strict=True)]
    best = max(gain(counts) for counts in itertools.product(*ranges))
    chosen = share(survivals, least, rho, cost.__getitem__, padded)
    assert all(m <= n <= len(s) for m, n, s in zip(least, chosen, survivals, strict=True))
    assert gain(chosen) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("padded", [False, True])
def test_auto_gives_the_rows_to_the_sequence_that_copies(padded):
    curve = CostCurve([(Shape(w, 0), 0.02 + 0.004 * w) for w in (1, 2, 4, 8, 16, 32, 64)])
    auto = Auto(Costs(curve, {}, ("g",), trees=True, padded=padded))
    states, batch = [], []
    for seq, match in ((0, 30), (1, 1)):
        auto.open(seq)
        draft = chain(seq, "g", range(12), [Features(match=match)] * 12)
        states.append(State(seq, 50, 40, (draft,)))
        batch.append((states[-1], [draft]))
    auto.choose(states)
    copying, other = auto.select(batch)
    assert [copying.seq, other.seq] == [0, 1]
    assert copying.draft is not None and len(copying.draft.tokens) >= 8
    if not padded:  # where the widest is paid for by all, a row more is free
        assert other.draft is None or len(other.draft.tokens) <= 2
    assert max(copying.width, other.width) <= 1 + DEEPEST
