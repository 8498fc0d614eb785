"""A file of options for the command line: TOML, or JSON by its ending.

Names are those of the command's options, with dashes or underscores. A file sets defaults, so the
command line wins over it; a name that the command does not have is refused with the nearest one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from .core import UsageError
from .refusals import unknown


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Makes the file's options the defaults, so that the command line wins over them."""
    if path is None:
        return None
    options = {
        p.opts[0].lstrip("-").replace("-", "_"): p
        for p in ctx.command.params
        if p.param_type_name == "option" and p.name not in ("config", "help")
    }
    ctx.default_map = ctx.default_map or {}
    for key, value in _parsed(path).items():
        name = key.replace("-", "_")
        if name not in options:
            hint = unknown(name, options).replace("_", "-")
            raise UsageError(f"unknown option {key!r} in {path}{hint}")
        option = options[name]
        if isinstance(value, dict):
            raise UsageError(f"option {key!r} in {path} must be a plain value, not a table")
        if value is None:
            continue
        # As text, a value meets the very checks that it meets on the command line.
        items = [str(v) for v in value] if isinstance(value, list) else [str(value)]
        ctx.default_map[str(option.name)] = items if option.multiple else ",".join(items)
    return path


def _parsed(path: Path) -> dict[str, Any]:
    try:
        content = path.read_text(encoding="utf-8")
        data = json.loads(content) if path.suffix == ".json" else _toml(content)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold one object of options")
    return data


def _toml(content: str) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:
        raise UsageError("TOML needs Python 3.11 or newer, write JSON instead") from None
    return tomllib.loads(content)
