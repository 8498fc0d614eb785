"""Traces on the command line: recorded by generate, chat and bench, run again by replay."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from conftest import Run, assert_refused
from draftwise.bench.traces import read
from recording import record


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded") / "trace.jsonl", tokens=30)


@pytest.fixture
def trace(run: Run, tiny: str, tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    asked = ["--target", tiny, "--max-new-tokens", 60, "--trace", path]
    for prompt in ("hello hello hello", "one two one two"):
        ran = run("generate", prompt, *asked, "--draft", tiny, "--trace-shadow")
        assert ran.code == 0 and ran.err == "", ran.err
    return path


def test_generate_records_what_it_was_asked_to(run: Run, tiny: str, trace: Path) -> None:
    found = read(trace)
    assert [(t.label, t.tokens, list(t.shadow)) for t in found] == [("generate", 60, ["model"])] * 2
    bare = trace.with_name("bare.jsonl.gz")
    asked = ["generate", "hello", "--target", tiny, "--max-new-tokens", 8, "--trace", bare]
    plain = run(*asked[:-2], "--json")
    assert run(*asked, "--json").code == 0
    assert "token_ids" not in gzip.decompress(bare.read_bytes()).decode()
    assert run(*asked, "--trace-text").code == 0
    last = json.loads(gzip.decompress(bare.read_bytes()).splitlines()[-1])
    assert last["token_ids"] == json.loads(plain.out)["token_ids"]
    assert not read(bare)[0].shadow


def test_chat_records_every_answer(run: Run, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    ran = run("chat", "--target", tiny, "--max-new-tokens", 9, "--trace", path, stdin="hi\nho\n")
    assert ran.code == 0, ran.err
    first, second = read(path)
    assert (first.label, first.tokens, second.tokens) == ("chat", 9, 9)
    assert second.prompt > first.prompt


def test_bench_records_its_first_method_that_speculates(
    run: Run, tiny: str, tmp_path: Path
) -> None:
    prompts, path, out = (tmp_path / name for name in ("p.jsonl", "trace.jsonl", "out.json"))
    lines = [
        {"question_id": i, "category": kind, "turns": ["hello hello"]}
        for i, kind in enumerate(("chat", "code"))
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["--target", tiny, "--prompts", prompts, "--max-new-tokens", 12, "--json", out]
    methods = ["--methods", "hf-plain,plain,fixed:3,auto"]
    assert run("bench", *asked, *methods, "--trace", path).code == 0
    found = read(path)
    assert {t.policy for t in found} == {"fixed:3"}
    assert sorted(t.label for t in found) == ["chat", "code"]  # warm-ups are not recorded
    assert json.loads(out.read_text())["environment"]["traced"] == "fixed:3"


def test_what_recording_takes_is_not_counted(
    run: Run, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwise.api import Model
    from draftwise.bench.methods import DraftwiseMethod, Sampled
    from draftwise.call import Call
    from draftwise.models import load_model
    from draftwise.trace import Trace

    model, tokenizer = load_model(tiny)
    method = DraftwiseMethod(Model(model, tokenizer), Sampled(0.0, 0))
    monkeypatch.setattr(Call, "recording_seconds", 1000.0)
    traced = method.generate([5, 6, 7], 8, Trace(tmp_path / "trace.jsonl"))
    assert traced.wall_seconds < -900 and traced.decode_seconds < -900
    monkeypatch.undo()
    with method.model.stream([5, 6, 7], max_new_tokens=8) as call:
        list(call)
        assert call.recording_seconds == 0
    with method.model.stream([5, 6, 7], max_new_tokens=8, trace=tmp_path / "t.jsonl") as call:
        list(call)
        assert call.recording_seconds > 0


def test_replay_prints_tables_markdown_and_json(run: Run, trace: Path) -> None:
    out = trace.with_name("out.json")
    ran = run("replay", trace, "--policy", "auto", "--policy", "fixed:3", "--json", out)
    assert ran.code == 0 and ran.err == "", ran.err
    for word in ("Costs trace", "auto", "fixed:3", "hindsight", "captured gain", "generate"):
        assert word in ran.out
    assert "calibration" not in ran.out
    data = json.loads(out.read_text())
    assert [row["name"] for row in data["studies"][0]["policies"]] == ["plain", "auto", "fixed:3"]
    ran = run("replay", trace, "--markdown", "--calibration", "--cost", "flat", "--cost", "steep")
    assert ran.code == 0 and "| policy | speed |" in ran.out
    assert "**Costs flat, calibration of auto, all drafters" in ran.out
    assert "**Costs steep:" in ran.out


def test_replay_with_a_profile_and_plots(run: Run, tiny: str, trace: Path) -> None:
    profile, plots = trace.with_name("profile.json"), trace.with_name("plots")
    profile.write_text(run("profile", "--target", tiny, "--draft", tiny, "--json").out)
    ran = run("replay", trace, "--cost", profile, "--plot", plots)
    assert ran.code == 0, ran.err
    assert "Costs profile.json" in ran.out
    assert len(list(plots.glob("*.png"))) == len(list(plots.glob("*.svg"))) == 4


GENERATE = ["generate", "hi"]
BAD = [
    ([*GENERATE, "--trace", "/none/t"], ["cannot write a trace", "/none/t"]),
    ([*GENERATE, "--trace", "OTHER"], ["something else than a trace"]),
    ([*GENERATE, "--trace-shadow"], ["--trace"]),
    ([*GENERATE, "--trace-text"], ["--trace"]),
    ([*GENERATE, "--trace", "NEW", "--trace-shadow"], ["--draft"]),
    (["chat", "--trace", "/none/t"], ["/none/t"]),
    (["bench", "--trace", "/none/t"], ["/none/t"]),
    (["bench", "--trace", "NEW", "--methods", "plain,hf-plain"], ["not plain"]),
    (["replay"], ["TRACE"]),
    (["replay", "/none.jsonl"], ["/none.jsonl"]),
    (["replay", "OTHER"], ["not a trace"]),
    (["replay", "EMPTY"], ["no finished request"]),
    (["replay", "TRACE", "--policy", "clever"], ["clever", "auto"]),
    (["replay", "TRACE", "--policy", "fixed:3:nobody"], ["nobody"]),
    (["replay", "TRACE", "--cost", "cheap"], ["cheap", "steep"]),
    (["replay", "TRACE", "--cost", "OTHER"], ["profile --json"]),
    (["replay", "TRACE", "--policy", "plain", "--calibration"], ["--calibration", "auto"]),
    (["replay", "TRACE", "--json", "/none/out"], ["/none/out"]),
    (["replay", "TRACE", "--plot", "OTHER"], ["--plot"]),
]


@pytest.mark.parametrize("args, parts", BAD, ids=[" ".join(args) for args, _ in BAD])
def test_bad_input_is_one_line_before_any_model(
    run: Run, recorded: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], parts: list[str]
) -> None:
    files = {name: recorded.with_name(name.lower()) for name in ("OTHER", "EMPTY", "NEW")}
    files["OTHER"].write_text("# A list of things to buy\n")
    files["EMPTY"].write_text("")
    before = recorded.read_text()

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("draftwise.loading.load", never)
    monkeypatch.setattr("draftwise.models.load_model", never)
    assert_refused(run(*[{**files, "TRACE": recorded}.get(a, a) for a in args]), *parts)
    assert not files["NEW"].exists()
    assert files["OTHER"].read_text().startswith("# A list") and recorded.read_text() == before
