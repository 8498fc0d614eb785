"""One request on its way: its text, its rule of acceptance, and its place in engine and drafters.

What several requests do together is in step.py, when they do it in scheduler.py. A run is opened
with its first pass over the prompt, and meets drafters and policy when its first token is out, so
that they cost no time to it. Whatever was opened is closed by `close`, however the run ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from .accept import Choice, NodeRows, rule_of
from .core import DEEPEST, SIBLINGS, Ask, Draft, Request, State, StepPlan, StepResult
from .drafters import Drafter, Rehearsal
from .engines.base import PREFILL_CHUNK, UNFED, Engine, PrefillChunk, Rows, Verify
from .policy import Policy
from .sampling import Sampler
from .stopping import Stopper

# Most retrieval drafts fail early, and 64 nodes take 0.1 ms to write down, so a draft may be four
# times as long as the last step's tokens, at least REACH: a copy that goes well is at full length
# within two steps.
REACH = 16
# Runs that share a forward share its rows too: nobody gets many of them, and writing drafts down
# for each took a sixth of a step (eight texts of SmolLM2).
SHORT, CROWD = 6, 4


@dataclass(frozen=True)
class Parts:
    """What decodes: an engine, its drafters by name, a policy, and the lock of a step's turn."""

    engine: Engine
    drafters: Mapping[str, Drafter]
    policy: Policy
    turn: AbstractContextManager[object]
    clock: Callable[[], float] = time.perf_counter

    def usable(self) -> Parts:
        """These with the drafters as they are now, none where the engine cannot roll back."""
        chains = self.engine.caps.rollback != "none"
        return replace(self, drafters=dict(self.drafters) if chains else {})


class Run:
    def __init__(self, parts: Parts, request: Request, stopper: Stopper):
        self.parts, self.request, self.stopper, self.seq = parts, request, stopper, request.seq
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
        self.finish: str | None = None
        self.reach = REACH
        self.siblings = SIBLINGS if parts.engine.caps.trees else 0
        self.opened = False
        self._unread: tuple[int, ...] = ()
        self._reused = 0
        self._met: ExitStack | None = None  # closes the policy and the drafters that were opened

    @property
    def reading(self) -> bool:
        """Is some of the prompt still to be run?"""
        return not self.opened or bool(self._unread)

    def read(self) -> tuple[StepResult, int]:
        """Runs the next chunk of the prompt, the last of which gives the first token; and how many
        tokens that were."""
        parts, start = self.parts, self.parts.clock()
        if not self.opened:
            self.opened = True
            self._reused = parts.engine.open(self.seq, self.request.prompt)
            self._unread = self.request.prompt[self._reused :]
        chunk, self._unread = self._unread[:PREFILL_CHUNK], self._unread[PREFILL_CHUNK:]
        rows = parts.engine.forward([PrefillChunk(self.seq, chunk)])[0]
        choices = [] if self._unread else self.accept(None, rows)
        result = StepResult(
            self.seq,
            StepPlan(self.seq, None, 1),
            0,
            tuple(c.token for c in choices),
            0,
            verify_seconds=parts.clock() - start,
            finish=self.finish,
            prefill=True,
            reused=self._reused,
        )
        return result, len(chunk)

    def meet(self) -> None:
        """Opens policy and drafters, once."""
        if self._met is not None:
            return
        policy, drafters = self.parts.policy, self.parts.drafters
        self._met = ExitStack()
        self._met.callback(policy.close, self.seq)
        policy.open(self.seq)
        warm = getattr(policy, "warm", None)
        rehearsed: list[Rehearsal] = []
        for drafter in drafters.values():
            self._met.callback(drafter.close, self.seq)
            rehearse = getattr(drafter, "rehearse", None)
            if warm and rehearse:
                rehearsed += rehearse(self.seq, self.request)
            else:
                drafter.open(self.seq, self.request)
            drafter.observe(self.seq, self.generated)
        if warm:
            warm(self.seq, rehearsed)

    @property
    def unfed(self) -> int:
        engine = self.parts.engine
        return engine.unfed(self.seq) if engine.caps.rollback == "refeed" else 0

    @property
    def wanted(self) -> int:
        """Tokens to come; one, and so no draft, where a plain step must feed what is unfed."""
        return 1 if self.unfed > UNFED else self.request.limit - len(self.generated)

    def asks(self, batch: int = 1) -> list[Ask]:
        """What retrieval drafters are asked at every step that so many runs share."""
        if self.wanted < 2:
            return []
        depth = min(self.wanted - 1, max(self.reach // batch, SHORT))
        siblings = self.siblings if batch < CROWD else 0
        return [Ask(self.seq, name, depth, siblings=siblings) for name in self._retrieval()]

    def continuing(self, draft: Draft) -> list[Ask]:
        """The same, going on from the main chain of a model's draft."""
        after = draft.main().tokens
        depth = min(self.wanted - 1 - len(after), REACH)
        if depth < 1:
            return []
        return [Ask(self.seq, name, depth, after, self.siblings) for name in self._retrieval()]

    def _retrieval(self) -> list[str]:
        return [name for name, drafter in self.parts.drafters.items() if not drafter.serial]

    def state(self, free: tuple[Draft, ...]) -> State:
        serial = {name: d for name, d in self.parts.drafters.items() if d.serial}
        return State(
            self.seq,
            len(self.request.prompt) + len(self.generated) - 1,
            self.wanted,
            free,
            {name: d.stale(self.seq) for name, d in serial.items()},
            {name: d.room(self.seq) for name, d in serial.items()},
            self.unfed,
        )

    def work(self, plan: StepPlan) -> Verify:
        draft = plan.draft.tokens if plan.draft else ()
        parents = tuple(p + 1 for p in plan.draft.parents) if plan.draft else ()
        return Verify(self.seq, (self.generated[-1], *draft), parents, plan.width)

    def accept(self, draft: Draft | None, rows: Rows) -> list[Choice]:
        """What is committed; extends the text up to the stop."""
        choices: list[Choice] = []
        lazy = NodeRows(rows.argmax, rows.row)
        for choice in self.rule(draft, lazy, self.sampler, self.generated):
            choices.append(choice)
            self.finish = self.stopper.push(choice.token)
            if self.finish is not None:
                break
        self.generated.extend(c.token for c in choices)
        self.reach = min(max(REACH, 4 * len(choices)), DEEPEST)
        return choices

    def close(self, keep: bool) -> None:
        with self._met or ExitStack():  # one that fails to close does not keep the others open
            self._met = ExitStack()
            if self.opened:
                self.opened = False
                self.parts.engine.close(self.seq, keep and self.request.reuse)
