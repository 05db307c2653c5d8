"""Tables add up as a plain loop does, and a failure can be seen in each of them."""

from __future__ import annotations

import io
import json
import math
import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from reports import (
    RowsError,
    evidence,
    failing_cases,
    from_rows,
    overall_verdict,
    per_arch,
    per_arch_stage,
    print_rich,
    to_markdown,
    worst_cases,
)
from reports.aggregate import aggregate, row_faults
from reports.columns import MARGIN_ORACLES, MARGINS, ORACLES, STAGES
from reports.formatting import NOTES, label, percent, replay_line
from reports.tables import environment, not_judged, write_markdown
from reports_rows import NASTY, SKIPPED, frame, frames, passing_rows, row, rows

KEYS = ("arch", "stage", "oracle", "engine", "implementation")


def plain_fault(row):
    """Why a row fails, said once more without pandas."""
    has_margins = row["oracle"] in MARGIN_ORACLES
    if row["verdict"] not in ("pass", "fail"):
        return False
    if row["verdict"] == "fail" or row["compared"] == 0 or row["mismatched"] > 0:
        return True
    return has_margins and (any(math.isnan(row[name]) for name in MARGINS) or row["margin_max"] > 1)


def plain_group(group):
    """The figures of one group, by loops."""
    judged = [row for row in group if row["verdict"] in ("pass", "fail")]
    out = {"cases": len(judged), "not_judged": len(group) - len(judged)}
    for name in ("compared", "mismatched"):
        out[name] = sum(row[name] for row in judged)
    for name in (*MARGINS, "calc_diff", "ulp_max"):
        values = [row[name] for row in judged if not math.isnan(row[name])]
        out[name] = max(values, default=math.nan)
    for name in MARGINS:
        if any(row["oracle"] in MARGIN_ORACLES and row["compared"] and math.isnan(row[name]) for row in judged):
            out[name] = math.nan
    for name, power in (("rms_rel_error", 2), ("signed_bias", 1)):
        having = [row for row in judged if not math.isnan(row[name]) and row["compared"]]
        weight = sum(row["compared"] for row in having)
        total = sum(row["compared"] * row[name] ** power for row in having)
        out[name] = (total / weight) ** (1 / power) if weight else math.nan
    out["evidence"] = ", ".join(sorted({row["evidence"] for row in group}))
    if any(map(plain_fault, group)):
        out["verdict"] = "fail"
    elif all(row["verdict"] == "not applicable" for row in group):
        out["verdict"] = "not applicable"
    else:
        out["verdict"] = "pass" if out["compared"] else "nothing compared"
    return out


@given(drawn=st.lists(rows(), min_size=1, max_size=12), keys=st.sampled_from([KEYS, ("arch",), ("oracle", "tp_size")]))
@settings(max_examples=50)
def test_groups_add_up_as_a_plain_loop_does(drawn, keys):
    groups = {}
    for one in drawn:
        groups.setdefault(tuple(one[key] for key in keys), []).append(one)
    table = aggregate(from_rows(drawn), keys)
    assert len(table) == len(groups)
    for record in table.to_dict("records"):
        expected = plain_group(groups[tuple(record[key] for key in keys)])
        # repr: NaN equals NaN, and every bit of a float counts.
        assert {name: repr(record[name]) for name in expected} == {name: repr(v) for name, v in expected.items()}


@given(st.permutations([(a, s, o) for a in ("sm90", "sm120") for s in (*STAGES, "mine") for o in ORACLES]))
@settings(max_examples=10)
def test_stage_table_has_one_row_per_group_in_the_order_of_the_data(places):
    table = per_arch_stage(frame(*(dict(zip(("arch", "stage", "oracle"), place)) for place in places)))
    found = list(table[["arch", "stage", "oracle"]].itertuples(index=False, name=None))
    assert found == [(a, s, o) for a in ("sm90", "sm120") for s in (*STAGES, "mine") for o in ORACLES]


@given(df=frames)
@settings(max_examples=40)
def test_row_faults_are_those_of_the_rule(df):
    assert list(row_faults(df) != "") == [plain_fault(record) for record in df.to_dict("records")]


@given(drawn=st.lists(passing_rows(), min_size=1, max_size=6), data=st.data())
@settings(max_examples=15)
def test_a_nan_margin_never_passes(drawn, data):
    assert overall_verdict(from_rows(drawn)) == "pass"
    victim = data.draw(st.integers(0, len(drawn) - 1))
    margin = data.draw(st.sampled_from(MARGINS))
    df = from_rows({**one, margin: math.nan} if i == victim else one for i, one in enumerate(drawn))
    assert overall_verdict(df) == "fail"
    table = per_arch_stage(df)
    hit = (table[list(KEYS)].astype(str) == df[list(KEYS)].iloc[victim].astype(str)).all(axis=1)
    assert list(table.loc[hit, "verdict"]) == ["fail"]
    assert list(table.loc[hit, "nan_margins"]) == [1]
    summary = per_arch(df)
    assert set(summary.loc[summary["arch"] == drawn[victim]["arch"], "verdict"]) >= {"fail"}
    assert worst_cases(df, 1)["fault"].tolist() == ["a margin is NaN"]
    if margin in table:
        assert table.loc[hit, margin].isna().all()
        assert "| NaN |" in to_markdown(table)


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({"verdict": "fail"}, "the comparison failed"),
        ({"compared": 0}, "passed with nothing compared"),
        ({"mismatched": 1}, "passed with mismatched elements"),
        ({"margin_max": 1.5}, "passed with a margin above 1"),
        ({"margin_max": math.inf}, "passed with a margin above 1"),
        ({"margin_p50": math.nan}, "a margin is NaN"),
    ],
)
def test_a_row_whose_figures_deny_its_pass_fails_and_says_why(changes, fault):
    df = frame({}, changes, {})
    assert list(row_faults(df)) == ["", fault, ""]
    assert list(per_arch_stage(df)["verdict"]) == ["fail"]


def test_a_margin_of_exactly_1_passes():
    assert overall_verdict(frame({"margin_max": 1.0})) == "pass"


def test_what_did_not_run_is_not_a_pass():
    skipped = {"verdict": "skipped", "reason": "no GPU", "compared": 0}
    not_applicable = {"verdict": "not applicable", "reason": "judged by itself", "compared": 5}
    assert list(per_arch_stage(frame(skipped))["verdict"]) == ["nothing compared"]
    assert list(per_arch_stage(frame(not_applicable))["verdict"]) == ["not applicable"]
    assert list(per_arch_stage(frame(not_applicable, skipped))["verdict"]) == ["nothing compared"]
    for df in (frame(skipped), frame(not_applicable), frame(not_applicable, skipped), from_rows([])):
        assert overall_verdict(df) == "nothing compared"
    assert list(not_judged(frame(skipped, skipped, not_applicable))[["reason", "rows"]].itertuples(index=False)) == [
        ("judged by itself", 1),
        ("no GPU", 2),
    ]


def test_worst_cases_come_in_order_and_only_as_many_as_asked():
    df = frame(
        {"case_id": "fine", "margin_max": 0.5},
        {"case_id": "ulps", "margin_max": 0.5, "ulp_max": 9.0},
        {"case_id": "tight", "margin_max": 0.75},
        {"case_id": "few", "oracle": "bits", "margin_max": math.nan, "mismatched": 1, "verdict": "fail"},
        {"case_id": "half", "oracle": "bits", "margin_max": math.nan, "mismatched": 500, "verdict": "fail"},
        {"case_id": "nan", "margin_max": math.nan},
        {"case_id": "bound", "margin_max": 2.0, "mismatched": 1, "verdict": "fail"},
        {"case_id": "skipped", "verdict": "skipped", "reason": "no GPU"},
    )
    order = ["half", "nan", "few", "bound", "tight", "ulps", "fine"]
    assert list(worst_cases(df)["case_id"]) == order
    assert list(worst_cases(df, 3)["case_id"]) == order[:3]
    assert list(worst_cases(df, 0)["case_id"]) == []
    for call in (worst_cases, failing_cases):
        with pytest.raises(ValueError, match="n must not be negative, got -1"):
            call(df, -1)


@given(df=frames, n=st.integers(1, 12))
@settings(max_examples=20)
def test_no_kind_of_failure_hides_another(df, n):
    """With room for as many rows as there are failing kinds, each kind is there, bits ahead of the others."""
    failed = df[row_faults(df) != ""]
    kinds = set(failed[["arch", "stage", "oracle"]].astype(str).itertuples(index=False, name=None))
    shown = worst_cases(df, max(len(kinds), n))
    found = list(shown.loc[shown["fault"] != "", ["arch", "stage", "oracle"]].itertuples(index=False, name=None))
    assert set(found) == kinds
    ranks = [ORACLES.index(oracle) for _, _, oracle in found[: len(kinds)]]
    assert ranks == sorted(ranks)


def test_a_failing_case_is_one_case_with_its_stages_in_the_order_of_the_data():
    df = frame(
        {"case_id": "a", "stage": "wo_b", "mismatched": 1, "verdict": "fail"},
        {"case_id": "a", "stage": "wo_a", "mismatched": 1, "verdict": "fail"},
        {"case_id": "a", "stage": "wo_a", "oracle": "bits", "margin_max": math.nan, "mismatched": 1, "verdict": "fail"},
        {"case_id": "b", "stage": "wo_b", "margin_max": 9.0, "mismatched": 1, "verdict": "fail"},
        {"case_id": "c"},
    )
    cases, count = failing_cases(df, 1)
    assert count == 2
    assert [case["case_id"] for case in cases] == ["a"]
    assert [(row["stage"], row["oracle"]) for row in cases[0]["failures"]] == [
        ("wo_a", "bits"),
        ("wo_a", "bound"),
        ("wo_b", "bound"),
    ]
    assert failing_cases(frame({}), 5) == ([], 0)


def test_the_summary_counts_cases_once_and_rows_apart():
    df = frame({"case_id": "a"}, {"case_id": "a", "stage": "wo_b"}, {"case_id": "b"}, {"case_id": "c", **SKIPPED})
    assert per_arch(df)[["cases", "rows", "not_judged"]].to_numpy().tolist() == [[2, 3, 1]]


def test_evidence_is_a_table_of_arch_and_stage():
    table = evidence(frame({}, {"evidence": "assumed"}, {"arch": "sm100", "stage": "quantize"}))
    assert list(table.columns) == ["arch", "quantize", "wo_a"]
    assert table.to_numpy().tolist() == [["sm90", "", "assumed, measured"], ["sm100", "measured", ""]]


@given(
    st.lists(
        st.dictionaries(st.sampled_from([0, 1, 2, 4, 64]), st.integers(0, 2**40), max_size=5), min_size=1, max_size=6
    )
)
@settings(max_examples=15)
def test_the_share_within_one_ulp_is_that_of_all_elements_with_a_distance(histograms):
    df = frame(*({"ulp_histogram": json.dumps(one) if one else ""} for one in histograms))
    close = sum(count for one in histograms for step, count in one.items() if step <= 1)
    total = sum(sum(one.values()) for one in histograms)
    assert repr(float(per_arch_stage(df)["within_1_ulp"][0])) == repr(close / total if total else math.nan)


@pytest.mark.parametrize("text", ["[1]", '{"0": -1}', '{"0": 1.5}', '{"zero": 1}', '{"0": "1"}', "7"])
def test_a_histogram_that_is_none_is_refused_by_its_text(text):
    with pytest.raises(RowsError, match=re.escape(text)):
        per_arch_stage(frame({}, {"ulp_histogram": text}))


@given(st.integers(1, 10**12), st.data())
@settings(max_examples=60)
def test_a_share_is_called_all_or_none_only_where_it_is(total, data):
    part = data.draw(st.integers(0, total) | st.integers(max(0, total - 3), total) | st.integers(0, min(3, total)))
    text = percent(part / total)
    value = float(text.removesuffix(" %"))
    assert (text == "100 %") == (part == total)
    assert (text == "0 %") == (part == 0)
    # Cut, and never rounded up: of what is shown, at least that much is there.
    assert value / 100 <= part / total * (1 + 1e-12)


@pytest.mark.parametrize(
    "column, heading",
    [("wo_a", "wo_a"), ("margin_max_b", "max margin b"), ("mismatched_change", "mismatched change"), ("calc_diff",) * 2,
     ("margin_max sm90", "max margin sm90"), ("verdict my_a", "verdict my_a")],
)  # fmt: skip
def test_headings_keep_the_names_of_stages_and_sides(column, heading):
    assert label(column) == heading


def test_ulps_are_whole_and_what_they_are_is_said():
    table = per_arch_stage(frame({"ulp_max": 30881.0}))
    assert "| 30,881 |" in to_markdown(table)
    assert "across zero" in " ".join(NOTES)


def test_environment_joins_what_differs():
    found = environment(frame({}, {"versions": '{"numpy": "2.3"}', "time_utc": "2026-02-01T00:00:00Z"}))
    assert found["numpy"] == "2.3, 2.4.6"
    assert found["torch"] == "2.13.0"
    assert found["cuda"] == "none"
    assert found["time (UTC)"] == "2026-01-31T12:00:00Z, 2026-02-01T00:00:00Z"
    for text in ("[]", "numpy 2.4"):
        with pytest.raises(
            ValueError, match=f"column versions must hold JSON objects, it also has '{re.escape(text)}'"
        ):
            environment(frame({}).assign(versions=text))


@given(frames)
@settings(max_examples=10)
def test_markdown_tables_keep_their_columns_whatever_the_text(df):
    for table in (per_arch_stage(df), worst_cases(df), not_judged(df)):
        text = to_markdown(table)
        lines = text.splitlines()
        assert len(lines) == len(table) + 2
        borders = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines}
        assert len(borders) == 1
        assert "<script" not in text


def test_markdown_rounds_for_people():
    text = to_markdown(per_arch_stage(frame({"compared": 1234567, "margin_max": 0.123456, "calc_diff": 1.23456e-9})))
    assert "| 1,234,567 |" in text
    assert "| 0.123 |" in text
    assert "| 1.23e-09 |" in text


@given(drawn=st.lists(rows(), min_size=1, max_size=6), title=NASTY)
@settings(max_examples=10)
def test_the_markdown_file_has_its_parts_and_replay_lines_that_a_shell_reads_back(tmp_path_factory, drawn, title):
    df = from_rows(drawn)
    path = write_markdown(df, tmp_path_factory.mktemp("md") / "report.md", title="FP8 " + title)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# FP8 ")
    assert "git revision 0123abc" in text
    assert "torch 2.13.0" in text
    assert [line[3:] for line in text.splitlines() if line.startswith("## sm")] == list(
        per_arch_stage(df)["arch"].unique()
    )
    failed = worst_cases(df, 10)
    failed = failed[failed["fault"] != ""]
    lines = [line for line in text.splitlines() if line.startswith("oproj replay")]
    assert [shlex.split(line) for line in lines] == [
        ["oproj", "replay", case, "--engine", engine] for case, engine in zip(failed["case"], failed["engine"])
    ]
    assert ("✗ FAIL" in text) == (len(lines) > 0)


def printed(df, width):
    out = io.StringIO()
    print_rich(df, Console(file=out, width=width))
    return out.getvalue()


@given(df=frames, width=st.integers(60, 200))
@settings(max_examples=10)
def test_a_terminal_of_any_width_cuts_no_figure(df, width):
    text = printed(df, width)
    assert "…" not in text
    for count in per_arch_stage(df)["compared"]:
        assert f"{count:,}" in text


def test_a_narrow_terminal_says_which_columns_it_leaves_out():
    df = frame({"compared": 123456789})
    # A caption may be broken into lines.
    narrow, wide = (" ".join(printed(df, width).split()) for width in (80, 200))
    assert "not shown for want of width:" in narrow
    assert "calc_diff" in narrow.partition("not shown")[2]
    assert "not shown" not in wide
    assert "calc_diff" in wide


def test_names_never_take_the_room_of_a_figure():
    df = frame({"compared": 123456789012345, "implementation": "a" * 50}, {"implementation": "b" * 50})
    for width in range(60, 120, 10):
        assert "123,456,789,012,345" in printed(df, width)


def test_names_are_printed_as_they_are_and_not_as_markup():
    one, other = "[red]mine[/red]", "[bold]theirs[/bold]"
    assert f"{one} · measured" in printed(frame({"implementation": one}), 200)
    text = printed(frame({"implementation": one}, {"implementation": other}), 200)
    assert one in text
    assert other in text


def test_a_failure_shows_in_print_without_colour():
    df = frame({}, {"margin_max": math.nan, "case": '{"seed": 7}'})
    text = printed(df, 200)
    assert "✗ FAIL" in text
    assert "NaN" in text
    assert """oproj replay '{"seed": 7}' --engine software\n""" in text
    assert "✗" not in printed(frame({}), 200)


def test_print_rich_writes_to_a_log_in_full_width(capsys):
    print_rich(from_rows([row()]))
    assert "not shown" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, options",
    [
        ({"engine": "deep_gemm"}, ["--engine", "deep_gemm"]),
        ({"engine": "own"}, []),
        ({"engine": "software", "spec": "my file.py:Mine"}, ["--implementation", "my file.py:Mine"]),
        ({}, []),
    ],
)
def test_a_replay_line_names_what_was_judged(given, options):
    assert shlex.split(replay_line("{'}", **given)) == ["oproj", "replay", "{'}", *options]
