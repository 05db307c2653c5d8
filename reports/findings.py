"""What a gate finds: one Finding per fact, and all of them as lines and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from .formatting import replay_line

PASSED, REGRESSED, BAD_INPUT, NOTHING_COMPARED = 0, 1, 2, 4

KINDS = {
    "failed": "A comparison of the run failed",
    "worse": "A figure is worse than the one recorded in the baseline",
    "fewer": "Fewer elements were compared than the baseline has",
    "missing": "A row of the baseline is missing in the run",
    "unknown": "A row of the run has no baseline",
    "absent": "An architecture did not run, or has no baseline",
    "engine": "An architecture ran on another engine than the one asked for",
    "empty": "Nothing was compared",
    "repeated": "Rows occur twice",
    "unusable": "Rows or baselines cannot be used",
    "better": "A figure is better than the one recorded in the baseline",
}
"""Kinds of findings, worst first as people read them; `better` alone is no problem."""

TABLE_COLUMNS = (
    "arch", "engine", "stage", "oracle", "preset", "tp_size", "tokens", "family", "figure", "run", "baseline", "case_id"
)  # fmt: skip
_BY_FIGURE = ("failed", "worse")
_FEW = 3


@dataclass(frozen=True)
class Finding:
    """One fact. `kind` is of `KINDS`; what does not apply is '' or None.

    stage .. family name the combination; tokens, case_id, case and spec the Case that shows it; `figure` with `run`
    and `baseline` what was compared; file and line where the baseline has it.
    """

    kind: str
    text: str
    arch: str = ""
    engine: str = ""
    implementation: str = ""
    stage: str = ""
    oracle: str = ""
    preset: str = ""
    tp_size: int | None = None
    family: str = ""
    tokens: int | None = None
    case_id: str = ""
    case: str = ""
    spec: str = ""
    figure: str = ""
    run: float | None = None
    baseline: float | None = None
    file: str = ""
    line: int | None = None

    @property
    def where(self) -> str:
        """The combination in words, the arch alone, or ''."""
        if not self.stage:
            return self.arch
        preset = f"preset {self.preset or 'none'}, TP {self.tp_size}, family {self.family}"
        return f"{self.arch} {self.engine} {self.implementation}: {self.stage} {self.oracle}, {preset}"

    @property
    def replay(self) -> str:
        """The command that runs the Case again, or ''."""
        return replay_line(self.case, self.spec, self.engine) if self.case else ""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


@dataclass(frozen=True)
class GateResult:
    """What the gate found. `compared` and `failed` count elements and rows of the run, `checked` has the combinations
    that were judged, in words; a result that compared nothing never passes.
    """

    problems: list[Finding]
    improvements: list[Finding]
    bad_input: list[Finding] = field(default_factory=list)
    compared: int = 0
    failed: int = 0
    checked: list[Finding] = field(default_factory=list, repr=False, compare=False)

    @property
    def all_problems(self) -> list[Finding]:
        """Everything that keeps it from passing, in the order of `KINDS`."""
        order = list(KINDS)
        return sorted([*self.bad_input, *self.problems], key=lambda finding: order.index(finding.kind))


def exit_code(result: GateResult) -> int:
    """0 passed, 1 failed or regressed, 2 unusable rows or baselines, 4 nothing was compared."""
    if result.bad_input:
        return BAD_INPUT
    if result.compared == 0 and result.failed == 0:
        return NOTHING_COMPARED
    return REGRESSED if result.problems else PASSED


def verdict_line(result: GateResult) -> str:
    """The one line that ends a gate."""
    count = len(result.all_problems)
    word = "passed" if exit_code(result) == PASSED else f"FAILED, {count} problem{'' if count == 1 else 's'}"
    return f"gate {word}; {result.compared:,} elements compared"


def advice(result: GateResult) -> list[str]:
    """What to do next: a rebaseline where all held and something is better, another run where rows are not there."""
    lines = []
    if result.improvements and exit_code(result) == PASSED:
        count = len(result.improvements)
        lines.append(f"{count} figure(s) better than the baseline: `oproj rebaseline DIR --reason ...` keeps them")
    if any(finding.kind == "missing" for finding in result.problems):
        lines.append(
            "rows are missing: the baselines are those of whole default runs; --arch narrows what must have run"
        )
    if any(finding.kind == "engine" for finding in result.problems):
        lines.append(
            "rows of another engine than --engine names meet no baseline: take that engine's run with "
            "`oproj run --engine`, or leave --engine out to gate the engine that ran"
        )
    return lines


def summarise(findings: Sequence[Finding], *, verbose: bool = False) -> list[str]:
    """Findings as lines; where several of one kind are of one arch and engine, their number and the first few.

    verbose: a line for each.
    """
    if verbose:
        return [str(finding) for finding in findings]
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.arch, finding.engine), []).append(finding)
    lines = []
    for (kind, arch, engine), group in groups.items():
        if len(group) > _FEW:
            lines.append(f"{f'{arch} {engine}'.strip()}: {len(group)} times: {_lower(KINDS[kind])}; the first {_FEW}:")
        lines += [str(finding) for finding in group[:_FEW]]
        if len(group) > _FEW:
            lines.append(f"... and {len(group) - _FEW} more; --verbose lists them")
    return lines


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def figures(findings: Iterable[Finding]) -> list[Finding]:
    """Those that are about a figure of a combination: failed and worse."""
    return [finding for finding in findings if finding.kind in _BY_FIGURE]


def others(findings: Iterable[Finding]) -> list[Finding]:
    """Those that are about what is there and what is not."""
    return [finding for finding in findings if finding.kind not in _BY_FIGURE]


def table(findings: Iterable[Finding]) -> pd.DataFrame:
    """Findings as text, with the columns of `TABLE_COLUMNS`: where, at which size, which figure, now and before."""
    rows = [{name: _cell(finding, name) for name in TABLE_COLUMNS} for finding in findings]
    return pd.DataFrame(rows, columns=list(TABLE_COLUMNS), dtype=object)


def _cell(finding: Finding, name: str) -> str:
    value: Any = getattr(finding, name)
    if name == "figure" and not value:
        return finding.text
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else f"{value:.6g}"
    return "" if value is None else str(value)
