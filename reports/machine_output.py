"""A gate's result for other programs: JUnit XML, SARIF 2.1.0, and what GitHub Actions reads.

Nothing of it decides: the exit code is `findings.exit_code` of the same result.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import junitparser

from .columns import SCHEMA_VERSION
from .files import write_atomically, write_text
from .findings import (
    KINDS,
    PASSED,
    Finding,
    GateResult,
    advice,
    exit_code,
    figures,
    others,
    summarise,
    table,
    verdict_line,
)
from .formatting import escape_markdown, to_markdown

SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ROOT = "ROOT"
_MOST_ANNOTATIONS = 10  # GitHub shows no more of one step
_MOST_ROWS = 50


def write_outputs(
    result: GateResult,
    *,
    junit: str | os.PathLike[str] | None = None,
    sarif: str | os.PathLike[str] | None = None,
    github: bool = False,
) -> None:
    """Write what is asked for. github: annotations to standard output, and the summary where GitHub names a file."""
    if junit is not None:
        write_junit(result, junit)
    if sarif is not None:
        write_sarif(result, sarif)
    if github:
        sys.stdout.write("".join(f"{line}\n" for line in github_annotations(result)))
        if os.environ.get("GITHUB_STEP_SUMMARY"):
            write_github_summary(result, os.environ["GITHUB_STEP_SUMMARY"])


def write_junit(result: GateResult, path: str | os.PathLike[str]) -> Path:
    """Write JUnit XML: a test suite per architecture and engine, a test case per combination that was judged.

    A combination that is worse, missing or failed has a failure; rows or baselines that cannot be used, and a run that
    compared nothing, are errors. Improvements are in the output of their test case.
    """
    document = junitparser.JUnitXml("oproj gate")
    for (arch, engine), suite in _suites(result).items():
        of_suite = junitparser.TestSuite(f"{arch} {engine}".strip() or "oproj gate")
        for name, findings in suite.items():
            of_suite.add_testcase(_test_case(f"{arch or 'gate'}.{engine or 'gate'}", name, findings))
        document.add_testsuite(of_suite)
    return write_atomically(path, lambda temporary: document.write(str(temporary), pretty=True))


def _suites(result: GateResult) -> dict[tuple[str, str], dict[str, list[Finding]]]:
    """(arch, engine) -> name of a test case -> what was found there."""
    found = [*result.all_problems, *result.improvements]
    if exit_code(result) != PASSED and not result.all_problems:
        found.append(Finding("empty", "nothing was compared"))
    suites: dict[tuple[str, str], dict[str, list[Finding]]] = {}
    for finding in [*result.checked, *found]:
        cases = suites.setdefault((finding.arch, finding.engine), {})
        here = cases.setdefault(finding.where if finding.stage else KINDS[finding.kind], [])
        if finding.kind:
            here.append(finding)
    return suites


def _test_case(classname: str, name: str, findings: list[Finding]) -> junitparser.TestCase:
    stage = next((finding.stage for finding in findings if finding.stage), "")
    case = junitparser.TestCase(_xml(name), classname=_xml(f"{classname}.{stage}".rstrip(".")))
    problems = [finding for finding in findings if finding.kind != "better"]
    for finding in problems:
        error = finding.kind in ("unusable", "empty") and not finding.stage
        kind = junitparser.Error if error else junitparser.Failure
        entry = kind(_xml(str(finding)), finding.kind)
        entry.text = _xml("\n".join(filter(None, (str(finding), finding.replay))))
        case.append(entry)
    better = [str(finding) for finding in findings if finding.kind == "better"]
    if better:
        case.system_out = _xml("\n".join(better))
    return case


def _xml(text: str) -> str:
    """`text` with U+FFFD for what XML 1.0 cannot hold."""
    return _NOT_XML.sub("�", text)


def write_sarif(result: GateResult, path: str | os.PathLike[str]) -> Path:
    """Write SARIF 2.1.0: a rule per kind of finding, each result at its line of the baseline file.

    Improvements are notes. Paths are relative to the current folder where they are inside it. A fingerprint is made
    of the combination, the kind and the figure, so that the same regression is one alert from run to run.
    """
    found = [*result.all_problems, *result.improvements]
    run = {
        "tool": {
            "driver": {
                "name": "oproj gate",
                "semanticVersion": f"{SCHEMA_VERSION}.0.0",
                "rules": [{"id": kind, "shortDescription": {"text": text}} for kind, text in KINDS.items()],
            }
        },
        "originalUriBaseIds": {_ROOT: {"uri": Path.cwd().as_uri() + "/"}},
        "invocations": [{"executionSuccessful": not result.bad_input, "exitCode": exit_code(result)}],
        "results": [_sarif_result(finding) for finding in found],
    }
    return write_text(path, json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n")


def _sarif_result(finding: Finding) -> dict[str, Any]:
    lines = [str(finding), finding.replay and f"Run it again: {finding.replay}"]
    parts = (finding.arch, finding.engine, finding.implementation, finding.stage, finding.oracle, finding.preset)
    place = [str(part) for part in (*parts, finding.tp_size, finding.family) if part not in ("", None)]
    identity = "/".join([finding.kind, *place, finding.figure or ("" if finding.stage else finding.text)])
    location: dict[str, Any] = {"physicalLocation": _sarif_place(finding)}
    if place:
        location["logicalLocations"] = [{"fullyQualifiedName": "/".join(place), "kind": "function"}]
    return {
        "ruleId": finding.kind,
        "ruleIndex": list(KINDS).index(finding.kind),
        "level": "note" if finding.kind == "better" else "error",
        "message": {"text": "\n".join(filter(None, lines))},
        "locations": [location],
        "partialFingerprints": {"finding/v1": hashlib.sha256(identity.encode()).hexdigest()},
        "properties": _properties(finding),
    }


def _sarif_place(finding: Finding) -> dict[str, Any]:
    """The finding's line of its baseline file; without one, the file that should have it."""
    name = finding.file or (f"reports/baselines/{finding.arch}-{finding.engine}.csv" if finding.engine else "")
    path = Path(name or "reports/baselines/CHANGES.md").absolute()
    inside = path.is_relative_to(Path.cwd())
    uri = path.relative_to(Path.cwd()).as_posix() if inside else path.as_uri()
    artifact = {"uri": uri, "uriBaseId": _ROOT} if inside else {"uri": uri}
    return {"artifactLocation": artifact, "region": {"startLine": finding.line or 1}}


def _properties(finding: Finding) -> dict[str, Any]:
    """The finding's plain values; figures as text, since JSON has no NaN."""
    names = ("arch", "engine", "stage", "oracle", "preset", "tp_size", "tokens", "family", "figure", "case_id", "case")
    values = {name: getattr(finding, name) for name in names}
    values |= {name: repr(value) for name in ("run", "baseline") if (value := getattr(finding, name)) is not None}
    return {name: value for name, value in values.items() if value not in ("", None)}


def github_annotations(result: GateResult) -> list[str]:
    """Workflow commands for standard output: at most 10, the worst kinds first, one per arch, stage and kind."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in result.all_problems:
        groups.setdefault((finding.kind, finding.arch, finding.stage), []).append(finding)
    lines = [_annotation(group) for group in list(groups.values())[: _MOST_ANNOTATIONS - 1]]
    level = "notice" if exit_code(result) == PASSED else "error"
    more = len(groups) - len(lines)
    text = verdict_line(result) + (f"; {more} more kind(s) of problem in the summary" if more else "")
    return [*lines, f"::{level} title=oproj gate::{_data(text)}"]


def _annotation(group: list[Finding]) -> str:
    first = group[0]
    title = " ".join(filter(None, ("oproj gate:", first.arch, first.stage, KINDS[first.kind].lower())))
    place = f"file={_property(os.path.relpath(first.file))},line={first.line}," if first.file else ""
    more = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
    return f"::error {place}title={_property(title)}::{_data(str(first) + more)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def markdown_summary(result: GateResult) -> str:
    """The gate as Markdown: verdict, the figures that are worse as a table, everything else as a list."""
    mark = "✓" if exit_code(result) == PASSED else "✗"
    text = f"### {mark} {escape_markdown(verdict_line(result))}\n\n"
    moved, rest = figures(result.all_problems), others(result.all_problems)
    if moved:
        text += _markdown_table(moved) + "\n"
        replays = list(dict.fromkeys(finding.replay for finding in moved if finding.replay))
        if replays:
            text += "Run the first of them again:\n\n```sh\n" + " ".join(replays[0].splitlines()) + "\n```\n\n"
    text += _markdown_list(summarise(rest)) + _markdown_list(advice(result))
    if result.improvements:
        count = len(result.improvements)
        text += f"<details><summary>{count} figure(s) better than the baseline</summary>\n\n"
        text += _markdown_table(result.improvements) + "\n</details>\n"
    return text


def _markdown_table(findings: list[Finding]) -> str:
    rows = table(findings[:_MOST_ROWS])
    more = len(findings) - len(rows)
    return to_markdown(rows) + (f"\n{more} more are not shown here.\n" if more else "")


def _markdown_list(lines: Iterable[str]) -> str:
    items = "".join(f"- {escape_markdown(line)}\n" for line in lines)
    return items + "\n" if items else ""


def write_github_summary(result: GateResult, path: str | os.PathLike[str]) -> None:
    """Append the Markdown summary to the step's file ($GITHUB_STEP_SUMMARY), which other steps write to as well."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(markdown_summary(result))
