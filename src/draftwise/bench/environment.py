"""Where and how a benchmark ran: what a reader needs to run it again and to judge the figures.

The commit is that of the source tree the package was imported from, None outside of one, and
`dirty` says whether tracked files had changes. Load averages at start and end show whether others
used the machine. The cost curves were measured before the first prompt: [width, context, ms].
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..policy.cost import CostCurve


def describe(device: torch.device) -> dict[str, Any]:
    commit = _git("rev-parse", "HEAD")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "draftwise": __version__,
        "commit": commit,
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")) if commit else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        # transformers' assisted generation tunes its threshold only where this is installed.
        "scikit-learn": _version("scikit-learn"),
        "platform": platform.platform(),
        "cpu": cpu(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def load_average() -> list[float] | None:
    """Of the last 1, 5 and 15 minutes; None where the system has none."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None


def curve(costs: CostCurve) -> list[list[float]]:
    return [[s.width, s.context, round(1000 * t, 3)] for s, t in costs.points()]


def cores() -> int | None:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(*command: str) -> str | None:
    where = Path(__file__).resolve().parent
    # An installed package may lie inside someone else's repository: only a tree that tracks this
    # very file counts.
    tracked = ["git", "-C", str(where), "ls-files", "--error-unmatch", "../__init__.py"]
    try:
        subprocess.run(tracked, check=True, capture_output=True, timeout=10)
        run = subprocess.run(
            ["git", "-C", str(where), *command],
            check=True,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
