"""`oproj faults`: prints the kill matrix, writes it as JSON, and fails where a fault lives or a variant is flagged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conformance.case import Case
from conformance.faults.matrix import EXAMPLES, Alarm, Kill, run_matrix, usefulness
from conformance.terminal import FAILED, NOTHING_COMPARED, PASSED
from reports.files import write_text

VERSION = 1


def main(
    archs: Sequence[str],
    *,
    json_file: Path | None = None,
    names: Sequence[str] = (),
    examples: int = EXAMPLES,
    workers: int = 2,
) -> int:
    """Run the zoo and print it; returns the exit code.

    Raises ``ValueError`` for an unknown fault or a number of Cases below 1.
    """
    if examples < 1 or workers < 1:
        raise ValueError(f"examples={examples} and workers={workers} must be at least 1")
    results = list(run_matrix(archs, names, examples=examples, workers=workers))
    kills = [result for result in results if isinstance(result, Kill)]
    variants = [result for result in results if isinstance(result, Alarm)]
    console = Console()
    print_matrix(console, kills)
    print_variants(console, variants)
    print_usefulness(console, kills)
    if json_file is not None:
        write_json(json_file, kills, variants)
    if not any(result.cases_run for result in results):
        return NOTHING_COMPARED
    bad = [one for one in kills if not one.killed] + [one for one in variants if one.alarms]
    return FAILED if bad else PASSED


def print_matrix(console: Console, kills: Sequence[Kill]) -> None:
    """One line per fault and arch, and a line to paste per survivor."""
    table = Table(title="Kill matrix", title_justify="left")
    for column in ("fault", "stage", "arch", "killed by", "Case", "after", "MACs", "s"):
        table.add_column(column, overflow="fold")
    for one in sorted(kills, key=lambda k: (k.stage, k.fault, k.arch)):
        verdict = ", ".join(one.checks) if one.killed else f"[bold red]SURVIVES {one.cases_run} Cases"
        case = Case.from_json(one.case).id if one.case else ""
        number = str(one.case_number or "")
        table.add_row(one.fault, one.stage, one.arch, verdict, case, number, f"{one.macs:,}", f"{one.seconds:.2f}")
    console.print(table)
    dead = sum(one.killed for one in kills)
    seconds = sum(one.seconds for one in kills)
    console.print(f"{dead} of {len(kills)} faults killed, {seconds:.0f} s of processor time in the killing Cases")


def print_variants(console: Console, variants: Sequence[Alarm]) -> None:
    """One line per variant and arch, and every false alarm with its Case."""
    if not variants:
        return
    table = Table(title="Right answers that must pass", title_justify="left")
    for column in ("variant", "arch", "Cases", "false alarms"):
        table.add_column(column)
    for one in variants:
        table.add_row(one.variant, one.arch, str(one.cases_run), str(len(one.alarms)))
    console.print(table)
    for one in variants:
        for alarm in one.alarms:
            console.print(f"[red]{one.variant} on {one.arch}: {alarm}", soft_wrap=True, highlight=False)


def print_usefulness(console: Console, kills: Sequence[Kill]) -> None:
    """What each check is worth."""
    table = Table(title="Checks", title_justify="left")
    for column in ("check", "faults seen", "seen by it alone"):
        table.add_column(column, overflow="fold")
    for check, (count, vital) in usefulness(kills).items():
        table.add_row(check, str(count), ", ".join(vital) or "[yellow]none")
    console.print(table)


def write_json(path: Path, kills: Sequence[Kill], variants: Sequence[Alarm]) -> None:
    """The matrix for the page, written whole or not at all."""
    faults: list[dict[str, Any]] = [
        {
            "fault": one.fault, "stage": one.stage, "arch": one.arch, "source": one.source, "killed": one.killed,
            "checks": list(one.checks), "only": one.only, "case": json.loads(one.case) if one.case else None,
            "case_number": one.case_number, "cases_run": one.cases_run, "macs": one.macs,
            "seconds": round(one.seconds, 3),
        }
        for one in kills
    ]  # fmt: skip
    right = [
        {"variant": one.variant, "arch": one.arch, "cases_run": one.cases_run, "alarms": list(one.alarms),
         "seconds": round(one.seconds, 3)}
        for one in variants
    ]  # fmt: skip
    matrix = {"version": VERSION, "faults": faults, "variants": right}
    write_text(path, json.dumps(matrix, indent=1) + "\n")
