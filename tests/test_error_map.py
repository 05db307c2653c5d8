"""Error maps count every element once, in the tile where it lies, and keep the largest margin of each tile."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from conformance import SoftwareImplementation
from conformance.compare import LARGE
from conformance.error_map import MOST_TILES, error_map, maps_of, tile_edges
from conformance.runner import Run, Target, run_case
from conformance.stages import run_stages
from planted import case
from reports import baseline_frame, from_rows
from reports.heatmaps import error_maps

RUN = Run("test", "2026-01-31T12:00:00Z", "abc")

SHAPES = npst.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=40)
MARGINS = st.sampled_from([0.0, 0.25, 1.0, 1.5, math.inf, math.nan])
AXES = {1: [(None, 0)], 2: [(0, 1)], 3: [(1, 2), (0, 1)]}


def tile_of(index, length):
    edges = tile_edges(length)
    return next(i for i in range(len(edges) - 1) if edges[i] <= index < edges[i + 1])


@given(st.integers(1, 10**6))
def test_tiles_cover_an_axis_and_differ_by_at_most_one(length):
    edges = tile_edges(length)
    sizes = np.diff(edges)
    assert (edges[0], edges[-1], len(sizes)) == (0, length, min(length, MOST_TILES))
    assert sizes.min() >= 1 and sizes.max() - sizes.min() <= 1


@given(st.integers(1, 3000))
@settings(max_examples=40)
def test_the_page_names_the_tiles_that_were_counted(length):
    edges = tile_edges(length).tolist()
    (figure,) = error_maps(error_map(np.zeros((1, length)), "wo_b"))
    names = [str(low) if high - low == 1 else f"{low}–{high - 1}" for low, high in pairwise(edges)]
    assert list(figure.data[0].x) == names


@given(npst.arrays(np.float64, SHAPES, elements=MARGINS))
@settings(max_examples=40)
def test_each_bad_element_is_in_its_tile(margins):
    found = json.loads(error_map(margins, "wo_a"))["maps"]
    assert len(found) == len(AXES[margins.ndim])
    for one, (rows, columns) in zip(found, AXES[margins.ndim]):
        sides = [1 if rows is None else margins.shape[rows], margins.shape[columns]]
        assert one["shape"] == sides
        bad, count, largest = {}, {}, {}
        for at, margin in np.ndenumerate(margins):
            tile = (0 if rows is None else tile_of(at[rows], sides[0]), tile_of(at[columns], sides[1]))
            value = math.inf if math.isnan(margin) else float(margin)
            bad[tile] = bad.get(tile, 0) + (not value <= 1)
            count[tile] = count.get(tile, 0) + 1
            largest[tile] = max(largest.get(tile, 0.0), value)
        for (i, j), total in count.items():
            assert one["share"][i][j] == float(f"{bad[i, j] / total:.3g}")
            assert float(one["max"][i][j]) == largest[i, j]


@given(npst.arrays(np.bool_, SHAPES))
@settings(max_examples=20)
def test_bad_elements_without_margins_make_the_same_shares(bad):
    plain = json.loads(error_map(bad, "wo_b"))["maps"]
    margins = json.loads(error_map(np.where(bad, 2.0, 0.5), "wo_b"))["maps"]
    assert [one["share"] for one in plain] == [one["share"] for one in margins]
    assert all(one["max"] is None for one in plain)


def test_one_bad_element_of_many_is_not_rounded_away():
    bad = np.zeros((1000, 4096), dtype=bool)
    bad[999, 4095] = True
    share = json.loads(error_map(bad, "o_proj"))["maps"][0]["share"]
    assert share[15][15] > 0 and sum(map(sum, share)) == share[15][15]


def test_axes_have_the_names_of_the_stage():
    def names(shape, stage):
        return [(one["rows"], one["columns"]) for one in json.loads(error_map(np.zeros(shape), stage))["maps"]]

    assert names((2, 3, 4), "wo_a") == [("group", "rank"), ("token", "group")]
    assert names((2, 3, 4), "quantize") == [("group", "channel"), ("token", "group")]
    assert names((2, 3), "o_proj") == [("token", "column")]
    assert names((2, 3), "wo_a") == [("axis 0", "axis 1")]


def test_a_map_stays_small():
    text = error_map(np.random.default_rng(1).random((64, 16, 1024)) * 2, "wo_a")
    assert len(text) < 8000 and len(text.splitlines()) == 1


def test_no_element_makes_no_map_and_other_input_is_refused():
    assert error_map(np.zeros((0, 4)), "wo_b") == ""
    with pytest.raises(TypeError, match="dtype int64; expected bool or floating-point"):
        error_map(np.zeros((2, 2), dtype=np.int64), "wo_b")
    with pytest.raises(ValueError, match=r"shape \[1, 1, 1, 1\]; expected 1 to 3 axes"):
        error_map(np.zeros((1, 1, 1, 1)), "wo_b")


class OneTileOff(SoftwareImplementation):
    """z of token 1 in group 1 is off in ranks 32 to 43, and y in column 7."""

    def wo_a(self, x, weights, *, config):
        z = super().wo_a(x, weights, config=config)
        z[1:2, 1, 32:44] += 64
        return z

    def wo_b(self, z, weights, *, config):
        y = super().wo_b(z, weights, config=config)
        y[:, 7] += 64
        return y


def test_a_failing_case_has_the_map_of_the_first_stage_that_is_off():
    results = run_stages(case(tokens=3), OneTileOff("sm90"))
    (place,) = [n for n, text in enumerate(maps_of(results)) if text]
    assert (results[place].stage, results[place].oracle) == ("wo_a", "bound")
    ranks, groups = json.loads(maps_of(results)[place])["maps"]
    # 256 ranks and 3 tokens: a tile has 16 x 3 elements, of which 12 and 1.
    assert (ranks["shape"], groups["shape"]) == ([2, 256], [3, 2])
    bad = {(1, 2): 12 / 48}
    assert {(i, j): share for i, line in enumerate(ranks["share"]) for j, share in enumerate(line) if share} == bad
    assert groups["share"] == [[0, 0], [0, float(f"{12 / 256:.3g}")], [0, 0]]
    assert ranks["max"][1][2] > 1 and groups["max"][1][1] == ranks["max"][1][2]


def test_a_passing_case_has_the_map_of_its_largest_margin_where_that_is_large():
    cases = [case(tokens=2), case("sm100", tokens=2, family="normal"), case("sm100", tokens=2, family="boundary")]
    rows = [run_case(one, Target("software"), RUN) for one in (*cases, case(tokens=0))]
    for of_case in rows:
        margins = {n: row["margin_max"] for n, row in enumerate(of_case) if row["margin_max"] > LARGE}
        for row in (row for row in of_case if row["error_map"]):
            assert row["margin_max"] == max(margins.values()) and row["verdict"] == "pass"
            one = json.loads(row["error_map"])["maps"][-1]
            assert max(map(max, one["max"])) == float(f"{row['margin_max']:.3g}")
            assert not any(map(any, one["share"])) and len(row["error_map"]) < 4000
    assert [sum(row["error_map"] != "" for row in of_case) for of_case in rows] == [0, 1, 1, 0]


def test_maps_are_no_part_of_a_baseline():
    rows = from_rows(run_case(case("sm100", tokens=2, family="normal"), Target("software"), RUN))
    assert (rows["error_map"] != "").any()
    pd.testing.assert_frame_equal(baseline_frame(rows), baseline_frame(rows.assign(error_map="")))
