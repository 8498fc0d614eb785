"""What drafters take, and that a limit on it unloads the right ones at the right time."""

from __future__ import annotations

import gc
import json
import logging
import threading
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import draftwise
from conftest import (
    VOCABULARY,
    Run,
    assert_refused,
    plain_ids,
    random_ids,
    save_tiny,
    shared_model,
    tiny_model,
)
from draftwise import Model, SamplingParams, UsageError
from draftwise.core import Features, Request, StepPlan, StepResult, chain
from draftwise.drafters.lookup import Lookup
from draftwise.drafters.model import ModelDrafter
from draftwise.drafters.suffix import Suffix
from draftwise.engines.slots import BLOCK
from draftwise.engines.transformers import TransformersEngine
from draftwise.memory import DraftMemory, Gone, parse_size, shown
from draftwise.models import weight_bytes
from draftwise.turns import Turn

PROMPT = [5, 6, 7, 8] * 6


def weights(model: PreTrainedModel) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


# Sizes


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (None, None),
        (1, 1),
        ("1000", 1000),
        ("500MB", 500_000_000),
        ("500mb", 500_000_000),
        ("2GiB", 2 << 30),
        ("1.5 GiB", 3 << 29),
        ("4k", 4000),
        ("4KiB", 4096),
        ("7 B", 7),
        ("1TB", 10**12),
    ],
)
def test_sizes_are_read(given: Any, size: int | None) -> None:
    assert parse_size(given) == size


@pytest.mark.parametrize(
    "given", ["", "MB", "-1", -1, 0, "0", "0.1", "2 GG", "1e9", 2.5, True, "nan", "1" * 400, b"1"]
)
def test_what_is_no_size_is_refused_in_one_line(given: Any) -> None:
    with pytest.raises(UsageError, match="draft_memory") as caught:
        parse_size(given)
    assert "\n" not in str(caught.value)


def test_sizes_are_shown_in_the_unit_that_fits() -> None:
    shown_sizes = [shown(n) for n in (12, 3400, 5_600_000, 2_000_000_000)]
    assert shown_sizes == ["12 bytes", "3.4 kB", "5.6 MB", "2.00 GB"]


# What each drafter takes


def grown(drafter: Any, text: list[int]) -> int:
    tracemalloc.start()
    drafter.open(0, Request(0, tuple(text), SamplingParams(), seed=0))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


@pytest.mark.parametrize("make", [Lookup, Suffix])
@pytest.mark.parametrize("kind", ["random", "repeating"])
def test_indexes_estimate_what_they_take(make: Any, kind: str) -> None:
    text = random_ids(6000, below=50_000)
    if kind == "repeating":
        text = [t for start in random_ids(60, below=400) for t in text[start : start + 100]]
    drafter = make()
    before = drafter.memory()
    true = grown(drafter, text)
    assert drafter.memory() - before == pytest.approx(true, rel=0.5)
    drafter.close(0)
    assert drafter.memory() == before if make is Lookup else drafter.memory() > before


def test_a_model_takes_its_weights_and_what_its_caches_hold() -> None:
    model = tiny_model("llama", 1)
    drafter = ModelDrafter(TransformersEngine(model), VOCABULARY)
    alone = drafter.memory()
    assert weights(model) <= alone <= weights(model) + 10_000  # buffers of the positions
    drafter.open(0, Request(0, tuple(random_ids(100)), SamplingParams(), seed=0))
    assert drafter.memory() == alone
    from draftwise.core import Ask

    drafter.propose([Ask(0, "model", 2)], lambda seq, f: True)
    config = model.config
    head = config.hidden_size // config.num_attention_heads if not config.head_dim else 8
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 4 * 100
    # Caches have room for half as many tokens again, in blocks.
    assert cached <= drafter.memory() - alone <= cached * (1.5 + BLOCK / 100)
    drafter.close(0)
    assert drafter.memory() == alone
    drafter.engine.free()
    assert drafter.memory() == 0


def test_tied_weights_count_once() -> None:
    tied = tiny_model("llama", tie_word_embeddings=True)
    assert TransformersEngine(tied).memory() < TransformersEngine(tiny_model("llama")).memory()


# Which goes


class Weighs(Gone):
    serial = False

    def __init__(self, name: str, size: int):
        self.name, self.size = name, size

    def memory(self) -> int:
        return self.size


def step(
    drafter: str | None, committed: int, verify: float, asked: str | None = None, draft: float = 0.0
) -> StepResult:
    accepted, made = committed - 1, None
    if drafter is not None:
        n = max(accepted, 1)
        made = chain(0, drafter, [1] * n, [Features()] * n)
    plan, path = StepPlan(0, made, 1), tuple(range(accepted))
    return StepResult(
        0, plan, 9, (7,) * committed, accepted, (), asked, 0, draft, verify, 0.0, path=path
    )


def limited(limit: int, steps: list[StepResult], **sizes: int) -> list[str]:
    """What is left of drafters of these sizes after a request of these steps, at 1 s a token."""
    held = {name: Weighs(name, size) for name, size in sizes.items()}
    memory = DraftMemory(limit, held, Turn(), lambda: None)  # type: ignore[arg-type]
    for _ in memory.watched(([s] for s in steps), lambda context, batch: 1.0):
        pass
    return list(held)


def test_nothing_goes_while_all_fits() -> None:
    assert limited(30, [step("a", 1, 9.0)], a=10, b=20) == ["a", "b"]


def test_untried_the_heavier_goes_first_and_no_more_than_needed() -> None:
    assert limited(30, [], a=10, b=20, c=15) == ["a", "c"]
    assert limited(12, [], a=10, b=20, c=15) == ["a"]
    assert limited(5, [], a=10, b=20, c=15) == []


def test_the_one_that_saves_less_for_its_bytes_goes_first() -> None:
    good, bad = step("good", 4, 1.5), step("bad", 1, 1.5)
    assert limited(25, [good, bad], good=20, bad=20) == ["good"]
    assert limited(25, [good, bad, step(None, 1, 1.0)], good=20, bad=6) == ["good"]
    # More seconds saved, but not ten times as many, by ten times the bytes.
    heavy = step("heavy", 6, 1.5)
    assert limited(25, [good, heavy], good=20, heavy=200) == ["good"]


def test_what_drafting_costs_is_charged_to_who_was_asked() -> None:
    steps = [step("a", 3, 1.5), step("b", 3, 1.5, asked="b", draft=1.4)]
    assert limited(10, steps, a=10, b=10) == ["a"]
    steps = [step("a", 3, 1.5, asked="b", draft=1.1), step("b", 4, 1.5)]
    assert limited(10, steps, a=10, b=10) == ["a"]
    steps = [step("a", 3, 1.5, asked="b", draft=0.5), step("b", 4, 1.5)]
    assert limited(10, steps, a=10, b=10) == ["b"]


def test_of_a_merged_draft_each_gets_what_its_own_nodes_saved() -> None:
    # b has most of the nodes, and both accepted ones are a's.
    both = replace(
        chain(0, "b", [1] * 5, [Features()] * 5),
        parents=(-1, 0, -1, 2, 3),
        sources=("a", "a", "b", "b", "b"),
    )
    result = replace(step("b", 3, 1.5), plan=StepPlan(0, both, 6), path=(0, 1))
    assert limited(10, [result], a=10, b=10) == ["a"]
    assert limited(10, [replace(result, path=(2, 3))], a=10, b=10) == ["b"]


def test_one_that_was_tried_and_saves_goes_after_one_that_was_not() -> None:
    assert limited(10, [step("a", 3, 1.5)], a=10, b=10) == ["a"]
    assert limited(10, [step("a", 1, 1.5)], a=10, b=10) == ["b"]


# In a model


def test_too_large_a_draft_model_is_freed_while_loading(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    draft = tiny_model("llama", 1)
    gone = weakref.ref(draft)
    with caplog.at_level(logging.WARNING, "draftwise"):
        model = Model(llama, None, ["lookup", draft], draft_memory=weights(draft) // 2)
    del draft
    gc.collect()
    assert gone() is None
    assert list(model.drafters) == ["lookup"] and not model.costs.serial
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("draftwise", "WARNING")
    assert "drafter model" in record.getMessage() and "kB" in record.getMessage()
    assert model.note == record.getMessage()
    result = model.generate(PROMPT, max_new_tokens=20)
    assert list(result.token_ids) == plain_ids(llama, PROMPT, 20)
    assert result.stats.note == model.note


def test_what_is_saved_is_counted_in_forwards_of_one_row(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(llama, None, ["lookup"], policy="fixed:4", draft_memory="1GB")
    priced: list[float] = []
    monkeypatch.setattr(
        model._memory, "_learn", lambda results, plain: priced.append(plain(100, 3))
    )
    model.generate(PROMPT, max_new_tokens=10)
    assert set(priced) == {model.costs.target.seconds(1, 100, 3)}


def test_indexes_that_grow_beyond_the_limit_go_after_the_request(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(llama, None, ["lookup", "suffix"], policy="fixed:4:suffix", draft_memory="20kB")
    assert model.note is None
    first = model.generate(PROMPT, max_new_tokens=60)
    assert first.stats.verified > 0 and first.stats.note is None
    assert len(model.drafters) < 2
    unloaded = {"lookup", "suffix"} - set(model.drafters)
    for name in unloaded:
        assert sum(f"drafter {name} " in r.getMessage() for r in caplog.records) == 1
        assert model.note is not None and f"drafter {name} " in model.note
    for policy in ("fixed:4:suffix", "auto", "plain"):
        again = model.generate(PROMPT, max_new_tokens=60, policy=policy)
        assert again.token_ids == first.token_ids
        assert not unloaded & set(again.stats.by_drafter)
        assert again.stats.note == model.note


@pytest.mark.parametrize("policy", ["fixed:3", "fixed:3:model", "auto"])
def test_a_draft_model_goes_between_requests_and_running_ones_keep_it(policy: str) -> None:
    target, draft = tiny_model("llama"), tiny_model("llama", 1)
    # Its weights fit, its caches of a long text do not.
    limit = TransformersEngine(draft).memory() + 60_000
    gone = weakref.ref(draft)
    model = Model(target, None, ["lookup", draft], policy=policy, draft_memory=limit)
    del draft
    expected = plain_ids(target, PROMPT, 60)
    running = model.stream(PROMPT, max_new_tokens=60, policy="fixed:3:model")
    waiting = model.stream(PROMPT, max_new_tokens=60)
    for _ in range(3):
        running.step()
    assert "model" in model.drafters
    model.generate(random_ids(200), max_new_tokens=40, policy="fixed:3:model", ignore_eos=True)
    assert "model" not in model.drafters and gone() is not None
    assert "drafter model" in str(model.note)

    before = running.step()
    assert before is not None and before.asked == "model" and before.verified > 0
    list(running)
    assert list(running.result.token_ids) == expected
    gc.collect()
    assert gone() is None
    list(waiting)
    assert list(waiting.result.token_ids) == expected
    assert "model" not in waiting.result.stats.by_drafter
    assert list(model.generate(PROMPT, max_new_tokens=60).token_ids) == expected
    with pytest.raises(UsageError, match="no drafter 'model' is loaded"):
        model.generate(PROMPT, policy="fixed:2:model")
    model.close()


def test_requests_of_several_threads_survive_an_unloading(llama: PreTrainedModel) -> None:
    draft = tiny_model("llama", 1)
    limit = TransformersEngine(draft).memory() + 30_000
    model = Model(llama, None, ["suffix", draft], policy="fixed:3:model", draft_memory=limit)
    texts: list[Any] = [None] * 6

    def serve(i: int) -> None:
        texts[i] = model.generate(PROMPT[i:], max_new_tokens=30 + i).token_ids

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert "model" not in model.drafters
    for i, text in enumerate(texts):
        assert list(text) == plain_ids(llama, PROMPT[i:], 30 + i)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_request_that_is_closed_early_is_counted_out(llama: PreTrainedModel, steps: int) -> None:
    model = Model(llama, None, ["lookup", "suffix"], draft_memory="1 kB")
    call = model.stream(PROMPT, max_new_tokens=60)
    for _ in range(steps):
        call.step()
    assert set(model.drafters) == {"lookup", "suffix"}
    call.close()
    assert (not model.drafters) is (steps > 0)
    assert not +model._memory._users  # type: ignore[union-attr]


def test_without_a_limit_nothing_is_measured(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise AssertionError("measured")

    for drafter in (Lookup, Suffix, ModelDrafter):
        monkeypatch.setattr(drafter, "memory", fail)
    model = Model(llama, None, ["lookup", "suffix", shared_model("llama", 1)])
    model.generate(PROMPT, max_new_tokens=10)
    assert model._memory is None and model.note is None
    with pytest.raises(AssertionError, match="measured"):
        Model(llama, None, ["lookup"], draft_memory="2GiB")


def test_closing_frees_what_was_still_leaving(llama: PreTrainedModel) -> None:
    draft = tiny_model("llama", 1)
    gone = weakref.ref(draft)
    limit = TransformersEngine(draft).memory() + 100
    model = Model(llama, None, [draft], draft_memory=limit, policy="fixed:2")
    del draft
    running = model.stream(PROMPT, max_new_tokens=60)
    running.step()
    model.generate(PROMPT, max_new_tokens=20)
    assert "model" not in model.drafters
    model.close()
    gc.collect()
    assert gone() is None


# Before loading


def test_weights_are_known_from_the_files(tiny: str, tmp_path: Path) -> None:
    from draftwise.models import load_model

    for dtype, size in ((None, 4), ("bfloat16", 2)):
        model, _ = load_model(tiny, dtype=dtype)
        assert weight_bytes(tiny, dtype) == size * sum(p.numel() for p in model.parameters())
    (tmp_path / "config.json").write_text("{}")
    assert weight_bytes(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    assert weight_bytes(tmp_path) is None


def test_too_large_a_draft_model_is_not_read_at_all(
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import draftwise.models

    monkeypatch.setenv("DRAFTWISE_CACHE", str(tmp_path / "cache"))
    other = str(save_tiny(tmp_path / "other"))
    read: list[Any] = []
    original = draftwise.models.load_model

    def load_model(name: Any, **options: Any) -> Any:
        read.append(name)
        return original(name, **options)

    monkeypatch.setattr(draftwise.models, "load_model", load_model)
    weighs = weight_bytes(other) or 0
    with draftwise.load(tiny, ["lookup", other], draft_memory=weighs - 1) as model:
        assert read == [tiny] and list(model.drafters) == ["lookup"]
        assert model.note is not None and other in model.note and "not loaded" in model.note
        assert [r.getMessage() for r in caplog.records] == [model.note]
        assert len(model.generate("hello", max_new_tokens=5).token_ids) == 5
    with draftwise.load(tiny, [other], draft_memory=2 * weighs) as model:
        assert read[1:] == [tiny, other] and "model" in model.drafters and model.note is None


def test_bad_limits_are_refused_before_anything_is_read(run: Run) -> None:
    with pytest.raises(UsageError, match="draft_memory"):
        draftwise.load("no/such-model", draft_memory="lots")
    assert_refused(run("generate", "hi", "--draft-memory", "lots"), "draft_memory", "lots")


def test_the_command_line_takes_a_limit(
    run: Run,
    tiny: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = ["generate", "hello", "--target", tiny, "--draft", tiny, "--max-new-tokens", 6]
    ran = run(*args, "--draft-memory", "100kB", "--json")
    assert ran.code == 0
    stats = json.loads(ran.out)["stats"]
    assert "not loaded" in stats["note"] and [r.getMessage() for r in caplog.records] == [
        stats["note"]
    ]
    assert json.loads(run(*args, "--draft-memory", "1GiB", "--json").out)["stats"]["note"] is None


def test_an_unloaded_drafter_is_not_held_by_the_one_it_guessed_for(llama: PreTrainedModel) -> None:
    draft = shared_model("llama", 1)
    kept = Suffix()
    model = Model(llama, None, [kept, draft], draft_memory="1GB")
    assert model._memory is not None
    gone = weakref.ref(kept)
    del kept
    model._memory.fit({"model": 1, "suffix": 10**10})
    assert list(model.drafters) == ["model"]
    gc.collect()
    assert gone() is None
    expected = plain_ids(llama, [5, 6, 7], 20)
    assert (
        list(model.generate([5, 6, 7], max_new_tokens=20, policy="fixed:4").token_ids) == expected
    )
