"""A replay takes the steps that were recorded, and its clock adds up."""

from __future__ import annotations

import pytest

from conftest import shared_model
from draftwise import Model, Trace
from draftwise.bench.costs import named
from draftwise.bench.replay import replay
from draftwise.bench.traces import read

PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12] * 3, [40, 41, 42, 43] * 5, list(range(60, 90)))


def recorded(path, policy, weights=1):
    drafters = ["lookup", "suffix", shared_model("llama", weights)]
    with Model(shared_model("llama"), None, drafters) as model:
        for prompt in PROMPTS:
            trace = Trace(path, shadow=True)
            model.generate(prompt, policy=policy, max_new_tokens=50, trace=trace)
    return read(path)


@pytest.mark.parametrize("weights", [0, 1])
@pytest.mark.parametrize(
    "policy",
    ["plain", "fixed:3:lookup", "fixed:5:suffix", "fixed:2:model", "heuristic", "ort:lookup"],
)
def test_a_replayed_policy_takes_the_recorded_steps(tmp_path, policy, weights):
    """The draft model has the target's own weights (0) or others (1)."""
    traces = recorded(tmp_path / "t.jsonl", policy, weights)
    world = named("flat", ["model"])
    seen: dict[int, list[int]] = {}

    def watch(result):
        seen.setdefault(result.seq, []).append(len(result.committed))

    replay(traces, policy, world, watch=watch)
    for seq, traced in enumerate(traces):
        assert seen[seq] == [step.committed for step in traced.steps]


def test_replays_are_deterministic_and_plain_is_the_sum_of_its_forwards(tmp_path):
    traces = recorded(tmp_path / "t.jsonl", "auto")
    world = named("steep", ["model"])
    first, _ = replay(traces, "auto", world)
    again, _ = replay(traces, "auto", world)
    assert first == again
    plain, _ = replay(traces, "plain", world)
    for traced, done in zip(traces, plain, strict=True):
        assert (done.steps, done.verified) == (traced.tokens - 1, 0)
        assert done.seconds == pytest.approx((traced.tokens - 1) * 0.036)


def test_verified_rows_and_drafting_are_paid_for(tmp_path):
    traces = recorded(tmp_path / "t.jsonl", "plain")
    world = named("flat", ["model"])
    fixed, _ = replay(traces, "fixed:3:model", world)
    steps = sum(done.steps for done in fixed)
    verify = sum(done.seconds - done.draft_seconds for done in fixed)
    assert verify == pytest.approx(steps * 0.224, rel=0.05)  # width 4
    assert sum(done.draft_seconds for done in fixed) > steps * 0.084
