"""The benchmark's loop on a tiny model. Nothing here depends on how fast anything is."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from draftwise.bench import methods, report
from draftwise.bench.journal import Journal, Measurement
from draftwise.bench.methods import HFMethod, Loaded, Outcome, Sampled, first_forward, make, parse
from draftwise.bench.run import BenchOptions, run
from draftwise.core import UsageError
from draftwise.trace import Trace

METHODS = ("plain", "auto", "fixed:3", "auto+suffix", "auto+model", "hf-plain", "hf-lookup")
ALL = (*METHODS, "hf-assisted")
SAID = ["abc abc abc abc", "the cat and the dog", "one two three", "x = 1; y = 2"]


@pytest.fixture
def loaded(llama: Any, byte_tokenizer: Any) -> Loaded:
    return Loaded(llama, byte_tokenizer, llama)


@pytest.fixture
def options(tmp_path: Path) -> BenchOptions:
    prompts = tmp_path / "prompts.jsonl"
    lines = (
        {"question_id": i, "category": "ab"[i % 2], "turns": [text]} for i, text in enumerate(SAID)
    )
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return BenchOptions(None, None, prompts, 9, 12, ALL, tmp_path / "out" / "report.json")


def quiet() -> Console:
    return Console(file=io.StringIO())


def partial(options: BenchOptions) -> Path:
    assert options.out is not None
    return options.out.with_name("report.json.partial.jsonl")


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], str]]:
    """Every turn taken, (prompt, method), warm-ups included."""
    seen: list[tuple[tuple[int, ...], str]] = []
    original = methods.make

    def spying(spec: Any, *rest: Any) -> Any:
        method = original(spec, *rest)
        inner = method.generate

        def generate(prompt: Any, limit: int, trace: Any = None) -> Outcome:
            seen.append((tuple(prompt), spec.name))
            return inner(prompt, limit, trace)

        method.generate = generate  # type: ignore[method-assign]
        return method

    monkeypatch.setattr("draftwise.bench.run.make", spying)
    return seen


def test_a_report_is_complete_and_every_text_the_same(
    options: BenchOptions, loaded: Loaded
) -> None:
    made = run(options, quiet(), loaded)
    assert options.out is not None and json.loads(options.out.read_text()) == made
    assert not partial(options).exists() and list(options.out.parent.iterdir()) == [options.out]
    assert list(made["methods"]) == list(ALL)
    keys = {"tokens_per_second", "speedup_vs_plain", "speedup_interval", "tokens_per_step"}
    keys |= {"acceptance", "identical_to_plain", "time_to_first_token", "prompts", "tokens"}
    for own in made["methods"].values():
        assert set(own["by_category"]) == {"a", "b"}
        for figures in (own["overall"], *own["by_category"].values()):
            assert set(figures) == keys
            assert figures["identical_to_plain"] == 1.0
            assert figures["tokens_per_second"] > 0 and len(figures["speedup_interval"]) == 2
    assert set(made["comparisons"]) == {f"auto/{m}" for m in ALL if m != "auto"}
    assert len(made["runs"]) == len(ALL) * len(SAID)
    assert all(r["tokens"] == 12 and r["identical"] for r in made["runs"])
    env = made["environment"]
    assert env["base"] == "plain" and env["resumed"] == 0 and len(env["prompts_sha256"]) == 64
    assert all(len(point) == 3 for point in env["target_costs"] + env["draft_costs"])
    assert env["dtype"] == "float32" and "prompts.jsonl" in env["prompts"]


def test_sampling_gives_one_text_under_every_policy(options: BenchOptions, loaded: Loaded) -> None:
    warm = replace(options, out=None, temperature=1.0, seed=7, methods=ALL)
    made = run(warm, quiet(), loaded)
    for name in ("plain", "auto", "fixed:3", "auto+suffix", "auto+model"):
        assert made["methods"][name]["overall"]["identical_to_plain"] == 1.0


def test_orders_differ_by_prompt_and_return_with_the_seed(
    options: BenchOptions, loaded: Loaded, turns: list[Any]
) -> None:
    some = replace(options, out=None, methods=("plain", "auto", "fixed:2", "fixed:3"))
    run(some, quiet(), loaded)
    first = list(turns)
    turns.clear()
    run(some, quiet(), loaded)
    assert turns == first
    orders = {tuple(name for _, name in first[i : i + 4]) for i in range(4, len(first), 4)}
    assert len(first) == 4 * (1 + len(SAID)) and len(orders) > 1
    for start in range(0, len(first), 4):
        assert len({prompt for prompt, _ in first[start : start + 4]}) == 1


def test_a_killed_run_goes_on_and_measures_nothing_twice(
    options: BenchOptions, loaded: Loaded, turns: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(options, methods=("plain", "auto", "hf-plain"))
    add = Journal.add

    def killed_at_the_sixth(journal: Journal, measurement: Measurement) -> None:
        if len(journal.done) == 5:
            raise Killed
        add(journal, measurement)

    monkeypatch.setattr(Journal, "add", killed_at_the_sixth)
    with pytest.raises(Killed):
        run(options, quiet(), loaded)
    monkeypatch.setattr(Journal, "add", add)
    assert options.out is not None and not options.out.exists()
    with partial(options).open("a") as file:
        file.write('{"question_id": 1, "cat')  # a line cut short
    kept = [json.loads(line) for line in partial(options).read_text().splitlines()[1:-1]]
    before = [turn for turn in turns if len(turns) > 3][3:8]
    turns.clear()

    made = run(options, quiet(), loaded)
    assert made["environment"]["resumed"] == 5
    assert Counter(before + turns[3:]).most_common(1)[0][1] == 1
    assert len(before + turns[3:]) == len(made["runs"]) == 3 * len(SAID)
    seconds = {(r["question_id"], r["method"]): r["decode_seconds"] for r in made["runs"]}
    assert all(seconds[m["question_id"], m["method"]] == m["decode_seconds"] for m in kept)
    assert not partial(options).exists()


def test_measurements_of_other_options_are_neither_mixed_nor_lost(
    options: BenchOptions, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(options, methods=("plain",))
    with monkeypatch.context() as patch:
        patch.setattr("draftwise.bench.run._report", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            run(options, quiet(), loaded)
    text = partial(options).read_text()
    with pytest.raises(UsageError, match="other options"):
        run(replace(options, max_new_tokens=3), quiet(), loaded)
    assert partial(options).read_text() == text
    made = run(replace(options, max_new_tokens=3, fresh=True), quiet(), loaded)
    assert made["environment"]["resumed"] == 0 and made["runs"][0]["tokens"] == 3
    assert not partial(options).exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"methods": ("plain", "hf-assisted")}, "needs a draft model"),
        ({"methods": ("auto+model",)}, "needs a draft model"),
        ({"methods": ("auto+nothing",)}, "no drafter 'nothing'"),
        ({"methods": ("swift",)}, "unknown method"),
        ({"methods": ("fixed:0",)}, "draft length"),
        ({"methods": ("fixed:3:suffix",), "drafters": ("lookup",)}, "suffix"),
        ({"methods": ()}, "at least one"),
        ({"methods": ("plain", "plain")}, "twice"),
        ({"drafters": ("lookup", "oracle")}, "unknown drafter"),
        ({"threads": 0}, "threads"),
        ({"per_category": 0}, "at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    options: BenchOptions, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr("draftwise.bench.run._load", lambda *_: pytest.fail("loaded"))
    wrong = replace(options, **{"methods": ("plain",)} | changes)
    with pytest.raises(UsageError, match=why):
        run(wrong, quiet())
    assert options.out is not None and not options.out.exists()


def test_a_prompt_beyond_the_context_is_refused(options: BenchOptions, loaded: Loaded) -> None:
    assert options.prompts is not None
    options.prompts.write_text(
        json.dumps({"question_id": 5, "category": "a", "turns": ["abcd " * 300]})
    )
    with pytest.raises(UsageError, match="prompt 5 has"):
        run(replace(options, methods=("plain",)), quiet(), loaded)


def test_a_policy_is_given_only_drafters_it_can_use() -> None:
    names = ("lookup", "suffix")
    assert parse("plain", names, True).drafters == ()
    assert parse("auto", names, False).drafters == names
    assert parse("auto", names, True).drafters == (*names, "model")
    assert parse("fixed:4", names, True).drafters == ("model",)
    assert parse("fixed:4", names, False).drafters == ("lookup",)
    assert parse("fixed:4:suffix", names, True).drafters == ("suffix",)
    assert parse("fixed:4+suffix", names, True).drafters == ("suffix",)
    assert parse("auto+model", names, True).drafters == ("model",)
    assert parse("bandit", names, True).drafters == (*names, "model")
    assert parse("bandit:suffix", names, True).drafters == ("suffix",)


@pytest.mark.parametrize(
    ("name", "policy", "drafter"),
    [
        ("specdec++", "specdec++", "model"),
        ("specdec++:0.5", "specdec++:0.5", "model"),
        ("specdec+++suffix", "specdec++", "suffix"),
        ("specdec++:0.5+suffix", "specdec++:0.5", "suffix"),
    ],
)
def test_plus_signs_of_a_policy_s_own_name(name: str, policy: str, drafter: str) -> None:
    spec = parse(name, ("lookup", "suffix"), True)
    assert (spec.policy, spec.drafters) == (policy, (drafter,))


def test_no_method_sees_what_another_one_wrote(loaded: Loaded, tmp_path: Path) -> None:
    names, sampled, prompt = ("suffix",), Sampled(0.0, 0), list(range(40, 60))
    made: list[Any] = [
        make(parse(name, names, False), loaded, frozenset(), sampled, tmp_path)
        for name in ("auto", "auto+suffix", "fixed:3")
    ]
    first, *others = made
    written = first.generate(prompt, 12).token_ids
    assert first.model.drafters["suffix"]._texts == [[*prompt, *written]]
    for other in others:
        assert other.model.drafters["suffix"]._texts == []
        assert other.model.engine is not first.model.engine
        assert other.model.costs.target is not first.model.costs.target


def hooks(model: torch.nn.Module) -> int:
    return len(model._forward_hooks) + len(model._forward_pre_hooks)


def test_hooks_are_gone_after_the_first_forward_and_after_an_error(llama: Any) -> None:
    ids = torch.tensor([[1, 2, 3]])
    with first_forward(llama) as seen:
        assert hooks(llama) == 2
        llama(ids)
        assert hooks(llama) == 0
        once = (seen.any, seen.begin, seen.end)
        llama(ids)
        assert (seen.any, seen.begin, seen.end) == once
    assert 0 < seen.any == seen.begin < seen.end
    with pytest.raises(Killed), first_forward(llama, llama):
        raise Killed
    assert hooks(llama) == 0


def test_decode_seconds_leave_out_set_up_and_the_first_target_forward() -> None:
    seen = methods.FirstForward()
    # Starts at 10; an assistant begins at 11, the target's first forward takes 13 to 16.
    seen.any, seen.begin, seen.end = 11.0, 13.0, 16.0
    assert seen.decode_seconds(10.0, 20.0) == pytest.approx(20 - 1 - 3)
    with pytest.raises(RuntimeError, match="never called"):
        methods.FirstForward().decode_seconds(0.0, 1.0)


@pytest.mark.parametrize("name", ["hf-plain", "hf-lookup", "hf-assisted"])
def test_transformers_runs_without_the_models_own_defaults(loaded: Loaded, name: str) -> None:
    shipped, prompt = loaded.target.generation_config, list(range(40, 60))
    method = HFMethod(name, loaded, frozenset(), Sampled(0.0, 0))
    expected = method.generate(prompt, 20).token_ids
    assert len(expected) == 20
    strange = type(shipped)(repetition_penalty=3.0, do_sample=True, temperature=5.0, top_k=3)
    loaded.target.generation_config = strange
    try:
        outcome = method.generate(prompt, 20)
        assert outcome.token_ids == expected
        assert loaded.target.generation_config is strange
        assert hooks(loaded.target) == 0
        stop = expected[4]
        ended = HFMethod(name, loaded, frozenset([stop]), Sampled(0.0, 0)).generate(prompt, 20)
        assert ended.token_ids == expected[: expected.index(stop) + 1]
    finally:
        loaded.target.generation_config = shipped
    assert 0 < outcome.ttft < outcome.wall_seconds
    assert 0 < outcome.decode_seconds < outcome.wall_seconds


BATCHED = ("plain", "auto", "fixed:3", "hf-plain")


def test_batches_are_measured_against_plain_decoding_of_the_same(
    options: BenchOptions, loaded: Loaded
) -> None:
    made = run(replace(options, methods=BATCHED, batch=(1, 2, 3)), quiet(), loaded)
    for name in BATCHED:
        own = made["methods"][name]["by_category"]
        assert list(own) == ["batch 1", "batch 2", "batch 3"]
        # Four prompts: four groups of one, two of two, one of three; 12 tokens each.
        assert [own[c]["prompts"] for c in own] == [4, 2, 1]
        assert [own[c]["tokens"] for c in own] == [48, 48, 36]
        assert all(own[c]["identical_to_plain"] == 1.0 for c in own)
        assert made["methods"]["plain"]["by_category"]["batch 2"]["speedup_vs_plain"] == 1.0
    assert made["methods"]["plain"]["overall"]["tokens_per_step"] == 1.0
    assert [r["texts"] for r in made["runs"]] == [1] * 16 + [2] * 8 + [3] * 4
    for shown in (report.markdown(made), _printed(made)):
        assert report.TOGETHER in shown and "batch 3" in shown


def _printed(made: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(report.table(made))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_a_group_is_what_its_prompts_are_alone(loaded: Loaded, tmp_path: Path) -> None:
    prompts, sampled = [list(range(40, 60)), [5, 6, 7], [9] * 11], Sampled(0.7, 3)
    for name in BATCHED[:3]:
        method = make(parse(name, ("lookup",), False), loaded, frozenset({7}), sampled, tmp_path)
        whole = method.together(prompts, 15)
        alone = [method.generate(prompt, 15).token_ids for prompt in prompts]
        assert whole.token_ids == sum(alone, ()) and whole.texts == 3
        assert 0 < whole.decode_seconds < whole.wall_seconds
        method.close()


def test_padded_rows_of_transformers_end_with_their_text(loaded: Loaded) -> None:
    prompts = [list(range(40, 60)), [5, 6, 7]]
    free = HFMethod("hf-plain", loaded, frozenset(), Sampled(0.0, 0))
    texts = [free.generate(prompt, 12).token_ids for prompt in prompts]
    assert free.together(prompts, 12).token_ids == sum(texts, ())
    stop = texts[1][3]
    method = HFMethod("hf-plain", loaded, frozenset([stop]), Sampled(0.0, 0))
    ended = [method.generate(prompt, 12).token_ids for prompt in prompts]
    assert len(ended[1]) <= 4
    assert method.together(prompts, 12).token_ids == sum(ended, ())


def test_no_size_of_batch_sees_what_another_wrote(
    options: BenchOptions, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[int] = []
    original = methods.DraftwiseMethod.together

    def spying(self: Any, prompts: Any, limit: int) -> Outcome:
        if limit == 5:
            known.append(len(self.model.drafters["suffix"]._texts))
        return original(self, prompts, limit)

    monkeypatch.setattr(methods.DraftwiseMethod, "together", spying)
    chosen = {"methods": ("auto",), "max_new_tokens": 5, "batch": (2, 4)}
    run(replace(options, **chosen), quiet(), loaded)
    # A warm-up of as many texts, then what this size has written.
    assert known == [2, 4, 4]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"batch": (0,)}, "between 1 and 256"),
        ({"batch": (2, 2)}, "named twice"),
        ({"batch": (5,)}, "5 needs as many prompts"),
        ({"batch": (2,), "methods": ("plain", "hf-lookup")}, "hf-lookup takes one prompt"),
        ({"batch": (2,), "trace": Trace("t.jsonl")}, "not batches"),
    ],
)
def test_what_batches_cannot_have_is_refused_before_anything_is_loaded(
    options: BenchOptions, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        run(replace(options, **{"methods": ("plain", "auto"), "draft": "none", **more}), quiet())


def test_losses_are_marked_and_listed(options: BenchOptions, loaded: Loaded) -> None:
    made = run(replace(options, methods=("plain", "auto", "hf-lookup")), quiet(), loaded)
    made["methods"]["auto"]["by_category"]["b"] |= {
        "speedup_vs_plain": 0.8,
        "speedup_interval": [0.7, 0.97],
    }
    made["comparisons"]["auto/hf-lookup"]["overall"] = {"ratio": 0.5, "interval": [0.4, 0.6]}
    text = report.markdown(made)
    assert "0.80 [0.70, 0.97] ▼" in text and "0.50 [0.40, 0.60] ▼" in text
    assert "`auto` on b: 0.80 of `plain`" in text
    assert "`auto` on overall: 0.50 of `hf-lookup`" in text
    assert not report.is_loss([0.9, 0.98]) and not report.is_loss(None)
    console = Console(file=io.StringIO(), width=200)
    console.print(report.table(made))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.80 [0.70, 0.97] ▼" in shown and "tokens/step" in shown and "overall" in shown


def test_the_report_module_prints_markdown(
    options: BenchOptions, loaded: Loaded, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(replace(options, methods=("auto",)), quiet(), loaded)
    assert report.main([str(options.out)]) == 0
    assert "No base was run." in capsys.readouterr().out
    assert report.main([]) == 2
    (tmp_path / "other.json").write_text("[]")
    assert report.main([str(tmp_path / "other.json")]) == 1
    assert "is not a benchmark's report" in capsys.readouterr().err
