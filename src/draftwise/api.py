"""`Model`: a target with its drafters and policies, and the calls that generate text with them.

One `Model` serves many requests, also from several threads: steps of different requests take turns,
in the order they were asked for, each with caches of its own. Policies learn across requests and
are kept by name. Sampling is coupled to the seed (sampling.py), so a seed reproduces a text under
every policy, plain decoding included.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from typing_extensions import Unpack

from . import policy as policies
from .accept import check as check_acceptance
from .accept import named
from .alarm import Alarm
from .batches import (
    BatchOptions,
    BatchSampling,
    CallOptions,
    Prompts,
    each_params,
    is_batch,
    numbered,
)
from .call import Batch, Call, Steps, Text
from .core import Request, SamplingParams, UsageError
from .decode import Parts, decode_batch
from .drafters import REGISTRY as DRAFTERS
from .drafters import Drafter
from .drafters.model import ModelDrafter
from .engines.base import Engine, sweep, sweep_batches
from .engines.transformers import TransformersEngine
from .intake import Intake, Wish, eos_ids
from .memory import DraftMemory, parse_size, release
from .options import Sampling, sampling_params
from .policy.cost import CostCurve, CostStore
from .prompts import Prompt, encode
from .result import Result, Tally
from .scheduler import BATCH_SIZE, check_size
from .stopping import Stopper
from .trace import Recorder, Trace
from .turns import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_DRAFTERS = ("lookup", "suffix", "recycling")
# Seconds that measuring the cost curve may take when none is stored: together under 5 at load.
SWEEP_TARGET, SWEEP_DRAFT = 1.9, 0.7
SWEEP_BATCHES = 0.7  # of that once more


class Model:
    """A loaded target. Use it as a context manager, or `close()` it, to free everything."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        drafters: Sequence[str | Drafter | PreTrainedModel] = DEFAULT_DRAFTERS,
        *,
        policy: str = "auto",
        acceptance: str = "coupled",
        quality_budget: float = 0.0,
        objective: str = "latency",
        max_slowdown: float = 0.02,
        draft_memory: int | str | None = None,
        costs: Path | None = None,
        borrowed: bool = False,
        kernels: str = "eager",
    ):
        """`drafters`: names in the registry, Drafter objects, or loaded models with the target's
        tokenizer. `objective`, `max_slowdown` and `draft_memory` are those of `load`. `costs`: the
        folder of stored cost curves (None: nothing is stored). `borrowed`: hold the model weakly,
        for a caller who keeps it. `kernels`: as in `load`; others than "eager" re-lay the weights
        of the models given, which are then this Model's alone."""
        self.goal = policies.Goal(objective, max_slowdown)
        allowed = parse_size(draft_memory)
        check_acceptance(acceptance, quality_budget)
        self.tokenizer, self.acceptance, self.policy = tokenizer, acceptance, policy
        self.quality_budget = quality_budget
        self.engine = TransformersEngine(model, borrowed=borrowed, kernels=kernels)
        self._kernels = kernels
        self.eos = eos_ids(model)
        self._intake = Intake(self.engine.caps, tokenizer, self.eos, acceptance, quality_budget)
        self._criterion = self._intake.criterion
        self._store = CostStore(costs) if costs is not None else None
        self._turn = Turn()
        self._policies: dict[str, policies.Policy] = {}
        self._unsaved = 0
        self._plain, self._alarm = self._plain_reason(), Alarm()
        made = [] if self._plain else [self._drafter(d) for d in drafters]
        self.drafters: dict[str, Drafter] = {d.name: d for d in made}
        if len(self.drafters) < len(made):
            raise UsageError("two drafters have the same name")
        self._memory: DraftMemory | None = None
        if allowed is not None:
            self._memory = DraftMemory(allowed, self.drafters, self._turn, self._save)
            self._memory.fit()
        target = self._curve(self.engine, SWEEP_TARGET)
        serial = {
            d.name: self._curve(d.engine, SWEEP_DRAFT, d.ids)
            for d in self.drafters.values()
            if isinstance(d, ModelDrafter)
        }
        retrieval = [d for d in self.drafters.values() if not d.serial]
        for drafter in self.drafters.values():
            if isinstance(drafter, ModelDrafter):
                drafter.guess_with(retrieval, serial[drafter.name].seconds)
        caps = self.engine.caps
        self.costs = policies.Costs(
            target,
            serial,
            tuple(self.drafters),
            caps.trees,
            caps.batch == "padded",
            caps.rollback == "refeed",
        )
        self._policy(policy)

    @property
    def note(self) -> str | None:
        """What a user should know of how texts are made here, such as why nothing is drafted."""
        notes = [self._plain, self.engine.kernels.note, *self._alarm.notes]
        notes += self._memory.notes if self._memory else ()
        return "; ".join(note for note in notes if note) or None

    def _plain_reason(self) -> str | None:
        if self.engine.caps.rollback != "none":
            return None
        note = f"speculation is off: this model {self.engine.obstacle}, so it is decoded plainly"
        warnings.warn(note, stacklevel=3)
        return note

    def _drafter(self, drafter: str | Drafter | PreTrainedModel) -> Drafter:
        from transformers import PreTrainedModel

        if isinstance(drafter, PreTrainedModel):
            # Compiled, it would have to give up the shortened output layer (drafters/model.py).
            kernels = "auto" if self._kernels == "compiled" else self._kernels
            engine = TransformersEngine(drafter, kernels=kernels)
            return ModelDrafter(engine, self.engine.caps.vocabulary)
        if not isinstance(drafter, str):
            return drafter
        if drafter == "model" or drafter not in DRAFTERS:
            known = ", ".join(name for name in DRAFTERS if name != "model")
            raise UsageError(f"unknown drafter {drafter!r}: choose among {known}, or name a model")
        made: Drafter = DRAFTERS[drafter]()
        return made

    def _curve(self, engine: Engine, budget: float, ids: int = 0) -> CostCurve:
        curve = self._store.load(engine.name) if self._store else None
        return curve or self._measured(engine, budget, ids)

    def _measured(self, engine: Engine, budget: float, ids: int) -> CostCurve:
        points: list[Any] = []
        if engine.caps.rollback != "none":
            sweep(engine, budget, lambda s, seconds: points.append((s, seconds)), ids=ids)
        if engine.caps.batch == "padded" and points:
            share = budget * SWEEP_BATCHES
            sweep_batches(engine, share, lambda s, seconds: points.append((s, seconds)), ids)
        curve = CostCurve(points)
        if self._store and curve.measured:
            self._store.save(engine.name, curve)
        return curve

    def _policy(self, spec: str) -> policies.Policy:
        if self._plain:
            spec = "plain"
        if spec not in self._policies:
            # Drafters may have been unloaded since.
            serial = {name: c for name, c in self.costs.serial.items() if name in self.drafters}
            costs = replace(self.costs, serial=serial, drafters=tuple(self.drafters))
            self._policies[spec] = policies.make(spec, costs, self.goal)
        return self._policies[spec]

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[CallOptions]) -> Result: ...

    @overload
    def generate(self, prompt: Prompts, **options: Unpack[BatchOptions]) -> list[Result]: ...

    def generate(self, prompt: Any, **options: Any) -> Any:
        """Generates from a text, token ids, or chat messages (through the chat template).

        Options are those of `stream`. Raises UsageError for what the caller can mend. A list of
        prompts gives a list of Results, with the options of `stream_batch`.
        """
        if is_batch(prompt):
            batch = self.stream_batch(prompt, **options)
            for _ in batch:
                pass
            return batch.results
        call = self.stream(prompt, **options)
        for _ in call:
            pass
        return call.result

    def stream(
        self,
        prompt: Prompt,
        *,
        policy: str | None = None,
        acceptance: str | None = None,
        quality_budget: float | None = None,
        reuse: bool = False,
        cancel: threading.Event | None = None,
        trace: Trace | Path | str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Call:
        """An iterator of text as it is committed; then `.result` is set.

        Sampling options are those of SamplingParams; greedy unless `temperature` is above 0.
        `policy`, `acceptance` and `quality_budget` replace the model's for this call. `reuse` keeps
        the caches for a later call whose prompt begins with this text (chat turns). `cancel`, once
        set, ends the text at the next step with finish reason "cancelled". `trace`: a file, or a
        Trace, that the request is recorded to (trace.py).
        """
        params = sampling_params(sampling)
        return self.start(
            self.encode(prompt),
            params,
            policy=policy,
            acceptance=acceptance,
            quality_budget=quality_budget,
            reuse=reuse,
            cancel=cancel,
            trace=trace,
        )

    def stream_batch(
        self,
        prompts: Prompts,
        *,
        policy: str | None = None,
        acceptance: str | None = None,
        quality_budget: float | None = None,
        cancel: threading.Event | None = None,
        batch_size: int = BATCH_SIZE,
        **sampling: Unpack[BatchSampling],
    ) -> Batch:
        """Several prompts in the same forwards: an iterator of (number of the prompt, text) as it
        is committed; then `.results` are set, in the prompts' order.

        Each text is the one that its prompt gives alone. One `seed` stands for prompt i as
        seed + i; `seed`, `max_new_tokens` and `stop` may also be lists with an entry for each
        prompt (of `stop`, a list of lists). At most `batch_size` prompts run at once; others join
        as those end. `cancel` ends all.
        """
        if isinstance(prompts, (str, bytes)):
            raise UsageError("a batch is a list of prompts: `stream` takes a single one")
        each: Sequence[Any] = prompts
        ids = [numbered(i, self.encode, prompt) for i, prompt in enumerate(each)]
        wishes = [
            Wish(params, acceptance, quality_budget) for params in each_params(sampling, len(ids))
        ]
        return self.start_batch(ids, wishes, policy=policy, cancel=cancel, batch_size=batch_size)

    async def astream(
        self,
        prompt: Prompt,
        *,
        policy: str | None = None,
        acceptance: str | None = None,
        quality_budget: float | None = None,
        reuse: bool = False,
        **sampling: Unpack[Sampling],
    ) -> AsyncIterator[str]:
        """`stream` for asyncio. Cancelling the task, or closing the iterator, ends the request."""
        cancel = threading.Event()
        call = self.stream(
            prompt,
            policy=policy,
            acceptance=acceptance,
            quality_budget=quality_budget,
            reuse=reuse,
            cancel=cancel,
            **sampling,
        )
        step: asyncio.Future[str | None] | None = None
        try:
            while True:
                step = asyncio.ensure_future(asyncio.to_thread(next, call, None))
                piece = await asyncio.shield(step)
                if piece is None:
                    return
                yield piece
        finally:
            cancel.set()
            if step is not None and not step.done():  # the step in flight ends in its own thread
                await asyncio.wait([step])
            # Closing waits for its turn between other requests' steps: not on the event loop.
            await asyncio.shield(asyncio.to_thread(call.close))

    def start(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        policy: str | None = None,
        acceptance: str | None = None,
        quality_budget: float | None = None,
        reuse: bool = False,
        cancel: threading.Event | None = None,
        trace: Trace | Path | str | None = None,
        processors: Sequence[Any] = (),
        criteria: Sequence[Any] = (),
        eos: frozenset[int] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | None = None,
    ) -> Call:
        """What `stream` does once the prompt is token ids; `processors` and `criteria` are
        transformers objects, called once for every token of the text, in order, with ids on
        `device`. `eos` and `tokenizer` replace the model's."""
        wish = Wish(
            params, acceptance, quality_budget, reuse, processors, criteria, eos, tokenizer, device
        )
        request, stopper = self._intake.request(prompt, wish, self._serial)
        text, drafters = self._text(request, stopper), self._serving
        if trace is not None:
            trace = trace if isinstance(trace, Trace) else Trace(trace)
            text.recorder = Recorder(trace, request, self.costs, policy or self.policy)
            drafters = text.recorder.watch(drafters)
        return Call(self._steps([(request, stopper)], policy, cancel, drafters), text, cancel)

    def start_batch(
        self,
        prompts: Sequence[Sequence[int]],
        wishes: Sequence[Wish],
        *,
        policy: str | None = None,
        cancel: threading.Event | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> Batch:
        """What `stream_batch` does once the prompts are token ids, as `start` is to `stream`."""
        check_size(batch_size)
        several = len(prompts) > 1
        requests = [
            numbered(i if several else None, self._intake.request, ids, wish, self._serial)
            for i, (ids, wish) in enumerate(zip(prompts, wishes, strict=True))
        ]
        texts = [self._text(*each) for each in requests]
        steps = self._steps(requests, policy, cancel, self._serving, batch_size)
        return Batch(steps, texts, cancel)

    @property
    def _serial(self) -> bool:
        return any(drafter.serial for drafter in self.drafters.values())

    @property
    def _serving(self) -> Mapping[str, Drafter]:
        return self._memory.serving if self._memory else self.drafters

    def _text(self, request: Request, stopper: Stopper) -> Text:
        params = request.params
        tally = Tally(len(request.prompt), self.note, named(request), self._alarm)

        def ended(steps: int) -> None:
            self._ended(steps)
            if not (params.greedy or request.quality_budget):
                plain = self.costs.target.seconds(1, len(request.prompt)) * tally.asked_tokens
                self._criterion.learn(request.acceptance, plain, tally.asked_seconds)

        return Text(request.seq, stopper, tally, ended)

    def _steps(
        self,
        requests: Sequence[tuple[Request, Stopper]],
        policy: str | None,
        cancel: threading.Event | None,
        drafters: Mapping[str, Drafter],
        size: int = 1,
    ) -> Steps:
        if cancel is not None and not isinstance(cancel, threading.Event):
            raise UsageError(f"cancel takes a threading.Event, not {cancel!r}")
        chosen = self._policy(policy or self.policy)
        steps = decode_batch(Parts(self.engine, drafters, chosen, self._turn), requests, size)
        if self._memory is None:
            return steps
        target = self.costs.target
        return self._memory.watched(steps, lambda context, size: target.seconds(1, context, size))

    def encode(self, prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
        """Token ids of a text, of chat messages with the reply's opening, or of ids themselves."""
        return encode(prompt, tokenizer or self.tokenizer)

    def _ended(self, steps: int) -> None:
        self._unsaved += steps
        if self._unsaved >= 200:
            self._save()

    def _save(self) -> None:
        if self._store is None or not self._unsaved:
            return
        self._unsaved = 0
        curves = {self.engine.name: self.costs.target}
        for name, curve in self.costs.serial.items():
            drafter = self.drafters.get(name)
            if isinstance(drafter, ModelDrafter):
                curves[drafter.engine.name] = curve
        for name, curve in curves.items():
            if curve.measured:  # a guess must not pass for a measurement next time
                self._store.save(name, curve)

    def close(self) -> None:
        """Frees weights and caches; what was learned of costs is stored. May be called twice."""
        if self.engine.closed:
            return
        with self._turn:
            self._save()
            for drafter in self.drafters.values():
                release(drafter)
            if self._memory is not None:
                self._memory.close()
            self.engine.free()

    def __repr__(self) -> str:
        drafters = ", ".join(self.drafters) or "none"
        return f"<draftwise.Model {self.engine.name}, drafters {drafters}, policy {self.policy}>"

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
