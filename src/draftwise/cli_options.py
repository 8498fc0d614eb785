"""The options of the command line, each declared once, as a type.

A command lists its own in its signature. Those that several commands share, for loading, sampling
and recording, are the fields of `Loading`, `Sampling` and `Recording`: `sharing(Loading, Sampling)`
adds them to a command's signature (typer reads nothing else), and the command finds their values in
`typer.Context.params`. Defaults of sampling options are those of SamplingParams; an option that was
not given is None there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from .config import read_config

_MODEL, _SAMPLING = "Model", "Sampling"
METHODS = ("plain", "auto", "fixed:5", "hf-plain", "hf-lookup")


def _option(help: str, default: str, metavar: str | None = None, panel: str = _SAMPLING) -> Any:
    return typer.Option(help=help, show_default=default, metavar=metavar, rich_help_panel=panel)


_SOURCE, _TARGET = "A Hugging Face id, model folder or .gguf file.", "SmolLM2-135M-Instruct"
_DRAFT = "A draft model with the target's tokenizer."
_DTYPE, _DEVICE = "float32, bfloat16 or float16.", "cpu, cuda, cuda:1 and so on."
_MEMORY = "Drafters may take this much, such as 500MB or 2GiB."
_SLOWER = "By this share a run may be slower than plain."
Target = Annotated[str | None, _option(_SOURCE, _TARGET, "MODEL", _MODEL)]
DraftModel = Annotated[str | None, _option(_DRAFT, "none", "MODEL", _MODEL)]
_DRAFTERS = "lookup,suffix,recycling"
Drafters = Annotated[str, _option("Drafters, or 'none'.", _DRAFTERS, "NAMES", _MODEL)]
PolicyName = Annotated[str, _option("auto, plain or fixed:K.", "auto", "NAME", _MODEL)]
_RULES = "coupled, rejection, block, auto; with loss: typical, topk."
Acceptance = Annotated[str, _option(_RULES, "coupled", "RULE", _MODEL)]
_BUDGET = "Nats a token that may be given up for speed, 0 to 2; 0 is lossless."
Budget = Annotated[float, _option(_BUDGET, "0", "NATS", _MODEL)]
Objective = Annotated[str, _option("latency or throughput.", "latency", "NAME", _MODEL)]
MaxSlowdown = Annotated[float, _option(_SLOWER, "0.02", "SHARE", _MODEL)]
DraftMemory = Annotated[str | None, _option(_MEMORY, "no limit", "SIZE", _MODEL)]
Dtype = Annotated[str | None, _option(_DTYPE, "the checkpoint's", "DTYPE", _MODEL)]
Device = Annotated[str | None, _option(_DEVICE, "cuda if present", "DEVICE", _MODEL)]
_KERNELS = "eager, prepacked, compiled (slow to load at first) or auto."
Kernels = Annotated[str, _option(_KERNELS, "auto", "NAME", _MODEL)]
_THREADS = typer.Option(min=1, max=1024, help="CPU threads.", rich_help_panel=_MODEL)
Threads = Annotated[int | None, _THREADS]
_CONFIG = "TOML or JSON file of options by name; the command line wins over it."
_ReadFile = typer.Option(
    metavar="FILE", exists=True, dir_okay=False, is_eager=True, callback=read_config, help=_CONFIG
)
Config = Annotated[Path | None, _ReadFile]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Version = Annotated[bool, typer.Option("--version", help="Print the version.")]

MaxNewTokens = Annotated[int | None, _option("At most this many new tokens.", "256")]
MinNewTokens = Annotated[int | None, _option("No end of text before.", "0")]
Temperature = Annotated[float | None, _option("0 is greedy.", "0")]
TopK = Annotated[int | None, _option("Keep the K best tokens; 0 is off.", "0")]
TopP = Annotated[float | None, _option("Keep this much probability; 1 is off.", "1")]
MinP = Annotated[float | None, _option("Keep this share of the best's probability.", "0")]
Repetition = Annotated[float | None, _option("Divides the logits of seen tokens.", "1")]
Presence = Annotated[float | None, _option("Subtracted from generated tokens.", "0")]
Frequency = Annotated[float | None, _option("Subtracted for every occurrence.", "0")]
Stop = Annotated[list[str] | None, _option("Ends the text; repeatable.", "none")]
Seed = Annotated[int | None, _option("Makes sampling repeatable.", "random")]

Prompt = Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads stdin.")]
Raw = Annotated[bool, typer.Option("--raw", help="Do not use the chat template.")]
StatsLine = Annotated[bool, typer.Option("--stats", help="A line of figures on stderr.")]
_EXPLAIN = "Colour the text by how each token came, and log every step on stderr."
Explain = Annotated[bool, typer.Option("--explain", help=_EXPLAIN)]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")]
Length = Annotated[int, typer.Option(min=2, help="New tokens for every prompt.")]
Refresh = Annotated[bool, typer.Option("--refresh", help="Measure again.")]

_PROMPTS = typer.Option(metavar="FILE", exists=True, dir_okay=False, help="JSON lines of prompts.")
_OUT = typer.Option("--json", metavar="OUT", dir_okay=False, help="Write the report there.")
Prompts = Annotated[Path | None, _PROMPTS]
Out = Annotated[Path | None, _OUT]
PerCategory = Annotated[int, typer.Option(min=1, help="Prompts of each category.")]
BATCH_METHODS = tuple(m for m in METHODS if m == "hf-plain" or not m.startswith("hf-"))
_AMONG = f"{','.join(METHODS)}, and hf-assisted with a draft model"
Methods = Annotated[str | None, _option("Comma-separated.", _AMONG, "NAMES", "Options")]
Warmth = Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy.")]
FirstSeed = Annotated[int, typer.Option("--seed", help="Seed of every prompt.")]
_BATCH = (
    "Measure batches of these sizes, comma-separated, against plain decoding of the same batches."
)
Batch = Annotated[str | None, _option(_BATCH, "single prompts", "SIZES", "Options")]
Fresh = Annotated[bool, typer.Option("--fresh/--resume", help="Begin anew, or go on from OUT.")]


_RECORDING = "Trace"
_TRACE = "Add a trace of the requests to this file, for `draftwise replay`; .gz is compressed."
_SHADOW = "Record also what the draft model would have chosen where it was not asked."
_TEXT = "Record also the token ids; without it no text is in a trace."
_FirstTraced = (
    "Add a trace of the first method of Draftwise that is not plain. What recording takes is taken "
    "off that method's seconds, but may still disturb it a little."
)
TraceFile = Annotated[Path | None, _option(_TRACE, "none", "FILE", _RECORDING)]
_Flag = functools.partial(typer.Option, rich_help_panel=_RECORDING)
TraceShadow = Annotated[bool, _Flag("--trace-shadow", help=_SHADOW)]
TraceText = Annotated[bool, _Flag("--trace-text", help=_TEXT)]
BenchTrace = Annotated[Path | None, _option(_FirstTraced, "none", "FILE", _RECORDING)]

TracePath = Annotated[
    Path, typer.Argument(metavar="TRACE", exists=True, dir_okay=False, help="A recorded trace.")
]
_POLICIES = "A policy, such as auto or fixed:5, or all; repeatable."
Policies = Annotated[list[str] | None, _option(_POLICIES, "auto", "NAME", "Options")]
_COSTS = "trace (as recorded), flat, steep, or what `profile --json` printed; repeatable."
Costs = Annotated[list[str] | None, _option(_COSTS, "trace", "NAME", "Options")]
_CALIBRATION = "How the chances that auto foresaw compare with what came."
Calibration = Annotated[bool, typer.Option("--calibration", help=_CALIBRATION)]
_PLOT = typer.Option(metavar="DIR", file_okay=False, help="Draw plots there, as PNG and SVG.")
Plot = Annotated[Path | None, _PLOT]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]


class Loading:
    target: Target = None
    draft: DraftModel = None
    drafters: Drafters = _DRAFTERS
    policy: PolicyName = "auto"
    acceptance: Acceptance = "coupled"
    quality_budget: Budget = 0.0
    objective: Objective = "latency"
    max_slowdown: MaxSlowdown = 0.02
    draft_memory: DraftMemory = None
    dtype: Dtype = None
    device: Device = None
    kernels: Kernels = "auto"
    threads: Threads = None
    config: Config = None


class Sampling:
    max_new_tokens: MaxNewTokens = None
    min_new_tokens: MinNewTokens = None
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    repetition_penalty: Repetition = None
    presence_penalty: Presence = None
    frequency_penalty: Frequency = None
    stop: Stop = None
    seed: Seed = None


class Recording:
    trace: TraceFile = None
    trace_shadow: TraceShadow = False
    trace_text: TraceText = False


Command = Callable[..., None]


def sharing(*shared: type) -> Callable[[Command], Command]:
    """Decorator: the command also takes the options that the classes list."""

    def share(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        more = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=vars(options)[name], annotation=hint
            )
            for options in shared
            for name, hint in get_type_hints(options, include_extras=True).items()
        ]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(**{name: values[name] for name in own.parameters})

        every = [*own.parameters.values(), *more]
        run.__signature__ = own.replace(parameters=every)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in every}
        return run

    return share
