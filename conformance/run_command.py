"""`oproj run`: the Cases asked for, judged on as many processes as help, written as rows, tables and page."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer
from rich.console import Console

from conformance import grid as grids
from conformance import sweep_command
from conformance.against_command import main as compare_two
from conformance.against_command import second_target
from conformance.case import Case
from conformance.estimate import tell
from conformance.families import FAMILIES
from conformance.grid import Grid
from conformance.isolation import CASE_TIMEOUT
from conformance.judge import FAIL
from conformance.options import MOST_PROCESSES, Engine, Judged, Strings, choice, target_of
from conformance.progress import Advance, progress
from conformance.resume import Earlier, look_back
from conformance.runner import Judged as Subject
from conformance.runner import Run, Target, judged_by, run_cases
from conformance.shrink import as_text, shrink_failures
from conformance.signals import Terminated, terminable
from conformance.strategies import PROFILES, ProfileCases
from conformance.sweep import Cluster, check_nodes, import_ray, judged_on
from conformance.terminal import FAILED, INTERRUPTED, TERMINATED, guarded, integers, say, split, stop, verdict_code
from oproj.arch import ARCHS
from oproj.config import PRESETS
from oproj.engines.software.gemm import thread_count
from reports.page import write_page
from reports.store import RowWriter, load, remove_parts, remove_unfinished, write_csv
from reports.tables import print_rich, write_markdown

Plan = Grid | ProfileCases
_DERIVED: dict[str, Callable[[pd.DataFrame, Path], object]] = {
    "tables.md": write_markdown,
    "rows.csv": write_csv,
    "report.html": write_page,
}
_FLUSH_EVERY, _FLUSH_SECONDS = 500, 30.0  # rows, and seconds of work, that a killed run loses at most
_MANY_CASES = 32


def run(
    context: typer.Context,
    arch: Annotated[Strings, typer.Option(help=choice("Architectures", ARCHS, grids.ARCHS))] = None,
    engine: Engine = "auto",
    preset: Annotated[Strings, typer.Option(help=choice("Models", PRESETS, grids.PRESETS))] = None,
    tp: Annotated[Strings, typer.Option(help=choice("Tensor-parallel sizes", (), grids.TP_SIZES))] = None,
    tokens: Annotated[
        Strings,
        typer.Option(
            help=choice("Numbers of tokens, 0 too", (), grids.TOKENS, f", and a few Cases of {grids.MANY_TOKENS}")
        ),
    ] = None,
    family: Annotated[Strings, typer.Option(help=choice("Input families", FAMILIES))] = None,
    profile: Annotated[
        str, typer.Option(help=f"Cases that Hypothesis drew, in place of the grid: {', '.join(PROFILES)}.")
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
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the stopped run in --out: Cases that have rows are not rerun.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core, one in all on a GPU.")] = 0,
    case_timeout: Annotated[
        float, typer.Option(help="Seconds after which a Case in a process of its own has failed.")
    ] = CASE_TIMEOUT,
    ray: sweep_command.Ray = "",
    resources: sweep_command.Resources = "",
    parts: sweep_command.PartsUrl = "",
    against: Annotated[
        str, typer.Option(help="Judge nothing: find where --implementation or --engine and this other one part.")
    ] = "",
    shrink: Annotated[bool, typer.Option(help="Look for a small Case that fails in the same way.")] = True,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Run nothing: say how long it takes, and how much memory.")
    ] = False,
    cores: Annotated[
        int, typer.Option(min=0, help="Cores of the --estimate; 0: the processes of the run, or all of the cluster.")
    ] = 0,
) -> None:
    """Run Cases, compare with float64 and with the bit-exact model, write and print the error tables."""
    cluster = guarded(
        lambda: sweep_command.join_cluster(context, ray, resources, parts, against=against, workers=workers)
    )

    def plan() -> tuple[Plan, Target, int, Earlier | None]:
        if (estimate and against) or (cores and not estimate):
            raise ValueError("--estimate is of a run that judges: without --against; --cores is of --estimate")
        chosen: Plan = _grid(arch, preset, tp, tokens, family, examples, seed, full)
        if profile:
            chosen = _profile(profile, arch, examples, seed, preset or tp or tokens or family or full)
        target = target_of(engine, implementation)
        # Hardware and names are asked for before anything is written.
        judged = (
            judged_on(cluster, target, chosen.archs, case_timeout)
            if cluster
            else {name: judged_by(target, name, case_timeout) for name in chosen.archs}
        )
        second = [judged_by(second_target(against), name, case_timeout) for name in chosen.archs] if against else []
        if cluster and resume and out:
            sweep_command.fetch_parts(cluster, out)
        earlier = _earlier(out, chosen, target, judged) if resume else None
        left = len(chosen) - len(earlier.finished if earlier else ())
        processes = _processes(left, [*judged.values(), *second])
        return chosen, target, workers or processes, earlier

    chosen, target, processes, earlier = guarded(plan)
    if estimate:
        there = check_nodes(import_ray(), cluster, chosen.archs) if cluster else processes
        guarded(lambda: tell(chosen, cores or there, earlier.finished if earlier else frozenset()))
        raise typer.Exit
    if against:
        raise typer.Exit(
            guarded(
                lambda: compare_two(
                    chosen.cases(),
                    target,
                    second_target(against),
                    folder=out,
                    workers=processes,
                    timeout=case_timeout,
                    shrink=shrink,
                    total=len(chosen),
                )
            )
        )
    this = earlier.run if earlier else Run.now()
    folder = out or Path("out") / this.run_id
    with _resumable(folder) as tally:
        df = guarded(
            lambda: _run_into(folder, chosen, target, this, cluster or processes, case_timeout, earlier, tally)
        )
        guarded(lambda: [write(df, folder / name) for name, write in _DERIVED.items()])
    print_rich(df)
    code = verdict_code(df)
    if shrink and code == FAILED and not cluster:  # this machine may lack what has failed
        _say_smallest(df, target, this, case_timeout)
    say(f"{len(df)} rows of {len(chosen)} Cases, tables and page in {folder}")
    raise typer.Exit(code)


def _say_smallest(df: pd.DataFrame, target: Target, this: Run, timeout: float) -> None:
    """A small Case for each of the first kinds of failure."""
    failed = df[df["verdict"] == FAIL].to_dict("records")
    with Console(stderr=True).status("looking for a small Case that fails in the same way"):
        for found in shrink_failures(failed, target, this, timeout=timeout):
            say(as_text(found), style="bold")


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


def _processes(cases: int, subjects: Sequence[Subject]) -> int:
    """One process per core for many Cases on CPUs; a GPU has one owner, and few Cases end before a process starts."""
    on_cpu = all(torch.device(each.device).type == "cpu" for each in subjects)
    cores = thread_count()  # refuses a bad OPROJ_THREADS also where there is one process
    return min(cores, MOST_PROCESSES) if on_cpu and cases >= _MANY_CASES else 1


def _earlier(folder: Path | None, chosen: Plan, target: Target, judged: dict[str, Subject]) -> Earlier | None:
    if folder is None:
        raise ValueError("--resume goes on in the folder of a stopped run; name it with --out DIR")
    return look_back(folder, chosen.cases(), target, judged)


@dataclass
class _Tally:
    """How many rows are in the folder of a run, those of an earlier part of it left out."""

    rows: int = 0

    def add(self, rows: int) -> None:
        """So many more."""
        self.rows += rows


def _run_into(
    folder: Path,
    chosen: Plan,
    target: Target,
    this: Run,
    where: int | Cluster,
    timeout: float,
    earlier: Earlier | None,
    tally: _Tally,
) -> pd.DataFrame:
    """Run the Cases that ``earlier`` has not into ``folder``, on so many processes or a cluster, with their progress
    on standard error; all rows as a frame."""
    finished: frozenset[str] = earlier.finished if earlier else frozenset()
    if earlier:
        remove_unfinished(folder)
    else:
        remove_parts(folder)
    for name in _DERIVED:  # of an earlier run, and would be taken for this one's were it killed
        (folder / name).unlink(missing_ok=True)
    cases = (case for case in chosen.cases() if case.id not in finished)
    with progress(len(chosen), len(finished), earlier.failed if earlier else 0) as advance:
        if isinstance(where, Cluster):
            sweep_command.sweep_into(
                folder, cases, where, target, this,
                timeout=timeout, resumed=earlier is not None, on_case=advance, on_rows=tally.add,
            )  # fmt: skip
        else:
            _write_rows(folder, cases, target, this, where, timeout, advance, tally)
    return load(folder)


def _write_rows(
    folder: Path,
    cases: Iterable[Case],
    target: Target,
    this: Run,
    workers: int,
    timeout: float,
    advance: Advance,
    tally: _Tally,
) -> None:
    """The rows of ``cases``, run on ``workers`` processes of this machine."""
    results = run_cases(cases, target, this, workers=workers, timeout=timeout)
    flushed = time.monotonic()
    with closing(results), RowWriter(folder, this.run_id, _FLUSH_EVERY) as writer:
        for of_case in results:
            writer.extend(of_case)
            tally.add(len(of_case))
            if time.monotonic() - flushed > _FLUSH_SECONDS:
                writer.flush()
                flushed = time.monotonic()
            advance(any(row["verdict"] == FAIL for row in of_case))


@contextmanager
def _resumable(folder: Path) -> Iterator[_Tally]:
    """Ctrl-C and SIGTERM end the program with their own exit codes, and say what is there and how to go on."""
    tally = _Tally()
    try:
        with terminable():
            yield tally
    except KeyboardInterrupt as error:
        code = TERMINATED if isinstance(error, Terminated) else INTERRUPTED
        there = f"{tally.rows} new rows in {folder} are valid; `oproj report {folder}` shows them"
        if not tally.rows:
            there = "before the first of its Cases had ended"
        stop(code, f"stopped: {there}; the same command with --resume --out {shlex.quote(str(folder))} goes on")
