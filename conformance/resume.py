"""Going on with a run that was stopped: which Cases have their rows, and whether those are rows of this very run.

All it knows of a run are the parts in its folder, so it serves whoever runs the Cases: processes here, or tasks on
other machines that write parts there. Rows of a Case are in one part or in none (`RowWriter.extend`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from conformance.case import Case
from conformance.judge import FAIL
from conformance.runner import Judged, Run, Target, git_revision
from reports.columns import NoRowsError, RowsError
from reports.store import load

_OF_RUN = ("run_id", "time_utc", "git_revision")
_OF_MACHINE = ("threads",)
"""Named in `versions`, and without a say in any figure but the seconds."""


@dataclass(frozen=True)
class Earlier:
    """What a stopped run has left: what its rows share, the ids of the Cases that have rows, how many of them fail."""

    run: Run
    finished: frozenset[str]
    failed: int


def finished_cases(folder: Path) -> set[str]:
    """The ids of the Cases that have all their rows in ``folder``; none where it holds no rows or does not exist.

    Raises ``ValueError`` where its rows cannot be read, naming the file.
    """
    return set(_rows(folder)["case_id"].unique())


def look_back(folder: Path, cases: Iterable[Case], target: Target, judged: Mapping[str, Judged]) -> Earlier | None:
    """What ``folder`` holds of a run of ``cases`` on ``target``; None where it holds no rows.

    judged: what ``target`` names, by arch. Raises ``ValueError`` that names what differs where the rows are
    of several runs, of another git revision, engine, implementation, `spec` or version of what computes, of another
    schema, or of a Case that is none of ``cases``.
    """
    df = _rows(folder)
    if df.empty:
        return None
    run = _run_of(folder, df)
    _refuse_other_makers(folder, df, target, judged)
    foreign = df[~df["case_id"].isin({case.id for case in cases})]
    if len(foreign):
        ids = foreign["case_id"].unique()
        raise _refusal(folder, f"holds {len(ids)} Case(s) that this run does not have, the first {ids[0]}")
    failed = df.loc[df["verdict"] == FAIL, "case_id"].nunique()
    return Earlier(run, frozenset(df["case_id"].unique()), int(failed))


def _rows(folder: Path) -> pd.DataFrame:
    none = pd.DataFrame({"case_id": pd.Series(dtype=object)})
    if not folder.is_dir():
        return none
    try:
        return load(folder)
    except NoRowsError:
        return none
    except RowsError as error:
        raise ValueError(f"--resume cannot go on behind rows that cannot be used: {error}") from error


def _run_of(folder: Path, df: pd.DataFrame) -> Run:
    found = df[list(_OF_RUN)].drop_duplicates().astype(object)
    if len(found) > 1:
        raise _refusal(folder, f"holds rows of {len(found)} runs: {', '.join(sorted(set(found['run_id'])))}")
    run = Run(*(str(found[name].iloc[0]) for name in _OF_RUN))
    if run.git_revision != git_revision():
        raise _refusal(folder, f"git_revision is {run.git_revision!r} in its rows and {git_revision()!r} here")
    return run


def _refuse_other_makers(folder: Path, df: pd.DataFrame, target: Target, judged: Mapping[str, Judged]) -> None:
    names = ("engine", "implementation", "spec", "versions")
    for record in df[["arch", *names]].drop_duplicates().astype(object).to_dict("records"):
        arch = str(record["arch"])
        if arch not in judged:
            continue  # its Cases are none of this run, and are named as such
        mine = judged[arch]
        now = (mine.engine, mine.name, target.implementation, mine.versions)
        for name, value in zip(names, now):
            differs = _difference(name, str(record[name]), value)
            if differs:
                raise _refusal(folder, f"{arch}: {differs}")


def _difference(name: str, before: str, now: str) -> str:
    """What differs between the rows and this run, or ''."""
    if name != "versions":
        return "" if before == now else f"{name} is {before!r} in its rows and {now!r} here"
    was, present = (json.loads(text) for text in (before, now))
    keys = [key for key in sorted({*was, *present}) if key not in _OF_MACHINE]
    moved = [key for key in keys if was.get(key) != present.get(key)]
    return ", ".join(f"{key} is {was.get(key)!r} in its rows and {present.get(key)!r} here" for key in moved)


def _refusal(folder: Path, what: str) -> ValueError:
    return ValueError(f"{folder}: {what}; --resume goes on with the same run only. Without it all rows are replaced")
