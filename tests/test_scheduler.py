"""Several texts in one forward: each is the one it is alone, none waits, and all are freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.accept import RULES
from draftwise.core import Request, SamplingParams, StepResult, UsageError
from draftwise.decode import decode_batch
from draftwise.engines.base import PrefillChunk, Verify
from draftwise.scheduler import Scheduler, check_size
from draftwise.turns import Turn
from toy import (
    PROMPT,
    Broken,
    Everything,
    Target,
    ToyDrafter,
    ToyEngine,
    ToyRows,
    Whim,
    best_tree,
    parts,
    random_trees,
    request,
    scripted,
    stopper,
    text_of,
)

SIZE = 6
TARGET = Target(SIZE, 3)


def drafters(seed: int = 0, **fails: dict[str, Any]) -> list[ToyDrafter]:
    return [
        ToyDrafter(best_tree(TARGET, 1), "script", serial=True, **fails.get("script", {})),
        ToyDrafter(random_trees(SIZE, seed), "trees", **fails.get("trees", {})),
        ToyDrafter(best_tree(TARGET), "best"),
    ]


class Seen(ToyEngine):
    """Writes down who was in each forward, and how many were open."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.work: list[list[tuple[int, int]]] = []  # (sequence, 0 for a prompt or its width)
        self.most = 0

    def forward(self, work: Sequence[PrefillChunk | Verify]) -> list[ToyRows]:
        widths = [0 if isinstance(w, PrefillChunk) else len(w.tokens) for w in work]
        self.work.append([(w.seq, n) for w, n in zip(work, widths, strict=True)])
        self.most = max(self.most, len(self.caches))
        return super().forward(work)

    @property
    def steps(self) -> list[list[int]]:
        return [[seq for seq, _ in some] for some in self.work if some[0][1]]


def asks(wanted: Sequence[int], temperature: float = 1.0, **more: Any) -> list[Request]:
    return [
        request(
            SamplingParams(max_new_tokens=n, temperature=temperature, seed=10 + i),
            i,
            (*PROMPT, i % SIZE, (2 * i) % SIZE),
            **more,
        )
        for i, n in enumerate(wanted)
    ]


def together(made: Any, wanted: Sequence[Request], size: int = 8) -> dict[int, list[StepResult]]:
    """The results of each; after every step, caches hold the texts without their anchors."""
    found: dict[int, list[StepResult]] = {asked.seq: [] for asked in wanted}
    texts = {asked.seq: list(asked.prompt) for asked in wanted}
    for results in decode_batch(made, [(asked, stopper(asked)) for asked in wanted], size):
        for result in results:
            found[result.seq].append(result)
            texts[result.seq].extend(result.committed)
            if result.finish is None and result.committed:
                assert made.engine.caches[result.seq].tokens == texts[result.seq][:-1]
    return found


def tokens(results: Sequence[StepResult]) -> list[int]:
    return [token for result in results for token in result.committed]


def assert_free(engine: ToyEngine, made: Sequence[ToyDrafter], policy: Everything) -> None:
    assert not engine.caches
    assert not any(drafter.texts for drafter in made)
    assert not policy.seqs


# texts


@given(
    wanted=st.lists(st.integers(1, 25), min_size=1, max_size=7),
    size=st.integers(1, 5),
    temperature=st.sampled_from([0.0, 1.0]),
    acceptance=st.sampled_from(["coupled", "topk"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_text_is_the_one_it_is_alone(
    wanted: list[int], size: int, temperature: float, acceptance: str, seed: int
) -> None:
    some = asks(wanted, temperature, eos=frozenset({5}))
    alone = [text_of(TARGET, drafters(seed), ask, Whim(seed, ["script"])) for ask in some]
    engine, made, policy = Seen(TARGET), drafters(seed), Whim(seed, ["script"])
    found = together(parts(engine, made, policy), some, size)
    assert [tokens(found[ask.seq]) for ask in some] == alone
    assert engine.most <= size
    assert_free(engine, made, policy)


@pytest.mark.parametrize("acceptance", RULES)
def test_counts_reconcile_for_each_text_and_in_all(acceptance: str) -> None:
    engine, policy = Seen(TARGET), Whim(3, ["script"])
    some = asks([20, 3, 1, 11, 30], acceptance=acceptance)
    found = together(parts(engine, drafters(), policy), some, 3)
    for ask in some:
        first, *rest = found[ask.seq]
        assert first.prefill and len(first.committed) == 1 and not any(r.prefill for r in rest)
        assert all(len(r.committed) == r.accepted + 1 for r in rest[:-1])
        assert len(tokens(found[ask.seq])) == ask.limit
        assert [r.finish for r in found[ask.seq]] == [None] * len(rest) + ["length"]
        assert sum(ask.seq in step for step in engine.steps) == len(rest)
    assert engine.commits == len(engine.widths) == sum(map(len, engine.steps))
    assert sorted(map(id, policy.learned)) == sorted(
        id(r) for results in found.values() for r in results if not r.prefill
    )


def test_the_texts_of_a_step_share_its_seconds_and_are_learned_from_together() -> None:
    steps: list[list[StepResult]] = []

    class Learns(Everything):
        def learn(self, results: Sequence[StepResult]) -> None:
            steps.append(list(results))

    together(parts(Seen(TARGET), drafters(), Learns(["script"])), asks([9, 2, 14]))
    assert [len(step) for step in steps][:1] == [3] and len(steps[-1]) == 1
    for results in steps:
        assert {r.batch for r in results} == {len(results)}
        assert len({(r.draft_seconds, r.verify_seconds, r.rest_seconds) for r in results}) == 1


# nobody waits


def test_a_text_that_ends_leaves_at_once_and_the_next_takes_its_place() -> None:
    engine = Seen(TARGET)
    plain = parts(engine, [], Everything())
    together(plain, asks([2, 6, 4, 1, 3]), 2)
    # Forwards after the first token: 1, 5, 3, 0 and 2; two places.
    assert engine.steps == [[0, 1], [1, 2], [1, 2], [1, 2], [1, 4], [4]]


def test_no_text_waits_for_the_drafts_of_another() -> None:
    """One text is copied whole, the other foretold nowhere: their steps differ in number."""
    some = asks([25, 25])
    texts = [text_of(TARGET, [], ask) for ask in some]

    def guess(generated: list[int], text: list[int], depth: int) -> Any:
        mine = tuple(text[: len(some[0].prompt)]) == some[0].prompt
        return scripted(texts[0] if mine else [(t + 1) % SIZE for t in texts[1]])(
            generated, text, min(depth, 5)
        )

    found = together(parts(Seen(TARGET), [ToyDrafter(guess)]), some)
    assert [tokens(found[i]) for i in (0, 1)] == texts
    assert len(found[0]) == 1 + 4 and len(found[1]) == 1 + 24


def test_nobody_waits_for_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("run", "scheduler"):
        monkeypatch.setattr(f"draftwise.{place}.PREFILL_CHUNK", 4)
    engine = Seen(TARGET)
    some = asks([8, 3])
    long = request(SamplingParams(max_new_tokens=3), 2, [1, 2, 0, 3] * 5)
    together(parts(engine, [], Everything()), [*some, long])
    prompts = [some[0][0] for some in engine.work if some[0][1] == 0]
    assert prompts == [0, 0, 1, 1, 2, 2, 2, 2, 2]
    # From the first token of all on, a chunk of the long prompt is followed by a step.
    first = engine.work.index([(2, 0)])
    assert [some[0][1] == 0 for some in engine.work[first:]][:10] == [True, False] * 5


def test_one_token_is_out_with_the_prompt_and_meets_no_drafter() -> None:
    made, policy = drafters(), Everything(fail="open")
    for drafter in made:
        drafter.open = pytest.fail  # type: ignore[method-assign]
    engine = Seen(TARGET)
    found = together(parts(engine, made, policy), asks([1, 1, 1]), 2)
    assert engine.steps == [] and all(len(results) == 1 for results in found.values())


# exits


@pytest.mark.parametrize("after", range(9))
def test_closing_midway_frees_all(after: int) -> None:
    engine, made, policy = Seen(TARGET), drafters(), Whim(1, ["script"])
    some = asks([4, 9, 1, 20, 7])
    going = decode_batch(parts(engine, made, policy), [(a, stopper(a)) for a in some], 3)
    for _ in range(after):
        next(going)
    going.close()
    assert_free(engine, made, policy)


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize(
    ("part", "method"),
    [
        *(("engine", m) for m in ("open", "forward", "commit", "close")),
        *((name, m) for name in ("script", "trees") for m in ("open", "propose", "close")),
        *(("script", m) for m in ("observe",)),
        *(("policy", m) for m in ("open", "choose", "go", "select", "close")),
    ],
)
def test_an_error_frees_all_and_propagates(part: str, method: str, after: int) -> None:
    after = min(after, 3) if method in ("open", "close") else after
    engine = Seen(TARGET, *((method, after) if part == "engine" else ()))
    fails = {part: {"fail": method, "after": after}}
    made, policy = drafters(**fails), Everything(["script"], **fails.get("policy", {}))
    some = asks([12, 5, 9, 30], reuse=True)
    with pytest.raises(Broken, match=method):
        together(parts(engine, made, policy), some, 3)
    assert_free(engine, made, policy)


def test_an_error_in_one_text_s_processor_ends_all() -> None:
    def theirs(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > len(PROMPT) + 6:
            raise Broken("theirs")
        return scores

    engine, made, policy = Seen(TARGET), drafters(), Everything(["script"])
    one, two = asks([20, 20])
    other = request(SamplingParams(max_new_tokens=20), 7, processors=(theirs,))
    with pytest.raises(Broken, match="theirs"):
        together(parts(engine, made, policy), [one, other, two])
    assert_free(engine, made, policy)


# the scheduler itself


def test_requests_join_and_leave_between_steps() -> None:
    engine, made, policy = Seen(TARGET), drafters(), Everything(["script"])
    some = asks([9, 30, 6, 8])
    alone = [text_of(TARGET, drafters(), ask) for ask in some]
    scheduler = Scheduler(parts(engine, made, policy, Turn()), 3)
    texts: dict[int, list[int]] = {ask.seq: [] for ask in some}

    def go(steps: int) -> None:
        for _ in range(steps):
            for result in scheduler.step():
                texts[result.seq].extend(result.committed)

    assert not scheduler.busy and scheduler.step() == []
    scheduler.add(some[0], stopper(some[0]))
    go(3)
    for ask in some[1:]:
        scheduler.add(ask, stopper(ask))
    go(4)
    scheduler.drop(1)
    scheduler.drop(99)
    assert 1 not in engine.caches and policy.seqs and scheduler.busy
    while scheduler.busy:
        go(1)
    assert [texts[i] for i in (0, 2, 3)] == [alone[i] for i in (0, 2, 3)]
    assert texts[1] == alone[1][: len(texts[1])] and len(texts[1]) < 30
    assert_free(engine, made, policy)


def test_one_that_waits_may_be_dropped() -> None:
    engine = Seen(TARGET)
    scheduler = Scheduler(parts(engine), 1)
    for ask in asks([5, 5]):
        scheduler.add(ask, stopper(ask))
    scheduler.step()
    scheduler.drop(1)
    while scheduler.busy:
        scheduler.step()
    assert not any(seq == 1 for some in engine.work for seq, _ in some)


def test_closing_closes_all_although_one_fails() -> None:
    engine, made = Seen(TARGET), drafters(trees={"fail": "close", "after": 2})
    policy = Everything(["script"])
    scheduler = Scheduler(parts(engine, made, policy), 4)
    for ask in asks([9, 9, 9]):
        scheduler.add(ask, stopper(ask))
    for _ in range(5):
        scheduler.step()
    assert len(engine.caches) == 3
    with pytest.raises(Broken):
        scheduler.close(keep=True)
    assert_free(engine, made, policy)
    assert not scheduler.busy


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4", None])
def test_sizes_that_are_none_are_refused(size: Any) -> None:
    with pytest.raises(UsageError, match="batch_size"):
        check_size(size)
    check_size(np.int64(4))
