"""The cost curve: interpolation, padding, correction by real steps, and its file."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwise.engines.base import Shape
from draftwise.policy.cost import CostCurve, CostStore

STAIRS = [(Shape(1, 16), 0.04), (Shape(8, 16), 0.08), (Shape(16, 16), 0.07), (Shape(64, 16), 0.2)]


def test_between_measured_widths_the_curve_is_linear_and_beyond_them_it_goes_on():
    curve = CostCurve(STAIRS)
    assert curve.seconds(1, 16) == pytest.approx(0.04)
    assert curve.seconds(12, 16) == pytest.approx(0.075)
    assert curve.seconds(112, 16) == pytest.approx(0.2 + 48 * 0.13 / 48)


def test_a_cheaper_larger_width_is_padded_to():
    curve = CostCurve(STAIRS)
    assert curve.padded(8, 16) == 16
    assert curve.padded(1, 16) == 1
    row = curve.row(20, 16)
    assert row[8] == pytest.approx(0.07)
    assert row[16] == pytest.approx(0.07)
    assert row[1] == pytest.approx(0.04)


@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=7), st.integers(1, 70))
def test_the_row_is_the_least_price_of_this_or_any_wider_forward(prices, widest):
    widths = [1, 2, 4, 8, 16, 32, 64][: len(prices)]
    curve = CostCurve([(Shape(w, 0), p) for w, p in zip(widths, prices, strict=True)])
    row = curve.row(widest, 0)
    top = max(widest, widths[-1])
    for w in range(1, widest + 1):
        assert row[w] == pytest.approx(min(curve.seconds(v, 0) for v in range(w, top + 1)))


def test_longer_contexts_never_get_cheaper():
    noisy = [(Shape(1, 16), 0.04), (Shape(16, 16), 0.06), (Shape(1, 1024), 0.03)]
    curve = CostCurve([*noisy, (Shape(16, 1024), 0.09)])
    assert curve.seconds(1, 4000) >= curve.seconds(1, 16)
    assert curve.seconds(16, 1024) == pytest.approx(0.09)
    assert curve.seconds(16, 2032) == pytest.approx(0.12)


def test_a_busy_machine_lifts_the_whole_curve_and_lets_it_down_again():
    curve = CostCurve(STAIRS)
    rng = np.random.default_rng(0)
    for factor in (2.0, 1.0):
        for _ in range(25):
            for width in (1, 8):
                true = factor * dict((s.width, t) for s, t in STAIRS)[width]
                curve.learn(Shape(width, 16), true * rng.lognormal(0, 0.05))
        assert curve.seconds(1, 16) == pytest.approx(0.04 * factor, rel=0.12)
        assert curve.seconds(64, 16) == pytest.approx(0.2 * factor, rel=0.12)


def test_one_stalled_step_hardly_moves_the_curve():
    curve = CostCurve(STAIRS)
    for _ in range(50):
        curve.learn(Shape(1, 16), 0.04)
    curve.learn(Shape(1, 16), 40.0)
    assert curve.seconds(1, 16) < 0.06


def test_a_width_that_was_never_measured_is_learned_from_steps():
    curve = CostCurve([(Shape(1, 0), 0.04), (Shape(16, 0), 0.05)])
    for _ in range(200):
        curve.learn(Shape(1, 0), 0.04)
        curve.learn(Shape(40, 0), 0.3)
    assert curve.seconds(40, 0) == pytest.approx(0.3, rel=0.1)
    assert curve.seconds(1, 0) == pytest.approx(0.04, rel=0.1)


def test_a_stored_curve_comes_back_as_it_was(tmp_path):
    curve = CostCurve([*STAIRS, (Shape(1, 1024), 0.05), (Shape(16, 1024), 0.12)])
    store = CostStore(tmp_path / "costs")
    store.save("model | cpu", curve)
    again = store.load("model | cpu")
    assert again is not None
    for width, context in [(1, 16), (5, 500), (16, 3000), (100, 16)]:
        assert again.seconds(width, context) == pytest.approx(curve.seconds(width, context))
    assert store.load("model | cuda") is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 0}', '{"version": 1, "engine": "m", "points": [[1]]}']
)
def test_a_broken_file_counts_as_absent(tmp_path, content):
    store = CostStore(tmp_path)
    store.save("m", CostCurve(STAIRS))
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert store.load("m") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    CostStore(tmp_path / "file" / "costs").save("m", CostCurve(STAIRS))
