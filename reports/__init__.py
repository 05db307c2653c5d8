"""Results as rows, and what is made of them: tables, a page, baselines and the gate. Needs no torch.

>>> df = reports.load("out/")                           # doctest: +SKIP
>>> df.groupby(["arch", "stage"]).margin_max.max()      # doctest: +SKIP
"""

from __future__ import annotations

from .against import arch_against_arch, changes_per_stage, engine_against_engine, run_against_run
from .aggregate import overall_verdict
from .baseline import baseline_frame, write_baselines
from .columns import SCHEMA_VERSION, NoRowsError, RowsError
from .gate import GateResult, exit_code, gate
from .page import write_page
from .schema import empty_frame, from_rows, make_row, validate
from .store import RowWriter, load, write_csv
from .tables import (
    evidence,
    failing_cases,
    per_arch,
    per_arch_stage,
    print_rich,
    print_run_against_run,
    to_markdown,
    worst_cases,
    write_markdown,
)

__all__ = [
    "SCHEMA_VERSION",
    "GateResult",
    "NoRowsError",
    "RowWriter",
    "RowsError",
    "arch_against_arch",
    "baseline_frame",
    "changes_per_stage",
    "empty_frame",
    "engine_against_engine",
    "evidence",
    "exit_code",
    "failing_cases",
    "from_rows",
    "gate",
    "load",
    "make_row",
    "overall_verdict",
    "per_arch",
    "per_arch_stage",
    "print_rich",
    "print_run_against_run",
    "run_against_run",
    "to_markdown",
    "validate",
    "worst_cases",
    "write_baselines",
    "write_csv",
    "write_markdown",
    "write_page",
]
