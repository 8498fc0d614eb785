"""`Model` as people use it: prompts, options, stopping, streams, threads, tasks and memory."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import draftwise
from conftest import CONTEXT, VOCABULARY, plain_ids, random_ids, shared_model, tiny_model
from draftwise import Call, Model, SamplingParams, UsageError
from draftwise.accept.criterion import LOSSLESS
from draftwise.policy.goodput import Auto

POLICIES = ("plain", "fixed:1", "fixed:5", "fixed:4:suffix", "auto")
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def model(llama: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast) -> Iterator[Model]:
    made = Model(llama, byte_tokenizer)
    yield made
    assert not made.engine._sequences, "a test left a sequence open"  # type: ignore[attr-defined]


# Prompts


def test_texts_ids_and_arrays_are_one_prompt(
    model: Model, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = byte_tokenizer.encode("once there was")
    expected = plain_ids(shared_model("llama"), ids, 12)
    for prompt in ("once there was", ids, tuple(ids), np.array(ids), torch.tensor(ids)):
        result = model.generate(prompt, max_new_tokens=12)  # type: ignore[arg-type]
        assert list(result.token_ids) == expected
        assert result.stats.prompt_tokens == len(ids)
        assert result.text == byte_tokenizer.decode(expected) == str(result)


def test_messages_go_through_the_chat_template_and_open_the_reply(model: Model) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    written = "user: hi\nassistant: ho\nassistant:"
    assert model.encode(messages) == model.encode(written)
    assert (
        model.generate(messages, max_new_tokens=5).token_ids
        == model.generate(written, max_new_tokens=5).token_ids
    )


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([], "empty"),
        ((), "empty"),
        ([1, VOCABULARY], f"between 0 and {VOCABULARY - 1}"),
        ([-1], f"between 0 and {VOCABULARY - 1}"),
        ([0] * CONTEXT, f"context holds {CONTEXT}"),
        ([1, "two"], "one text"),
        ([1.0, 2.0], "one text"),
        ([True, False], "one text"),
        (torch.tensor([[1, 2], [3, 4]]), "one text"),
        ([{"role": "user"}], "'role' and 'content'"),
        ([{"content": "x"}], "'role' and 'content'"),
        ([{"role": "user", "content": "x"}, "y"], "one text"),
    ],
)
def test_prompts_that_are_none_are_refused_in_one_line(
    model: Model, prompt: Any, says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        model.generate(prompt)
    assert "\n" not in str(caught.value)


def test_the_prompt_may_leave_room_for_one_token(model: Model) -> None:
    result = model.generate([3] * (CONTEXT - 1), max_new_tokens=100)
    assert len(result.token_ids) == 1
    assert result.finish_reason == "length"


def test_without_a_tokenizer_only_ids_are_prompts(llama: PreTrainedModel) -> None:
    bare = Model(llama, None)
    assert list(bare.generate([1, 2], max_new_tokens=4).token_ids) == plain_ids(llama, [1, 2], 4)
    assert bare.generate([1, 2], max_new_tokens=4).text == ""
    for prompt in ("text", [{"role": "user", "content": "x"}]):
        with pytest.raises(UsageError, match="tokenizer"):
            bare.generate(prompt)
    with pytest.raises(UsageError, match="stop strings need a tokenizer"):
        bare.generate([1, 2], stop=["x"])


def test_a_tokenizer_without_a_chat_template_refuses_messages(model: Model) -> None:
    assert model.tokenizer is not None
    template, model.tokenizer.chat_template = model.tokenizer.chat_template, None
    try:
        with pytest.raises(UsageError, match="no chat template"):
            model.generate([{"role": "user", "content": "x"}])
        model.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(UsageError, match="roles must alternate"):
            model.generate([{"role": "user", "content": "x"}])
    finally:
        model.tokenizer.chat_template = template


# Options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"max_tokens": 5}, "did you mean 'max_new_tokens'"),
        ({"repetition_penality": 1.1}, "did you mean 'repetition_penalty'"),
        ({"xyzzy": 1}, "unknown option 'xyzzy'$"),
        ({"temperature": -1.0}, "temperature must be a number between 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "x"}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"policy": "atuo"}, "unknown policy 'atuo'"),
        ({"policy": "fixed"}, "draft length"),
        ({"policy": "fixed:0"}, "draft length"),
        ({"policy": "fixed:5:nobody"}, "no drafter 'nobody'"),
        ({"policy": "plain:3"}, "no argument"),
        ({"acceptance": "typo"}, "unknown acceptance 'typo'"),
        ({"quality_budget": -0.1}, "quality_budget must be between 0 and 2"),
        ({"quality_budget": 2.1}, "quality_budget must be between 0 and 2"),
        ({"quality_budget": float("nan")}, "quality_budget must be between 0 and 2"),
        ({"quality_budget": "much"}, "quality_budget must be between 0 and 2"),
        ({"quality_budget": 0.1, "acceptance": "block"}, "not block"),
    ],
)
def test_bad_options_are_refused_with_what_to_mend(
    model: Model, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        model.generate([1, 2], **options)
    assert "\n" not in str(caught.value)


def test_bad_arguments_of_a_model_are_refused(llama: PreTrainedModel) -> None:
    for arguments, says in [
        ({"drafters": ["lokup"]}, "unknown drafter 'lokup'"),
        ({"drafters": ["model"]}, "unknown drafter 'model'"),
        ({"drafters": ["lookup", "lookup"]}, "same name"),
        ({"policy": "never"}, "unknown policy"),
        ({"acceptance": "never"}, "unknown acceptance"),
        ({"acceptance": "typical", "quality_budget": 1}, "not typical"),
    ]:
        with pytest.raises(UsageError, match=says):
            Model(llama, None, **arguments)  # type: ignore[arg-type]


def test_load_refuses_before_it_reads_anything() -> None:
    for arguments, says in [
        ({"engine": "onnx"}, "unknown engine"),
        ({"drafters": "lookup"}, "list of names"),
        ({"drafters": ["a/b", "c/d"]}, "one draft model"),
        ({"quality_budget": 5}, "quality_budget"),
    ]:
        with pytest.raises(UsageError, match=says):
            draftwise.load("no/such-model", **arguments)  # type: ignore[arg-type]


# Stopping


def text_and_stop(
    model: Model, sampling: dict[str, Any], length: int = 2
) -> tuple[str, list[str], list[int]]:
    """A text, and runs of plain characters in it that begin late and nowhere earlier."""
    whole = model.generate("tell me", max_new_tokens=60, policy="plain", **sampling)
    text = whole.text
    found = [
        part
        for i in range(8, len(text) - length)
        if (part := text[i : i + length]).isascii() and part.isprintable() and text.find(part) == i
    ]
    assert len(found) >= 3, "the random text has too few readable runs"
    return text, [found[0], found[len(found) // 2], found[-1]], list(whole.token_ids)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_ends_the_text_before_it(
    model: Model, policy: str, sampling: dict[str, Any], length: int
) -> None:
    text, stops, ids = text_and_stop(model, sampling, length)
    for stop in stops:
        options: dict[str, Any] = {"max_new_tokens": 60, "stop": [stop, "\x00\x00never"]}
        call = model.stream("tell me", policy=policy, **options, **sampling)
        pieces = list(call)
        assert "".join(pieces) == call.result.text == text[: text.index(stop)]
        assert call.result.finish_reason == "stop"
        n = len(call.result.token_ids)
        assert list(call.result.token_ids) == ids[:n]
        assert model.tokenizer is not None
        assert stop in model.tokenizer.decode(ids[:n])
        assert stop not in model.tokenizer.decode(ids[: n - 1])


def test_a_stop_given_as_one_string_is_one_stop(model: Model) -> None:
    text, stops, _ = text_and_stop(model, {})
    result = model.generate("tell me", max_new_tokens=60, stop=stops[0])
    assert result.text == text[: text.index(stops[0])]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_of_a_list_of_eos_tokens_ends_the_text(policy: str) -> None:
    target = tiny_model("llama")
    prompt = [5, 6, 7, 8] * 4
    ids = plain_ids(target, prompt, 30)
    never = min(set(range(VOCABULARY)) - set(ids))
    for at in (0, 1, 4, 9, 29):
        first = ids.index(ids[at])
        target.generation_config.eos_token_id = [never, ids[at]]
        model = Model(target, None)
        result = model.generate(prompt, max_new_tokens=30, policy=policy)
        assert list(result.token_ids) == ids[: first + 1]
        assert result.finish_reason == "stop"
        on = model.generate(prompt, max_new_tokens=30, policy=policy, ignore_eos=True)
        assert list(on.token_ids) == ids
        assert on.finish_reason == "length"


def test_eos_is_read_from_the_config_where_generation_has_none() -> None:
    target = tiny_model("llama")
    ids = plain_ids(target, [1, 2, 3], 10)
    target.config.eos_token_id = ids[4]
    assert target.generation_config.eos_token_id is None
    result = Model(target, None).generate([1, 2, 3], max_new_tokens=10)
    assert list(result.token_ids) == ids[: ids.index(ids[4]) + 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_min_new_tokens_holds_back_eos(policy: str) -> None:
    target = tiny_model("llama")
    ids = plain_ids(target, [1, 2, 3], 20)
    target.generation_config.eos_token_id = ids[4]
    expected = plain_ids(target, [1, 2, 3], 20, min_new_tokens=12, pad_token_id=0)
    result = Model(target, None).generate(
        [1, 2, 3], max_new_tokens=20, min_new_tokens=12, policy=policy
    )
    assert list(result.token_ids) == expected
    assert len(expected) >= 12


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("least", [0, 12])
def test_ends_that_are_copied_from_the_prompt_end_no_text(policy: str, least: int) -> None:
    """Chat turns end with EOS, and a lookup drafter foretells it wherever words come back."""
    target = tiny_model("llama")
    written = plain_ids(target, [1, 2, 3], 8)
    for eos in (written[5], 299):  # one that is written, and one that is not
        target.generation_config.eos_token_id = eos
        prompt = [7, *written[:3], eos, 8, *written[:2], eos, 1, 2, 3]
        options: dict[str, Any] = {"pad_token_id": 0}
        options |= {"min_new_tokens": least} if least else {}
        expected = plain_ids(target, prompt, 20, **options)
        result = Model(target, None).generate(
            prompt, max_new_tokens=20, min_new_tokens=least, policy=policy
        )
        assert list(result.token_ids) == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", range(1, 8))
def test_short_texts_have_exactly_the_length_asked_for(model: Model, policy: str, n: int) -> None:
    result = model.generate([5, 6] * 8, max_new_tokens=n, policy=policy)
    assert list(result.token_ids) == plain_ids(shared_model("llama"), [5, 6] * 8, n)
    assert (result.finish_reason, result.stats.tokens) == ("length", n)


# Seeds


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_p": 0.02},
        {"temperature": 1e-3},
    ],
)
def test_a_seed_gives_one_text_under_every_policy(model: Model, options: dict[str, Any]) -> None:
    texts = set()
    for policy in (*POLICIES, "auto"):
        result = model.generate([5, 6, 7] * 5, max_new_tokens=40, seed=3, policy=policy, **options)
        texts.add(result.token_ids)
    assert len(texts) == 1


def test_other_seeds_give_other_texts_and_no_seed_draws_one(model: Model) -> None:
    def ids(**options: Any) -> tuple[int, ...]:
        return model.generate([1, 2], max_new_tokens=20, temperature=1.0, **options).token_ids

    assert ids(seed=1) != ids(seed=2)
    assert ids() != ids()
    assert ids(seed=0) == ids(seed=0)
    assert ids(seed=-5) == ids(seed=-5)


def test_greedy_does_not_depend_on_the_seed(model: Model) -> None:
    results = {model.generate([1, 2], max_new_tokens=20, seed=s).token_ids for s in (None, 1, 2)}
    assert len(results) == 1


# Streams


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_pieces_add_up_to_the_text(model: Model, policy: str, sampling: dict[str, Any]) -> None:
    call = model.stream("a story", max_new_tokens=60, policy=policy, **sampling)
    with pytest.raises(UsageError, match="not ended"):
        _ = call.result
    pieces = list(call)
    assert all(pieces) and (len(pieces) > 3 or policy == "auto")
    assert "".join(pieces) == call.result.text
    assert list(call) == []


def test_counts_reconcile_with_forwards(model: Model, llama: PreTrainedModel) -> None:
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    hook = llama.register_forward_hook(count)
    try:
        for policy in POLICIES:
            forwards = 0
            s = model.generate([5, 6, 7] * 5, max_new_tokens=50, policy=policy).stats
            assert s.tokens == 50 == 1 + s.steps + s.accepted
            assert forwards == 1 + s.steps
            assert s.accepted <= s.verified
            assert s.plain_steps <= s.steps
            assert sum(d["accepted"] for d in s.by_drafter.values()) == s.accepted
            assert sum(d["verified"] for d in s.by_drafter.values()) == s.verified
            assert s.first_token_seconds > 0 and s.decode_seconds > 0
    finally:
        hook.remove()


# Acceptance


def test_a_budget_loosens_and_says_so(llama: PreTrainedModel) -> None:
    model = Model(llama, None, [shared_model("llama", 1)], quality_budget=1.5)
    for options in ({}, {"temperature": 0.9, "seed": 3}, {"acceptance": "auto"}):
        s = model.generate([5, 6, 7], max_new_tokens=60, policy="fixed:3", **options).stats
        assert s.acceptance_rule == "budget"
        assert 0 < s.nats_per_token <= 1.5
        assert 0 < s.loosened <= s.accepted
        assert s.loosened == s.by_drafter["model"]["loosened"]
        assert s.to_dict()["nats_per_token"] == s.nats_given_up / 60
    exact = model.generate([5, 6, 7], max_new_tokens=60, policy="fixed:3", quality_budget=0)
    assert exact.stats.acceptance_rule == "coupled" and exact.stats.loosened == 0
    assert list(exact.token_ids) == plain_ids(llama, [5, 6, 7], 60)


def test_auto_takes_every_lossless_rule_in_turn_where_they_differ(llama: PreTrainedModel) -> None:
    model = Model(llama, None, [shared_model("llama", 1)], acceptance="auto")

    def rule(model: Model = model, **options: Any) -> str:
        chosen = model.generate([5, 6, 7], max_new_tokens=12, policy="fixed:2", **options)
        return chosen.stats.acceptance_rule

    assert {rule() for _ in range(4)} == {"coupled"}, "greedy"
    taken = [rule(temperature=1.0) for _ in range(6)]
    assert sorted(taken) == sorted([*LOSSLESS] * 2)
    assert all(arm.seconds > 0 for arm in model._criterion.arms.values())
    before = model._criterion.arms["block"].plain
    assert rule(temperature=1.0, acceptance="block") == "block"
    assert model._criterion.arms["block"].plain != before, "a named rule teaches too"
    retrieval = Model(llama, None, acceptance="auto")
    assert {rule(retrieval, temperature=1.0) for _ in range(4)} == {"coupled"}


def opened(model: Model) -> int:
    held = [model.engine._sequences]  # type: ignore[attr-defined]
    for drafter in model.drafters.values():
        held += [v for k, v in vars(drafter).items() if k in ("_texts", "_cursors", "_sequences")]
    return sum(len(h) for h in held if isinstance(h, dict))


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_closing_mid_stream_frees_everything_and_keeps_what_was_written(
    model: Model, steps: int
) -> None:
    call = model.stream("a story", max_new_tokens=60, policy="fixed:2")
    for _ in range(steps):
        call.step()
    assert opened(model) > 0 or not steps
    call.close()
    call.close()
    assert opened(model) == 0
    assert call.result.finish_reason == "cancelled"
    n = len(call.result.token_ids)
    assert n >= steps
    assert call.result.token_ids == model.generate("a story", max_new_tokens=60).token_ids[:n]
    assert list(call) == [] and call.step() is None


def test_a_stream_left_by_break_or_error_is_freed(model: Model) -> None:
    with model.stream("a story", max_new_tokens=60, policy="plain") as call:
        for _ in call:
            break
    assert opened(model) == 0 and call.result.finish_reason == "cancelled"
    for _ in model.stream("a story", max_new_tokens=60, policy="plain"):
        break
    gc.collect()
    assert opened(model) == 0


class Fails:
    """A processor that raises at its third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("processor broke")
        return scores


def test_an_error_in_a_step_ends_the_request_and_not_the_model(model: Model) -> None:
    params = draftwise.SamplingParams(max_new_tokens=20)
    call = model.start([1, 2, 3], params, processors=[Fails()])
    with pytest.raises(RuntimeError, match="processor broke"):
        list(call)
    assert opened(model) == 0
    assert len(call.result.token_ids) == 2 and call.result.finish_reason == "cancelled"
    assert len(model.generate([1, 2, 3], max_new_tokens=20).token_ids) == 20


class Collects:
    """A processor that runs the garbage collector in the middle of a step."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return scores


def test_a_stream_abandoned_in_a_cycle_may_be_collected_within_a_step(model: Model) -> None:
    call = model.stream("a story", max_new_tokens=60, policy="plain")
    next(call)
    call.itself = call  # type: ignore[attr-defined]
    gone = weakref.ref(call)
    gc.disable()
    try:
        del call
        assert gone() is not None
        done = threading.Event()

        def run() -> None:
            params = draftwise.SamplingParams(max_new_tokens=5)
            list(model.start([1, 2, 3], params, processors=[Collects()]))
            done.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert done.wait(60), "the step waits for itself"
    finally:
        gc.enable()
    assert gone() is None and opened(model) == 0


def test_a_cancel_event_ends_the_text_at_the_next_step(model: Model) -> None:
    cancel = threading.Event()
    call = model.stream("a story", max_new_tokens=60, cancel=cancel, policy="fixed:2")
    pieces = [next(call), next(call)]
    cancel.set()
    pieces += list(call)
    assert call.result.finish_reason == "cancelled"
    assert len(call.result.token_ids) < 60
    assert "".join(pieces) == call.result.text
    assert opened(model) == 0


def test_a_request_cancelled_before_its_first_step_writes_nothing(model: Model) -> None:
    cancel = threading.Event()
    cancel.set()
    result = model.generate("a story", cancel=cancel)
    assert (result.token_ids, result.text, result.finish_reason) == ((), "", "cancelled")


# Several at once


def test_many_threads_each_get_the_text_they_get_alone(model: Model) -> None:
    jobs: list[tuple[str, dict[str, Any]]] = [
        (
            f"story {i}",
            {"policy": POLICIES[i % 5], "max_new_tokens": 20 + i} | (SAMPLED if i % 2 else {}),
        )
        for i in range(10)
    ]
    alone = [model.generate(text, **options) for text, options in jobs]
    together: list[Any] = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def run(i: int) -> None:
        text, options = jobs[i]
        barrier.wait()
        call = model.stream(text, **options)
        pieces = "".join(call)
        together[i] = (pieces, call.result)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for own, (pieces, result) in zip(alone, together, strict=True):
        assert result.token_ids == own.token_ids
        assert pieces == result.text == own.text
    assert opened(model) == 0


def test_streams_in_one_thread_may_be_nested_and_interleaved(model: Model) -> None:
    expected = {
        name: model.generate(name, max_new_tokens=30).text for name in ("one", "two", "six")
    }
    outer = model.stream("one", max_new_tokens=30)
    written = next(outer)
    assert "".join(model.stream("two", max_new_tokens=30)) == expected["two"]
    inner = model.stream("six", max_new_tokens=30)
    texts = {"one": written, "six": ""}
    streams: list[tuple[str, Call]] = [("one", outer), ("six", inner)]
    while streams:
        for name, call in list(streams):
            piece = next(call, None)
            if piece is None:
                streams.remove((name, call))
            else:
                texts[name] += piece
    assert texts == {name: expected[name] for name in ("one", "six")}


def test_turns_of_one_chat_use_what_the_one_before_left(model: Model) -> None:
    first = model.generate("a story", max_new_tokens=20, reuse=True)
    prompt = [*model.encode("a story"), *first.token_ids, *model.encode(" and on")]
    second = model.generate(prompt, max_new_tokens=20, reuse=True)
    assert second.stats.reused_tokens == len(model.encode("a story")) + 19
    assert list(second.token_ids) == plain_ids(shared_model("llama"), prompt, 20)
    assert model.generate(prompt, max_new_tokens=1).stats.reused_tokens == len(prompt) - 1
    assert model.generate(prompt, max_new_tokens=1).stats.reused_tokens == 0


# asyncio


def test_async_pieces_add_up_to_the_text(model: Model) -> None:
    async def collect(prompt: str) -> str:
        return "".join([piece async for piece in model.astream(prompt, max_new_tokens=30)])

    async def several() -> list[str]:
        return await asyncio.gather(*(collect(p) for p in ("one", "two", "six")))

    expected = [model.generate(p, max_new_tokens=30).text for p in ("one", "two", "six")]
    assert asyncio.run(several()) == expected


def test_bad_options_reach_the_async_caller(model: Model) -> None:
    async def run() -> None:
        async for _ in model.astream("x", tempratur=1):  # type: ignore[call-arg]
            pass

    with pytest.raises(UsageError, match="temperature"):
        asyncio.run(run())


def test_a_cancelled_task_ends_its_request(model: Model) -> None:
    async def run() -> None:
        arrived = asyncio.Event()

        async def consume() -> None:
            async for _ in model.astream("a story", max_new_tokens=490, policy="plain"):
                arrived.set()

        task = asyncio.create_task(consume())
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert opened(model) == 0

    asyncio.run(run())
    assert len(model.generate("a story", max_new_tokens=5).token_ids) == 5


def test_an_async_stream_that_is_closed_early_ends_its_request(model: Model) -> None:
    async def run() -> None:
        stream = model.astream("a story", max_new_tokens=490, policy="plain")
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        assert opened(model) == 0

    asyncio.run(run())


# Life and death


def test_closing_twice_is_closing_once_and_use_after_it_is_refused(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = Model(tiny_model("llama"), byte_tokenizer, ["lookup", shared_model("llama", 1)])
    running = model.stream("x", max_new_tokens=30)
    next(running)
    with model:
        assert len(model.generate("x", max_new_tokens=3).token_ids) == 3
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model.generate("x")
    with pytest.raises(UsageError, match="closed"):
        list(running)


def tensors() -> tuple[int, int]:
    gc.collect()
    # Not the compiler's stand-ins for tensors, which have no size in numbers.
    real = (torch.Tensor, torch.nn.Parameter)
    live = [o for o in gc.get_objects() if type(o) in real]
    return len(live), sum(t.numel() for t in live)


def test_two_hundred_requests_leave_no_tensors_behind(llama: PreTrainedModel) -> None:
    model = Model(llama, None, ["lookup", "suffix", shared_model("llama", 1)])

    def serve(count: int) -> None:
        for i in range(count):
            policy = ("auto", "fixed:3", "plain")[i % 3]
            call = model.stream(
                random_ids(5 + i % 7), max_new_tokens=6, policy=policy, reuse=i % 2 == 0
            )
            call.step()
            if i % 5:
                list(call)
            call.close()

    serve(30)
    before = tensors()
    serve(200)
    after = tensors()
    assert after[0] <= before[0]
    assert after[1] <= before[1] * 1.01


def test_policies_know_that_the_engine_verifies_trees(llama: PreTrainedModel) -> None:
    model = Model(llama, None, ["lookup", "suffix"])
    auto = model._policy("auto")
    assert isinstance(auto, Auto)
    assert auto.costs == model.costs
    assert auto.costs.trees


def test_an_error_is_not_hidden_by_a_trace_that_cannot_be_written(
    model: Model, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def broken(ids: Any, scores: Any) -> Any:
        folder.rmdir()
        raise RuntimeError("broken")

    params = SamplingParams(max_new_tokens=5)
    call = model.start([1, 2], params, processors=[broken], trace=folder / "trace.jsonl")
    with pytest.raises(RuntimeError, match="broken"):
        call.step()


def test_names_in_the_package_are_what_it_offers() -> None:
    missing: Sequence[str] = [name for name in draftwise.__all__ if not hasattr(draftwise, name)]
    assert not missing


# What a review found


def test_a_stop_string_that_is_a_special_token_stops(
    llama: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = random_ids(10)
    written = plain_ids(llama, ids, 30)
    tokenizer = copy.deepcopy(byte_tokenizer)
    name = str(tokenizer.convert_ids_to_tokens(written[7]))
    tokenizer.add_special_tokens({"additional_special_tokens": [name]})
    assert written[7] not in written[:7]
    result = Model(llama, tokenizer).generate(ids, max_new_tokens=30, stop=[name], ignore_eos=True)
    assert list(result.token_ids) == written[:8]
    assert result.finish_reason == "stop"


def test_a_prompt_is_read_in_chunks_and_can_be_cancelled_between_them(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model.generate(random_ids(40), max_new_tokens=6)
    monkeypatch.setattr("draftwise.run.PREFILL_CHUNK", 16)
    call = model.stream(random_ids(40), max_new_tokens=6)
    chunks = [call.step() for _ in range(3)]
    assert [len(c.committed) for c in chunks if c is not None] == [0, 0, 1]
    assert "".join(call) is not None
    assert call.result.token_ids == expected.token_ids
    assert call.result.stats.tokens == 6

    cancel = threading.Event()
    call = model.stream(random_ids(40), max_new_tokens=6, cancel=cancel)
    call.step()
    cancel.set()
    assert call.step() is None
    assert call.result.finish_reason == "cancelled"
    assert call.result.token_ids == ()


def test_a_call_may_be_closed_while_another_thread_is_in_a_step(model: Model) -> None:
    class Slow:
        """Holds the step open until the other thread has called close()."""

        def __init__(self) -> None:
            self.inside, self.closed = threading.Event(), threading.Event()

        def __call__(self, ids: Any, scores: Any) -> Any:
            if ids.shape[1] == 12:
                self.inside.set()
                assert self.closed.wait(20)
            return scores

    slow = Slow()
    params = draftwise.SamplingParams(max_new_tokens=200)
    call = model.start(random_ids(8), params, processors=[slow])
    consumer = threading.Thread(target=lambda: list(call))
    consumer.start()
    assert slow.inside.wait(20)
    call.close()
    slow.closed.set()
    consumer.join(20)
    assert not consumer.is_alive()
    assert call.result.finish_reason == "cancelled"
    assert len(call.result.token_ids) < 200


@pytest.mark.parametrize("prompt", [None, 3, b"hello", {1, 2}, torch.tensor(3), "\ud800", [[1], 2]])
def test_what_is_no_prompt_is_refused(model: Model, prompt: Any) -> None:
    with pytest.raises(UsageError):
        model.generate(prompt, max_new_tokens=2)


@pytest.mark.parametrize(
    "options",
    [
        {"stop": 5},
        {"logit_bias": [1, 2]},
        {"logit_bias": {7: 1e300}},
        {"temperature": 1e39},
        {"repetition_penalty": 1e300},
        {"presence_penalty": 1e308},
        {"ignore_eos": "no"},
        {"policy": 5},
        {"policy": "fixed:" + "9" * 5000},
        {"cancel": True},
        {"do_sample": True},
    ],
)
def test_options_of_a_wrong_kind_are_refused(model: Model, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        model.generate([1, 2, 3], **{"max_new_tokens": 2, **options})


def test_a_batch_of_one_is_a_prompt(model: Model) -> None:
    ids = random_ids(6)
    one = model.generate(torch.tensor([ids]), max_new_tokens=4)  # type: ignore[arg-type]
    assert one.token_ids == model.generate(ids, max_new_tokens=4).token_ids
