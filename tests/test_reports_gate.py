"""The gate passes only a run that is nowhere worse than its baselines, and names whatever is."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reports import GateResult, RowsError, exit_code, gate, write_baselines
from reports.baseline import FLOATS, read_baseline
from reports.gate import compare
from reports_rows import EMPTY, GOOD, SKIPPED, frame, run


@pytest.fixture
def baselines(tmp_path):
    """A folder with the baselines of the run GOOD."""
    write_baselines(frame(*GOOD), tmp_path, "first")
    return tmp_path


def test_the_run_that_made_the_baselines_passes(baselines):
    result = gate(run(), baselines, expected_engine="software", expected_archs=["sm90", "sm100"])
    assert result == GateResult([], [], compared=3000)
    assert exit_code(result) == 0


WIDE = r"sm90 software software: wo_a bound, preset v4-pro, TP 8, family wide"
BREAKS = {
    f"{WIDE}: the comparison failed in 1 row.* case c0": run(verdict="fail"),
    f"{WIDE}: a margin is NaN in 1 row": run(margin_max=math.nan),
    f"{WIDE}: a margin is NaN in 1 row.*": run(margin_p999=math.nan),
    f"{WIDE}: passed with a margin above 1": run(margin_max=1.5),
    f"{WIDE}: passed with nothing compared": run(compared=0),
    f"{WIDE}: worse margin_max 0.76, the baseline has 0.75": run(margin_max=0.76),
    f"{WIDE}: worse margin_max 0.750001, the baseline has 0.75": run(margin_max=0.750001),
    f"{WIDE}: worse rms_rel_error": run(rms_rel_error=2.0**-8),
    f"{WIDE}: worse rms_rel_error nan": run(rms_rel_error=math.nan),
    f"{WIDE}: worse signed_bias": run(signed_bias=-(2.0**-19)),
    f"{WIDE}: worse signed_bias ": run(signed_bias=2.0**-19),
    f"{WIDE}: worse signed_bias nan": run(signed_bias=math.nan),
    f"{WIDE}: worse mismatched 2, the baseline has 0": run(mismatched=2),
    f"{WIDE}: worse compared 999, the baseline has 1000": run(compared=999),
    f"{WIDE}: missing in the run": run(family="normal"),
    "family new: has no baseline row": run({"family": "new"}),
    "TP 4, family wide: missing|TP 4, family wide: has no baseline row": run(tp_size=4),
    "family empty: nothing compared": run({"family": "empty", **SKIPPED}),
    "^sm103: no baseline file sm103-software.csv": run({"arch": "sm103"}),
    "^sm100: has a baseline on engine software, and did not run": run().query("arch != 'sm100'"),
    "^sm100: asked for, and did not run": run().query("arch != 'sm100'"),
    "^sm90: ran on engine deep_gemm, asked for was software": run(engine="deep_gemm"),
    "^sm90: has a baseline on engine software, and did not run": run(engine="deep_gemm"),
    r"1 row\(s\) occur twice, the first of case c0": run({**GOOD[0], "case_id": "c0"}),
    r"[1-9]\d* row\(s\) occur twice": pd.concat([run(), run(run_id="another")], ignore_index=True),
    "attainable.*: missing in the run": run().query("oracle != 'attainable'"),
}


@pytest.mark.parametrize("message", BREAKS)
def test_each_way_to_be_worse_is_a_named_problem(baselines, message):
    result = gate(BREAKS[message], baselines, expected_engine="software", expected_archs=["sm90", "sm100"])
    assert any(re.search(message, str(problem)) for problem in result.problems), result.problems
    assert exit_code(result) == 1


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("engine", [None, "software"])
def test_a_run_that_compared_nothing_exits_with_4(baselines, name, engine):
    result = gate(EMPTY[name], baselines, expected_engine=engine)
    assert "nothing was compared" in map(str, result.problems)
    assert exit_code(result) == 4


def test_a_result_that_says_nothing_does_not_pass():
    assert exit_code(GateResult([], [])) == 4


BAD_FRAMES = {
    r"missing column\(s\): margin_max": lambda df: df.drop(columns="margin_max"),
    r"foreign column\(s\): colour": lambda df: df.assign(colour="red"),
    r"schema_version must be 2, found 1": lambda df: df.assign(schema_version=1),
    r"column compared must be int64": lambda df: df.astype({"compared": "float64"}),
}


@pytest.mark.parametrize("message", BAD_FRAMES)
def test_unusable_rows_exit_with_2(baselines, message):
    result = gate(BAD_FRAMES[message](run()), baselines)
    assert re.search(message, str(result.bad_input[0]))
    assert exit_code(result) == 2


def _edit(pattern, replacement):
    def edit(path: Path) -> None:
        text = path.read_text()
        changed = re.sub(pattern, replacement, text, count=1, flags=re.MULTILINE)
        assert changed != text
        path.write_text(changed)

    return edit


BAD_FILES = {
    r"missing column\(s\): family": _edit("family", "species"),
    r"foreign column\(s\): species": _edit("family$|(?<=signed_bias)$", ",species"),
    r"line 2: compared must be a number, got 'many'": _edit(",1000,", ",many,"),
    r"line 2: margin_max must be a number, got 'x'": _edit("0.75", "x"),
    r"line 2: compared=0, mismatched=0: at least 1": _edit(",1000,", ",0,"),
    r"line 2: compared=-5, mismatched=0: at least 1": _edit(",1000,", ",-5,"),
    r"line 2: compared=1000, mismatched=1001: .*no more": _edit(",1000,0,", ",1000,1001,"),
    r"line 2: it has more or fewer cells": _edit(",1000,", ","),
    r"line 2: it has more or fewer cells than": _edit(",1000,", ",1000,1000,"),
    r"repeated row: sm90 software": lambda path: path.write_text(path.read_text() + path.read_text().split("\n")[1]),
    r"holds a row of sm120 on software, which its name": _edit("^sm90", "sm120"),
    r"holds no rows": lambda path: path.write_text(path.read_text().split("\n")[0] + "\n"),
    r"missing column\(s\): arch": lambda path: path.write_bytes(b""),
    r"not a baseline file": lambda path: path.write_bytes(b"\xff\xfe\n"),
}


@pytest.mark.parametrize("message", BAD_FILES)
def test_an_unusable_baseline_is_named_and_exits_with_2(baselines, message):
    path = baselines / "sm90-software.csv"
    BAD_FILES[message](path)
    result = gate(run(), baselines)
    assert re.search(f"{re.escape(str(path))}.*{message}", str(result.bad_input[0]))
    assert exit_code(result) == 2
    with pytest.raises(RowsError, match=message):
        read_baseline(path)


def test_absent_baselines_are_named(tmp_path):
    result = gate(run(), tmp_path / "none")
    assert re.search("none: no such baseline file or folder", str(result.bad_input[0]))
    result = gate(run(), tmp_path)
    assert list(map(str, result.problems)) == [
        "sm100: no baseline file sm100-software.csv",
        "sm90: no baseline file sm90-software.csv",
    ]
    assert exit_code(result) == 1


BETTER = {
    "better margin_max 0.5, the baseline has 0.75": run(margin_max=0.5),
    "better rms_rel_error": run(rms_rel_error=2.0**-10),
    "better signed_bias": run(signed_bias=2.0**-21),
    "better compared 1001, the baseline has 1000": run(compared=1001),
}


@pytest.mark.parametrize("message", BETTER)
def test_better_passes_and_asks_for_a_rebaseline(baselines, message):
    result = gate(BETTER[message], baselines)
    assert result.problems == []
    assert len(result.improvements) == 1
    assert re.search(f"{WIDE}: {message}.*; rebaseline to keep it", str(result.improvements[0]))
    assert exit_code(result) == 0


FIGURES = {"engine": "software", "mismatched": 0, "compared": 1}
FIGURES |= {"margin_max": 0.5, "rms_rel_error": 1.0, "signed_bias": 0.5}
SIZES = st.floats(2.0**-1000, 2.0**1000) | st.integers(-60, 60).map(lambda k: 2.0**k)


@given(value=SIZES, last=st.integers(-4, 4))
@example(value=2.0**-9, last=1)  # the text of six digits rounds the other way
@example(value=0.75, last=-1)  # the text of six digits is cut off one lower
def test_the_last_bits_of_the_reference_are_not_a_regression(value, last):
    near = value
    for _ in range(abs(last)):
        near = math.nextafter(near, math.inf if last > 0 else 0.0)
    for name in FLOATS:
        old = {**FIGURES, "rms_rel_error": value, name: value}
        assert compare({**old, name: near}, old) == ([], [])
        assert compare({**old, name: -near}, {**old, name: -value}) == ([], [])


@given(value=SIZES)
def test_a_change_in_the_sixth_digit_is_told(value):
    for name in FLOATS:
        old = {**FIGURES, "rms_rel_error": value, name: value}
        # Two units of the sixth digit are at most 2e-5 of the figure.
        worse, better = compare({**old, name: value * (1 + 2e-5)}, old)
        assert (len(worse), better) == (1, [])
        worse, better = compare({**old, name: value * (1 - 2e-5)}, old)
        assert (worse, len(better)) == ([], 1)


@given(new=st.floats(0), old=st.floats(0))
@example(new=0.5, old=math.inf)
def test_a_figure_that_appears_or_vanishes_is_worse(new, old):
    for name in ("rms_rel_error", "signed_bias"):
        compare({**FIGURES, name: new}, {**FIGURES, name: old})  # an infinite one has a decimal text nowhere
    worse, _ = compare({**FIGURES, "margin_max": new}, {**FIGURES, "margin_max": old})
    if math.isnan(new) != math.isnan(old) or (math.isinf(new) and math.isfinite(old)):
        assert len(worse) == 1
    elif math.isnan(new) or new <= old:
        assert worse == []


def test_a_bias_that_cancels_is_compared_on_the_scale_of_the_rms_error(baselines):
    write_baselines(run(signed_bias=1e-17), baselines, "nothing but the rest of a sum")
    assert gate(run(signed_bias=3e-17), baselines).problems == []
    assert len(gate(run(signed_bias=1e-7), baselines).problems) == 1


def test_hardware_is_judged_by_its_margin_and_counts_alone(tmp_path):
    hardware = {"engine": "deep_gemm", "margin_max": 0.5}
    write_baselines(frame(hardware), tmp_path, "first")
    for better_or_worse in ({"margin_max": 0.9, "rms_rel_error": 0.5, "signed_bias": 0.1}, {"margin_max": 0.1}):
        result = gate(frame({**hardware, **better_or_worse}), tmp_path)
        assert (result.problems, result.improvements) == ([], [])
    for worse in ({"margin_max": 1.1}, {"mismatched": 1}, {"compared": 999}, {"margin_max": math.nan}):
        assert exit_code(gate(frame({**hardware, **worse}), tmp_path)) == 1


def test_only_the_baselines_of_the_engine_and_archs_asked_for_must_be_met(baselines):
    write_baselines(frame({"engine": "deep_gemm"}), baselines, "hardware")
    assert exit_code(gate(run(), baselines)) == 0
    assert exit_code(gate(run(), baselines, expected_engine="software")) == 0
    only = run().query("arch == 'sm90'")
    assert exit_code(gate(only, baselines, expected_archs=["sm90"])) == 0
    assert exit_code(gate(only, baselines)) == 1
    assert exit_code(gate(only, baselines / "sm90-software.csv")) == 0
    assert list(map(str, gate(run(), baselines, expected_engine="deep_gemm").problems))[:2] == [
        "sm90: ran on engine software, asked for was deep_gemm",
        "sm100: ran on engine software, asked for was deep_gemm",
    ]
