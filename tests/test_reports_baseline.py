"""Baselines hold a run that passed, exactly and in one order, and say why they changed."""

from __future__ import annotations

import math
import re

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports import baseline_frame, exit_code, from_rows, gate, write_baselines
from reports.aggregate import aggregate
from reports.baseline import KEYS, baseline_diff, read_baseline
from reports_rows import EMPTY, GOOD, SKIPPED, frame, passing_rows, run


@pytest.fixture
def baselines(tmp_path):
    """A folder with the baselines of the run GOOD."""
    write_baselines(frame(*GOOD), tmp_path, "first")
    return tmp_path


@given(drawn=st.lists(passing_rows(), min_size=1, max_size=6))
@settings(max_examples=10)
def test_baselines_hold_the_run_exactly_and_the_run_passes_them(tmp_path_factory, drawn):
    folder, df = tmp_path_factory.mktemp("baselines"), from_rows(drawn)
    paths = write_baselines(df, folder, "first")
    held = pd.concat([read_baseline(path) for path in paths])
    expected = aggregate(df, KEYS)[list(held.columns)]
    assert sorted(map(repr, held.to_dict("records"))) == sorted(map(repr, expected.to_dict("records")))
    result = gate(df, folder)
    assert (result.problems, result.improvements, exit_code(result)) == ([], [], 0)


@given(drawn=st.lists(passing_rows(), min_size=1, max_size=6), data=st.data())
@settings(max_examples=10)
def test_baseline_text_does_not_depend_on_the_order_of_the_rows(tmp_path_factory, drawn, data):
    texts = []
    for rows in (drawn, data.draw(st.permutations(drawn))):
        paths = write_baselines(from_rows(rows), tmp_path_factory.mktemp("baselines"), "first")
        texts.append({path.name: path.read_text() for path in paths})
    assert texts[0] == texts[1]


def test_what_does_not_apply_has_no_baseline():
    assert "bits" not in set(baseline_frame(run())["oracle"])
    assert len(baseline_frame(run())) == 3


REFUSED = {
    r"1 failed row\(s\); the first: .*family wide, case c0: the comparison failed": run(verdict="fail"),
    r"1 failed row\(s\); the first: .*: a margin is NaN": run(margin_max=math.nan),
    r"1 failed row\(s\); the first: .*: passed with mismatched elements": run(mismatched=1),
    r"a run that compared nothing$": EMPTY["all not applicable"],
    r"a run that compared nothing in: .*family empty": run({"family": "empty", **SKIPPED}),
    r"arch must be letters, digits and '_' to name a baseline file, got 'a/b'": run({"arch": "a/b"}),
    r"engine must be letters": run({"engine": ".."}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_run_that_must_not_become_a_baseline_is_refused_and_nothing_is_written(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        write_baselines(REFUSED[message], tmp_path, "first")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_a_baseline_needs_a_reason(tmp_path, reason):
    with pytest.raises(ValueError, match="reason must say why"):
        write_baselines(run(), tmp_path, reason)
    assert list(tmp_path.iterdir()) == []


def test_changes_gain_one_line_for_each_rebaseline(baselines):
    write_baselines(run(), baselines, "a second\nreason")
    lines = [line for line in (baselines / "CHANGES.md").read_text().splitlines() if line.startswith("- ")]
    assert len(lines) == 2
    when = r"- \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert re.match(rf"{when}: sm100-software.csv, sm90-software.csv: first \(run r1; ", lines[0])
    assert re.match(rf"{when}: .*: a second reason \(.*git revision 0123abc; .*torch 2.13.0", lines[1])


def test_a_rebaseline_leaves_other_files_alone(baselines):
    before = (baselines / "sm100-software.csv").read_bytes()
    only = frame({**GOOD[0], "margin_max": 0.25})
    assert write_baselines(only, baselines, "again") == [baselines / "sm90-software.csv"]
    assert (baselines / "sm100-software.csv").read_bytes() == before


def test_a_run_that_lacks_rows_of_the_baselines_is_refused_until_it_is_said_that_they_are_gone(baselines):
    before = {path.name: path.read_bytes() for path in baselines.iterdir()}
    fewer = run({"arch": "sm90", "family": "new"}, family="other")
    with pytest.raises(ValueError, match=r"lacks 1 row\(s\) of the baselines, the first: sm90 .*family wide; run all"):
        write_baselines(fewer, baselines, "less")
    assert {path.name: path.read_bytes() for path in baselines.iterdir()} == before
    write_baselines(fewer, baselines, "less", allow_fewer=True)
    assert set(read_baseline(baselines / "sm90-software.csv")["family"]) == {"new", "other"}
    assert "| sm90-software.csv | wo_a | bound | removed | 1 |" in (baselines / "CHANGES.md").read_text()


def test_changes_say_which_figures_moved_in_how_many_rows_and_how_far(baselines):
    moved = run({"family": "new"}, margin_max=0.5, compared=2000)
    expected = {
        ("new", 1, "", ""),
        ("compared better", 1, "1,000 -> 2,000", "v4-pro, TP 8, wide"),
        ("margin_max better", 1, "0.75 -> 0.5", "v4-pro, TP 8, wide"),
    }
    table = baseline_diff(moved, baselines)
    assert set(zip(table["what"], table["rows"], table["largest change"], table["where"])) == expected
    assert set(table["file"]) == {"sm90-software.csv"} and set(table["stage"]) == {"wo_a"}
    write_baselines(moved, baselines, "better")
    entry = (baselines / "CHANGES.md").read_text().rpartition("\n- ")[2]
    assert all(text in entry for text in ("margin_max better", "0.75 -&gt; 0.5")) or "0.75 -> 0.5" in entry
    write_baselines(moved, baselines, "again")
    assert (baselines / "CHANGES.md").read_text().endswith("  No figure changed.\n\n")


def test_the_largest_change_is_the_one_that_moved_most(baselines):
    wide = [{**GOOD[0], "family": name, "margin_max": 0.5} for name in "abc"]
    write_baselines(frame(*wide), baselines, "three", allow_fewer=True)
    for row, margin in zip(wide, (0.49, 0.1, 0.4)):
        row["margin_max"] = margin
    (moved,) = baseline_diff(frame(*wide), baselines).to_dict("records")
    assert (moved["rows"], moved["largest change"], moved["where"]) == (3, "0.5 -> 0.1", "v4-pro, TP 8, b")


def test_digits_that_only_another_machine_moved_stay(baselines):
    before = (baselines / "sm90-software.csv").read_bytes()
    write_baselines(run(margin_max=math.nextafter(0.75, 0)), baselines, "another machine")
    assert (baselines / "sm90-software.csv").read_bytes() == before
