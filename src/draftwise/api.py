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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from typing_extensions import Unpack

from . import policy as policies
from .accept import RULES
from .core import Request, SamplingParams, StepResult, UsageError
from .decode import Parts, decode
from .drafters import REGISTRY as DRAFTERS
from .drafters import Drafter
from .drafters.model import ModelDrafter
from .engines.base import sweep
from .engines.transformers import TransformersEngine
from .policy.cost import CostCurve, CostStore
from .result import Result, Tally
from .sampling import new_seed
from .stopping import Stopper
from .turns import Turn
from .vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
DEFAULT_DRAFTERS = ("lookup", "suffix")
# Seconds that measuring the cost curve may take when none is stored: together under 5 at load.
SWEEP_TARGET, SWEEP_DRAFT = 2.8, 1.0


class Sampling(TypedDict, total=False):
    """The names of SamplingParams, for type checkers."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_new_tokens: int
    stop: str | Sequence[str]
    seed: int | None
    ignore_eos: bool


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
        costs: Path | None = None,
        borrowed: bool = False,
    ):
        """`drafters`: names in the registry, Drafter objects, or loaded models with the target's
        tokenizer. `costs`: the folder of stored cost curves (None: nothing is stored). `borrowed`:
        hold the model weakly, for a caller who keeps it."""
        if acceptance not in RULES:
            raise UsageError(f"unknown acceptance {acceptance!r}: choose among {', '.join(RULES)}")
        self.tokenizer, self.acceptance, self.policy = tokenizer, acceptance, policy
        self.engine = TransformersEngine(model, borrowed=borrowed)
        self.eos = _eos(model)
        self._store = CostStore(costs) if costs is not None else None
        self._numbers = itertools.count()
        self._turn = Turn()
        self._policies: dict[str, policies.Policy] = {}
        self._unsaved = 0
        self.note = self._plain_reason()
        made = [] if self.note else [self._drafter(d) for d in drafters]
        self.drafters: dict[str, Drafter] = {d.name: d for d in made}
        if len(self.drafters) < len(made):
            raise UsageError("two drafters have the same name")
        target = self._curve(self.engine, SWEEP_TARGET)
        serial = {
            d.name: self._curve(d.engine, SWEEP_DRAFT) for d in made if isinstance(d, ModelDrafter)
        }
        self.costs = policies.Costs(target, serial, tuple(self.drafters))
        self._policy(policy)

    def _plain_reason(self) -> str | None:
        if self.engine.caps.rollback == "free":
            return None
        note = (
            "speculation is off: this model has recurrent state, which cannot be rolled back, "
            "so it is decoded plainly"
        )
        warnings.warn(note, stacklevel=4)
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

    def _curve(self, engine: TransformersEngine, budget: float) -> CostCurve:
        curve = self._store.load(engine.name) if self._store else None
        return curve or self._measured(engine, budget)

    def _measured(self, engine: TransformersEngine, budget: float) -> CostCurve:
        points: list[Any] = []
        if engine.caps.rollback == "free":
            sweep(engine, budget, lambda shape, seconds: points.append((shape, seconds)))
        curve = CostCurve(points)
        if self._store and points:
            self._store.save(engine.name, curve)
        return curve

    def _policy(self, spec: str) -> policies.Policy:
        if self.note:
            spec = "plain"
        if spec not in self._policies:
            self._policies[spec] = policies.make(spec, self.costs)
        return self._policies[spec]

    def generate(
        self,
        prompt: Prompt,
        *,
        policy: str | None = None,
        acceptance: str | None = None,
        reuse: bool = False,
        cancel: threading.Event | None = None,
        **sampling: Unpack[Sampling],
    ) -> Result:
        """Generates from a text, token ids, or chat messages (through the chat template).

        Sampling options are those of SamplingParams; greedy unless `temperature` is above 0.
        `policy` and `acceptance` replace the model's for this call. `reuse` keeps the caches for a
        later call whose prompt begins with this text (chat turns). `cancel`, once set, ends the
        text at the next step with finish reason "cancelled". Raises UsageError for what the caller
        can mend.
        """
        call = self.stream(
            prompt, policy=policy, acceptance=acceptance, reuse=reuse, cancel=cancel, **sampling
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
        reuse: bool = False,
        cancel: threading.Event | None = None,
        **sampling: Unpack[Sampling],
    ) -> Call:
        """Like `generate`, but an iterator of text as it is committed; then `.result` is set."""
        params = sampling_params(sampling)
        return self.start(
            self.encode(prompt),
            params,
            policy=policy,
            acceptance=acceptance,
            reuse=reuse,
            cancel=cancel,
        )

    async def astream(
        self,
        prompt: Prompt,
        *,
        policy: str | None = None,
        acceptance: str | None = None,
        reuse: bool = False,
        **sampling: Unpack[Sampling],
    ) -> AsyncIterator[str]:
        """`stream` for asyncio. Cancelling the task, or closing the iterator, ends the request."""
        cancel = threading.Event()
        call = self.stream(
            prompt, policy=policy, acceptance=acceptance, reuse=reuse, cancel=cancel, **sampling
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
            call.close()

    def start(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        policy: str | None = None,
        acceptance: str | None = None,
        reuse: bool = False,
        cancel: threading.Event | None = None,
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
        acceptance = acceptance or self.acceptance
        if acceptance not in RULES:
            raise UsageError(f"unknown acceptance {acceptance!r}: choose among {', '.join(RULES)}")
        if params.stop and tokenizer is None:
            raise UsageError("stop strings need a tokenizer")
        parts = Parts(self.engine, self.drafters, self._policy(policy or self.policy), self._turn)
        limit = self._limit(prompt, params.max_new_tokens)
        stops = frozenset() if params.ignore_eos else (self.eos if eos is None else eos)
        request = Request(
            next(self._numbers),
            tuple(prompt),
            params,
            new_seed() if params.seed is None else int(params.seed),
            stops,
            acceptance,
            limit,
            reuse,
            tuple(processors),
            device,
        )
        stopper = Stopper(tokenizer, prompt, limit, stops, params.stop, criteria, device)
        tally = Tally(len(prompt), self.note)
        return Call(decode(parts, request, stopper), stopper, tally, cancel, self._ended)

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

    def encode(
        self, prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> list[int]:
        """Token ids of a text, of chat messages with the reply's opening, or of ids themselves."""
        tokenizer = tokenizer or self.tokenizer
        if isinstance(prompt, str):
            if not prompt:
                raise UsageError("the prompt is empty")
            return [int(t) for t in _needed(tokenizer).encode(prompt)]
        items = list(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
        if items and all(isinstance(m, Mapping) for m in items):
            return _chat([dict(m) for m in items], _needed(tokenizer))
        if not all(isinstance(t, int) and not isinstance(t, bool) for t in items):
            raise UsageError(
                "a prompt is one text, one list of token ids, or one list of chat messages "
                "({'role': ..., 'content': ...})"
            )
        return items

    def _ended(self, steps: int) -> None:
        self._unsaved += steps
        if self._unsaved >= 200:
            self._save()

    def _save(self) -> None:
        if self._store is None or not self._unsaved:
            return
        self._unsaved = 0
        self._store.save(self.engine.name, self.costs.target)
        for name, curve in self.costs.serial.items():
            drafter = self.drafters[name]
            assert isinstance(drafter, ModelDrafter)
            self._store.save(drafter.engine.name, curve)

    def close(self) -> None:
        """Frees weights and caches; what was learned of costs is stored. May be called twice."""
        if self.engine.closed:
            return
        with self._turn:
            self._save()
            for drafter in self.drafters.values():
                if isinstance(drafter, ModelDrafter):
                    drafter.engine.free()
            self.engine.free()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Call(Iterator[str]):
    """A running request: an iterator of text. `close()` ends it; `result` is set at its end."""

    def __init__(
        self,
        steps: Iterator[StepResult],
        stopper: Stopper,
        tally: Tally,
        cancel: threading.Event | None,
        ended: Callable[[int], None],
    ):
        self._steps, self._stopper, self._tally = steps, stopper, tally
        self._cancel, self._ended = cancel, ended
        self._result: Result | None = None

    def __next__(self) -> str:
        while self._result is None:
            step = self.step()
            piece = self._stopper.take()
            if piece:
                return piece
            if step is None:
                break
        raise StopIteration

    def step(self) -> StepResult | None:
        """One step of the request; None once it has ended."""
        if self._result is not None:
            return None
        if self._cancel is not None and self._cancel.is_set():
            self.close()
            return None
        try:
            result = next(self._steps)
        except BaseException:
            self._end("cancelled")
            raise
        self._tally.add(result)
        if result.finish is not None:
            next(self._steps, None)  # runs the generator to its end, which frees the caches
            self._end(result.finish)
        return result

    def _end(self, reason: str) -> None:
        stopper = self._stopper
        if stopper.finish is None:
            stopper.end(reason)
        stats = self._tally.stats()
        self._result = Result(stopper.text, tuple(stopper.tokens), stopper.finish or reason, stats)
        self._ended(stats.steps)

    def close(self) -> None:
        """Ends the request now; what was generated is in `result`, with reason "cancelled"."""
        if self._result is None:
            self._steps.close()  # type: ignore[attr-defined]
            self._end("cancelled")

    @property
    def result(self) -> Result:
        if self._result is None:
            raise UsageError("this call has not ended: iterate over it, or close it")
        return self._result

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise UsageError("without a tokenizer, prompts must be token ids")
    return tokenizer


def _chat(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not all("role" in m and "content" in m for m in messages):
        raise UsageError("every chat message needs 'role' and 'content'")
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("this model has no chat template: give it a text")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise errors of their own, about roles mostly
        raise UsageError(f"the chat template refuses these messages: {error}") from error
    return [int(t) for t in tokenizer.encode(str(text), add_special_tokens=False)]


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from named options; an unknown name is refused."""
    known = [f.name for f in fields(SamplingParams)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise UsageError(f"unknown option {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
    return SamplingParams(**{k: v for k, v in options.items() if v is not None or k == "seed"})


def _eos(model: PreTrainedModel) -> frozenset[int]:
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
    engine: str = "transformers",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Model:
    """Loads a target with its drafters.

    `target`: a Hugging Face id, a local folder, a `.gguf` file, or None for the embedded SmolLM2.
    `drafters`: "lookup", "suffix" and names of draft models (at most one) with the target's
    tokenizer; an empty sequence decodes plainly. `policy`: "auto", "plain", "fixed:K".
    Measures the cost curve (at most 5 s) unless it is stored from an earlier run.
    """
    from .models import load_model
    from .unpack import cache_dir

    if engine != "transformers":
        raise UsageError(f"unknown engine {engine!r}: choose among transformers")
    if isinstance(drafters, str):
        raise UsageError(f"drafters must be a list of names, not the text {drafters!r}")
    names = [d for d in drafters if d not in DRAFTERS or d == "model"]
    if len(names) > 1:
        raise UsageError(f"one draft model at a time, not {', '.join(names)}")
    model, tokenizer = load_model(target, dtype=dtype, device=device, progress=progress)
    chosen: list[Any] = []
    for name in drafters:
        if name not in names:
            chosen.append(name)
            continue
        draft, draft_tokenizer = load_model(name, dtype=dtype, device=device, progress=progress)
        check_same_vocabulary(tokenizer, draft_tokenizer, name)
        chosen.append(draft)
    return Model(
        model,
        tokenizer,
        chosen,
        policy=policy,
        acceptance=acceptance,
        costs=cache_dir() / "costs",
    )
