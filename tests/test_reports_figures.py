"""Figures hold the numbers of the frame: each value is found again by a plain loop over the rows."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.error_map import error_map
from reports import RowsError, from_rows
from reports.columns import JUDGED
from reports.figures import CAP, HEAD_DIM, error_against, margin_distribution, ulp_bars
from reports.heatmaps import error_maps, first_bad_heatmaps, kill_heatmap, margin_heatmap
from reports.kill_matrix import kill_table, read_faults, variant_table
from reports.page_figures import distributions, failure_maps, first_bad_maps, heat_maps, margin_maps
from reports.ulps import ulp_histograms
from reports_rows import frame, rows

FAULTS = {
    "version": 1,
    "faults": [
        {"fault": "a", "arch": "sm90", "killed": True, "checks": ["wo_a/bits", "quantize/bits"], "source": "x#1"},
        {"fault": "a", "arch": "sm100", "killed": True, "checks": ["wo_a/bits"], "source": "x#1"},
        {"fault": "b", "arch": "sm90", "killed": False, "checks": [], "source": "x#2"},
    ],
    "variants": [{"variant": "v", "arch": "sm90", "alarms": ["wo_a/bits: {}"]}],
}


def judged(drawn, **where):
    return [
        one
        for one in drawn
        if one["verdict"] in JUDGED and one["compared"] and all(one[name] == value for name, value in where.items())
    ]


def largest(margins):
    return math.nan if any(map(math.isnan, margins)) else max(margins)


@given(
    drawn=st.lists(rows(), min_size=1, max_size=10), pair=st.sampled_from([("tp_size", "stage"), ("stage", "family")])
)
@settings(max_examples=25)
def test_a_heat_map_has_the_worst_margin_of_each_pair(drawn, pair):
    df = from_rows(drawn)
    for arch in {one["arch"] for one in drawn}:
        trace = margin_heatmap(df, arch, *pair).data[0]
        names = [[str(one[name]) or "plain dims" for name in pair] for one in drawn]
        seen = 0
        for i, row in enumerate(trace.y):
            for j, column in enumerate(trace.x):
                here = [one for one, key in zip(drawn, names) if key == [row, column]]
                here = judged(here, arch=arch, oracle="bound")
                seen += len(here)
                if not here:
                    assert trace.z[i][j] is None
                    continue
                worst = largest([one["margin_max"] for one in here])
                assert trace.z[i][j] == (CAP if math.isnan(worst) else min(worst, CAP))
                assert f"worst margin {worst!r}, {len(here)} rows" in trace.customdata[i][j]
        assert seen == len(judged(drawn, arch=arch, oracle="bound"))


@given(drawn=st.lists(rows(), min_size=1, max_size=10))
@settings(max_examples=25)
def test_margins_are_counted_in_their_bins_and_what_fails_stands_apart(drawn):
    df = from_rows(drawn)
    for stage in {one["stage"] for one in drawn}:
        for trace in margin_distribution(df, stage).data:
            arch, figure = trace.name.split()
            name = {"max": "margin_max", "p99.9": "margin_p999", "median": "margin_p50"}[figure]
            here = [one[name] for one in judged(drawn, arch=arch, stage=stage, oracle="bound")]
            counts = [0] * 21
            for margin in here:
                counts[20 if not margin <= 1 else max(0, math.ceil(margin * 20) - 1)] += 1
            assert list(trace.customdata) == counts
            assert list(trace.y) == [count / len(here) for count in counts]


def test_ulp_bars_are_the_sums_of_the_histograms():
    df = frame(
        {"ulp_histogram": '{"0": 5, "4": 1}'},
        {"ulp_histogram": '{"0": 3, "1": 1}'},
        {"arch": "sm100", "ulp_histogram": '{"2": 7}'},
        {"verdict": "skipped", "reason": "no GPU", "ulp_histogram": '{"0": 99}'},
    )
    figure = ulp_bars(ulp_histograms(df, ["arch", "stage", "oracle"]), "wo_a", "bound")
    assert [trace.name for trace in figure.data] == ["sm90", "sm100"]
    assert [list(trace.x) for trace in figure.data] == [["0", "1", "2–3", "4–7"]] * 2
    assert [list(trace.customdata) for trace in figure.data] == [[8, 1, 0, 1], [0, 0, 7, 0]]
    assert list(figure.data[0].y) == [0.8, 0.1, 0, 0.1]


def test_error_against_sizes_has_each_error_and_k_is_that_of_the_case():
    case = {"n_heads": 64, "n_groups": 8, "o_lora_rank": 1024}
    df = frame(
        {"tokens": 1, "case": json.dumps(case)},
        {"tokens": 8, "margin_max": math.inf, "rms_rel_error": 0.25, "case": json.dumps({**case, "n_groups": 4})},
        {"tokens": 8, "stage": "wo_b", "margin_max": 0.125, "case": json.dumps(case)},
        {"tokens": 2, "case": '{"n_groups": "many"}'},
    )
    tokens = error_against(df, "tokens")
    assert [(trace.name, list(trace.x), list(trace.y)) for trace in tokens.data] == [
        ("sm90 wo_a", ["1", "2", "8"], [0.5, 0.5, CAP]),
        ("sm90 wo_b", ["8"], [0.125]),
    ]
    assert "worst margin inf, RMS rel. error 0.25" in tokens.data[0].customdata[2]
    menu = tokens.layout.updatemenus[0].buttons
    assert [button.label for button in menu] == ["worst margin", "RMS rel. error", "signed bias"]
    assert list(menu[1].args[0]["y"][0]) == [2.0**-9, 2.0**-9, 0.25]
    lengths = error_against(df, "K")
    assert [list(trace.x) for trace in lengths.data] == [[str(8 * HEAD_DIM), str(16 * HEAD_DIM)], [str(8 * 1024)]]


def test_first_bad_elements_are_counted_where_they_lie():
    bad = {"verdict": "fail", "mismatched": 1}
    df = frame(
        *({**bad, "first_bad": json.dumps({"tensor": "z", "at": at})} for at in ([0, 1, 40], [3, 1, 41], [3, 0, 0])),
        {**bad, "first_bad": '{"tensor": "scale", "at": []}'},
        {**bad, "first_bad": '"a text"'},
    )
    groups, tokens = (figure.data[0] for figure in first_bad_heatmaps(df, "wo_a", "sm90"))
    assert sum(count or 0 for line in groups.z for count in line) == 3
    assert groups.z[1][list(groups.x).index("39–41")] == 2
    assert [list(line) for line in tokens.z] == [[None, 1], [None, None], [None, None], [1, 1]]


def test_an_error_map_is_drawn_with_its_numbers():
    import numpy as np

    margins = np.zeros((2, 2, 32))
    margins[1, 0, 31] = 3.0
    groups, tokens = (figure.data[0] for figure in error_maps(error_map(margins, "wo_a")))
    assert groups.z[0][15] == 0.25
    assert "largest margin 3" in groups.customdata[0][15]
    assert list(tokens.y) == ["0", "1"] and tokens.z[1][0] == float(f"{1 / 32:.3g}")
    assert error_maps("") == []
    with pytest.raises(ValueError, match="error_map must hold maps"):
        error_maps('{"maps": [{"rows": 1}]}')


def test_the_largest_margins_that_hold_are_drawn_as_margins():
    import numpy as np

    def mapped(margin, **more):
        margins = np.full((2, 32), 0.25)
        margins[1, 31] = margin
        return {"stage": "wo_b", "margin_max": margin, "error_map": error_map(margins, "wo_b"), **more}

    bad = {"verdict": "fail", "mismatched": 1}
    df = frame(
        mapped(0.985), mapped(0.99), mapped(0.981, arch="sm100"), mapped(3.0, stage="wo_a", **bad), {"margin_max": 1.0}
    )
    panels = margin_maps(df)
    assert [panel.title.partition(",")[0] for panel in panels] == ["sm90 wo_b", "sm100 wo_b"]
    assert panels[0].title == "sm90 wo_b, Case c1: token × column"
    trace = panels[0].figure.data[0]
    assert [line[-1] for line in trace.z] == [0.25, 0.99] and trace.zmax == 2
    assert "0 of its elements bad, largest margin 0.99" in trace.customdata[1][15]
    assert panels[0].of == {"arch": ["sm90"], "stage": ["wo_b"], "oracle": ["bound"]}


def test_the_kill_matrix_shows_survivors_first_and_who_caught_what():
    faults = read_faults(FAULTS)
    table = kill_table(faults)
    assert table[["fault", "verdict", "caught on", "missed on"]].to_numpy().tolist() == [
        ["b", "fail", "", "sm90"],
        ["a", "pass", "sm90, sm100", ""],
    ]
    assert variant_table(faults).to_numpy().tolist() == [["v", "sm90", "wo_a/bits: {}"]]
    trace = kill_heatmap(faults["faults"]).data[0]
    assert list(trace.x) == ["quantize/bits", "wo_a/bits"]
    assert [list(line) for line in trace.z] == [[0.5, 1], [0, 0]]
    assert trace.customdata[0][0] == "caught on sm90"


@pytest.mark.parametrize(
    "change, said",
    [
        ({"version": 2}, "version must be 1, it is 2"),
        ({"faults": [{"fault": "a", "arch": "sm90", "checks": []}]}, "an entry of faults lacks killed"),
        ({"variants": [{"variant": "v"}]}, "an entry of variants lacks arch, alarms"),
        ({"faults": 7}, "not a file of `oproj faults --json`"),
    ],
)
def test_a_kill_matrix_that_is_none_is_refused(change, said, tmp_path):
    with pytest.raises(RowsError, match=said):
        read_faults({**FAULTS, **change})
    path = tmp_path / "kills.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(RowsError, match=r"kills\.json: not a file"):
        read_faults(path)
    with pytest.raises(RowsError, match=r"none\.json: not a file.*No such file"):
        read_faults(tmp_path / "none.json")


@given(drawn=st.lists(rows(), min_size=1, max_size=10))
@settings(max_examples=10)
def test_every_row_finds_its_panels_whatever_the_text(drawn):
    df = from_rows(drawn)
    panels = [
        *heat_maps(df),
        *failure_maps(df),
        *first_bad_maps(df),
        *distributions(df, ulp_histograms(df, ["arch", "stage", "oracle"])),
    ]
    compared = {one["arch"] for one in judged(drawn, oracle="bound")}
    assert {arch for panel in heat_maps(df) for arch in panel.of["arch"]} == compared
    for panel in panels:
        json.dumps(panel.json(), allow_nan=False)
