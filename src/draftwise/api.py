"""`Model`: a target with its drafters and policies, and the calls that generate text with them.

One `Model` serves many requests, also from several threads: steps of different requests take turns,
in the order they were asked for, each with caches of its own. Policies learn across requests and
are kept by name. Sampling is coupled to the seed (sampling.py), so a seed reproduces a text under
every policy, plain decoding included.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import warnings
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Unpack

from . import policy as policies
from .accept import Criterion, named
from .accept import check as check_acceptance
from .call import Call
from .core import Request, SamplingParams, UsageError
from .decode import Parts, decode
from .drafters import REGISTRY as DRAFTERS
from .drafters import Drafter
from .drafters.model import ModelDrafter
from .engines import REGISTRY as ENGINES
from .engines.base import Engine, sweep
from .engines.transformers import TransformersEngine
from .memory import DraftMemory, parse_size, release
from .options import Sampling, sampling_params
from .policy.cost import CostCurve, CostStore
from .prompts import Prompt, encode, special_ids
from .result import Result, Tally
from .sampling import new_seed
from .stopping import Stopper
from .trace import Recorder, Trace
from .turns import Turn
from .vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_DRAFTERS = ("lookup", "suffix", "recycling")
# Seconds that measuring the cost curve may take when none is stored: together under 5 at load.
SWEEP_TARGET, SWEEP_DRAFT = 2.2, 0.8


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
    ):
        """`drafters`: names in the registry, Drafter objects, or loaded models with the target's
        tokenizer. `objective`, `max_slowdown` and `draft_memory` are those of `load`. `costs`: the
        folder of stored cost curves (None: nothing is stored). `borrowed`: hold the model weakly,
        for a caller who keeps it."""
        check_acceptance(acceptance, quality_budget)
        self.goal = policies.Goal(objective, max_slowdown)
        allowed = parse_size(draft_memory)
        self.tokenizer, self.acceptance, self.policy = tokenizer, acceptance, policy
        self.quality_budget, self._criterion = quality_budget, Criterion()
        self.engine = TransformersEngine(model, borrowed=borrowed)
        self.eos = eos_ids(model)
        self._store = CostStore(costs) if costs is not None else None
        self._numbers = itertools.count()
        self._turn = Turn()
        self._policies: dict[str, policies.Policy] = {}
        self._unsaved = 0
        self._plain = self._plain_reason()
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
        trees = self.engine.caps.trees
        self.costs = policies.Costs(target, serial, tuple(self.drafters), trees)
        self._policy(policy)

    @property
    def note(self) -> str | None:
        """What a user should know of how texts are made here, such as why nothing is drafted."""
        notes = [self._plain, *(self._memory.notes if self._memory else ())]
        return "; ".join(note for note in notes if note) or None

    def _plain_reason(self) -> str | None:
        if self.engine.caps.rollback == "free":
            return None
        note = (
            "speculation is off: this model has recurrent state, which cannot be rolled back, "
            "so it is decoded plainly"
        )
        warnings.warn(note, stacklevel=3)
        return note

    def _drafter(self, drafter: str | Drafter | PreTrainedModel) -> Drafter:
        from transformers import PreTrainedModel

        if isinstance(drafter, PreTrainedModel):
            engine = TransformersEngine(drafter)
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
        if engine.caps.rollback == "free":
            sweep(engine, budget, lambda s, seconds: points.append((s, seconds)), ids=ids)
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

    def generate(
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
    ) -> Result:
        """Generates from a text, token ids, or chat messages (through the chat template).

        Sampling options are those of SamplingParams; greedy unless `temperature` is above 0.
        `policy`, `acceptance` and `quality_budget` replace the model's for this call. `reuse` keeps
        the caches for a later call whose prompt begins with this text (chat turns). `cancel`, once
        set, ends the text at the next step with finish reason "cancelled". `trace`: a file, or a
        Trace, that the request is recorded to (trace.py). Raises UsageError for what the caller can
        mend.
        """
        call = self.stream(
            prompt,
            policy=policy,
            acceptance=acceptance,
            quality_budget=quality_budget,
            reuse=reuse,
            cancel=cancel,
            trace=trace,
            **sampling,
        )
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
        """Like `generate`, but an iterator of text as it is committed; then `.result` is set."""
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
        tokenizer = tokenizer or self.tokenizer
        acceptance = self.acceptance if acceptance is None else acceptance
        budget = self.quality_budget if quality_budget is None else quality_budget
        check_acceptance(acceptance, budget)
        if cancel is not None and not isinstance(cancel, threading.Event):
            raise UsageError(f"cancel takes a threading.Event, not {cancel!r}")
        if params.stop and tokenizer is None:
            raise UsageError("stop strings need a tokenizer")
        drafters = self._memory.serving if self._memory else self.drafters
        chosen = self._policy(policy or self.policy)
        limit = self._limit(prompt, params.max_new_tokens)
        stops = frozenset() if params.ignore_eos else (self.eos if eos is None else eos)
        endings = stops | special_ids(params.stop, tokenizer)
        request = Request(
            next(self._numbers),
            tuple(prompt),
            params,
            new_seed() if params.seed is None else int(params.seed),
            stops,
            self._rule(acceptance, budget, params),
            limit,
            reuse,
            tuple(processors),
            device,
            float(budget),
        )
        stopper = Stopper(tokenizer, prompt, limit, endings, params.stop, criteria, device)
        tally = Tally(len(prompt), self.note, named(request))
        recorder: Recorder | None = None
        if trace is not None:
            trace = trace if isinstance(trace, Trace) else Trace(trace)
            recorder = Recorder(trace, request, self.costs, policy or self.policy)
            drafters = recorder.watch(drafters)
        steps = decode(Parts(self.engine, drafters, chosen, self._turn), request, stopper)
        if self._memory is not None:
            curve = self.costs.target
            steps = self._memory.watched(steps, lambda context: curve.seconds(1, context))

        def ended(steps: int) -> None:
            self._ended(steps)
            if not (params.greedy or budget):
                plain = self.costs.target.seconds(1, len(prompt)) * tally.asked_tokens
                self._criterion.learn(request.acceptance, plain, tally.asked_seconds)

        return Call(steps, stopper, tally, cancel, ended, recorder)

    def _rule(self, acceptance: str, budget: float, params: SamplingParams) -> str:
        """The rule's name: for `auto` a lossless one, known before the request's first token."""
        if acceptance != "auto":
            return acceptance
        drawn = any(drafter.serial for drafter in self.drafters.values())
        return self._criterion.choose() if drawn and not (params.greedy or budget) else "coupled"

    def _limit(self, prompt: Sequence[int], wanted: int) -> int:
        size, context = self.engine.caps.vocabulary, self.engine.caps.context
        if len(prompt) == 0:
            raise UsageError("the prompt is empty")
        if min(prompt) < 0 or max(prompt) >= size:
            raise UsageError(f"token ids must be between 0 and {size - 1}")
        if context is None:
            return wanted
        if len(prompt) >= context:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, and the model's context holds {context}: "
                "one must be left to generate"
            )
        return min(wanted, context - len(prompt))

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


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end a text, as transformers finds them; none if none is defined."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids) if isinstance(ids, (list, tuple)) else frozenset([ids])
    return frozenset()


def load(
    target: str | Path | None = None,
    drafters: Sequence[str] = DEFAULT_DRAFTERS,
    *,
    policy: str = "auto",
    acceptance: str = "coupled",
    quality_budget: float = 0.0,
    objective: str = "latency",
    max_slowdown: float = 0.02,
    draft_memory: int | str | None = None,
    engine: str = "transformers",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Model:
    """Loads a target with its drafters; see Model.generate, stream and astream for what it can do.

    `target`: a Hugging Face id, a local folder, a `.gguf` file, or None for the embedded SmolLM2.
    `drafters`: "lookup", "suffix", "recycling" and names of draft models (at most one) with the
    target's tokenizer; an empty sequence decodes plainly. `policy`: "auto", "plain" or "fixed:K".
    `acceptance`: "coupled" (a seed gives the same text as plain decoding), "rejection" or "block"
    (the same distribution, more accepted when sampling), "auto" (the one of these that gained most
    so far), or, with loss, "typical" or "topk". `quality_budget`: mean nats a token, 0 to 2, that
    the target's own choices may be given up for; 0 is lossless. `objective`: "latency" (each
    request as fast as it can be) or "throughput" (most tokens per second over the requests that
    run). `max_slowdown`: by this share of plain decoding's time a run may be slower than it, as a
    whole. `draft_memory`: bytes that drafters may take together, such as "500MB" or "2GiB"; what is
    too much is unloaded between requests, least useful first. `dtype`: "float32", "bfloat16",
    "float16" or None for the checkpoint's own; `device`: "cpu", "cuda", "cuda:1" or None for a GPU
    if there is one.
    `progress`: show what takes long on stderr. Measures the cost curve (about 4 s) unless it is
    stored from an earlier run. Raises UsageError for what the caller can mend.

        with draftwise.load("Qwen/Qwen3-8B", ["lookup", "recycling", "Qwen/Qwen3-0.6B"]) as model:
            print(model.generate("Once upon a time", temperature=0.8, seed=7, stop=["\\n\\n"]))
    """
    from .models import load_model, weight_bytes
    from .unpack import cache_dir

    if engine not in ENGINES:
        raise UsageError(f"unknown engine {engine!r}: choose among {', '.join(ENGINES)}")
    policies.check(policy)
    check_acceptance(acceptance, quality_budget)
    policies.Goal(objective, max_slowdown)
    allowed = parse_size(draft_memory)
    if isinstance(drafters, str):
        raise UsageError(f"drafters must be a list of names, not the text {drafters!r}")
    names = [d for d in drafters if d not in DRAFTERS or d == "model"]
    if len(names) > 1:
        raise UsageError(f"one draft model at a time, not {', '.join(names)}")
    model, tokenizer = load_model(target, dtype=dtype, device=device, progress=progress)
    chosen: list[Any] = []
    refused: dict[str, int] = {}
    for name in drafters:
        if name not in names:
            chosen.append(name)
            continue
        if allowed is not None and (weighs := weight_bytes(name, dtype) or 0) > allowed:
            refused[name] = weighs
            continue
        draft, draft_tokenizer = load_model(name, dtype=dtype, device=device, progress=progress)
        check_same_vocabulary(tokenizer, draft_tokenizer, name)
        chosen.append(draft)
    made = Model(
        model,
        tokenizer,
        chosen,
        policy=policy,
        acceptance=acceptance,
        quality_budget=quality_budget,
        objective=objective,
        max_slowdown=max_slowdown,
        draft_memory=allowed,
        costs=cache_dir() / "costs",
    )
    for name, weighs in refused.items():
        assert made._memory is not None
        made._memory.refused(name, weighs)
    return made
