"""The figures of a replay: known from sums by hand, or from what the parts must add up to."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest

from draftwise.bench import captured
from draftwise.bench.calibration import EVERY, Watching, reliability
from draftwise.bench.captured import BEST, BEST_EACH, CLAIRVOYANT, HINDSIGHT, Study, study
from draftwise.bench.costs import World, guessed, named, recorded, world
from draftwise.bench.spent import Spent, Watched
from draftwise.bench.summary import resampled
from draftwise.bench.traces import Traced, read
from draftwise.core import POINT, Draft, Features, StepPlan, StepResult, UsageError
from recording import record

POLICIES = ("auto", "fixed:3:lookup", "fixed:5:model", "heuristic")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Traced]:
    return read(record(tmp_path_factory.mktemp("trace") / "trace.jsonl"))


@pytest.fixture(scope="module", params=["flat", "steep"])
def made(request: pytest.FixtureRequest, traces: list[Traced]) -> Study:
    return study(traces, POLICIES, named(request.param, ["model"]))


def test_rows_agree_with_their_own_seconds(made: Study) -> None:
    rows = {row.name: row for row in (*made.policies, *made.references)}
    assert [row.name for row in made.policies] == ["plain", *POLICIES]
    plain, best = rows["plain"], rows[HINDSIGHT]
    assert (plain.speed, plain.captured, plain.worst) == (1.0, 0.0, 1.0)
    assert best.captured == 1.0
    for row in rows.values():
        assert row.speed == pytest.approx(plain.seconds / row.seconds)
        assert row.worst <= row.speed
        gain = (plain.seconds - row.seconds) / (plain.seconds - best.seconds)
        assert row.captured == pytest.approx(gain)
        assert row.interval and row.interval[0] <= row.captured <= row.interval[1]
        assert row.worst_long is None  # no text is that long


def test_references_bound_each_other(made: Study) -> None:
    seconds = {row.name.split(":")[0]: row.seconds for row in made.references}
    best = next(row for row in made.references if row.name.startswith("best fixed:"))
    assert seconds[HINDSIGHT] <= seconds[CLAIRVOYANT]
    assert seconds[HINDSIGHT] <= seconds[BEST_EACH] <= best.seconds
    fixed = [row for row in made.policies if row.name.startswith("fixed")]
    # Replayed and computed from the table alike; the steps of 16 in its contexts are not seen here.
    assert best.seconds <= min(row.seconds for row in fixed) * 1.001


def test_time_is_accounted_for(made: Study) -> None:
    for row in made.policies:
        spent = made.spent[row.name]
        assert sum(astuple(spent)) == pytest.approx(row.seconds)
        assert min(astuple(spent)) > -1e-9
    assert made.spent["plain"].verify == pytest.approx(made.policies[0].seconds)
    # This draft model is never wrong, so only what the end of a text cut off was for nothing.
    model = made.spent["fixed:5:model"]
    assert model.rejected_draft < 0.05 * model.useful_draft
    lookup = made.spent["fixed:3:lookup"]
    assert lookup.useful_draft == lookup.rejected_draft == 0 < lookup.rejected_verify


def test_what_rejected_tokens_cost() -> None:
    world = World("x", [(1, 0, 1.0), (2, 0, 2.0), (4, 0, 4.0)], {})
    own = Draft(0, "m", (7, 8, 9, 9), (-1, 0, 1, 2), (Features(),) * 4, (POINT,) * 4)
    step = StepResult(
        0, StepPlan(0, own.head(3), 4), 9, (7, 8, 5), 2, (own,), "m", 0, 1.0, 4.0, 0.5
    )
    watched = Watched(world)
    watched(step)
    # Two of four drafted tokens came; of four rows, three were needed.
    assert watched.spent() == Spent(0.5, 0.5, 3.0, 1.0, 0.5)
    watched(StepResult(0, StepPlan(0, None, 1), 9, (7,), 0, verify_seconds=1.0))
    assert watched.spent() == Spent(0.5, 0.5, 4.0, 1.0, 0.5)
    assert watched.widths == {4: 1, 1: 1}


def test_widths_count_the_steps(made: Study) -> None:
    for row in made.policies:
        assert row.tokens_per_step == pytest.approx(
            made.tokens / sum(made.widths[row.name].values())
        )
    assert made.widths["plain"] == {1: made.tokens}
    assert max(made.widths["fixed:3:lookup"]) == 4


def test_categories_add_up(made: Study) -> None:
    assert [(c.label, c.requests) for c in made.categories] == [("copies", 2), ("other", 1)]
    plain = made.policies[0].seconds
    tokens = {"copies": 2 * 69, "other": 69}
    seconds = {c.label: tokens[c.label] / c.tokens_per_second for c in made.categories}
    assert sum(seconds.values()) == pytest.approx(plain)
    for row in made.policies:
        own = [seconds[c.label] / c.speed[row.name] for c in made.categories]
        assert sum(own) == pytest.approx(row.seconds)
    assert all({BEST, HINDSIGHT, *POLICIES} <= set(c.speed) for c in made.categories)


def test_where_nothing_can_be_gained_no_share_is_given(traces: list[Traced]) -> None:
    dear = World("dear", [(1, 0, 0.01), (64, 0, 6.4)], {"model": [(1, 0, 1.0)]})
    found = study(traces, ["auto"], dear)
    assert all(row.captured is None and row.interval is None for row in found.policies)
    assert all(c.captured["auto"] is None for c in found.categories)


@pytest.mark.parametrize("plain, given", [(1.04, False), (1.06, True)])
def test_a_headroom_of_five_per_cent_is_needed(plain: float, given: bool) -> None:
    seconds = [np.array([x, x]) for x in (plain, 1.0, 1.0)]
    assert captured.share(*seconds) == ((pytest.approx(1), [1, 1]) if given else (None, None))


def test_long_requests_have_a_worst_of_their_own(
    traces: list[Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "LONG", 70)
    cut = [traces[0], replace(traces[1], tokens=20), traces[2]]
    (_, auto) = study(cut, ["auto"], named("flat", ["model"])).policies
    assert auto.worst_long is not None and auto.worst_long >= auto.worst
    (_, alone) = study([traces[0], traces[2]], ["auto"], named("flat", ["model"])).policies
    assert alone.worst_long == alone.worst


def test_requests_of_one_token_are_left_out(traces: list[Traced]) -> None:
    short = replace(traces[0], tokens=1, steps=(), guesses={}, shadow={"model": ()})
    world = named("flat", ["model"])
    assert study([*traces, short], ["auto"], world) == study(traces, ["auto"], world)
    with pytest.raises(UsageError, match="more than one token"):
        study([short], ["auto"], world)


def test_a_trace_without_drafters_is_plain(traces: list[Traced]) -> None:
    bare = [replace(t, drafters={}, guesses={}, shadow={}, rehearsed={}) for t in traces]
    auto = study(bare, ["auto"], named("flat", [])).policies[-1]
    assert (auto.name, auto.speed) == ("auto", pytest.approx(1.0))


@pytest.mark.parametrize("point", [(0, 4, 1.0), (1, -1, 1.0), (1, 4, 0.0), (1, 4, np.inf)])
def test_curves_that_are_no_measurements_are_refused(
    traces: list[Traced], tmp_path: Path, point: tuple[int, int, float]
) -> None:
    width, context, seconds = point
    with pytest.raises(UsageError, match="no measurements"):
        recorded([replace(traces[0], costs={"target": [point]})], [])
    file = tmp_path / "costs.json"
    row = {"width": width, "context": context, "ms": seconds}
    file.write_text(json.dumps({"target": {"points": [row]}}))
    with pytest.raises(UsageError, match="profile"):
        world(str(file), [])


def test_the_traces_own_policy_is_compared_on_its_own_costs(traces: list[Traced]) -> None:
    world = recorded(traces, ["model"])
    assert world.rest > 0 and set(world.serial) == {"model"} and not guessed(world)
    found = study(traces, POLICIES, world).recorded
    assert found is not None and found.policy == "auto"
    assert found.recorded_steps == sum(len(t.steps) for t in traces)
    assert found.recorded_seconds == pytest.approx(sum(t.seconds for t in traces))
    assert study(traces, ["heuristic"], world).recorded is None
    assert study(traces, ["auto"], named("flat", ["model"])).recorded is None
    mixed = [replace(traces[0], policy="plain"), *traces[1:]]
    assert study(mixed, ["auto"], world).recorded is None


def test_recorded_costs_are_those_of_the_median_request(traces: list[Traced]) -> None:
    slow = [
        replace(t, costs={"target": [(1, 0, x)]}) for t, x in zip(traces, (3, 1, 2), strict=True)
    ]
    assert recorded(slow, []).target == [(1, 0, 2)]
    with pytest.raises(UsageError, match="no cost curve for model"):
        recorded(slow, ["model"])


def test_an_interval_is_that_of_a_ratio_of_sums() -> None:
    rows = np.array([[10.0, 5.0, 0.0], [1.0, 1.0, 0.0]])
    value, interval = resampled(rows, lambda s: (s[..., 0] - s[..., 1]) / (s[..., 0] - s[..., 2]))
    assert value == pytest.approx(5 / 11)
    assert interval == pytest.approx([0.0, 0.5])


# Calibration


def test_reliability_by_bins() -> None:
    table = reliability("x", [(0.15, False), (0.17, True), (0.95, True), (1.0, True)])
    assert [(b.low, b.nodes) for b in table.bins] == [(0.1, 2), (0.9, 2)]
    assert table.bins[0].predicted == pytest.approx(0.16) and table.bins[0].observed == 0.5
    assert table.error == pytest.approx((2 * 0.34 + 2 * 0.025) / 4)
    assert (table.nodes, table.observed) == (4, 0.75)


def verified(accepted: int, committed: int, sources: tuple[str, ...] = ("a", "b")) -> StepResult:
    draft = Draft(
        0, "a", (1, 2), (-1, 0), (Features(),) * 2, (POINT,) * 2, (0.9, 0.4), sources=sources
    )
    path = tuple(range(accepted))
    plan = StepPlan(0, draft, 3)
    return StepResult(0, plan, 9, (1,) * committed, accepted, path=path)


def test_only_judged_nodes_count_and_each_for_who_proposed_it() -> None:
    watching = Watching()
    assert watching.tables() == ()
    watching(verified(1, 1))  # the text ended with an accepted token
    watching(StepResult(0, StepPlan(0, None, 1), 9, (1,), 0))
    assert watching.tables() == ()
    watching(verified(1, 2))
    watching(verified(0, 1, sources=()))
    every, a, b = watching.tables()
    assert (every.drafter, every.nodes, every.observed) == (EVERY, 4, 0.25)
    assert (a.drafter, a.nodes, b.drafter, b.nodes) == ("a", 3, "b", 1)
    assert b.predicted == 0.4 and b.observed == 0.0


def test_auto_is_calibrated_and_other_policies_are_not(made: Study, traces: list[Traced]) -> None:
    assert made.calibration[0].drafter == EVERY
    assert made.calibration[0].nodes == sum(t.nodes for t in made.calibration[1:])
    world = named("flat", ["model"])
    assert study(traces, ["fixed:3:lookup"], world).calibration == ()
