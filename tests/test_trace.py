"""A trace holds what happened and what every drafter would have done, and no text."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import numpy as np
import pytest

import draftwise
from conftest import plain_ids, random_ids, shared_model
from draftwise import Model, Trace, UsageError
from draftwise.bench.traces import read
from draftwise.core import DEEPEST, Ask, Request, SamplingParams
from draftwise.drafters.lookup import Lookup
from draftwise.drafters.model import ModelDrafter
from draftwise.drafters.suffix import Suffix
from draftwise.engines.base import Top
from draftwise.engines.transformers import TransformersEngine
from draftwise.trace import SIBLINGS, _Watched

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 3
# Ids that no count, code or position of a short trace can be.
RARE = [271, 283, 277, 293, 289]


def model(draft: bool = True) -> Model:
    drafters = ["lookup", "suffix", *([shared_model("llama", 1)] if draft else [])]
    return Model(shared_model("llama"), None, drafters)


def contents(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()


@pytest.mark.parametrize("policy", ["auto", "fixed:3", "fixed:4:lookup", "plain"])
def test_a_text_is_the_same_with_a_trace_and_its_steps_are_recorded(tmp_path, policy):
    with model() as made:
        without = made.generate(PROMPT, policy=policy, max_new_tokens=60)
    with model() as made:
        path = tmp_path / "t.jsonl"
        trace = Trace(path, label="here")
        result = made.generate(PROMPT, policy=policy, max_new_tokens=60, trace=trace)
    assert result.token_ids == without.token_ids
    (traced,) = read(path)
    assert (traced.label, traced.policy, traced.tokens) == ("here", policy, 60)
    assert (traced.prompt, traced.limit, traced.finish) == (len(PROMPT), 60, "length")
    stats = result.stats
    assert len(traced.steps) == stats.steps
    assert sum(step.committed for step in traced.steps) == 59
    assert sum(step.accepted for step in traced.steps) == stats.accepted
    assert sum(step.seconds[1] for step in traced.steps) == pytest.approx(
        stats.verify_seconds, abs=1e-4
    )
    at = 1
    for step in traced.steps:
        assert (step.at, step.context) == (at, len(PROMPT) + at - 1)
        assert step.width >= 1 and len(step.survival) <= step.width
        at += step.committed
    assert set(traced.costs) == {"target", "model"}
    assert traced.drafters == {"lookup": "retrieval", "suffix": "retrieval", "model": "serial"}


def test_every_position_has_what_each_retrieval_drafter_would_have_proposed(tmp_path):
    path = tmp_path / "t.jsonl"
    with model() as made:
        text = list(made.generate(PROMPT, max_new_tokens=50, trace=Trace(path)).token_ids)
    (traced,) = read(path)
    fresh = [Lookup(), Suffix()]
    for drafter in fresh:
        drafter.open(0, Request(0, tuple(PROMPT), SamplingParams(), 0))
    right = 0
    for at in range(1, len(text)):
        for drafter in fresh:
            drafter.observe(0, [text[at - 1]])
            ask = Ask(0, drafter.name, DEEPEST, siblings=SIBLINGS)
            drafts = drafter.propose([ask], lambda seq, f: False)
            guess = traced.guesses[at].get(drafter.name)
            if not drafts:
                assert guess is None
                continue
            assert guess is not None
            assert guess.parents == drafts[0].parents
            for seen, known in zip(guess.features, drafts[0].features, strict=True):
                assert tuple(seen) == pytest.approx(tuple(known), abs=1e-3)
            assert [drafts[0].tokens[i] for i in guess.main] == list(drafts[0].main().tokens)
            for i, code in enumerate(guess.codes):
                path_to = []
                node = i
                while node >= 0:
                    path_to.append(drafts[0].tokens[node])
                    node = drafts[0].parents[node]
                came = text[at : at + len(path_to)]
                assert (code == 0) == (path_to[::-1] == came)
                assert (code == -1) == (path_to[:0:-1] != came[: len(path_to) - 1])
                right += code == 0
    assert right > 5


def test_the_shadow_is_what_the_draft_model_would_have_chosen(tmp_path):
    path = tmp_path / "t.jsonl"
    with model() as made:
        trace = Trace(path, shadow=True)
        text = list(made.generate(PROMPT, max_new_tokens=30, trace=trace).token_ids)
    (traced,) = read(path)
    drafter = ModelDrafter(TransformersEngine(shared_model("llama", 1)), 1000)
    drafter.open(0, Request(0, tuple(PROMPT), SamplingParams(), 0))
    assert len(traced.shadow["model"]) == len(text) - 1
    for at, choices in enumerate(traced.shadow["model"], start=1):
        drafter.observe(0, [text[at - 1]])
        ask = Ask(0, "model", 1, siblings=SIBLINGS)
        (draft,) = drafter.propose([ask], lambda seq, f: False)
        assert [code == 0 for code, _ in choices] == [t == text[at] for t in draft.tokens]
        assert [f.prob for _, f in choices] == pytest.approx(
            [f.prob for f in draft.features], abs=1e-3
        )


def test_drafters_that_had_the_same_token_have_the_same_code(tmp_path):
    path = tmp_path / "t.jsonl"
    with model() as made:
        made.generate(PROMPT, max_new_tokens=50, trace=Trace(path, shadow=True))
    (traced,) = read(path)
    both = [
        (g["lookup"].codes[0], g["suffix"].codes[g["suffix"].main[0]])
        for g in traced.guesses.values()
        if len(g) == 2
    ]
    assert any(a == b for a, b in both)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_no_text_is_written_unless_asked_for(tmp_path, name):
    path = tmp_path / name
    prompt = RARE * 6
    with model() as made:
        ids = made.generate(prompt, max_new_tokens=20, trace=Trace(path, shadow=True)).token_ids
        raw = contents(path)
        numbers = set()

        def numbers_in(value):
            if isinstance(value, dict):
                for v in value.values():
                    numbers_in(v)
            elif isinstance(value, list):
                for v in value:
                    numbers_in(v)
            elif isinstance(value, int):
                numbers.add(value)

        for line in raw.splitlines():
            record = json.loads(line)
            record.pop("costs", None)
            assert not {"prompt_ids", "token_ids"} & record.keys()
            numbers_in(record)
        assert not numbers & set(RARE)
        made.generate(prompt, max_new_tokens=20, trace=Trace(path, text=True))
    last = json.loads(contents(path).splitlines()[-1])
    assert last["prompt_ids"] == prompt
    assert last["token_ids"] == list(ids)
    assert len(read(path)) == 2


def test_requests_that_end_early_are_recorded_too(tmp_path):
    path, cancel = tmp_path / "t.jsonl", threading.Event()
    with model() as made:
        assert made.generate(PROMPT, max_new_tokens=1, trace=path).finish_reason == "length"
        call = made.stream(PROMPT, max_new_tokens=50, cancel=cancel, trace=path)
        for _ in range(4):
            call.step()
        cancel.set()
        assert call.step() is None
        closed = made.stream(PROMPT, max_new_tokens=50, trace=path)
        closed.step()
        closed.close()
    one, cancelled, early = read(path)
    assert (one.tokens, one.steps) == (1, ())
    assert cancelled.finish == early.finish == "cancelled"
    assert cancelled.tokens == 1 + sum(step.committed for step in cancelled.steps)


@pytest.mark.parametrize("where", ["", "nowhere/t.jsonl"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, where: str):
    with pytest.raises(UsageError, match="cannot write a trace") as caught:
        Trace(tmp_path / where)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    ["", "hello\n", "{}\n", '{"kind":"request","version":99}\n', '{"kind":"end"}\n', "[1]\n"],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path: Path, content: str):
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError):
        read(tmp_path / "none.jsonl")


def test_a_request_that_was_cut_off_in_the_file_is_left_out(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    with model(draft=False) as made:
        for _ in range(2):
            made.generate(PROMPT, max_new_tokens=10, trace=path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))
    assert len(read(path)) == 1


def test_a_kept_cache_survives_the_shadow_of_another_request(tmp_path: Path):
    """A chat goes on from its cache, whatever is recorded of it."""
    llama = shared_model("llama")
    with model() as made:
        first = made.generate(
            PROMPT, max_new_tokens=12, reuse=True, trace=Trace(tmp_path / "t", shadow=True)
        )
        turn = [*PROMPT, *first.token_ids, 40, 41, 42]
        second = made.generate(turn, max_new_tokens=12, reuse=True)
    assert second.stats.reused_tokens > len(PROMPT)
    assert list(second.token_ids) == plain_ids(llama, turn, 12)


def test_trace_is_a_public_name():
    assert draftwise.Trace is Trace
    assert random_ids(3)


class _Learner:
    """A retrieval drafter that writes down what it is told, and when it is asked."""

    name, serial, rows = "learner", False, 2

    def __init__(self):
        self.told = []

    def learn(self, seq, tokens, best):
        self.told += [("row", token, ids[0]) for token, ids in zip(tokens, best.ids, strict=True)]

    def observe(self, seq, committed):
        self.told += [("text", token) for token in committed]

    def propose(self, asks, go):
        self.told.append("asked")
        return []


def test_a_learner_is_asked_at_each_position_with_no_later_row():
    """The row after a token of the text says what comes next: at the token it is not known yet."""
    inner = _Learner()
    watched = _Watched(inner, shadow=False)
    assert watched.rows == 2
    ids = np.array([[11, 0], [12, 0], [13, 0], [99, 0]])
    watched.learn(0, [10, 11, 12, 50], Top(ids, ids.astype(float)))  # the last one was rejected
    assert inner.told == []
    watched.observe(0, [11, 12, 13])
    assert inner.told == [
        *[("row", 10, 11), ("text", 11), "asked"],
        *[("row", 11, 12), ("text", 12), "asked"],
        *[("row", 12, 13), ("row", 50, 99), ("text", 13), "asked"],
    ]
