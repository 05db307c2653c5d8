"""Baselines: what a run reached, as small sorted text in git, one file per architecture and engine.

`<arch>-<engine>.csv` has a line per (arch, engine, implementation, stage, oracle, preset, tp_size, family).
Floats are written with every digit. `CHANGES.md` beside them says when, why, with which versions they were made, and
what that changed; it is apart from the figures so that a changed line of a baseline is a changed figure.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd

from .aggregate import NOTHING, aggregate, row_faults
from .baseline_changes import changes, to_list_item, unchanged
from .columns import JUDGED, RowsError
from .files import write_text
from .schema import validate
from .significance import COUNTS, FLOATS
from .tables import environment

KEYS = ("arch", "engine", "implementation", "stage", "oracle", "preset", "tp_size", "family")
BASELINE_COLUMNS = (*KEYS, *COUNTS, *FLOATS)
CHANGES = "CHANGES.md"
_HEADER = """# Changes of the baselines

Oldest first; each entry: time, files, reason, what made the rows, and what changed: new and removed rows, and for each
figure in how many rows it moved, with the largest move.

"""


def baseline_frame(df: pd.DataFrame) -> pd.DataFrame:
    """One row per combination of `KEYS`: compared, mismatched (int64), margin_max, rms_rel_error, signed_bias
    (float64, NaN where it does not apply). Combinations to which their oracle never applies are left out.

    Raises: RowsError where `df` is not a frame of rows.
    """
    return combinations(df)[list(BASELINE_COLUMNS)]


def combinations(df: pd.DataFrame) -> pd.DataFrame:
    """`baseline_frame` with all columns of `aggregate`, its verdict among them."""
    groups = aggregate(validate(df), KEYS)
    return groups[groups["verdict"] != "not applicable"].reset_index(drop=True)


def nothing_compared(groups: pd.DataFrame) -> list[str]:
    """Those of `combinations` that compared nothing, in words."""
    return [where(row) for row in groups[groups["verdict"] == NOTHING].to_dict("records")]


def where(row: Any) -> str:
    """A combination of `KEYS` in words, from any mapping that has them."""
    preset = f"preset {row['preset'] or 'none'}, TP {row['tp_size']}, family {row['family']}"
    return f"{row['arch']} {row['engine']} {row['implementation']}: {row['stage']} {row['oracle']}, {preset}"


Rows = dict[tuple[Any, ...], dict[str, Any]]


def write_baselines(
    df: pd.DataFrame, directory: str | os.PathLike[str], reason: str, *, allow_fewer: bool = False
) -> list[Path]:
    """Replace the baseline file of each (arch, engine) of the run and add an entry to CHANGES.md.

    Returns the paths of the baseline files. Files of other architectures and engines stay as they are, and so do the
    digits of every row whose figures moved by no more than the last bits of the reference.

    Raises: ValueError where the reason is empty, any row failed, nothing was compared - in the whole run or in one
    combination - or the run lacks rows that the baselines have, which would loosen the gate (unless `allow_fewer`);
    RowsError where `df` is not a frame of rows or a baseline cannot be read. Nothing is written then.
    """
    if not reason.strip():
        raise ValueError(f"reason must say why the baselines change, got {reason!r}")
    folder = Path(directory)
    old, new = old_and_new(df, folder)
    gone = [row for key, row in old.items() if key not in new]
    if gone and not allow_fewer:
        text = f"the run lacks {len(gone)} row(s) of the baselines, the first: {where(gone[0])}"
        raise ValueError(f"{text}; run all of it, or allow fewer rows where they are gone for good")
    rows = pd.DataFrame(_kept(old, new).values(), columns=list(BASELINE_COLUMNS))
    names = [_file_name(arch, engine) for arch, engine in zip(rows["arch"], rows["engine"])]
    texts = {name: _to_csv(rows[[other == name for other in names]]) for name in dict.fromkeys(names)}
    paths = [write_text(folder / name, text) for name, text in texts.items()]
    entry = _change_line(df, sorted(texts), reason) + "\n" + to_list_item(changes(old, new)) + "\n"
    write_text(folder / CHANGES, _changes(folder / CHANGES) + entry)
    return paths


def baseline_diff(df: pd.DataFrame, directory: str | os.PathLike[str]) -> pd.DataFrame:
    """What `write_baselines` would change, as `baseline_changes.changes` describes it; refuses what that refuses."""
    return changes(*old_and_new(df, Path(directory)))


def old_and_new(df: pd.DataFrame, folder: Path) -> tuple[Rows, Rows]:
    """Rows by key: those of the baseline files that the run would replace, and those of the run."""
    groups = combinations(df)
    _refuse_bad_run(df, groups)
    new = _by_key(groups[list(BASELINE_COLUMNS)])
    paths = [folder / name for name in dict.fromkeys(_file_name(*key[:2]) for key in new)]
    old = {key: row for path in paths if path.exists() for key, row in _by_key(read_baseline(path)).items()}
    return old, new


def _by_key(table: pd.DataFrame) -> Rows:
    rows = [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
    return {tuple(row[name] for name in KEYS): row for row in rows}


def _kept(old: Rows, new: Rows) -> Rows:
    return {key: old[key] if key in old and unchanged(row, old[key]) else row for key, row in new.items()}


def _refuse_bad_run(df: pd.DataFrame, groups: pd.DataFrame) -> None:
    faults = row_faults(df)
    bad = df[faults != ""]
    if len(bad):
        first = f"{where(bad.iloc[0])}, case {bad['case_id'].iloc[0]}: {faults[faults != ''].iloc[0]}"
        raise ValueError(f"no baseline from a run with {len(bad)} failed row(s); the first: {first}")
    if df.loc[df["verdict"].isin(JUDGED), "compared"].sum() == 0:
        raise ValueError("no baseline from a run that compared nothing")
    empty = nothing_compared(groups)
    if empty:
        raise ValueError(f"no baseline from a run that compared nothing in: {empty[0]} (and {len(empty) - 1} more)")


def _file_name(arch: str, engine: str) -> str:
    for name, value in (("arch", arch), ("engine", engine)):
        if not re.fullmatch(r"[A-Za-z0-9_]+", value):
            raise ValueError(f"{name} must be letters, digits and '_' to name a baseline file, got {value!r}")
    return f"{arch}-{engine}.csv"


def _to_csv(rows: pd.DataFrame) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(BASELINE_COLUMNS)
    for row in rows.to_dict("records"):
        floats = ["" if math.isnan(row[name]) else repr(float(row[name])) for name in FLOATS]
        writer.writerow([*(row[name] for name in (*KEYS, *COUNTS)), *floats])
    return out.getvalue()


def _changes(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else _HEADER


def _change_line(df: pd.DataFrame, names: list[str], reason: str) -> str:
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    made_by = "; ".join(f"{name} {value}" for name, value in environment(df).items())
    return f"- {now}: {', '.join(names)}: {' '.join(reason.split())} ({made_by})\n"


@dataclass(frozen=True)
class Line:
    """A row of a baseline, and the file and line it is on."""

    row: dict[str, Any]
    file: str
    number: int


def read_baseline(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The rows of one baseline file, with the columns of `baseline_frame`; errors as `baseline_lines`."""
    return pd.DataFrame([line.row for line in baseline_lines(path)], columns=list(BASELINE_COLUMNS))


def baseline_lines(path: str | os.PathLike[str]) -> list[Line]:
    """The rows of one baseline file, each with its place.

    Raises: RowsError that names the file and what is wrong: missing or foreign column, a value that is no number,
    a repeated row, or rows that do not belong to the file's name.
    """
    source = Path(path)
    try:
        with source.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _check_header(source, list(reader.fieldnames or []))
            lines = [Line(_parse(source, reader.line_num, texts), str(source), reader.line_num) for texts in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RowsError(f"{source}: not a baseline file: {error}") from error
    seen: set[tuple[Any, ...]] = set()
    for line in lines:
        row, key = line.row, tuple(line.row[name] for name in KEYS)
        if key in seen:
            raise RowsError(f"{source}: repeated row: {where(row)}")
        seen.add(key)
        if source.name != f"{row['arch']}-{row['engine']}.csv":
            raise RowsError(f"{source}: holds a row of {row['arch']} on {row['engine']}, which its name does not say")
    if not lines:
        raise RowsError(f"{source}: holds no rows")
    return lines


def _check_header(source: Path, names: list[str]) -> None:
    missing = [name for name in BASELINE_COLUMNS if name not in names]
    foreign = [name for name in names if name not in BASELINE_COLUMNS]
    for word, found in (("missing", missing), ("foreign", foreign)):
        if found:
            raise RowsError(f"{source}: {word} column(s): {', '.join(found)}")


def _parse(source: Path, line: int, texts: dict[str, Any]) -> dict[str, Any]:
    if None in texts or None in texts.values():
        raise RowsError(f"{source}, line {line}: it has more or fewer cells than columns")
    row: dict[str, Any] = dict(texts)
    for name in ("tp_size", *COUNTS, *FLOATS):
        text = texts[name]
        try:
            row[name] = int(text) if name not in FLOATS else float(text or "nan")
        except ValueError:
            raise RowsError(f"{source}, line {line}: {name} must be a number, got {text!r}") from None
    if not 0 <= row["mismatched"] <= row["compared"] or row["compared"] < 1:
        counts = f"compared={row['compared']}, mismatched={row['mismatched']}"
        raise RowsError(f"{source}, line {line}: {counts}: at least 1 compared, and no more mismatched than that")
    return row
