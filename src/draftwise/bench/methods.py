"""What is measured: methods of Draftwise, and those of transformers that they compete with.

`plain`, `auto`, `fixed:K` and `fixed:K:DRAFTER` are policies of Draftwise; `POLICY+DRAFTER` gives a
policy that one drafter only. `hf-plain`, `hf-lookup` and `hf-assisted` are transformers' own
`generate`: without speculation, with prompt lookup, and with the draft model as assistant. A
policy is given only drafters that it can use, so that `plain` does not pay for indexing the text.

Weights are shared, all else is not: each method has a `Model` of its own, with its own drafters
and policy. A shared suffix store would let one method copy another's answer to the same prompt.

transformers is timed from outside. Decode seconds are those of `generate` without its set-up and
the first target forward: the assistant's pass over the prompt counts, as Draftwise's draft prefill
does. Hooks find that forward and are gone when it ends. Both sides ignore the sampling defaults
(such as a repetition penalty) that a model ships.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .. import policy as policies
from ..api import Model
from ..core import UsageError
from ..drafters import REGISTRY as DRAFTERS
from ..policy.cost import CostCurve
from ..trace import Trace

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

HF = ("hf-plain", "hf-lookup", "hf-assisted")
# The documented default of transformers' PromptLookupCandidateGenerator.
HF_LOOKUP_TOKENS = 10
MODEL = "model"  # the name of the drafter made from the draft model


@dataclass(frozen=True)
class Spec:
    """A method's name taken apart: a policy with its drafters, or (policy None) transformers."""

    name: str
    policy: str | None
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sampled:
    """How every method turns logits into tokens."""

    temperature: float
    seed: int


@dataclass(frozen=True)
class Loaded:
    """The weights that all methods share; `theirs`: those of transformers' own, where Draftwise
    re-lays its weights."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: PreTrainedModel | None = None
    theirs: Loaded | None = None


@dataclass(frozen=True)
class Outcome:
    """One generation, or `texts` of them together, whose token ids follow one another and whose
    counts are sums. `steps`, `accepted` and `verified` are None where they cannot be seen."""

    token_ids: tuple[int, ...]
    decode_seconds: float
    ttft: float
    wall_seconds: float
    steps: int | None = None
    accepted: int | None = None
    verified: int | None = None
    by_drafter: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    texts: int = 1


class Method(Protocol):
    def generate(self, prompt: Sequence[int], limit: int, trace: Trace | None = None) -> Outcome:
        """Generates at most `limit` tokens; `trace` records them, where the method is ours."""

    def together(self, prompts: Sequence[Sequence[int]], limit: int) -> Outcome:
        """The same for several prompts in one batch."""

    def close(self) -> None:
        """Frees what is not shared."""


def parse(name: str, drafters: Sequence[str], draft: bool) -> Spec:
    """The method of that name, or a UsageError if it cannot run with these drafters."""
    if name in HF:
        if name == "hf-assisted" and not draft:
            raise UsageError("method hf-assisted needs a draft model")
        return Spec(name, None)
    available = (*drafters, MODEL) if draft else tuple(drafters)
    # A policy's own name may end in plus signs, so they are no place to cut it off.
    heads = [k for k in policies.REGISTRY if name.startswith((f"{k}:", f"{k}+")) or name == k]
    if not heads:
        known = ", ".join((*policies.REGISTRY, *HF))
        raise UsageError(f"unknown method {name!r}: choose among {known}, or POLICY+DRAFTER")
    argument, plus, only = name[len(heads[0]) :].partition("+")
    policy = heads[0] + argument
    if only == MODEL and not draft:
        raise UsageError(f"method {name} needs a draft model")
    if plus and only not in available:
        raise UsageError(f"method {name}: no drafter {only!r} among {', '.join(available)}")
    chosen = (only,) if plus else available
    serial = {d: CostCurve() for d in chosen if d == MODEL}
    made = policies.make(policy, policies.Costs(CostCurve(), serial, chosen))
    return Spec(name, policy, _used(made, chosen))


def _used(policy: policies.Policy, drafters: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the drafters that a policy can ever ask."""
    if policy.name == "plain":
        return ()
    one = getattr(policy, "drafter", None)
    return (one,) if one in drafters else drafters


def check_batches(specs: Sequence[Spec], sizes: Sequence[int]) -> None:
    for spec in specs:
        if spec.name in HF and spec.name != "hf-plain" and max(sizes, default=1) > 1:
            raise UsageError(f"method {spec.name} takes one prompt at a time: leave it out")


def check_drafters(names: Sequence[str]) -> None:
    for name in names:
        if name == MODEL or name not in DRAFTERS:
            known = ", ".join(d for d in DRAFTERS if d != MODEL)
            raise UsageError(f"unknown drafter {name!r}: choose among {known}")


def make(spec: Spec, loaded: Loaded, eos: frozenset[int], sampled: Sampled, costs: Path) -> Method:
    """`costs`: a folder with the cost curves of the target and the draft model."""
    if spec.policy is None:
        return HFMethod(spec.name, loaded.theirs or loaded, eos, sampled)
    drafters: list[Any] = [loaded.draft if d == MODEL else d for d in spec.drafters]
    model = Model(loaded.target, loaded.tokenizer, drafters, policy=spec.policy, costs=costs)
    return DraftwiseMethod(model, sampled)


class DraftwiseMethod:
    def __init__(self, model: Model, sampled: Sampled):
        self.model, self._sampled = model, sampled

    def generate(self, prompt: Sequence[int], limit: int, trace: Trace | None = None) -> Outcome:
        start = time.perf_counter()
        call = self.model.stream(
            list(prompt),
            max_new_tokens=limit,
            temperature=self._sampled.temperature,
            seed=self._sampled.seed,
            trace=trace,
        )
        for _ in call:
            pass
        wall = time.perf_counter() - start - call.recording_seconds
        result = call.result
        stats = result.stats
        return Outcome(
            result.token_ids,
            wall - stats.first_token_seconds,  # timed from outside too, as transformers is
            stats.first_token_seconds,
            wall,
            stats.steps,
            stats.accepted,
            stats.verified,
            {name: dict(counts) for name, counts in stats.by_drafter.items()},
        )

    def together(self, prompts: Sequence[Sequence[int]], limit: int) -> Outcome:
        start = time.perf_counter()
        batch = self.model.stream_batch(
            [list(prompt) for prompt in prompts],
            max_new_tokens=limit,
            temperature=self._sampled.temperature,
            seed=[self._sampled.seed] * len(prompts),  # a text is the same in every batch size
            batch_size=len(prompts),
        )
        for _ in batch:
            pass
        wall = time.perf_counter() - start
        stats = [result.stats for result in batch.results]
        first = sum(s.first_token_seconds for s in stats)  # prompts are read one after the other
        served: dict[str, Counter[str]] = {}
        for own in stats:
            for name, counts in own.by_drafter.items():
                served.setdefault(name, Counter()).update(counts)
        return Outcome(
            tuple(token for result in batch.results for token in result.token_ids),
            wall - first,
            first,
            wall,
            sum(s.steps for s in stats),
            sum(s.accepted for s in stats),
            sum(s.verified for s in stats),
            {name: dict(counts) for name, counts in served.items()},
            len(prompts),
        )

    def close(self) -> None:
        self.model.close()


class HFMethod:
    def __init__(self, name: str, loaded: Loaded, eos: frozenset[int], sampled: Sampled):
        from transformers import GenerationConfig

        self._target, self._seed = loaded.target, sampled.seed
        self._assistant = loaded.draft if name == "hf-assisted" else None
        pad = getattr(loaded.tokenizer, "pad_token_id", None)
        config = GenerationConfig(
            do_sample=sampled.temperature > 0,
            eos_token_id=sorted(eos) or None,
            pad_token_id=min(eos, default=0) if pad is None else pad,
        )
        if sampled.temperature > 0:
            config.temperature, config.top_k, config.top_p = sampled.temperature, 0, 1.0
        if name == "hf-lookup":
            config.prompt_lookup_num_tokens = HF_LOOKUP_TOKENS
        self._config = config

    def generate(self, prompt: Sequence[int], limit: int, trace: Trace | None = None) -> Outcome:
        return self.together([prompt], limit)

    def together(self, prompts: Sequence[Sequence[int]], limit: int) -> Outcome:
        target, device = self._target, self._target.device
        longest = max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        pad = self._config.pad_token_id
        rows = [[pad] * n + list(prompt) for n, prompt in zip(pads, prompts, strict=True)]
        ids = torch.tensor(rows, dtype=torch.long, device=device)
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in pads], device=device)
        inputs = {"input_ids": ids, "attention_mask": mask}
        options: dict[str, Any] = {"assistant_model": self._assistant} if self._assistant else {}
        self._config.max_new_tokens = limit
        generate: Any = target.generate
        with (
            _seeded(self._seed),
            _own_defaults(target, self._config),
            torch.inference_mode(),
            first_forward(target, self._assistant) as first,
        ):
            start = _now(device)
            made = generate(**inputs, generation_config=self._config, **options)
            total = _now(device) - start
        texts = [self._ended(row) for row in made[:, longest:].tolist()]
        ids_out = tuple(token for text in texts for token in text)
        seconds = first.decode_seconds(start, total)
        return Outcome(ids_out, seconds, first.end - start, total, texts=len(prompts))

    def _ended(self, row: list[int]) -> list[int]:
        """A row without what fills it up after its end."""
        stops = set(self._config.eos_token_id or ())
        return row[: next((i + 1 for i, t in enumerate(row) if t in stops), len(row))]

    def close(self) -> None:
        return


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def _own_defaults(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """For a while, what a call leaves open is not filled in from the defaults that the model ships:
    `generate` would take a repetition penalty from there."""
    shipped = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = shipped


class FirstForward:
    """When the first forward of all began, and when the target's first began and ended."""

    def __init__(self) -> None:
        self.any = self.begin = self.end = 0.0

    def decode_seconds(self, start: float, total: float) -> float:
        if not self.end:
            raise RuntimeError("the target was never called through its hooks")
        return total - (self.any - start) - (self.end - self.begin)


@contextmanager
def first_forward(
    target: PreTrainedModel, assistant: PreTrainedModel | None = None
) -> Iterator[FirstForward]:
    """Times the target's first forward. Each hook removes itself when it has been called, so that
    later forwards run without any."""
    seen = FirstForward()
    handles: dict[str, Any] = {}

    def begins(module: Any, inputs: Any) -> None:
        handles.pop("begins").remove()
        seen.begin = _now(target.device)
        seen.any = seen.any or seen.begin

    def ends(module: Any, inputs: Any, output: Any) -> None:
        handles.pop("ends").remove()
        seen.end = _now(target.device)

    def assists(module: Any, inputs: Any) -> None:
        handles.pop("assists").remove()
        seen.any = seen.any or _now(target.device)

    try:
        handles["begins"] = target.register_forward_pre_hook(begins)
        handles["ends"] = target.register_forward_hook(ends)
        if assistant is not None:
            handles["assists"] = assistant.register_forward_pre_hook(assists)
        yield seen
    finally:
        for handle in handles.values():
            handle.remove()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
