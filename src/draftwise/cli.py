"""The command line: `draftwise demo`, `generate`, `chat`, `bench` and `profile`.

What a program reads (text, JSON, tables) goes to stdout, what a person watches to stderr. Every
error is one line: exit code 2 for what the user can mend, 1 for the rest, 130 after Ctrl-C.

torch and transformers take over a second to import, so commands import them when they run. Options
that several commands share are declared once, as types: a command's signature lists them, and
`typer.Context.params` carries them to what reads them. Defaults of sampling options are those of
SamplingParams; an option that was not given is None here.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from .config import read_config
from .core import SamplingParams, UsageError
from .options import sampling_params

if TYPE_CHECKING:
    from .api import Model

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The same text from a language model, sooner: speculative decoding that decides at "
    "every step.",
)

METHODS = ("plain", "auto", "fixed:5", "hf-plain", "hf-lookup")
COMMANDS = "/quit ends, /reset forgets the conversation, /stats shows the last answer's figures"


_MODEL, _SAMPLING = "Model", "Sampling"


def _option(help: str, default: str, metavar: str | None = None, panel: str = _SAMPLING) -> Any:
    return typer.Option(help=help, show_default=default, metavar=metavar, rich_help_panel=panel)


_SOURCE, _TARGET = "A Hugging Face id, model folder or .gguf file.", "SmolLM2-135M-Instruct"
_DRAFT = "A draft model with the target's tokenizer."
_DTYPE, _DEVICE = "float32, bfloat16 or float16.", "cpu, cuda, cuda:1 and so on."
Target = Annotated[str | None, _option(_SOURCE, _TARGET, "MODEL", _MODEL)]
DraftModel = Annotated[str | None, _option(_DRAFT, "none", "MODEL", _MODEL)]
Drafters = Annotated[str, _option("Drafters, or 'none'.", "lookup,suffix", "NAMES", _MODEL)]
PolicyName = Annotated[str, _option("auto, plain or fixed:K.", "auto", "NAME", _MODEL)]
Acceptance = Annotated[str, _option("coupled or rejection.", "coupled", "RULE", _MODEL)]
Dtype = Annotated[str | None, _option(_DTYPE, "the checkpoint's", "DTYPE", _MODEL)]
Device = Annotated[str | None, _option(_DEVICE, "cuda if present", "DEVICE", _MODEL)]
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
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")]
Length = Annotated[int, typer.Option(min=2, help="New tokens for every prompt.")]
Refresh = Annotated[bool, typer.Option("--refresh", help="Measure again.")]

_PROMPTS = typer.Option(metavar="FILE", exists=True, dir_okay=False, help="JSON lines of prompts.")
_OUT = typer.Option("--json", metavar="OUT", dir_okay=False, help="Write the report there.")
Prompts = Annotated[Path | None, _PROMPTS]
Out = Annotated[Path | None, _OUT]
PerCategory = Annotated[int, typer.Option(min=1, help="Prompts of each category.")]
_AMONG = f"{','.join(METHODS)}, and hf-assisted with a draft model"
Methods = Annotated[str | None, _option("Comma-separated.", _AMONG, "NAMES", "Options")]
Warmth = Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy.")]
FirstSeed = Annotated[int, typer.Option("--seed", help="Seed of every prompt.")]
Fresh = Annotated[bool, typer.Option("--fresh/--resume", help="Begin anew, or go on from OUT.")]


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Version = False,
) -> None:
    if version:
        from . import __version__

        print(f"draftwise {__version__}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def demo(
    target: Target = None,
    draft: DraftModel = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    max_new_tokens: Length = 96,
    as_json: Json = False,
) -> None:
    """Run plain and auto side by side on four short prompts."""
    from .show import demo as run

    _threads(threads)
    report = run(target, draft, dtype, device, max_new_tokens, as_json)
    if as_json:
        print(json.dumps(report))


@app.command()
def generate(
    ctx: typer.Context,
    prompt: Prompt = None,
    target: Target = None,
    draft: DraftModel = None,
    drafters: Drafters = "lookup,suffix",
    policy: PolicyName = "auto",
    acceptance: Acceptance = "coupled",
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    max_new_tokens: MaxNewTokens = None,
    min_new_tokens: MinNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Repetition = None,
    presence_penalty: Presence = None,
    frequency_penalty: Frequency = None,
    stop: Stop = None,
    seed: Seed = None,
    raw: Raw = False,
    stats: StatsLine = False,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Generate from one prompt and stream the text to stdout."""
    from . import show

    params = _sampling(ctx)
    text = _prompt(prompt)
    with _load(ctx) as model, interruptible() as cancel:
        chat = not raw and getattr(model.tokenizer, "chat_template", None)
        ids = model.encode([{"role": "user", "content": text}] if chat else text)
        with model.start(ids, params, cancel=cancel) as call:
            result = show.stream(call, silent=as_json)
    if as_json:
        print(json.dumps(show.answer(result)))
    if stats:
        show.say(show.figures(result.stats))
    if cancel.is_set():
        raise typer.Exit(130)


@app.command()
def chat(
    ctx: typer.Context,
    target: Target = None,
    draft: DraftModel = None,
    drafters: Drafters = "lookup,suffix",
    policy: PolicyName = "auto",
    acceptance: Acceptance = "coupled",
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    max_new_tokens: MaxNewTokens = None,
    min_new_tokens: MinNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Repetition = None,
    presence_penalty: Presence = None,
    frequency_penalty: Frequency = None,
    stop: Stop = None,
    seed: Seed = None,
    system: System = None,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Talk with the model; each line of stdin is one message. /quit or Ctrl-D ends it."""
    params = _sampling(ctx)
    opening = [] if system is None else [{"role": "system", "content": system}]
    with _load(ctx) as model:
        if not getattr(model.tokenizer, "chat_template", None):
            raise UsageError("this model has no chat template: use `draftwise generate`")
        _converse(model, params, opening, as_json)


@app.command()
def bench(
    target: Target = None,
    draft: DraftModel = None,
    prompts: Prompts = None,
    per_category: PerCategory = 4,
    max_new_tokens: Length = 128,
    methods: Methods = None,
    out: Out = None,
    temperature: Warmth = 0.0,
    seed: FirstSeed = 0,
    dtype: Dtype = None,
    threads: Threads = None,
    fresh: Fresh = False,
) -> None:
    """Measure methods against each other, prompt by prompt."""
    from rich.console import Console

    from .bench.report import table
    from .bench.run import BenchOptions, run

    chosen = tuple(m.strip() for m in methods.split(",") if m.strip()) if methods else METHODS
    if methods is None and draft is not None:
        chosen = (*METHODS, "hf-assisted")
    options = BenchOptions(
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
        threads=threads,
        fresh=fresh,
    )
    report = run(options, Console(stderr=True))
    Console().print(table(report))


@app.command()
def profile(
    target: Target = None,
    draft: DraftModel = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    refresh: Refresh = False,
    as_json: Json = False,
) -> None:
    """Print the measured cost curve: milliseconds of a forward by width and context."""
    from . import show

    _threads(threads)
    report = {"target": show.profile(target, dtype, device, refresh)}
    if draft is not None:
        report["draft"] = show.profile(draft, dtype, device, refresh)
    if as_json:
        print(json.dumps(report))
    else:
        show.profiles(report)


def _sampling(ctx: typer.Context) -> SamplingParams:
    """The sampling options of a command, checked before anything is loaded."""
    return sampling_params({f.name: ctx.params.get(f.name) for f in fields(SamplingParams)})


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
    from .accept import RULES
    from .api import load
    from .policy import Costs, make
    from .policy.cost import CostCurve

    chosen = ctx.params
    drafters, draft = _drafters(chosen["drafters"]), chosen["draft"]
    serial = {} if draft is None else {"model": CostCurve()}
    make(chosen["policy"], Costs(CostCurve(), serial, (*drafters, *serial)))
    if chosen["acceptance"] not in RULES:
        raise UsageError(
            f"unknown acceptance {chosen['acceptance']!r}: choose among {', '.join(RULES)}"
        )
    _threads(chosen["threads"])
    show.watched(f"Loading {show.named(chosen['target'])}" + (f" and {draft}" if draft else ""))
    model = load(
        chosen["target"],
        drafters if draft is None else [*drafters, draft],
        policy=chosen["policy"],
        acceptance=chosen["acceptance"],
        dtype=chosen["dtype"],
        device=chosen["device"],
    )
    if model.note:
        show.say(model.note)
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


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that a text ends between two steps; pressed twice it interrupts."""
    cancel = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, previous)


def _converse(
    model: Model, params: SamplingParams, opening: list[dict[str, str]], as_json: bool
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
                    interruptible() as cancel,
                    model.start(ids, params, reuse=True, cancel=cancel) as call,
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
        return str(error.format_message()), 2
    reason = (str(error).strip().splitlines() or [""])[0]
    hint = "(DRAFTWISE_DEBUG=1 shows the traceback)"
    return f"{type(error).__name__}: {reason} {hint}", 1


if __name__ == "__main__":
    sys.exit(main())
