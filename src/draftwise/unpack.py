"""Unpacking a GGUF file to a checkpoint that transformers loads in a second.

transformers takes up to a minute to read a GGUF, so each is unpacked once, to an ordinary
bfloat16 checkpoint in the user's cache, under a name made from the file's content. What a GGUF
says less well than the original repository (how digits are split, which tokens end an answer) is
put right then.

A checkpoint appears whole or not at all: it is written beside its place, under a lock, and moved
there. `one_line` and `quiet` turn what libraries raise and print into what a user should see.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from filelock import FileLock
from gguf import GGUFReader
from platformdirs import user_cache_dir
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from draftwise.core import UsageError

# Part of a checkpoint's name: raise it when the conversion changes, or old ones stay in use.
LAYOUT = 1
# A GGUF names one end token; chat models end a turn with one and a document with another.
END_TOKENS = frozenset(
    [
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<end_of_turn>",
    ]
)
# Vocabularies learned with every digit on its own, which transformers' GGUF reader does not know.
SINGLE_DIGITS = frozenset(
    ["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"]
)
LIBRARY_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


def gguf_checkpoint(path: str | Path, progress: bool = True) -> Path:
    """The folder of a transformers checkpoint with that GGUF's content, made on the first call."""
    source = Path(path).expanduser()
    with one_line(f"cannot read {source}"), open(source, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UsageError(f"{source} is not a GGUF file")
        digest = hashlib.sha256(b"GGUF")
        while block := file.read(1 << 20):
            digest.update(block)
    models = cache_dir() / "models"
    target = models / f"{source.stem}-{digest.hexdigest()[:12]}-v{LAYOUT}"
    if target.is_dir():
        return target
    with one_line(f"cannot write to {models} (DRAFTWISE_CACHE names another folder)", OSError):
        models.mkdir(parents=True, exist_ok=True)
        # Two processes converting at once would hold the dense weights twice.
        lock = FileLock(f"{target}.lock")
        with steps(f"Unpacking {source.name} (once)", progress) as step, lock:
            if not target.is_dir():
                _convert(source, target, step)
    return target


def cache_dir() -> Path:
    """Where unpacked models live, `DRAFTWISE_CACHE` if that is set."""
    return Path(os.environ.get("DRAFTWISE_CACHE") or user_cache_dir("draftwise")).expanduser()


def _convert(source: Path, target: Path, step: Callable[[str], None]) -> None:
    """Write the checkpoint beside `target` and move it there whole. The caller holds the lock."""
    where, file = str(source.resolve().parent), source.name
    # Under the lock, so a folder of this name is what a killed process left.
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with one_line(f"cannot convert {source}"), quiet(bars=False):
            step("reading")
            tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
            split = GGUFReader(source).get_field("tokenizer.ggml.pre")
            if split is not None and split.contents() in SINGLE_DIGITS:
                tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Digits(individual_digits=True),
                        pre_tokenizers.ByteLevel(add_prefix_space=False),
                    ]
                )
            step("converting")
            model = AutoModelForCausalLM.from_pretrained(
                where,
                gguf_file=file,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
            )
            model.generation_config = GenerationConfig(
                bos_token_id=model.config.bos_token_id,
                eos_token_id=_end_ids(model.config, tokenizer),
                pad_token_id=model.config.pad_token_id,
            )
            step("writing")
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _end_ids(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends an answer, the one that the file names first."""
    named = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    known = (
        token_id
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and token.content in END_TOKENS
    )
    ids = [*named, tokenizer.eos_token_id, *known]
    return list(dict.fromkeys(i for i in ids if i is not None))


@contextlib.contextmanager
def one_line(
    what: str, kinds: type[Exception] | tuple[type[Exception], ...] = LIBRARY_ERRORS
) -> Iterator[None]:
    """Turn what libraries raise into a UsageError that says what failed, then why."""
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        raise UsageError(f"{what}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = reason.strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def quiet(bars: bool) -> Iterator[None]:
    """Hold back transformers' warnings, and its progress bars unless `bars`, for a while."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    # Some of the bars obey no setting, but all look up sys.stderr when they start.
    stderr = contextlib.nullcontext() if bars else contextlib.redirect_stderr(io.StringIO())
    try:
        with stderr:
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextlib.contextmanager
def steps(title: str, progress: bool) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr with the present step and the time so far, if a person is watching."""
    console = Console(file=sys.stderr)
    if not (progress and console.is_terminal):
        yield lambda step: None
        return
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda step: bar.update(task, description=f"{title}: {step}")
