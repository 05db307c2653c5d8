"""Two runs, two engines, two architectures side by side: nothing that got worse is lost or called equal."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from reports import (
    RowsError,
    arch_against_arch,
    changes_per_stage,
    engine_against_engine,
    from_rows,
    print_run_against_run,
    run_against_run,
    to_markdown,
)
from reports.aggregate import row_faults
from reports.columns import JUDGED
from reports_rows import NOT_APPLICABLE, SKIPPED, frame, rows

KEY = ("arch", "stage", "oracle", "case_id")


def change_of(a, b):
    """The word for one row, from the two frames."""
    joined = run_against_run(frame(a), frame(b))
    return list(joined["change"])


@pytest.mark.parametrize(
    "a, b, words",
    [
        ({}, {}, ["equal"]),
        ({}, {"margin_max": 0.75}, ["worse"]),
        ({"margin_max": 0.75}, {}, ["better"]),
        ({}, {"signed_bias": 0.5}, ["other bias"]),
        ({}, {"verdict": "fail", "mismatched": 1}, ["now fails"]),
        ({}, {"margin_max": math.nan}, ["now fails"]),
        ({"verdict": "fail", "mismatched": 1}, {}, ["now passes"]),
        ({"verdict": "fail", "mismatched": 1}, {"verdict": "fail", "mismatched": 2, "margin_max": 0.25}, ["worse"]),
        ({"verdict": "fail", "mismatched": 2}, {"verdict": "fail", "mismatched": 1, "margin_max": 9.0}, ["better"]),
        ({}, SKIPPED, ["no longer judged"]),
        (NOT_APPLICABLE, {}, ["newly judged"]),
        (NOT_APPLICABLE, {"verdict": "fail", "mismatched": 1}, ["now fails"]),
        (NOT_APPLICABLE, SKIPPED, []),
        ({"case_id": "x"}, {"case_id": "y"}, ["only in a", "only in b"]),
        ({}, {"engine": "deep_gemm", "implementation": "deep_gemm"}, ["equal"]),
    ],
)
def test_each_change_has_its_word(a, b, words):
    assert change_of(a, b) == words


runs = st.lists(rows(), min_size=1, max_size=8)


@given(a=runs, b=runs, shared=st.integers(0, 8))
@settings(max_examples=30)
def test_every_judged_row_of_either_run_is_there_once(a, b, shared):
    # Some Cases in both runs: the same key with other figures.
    for one, other in zip(a[:shared], b):
        other.update({name: one[name] for name in KEY})
    df_a, df_b = from_rows(a), from_rows(b)
    joined = run_against_run(df_a, df_b)
    judged = {tuple(one[name] for name in KEY) for one in [*a, *b] if one["verdict"] in JUDGED}
    found = list(joined[list(KEY)].itertuples(index=False, name=None))
    assert sorted(found) == sorted(judged)
    counts = changes_per_stage(joined)
    assert counts[list(joined["change"].unique())].to_numpy().sum() == len(joined)
    for one in joined.to_dict("records"):
        failed = {tuple(row[name] for name in KEY) for row in df_b[row_faults(df_b) != ""].to_dict("records")}
        passes_a = {tuple(row[name] for name in KEY) for row in df_a[row_faults(df_a) != ""].to_dict("records")}
        key = tuple(one[name] for name in KEY)
        if one["change"] == "now fails":
            assert key in failed and key not in passes_a
        elif one["change"] not in ("only in a", "only in b"):
            assert key not in failed or key in passes_a


def test_figures_and_their_changes():
    joined = run_against_run(frame({"mismatched": 0}), frame({"margin_max": 0.75, "signed_bias": 0.25}))
    one = joined.iloc[0]
    assert (one["margin_max_a"], one["margin_max_b"], one["margin_max_change"]) == (0.5, 0.75, 0.25)
    assert one["signed_bias_change"] == 0.25 + 2.0**-20
    assert one["mismatched_change"] == 0
    assert "max margin change" in to_markdown(joined)


def test_engines_are_named_where_they_differ_and_join_where_there_are_several():
    a, b = frame({"case_id": "x"}), frame({"case_id": "x", "engine": "deep_gemm"})
    assert list(run_against_run(a, b)["engine"]) == ["software → deep_gemm"]
    both = frame({"case_id": "x"}, {"case_id": "x", "engine": "deep_gemm", "margin_max": 0.75})
    joined = run_against_run(both, both)
    assert sorted(joined["engine"]) == ["deep_gemm", "software"]
    assert set(joined["change"]) == {"equal"}
    with pytest.raises(
        RowsError, match="run b has more than one row of arch sm90, stage wo_a, oracle bound, case_id x"
    ):
        run_against_run(a, frame({"case_id": "x"}, {"case_id": "x"}))


def test_what_got_worse_comes_first_in_print():
    a = frame({"case_id": "same"}, {"case_id": "up", "margin_max": 0.25}, {"case_id": "lost"})
    b = frame({"case_id": "same"}, {"case_id": "up"}, {"case_id": "lost", "verdict": "fail", "mismatched": 3})
    out = io.StringIO()
    joined = print_run_against_run(a, b, Console(file=out, width=160))
    assert list(joined["case_id"]) == ["lost", "up", "same"]
    text = out.getvalue()
    assert "2 of 2 rows that changed" in text
    assert text.count("oproj replay") == 1
    assert "✗" not in print_text(a, a)


def print_text(a, b):
    out = io.StringIO()
    print_run_against_run(a, b, Console(file=out, width=160))
    return out.getvalue()


def test_engines_are_compared_on_the_cases_that_both_judged():
    df = frame(
        {"case_id": "both", "margin_max": 0.25},
        {"case_id": "both", "engine": "deep_gemm", "margin_max": 0.75},
        {"case_id": "software only", "margin_max": 0.875},
        {"case_id": "skipped", "margin_max": 0.875},
        {"case_id": "skipped", "engine": "deep_gemm", **SKIPPED},
    )
    one = engine_against_engine(df).to_dict("records")
    assert [(r["cases"], r["margin_max software"], r["margin_max deep_gemm"]) for r in one] == [(1, 0.25, 0.75)]
    assert engine_against_engine(frame({})).empty
    with pytest.raises(ValueError, match="by must be 'engine' or 'implementation', got 'arch'"):
        engine_against_engine(df, by="arch")


def test_architectures_stand_side_by_side_in_their_order():
    df = frame({"arch": "sm100", "margin_max": 0.75}, {}, {"arch": "sm100", "stage": "wo_b", "verdict": "fail"})
    table = arch_against_arch(df, ("verdict", "margin_max"))
    expected = ["stage", "oracle", "verdict sm90", "verdict sm100", "margin_max sm90", "margin_max sm100"]
    assert list(table.columns) == expected
    assert table["margin_max sm100"].tolist() == [0.75, 0.5]
    assert table["verdict sm90"].tolist() == ["pass", ""]
    text = to_markdown(table)
    assert "| verdict sm90 | verdict sm100 | max margin sm90 |" in text
    assert "| ✗ FAIL |" in text
