"""Draftwise: the same text, faster, by speculative decoding that decides at every step."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Model
    from .call import Batch, Call
    from .core import SamplingParams, UsageError
    from .hooks import custom_generate, generate
    from .loading import load
    from .result import Result, Stats
    from .trace import Trace

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Call",
    "Model",
    "Result",
    "SamplingParams",
    "Stats",
    "Trace",
    "UsageError",
    "custom_generate",
    "generate",
    "load",
]

# Imported when first used: torch takes over a second, and `draftwise --help` needs none of it.
_HOMES = {
    "Batch": "call",
    "Call": "call",
    "Model": "api",
    "Result": "result",
    "SamplingParams": "core",
    "Stats": "result",
    "Trace": "trace",
    "UsageError": "core",
    "custom_generate": "hooks",
    "generate": "hooks",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
