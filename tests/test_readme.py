"""What the README shows is run: its Python as it stands, its commands with bounds on their time."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recording import record

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"<!-- runs in the tests(.*?) -->\n```python\n(.*?)```", README, re.S)
SHELL = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line.strip()
]
COMMANDS = [line for line in SHELL if line.startswith("draftwise ")]
# What keeps a command within seconds, without changing what it is.
BOUNDS = {
    "generate": ["--max-new-tokens", "8"],
    "chat": ["--max-new-tokens", "8"],
    "bench": ["--max-new-tokens", "4", "--per-category", "1", "--methods", "plain,auto"],
}


def test_every_python_block_is_run() -> None:
    assert len(PYTHON) == README.count("```python")


@pytest.mark.parametrize(("needs", "code"), PYTHON)
def test_python(needs: str, code: str, smollm2_path: Path) -> None:
    names: dict[str, object] = {}
    if "model" in needs:
        names["model"] = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.bfloat16)
        names["tokenizer"] = AutoTokenizer.from_pretrained(smollm2_path)
    exec(compile(code, "README.md", "exec"), names)
    if "model" in needs:
        assert names["ids"].shape[0] == 1  # type: ignore[attr-defined]
        assert names["result"].text  # type: ignore[attr-defined]


@pytest.mark.parametrize("line", COMMANDS)
def test_command(line: str, smollm2_path: Path, tmp_path: Path) -> None:
    words = shlex.split(line)
    models = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")
    words = [str(smollm2_path) if w in models else w for w in words]
    words += BOUNDS.get(words[1], [])
    if words[1] == "replay":
        record(tmp_path / words[2], tokens=20)
    done = subprocess.run(
        [sys.executable, "-m", "draftwise.cli", *words[1:]],
        input="Hello\n/quit\n",
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("make ")])
def test_make_target_exists(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{line.split()[1]}:", makefile, re.M)


def test_local_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
