"""`--explain`: every token has the origin it came by, and the text is the one without it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from conftest import Run, random_ids, shared_model
from draftwise import Call, Model, explain
from draftwise.core import Draft, Features, StepPlan, StepResult, chain
from draftwise.explain import Explainer, Screen, lost, origins

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def draft(n: int, name: str = "lookup") -> Draft:
    return chain(0, name, range(n), [Features()] * n)


def step(
    committed: tuple[int, ...],
    verified: int = 0,
    accepted: int = 0,
    name: str = "lookup",
    drafted: tuple[Draft, ...] = (),
    **more: Any,
) -> StepResult:
    made = draft(verified, name) if verified else None
    plan = StepPlan(0, made, 1 + verified)
    more = {"path": tuple(range(accepted))} | more
    return StepResult(0, plan, 5, committed, accepted, drafted or ((made,) if made else ()), **more)


def merged(path: tuple[int, ...], **more: Any) -> StepResult:
    """A tree: 0 and its child 1 of the model, 2 beside 0 and its children 3 and 4 of others."""
    sources = ("model", "model", "suffix", "suffix", "lookup")
    made = replace(draft(5, "model"), parents=(-1, 0, -1, 2, 2), sources=sources)
    committed = (*path, 9)
    return StepResult(
        0, StepPlan(0, made, 6), 5, committed, len(path), (draft(2, "model"),), path=path, **more
    )


# Origins and losses


def test_every_committed_token_has_its_origin() -> None:
    assert origins(step((7,))) == ["plain"]
    assert origins(step((7,), prefill=True)) == ["plain"]
    assert origins(step((1, 2, 9), 2, 2)) == ["lookup", "lookup", "bonus"]
    assert origins(step((1, 9), 3, 1, "suffix")) == ["suffix", "rejection"]
    assert origins(step((9,), 3, 0)) == ["rejection"]
    # A stop within the accepted tokens leaves the target's own out.
    assert origins(step((1, 2), 5, 2, finish="stop")) == ["lookup", "lookup"]
    assert origins(step((), prefill=True)) == []
    assert origins(merged((2, 4))) == ["suffix", "lookup", "rejection"]


def test_time_is_lost_to_what_was_rejected() -> None:
    assert lost(step((7,), verify_seconds=9.0), 1.0) == 0.0
    assert lost(step((1, 2, 9), 2, 2, verify_seconds=3.0), 1.0) == 0.0
    assert lost(step((1, 9), 4, 1, verify_seconds=3.0), 1.0) == pytest.approx(0.75 * 2.0)
    assert lost(step((9,), 4, 0, verify_seconds=0.5), 1.0) == 0.0
    asked = step((1, 9), 4, 1, "model", asked="model", draft_seconds=2.0, verify_seconds=1.0)
    assert lost(asked, 1.0) == pytest.approx(0.75 * 2.0)
    # Verified less than it drafted: the rest was drafted in vain, too.
    short = step((1, 9), 1, 1, "model", (draft(4, "model"),), asked="model", draft_seconds=2.0)
    assert lost(short, 1.0) == pytest.approx(0.75 * 2.0)
    other = step((1, 9), 1, 1, "lookup", (draft(4, "model"),), asked="model", draft_seconds=2.0)
    assert lost(other, 1.0) == 2.0
    # Of a merged draft, only the model's own accepted nodes were drafted for something.
    asked = {"asked": "model", "draft_seconds": 2.0}
    assert lost(merged((2, 4), **asked), 1.0) == 2.0
    assert lost(merged((0,), **asked), 1.0) == pytest.approx(1.0)


def test_each_drafter_of_a_merged_draft_has_its_own_counts() -> None:
    made = Explainer(Bytes(), lambda context: 1.0).add(merged((2, 4)))
    assert made is not None
    assert made.by_drafter == {"model": (2, 0), "suffix": (2, 1), "lookup": (1, 1)}
    assert "model 0/2, suffix 1/2, lookup 1/1" in made.line()


# Text by token


class Bytes:
    """A tokenizer of one token a byte."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode(errors="replace")


def test_a_character_of_several_tokens_belongs_to_the_last_of_them() -> None:
    made = Explainer(Bytes(), lambda context: 1.0)
    first, second = "é".encode()
    one = made.add(step((ord("a"), first), 1, 1))
    two = made.add(step((second, ord("b"), ord("c")), 2, 2, "suffix"))
    assert one is not None and two is not None
    assert [(t.origin, t.text) for t in one.tokens] == [("lookup", "a"), ("bonus", "")]
    assert [(t.origin, t.text) for t in two.tokens] == [
        ("suffix", "é"),
        ("suffix", "b"),
        ("bonus", "c"),
    ]
    assert list(made.runs(0, "aéb")) == [("lookup", "a"), ("suffix", "é"), ("suffix", "b")]
    assert list(made.runs(2, "bc")) == [("suffix", "b"), ("bonus", "c")]
    assert list(made.runs(4, "")) == []


def test_bytes_that_never_become_a_character_belong_to_the_last_token() -> None:
    for finish in ("stop", None):
        made = Explainer(Bytes(), lambda context: 1.0)
        ended = made.add(step((ord("a"), "é".encode()[0]), 1, 1, finish=finish))
        assert ended is not None and ended.tokens[1].text == ("\ufffd" if finish else "")
        # Interrupted, the text ends with what the reader had not shown yet.
        assert list(made.runs(0, "a\ufffd")) == [("lookup", "a"), ("bonus", "\ufffd")]


def test_chunks_of_the_prompt_are_one_step() -> None:
    made = Explainer(Bytes(), lambda context: 1.0)
    assert made.add(step((), prefill=True, verify_seconds=1.0)) is None
    first = made.add(step((97,), prefill=True, verify_seconds=0.5))
    assert first is not None and (first.step, first.position, first.verify_ms) == (0, 0, 1500.0)
    second = made.add(step((98,), verify_seconds=0.25))
    assert second is not None and (second.step, second.position) == (1, 1)
    assert made.seconds == 0.25


@pytest.fixture(scope="module")
def model(llama: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast) -> Model:
    return Model(llama, byte_tokenizer, ["lookup", "suffix", shared_model("llama", 1)])


@pytest.mark.parametrize("policy", ["plain", "fixed:4", "fixed:4:model", "auto"])
@pytest.mark.parametrize("stop", [None, "e"])
def test_steps_and_text_reconcile(
    policy: str,
    stop: str | None,
    model: Model,
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "policy": policy, "temperature": 0.8}
    options |= {"seed": 4, "stop": [stop] if stop else []}
    call = model.stream(random_ids(12), **options)
    made, shown = Explainer(byte_tokenizer, lambda context: 1.0), ""
    for result in iter(call.step, None):
        made.add(result)
        piece = call.take()
        assert "".join(part for _, part in made.runs(len(shown), piece)) == piece
        shown += piece
    shown += call.take()
    stats = call.result.stats
    assert shown == call.result.text == model.generate(random_ids(12), **options).text
    tokens = [token for s in made.steps for token in s.tokens]
    assert tuple(token.id for token in tokens) == call.result.token_ids
    assert "".join(token.text for token in tokens).startswith(shown)
    counts = {name: c["accepted"] for name, c in stats.by_drafter.items() if c["accepted"]}
    own = ("plain", "bonus", "rejection")
    assert counts == {
        name: sum(t.origin == name for t in tokens)
        for name in {t.origin for t in tokens if t.origin not in own}
    }
    assert len(made.steps) == 1 + stats.steps
    assert sum(s.verified for s in made.steps) == stats.verified
    assert made.seconds == pytest.approx(stats.decode_seconds)
    assert f"{stats.tokens_per_step:.2f} tokens per step" in made.summary()[1]


# The command


ASKED = ["generate", "hello hello hello", "--max-new-tokens", 40, "--policy", "fixed:4"]


@pytest.fixture(autouse=True)
def _no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_the_text_is_the_same_and_the_log_tells_every_step(run: Run, tiny: str) -> None:
    args = [*ASKED, "--target", tiny]
    stats = json.loads(run(*args, "--json").out)["stats"]
    plain, ran = run(*args), run(*args, "--explain")
    assert ran.code == 0 and ran.out == plain.out
    head, *lines = ran.err.splitlines()
    assert head == explain.HEAD
    steps, (shares, losses) = lines[:-2], lines[-2:]
    assert [int(line.split()[0]) for line in steps] == list(range(stats["steps"] + 1))
    assert sum(line.count("lookup ") > 1 for line in steps) > 0  # drafted, and accepted
    assert shares.startswith("40 tokens: ") and "lookup" in shares
    assert "tokens per step" in losses and "lost to rejected drafts" in losses
    assert "\x1b" not in ran.out + ran.err


def test_json_holds_the_steps_and_nothing_else_is_said(run: Run, tiny: str) -> None:
    ran = run(*ASKED, "--target", tiny, "--json", "--explain")
    data = json.loads(ran.out)
    assert ran.err == ""
    assert "explain" not in json.loads(run(*ASKED, "--target", tiny, "--json").out)
    steps = data["explain"]
    assert [s["step"] for s in steps] == list(range(data["stats"]["steps"] + 1))
    assert [t["id"] for s in steps for t in s["tokens"]] == data["token_ids"]
    assert sum(s["accepted"] for s in steps) == data["stats"]["accepted"] > 0
    assert {t["origin"] for s in steps for t in s["tokens"]} <= {
        "plain", "bonus", "rejection", "lookup",
    }  # fmt: skip
    for s in steps[1:]:
        assert s["position"] == sum(len(earlier["tokens"]) for earlier in steps[: s["step"]])
        assert s["width"] >= 1 + s["verified"] and s["drafted"].get("lookup", 0) >= s["verified"]
        assert s["verify_ms"] > 0


def test_colours_are_rich_s_decision(run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = [*ASKED, "--target", tiny]
    text = run(*args).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    ran = run(*args, "--explain")
    assert ESCAPE.sub("", ran.out) == text != ran.out
    (legend,) = [line for line in ran.err.splitlines() if "bonus after" in line]
    assert all(word in legend for word in ("lookup", "suffix", "plain", "bonus", "rejection"))
    colours = {code for code in ESCAPE.findall(ran.out) if code != "\x1b[0m"}
    assert len(colours) >= 2 and all(code in legend for code in colours)
    monkeypatch.setenv("NO_COLOR", "1")
    ran = run(*args, "--explain")
    assert ran.out == text and not ESCAPE.search(ran.err)


def test_text_and_steps_come_as_they_are_made(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    written: list[tuple[int, str]] = []
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(explain, "say", lambda line: written.append((len(out.getvalue()), line)))
    with model.stream("a story", max_new_tokens=40) as call:
        result, steps = explain.stream(call, model)
    assert out.getvalue() == result.text + "\n"
    logged = written[1 : 1 + len(steps)]  # after the head
    lengths = [length for length, _ in logged]
    assert lengths == sorted(lengths) and len(set(lengths)) > len(steps) // 2
    for (length, line), made in zip(logged, steps, strict=True):
        assert line.split()[1] == str(made["position"])
        assert length <= len("".join(t["text"] for s in steps for t in s["tokens"]))


def test_an_interrupted_text_is_explained_so_far(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count = Call.step, iter(range(1_000_000))

    def interrupting(self: Call) -> Any:
        if next(count) == 3:
            signal.raise_signal(signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Call, "step", interrupting)
    args = ["generate", "hello", "--target", tiny, "--max-new-tokens", 30, "--policy", "plain"]
    ran = run(*args, "--explain")
    assert ran.code == 130 and ran.out.endswith("\n")
    assert "3 tokens: plain 100%" in ran.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_one_terminal_the_log_does_not_tear_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    made = Explainer(Bytes(), lambda context: 1.0)
    screen = Screen(("lookup",))
    for token in b"one two":
        result = made.add(step((token,)))
        assert result is not None
        screen.text(made, chr(token))
        screen.log(result.line())
    screen.end(made.summary())
    shown = ESCAPE.sub("", terminal.getvalue())
    assert "\none two\n" in shown
    assert shown.index("one two\n") < shown.index(explain.HEAD) < shown.index("7 tokens")


def test_on_a_real_terminal(run: Run, tiny: str, cache: str) -> None:
    import pty

    args = [str(a) for a in [*ASKED, "--target", tiny]]
    text = run(*args).out.rstrip("\n").replace("\n", "\r\n").encode()
    command = [sys.executable, "-m", "draftwise.cli", *args, "--explain"]
    env = os.environ | {"DRAFTWISE_CACHE": cache, "OMP_NUM_THREADS": "1"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):
        while block := os.read(ours, 65536):
            shown += block
    assert process.wait() == 0
    assert b"\x1b[36m" in shown  # the first drafter's colour
    assert text and text in re.sub(rb"\x1b\[[0-9;]*m", b"", shown)
