"""Draftwise: the same text, faster, by speculative decoding that decides at every step."""

from .api import Call, Model, load
from .core import SamplingParams, UsageError
from .hooks import custom_generate, generate
from .result import Result, Stats

__version__ = "0.1.0"
__all__ = [
    "Call",
    "Model",
    "Result",
    "SamplingParams",
    "Stats",
    "UsageError",
    "custom_generate",
    "generate",
    "load",
]
