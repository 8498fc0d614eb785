"""The command line: what it prints, where, and the exit code, good input and bad.

Most tests run a tiny random byte-level model in this process; a few start the program itself,
where only a real process shows the behaviour.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import LONG_CONTEXT, Ran, Run, assert_refused, save_tiny
from draftwise import Call, demo, show

BAD = [
    (["generate", "hi", "--max-new-tokens", "-3"], ["max_new_tokens", "-3"]),
    (["generate", "hi", "--max-new-tokens", "many"], ["--max-new-tokens"]),
    (["generate", "hi", "--temperature", "-1"], ["temperature"]),
    (["generate", "hi", "--temperature", "nan"], ["temperature"]),
    (["generate", "hi", "--top-p", "1.5"], ["top_p", "1.5"]),
    (["generate", "hi", "--top-k", "-1"], ["top_k"]),
    (["generate", "hi", "--stop", ""], ["stop"]),
    (["generate", "hi", "--threads", "0"], ["--threads"]),
    (["generate", ""], ["prompt is empty"]),
    (["generate", "-"], ["prompt is empty"]),
    (["generate", "hi", "--policy", "clever"], ["clever", "auto"]),
    (["generate", "hi", "--policy", "fixed:0"], ["fixed"]),
    (["generate", "hi", "--policy", "fixed:4:suffix", "--drafters", "lookup"], ["suffix"]),
    (["generate", "hi", "--drafters", "lokup"], ["lokup", "lookup"]),
    (["generate", "hi", "--acceptance", "generous"], ["generous", "coupled"]),
    (["generate", "hi", "--quality-budget", "3"], ["quality_budget", "3"]),
    (["chat", "--quality-budget", "0.1", "--acceptance", "topk"], ["quality_budget", "topk"]),
    (["generate", "hi", "--objective", "speed"], ["speed", "throughput"]),
    (["generate", "hi", "--max-slowdown", "1.5"], ["max_slowdown", "1.5"]),
    (["generate", "hi", "--max-slowdown", "nan"], ["max_slowdown"]),
    (["generate", "hi", "--draft-memory", "lots"], ["draft_memory", "lots"]),
    (["generate", "hi", "--dtype", "int3"], ["int3"]),
    (["generate", "hi", "--device", "abacus"], ["abacus"]),
    (["generate", "hi", "--config", "/none.toml"], ["/none.toml"]),
    (["generate", "hi", "--target", "/none/such"], ["/none/such"]),
    (["generate", "hi", "--target", "/none/such.gguf"], ["/none/such.gguf"]),
    (["generate", "hi", "there"], ["there"]),
    (["generate", "hi", "--temprature", "1"], ["--temprature"]),
    (["chat", "--max-new-tokens", "0"], ["max_new_tokens"]),
    (["chat", "--policy", "clever"], ["clever"]),
    (["profile", "--target", "/none/such"], ["/none/such"]),
    (["demo", "--max-new-tokens", "-2"], ["--max-new-tokens"]),
    (["demo", "--target", "./none"], ["./none"]),
    (["bench", "--prompts", "/none.jsonl"], ["/none.jsonl"]),
    (["bench", "--methods", "plain,magic"], ["magic"]),
    (["bench", "--methods", "hf-assisted"], ["draft model"]),
    (["bench", "--per-category", "0"], ["--per-category"]),
    (["benhc"], ["benhc"]),
]


@pytest.mark.parametrize("args, parts", BAD, ids=[" ".join(args) or "none" for args, _ in BAD])
def test_bad_input_is_one_line(run: Run, args: list[str], parts: list[str]) -> None:
    assert_refused(run(*args), *parts)


def test_undecodable_prompts_are_refused(run: Run) -> None:
    assert_refused(run("generate", stdin=b"caf\xe9"), "UTF-8")
    assert_refused(run("generate", "caf\udce9"), "UTF-8")


def test_prompt_longer_than_the_context(run: Run, tiny: str) -> None:
    assert_refused(run("generate", "x" * (LONG_CONTEXT + 1), "--target", tiny), str(LONG_CONTEXT))


def test_draft_model_with_another_vocabulary(run: Run, tiny: str, tmp_path: Path) -> None:
    other = save_tiny(tmp_path, shift=7)
    assert_refused(run("generate", "hi", "--target", tiny, "--draft", other), "vocabulary")
    assert_refused(run("demo", "--target", tiny, "--draft", other), "vocabulary")


def test_chat_needs_a_template(run: Run, tmp_path: Path) -> None:
    bare = save_tiny(tmp_path, template=None)
    assert_refused(run("chat", "--target", bare, stdin="hi\n"), "chat template")


def test_unexpected_errors_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of cheese\nredo from start")

    monkeypatch.setattr("draftwise.loading.load", fail)
    ran = run("generate", "hi")
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "out of cheese" in ran.err and "DRAFTWISE_DEBUG" in ran.err
    monkeypatch.setenv("DRAFTWISE_DEBUG", "1")
    with pytest.raises(RuntimeError, match="cheese"):
        run("generate", "hi")


def test_version_and_help(run: Run) -> None:
    assert run("--version").out.startswith("draftwise 0.")
    for args in ([], ["--help"]):
        ran = run(*args)
        assert ran.code == 0 and "generate" in ran.out and "profile" in ran.out
    assert "--repetition-penalty" in run("generate", "--help").out


# generate


def test_generate_json(run: Run, tiny: str) -> None:
    ran = run("generate", "hello", "--target", tiny, "--max-new-tokens", 12, "--json")
    assert ran.code == 0 and ran.err == ""
    data = json.loads(ran.out)
    assert set(data) == {"text", "token_ids", "finish_reason", "stats"}
    assert len(data["token_ids"]) == data["stats"]["tokens"] == 12
    assert data["finish_reason"] == "length"


def test_streamed_text_and_stdin(run: Run, tiny: str) -> None:
    common = ["--target", tiny, "--max-new-tokens", 12]
    data = json.loads(run("generate", "hello", *common, "--json").out)
    for prompt in (["-"], []):
        ran = run("generate", *prompt, *common, "--stats", stdin="hello")
        assert ran.code == 0
        assert ran.out == data["text"] + "\n"
        assert ran.err.count("\n") == 1
        assert "12 tokens" in ran.err and "tokens per step" in ran.err


def test_raw_leaves_the_template_out(run: Run, tiny: str) -> None:
    common = ["--target", tiny, "--max-new-tokens", 2, "--json"]
    lengths = [
        json.loads(run("generate", "hello", *common, *more).out)["stats"]["prompt_tokens"]
        for more in ([], ["--raw"])
    ]
    assert lengths[1] == len("hello") < lengths[0]


def test_sampling_options_reach_the_sampler(run: Run, tiny: str) -> None:
    common = ["generate", "hello", "--target", tiny, "--max-new-tokens", 16, "--json"]
    hot = [*common, "--temperature", 3.0, "--seed"]
    first, again, other = (json.loads(run(*hot, s).out)["token_ids"] for s in (1, 1, 2))
    assert first == again != other
    greedy = json.loads(run(*common).out)["token_ids"]
    assert json.loads(run(*hot, 1, "--top-k", 1).out)["token_ids"] == greedy
    plain = run(*hot, 1, "--policy", "plain", "--drafters", "none")
    assert json.loads(plain.out)["token_ids"] == first
    assert json.loads(plain.out)["stats"]["verified"] == 0


def test_stop_ends_the_text(run: Run, tiny: str) -> None:
    common = ["generate", "hello", "--target", tiny, "--max-new-tokens", 16, "--json"]
    common += ["--temperature", 1.0, "--seed", 5, "--min-p", 0.0]
    text = json.loads(run(*common).out)["text"]
    end = next(c for c in text[1:] if c.isascii())
    data = json.loads(run(*common, "--stop", "never in there", "--stop", end).out)
    assert data["text"] == text[: text.index(end)] and data["finish_reason"] == "stop"


def test_a_draft_model_drafts(run: Run, tiny: str) -> None:
    args = ["--target", tiny, "--draft", tiny, "--drafters", "none", "--policy", "fixed:3"]
    data = json.loads(run("generate", "hello", *args, "--max-new-tokens", 13, "--json").out)
    counts = data["stats"]["by_drafter"]["model"]
    assert counts["accepted"] == counts["verified"] == 9  # it is the target itself: all is accepted


def test_acceptance_and_budget_reach_the_rule(run: Run, tiny: str) -> None:
    common = ["generate", "hello hello", "--target", tiny, "--max-new-tokens", 8, "--json"]
    for options, rule in [
        (["--acceptance", "block"], "block"),
        (["--acceptance", "auto"], "coupled"),
        (["--quality-budget", 0.5], "budget"),
    ]:
        stats = json.loads(run(*common, *options).out)["stats"]
        assert stats["acceptance_rule"] == rule
        assert stats["nats_per_token"] <= 0.5


# --config


def test_config_file_and_command_line(run: Run, tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text(
        f'target = "{tiny}"\nmax-new-tokens = 9\nmin_new_tokens = 2\njson = true\n'
        'drafters = ["lookup", "suffix"]\nstop = ["@@@"]\n'
    )
    assert len(json.loads(run("generate", "hi", "--config", file).out)["token_ids"]) == 9
    data = json.loads(run("generate", "hi", "--max-new-tokens", 4, "--config", file).out)
    assert len(data["token_ids"]) == 4
    as_json = tmp_path / "options.json"
    as_json.write_text(
        json.dumps({"target": tiny, "max_new_tokens": 5, "json": True, "seed": None})
    )
    assert len(json.loads(run("generate", "hi", "--config", as_json).out)["token_ids"]) == 5


@pytest.mark.parametrize(
    "content, parts",
    [
        ("max-new-tokns = 3", ["'max-new-tokns'", "did you mean 'max-new-tokens'"]),
        ("zzz = 3", ["'zzz'"]),
        ("max_new_tokens = 3.7", ["--max-new-tokens"]),
        ("max_new_tokens = true", ["--max-new-tokens"]),
        ("temperature = -1", ["temperature"]),
        ("raw = 'perhaps'", ["--raw"]),
        ("policy = 'clever'", ["clever"]),
        ("[generate]\nseed = 1", ["'generate'"]),
        ("this is no toml", ["options.toml"]),
    ],
)
def test_bad_config_is_one_line(
    run: Run, tiny: str, tmp_path: Path, content: str, parts: list[str]
) -> None:
    file = tmp_path / "options.toml"
    file.write_text(content)
    assert_refused(run("generate", "hi", "--target", tiny, "--config", file), *parts)


def test_config_must_be_an_object(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    for content in ("[1]", "{", "\0"):
        file.write_text(content)
        assert_refused(run("generate", "hi", "--config", file), "options.json")


# chat


def turns(ran: Ran) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ran.out.splitlines()]


def test_chat_reuses_the_conversation(run: Run, tiny: str) -> None:
    common = ["chat", "--target", tiny, "--max-new-tokens", 8]
    ran = run(*common, "--json", stdin="hello\n\nand now?\n/stats\n/reset\nhello\n/quit\nno")
    assert ran.code == 0
    one, two, reset = turns(ran)
    assert one["stats"]["reused_tokens"] == 0
    assert two["stats"]["prompt_tokens"] > one["stats"]["prompt_tokens"]
    assert two["stats"]["reused_tokens"] >= one["stats"]["prompt_tokens"] - 1
    assert reset["token_ids"] == one["token_ids"]
    assert reset["stats"]["prompt_tokens"] == one["stats"]["prompt_tokens"]
    stats, forgotten = ran.err.splitlines()
    assert "prompt tokens reused" in stats and "forgotten" in forgotten
    text = run(*common, stdin="hello")
    assert text.out == one["text"] + "\n" and text.err == ""


def test_chat_system_message_and_unknown_commands(run: Run, tiny: str) -> None:
    common = ["chat", "--target", tiny, "--max-new-tokens", 2, "--json"]
    bare = turns(run(*common, stdin="hello\n"))[0]["stats"]["prompt_tokens"]
    ran = run(*common, "--system", "Be brief.", stdin="/stats\n/qiut\nhello\n")
    assert turns(ran)[0]["stats"]["prompt_tokens"] > bare + len("Be brief.")
    assert "no answer yet" in ran.err and "/qiut" in ran.err


def test_chat_beyond_the_context(run: Run, tiny: str) -> None:
    ran = run(
        "chat", "--target", tiny, "--max-new-tokens", 4, stdin="hi\n" + "x" * LONG_CONTEXT + "\n"
    )
    assert ran.code == 2 and ran.out.count("\n") >= 1
    assert ran.err.count("\n") == 1 and str(LONG_CONTEXT) in ran.err


# Ctrl-C and closed pipes


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C after the second step of the first answer."""
    step, count = Call.step, iter(range(1_000_000))

    def interrupting(self: Call) -> Any:
        if next(count) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Call, "step", interrupting)


PLAIN = ["--policy", "plain", "--max-new-tokens", 30]


@pytest.mark.usefixtures("interrupted")
def test_interrupted_text_stays(run: Run, tiny: str) -> None:
    ran = run("generate", "hello", "--target", tiny, *PLAIN, "--json")
    assert ran.code == 130 and ran.err == ""
    data = json.loads(ran.out)
    assert data["finish_reason"] == "cancelled" and len(data["token_ids"]) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interrupted")
def test_interrupted_answer_keeps_the_conversation(run: Run, tiny: str) -> None:
    ran = run("chat", "--target", tiny, *PLAIN, "--json", stdin="hello\nhello\n")
    assert ran.code == 0
    one, two = turns(ran)
    assert one["finish_reason"] == "cancelled" and len(one["token_ids"]) == 2
    assert two["finish_reason"] != "cancelled"
    assert two["stats"]["reused_tokens"] >= one["stats"]["prompt_tokens"] - 1


def test_interrupted_while_loading(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftwise.loading.load", interrupt)
    assert run("generate", "hi")[0] == 130


def test_closed_pipe_is_quiet(tiny: str, cache: str) -> None:
    command = [sys.executable, "-m", "draftwise.cli", "generate", "hello", "--target", tiny]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"DRAFTWISE_CACHE": cache},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) in (0, 1)


# profile, demo, bench


def test_profile(run: Run, tiny: str) -> None:
    args = ["profile", "--target", tiny]
    first = json.loads(run(*args, "--refresh", "--json").out)["target"]
    again = json.loads(run(*args, "--json").out)["target"]
    assert not first["stored"] and again["stored"]
    for before, after in zip(first["points"], again["points"], strict=True):
        assert [after[k] for k in ("width", "context", "ms")] == pytest.approx(
            [before[k] for k in ("width", "context", "ms")]
        )
    widths = [p["width"] for p in first["points"]]
    assert {1, 16} <= set(widths)
    assert all(p["ms"] > 0 for p in first["points"])
    assert all(p["relative"] == pytest.approx(1.0) for p in first["points"] if p["width"] == 1)
    both = run(*args, "--draft", tiny)
    assert both.out.count("× width 1") == 2 and "draft:" in both.out
    assert both.out.count("stored earlier") == 2


def test_profile_stores_only_what_was_measured(
    run: Run, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "sweep", lambda *args: None)
    monkeypatch.setenv("DRAFTWISE_CACHE", str(tmp_path))
    report = json.loads(run("profile", "--target", tiny, "--json").out)["target"]
    assert report["points"] == [] and "nothing was measured" in report["note"]
    assert not (tmp_path / "costs").exists()
    assert "nothing was measured" in run("profile", "--target", tiny).out


def test_demo(run: Run, tiny: str) -> None:
    ran = run("demo", "--target", tiny, "--max-new-tokens", 16)
    assert ran.code == 0, ran.err
    assert ran.err == ""
    for kind in ("question", "code edit", "summary", "extraction", "all prompts"):
        assert kind in ran.out
    assert ran.out.count("tokens per step") == 4
    assert ran.out.count("identical: all") + ran.out.count("differ from") == 4
    assert "over 4 prompts" in ran.out


def test_demo_json(run: Run, tiny: str) -> None:
    ran = run("demo", "--target", tiny, "--max-new-tokens", 8, "--dtype", "float32", "--json")
    assert ran.code == 0 and ran.err == ""
    report = json.loads(ran.out)
    assert len(report["prompts"]) == 4 and report["speedup"] > 0
    for prompt in report["prompts"]:
        assert prompt["plain"]["stats"]["verified"] == 0
        assert prompt["plain"]["token_ids"] == prompt["auto"]["token_ids"]
        assert prompt["difference"] is None
    assert report["identical"]


def test_an_interrupted_demo_sums_up_what_was_finished(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third prompt, pressed once; and in the warm-up, before any was finished."""
    original = demo.Demo.written

    def written(self: demo.Demo, *args: Any) -> Any:
        if next(count) == 5:
            signal.raise_signal(signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(demo.Demo, "written", written)
    for as_json in ([], ["--json"]):
        count = iter(range(100))
        ran = run("demo", "--target", tiny, "--max-new-tokens", 8, *as_json)
        assert ran.code == 130 and ran.err == ""
        if as_json:
            report = json.loads(ran.out)
            assert report["interrupted"] and len(report["prompts"]) == 2
            assert report["speedup"] > 0
        else:
            assert "interrupted after 2 of 4" in ran.out and "prompts finished" in ran.out
            assert "extraction" not in ran.out and "over 2 prompts" in ran.out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    count = iter(range(5, 100))
    ran = run("demo", "--target", tiny, "--max-new-tokens", 8, "--json")
    report = json.loads(ran.out)
    assert ran.code == 130 and report["prompts"] == []
    assert report["speedup"] is None and report["identical"] is None


def test_an_interrupted_demo_leaves_a_clean_terminal(tiny: str, cache: str) -> None:
    """The frame is taken back and the cursor shown again before the last line is printed."""
    import pty

    command = [sys.executable, "-m", "draftwise.cli", "demo", "--target", tiny]
    env = os.environ | {"DRAFTWISE_CACHE": cache, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "400"], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):
        while block := os.read(ours, 65536):
            shown += block
            if "╭".encode() in shown:  # the first frame
                process.send_signal(signal.SIGINT)
                break
        while block := os.read(ours, 65536):
            shown += block
    assert process.wait() == 130
    assert b"Traceback" not in shown
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") > 0
    assert shown.rfind(b"interrupted after 0 of 4") > shown.rfind(b"\x1b[?25h")


def test_demo_tells_where_texts_differ(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token of auto's texts is spoilt before they are compared."""
    original = demo.Demo.difference

    def difference(self: demo.Demo, prompt: Any, plain: Any, auto: Any) -> Any:
        other = (plain[5] + 1) % 256
        return original(self, prompt, plain, (*auto[:5], other, *auto[6:]))

    monkeypatch.setattr(demo.Demo, "difference", difference)
    ran = run("demo", "--target", tiny, "--max-new-tokens", 8, "--dtype", "float32", "--json")
    report = json.loads(ran.out)
    assert not report["identical"]
    for prompt in report["prompts"]:
        found = prompt["difference"]
        assert found["index"] == 5
        assert found["plain"] == prompt["plain"]["token_ids"][5] != found["auto"]
        # Greedy: no logit is above that of plain's own token.
        assert found["gap"] > 0


def test_bench(run: Run, tiny: str, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    line = {"question_id": 1, "category": "chat", "turns": ["hello"]}
    prompts.write_text(json.dumps(line) + "\n")
    args = ["--target", tiny, "--prompts", prompts, "--per-category", 1, "--max-new-tokens", 8]
    ran = run("bench", *args, "--methods", "plain, auto", "--json", out)
    assert ran.code == 0, ran.err
    assert "plain" in ran.out and "auto" in ran.out
    assert json.loads(out.read_text())


def test_default_model(smollm2_path: Path) -> None:
    """The program as installed, on the embedded model."""
    command = [sys.executable, "-m", "draftwise.cli", "generate", "Say hello.", "--json"]
    ran = subprocess.run(
        [*command, "--max-new-tokens", "4"], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert json.loads(ran.stdout)["text"].strip()


def test_on_a_terminal_the_text_is_not_touched_by_the_spinner(tiny: str, cache: str) -> None:
    import pty

    asked = ["generate", "hello", "--target", tiny, "--max-new-tokens", "12", "--seed", "1"]
    command = [sys.executable, "-m", "draftwise.cli", *asked]
    env = os.environ | {"DRAFTWISE_CACHE": cache, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    piped = subprocess.run(command, capture_output=True, env=env, check=True).stdout
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the process has ended
        while block := os.read(ours, 65536):
            shown += block
    assert process.wait() == 0
    text = piped.rstrip(b"\n").replace(b"\n", b"\r\n")
    assert text and text in shown
