"""The command line `oproj` (also `python -m conformance`).

Exit codes: 0 all passed; 1 a comparison failed or regressed; 2 usage or bad input; 3 asked-for hardware or package
missing; 4 nothing was compared; 130 stopped by Ctrl-C; 143 by SIGTERM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

import oproj
from conformance import grid as grids
from conformance.exports import main as export
from conformance.options import MOST_PROCESSES, Rows, Strings, choice
from conformance.replay_command import replay
from conformance.report_command import report
from conformance.run_command import run
from conformance.runner import git_revision
from conformance.terminal import BAD_INPUT, guarded, say, split, stop
from oproj.arch import get_arch
from oproj.engines.software.gemm import thread_count
from reports.baseline import CHANGES, baseline_diff, write_baselines
from reports.gate import exit_code, gate_folder
from reports.gate_output import print_gate
from reports.machine_output import write_outputs
from reports.store import load
from reports.tables import to_markdown

BASELINES = Path(__file__).resolve().parents[1] / "reports" / "baselines"
app = typer.Typer(
    name="oproj",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="oproj")


def _say_version(asked: bool) -> None:
    if asked:
        revision = git_revision()
        say(f"oproj {oproj.__version__}" + (f", git {revision}" if revision else ""))
        raise typer.Exit


@app.callback()
def _of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Numerical verification of the FP8 attention output projection."""


app.command()(run)
app.command()(replay)
app.command()(report)
app.command(name="export")(export)


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
