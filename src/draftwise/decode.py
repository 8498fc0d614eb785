"""The loop: propose, verify, accept, commit, learn.

    prefill the prompt, and accept one token from its last row
    until a stop:
        drafts = every drafter the policy asks       (propose)
        plan   = the policy's choice of nodes
        rows   = one forward over the anchor and the plan's nodes   (verify)
        tokens = the acceptance rule's walk through rows, cut at a stop   (accept)
        the engine keeps the walked rows, everyone is told  (commit, learn)

The anchor is the last committed token: its row is not in the cache yet. Plain decoding is this
loop with an empty plan, so there is one code path, and the text cannot depend on the plan as long
as the rule does not (accept/). Every exit, by a stop, an error or a closed generator, closes the
sequence everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from .accept import Choice, NodeRows, rule_of
from .core import DEEPEST, SIBLINGS, Ask, Draft, Request, State, StepPlan, StepResult
from .drafters import Drafter, Rehearsal, teach
from .engines.base import PREFILL_CHUNK, Engine, PrefillChunk, Rows, Verify
from .policy import Policy
from .sampling import Sampler
from .stopping import Stopper

# Most retrieval drafts fail early, and 64 nodes take 0.1 ms to write down, so a draft may be four
# times as long as the last step's tokens, at least REACH: a copy that goes well is at full length
# within two steps.
REACH = 16


@dataclass(frozen=True)
class Parts:
    """What decodes: an engine, its drafters by name, a policy, and the lock of a step's turn."""

    engine: Engine
    drafters: Mapping[str, Drafter]
    policy: Policy
    turn: AbstractContextManager[object]
    clock: Callable[[], float] = time.perf_counter


def decode(parts: Parts, request: Request, stopper: Stopper) -> Generator[StepResult, None, None]:
    """Yields a result for every chunk of the prompt, the last with the first token, and for every
    step after it. Closing the generator ends the request between two of them; other sequences are
    not affected."""
    run = _Run(parts, request, stopper)
    finished = False
    try:
        with parts.turn:
            result = run.open()
        while result.prefill and not result.committed:
            yield result
            with parts.turn:
                result = run.prefill()
        yield result
        while result.finish is None:
            with parts.turn:
                result = run.step()
            yield result
        finished = True
    except GeneratorExit:
        finished = True
        raise
    finally:
        with parts.turn:
            run.close(keep=request.reuse and finished)


class _Run:
    def __init__(self, parts: Parts, request: Request, stopper: Stopper):
        self.engine, self.policy, self.clock = parts.engine, parts.policy, parts.clock
        self.request, self.stopper, self.seq = request, stopper, request.seq
        chains = self.engine.caps.rollback == "free"
        self.drafters: dict[str, Drafter] = dict(parts.drafters) if chains else {}
        self.rule = rule_of(request)
        self.sampler = Sampler(
            request.params,
            request.seed,
            request.prompt,
            request.eos,
            request.processors,
            request.device,
        )
        self.generated: list[int] = []
        self.reach = REACH
        self.siblings = SIBLINGS if parts.engine.caps.trees else 0
        self.opened = False
        self.met = ExitStack()  # closes the policy and the drafters that were opened
        self.unpaid, self.reused = 0.0, 0
        self.unread: tuple[int, ...] = ()

    def open(self) -> StepResult:
        start = self.clock()
        self.opened = True
        self.reused = self.engine.open(self.seq, self.request.prompt)
        self.unread = self.request.prompt[self.reused :]
        opening = self.clock() - start
        result = self.prefill()
        return replace(result, verify_seconds=result.verify_seconds + opening)

    def prefill(self) -> StepResult:
        start = self.clock()
        chunk, self.unread = self.unread[:PREFILL_CHUNK], self.unread[PREFILL_CHUNK:]
        rows = self.engine.forward([PrefillChunk(self.seq, chunk)])[0]
        choices, finish = ([], None) if self.unread else self._accept(None, rows)
        return StepResult(
            self.seq,
            StepPlan(self.seq, None, 1),
            0,
            tuple(c.token for c in choices),
            0,
            verify_seconds=self.clock() - start,
            finish=finish,
            prefill=True,
            reused=self.reused,
        )

    def step(self) -> StepResult:
        started = self.clock() - self.unpaid
        if len(self.generated) == 1:
            self._meet()  # after the first token is out: drafters cost no time to first token
        state = self._look()
        asks = self.policy.choose([state])
        before_draft = self.clock()
        own = self._propose(asks)
        drafted = self.clock()
        drafts = [*state.free, *own, *self._continued(own, state.wanted)]
        plan = self.policy.select([(state, drafts)])[0]

        before_verify = self.clock()
        rows = self._verify(plan)
        if self.sampler.plain_argmax:
            rows.argmax()  # waits for the device, so that the forward's seconds are its own
        verified = self.clock()

        checked = (self.generated[-1], *(plan.draft.tokens if plan.draft else ()))
        choices, finish = self._accept(plan.draft, rows)
        committed = tuple(c.token for c in choices)
        path = [c.node for c in choices if c.node >= 0]
        before_commit = self.clock()
        kept = (0, *(node + 1 for node in path))
        self.engine.commit(self.seq, kept)
        after_commit = self.clock()
        self.reach = min(max(REACH, 4 * len(committed)), DEEPEST)
        teach(self.drafters.values(), self.seq, checked, kept, rows)
        for drafter in self.drafters.values():
            drafter.observe(self.seq, committed)
        result = StepResult(
            self.seq,
            plan,
            state.context,
            committed,
            len(path),
            tuple(drafts),
            asks[0].drafter if asks else None,
            state.stale[asks[0].drafter] if asks else 0,
            draft_seconds=drafted - before_draft if asks else 0.0,
            verify_seconds=verified - before_verify + after_commit - before_commit,
            finish=finish,
            path=tuple(path),
            spent=sum(c.spent for c in choices),
            loosened=sum(c.loosened for c in choices),
        )
        rest = self.clock() - started - result.draft_seconds - result.verify_seconds
        result = replace(result, rest_seconds=rest)
        learning = self.clock()
        self.policy.learn([result])
        # Learning needs the result, seconds included, so its own are charged to the next step.
        self.unpaid = self.clock() - learning
        return result

    def _meet(self) -> None:
        self.met.callback(self.policy.close, self.seq)
        self.policy.open(self.seq)
        warm = getattr(self.policy, "warm", None)
        rehearsed: list[Rehearsal] = []
        for drafter in self.drafters.values():
            self.met.callback(drafter.close, self.seq)
            rehearse = getattr(drafter, "rehearse", None)
            if warm and rehearse:
                rehearsed += rehearse(self.seq, self.request)
            else:
                drafter.open(self.seq, self.request)
            drafter.observe(self.seq, self.generated)
        if warm:
            warm(self.seq, rehearsed)

    def _look(self) -> State:
        wanted = self.request.limit - len(self.generated)
        asks = [
            Ask(self.seq, name, min(wanted - 1, self.reach), siblings=self.siblings)
            for name, drafter in self.drafters.items()
            if not drafter.serial and wanted > 1
        ]
        serial = {name: d for name, d in self.drafters.items() if d.serial}
        return State(
            self.seq,
            len(self.request.prompt) + len(self.generated) - 1,
            wanted,
            tuple(self._propose(asks)),
            {name: d.stale(self.seq) for name, d in serial.items()},
            {name: d.room(self.seq) for name, d in serial.items()},
        )

    def _propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = [
            d for ask in asks for d in self.drafters[ask.drafter].propose([ask], self.policy.go)
        ]
        return [draft for draft in drafts if self._possible(draft)]

    def _possible(self, draft: Draft) -> bool:
        """An id that the target does not know would crash its forward. A draft that was drawn is
        not looked at: leaving it out for its draw would shift the distribution."""
        size = self.engine.caps.vocabulary
        return not draft.points or all(0 <= token < size for token in draft.tokens)

    def _continued(self, drafts: Sequence[Draft], wanted: int) -> list[Draft]:
        """How retrieval drafters go on from the main chains of a model's drafts."""
        asks = []
        for draft in drafts:
            after = draft.main().tokens
            depth = min(wanted - 1 - len(after), REACH)
            if depth > 0:
                asks += [
                    Ask(self.seq, name, depth, after, self.siblings)
                    for name, drafter in self.drafters.items()
                    if not drafter.serial
                ]
        asked = {ask.after for ask in asks}  # a drafter that knows no `after` goes on from the text
        return [draft for draft in self._propose(asks) if draft.after in asked]

    def _verify(self, plan: StepPlan) -> Rows:
        draft = plan.draft.tokens if plan.draft else ()
        parents = tuple(p + 1 for p in plan.draft.parents) if plan.draft else ()
        return self.engine.forward(
            [Verify(self.seq, (self.generated[-1], *draft), parents, plan.width)]
        )[0]

    def _accept(self, draft: Draft | None, rows: Rows) -> tuple[list[Choice], str | None]:
        """(what is committed, finish reason); extends the text up to the stop."""
        choices: list[Choice] = []
        finish = None
        lazy = NodeRows(rows.argmax, rows.row)
        for choice in self.rule(draft, lazy, self.sampler, self.generated):
            choices.append(choice)
            finish = self.stopper.push(choice.token)
            if finish is not None:
                break
        self.generated.extend(c.token for c in choices)
        return choices, finish

    def close(self, keep: bool) -> None:
        with self.met:  # one that fails to close does not keep the others open
            if self.opened:
                self.engine.close(self.seq, keep)
