"""The published rules do what their sources say: lengths after given acceptances, and stops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.policy.simulate import Guesser, SerialGuesser, curve, simulate

from draftwise.core import (
    DEEPEST,
    Dense,
    Features,
    State,
    StepPlan,
    StepResult,
    UsageError,
    chain,
)
from draftwise.engines.base import Shape
from draftwise.policy import REGISTRY, Costs, Policy, check, make
from draftwise.policy.bandit import LENGTHS, Bandit
from draftwise.policy.cost import CostCurve
from draftwise.policy.published import RULES

CURVE = CostCurve([(Shape(1, 0), 0.1), (Shape(8, 0), 0.2)])
NAMES = [rule.name for rule in RULES]
LOOKUP = Costs(CURVE, {}, ("lookup", "suffix"))
MODEL = Costs(CURVE, {"model": CURVE}, ("lookup", "model"))


def state(seq: int = 0, wanted: int = 100, drafter: str = "lookup") -> State:
    free = chain(seq, drafter, range(DEEPEST), [Features(match=3)] * DEEPEST)
    return State(seq, 10, wanted, (free,), {"model": 1}, {"model": 1000})


def opened(spec: str, costs: Costs = MODEL, seqs: tuple[int, ...] = (0,)) -> Policy:
    policy = make(spec, costs)
    for seq in seqs:
        policy.open(seq)
    return policy


def depth(policy: Policy, seq: int = 0) -> int:
    (ask,) = policy.choose([state(seq)])
    assert ask.drafter == "model"
    return ask.depth


def result(
    accepted: int, verified: int, seq: int = 0, seconds: float = 1.0, cut: bool = False
) -> StepResult:
    draft = chain(seq, "model", range(verified), [Features()] * verified) if verified else None
    committed = tuple(range(accepted if cut else accepted + 1))
    plan = StepPlan(seq, draft, 1 + verified)
    return StepResult(seq, plan, 10, committed, accepted, verify_seconds=seconds)


def drafted(policy: Policy, features: list[Features], seq: int = 0) -> int:
    """How many tokens a serial drafter drafts that reports these features."""
    most = depth(policy, seq)
    for n, feature in enumerate(features[:most], 1):
        if n == most or not policy.go(seq, feature):
            return n
    raise AssertionError("more features are needed")


def probs(*values: float) -> list[Features]:
    return [Features(prob=p) for p in values]


def entropies(*values: float) -> list[Features]:
    return [Features(entropy=h) for h in values]


# lengths


def lengths(policy: Policy, *script: tuple[int, int]) -> list[int]:
    seen = []
    for accepted, verified in script:
        policy.learn([result(accepted, verified)])
        seen.append(depth(policy))
    return seen


def test_heuristic_adds_two_after_full_acceptance_and_takes_one_off_else() -> None:
    policy = opened("heuristic")
    assert depth(policy) == 20
    assert lengths(policy, (20, 20), (22, 22), (23, 24), (0, 23)) == [22, 24, 23, 22]
    assert lengths(policy, *[(0, 5)] * 30)[-1] == 1
    assert lengths(policy, *[(1, 1)] * 90)[-1] == DEEPEST


def test_heuristic_keeps_its_length_across_requests() -> None:
    policy = opened("heuristic")
    policy.learn([result(20, 20)])
    policy.close(0)
    policy.open(1)
    assert depth(policy, 1) == 22


@pytest.mark.parametrize("name", NAMES)
def test_steps_without_a_draft_and_drafts_cut_by_a_stop_teach_nothing(name: str) -> None:
    policy = opened(name)
    before = repr(vars(policy))
    policy.learn([result(0, 0), result(3, 6, cut=True)])
    assert repr(vars(policy)) == before


def test_gammatune_follows_the_moving_mean_of_what_is_accepted() -> None:
    policy = opened("gammatune")
    assert depth(policy) == 4
    # 0.7 · 4 + 0.3 · 6 = 4.6; 0.7 · 4.6 + 0.3 · 7 = 5.32; + 0.3 · 0 = 3.724; = 3.2068
    assert lengths(policy, (4, 4), (5, 5), (0, 5), (2, 4)) == [5, 5, 4, 3]
    assert lengths(policy, *[(0, 3)] * 20)[-1] == 1
    assert lengths(policy, *[(1, 1)] * 9)[-1] == 3  # one token more than is accepted, rounded
    for _ in range(99):
        n = depth(policy)
        policy.learn([result(n, n)])
    assert depth(policy) == 20


def test_ort_moves_by_one_between_its_marks() -> None:
    policy = opened("ort")
    assert depth(policy) == 4
    assert lengths(policy, (4, 4), (5, 5)) == [5, 6]
    # The moving share is 1, 0.8, 0.64, 0.512, 0.41: it stays, and shrinks below a half.
    assert lengths(policy, *[(0, 6)] * 4) == [6, 6, 6, 5]
    assert lengths(policy, *[(0, 5)] * 30)[-1] == 1
    assert lengths(policy, *[(1, 1)] * 60)[-1] == 16


@pytest.mark.parametrize("name", ["gammatune", "ort"])
def test_these_lengths_are_each_request_s_own(name: str) -> None:
    policy = opened(name, seqs=(0, 1))
    lengths(policy, *[(0, 4)] * 20)
    assert (depth(policy, 0), depth(policy, 1)) == (1, 4)
    policy.close(0)
    policy.open(0)
    assert depth(policy, 0) == 4


# stops


@pytest.mark.parametrize(
    ("spec", "features", "expected"),
    [
        ("confidence", probs(0.9, 0.41, 0.39, 0.9), 3),  # the token below is the last one drafted
        ("confidence", probs(*[0.4] * 20), 20),
        ("confidence:0.95", probs(0.96, 0.9), 2),
        ("confidence:.95:model", probs(0.9), 1),
        ("specdec++", probs(*[0.8] * 20), 6),  # 1 - 0.8^5 = 0.67, 1 - 0.8^6 = 0.74
        ("specdec++", probs(0.9, 0.2), 2),
        ("specdec++:0.3", probs(*[0.9] * 20), 4),
        ("specdec++", probs(*[1.0] * 20), 20),
        ("svip", entropies(0.0, 0.59, 0.61, 0.0), 3),  # 0.15 · 0.6 = 0.3²
        ("svip:0.6", entropies(2.3, 2.5), 2),
        ("svip", entropies(*[0.0] * 40), 40),
        ("adaedl", entropies(1.79, 1.81, 0.0), 2),  # 1 - √(0.2 · 1.8) = 0.4
        ("adaedl", entropies(*[0.5] * 7), 7),
    ],
)
def test_drafts_end_where_the_rule_says(spec: str, features: list[Features], expected: int) -> None:
    policy = opened(spec)
    assert drafted(policy, features) == expected
    assert drafted(policy, features) == expected  # nothing is left over from the draft before


@pytest.mark.parametrize(("name", "longest"), [(r.name, r.LONGEST) for r in RULES[1:5]])
@pytest.mark.parametrize("unknown", [Features(), Features(margin=0.01), Features(match=2)])
def test_where_nothing_is_known_a_draft_goes_on_to_its_greatest_length(
    name: str, longest: int, unknown: Features
) -> None:
    policy = opened(name)
    assert drafted(policy, [unknown] * 100) == longest
    retrieval = opened(name, LOOKUP)
    ((plan),) = retrieval.select([(state(), state().free)])
    assert plan.draft is not None and len(plan.draft.tokens) == longest


def test_specdec_counts_each_sequence_for_itself() -> None:
    policy = opened("specdec++", seqs=(0, 1))
    policy.choose([state(0), state(1)])
    assert policy.go(0, Features(prob=0.4))
    assert policy.go(1, Features(prob=0.9))
    assert not policy.go(0, Features(prob=0.7))
    assert policy.go(1, Features(prob=0.7))


def test_adaedl_stops_sooner_while_acceptance_is_below_its_target() -> None:
    policy = opened("adaedl", seqs=(0, 1))
    at = entropies(0.0, 1.5, *[0.0] * 9)  # 1 - √(0.2 · 1.5) = 0.452
    assert drafted(policy, at) == 7
    policy.learn([result(1, 4)] * 51)  # λ rises by (1 - β₂)·ε a step
    assert drafted(policy, at) == 7
    policy.learn([result(1, 4)] * 2)
    assert drafted(policy, at) == 2
    assert drafted(policy, at, 1) == 7
    policy.learn([result(4, 4)] * 8)
    assert drafted(policy, at) == 7
    policy.learn([result(0, 4)] * 99)
    policy.close(0)
    policy.open(0)
    assert drafted(policy, at) == 7


# which drafter, and what is refused


@pytest.mark.parametrize("name", NAMES)
def test_the_drafter_is_the_serial_one_the_first_or_the_one_named(name: str) -> None:
    assert getattr(make(name, MODEL), "drafter") == "model"  # noqa: B009
    assert getattr(make(name, LOOKUP), "drafter") == "lookup"  # noqa: B009
    named = opened(f"{name}:suffix", LOOKUP)
    assert named.choose([state()]) == []
    (plan,) = named.select([(state(), state().free)])
    assert plan.draft is None
    (plan,) = named.select([(state(), state(drafter="suffix").free)])
    assert plan.draft is not None and plan.draft.drafter == "suffix"


@pytest.mark.parametrize("name", [*NAMES, "bandit"])
@pytest.mark.parametrize(
    "argument", ["nosuch", "-1", "0.5:nosuch", "lookup:0.5", "nan", "9" * 5000]
)
def test_bad_arguments_get_one_clear_line(name: str, argument: str) -> None:
    with pytest.raises(UsageError, match=r"drafter|threshold") as error:
        make(f"{name}:{argument}", LOOKUP)
    assert "\n" not in str(error.value) and len(str(error.value)) < 160


@pytest.mark.parametrize("spec", ["confidence:0", "confidence:1.1", "specdec++:2", "svip:11"])
def test_thresholds_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="its threshold must be above 0 and at most 1"):
        make(spec, LOOKUP)


@pytest.mark.parametrize("name", [*NAMES, "bandit"])
def test_a_rule_needs_a_drafter(name: str) -> None:
    with pytest.raises(UsageError, match="needs a drafter"):
        make(name, Costs(CURVE, {}, ()))


def test_an_unknown_policy_is_told_all_names() -> None:
    with pytest.raises(UsageError) as error:
        check("nosuch")
    assert all(name in str(error.value) for name in REGISTRY)
    assert {*NAMES, "bandit", "auto", "plain", "fixed"} == set(REGISTRY)


@pytest.mark.parametrize("name", [*NAMES, "bandit"])
def test_nothing_is_kept_of_a_closed_request(name: str) -> None:
    policy = opened(name, seqs=(7,))
    for accepted in (1, 2):
        policy.choose([state(7)])
        policy.go(7, Features(prob=0.9, entropy=0.1))
        policy.select([(state(7), state(7).free)])
        if accepted == 1:  # a step may also be left before its result
            policy.learn([result(accepted, 2, 7)])
    policy.close(7)
    assert not any(isinstance(kept, dict) and kept for kept in vars(policy).values())


@pytest.mark.parametrize("spec", ["fixed:2", "heuristic", "gammatune", "ort", "bandit:model"])
def test_a_draft_drawn_at_random_is_verified_whole(spec: str) -> None:
    policy = opened(spec)
    while not policy.choose([state()]):  # the bandit's first arm is plain decoding
        policy.learn([result(0, 0)])
    half = Dense(np.full(2, 0.5))
    drawn = chain(0, "model", [0] * 30, [Features()] * 30, [half] * 30)
    (plan,) = policy.select([(state(), (drawn,))])
    assert plan.draft is drawn or plan.draft == drawn.head(30)
    assert plan.width == 31


@pytest.mark.parametrize("name", [*NAMES, "bandit"])
def test_a_target_that_cannot_roll_back_is_decoded_plainly(name: str) -> None:
    policy, bare = opened(name), State(0, 10, 20)
    assert policy.choose([bare]) == []
    assert policy.select([(bare, ())]) == [StepPlan(0, None, 1)]


# bandit


def play(policy: Policy, rates: dict[tuple[str, int], float], steps: int) -> list[tuple[str, int]]:
    """Runs steps that commit one token in 1 / rate seconds; the (drafter, length) of each."""
    seen = []
    for _ in range(steps):
        asks = policy.choose([state()])
        (plan,) = policy.select([(state(), state().free)])
        arm = ("", 0)
        if asks:
            arm = (asks[0].drafter, asks[0].depth)
        elif plan.draft:
            arm = (plan.draft.drafter, len(plan.draft.tokens))
        seen.append(arm)
        policy.learn([result(0, 1, seconds=1 / rates.get(arm, 1.0))])
    return seen


def test_bandit_tries_every_arm_once_and_then_mostly_the_best() -> None:
    policy = opened("bandit")
    arms = [("", 0), *(("lookup", n) for n in LENGTHS), *(("model", n) for n in LENGTHS)]
    assert play(policy, {}, len(arms)) == arms
    for best in (("model", 4), ("", 0), ("lookup", 16)):
        played = play(opened("bandit"), {best: 10.0}, 1500)
        assert played[-500:].count(best) > 400


def test_bandit_s_choice_is_that_of_ucb1() -> None:
    policy = opened("bandit:model")
    assert isinstance(policy, Bandit)
    rates = {("", 0): 3.0, ("model", 2): 4.0, ("model", 8): 2.0}
    play(policy, rates, len(policy.arms))
    for t in range(len(policy.arms), 80):
        bounds = [
            rates.get((arm.drafter, arm.length), 1.0) / 4.0 + math.sqrt(2 * math.log(t) / arm.tries)
            for arm in policy.arms
        ]
        expected = policy.arms[int(np.argmax(bounds))]
        assert play(policy, rates, 1) == [(expected.drafter, expected.length)]


def test_bandit_learns_nothing_from_a_step_that_leaves_no_room_for_a_draft() -> None:
    policy = opened("bandit")
    assert isinstance(policy, Bandit)
    assert policy.choose([state(wanted=1)]) == []
    assert policy.select([(state(wanted=1), ())]) == [StepPlan(0, None, 1)]
    policy.learn([result(0, 0)])
    assert not any(arm.tries for arm in policy.arms)


# on the virtual clock


@pytest.mark.parametrize("name", [*NAMES, "bandit"])
def test_a_drafter_that_is_right_pays_where_verification_is_cheap(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def retrieval(text: list[int], clock: Any) -> list[Any]:
        return [Guesser("g", text, 0.95)]

    def serial(text: list[int], clock: Any) -> list[Any]:
        return [Guesser("g", text, 0.0), SerialGuesser("m", text, 0.95, 0.01, clock)]

    for drafters in (retrieval, serial):
        done = simulate(monkeypatch, curve("flat"), drafters, name, requests=2)
        assert done.speedup > 1.5
        used = {s.plan.draft.drafter for s in done.steps if s.plan.draft}
        assert used == (
            {"g"} if drafters is retrieval else {"m"} if name != "bandit" else {"g", "m"}
        )
    longest = max(s.verified for s in done.steps)
    assert name != "specdec++" or longest == 6  # the clock's drafter always says 0.8
