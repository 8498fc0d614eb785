"""Engines: who runs the target. `base.py` has the contract, `REGISTRY` names the members."""

from __future__ import annotations

from .transformers import TransformersEngine

REGISTRY = {"transformers": TransformersEngine}
