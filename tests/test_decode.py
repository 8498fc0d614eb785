"""The loop: what it counts, what it tells its parts, and that every exit frees them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.accept import RULES
from draftwise.accept.criterion import LOSSLESS
from draftwise.core import Ask, Draft, Features, SamplingParams, State, StepPlan
from draftwise.decode import REACH, decode
from draftwise.result import Tally
from draftwise.turns import Turn
from toy import (
    PROMPT,
    Broken,
    Everything,
    Guess,
    Target,
    ToyDrafter,
    ToyEngine,
    Whim,
    best_tree,
    parts,
    random_trees,
    request,
    run,
    scripted,
    steps,
    stopper,
    text_of,
)

SIZE = 6
TARGET = Target(SIZE, 3)
PARAMS = SamplingParams(max_new_tokens=20, temperature=1.0, seed=2)
TEXT = text_of(TARGET, [], request(PARAMS))


def drafters(seed: int = 0) -> list[ToyDrafter]:
    return [
        ToyDrafter(lambda g, t, d: scripted(TEXT)(g, t, min(d, 3)), "script", serial=True),
        ToyDrafter(random_trees(SIZE, seed), "trees"),
        ToyDrafter(best_tree(TARGET), "best"),
    ]


# counts


class Mixed(Whim):
    """As if every draft were merged from those of two drafters."""

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        plans = super().select(batch)
        for i, plan in enumerate(plans):
            if plan.draft is not None:
                whose = tuple(self._rng.choice(["trees", "best"]) for _ in plan.draft.tokens)
                plans[i] = replace(plan, draft=replace(plan.draft, sources=whose))
        return plans


@given(
    wanted=st.integers(1, 25),
    seed=st.integers(0, 2**32),
    eos=st.frozensets(st.integers(0, SIZE - 1), max_size=1),
    acceptance=st.sampled_from([*RULES, "budget"]),
    made=st.sampled_from([Whim, Mixed]),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_counts_reconcile(
    wanted: int, seed: int, eos: frozenset[int], acceptance: str, made: type[Whim]
) -> None:
    params = SamplingParams(max_new_tokens=wanted, temperature=1.0, seed=seed)
    engine, policy = ToyEngine(TARGET), made(seed, ["script"])
    budget = acceptance == "budget"
    chosen = {"quality_budget": 0.5} if budget else {"acceptance": acceptance}
    asked = request(params, eos=eos, **chosen)
    done = run(parts(engine, drafters(seed), policy), asked)
    first, *rest = done.results
    assert first.prefill and len(first.committed) == 1 and not any(r.prefill for r in rest)
    # Only a stop inside an accepted block leaves a step without its bonus token.
    cut = sum(r.accepted + 1 - len(r.committed) for r in rest)
    assert cut in (0, 1) and all(len(r.committed) == r.accepted + 1 for r in rest[:-1])
    assert len(done.tokens) == 1 + sum(r.accepted + 1 for r in rest) - cut
    assert all(r.accepted <= r.verified for r in rest)
    assert len(rest) == len(engine.widths) == engine.commits
    assert engine.widths == [max(r.plan.width, 1 + r.verified) for r in rest]
    assert policy.learned == rest
    tally = Tally(len(PROMPT))
    for result in done.results:
        tally.add(result)
    stats = tally.stats()
    assert stats.tokens == len(done.tokens) and stats.steps == len(rest)
    assert stats.verified == sum(d["verified"] for d in stats.by_drafter.values())
    assert stats.accepted == sum(d["accepted"] for d in stats.by_drafter.values())
    assert stats.loosened == sum(d["loosened"] for d in stats.by_drafter.values())
    assert stats.loosened <= stats.accepted
    for name, own in stats.by_drafter.items():
        drafted = [r for r in rest if r.plan.draft and name in r.plan.draft.whose]
        assert own["steps"] == len(drafted)
        whose = [(r.plan.draft.whose[i], r) for r in drafted if r.plan.draft for i in r.path]
        assert own["accepted"] == sum(source == name for source, _ in whose)
    assert stats.nats_given_up == sum(r.spent for r in rest)
    if budget:
        assert stats.nats_per_token <= 0.5
    elif acceptance in LOSSLESS:
        assert stats.nats_given_up == stats.loosened == 0
    assert stats.plain_steps == sum(not r.verified for r in rest)


def test_only_the_last_result_has_a_finish_reason() -> None:
    results = run(parts(ToyEngine(TARGET), drafters()), request(PARAMS)).results
    assert [r.finish for r in results] == [None] * (len(results) - 1) + ["length"]


def test_one_token_needs_no_drafter_no_policy_and_no_verify() -> None:
    engine, policy, made = ToyEngine(TARGET), Everything(fail="open"), drafters()
    for drafter in made:
        drafter.open = pytest.fail  # type: ignore[method-assign]
    asked = request(SamplingParams(max_new_tokens=1, temperature=1.0, seed=2))
    done = run(parts(engine, made, policy), asked)
    assert done.tokens == TEXT[:1] and engine.widths == []
    assert [r.finish for r in done.results] == ["length"]


def test_the_limit_is_the_context_s_where_that_is_less() -> None:
    done = run(parts(ToyEngine(TARGET), drafters()), request(PARAMS, limit=5))
    assert done.tokens == TEXT[:5] and done.results[-1].finish == "length"


class Watching(Everything):
    """Writes down what it is shown."""

    def __init__(self) -> None:
        super().__init__(["script"])
        self.states: list[State] = []
        self.batches: list[tuple[str, ...]] = []

    def choose(self, batch: Sequence[State]) -> list[Ask]:
        self.states.extend(batch)
        return super().choose(batch)

    def select(self, batch: Sequence[tuple[State, Sequence[Draft]]]) -> list[StepPlan]:
        self.batches.extend(tuple(d.drafter for d in drafts) for _, drafts in batch)
        return super().select(batch)


def test_the_policy_sees_the_sequence_as_it_is() -> None:
    policy = Watching()
    done = run(parts(ToyEngine(TARGET), drafters(), policy), request(PARAMS))
    generated = 1
    for state, result in zip(policy.states, done.results[1:], strict=True):
        assert (state.context, state.wanted) == (len(PROMPT) + generated - 1, 20 - generated)
        assert result.context == state.context
        assert {d.drafter for d in state.free} == ({"trees", "best"} if state.wanted > 1 else set())
        assert state.stale == {"script": 1} and set(state.room) == {"script"}
        drafted = tuple(d.drafter for d in result.drafted)
        assert drafted == policy.batches[policy.states.index(state)]
        assert (result.asked, result.stale) == (("script", 1) if state.wanted > 1 else (None, 0))
        generated += len(result.committed)


def test_drafters_are_told_every_token_once_and_asked_for_no_more_than_is_wanted() -> None:
    seen: list[tuple[int, ...]] = []

    def guess(generated: list[int], text: list[int], depth: int) -> Guess:
        assert text == [*PROMPT, *generated]
        # The bonus token is one of those wanted.
        assert depth == min(20 - len(generated) - 1, REACH)
        seen.append(tuple(generated))
        return scripted(TEXT)(generated, text, min(depth, 2))

    run(parts(ToyEngine(TARGET), [ToyDrafter(guess)]), request(PARAMS))
    assert seen == [tuple(TEXT[:n]) for n in range(1, 19, 3)]


def test_a_draft_deeper_than_what_is_wanted_does_no_harm() -> None:
    deep = ToyDrafter(lambda g, t, d: Guess(TEXT[len(g) :] + [0] * 30))
    done = run(parts(ToyEngine(TARGET), [deep]), request(PARAMS, limit=7))
    assert done.tokens == TEXT[:7]


@pytest.mark.parametrize("token", [-1, TARGET.size])
def test_ids_that_the_target_does_not_know_are_not_verified(token: int) -> None:
    beyond = ToyDrafter(lambda g, t, d: Guess([*TEXT[len(g) : len(g) + 1], token]), "beyond")
    right = ToyDrafter(scripted(TEXT), "right")
    done = run(parts(ToyEngine(TARGET), [beyond, right]), request(PARAMS))
    assert done.tokens == TEXT
    assert {d.drafter for r in done.results for d in r.drafted} == {"right"}


def test_an_engine_that_cannot_roll_back_is_run_plainly() -> None:
    engine = ToyEngine(TARGET, rollback="none")
    made = drafters()
    for drafter in made:
        drafter.open = pytest.fail  # type: ignore[method-assign]
    assert run(parts(engine, made, Everything()), request(PARAMS)).tokens == TEXT
    assert set(engine.widths) == {1}


def test_a_prompt_whose_beginning_is_kept_gives_the_same_text() -> None:
    engine = ToyEngine(TARGET)
    first = run(parts(engine, drafters()), request(PARAMS, reuse=True))
    assert engine.kept is not None
    prompt = (*PROMPT, *first.tokens[:-1], 0, 1)
    warm = run(parts(engine, drafters()), request(PARAMS, 1, prompt))
    assert warm.results[0].reused == len(prompt) - 2
    assert warm.tokens == run(parts(ToyEngine(TARGET)), request(PARAMS, 1, prompt)).tokens


# exits


def assert_free(engine: ToyEngine, made: Sequence[ToyDrafter], policy: Everything) -> None:
    assert not engine.caches
    assert not any(drafter.texts for drafter in made)
    assert not policy.seqs


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("reuse", [False, True])
def test_closing_the_generator_frees_everything(after: int, reuse: bool) -> None:
    engine, made, policy = ToyEngine(TARGET), drafters(), Whim(1, ["script"])
    going = decode(
        parts(engine, made, policy), asked := request(PARAMS, reuse=reuse), stopper(asked)
    )
    text = list(PROMPT)
    for _ in range(after):
        text.extend(next(going).committed)
    going.close()
    assert_free(engine, made, policy)
    assert engine.kept == (text[:-1] if reuse and after else None)
    assert next(going, None) is None


POLICY_METHODS = ["open", "choose", "go", "select", "learn", "close"]


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize(
    ("part", "method"),
    [
        *(("engine", m) for m in ("open", "forward", "commit", "close")),
        *(
            (name, m)
            for name in ("script", "trees")
            for m in ("open", "propose", "observe", "close")
        ),
        *(("policy", m) for m in POLICY_METHODS),
    ],
)
def test_an_exception_frees_everything_and_propagates(part: str, method: str, after: int) -> None:
    after = 1 if method in ("open", "close") else after
    engine = ToyEngine(TARGET, *((method, after) if part == "engine" else ()))
    fails = {part: {"fail": method, "after": after}}
    made = [
        ToyDrafter(best_tree(TARGET, 1), "script", serial=True, **fails.get("script", {})),
        ToyDrafter(random_trees(SIZE, 0), "trees", **fails.get("trees", {})),
        ToyDrafter(best_tree(TARGET), "best"),
    ]
    policy = Everything(["script"], **fails.get("policy", {}))
    asked = request(PARAMS, reuse=True)
    with pytest.raises(Broken, match=method):
        list(decode(parts(engine, made, policy), asked, stopper(asked)))
    assert_free(engine, made, policy)
    if method != "close":
        assert engine.kept is None, "what failed is not to be built upon"


def raising(*_: Any) -> Any:
    raise Broken("theirs")


@pytest.mark.parametrize("whose", ["processor", "criterion"])
def test_an_exception_in_a_user_s_object_frees_everything(whose: str) -> None:
    engine, made, policy = ToyEngine(TARGET), drafters(), Everything(["script"])

    def at_last(ids: torch.Tensor, scores: torch.Tensor) -> Any:
        if ids.shape[1] >= len(PROMPT) + 6:
            raise Broken("theirs")
        return scores if scores is not None else False

    asked = request(PARAMS, processors=(at_last,) if whose == "processor" else ())
    stop = stopper(asked, criteria=[at_last] if whose == "criterion" else ())
    with pytest.raises(Broken, match="theirs"):
        list(decode(parts(engine, made, policy), asked, stop))
    assert_free(engine, made, policy)


def test_the_turn_is_free_after_every_step_and_every_exit() -> None:
    turn = Turn()
    for fail in ("", "forward"):
        engine = ToyEngine(TARGET, fail, 4)
        asked = request(PARAMS)
        try:
            for _ in decode(parts(engine, drafters(), turn=turn), asked, stopper(asked)):
                assert not turn._waiting
        except Broken:
            assert fail
        assert not turn._waiting


# several sequences


@given(order=st.lists(st.integers(0, 2), max_size=60), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_interleaved_sequences_give_the_texts_they_give_alone(order: list[int], seed: int) -> None:
    asks = [
        request(SamplingParams(max_new_tokens=9 + n, temperature=n / 2, seed=n), n, (n, 1))
        for n in range(3)
    ]
    alone = [text_of(TARGET, drafters(seed), ask) for ask in asks]
    engine, made, policy = ToyEngine(TARGET), drafters(seed), Whim(seed, ["script"])
    shared = parts(engine, made, policy)
    going = [steps(shared, ask) for ask in asks]
    texts: list[list[int]] = [[], [], []]
    for n in [*order, *[0] * 30, *[1] * 30, *[2] * 30]:
        result = next(going[n], None)
        texts[n].extend(result.committed if result else ())
    assert texts == alone
    assert_free(engine, made, policy)


def test_closing_one_sequence_leaves_the_others() -> None:
    engine, made = ToyEngine(TARGET), drafters()
    shared = parts(engine, made)
    one, two = steps(shared, request(PARAMS, 0)), steps(shared, request(PARAMS, 1))
    text = [t for _ in range(3) for g in (one, two) for t in next(g).committed if g is two]
    one.close()
    assert set(engine.caches) == {1}
    assert text + [t for r in two for t in r.committed] == TEXT


def test_threads_that_share_the_parts_get_their_texts() -> None:
    shared = parts(ToyEngine(TARGET), drafters(), turn=Turn())
    texts: dict[int, list[int]] = {}

    def generate(seq: int) -> None:
        asked = request(PARAMS, seq)
        texts[seq] = [t for r in decode(shared, asked, stopper(asked)) for t in r.committed]

    threads = [threading.Thread(target=generate, args=(seq,)) for seq in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(texts.values()) == [TEXT] * 6


# turns


def until(ready: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if ready():
            return
        time.sleep(0.001)
    pytest.fail("waited in vain")


def ends(work: Callable[[], None]) -> None:
    """Runs work where a deadlock is a failure, not a test run that hangs."""
    done: list[bool] = []

    def working() -> None:
        work()
        done.append(True)

    thread = threading.Thread(target=working, daemon=True)
    thread.start()
    until(lambda: not thread.is_alive())
    assert done


def queued(turn: Turn, n: int) -> None:
    until(lambda: len(turn._waiting) == n)


def test_turns_are_taken_in_the_order_they_were_asked_for() -> None:
    turn = Turn()
    order: list[int] = []

    def take(n: int) -> None:
        with turn:
            order.append(n)

    threads = [threading.Thread(target=take, args=(n,)) for n in range(8)]
    with turn:
        for n, thread in enumerate(threads):
            thread.start()
            queued(turn, n + 2)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == list(range(8)) and not turn._waiting


def test_who_gave_the_turn_back_does_not_overtake_who_waits() -> None:
    turn, order = Turn(), []

    def take() -> None:
        with turn:
            order.append("other")

    other = threading.Thread(target=take)
    with turn:
        other.start()
        queued(turn, 2)
    with turn:
        order.append("again")
    other.join()
    assert order == ["other", "again"]


def test_an_interrupt_while_waiting_leaves_the_queue() -> None:
    turn, done = Turn(), threading.Event()
    main = threading.main_thread().ident
    assert main == threading.get_ident()

    def hold() -> None:
        with turn:
            queued(turn, 2)
            signal.pthread_kill(main, signal.SIGINT)
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        queued(turn, 1)
        with pytest.raises(KeyboardInterrupt), turn:
            pytest.fail("the turn was taken by two")
        assert len(turn._waiting) == 1
    finally:
        done.set()
    with turn:
        assert len(turn._waiting) == 1
    holder.join()
    assert not turn._waiting


def test_an_interrupt_at_the_moment_of_the_grant_passes_the_turn_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn = Turn()

    def interrupted(self: threading.Event) -> None:
        assert self.is_set()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), turn:
        pytest.fail("interrupted")
    monkeypatch.undo()
    with turn:
        assert len(turn._waiting) == 1


def test_the_holder_may_take_its_turn_again() -> None:
    turn = Turn()

    def twice() -> None:
        with turn:
            with turn:
                pass
            assert len(turn._waiting) == 1, "the inner exit gave the outer turn away"

    ends(twice)
    assert not turn._waiting


def test_an_abandoned_request_may_be_collected_during_another_s_step() -> None:
    turn, engine = Turn(), ToyEngine(TARGET)
    held: list[Any] = []

    class Sweeping(Everything):
        def choose(self, batch: Sequence[State]) -> list[Ask]:
            held.clear()  # the last reference: what the garbage collector does at any moment
            return super().choose(batch)

    made = drafters()
    shared = parts(engine, made, Sweeping(["script"]), turn)
    abandoned = request(PARAMS, 1)
    held.append(decode(shared, abandoned, stopper(abandoned)))
    next(held[0])
    assert set(engine.caches) == {1}
    tokens: list[int] = []

    def generate() -> None:
        asked = request(PARAMS)
        tokens.extend(t for r in decode(shared, asked, stopper(asked)) for t in r.committed)

    ends(generate)
    assert tokens == TEXT and not engine.caches and not turn._waiting


def test_features_reach_go() -> None:
    asked: list[Features] = []

    class Asking(Everything):
        def go(self, seq: int, features: Features) -> bool:
            asked.append(features)
            return len(asked) % 3 != 0

    done = run(parts(ToyEngine(TARGET), drafters(), Asking(["script"])), request(PARAMS))
    assert done.tokens == TEXT and asked
