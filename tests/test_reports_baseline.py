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
from reports.baseline import KEYS, read_baseline
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
    assert write_baselines(frame({"margin_max": 0.25}), baselines, "again") == [baselines / "sm90-software.csv"]
    assert (baselines / "sm100-software.csv").read_bytes() == before
