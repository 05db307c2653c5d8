"""The command line `oproj` (also `python -m conformance`).

Exit codes: 0 all passed; 1 a comparison failed or regressed; 2 usage or bad input; 3 asked-for hardware or package
missing; 4 nothing was compared; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from conformance import grid as grids
from conformance.case import Case
from conformance.families import FAMILIES
from conformance.grid import Grid
from conformance.implementation import Implementation
from conformance.isolation import CASE_TIMEOUT
from conformance.runner import Row, Run, Target, run_case, run_cases
from conformance.strategies import PROFILES as PROFILES_OF_CASES
from conformance.strategies import ProfileCases
from conformance.terminal import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    guarded,
    integers,
    say,
    split,
    stop,
    verdict_code,
)
from oproj.arch import ARCHS, get_arch
from oproj.config import PRESETS
from oproj.engines import ENGINES
from oproj.engines.software.gemm import thread_count
from reports.baseline import CHANGES, baseline_diff, write_baselines
from reports.gate import exit_code, gate_folder
from reports.gate_output import print_gate
from reports.machine_output import write_outputs
from reports.page import write_page
from reports.schema import from_rows
from reports.store import RowWriter, load, remove_parts, write_csv
from reports.tables import per_arch_stage, print_rich, to_markdown, write_markdown

BASELINES = Path(__file__).resolve().parents[1] / "reports" / "baselines"
FORMATS = ("table", "md", "csv")
_DERIVED: dict[str, Callable[[pd.DataFrame, Path], object]] = {
    "tables.md": write_markdown,
    "rows.csv": write_csv,
    "report.html": write_page,
}
_FLUSH_EVERY = 500
_MANY_CASES, _MOST_PROCESSES = 32, 16

app = typer.Typer(
    name="oproj",
    help="Numerical verification of the FP8 attention output projection.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Strings = list[str] | None
Plan = Grid | ProfileCases
Rows = Annotated[Path, typer.Argument(metavar="DIR", help="Folder or file of rows.")]
Engine = Annotated[str, typer.Option(help=f"Who does the arithmetic: {', '.join(ENGINES)}.")]
Judged = Annotated[str, typer.Option(help="What to judge: package.module:Mine, path/file.py:Mine, or an entry point.")]


def _choice(what: str, known: Iterable[str], default: Sequence[object] = (), more: str = "") -> str:
    """The help of an option that takes a comma list: what may be named, and what runs where it is left out."""
    names = ": " + ", ".join(known) if known else ""
    standard = ", ".join(map(str, default)) or "all"
    return f"{what}{names}; separate with commas. Default: {standard}{more}."


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="oproj")


@app.command()
def run(
    arch: Annotated[Strings, typer.Option(help=_choice("Architectures", ARCHS, grids.ARCHS))] = None,
    engine: Engine = "auto",
    preset: Annotated[Strings, typer.Option(help=_choice("Models", PRESETS, grids.PRESETS))] = None,
    tp: Annotated[Strings, typer.Option(help=_choice("Tensor-parallel sizes", (), grids.TP_SIZES))] = None,
    tokens: Annotated[
        Strings,
        typer.Option(
            help=_choice("Numbers of tokens, 0 too", (), grids.TOKENS, f", and a few Cases of {grids.MANY_TOKENS}")
        ),
    ] = None,
    family: Annotated[Strings, typer.Option(help=_choice("Input families", FAMILIES))] = None,
    profile: Annotated[
        str, typer.Option(help=f"Cases that Hypothesis drew, in place of the grid: {', '.join(PROFILES_OF_CASES)}.")
    ] = "",
    examples: Annotated[
        int, typer.Option(min=0, help="Cases per combination, or of a profile on each arch; 0: its own number.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Added to the seed of every Case.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="Real widths; by default groups and columns are cut.")] = False,
    implementation: Judged = "",
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder of rows and tables, by default out/RUN_ID; earlier rows there are replaced."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core, one in all on a GPU.")] = 0,
    case_timeout: Annotated[
        float, typer.Option(help="Seconds after which a Case in a process of its own has failed.")
    ] = CASE_TIMEOUT,
) -> None:
    """Run Cases, compare with float64 and with the bit-exact model, write and print the error tables."""

    def plan() -> tuple[Plan, Target, int]:
        chosen: Plan = _grid(arch, preset, tp, tokens, family, examples, seed, full)
        if profile:
            chosen = _profile(profile, arch, examples, seed, preset or tp or tokens or family or full)
        target = _target(engine, implementation)
        # Hardware and names are asked for before anything is written.
        built = [target.build(name) for name in chosen.archs]
        processes = _processes(len(chosen), built)
        return chosen, target, workers or processes

    chosen, target, processes = guarded(plan)
    this = Run.now()
    folder = out or Path("out") / this.run_id
    df = guarded(lambda: _run_into(folder, chosen, target, this, processes, case_timeout))
    guarded(lambda: [write(df, folder / name) for name, write in _DERIVED.items()])
    print_rich(df)
    code = verdict_code(df)
    if code == FAILED and target != Target():
        say(f"to replay what was judged, add {_options(target)} to `oproj replay`")
    say(f"{len(df)} rows of {len(chosen)} Cases, tables and page in {folder}")
    raise typer.Exit(code)


def _options(target: Target) -> str:
    """The options that name ``target`` again."""
    name, value = ("implementation", target.implementation) if target.implementation else ("engine", target.engine)
    return f"--{name} {shlex.quote(value)}"


def _grid(
    arch: Strings,
    preset: Strings,
    tp: Strings,
    tokens: Strings,
    family: Strings,
    examples: int,
    seed: int,
    full: bool,
) -> Grid:
    """The Cases asked for; the few many-token Cases belong to the default choice of tokens only."""
    return Grid(
        archs=split(arch, grids.ARCHS),
        presets=split(preset, grids.PRESETS),
        tp_sizes=integers(tp, grids.TP_SIZES, "tp"),
        tokens=integers(tokens, grids.TOKENS, "tokens"),
        many_tokens=grids.MANY_TOKENS if tokens is None else 0,
        families=split(family, tuple(FAMILIES)),
        examples=examples,
        seed=seed,
        full=full,
    )


def _profile(profile: str, arch: Strings, examples: int, seed: int, of_the_grid: object) -> ProfileCases:
    if of_the_grid:
        raise ValueError(f"--profile {profile} draws presets, sizes and families itself; leave --preset ... --full out")
    return ProfileCases(profile, split(arch, grids.ARCHS), examples, seed)


def _target(engine: str, implementation: str) -> Target:
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; known engines: {', '.join(ENGINES)}")
    if implementation and engine != "auto":
        raise ValueError(f"--engine {engine} and --implementation {implementation} exclude each other")
    return Target(engine, implementation)


def _processes(cases: int, implementations: Sequence[Implementation]) -> int:
    """One process per core for many Cases on CPUs; a GPU has one owner, and few Cases end before a process starts."""
    on_cpu = all(torch.device(getattr(each, "device", "cpu")).type == "cpu" for each in implementations)
    cores = thread_count()  # refuses a bad OPROJ_THREADS also where there is one process
    return min(cores, _MOST_PROCESSES) if on_cpu and cases >= _MANY_CASES else 1


def _run_into(folder: Path, chosen: Plan, target: Target, this: Run, workers: int, timeout: float) -> pd.DataFrame:
    """Run all Cases into ``folder`` with a progress bar on standard error; the rows as a frame."""
    remove_parts(folder)
    for name in _DERIVED:  # of an earlier run, and would be taken for this one's were it killed
        (folder / name).unlink(missing_ok=True)
    rows: list[Row] = []
    try:
        with RowWriter(folder, this.run_id, _FLUSH_EVERY) as writer, _progress() as progress:
            task = progress.add_task("Cases", total=len(chosen), failed=0)
            for of_case in run_cases(chosen.cases(), target, this, workers=workers, timeout=timeout):
                writer.extend(of_case)
                rows.extend(of_case)
                failed = progress.tasks[task].fields["failed"] + any(row["verdict"] == "fail" for row in of_case)
                progress.update(task, advance=1, failed=failed)
    except KeyboardInterrupt:
        stop(INTERRUPTED, f"stopped: {len(rows)} rows in {folder} are valid; `oproj report {folder}` shows them")
    return from_rows(rows)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    ends = (TextColumn("{task.fields[failed]} failed"), TimeRemainingColumn())
    return Progress(*columns, *ends, console=console, transient=True, disable=not console.is_terminal)


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
            return run_case(Case.from_json(case), _target(engine, implementation), Run.now())
        found, spec = _look_up(case, source)
        recorded = spec if engine == "auto" else ""
        return run_case(found, _target(engine, implementation or recorded), Run.now())

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
    arch: Annotated[Strings, typer.Option(help=_choice("Architectures", grids.ARCHS))] = None,
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
    processes = workers or min(thread_count(), _MOST_PROCESSES)
    raise typer.Exit(
        guarded(lambda: run_zoo(archs, json_file=json_file, names=names, examples=examples, workers=processes))
    )


@app.command()
def env() -> None:
    """What is installed, which engine works for which architecture, and why another does not."""
    from oproj.environment import collect, to_text

    say(to_text(collect()))
