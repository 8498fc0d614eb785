"""`block`: a chain is judged as a whole, and no lossless rule without more drafts accepts more.

    p_0 = 1,  p_i = min(p_{i-1} · P(x_i) / Q(x_i), 1)
    R_i(x) = max(p_i · P(x | x_1..i) - Q(x | x_1..i), 0),  S_i = Σ_x R_i(x)
    h_i = S_i / (S_i + 1 - p_i) for i < n,  h_n = p_n
    accepted = the largest i with u_i ≤ h_i, else 0;  bonus ~ norm(R_i), or P after the last node

The chance that at least i tokens are accepted, given x_1..i, is p_i: at n by h_n, and before it
h_i + (1 - h_i) · Σ_x min(p_i P, Q)(x) = p_i, since that sum is p_i - S_i. Under `rejection` it is
the product of min(P/Q, 1), which is never larger. So x_1..i comes with Q(x_1..i) · p_i, and its
successor y with Q(x_1..i) · (min(p_i P, Q)(y) + R_i(y)) = Q(x_1..i) · p_i · P(y): the target's law.
Drafts may end where they like, as long as no node is dropped for its draw (arXiv 2403.10444).

All rows are needed before anything is decided. A user's processor must not see a rejected node, and
a tree has no order: both are left to `rejection`. Greedy leaves nothing to chance: `coupled`.
Cost: a processed row for every node, however many are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core import Draft
from ..sampling import ACCEPT, RESIDUAL, Sampler, key, uniform
from .base import Choice, Mass, NodeRows, draw, mass, without
from .tokenwise import coupled, rejection


def block(
    draft: Draft | None, rows: NodeRows, sampler: Sampler, generated: list[int]
) -> Iterator[Choice]:
    if sampler.params.greedy:
        yield from coupled(draft, rows, sampler, generated)
        return
    if draft is None or not draft.is_chain or sampler.shows_rows:
        yield from rejection(draft, rows, sampler, generated)
        return
    chances, left = _judged(draft, rows, sampler, generated)
    start = len(generated)
    # Keyed by where the block begins: uniforms of rejected nodes are known from then on, and their
    # indices will be judged again.
    draws = key(sampler.seed, start, ACCEPT)
    accepted = max(i for i, h in enumerate(chances) if i == 0 or uniform(draws, i) <= h)
    for i in range(accepted):
        yield Choice(draft.tokens[i], i)
    yield Choice(draw(left[accepted], key(sampler.seed, start + accepted, RESIDUAL)), -1)


def _judged(
    draft: Draft, rows: NodeRows, sampler: Sampler, generated: list[int]
) -> tuple[list[float], list[Mass]]:
    """(h_i, what the bonus is drawn from after i accepted tokens) for i = 0, 1, ..., up to where
    nothing can be accepted any more."""
    chances: list[float] = []
    left: list[Mass] = []
    reach = 1.0  # p_i
    for i, (token, q) in enumerate(zip(draft.tokens, draft.q, strict=True)):
        p = sampler.probabilities(rows.row(i - 1), [*generated, *draft.tokens[:i]])
        residual = reach * p
        without(residual, q, token)
        total = float(residual.sum())
        # Nothing is left at reach 1 where P = Q: the rest of the draft is as good as the bonus.
        chances.append(total / (total + (1.0 - reach)) if total > 0 else float(reach == 1.0))
        left.append(residual if total > 0 else p)
        said = mass(q, token)
        reach = min(reach * float(p[token]) / said, 1.0) if said > 0 else 0.0
        if reach == 0.0:
            return chances, left
    chances.append(reach)
    left.append(sampler.probabilities(rows.row(len(draft.tokens) - 1), [*generated, *draft.tokens]))
    return chances, left
