"""The command line `oproj` (also `python -m conformance`).

Exit codes: 0 all passed; 1 a comparison failed or regressed; 2 usage or bad input; 3 asked-for hardware or package
missing; 4 nothing was compared; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import pandas as pd
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from conformance import grid as grids
from conformance.case import Case
from conformance.families import FAMILIES
from conformance.grid import Grid
from conformance.runner import Row, Run, Target, run_case, run_cases
from oproj.arch import ARCHS
from oproj.config import PRESETS
from oproj.engines import ENGINES, EngineUnavailable
from reports.aggregate import NOTHING, overall_verdict
from reports.baseline import write_baselines
from reports.columns import NoRowsError, RowsError
from reports.gate import exit_code, gate
from reports.page import write_page
from reports.schema import from_rows
from reports.store import RowWriter, load, write_csv
from reports.tables import per_arch_stage, print_rich, to_markdown, write_markdown

PASSED, FAILED, BAD_INPUT, MISSING, NOTHING_COMPARED, INTERRUPTED = 0, 1, 2, 3, 4, 130
BASELINES = Path(__file__).resolve().parents[1] / "reports" / "baselines"
FORMATS = ("table", "md", "csv", "html")
_FLUSH_EVERY = 500
T = TypeVar("T")

app = typer.Typer(
    name="oproj", help=(__doc__ or "").partition("\n")[0], no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)
out_console = Console()

def main() -> None:
    """Entry point of the console script."""
    app(prog_name="oproj")


def stop(code: int, message: str) -> NoReturn:
    """Print ``message`` to standard error and leave with ``code``."""
    Console(stderr=True).print(Text(message, style="bold red"), soft_wrap=True)
    raise typer.Exit(code)


def guarded(action: Callable[[], T]) -> T:
    """The result of ``action``; bad input, missing hardware and missing rows end the program with their code."""
    try:
        return action()
    except EngineUnavailable as error:
        stop(MISSING, str(error))
    except NoRowsError as error:
        stop(NOTHING_COMPARED, str(error))
    except (ValueError, TypeError) as error:
        stop(BAD_INPUT, str(error))


def split(values: list[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Comma lists and repeated options as one tuple without repeats, in the order given."""
    if values is None:
        return default
    parts = [part.strip() for value in values for part in value.split(",")]
    return tuple(dict.fromkeys(part for part in parts if part))


def integers(values: list[str] | None, default: tuple[int, ...], name: str) -> tuple[int, ...]:
    """As `split`, for whole numbers. Raises ``ValueError`` naming the option."""
    if values is None:
        return default
    try:
        return tuple(int(part) for part in split(values, ()))
    except ValueError as error:
        raise ValueError(f"--{name} takes whole numbers separated by commas: {error}") from None


@app.command()
def run(
    arch: Annotated[list[str] | None, typer.Option(help=f"Architectures: {', '.join(ARCHS)}.")] = None,
    engine: Annotated[str, typer.Option(help=f"Who does the arithmetic: {', '.join(ENGINES)}.")] = "auto",
    preset: Annotated[list[str] | None, typer.Option(help=f"Models: {', '.join(PRESETS)}.")] = None,
    tp: Annotated[list[str] | None, typer.Option(help="Tensor-parallel sizes.")] = None,
    tokens: Annotated[list[str] | None, typer.Option(help="Numbers of tokens; 0 is allowed.")] = None,
    family: Annotated[list[str] | None, typer.Option(help=f"Input families: {', '.join(FAMILIES)}.")] = None,
    examples: Annotated[int, typer.Option(min=0, help="Cases per combination; 0: one per family.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first Case.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="Real widths; by default groups and columns are cut.")] = False,
    implementation: Annotated[
        str, typer.Option(help="What to judge: package.module:Mine, path/file.py:Mine, or an entry point.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of the rows and tables; earlier rows there are replaced.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
) -> None:
    """Run Cases, compare with float64 and with the bit-exact model, write and print the error tables."""

    def plan() -> tuple[Grid, Target]:
        chosen = _grid(arch, preset, tp, tokens, family, examples, seed, full)
        target = _target(engine, implementation)
        for name in chosen.archs:  # hardware and names are asked for before anything is written
            target.build(name)
        return chosen, target

    chosen, target = guarded(plan)
    this = Run.now()
    folder = out or Path("out") / this.run_id
    df = _run_into(folder, chosen, target, this, workers)
    guarded(lambda: _write_reports(df, folder, FORMATS[1:]))
    print_rich(df)
    out_console.print(Text(f"{len(df)} rows of {len(chosen)} Cases, tables and page in {folder}"), soft_wrap=True)
    raise typer.Exit(_verdict_code(df))


def _grid(
    arch: list[str] | None, preset: list[str] | None, tp: list[str] | None, tokens: list[str] | None,
    family: list[str] | None, examples: int, seed: int, full: bool,
) -> Grid:
    """The Cases asked for; the few many-token Cases belong to the default choice of tokens only."""
    return Grid(
        archs=split(arch, grids.ARCHS), presets=split(preset, grids.PRESETS),
        tp_sizes=integers(tp, grids.TP_SIZES, "tp"), tokens=integers(tokens, grids.TOKENS, "tokens"),
        many_tokens=grids.MANY_TOKENS if tokens is None else 0, families=split(family, tuple(FAMILIES)),
        examples=examples, seed=seed, full=full,
    )


def _target(engine: str, implementation: str) -> Target:
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; known engines: {', '.join(ENGINES)}")
    if implementation and engine != "auto":
        raise ValueError(f"--engine {engine} and --implementation {implementation} exclude each other")
    return Target(engine, implementation)


def _run_into(folder: Path, chosen: Grid, target: Target, this: Run, workers: int) -> pd.DataFrame:
    """Run all Cases into ``folder`` with a progress bar on standard error; the rows as a frame."""
    guarded(lambda: _clear(folder))
    rows: list[Row] = []
    try:
        with RowWriter(folder, this.run_id, _FLUSH_EVERY) as writer, _progress() as progress:
            task = progress.add_task("Cases", total=len(chosen), failed=0)
            for of_case in run_cases(chosen.cases(), target, this, workers=workers):
                writer.extend(of_case)
                rows.extend(of_case)
                failed = sum(row["verdict"] == "fail" for row in of_case)
                progress.update(task, advance=1, failed=progress.tasks[task].fields["failed"] + failed)
    except KeyboardInterrupt:
        stop(INTERRUPTED, f"stopped: {len(rows)} rows in {folder} are valid; `oproj report {folder}` shows them")
    return from_rows(rows)


def _clear(folder: Path) -> None:
    """Remove the row files of an earlier run, whose rows would be taken for rows of this one."""
    for path in sorted(folder.glob("rows-*.parquet")) if folder.is_dir() else []:
        path.unlink()


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"),
        TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal,
    )


def _write_reports(df: pd.DataFrame, folder: Path, formats: tuple[str, ...]) -> None:
    writers: dict[str, Callable[[], Any]] = {
        "md": lambda: write_markdown(df, folder / "tables.md"),
        "csv": lambda: write_csv(df, folder / "rows.csv"),
        "html": lambda: write_page(df, folder / "report.html"),
    }
    for name in formats:
        writers[name]()


def _verdict_code(df: pd.DataFrame) -> int:
    return {"pass": PASSED, NOTHING: NOTHING_COMPARED}.get(overall_verdict(df), FAILED)


@app.command()
def replay(
    case: Annotated[str, typer.Argument(help="The Case as one line of JSON, or its id.")],
    source: Annotated[Path | None, typer.Option("--in", help="Folder or file of rows in which an id is looked up.")] = None,
    engine: Annotated[str, typer.Option(help=f"Who does the arithmetic: {', '.join(ENGINES)}.")] = "auto",
    implementation: Annotated[str, typer.Option(help="What to judge; as in `run`.")] = "",
) -> None:
    """Rebuild one Case exactly, run it, and print its stages with the first bad element of each."""

    def rows() -> list[Row]:
        found = Case.from_json(case) if case.lstrip().startswith("{") else _look_up(case, source)
        return run_case(found, _target(engine, implementation), Run.now())

    judged = guarded(rows)
    df = from_rows(judged)
    print_rich(df)
    for row in judged:
        if row["reason"]:
            line = f"{row['stage']} {row['oracle']}: {row['verdict']}: {row['reason']}"
            out_console.print(Text(line, style="bold red" if row["verdict"] == "fail" else ""), soft_wrap=True)
    raise typer.Exit(_verdict_code(df))


def _look_up(case_id: str, source: Path | None) -> Case:
    if source is None:
        raise ValueError(f"case={case_id!r} is an id; say with --in DIR where its rows are, or give the Case's JSON")
    df = load(source)
    found = df.loc[df["case_id"] == case_id, "case"]
    if found.empty:
        known = list(df["case_id"].unique()[:5])
        raise ValueError(f"case={case_id!r} is not in {source}; it has {df['case_id'].nunique()}, such as {', '.join(known)}")
    return Case.from_json(str(found.iloc[0]))


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder or file of rows.")],
    html: Annotated[Path | None, typer.Option(help="Write the page there.")] = None,
    format: Annotated[str, typer.Option(help=f"What to print: {', '.join(FORMATS[:3])}.")] = "table",
) -> None:
    """Print the tables of a finished run; write its page."""

    def show() -> None:
        if format not in FORMATS[:3]:
            raise ValueError(f"format={format!r} is unknown; known: {', '.join(FORMATS[:3])}")
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
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder or file of rows.")],
    baseline: Annotated[Path, typer.Option(help="Baseline file, or a folder of them.")] = BASELINES,
    engine: Annotated[str | None, typer.Option(help="The engine that must have run.")] = None,
    arch: Annotated[list[str] | None, typer.Option(help="The architectures that must have run.")] = None,
) -> None:
    """Fail where a run is worse than its baseline, lacks rows, or compared nothing."""
    df = guarded(lambda: load(directory))
    result = gate(df, baseline, engine, split(arch, ()) or None)
    for style, lines in (("bold red", [*result.bad_input, *result.problems]), ("green", result.improvements)):
        for line in lines:
            out_console.print(Text(line, style=style), soft_wrap=True)
    code = exit_code(result)
    word = "passed" if code == PASSED else f"FAILED, {len(result.problems) + len(result.bad_input)} problem(s)"
    out_console.print(Text(f"gate {word}; {result.compared:,} elements compared"), soft_wrap=True)
    raise typer.Exit(code)


@app.command()
def rebaseline(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder or file of rows.")],
    reason: Annotated[str, typer.Option(help="Why the baselines change.")],
    baseline: Annotated[Path, typer.Option(help="Folder of the baselines.")] = BASELINES,
) -> None:
    """Make a run the new baseline; refused where anything failed or nothing was compared."""
    for path in guarded(lambda: write_baselines(load(directory), baseline, reason)):
        out_console.print(Text(f"wrote {path}"), soft_wrap=True)


@app.command()
def record(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the golden vectors.")],
    arch: Annotated[str | None, typer.Option(help="Architecture of the GPU; by default that of the current one.")] = None,
) -> None:
    """Record golden vectors from the real DeepGEMM; needs a GPU."""
    from conformance.record import record as record_vectors

    guarded(lambda: record_vectors(out, arch))


@app.command()
def env() -> None:
    """What is installed, which engine works for which architecture, and why another does not."""
    from oproj.environment import collect, to_text

    out_console.print(Text(to_text(collect())), soft_wrap=True)

