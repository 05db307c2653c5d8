"""`oproj replay`: one Case again, on what judged it, with the first bad element of each stage."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from conformance.against_command import main as compare_two
from conformance.against_command import name_of, second_target
from conformance.case import Case
from conformance.isolation import CASE_TIMEOUT
from conformance.judge import FAIL
from conformance.options import Judged, target_of
from conformance.runner import Row, Run, Target, run_case, run_cases
from conformance.terminal import guarded, say, verdict_code
from oproj.engines import ENGINES, EngineUnavailable
from reports.schema import from_rows
from reports.store import load
from reports.tables import print_rich


def replay(
    case: Annotated[str, typer.Argument(help="The Case as one line of JSON, or its id.")],
    source: Annotated[
        Path | None, typer.Option("--in", help="Folder or file of rows in which an id is looked up.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help=f"Who does the arithmetic: {', '.join(ENGINES)}. Default: the recorded one; auto for a Case's JSON."
        ),
    ] = "",
    implementation: Judged = "",
    case_timeout: Annotated[
        float, typer.Option(help="Seconds after which a Case in a process of its own has failed.")
    ] = CASE_TIMEOUT,
    here: Annotated[
        bool, typer.Option("--here", help="An implementation of yours in this very process too, for a debugger.")
    ] = False,
    against: Annotated[
        str, typer.Option(help="Judge nothing: find where --implementation or --engine and this other one part.")
    ] = "",
) -> None:
    """Rebuild one Case exactly, run it, and print its stages with the first bad element of each."""

    def asked() -> tuple[Case, Target]:
        named = target_of(engine or "auto", implementation)
        if case.lstrip().startswith("{"):
            return Case.from_json(case), named
        found, recorded = _look_up(case, source)
        target = named if engine or implementation else recorded[0]
        others = [name_of(other) for other in recorded if other != target]
        if others:
            say(f"note: {source} judged {', '.join(others)}; this replays {name_of(target)}", style="yellow")
        return found, target

    def judged() -> list[Row]:
        try:
            return run_case(found, target, Run.now()) if here else _judged(found, target, case_timeout)
        except EngineUnavailable as error:
            if source is None or engine or implementation:
                raise
            hint = f"{source} recorded it for this Case; --engine software replays it without"
            raise EngineUnavailable(f"{error}; {hint}") from error

    found, target = guarded(asked)
    if against:
        raise typer.Exit(guarded(lambda: _compared(found, target, second_target(against), case_timeout)))
    rows = guarded(judged)
    df = from_rows(rows)
    print_rich(df)
    for row in rows:
        if row["reason"]:
            line = f"{row['stage']} {row['oracle']}: {row['verdict']}: {row['reason']}"
            say(line, style="bold red" if row["verdict"] == FAIL else "")
    raise typer.Exit(verdict_code(df))


def _judged(case: Case, target: Target, timeout: float) -> list[Row]:
    """The rows of ``case``; as in a run, an implementation that is not ours has a process of its own."""
    with closing(run_cases([case], target, Run.now(), timeout=timeout)) as results:
        return next(results)


def _compared(case: Case, first: Target, second: Target, timeout: float) -> int:
    return compare_two([case], first, second, folder=None, workers=1, timeout=timeout, shrink=False, total=1)


def _look_up(case_id: str, source: Path | None) -> tuple[Case, list[Target]]:
    """The Case, and all that judged it in ``source``, what failed first."""
    if source is None:
        raise ValueError(f"case={case_id!r} is an id; say with --in DIR where its rows are, or give the Case's JSON")
    df = load(source)
    found = df.loc[df["case_id"] == case_id, ["case", "spec", "engine", "verdict"]].astype(object)
    if found.empty:
        ids = df["case_id"].unique()
        raise ValueError(f"case={case_id!r} is not in {source}; it has {len(ids)}, such as {', '.join(ids[:5])}")
    found = found.sort_values("verdict", key=lambda words: words != FAIL, kind="stable")
    targets = [_target(spec, engine) for spec, engine in zip(found["spec"], found["engine"])]
    return Case.from_json(str(found["case"].iloc[0])), list(dict.fromkeys(targets))


def _target(spec: str, engine: str) -> Target:
    """What was judged, of a row's `spec` and `engine`; an engine that this suite does not know is not to be had."""
    if spec:
        return Target(implementation=spec)
    return Target(engine) if engine in ENGINES else Target()
