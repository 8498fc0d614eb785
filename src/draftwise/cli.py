"""The command line: `draftwise demo`, `generate`, `chat`, `bench`, `replay` and `profile`.

What a program reads (text, JSON, tables) goes to stdout, what a person watches to stderr. Every
error is one line: exit code 2 for what the user can mend, 1 for the rest, 130 after Ctrl-C.

torch and transformers take over a second to import, so commands import them when they run. Options
are declared in cli_options.py; `typer.Context.params` carries those that several commands share to
what reads them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import typer

from . import cli_options as options
from .core import SamplingParams, UsageError
from .options import sampling_params
from .refusals import INSTEAD

if TYPE_CHECKING:
    from .api import Model
    from .trace import Trace

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The same text from a language model, sooner: speculative decoding that decides at "
    "every step.",
)

COMMANDS = "/quit ends, /reset forgets the conversation, /stats shows the last answer's figures"


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: options.Version = False,
) -> None:
    if version:
        from . import __version__

        print(f"draftwise {__version__}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def demo(
    target: options.Target = None,
    draft: options.DraftModel = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    max_new_tokens: options.Length = 96,
    as_json: options.Json = False,
) -> None:
    """Run plain and auto side by side on four short prompts."""
    from .demo import demo as run

    _threads(threads)
    report = run(target, draft, dtype, device, max_new_tokens, as_json)
    if as_json:
        print(json.dumps(report))
    if report["interrupted"]:
        raise typer.Exit(130)


@app.command()
@options.sharing(options.Loading, options.Sampling, options.Recording)
def generate(
    ctx: typer.Context,
    prompt: options.Prompt = None,
    raw: options.Raw = False,
    stats: options.StatsLine = False,
    explain: options.Explain = False,
    as_json: options.Json = False,
) -> None:
    """Generate from one prompt and stream the text to stdout."""
    from . import show

    params = _sampling(ctx)
    text, trace = _prompt(prompt), _shared_trace(ctx, "generate")
    with _load(ctx) as model, show.interruptible() as cancel:
        chat = not raw and getattr(model.tokenizer, "chat_template", None)
        ids = model.encode([{"role": "user", "content": text}] if chat else text)
        with model.start(ids, params, cancel=cancel, trace=trace) as call:
            if explain:
                from .explain import stream

                result, steps = stream(call, model, silent=as_json)
            else:
                result, steps = show.stream(call, silent=as_json), None
    if as_json:
        print(json.dumps(show.answer(result) | ({"explain": steps} if explain else {})))
    if stats:
        show.say(show.figures(result.stats))
    if cancel.is_set():
        raise typer.Exit(130)


@app.command()
@options.sharing(options.Loading, options.Sampling, options.Recording)
def chat(
    ctx: typer.Context,
    system: options.System = None,
    as_json: options.Json = False,
) -> None:
    """Talk with the model; each line of stdin is one message. /quit or Ctrl-D ends it."""
    params, trace = _sampling(ctx), _shared_trace(ctx, "chat")
    opening = [] if system is None else [{"role": "system", "content": system}]
    with _load(ctx) as model:
        if not getattr(model.tokenizer, "chat_template", None):
            raise UsageError("this model has no chat template: use `draftwise generate`")
        _converse(model, params, opening, as_json, trace)


@app.command()
def bench(
    target: options.Target = None,
    draft: options.DraftModel = None,
    prompts: options.Prompts = None,
    per_category: options.PerCategory = 4,
    max_new_tokens: options.Length = 128,
    methods: options.Methods = None,
    out: options.Out = None,
    temperature: options.Warmth = 0.0,
    seed: options.FirstSeed = 0,
    dtype: options.Dtype = None,
    kernels: options.Kernels = "auto",
    threads: options.Threads = None,
    fresh: options.Fresh = False,
    trace: options.BenchTrace = None,
    trace_shadow: options.TraceShadow = False,
    batch: options.Batch = None,
) -> None:
    """Measure methods against each other, prompt by prompt or batch by batch."""
    from rich.console import Console

    from .bench.report import table
    from .bench.run import BenchOptions, run

    usual = options.BATCH_METHODS if batch else options.METHODS
    chosen = tuple(m.strip() for m in methods.split(",") if m.strip()) if methods else usual
    if methods is None and draft is not None and not batch:
        chosen = (*usual, "hf-assisted")
    wanted = BenchOptions(
        target=target,
        draft=draft,
        prompts=prompts,
        per_category=per_category,
        max_new_tokens=max_new_tokens,
        methods=chosen,
        out=out,
        temperature=temperature,
        seed=seed,
        dtype=dtype,
        kernels=kernels,
        threads=threads,
        fresh=fresh,
        trace=_trace(trace, trace_shadow, draft is not None),
        batch=_sizes(batch),
    )
    report = run(wanted, Console(stderr=True))
    Console().print(table(report))


def _sizes(batch: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in batch.split(",")) if batch else ()
    except ValueError:
        raise UsageError(f"--batch takes whole numbers such as 1,2,4,8, not {batch!r}") from None


@app.command()
def replay(
    trace: options.TracePath,
    policy: options.Policies = None,
    cost: options.Costs = None,
    calibration: options.Calibration = False,
    plot: options.Plot = None,
    markdown: options.Markdown = False,
    out: options.Out = None,
) -> None:
    """Run policies over a recorded trace, on a clock of cost curves, without a model."""
    from rich.console import Console

    from .bench.replayed import as_markdown, tables
    from .bench.studies import ReplayOptions, run

    wanted = ReplayOptions(
        trace,
        policies=tuple(policy or ("auto",)),
        costs=tuple(cost or ("trace",)),
        calibration=calibration,
        plot=plot,
        out=out,
    )
    report = run(wanted, Console(stderr=True))
    if markdown:
        print(as_markdown(report))
    else:
        Console().print(tables(report))


@app.command()
def profile(
    target: options.Target = None,
    draft: options.DraftModel = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    kernels: options.Kernels = "auto",
    threads: options.Threads = None,
    refresh: options.Refresh = False,
    as_json: options.Json = False,
) -> None:
    """Print the measured cost curve: milliseconds of a forward by width and context."""
    from . import show

    _threads(threads)
    report = {"target": show.profile(target, dtype, device, kernels, refresh)}
    if draft is not None:
        report["draft"] = show.profile(draft, dtype, device, kernels, refresh)
    if as_json:
        print(json.dumps(report))
    else:
        show.profiles(report)


def _sampling(ctx: typer.Context) -> SamplingParams:
    """The sampling options of a command, checked before anything is loaded."""
    return sampling_params({f.name: ctx.params.get(f.name) for f in fields(SamplingParams)})


def _shared_trace(ctx: typer.Context, label: str) -> Trace | None:
    """What the options of `Recording` ask for."""
    given = ctx.params
    draft = given["draft"] is not None
    return _trace(given["trace"], given["trace_shadow"], draft, given["trace_text"], label)


def _trace(
    path: Path | None, shadow: bool, draft: bool, text: bool = False, label: str = ""
) -> Trace | None:
    """The trace to record, checked before anything is loaded."""
    if path is None:
        if shadow or text:
            raise UsageError("--trace-shadow and --trace-text need --trace FILE")
        return None
    from .bench.traces import check_writable
    from .trace import Trace

    if shadow and not draft:
        raise UsageError("--trace-shadow needs a draft model: name one with --draft")
    trace = Trace(path, shadow, text, label)
    check_writable(trace.file)
    return trace


def _prompt(prompt: str | None) -> str:
    if prompt is None or prompt == "-":
        if _typing():
            print("Type the prompt, then Ctrl-D:", file=sys.stderr)
        prompt = _utf8(_stdin().read())
    if not prompt.strip():
        raise UsageError("the prompt is empty")
    # What is no UTF-8 on the command line arrives as lone surrogates.
    return _utf8(prompt.encode(errors="surrogateescape"))


def _stdin() -> BinaryIO:
    return sys.stdin.buffer if sys.stdin else io.BytesIO()  # a closed stdin is None


def _typing() -> bool:
    return bool(sys.stdin) and sys.stdin.isatty()


def _utf8(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not UTF-8 text: {error}") from error


def _threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _load(ctx: typer.Context) -> Model:
    """The model that the options name; names are checked before any weights are read."""
    from . import show
    from .accept import check as check_acceptance
    from .engines.kernels import check as check_kernels
    from .loading import load
    from .memory import parse_size
    from .policy import Costs, Goal, make
    from .policy.cost import CostCurve

    chosen = ctx.params
    drafters, draft = _drafters(chosen["drafters"]), chosen["draft"]
    serial = {} if draft is None else {"model": CostCurve()}
    goal = Goal(chosen["objective"], chosen["max_slowdown"])
    make(chosen["policy"], Costs(CostCurve(), serial, (*drafters, *serial)), goal)
    parse_size(chosen["draft_memory"])
    check_acceptance(chosen["acceptance"], chosen["quality_budget"])
    check_kernels(chosen["kernels"])
    _threads(chosen["threads"])
    show.watched(f"Loading {show.named(chosen['target'])}" + (f" and {draft}" if draft else ""))
    model = load(
        chosen["target"],
        drafters if draft is None else [*drafters, draft],
        policy=chosen["policy"],
        acceptance=chosen["acceptance"],
        quality_budget=chosen["quality_budget"],
        objective=chosen["objective"],
        max_slowdown=chosen["max_slowdown"],
        draft_memory=chosen["draft_memory"],
        dtype=chosen["dtype"],
        device=chosen["device"],
        kernels=chosen["kernels"],
    )
    if model.engine.caps.rollback == "none":  # other notes are in the log already
        show.say(str(model.note))
    return model


def _drafters(names: str) -> list[str]:
    from .drafters import REGISTRY

    known = [name for name in REGISTRY if name != "model"]
    chosen = [name.strip() for name in names.split(",") if name.strip() not in ("", "none")]
    for name in chosen:
        if name not in known:
            raise UsageError(
                f"unknown drafter {name!r}: choose among {', '.join(known)}, or name a model "
                "with --draft"
            )
    return chosen


def _converse(
    model: Model,
    params: SamplingParams,
    opening: list[dict[str, str]],
    as_json: bool,
    trace: Trace | None,
) -> None:
    from . import show

    interactive = _typing()
    messages, last = list(opening), None
    for line in _typed() if interactive else _piped(_stdin()):
        message = line.strip()
        if message == "/quit":
            return
        if message == "/reset":
            messages = list(opening)
            show.say("conversation forgotten")
        elif message == "/help":
            show.say(COMMANDS)
        elif message == "/stats":
            show.say(show.figures(last.stats) if last else "no answer yet")
        elif message.startswith("/") and message[1:].isalpha():
            show.say(f"unknown command {message}: {COMMANDS}")
        elif message:
            asked = [*messages, {"role": "user", "content": message}]
            try:
                ids = model.encode(asked)
                with (
                    show.interruptible() as cancel,
                    model.start(ids, params, reuse=True, cancel=cancel, trace=trace) as call,
                ):
                    last = show.stream(call, silent=as_json)
            except UsageError as error:  # such as a conversation longer than the context
                if not interactive:
                    raise
                show.say(f"{error} (/reset begins anew)")
                continue
            messages = [*asked, {"role": "assistant", "content": last.text}]
            if as_json:
                print(json.dumps(show.answer(last)), flush=True)


def _piped(lines: Iterable[bytes]) -> Iterator[str]:
    return (_utf8(line) for line in lines)


def _typed() -> Iterator[str]:
    """Lines that a person types, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` editing and history)
    print(COMMANDS, file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{COMMANDS}", file=sys.stderr)
            continue
        yield line


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    debug = bool(os.environ.get("DRAFTWISE_DEBUG"))
    if not debug:
        warnings.simplefilter("ignore")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if sys.stdout is None:  # closed by the caller, who then wants no output
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal has every character
    try:
        code = typer.main.get_command(app).main(args, prog_name="draftwise", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:
        # What is still buffered must not raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            raise
        message, code = _explained(error)
        print(f"draftwise: {' '.join(message.split())}", file=sys.stderr)
        return code


def _explained(error: Exception) -> tuple[str, int]:
    if isinstance(error, UsageError):
        return str(error), 2
    # typer's own errors; their class is not public.
    if hasattr(error, "format_message"):
        hint = INSTEAD.get(str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_"))
        return str(error.format_message()).rstrip(".") + (f": {hint}" if hint else ""), 2
    reason = (str(error).strip().splitlines() or [""])[0]
    hint = "(DRAFTWISE_DEBUG=1 shows the traceback)"
    return f"{type(error).__name__}: {reason} {hint}", 1


if __name__ == "__main__":
    sys.exit(main())
