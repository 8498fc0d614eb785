"""`load`: a Model from the names of its target and drafters.

Names and options are checked before any weights are read; a draft model that exceeds the drafters'
memory is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import policy as policies
from .accept import check as check_acceptance
from .api import DEFAULT_DRAFTERS, Model
from .core import UsageError
from .drafters import REGISTRY as DRAFTERS
from .engines import REGISTRY as ENGINES
from .engines.kernels import check as check_kernels
from .memory import parse_size
from .vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    import torch


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
    kernels: str = "auto",
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
    if there is one. `kernels`: "eager" (transformers' own layers), "prepacked" (weights laid out
    for the processor), "compiled" (torch.compile on top, minutes the first time) or "auto" (the
    fastest that takes no compiling); what does not work or gain here is left out, with a note.
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
    check_kernels(kernels)
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
        kernels=kernels,
    )
    for name, weighs in refused.items():
        assert made._memory is not None
        made._memory.refused(name, weighs)
    return made
