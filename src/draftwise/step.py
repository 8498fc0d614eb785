"""One step of the loop, for one sequence or several: propose, verify, accept, commit, learn.

    drafts = what every drafter that is asked goes on with     (propose)
    plans  = the policy's choice of nodes, for all together
    rows   = one forward over each anchor and its plan's nodes (verify)
    tokens = the acceptance rule's walk through a sequence's rows, cut at a stop   (accept)
    the engine keeps the walked rows, everyone is told         (commit, learn)

The anchor is the last committed token: its row is not in the cache yet. Plain decoding is this
step with empty plans, and a single sequence is a batch of one, so there is one code path; a text
cannot depend on its plans as long as its rule does not (accept/), nor on who shares its forwards,
since each has rows, noise and processors of its own.

The sequences share a step's seconds: each result carries all of them, because that is how long
each of them took. `batch` says among how many, so that a curve learns a forward once.
"""

from __future__ import annotations

from collections.abc import Sequence

from .accept import Choice
from .core import Ask, Draft, SeqId, State, StepPlan, StepResult
from .drafters import teach
from .run import Parts, Run

Drafts = dict[SeqId, list[Draft]]


def step(parts: Parts, runs: Sequence[Run], unpaid: float = 0.0) -> tuple[list[StepResult], float]:
    """One result for each run, and the seconds that learning from them took: these need the
    results, so they are charged to the next step, as `unpaid`."""
    clock, policy = parts.clock, parts.policy
    started = clock() - unpaid
    for run in runs:
        run.meet()
    free = propose(parts, [ask for run in runs for ask in run.asks(len(runs))])
    states = [run.state(tuple(free.get(run.seq, ()))) for run in runs]
    asks = policy.choose(states)
    before_draft = clock()
    own = propose(parts, asks)
    drafted = clock()
    tails = continued(parts, runs, own)
    drafts = [[*state.free, *own.get(state.seq, ()), *tails.get(state.seq, ())] for state in states]
    plans = policy.select(list(zip(states, drafts, strict=True)))

    before_verify = clock()
    work = [run.work(plan) for run, plan in zip(runs, plans, strict=True)]
    found = parts.engine.forward(work)
    for run, rows in zip(runs, found, strict=True):
        if run.sampler.plain_argmax:
            rows.argmax()  # waits for the device, so that the forward's seconds are its own
    verified = clock()

    chosen = [
        run.accept(plan.draft, rows) for run, plan, rows in zip(runs, plans, found, strict=True)
    ]
    before_commit = clock()
    for run, choices in zip(runs, chosen, strict=True):
        parts.engine.commit(run.seq, (0, *(c.node + 1 for c in choices if c.node >= 0)))
    after_commit = clock()
    for run, verify, choices, rows in zip(runs, work, chosen, found, strict=True):
        kept = (0, *(c.node + 1 for c in choices if c.node >= 0))
        teach(parts.drafters.values(), run.seq, verify.tokens, kept, rows)
        for drafter in parts.drafters.values():
            drafter.observe(run.seq, tuple(c.token for c in choices))
    drafting = drafted - before_draft if asks else 0.0
    verifying = verified - before_verify + after_commit - before_commit
    seconds = (drafting, verifying, clock() - started - drafting - verifying)
    first: dict[SeqId, Ask] = {}
    for ask in asks:
        first.setdefault(ask.seq, ask)
    results = [
        _result(*what, first.get(what[0].seq), seconds, len(runs))
        for what in zip(runs, states, drafts, plans, chosen, strict=True)
    ]
    learning = clock()
    policy.learn(results)
    return results, clock() - learning


def _result(
    run: Run,
    state: State,
    drafts: Sequence[Draft],
    plan: StepPlan,
    choices: Sequence[Choice],
    ask: Ask | None,
    seconds: tuple[float, float, float],
    batch: int,
) -> StepResult:
    path = tuple(c.node for c in choices if c.node >= 0)
    return StepResult(
        run.seq,
        plan,
        state.context,
        tuple(c.token for c in choices),
        len(path),
        tuple(drafts),
        ask.drafter if ask else None,
        state.stale[ask.drafter] if ask else 0,
        *seconds,
        finish=run.finish,
        path=path,
        spent=sum(c.spent for c in choices),
        strays=tuple(c.node for c in choices if c.loosened),
        batch=batch,
        unfed=state.unfed,
    )


def propose(parts: Parts, asks: Sequence[Ask]) -> Drafts:
    """Every drafter answers all that it is asked at once: one with a model may share forwards."""
    by_drafter: dict[str, list[Ask]] = {}
    for ask in asks:
        by_drafter.setdefault(ask.drafter, []).append(ask)
    drafts: Drafts = {}
    for name, some in by_drafter.items():
        for draft in parts.drafters[name].propose(some, parts.policy.go):
            if _possible(parts, draft):
                drafts.setdefault(draft.seq, []).append(draft)
    return drafts


def _possible(parts: Parts, draft: Draft) -> bool:
    """An id that the target does not know would crash its forward. A draft that was drawn is
    not looked at: leaving it out for its draw would shift the distribution."""
    size = parts.engine.caps.vocabulary
    return not draft.points or all(0 <= token < size for token in draft.tokens)


def continued(parts: Parts, runs: Sequence[Run], own: Drafts) -> Drafts:
    """How retrieval drafters go on from the main chains of a model's drafts."""
    asks = [ask for run in runs for draft in own.get(run.seq, ()) for ask in run.continuing(draft)]
    asked = {(a.seq, a.after) for a in asks}
    # A drafter that knows no `after` goes on from the text.
    return {
        seq: [draft for draft in drafts if (seq, draft.after) in asked]
        for seq, drafts in propose(parts, asks).items()
    }
