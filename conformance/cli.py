"""The command line `oproj` (also `python -m conformance`).

Exit codes: 0 all passed; 1 a comparison failed or regressed; 2 usage or bad input; 3 asked-for hardware or package
missing; 4 nothing was compared; 130 stopped by Ctrl-C; 143 by SIGTERM.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from conformance import grid as grids
from conformance.case import Case
from conformance.options import MOST_PROCESSES, Engine, Judged, Rows, Strings, choice, target_of
from conformance.run_command import run
from conformance.runner import Row, Run, run_case
from conformance.terminal import (
    BAD_INPUT,
    guarded,
    say,
    split,
    stop,
    verdict_code,
)
from oproj.arch import get_arch
from oproj.engines.software.gemm import thread_count
from reports.baseline import CHANGES, baseline_diff, write_baselines
from reports.gate import exit_code, gate_folder
from reports.gate_output import print_gate
from reports.machine_output import write_outputs
from reports.page import write_page
from reports.schema import from_rows
from reports.store import load
from reports.tables import per_arch_stage, print_rich, to_markdown

BASELINES = Path(__file__).resolve().parents[1] / "reports" / "baselines"
FORMATS = ("table", "md", "csv")
app = typer.Typer(
    name="oproj",
    help="Numerical verification of the FP8 attention output projection.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="oproj")


app.command()(run)


@app.command()
def replay(
    case: Annotated[str, typer.Argument(help="The Case as one line of JSON, or its id.")],
    source: Annotated[
        Path | None, typer.Option("--in", help="Folder or file of rows in which an id is looked up.")
    ] = None,
    engine: Engine = "auto",
    implementation: Judged = "",
) -> None:
    """Rebuild one Case exactly, run it, and print its stages with the first bad element of each."""

    def judged() -> list[Row]:
        if case.lstrip().startswith("{"):
            return run_case(Case.from_json(case), target_of(engine, implementation), Run.now())
        found, spec = _look_up(case, source)
        recorded = spec if engine == "auto" else ""
        return run_case(found, target_of(engine, implementation or recorded), Run.now())

    rows = guarded(judged)
    df = from_rows(rows)
    print_rich(df)
    if not case.lstrip().startswith("{"):
        _say_what_else_was_judged(case, source, rows[0])
    for row in rows:
        if row["reason"]:
            line = f"{row['stage']} {row['oracle']}: {row['verdict']}: {row['reason']}"
            say(line, style="bold red" if row["verdict"] == "fail" else "")
    raise typer.Exit(verdict_code(df))


def _say_what_else_was_judged(case_id: str, source: Path | None, now: Row) -> None:
    """A note where the recorded rows are of something else than this replay, which then cannot show their failure."""
    df = load(source) if source else pd.DataFrame()
    of_case = df[df["case_id"] == case_id]
    recorded = dict.fromkeys(zip(of_case["engine"], of_case["implementation"]))
    if (now["engine"], now["implementation"]) not in recorded:
        names = ", ".join(name if name == engine else f"{name} on {engine}" for engine, name in recorded)
        say(
            f"note: {source} judged {names}, this replay {now['implementation']} on {now['engine']}; "
            "name the other with --implementation or --engine",
            style="yellow",
        )


def _look_up(case_id: str, source: Path | None) -> tuple[Case, str]:
    """The Case, and what --implementation took when it was recorded ('' for an engine's own)."""
    if source is None:
        raise ValueError(f"case={case_id!r} is an id; say with --in DIR where its rows are, or give the Case's JSON")
    df = load(source)
    found = df.loc[df["case_id"] == case_id, ["case", "spec"]]
    if found.empty:
        ids = df["case_id"].unique()
        raise ValueError(f"case={case_id!r} is not in {source}; it has {len(ids)}, such as {', '.join(ids[:5])}")
    return Case.from_json(str(found["case"].iloc[0])), str(found["spec"].iloc[0])


@app.command()
def report(
    directory: Rows,
    html: Annotated[Path | None, typer.Option(help="Write the page there.")] = None,
    format: Annotated[str, typer.Option(help=f"What to print: {', '.join(FORMATS)}.")] = "table",
) -> None:
    """Print the tables of a finished run; write its page."""

    def show() -> None:
        if format not in FORMATS:
            raise ValueError(f"format={format!r} is unknown; known: {', '.join(FORMATS)}")
        df = load(directory)
        if html is not None:
            write_page(df, html)
        if format == "table":
            print_rich(df)
        else:
            table = per_arch_stage(df)
            sys.stdout.write(to_markdown(table) if format == "md" else table.to_csv(index=False))

    guarded(show)


@app.command(name="gate")
def gate_command(
    directory: Rows,
    baseline: Annotated[Path, typer.Option(help="Baseline file, or a folder of them.")] = BASELINES,
    engine: Annotated[str | None, typer.Option(help="The engine that must have run.")] = None,
    arch: Annotated[Strings, typer.Option(help="The architectures that must have run.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="A line for each problem, however many.")] = False,
    junit: Annotated[Path | None, typer.Option(dir_okay=False, help="Write JUnit XML there.")] = None,
    sarif: Annotated[Path | None, typer.Option(dir_okay=False, help="Write SARIF 2.1.0 there.")] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Print annotations, and add the tables to $GITHUB_STEP_SUMMARY.")
    ] = False,
) -> None:
    """Fail where a run is worse than its baseline, lacks rows, or compared nothing."""
    if arch is not None and not split(arch, ()):
        stop(BAD_INPUT, "--arch is empty; name at least one architecture, or leave it out")
    result = guarded(lambda: gate_folder(directory, baseline, engine, split(arch, ()) or None))
    print_gate(result, verbose=verbose)
    guarded(lambda: write_outputs(result, junit=junit, sarif=sarif, github=github))
    raise typer.Exit(exit_code(result))


@app.command()
def rebaseline(
    directory: Rows,
    reason: Annotated[str, typer.Option(help="Why the baselines change.")],
    baseline: Annotated[Path, typer.Option(help="Folder of the baselines.")] = BASELINES,
    fewer: Annotated[bool, typer.Option("--fewer", help="Allow a run without rows that the baselines have.")] = False,
) -> None:
    """Make a run the new baseline; refused where anything failed, nothing was compared, or rows are missing."""

    def write() -> tuple[pd.DataFrame, list[Path]]:
        df = load(directory)
        return baseline_diff(df, baseline), write_baselines(df, baseline, reason, allow_fewer=fewer)

    changed, paths = guarded(write)
    say(to_markdown(changed).rstrip() if len(changed) else "no figure changed")
    for path in [*paths, baseline / CHANGES]:
        say(f"wrote {path}")


@app.command()
def record(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the golden vectors.")],
    arch: Annotated[str | None, typer.Option(help="Architecture of the GPU; by default the current one's.")] = None,
    prove: Annotated[bool, typer.Option("--prove", help="Also compare the engine with the GPU in bulk.")] = False,
) -> None:
    """Record golden vectors from the real DeepGEMM; needs a GPU."""
    from conformance.record import main as record_vectors

    raise typer.Exit(guarded(lambda: record_vectors(out, prove, arch=arch)))


@app.command()
def faults(
    arch: Annotated[Strings, typer.Option(help=choice("Architectures", grids.ARCHS))] = None,
    fault: Annotated[
        Strings, typer.Option(help="Faults by name; separate with commas. Default: all, and the variants.")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Cases of profile ci within which each must be killed.")] = 60,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write the kill matrix there.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core.")] = 0,
) -> None:
    """The kill matrix: plant every known fault, and see which check kills it in which Case."""
    from conformance.faults.command import main as run_zoo

    archs, names = guarded(lambda: [get_arch(name).name for name in split(arch, grids.ARCHS)]), split(fault, ())
    processes = workers or min(thread_count(), MOST_PROCESSES)
    raise typer.Exit(
        guarded(lambda: run_zoo(archs, json_file=json_file, names=names, examples=examples, workers=processes))
    )


@app.command()
def env() -> None:
    """What is installed, which engine works for which architecture, and why another does not."""
    from oproj.environment import collect, to_text

    say(to_text(collect()))
