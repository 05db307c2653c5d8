"""Rows on disk: Parquet parts that survive a kill, and CSV for other programs.

A run writes `rows-<run_id>-<nnnn>.parquet`, each part whole or absent. A run that ends by itself with many parts joins
them in `rows-<run_id>-<first>to<last>.parquet`, which loads several times faster. `load` reads a part, a folder of
parts or a CSV file, and refuses by name whatever is not that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from .columns import COLUMNS, NoRowsError, RowsError
from .files import write_atomically
from .schema import ARROW_SCHEMA, check_run_id, from_arrow, make_row, validate

_PART = re.compile(r"rows-(?P<run>.+)-(?P<first>\d{4,})(?:to(?P<last>\d{4,}))?\.parquet")
_CATEGORIES = [column.name for column in COLUMNS if column.dtype == "category"]
_READERS = 4
_MANY = 16
"""Parts above which a run that ends joins them."""
_GROUP = 50_000
"""Rows of a joined file that are held at once, and that are one row group of it."""
_LEFT = re.compile(r"\.rows-.+\.parquet\..+\.tmp")
"""What a killed process leaves of the part that it was writing."""
_FORMAT: dict[str, Any] = {"use_dictionary": _CATEGORIES, "write_statistics": False}
"""Files are read whole: dictionaries of unlike values and statistics would only cost time."""


class RowWriter:
    """Appends rows of one run to a folder, a part as soon as there are `flush_every` rows and one at the end.

    Use it as a context manager: leaving it, also by an exception, writes what is buffered. A killed process loses at
    most the rows since the last part, also while parts are joined at the end. Opening the same run again goes on behind
    its last part; two writers of one run_id in one folder at the same time are not supported.

    Raises: ValueError for a run_id that cannot be part of a file name or a `flush_every` below 1.
    """

    def __init__(self, directory: str | os.PathLike[str], run_id: str, flush_every: int = 1000) -> None:
        if flush_every < 1:
            raise ValueError(f"flush_every must be at least 1, got {flush_every}")
        self.directory = Path(directory)
        self.run_id = check_run_id(run_id)
        self.flush_every = flush_every
        self.paths: list[Path] = []
        self._rows: list[dict[str, Any]] = []
        self._closed = False
        self.directory.mkdir(parents=True, exist_ok=True)
        self._next = next_part(self.directory, self.run_id)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row of `make_row`; ValueError where it is none or of another run, or after `close`."""
        self.extend([row])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows that belong together, such as those of a Case: all of them go into one part, or none anywhere.

        Whoever finds one of them in a folder, also after a kill, so has the others. Raises: as `append`.
        """
        if self._closed:
            raise ValueError(f"the writer of run {self.run_id!r} is closed")
        checked = [make_row(**row) for row in rows]
        for row in checked:
            if row["run_id"] != self.run_id:
                raise ValueError(f"run_id must be {self.run_id!r} in this writer, got {row['run_id']!r}")
        self._rows += checked  # in one step: a signal comes before or after it
        if len(self._rows) >= self.flush_every:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows as the next part; nothing where there are none."""
        if not self._rows:
            return
        table = pa.Table.from_pylist(self._rows, schema=ARROW_SCHEMA)
        path = self.directory / f"rows-{self.run_id}-{self._next:04d}.parquet"
        write_atomically(path, lambda temporary: pq.write_table(table, temporary, **_FORMAT))
        # Interrupted before this, the part is written again over itself, and its rows are not doubled.
        self._rows = []
        self.paths.append(path)
        self._next += 1

    def close(self) -> None:
        """Write what is left, and join the run's parts where they are many. Closing twice is allowed."""
        self.flush()
        self._closed = True
        if len(self._own()) > _MANY:
            self._join()

    def _own(self) -> list[_Part]:
        return [part for part in _live(_parts(self.directory)) if part.run == self.run_id]

    def _join(self) -> None:
        """All parts of the run in one file. Killed before they are gone, they are passed over beside it."""
        own = self._own()
        path = self.directory / f"rows-{self.run_id}-{own[0].first:04d}to{own[-1].last:04d}.parquet"
        write_atomically(path, lambda temporary: _write_joined([part.path for part in own], temporary))
        self.paths = [path]
        for part in _parts(self.directory):
            if part.run == self.run_id and part.path != path:
                part.path.unlink()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # whoever interrupted it waits for no more than what is buffered
            self.flush()
            self._closed = True


@dataclass(frozen=True, order=True)
class _Part:
    """A file of rows: which parts of which run it holds."""

    run: str
    first: int
    last: int
    path: Path


def _write_joined(paths: list[Path], target: Path) -> None:
    with pq.ParquetWriter(target, ARROW_SCHEMA, **_FORMAT) as writer:
        held: list[pa.Table] = []
        for path in paths:
            held.append(_read_part(path).cast(ARROW_SCHEMA))
            if sum(map(len, held)) >= _GROUP:
                writer.write_table(pa.concat_tables(held), row_group_size=_GROUP)
                held = []
        if held:
            writer.write_table(pa.concat_tables(held), row_group_size=_GROUP)


def load(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The rows of a Parquet part, of a folder of parts, or of a CSV file, as one validated frame.

    Columns of few different texts are categorical, their categories in the order people expect (sm90 before sm100,
    stages as the data flows), so that `df.groupby(["arch", "stage"], observed=True)` needs no sorting; other text is
    `string`, numbers are int64 and float64. The index counts the rows: nothing is hidden in it, and every column
    that `columns.py` lists can be grouped by. Pandas before 3 wants `observed=True`, else it makes a group for every
    combination of categories. A million rows take about a second on two cores, in one part or in a thousand.

    Raises: NoRowsError where the folder or file holds no row; RowsError (a ValueError) that names the file
    where it is absent, truncated, or not of this schema.
    """
    source = Path(path)
    if source.is_dir():
        df = _load_folder(source)
    elif not source.exists():
        raise RowsError(f"{source}: no such file or folder")
    elif source.suffix == ".parquet":
        df = _checked(source, from_arrow(_read_parquet(source)))
    elif source.suffix == ".csv":
        df = _checked(source, from_arrow(_read_csv(source)))
    else:
        raise RowsError(f"{source}: foreign file; rows are in a folder of parts, a .parquet or a .csv file")
    if df.empty:
        raise NoRowsError(f"{source}: holds no rows")
    return df


def next_part(directory: str | os.PathLike[str], run_id: str) -> int:
    """The number of the part that comes behind those of ``run_id`` in a folder, 0 where there are none.

    Raises: RowsError where a Parquet file there is no part.
    """
    return max((part.last for part in _parts(Path(directory)) if part.run == run_id), default=-1) + 1


def missing_parts(directory: str | os.PathLike[str], names: Iterable[str]) -> list[str]:
    """Those of ``names`` of parts that a folder has neither as a file nor within a joined one.

    Raises: RowsError where a Parquet file there is no part.
    """
    held = {(part.run, number) for part in _parts(Path(directory)) for number in range(part.first, part.last + 1)}
    matches = ((name, _PART.fullmatch(name)) for name in names)
    return [name for name, match in matches if match is None or (match["run"], int(match["first"])) not in held]


def remove_parts(directory: str | os.PathLike[str]) -> None:
    """Remove every part of earlier runs, whose rows would be taken for rows of the next one.

    Raises: RowsError where a Parquet file there is no part; nothing is removed then.
    """
    for part in _parts(Path(directory)):
        part.path.unlink()
    remove_unfinished(directory)


def remove_unfinished(directory: str | os.PathLike[str]) -> None:
    """Remove what killed processes left of parts that they had not finished; no process may be writing there now."""
    for path in Path(directory).glob(".rows-*.tmp"):
        if _LEFT.fullmatch(path.name):
            path.unlink(missing_ok=True)


def write_csv(df: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Write rows as CSV with every bit of every float, NaN as an empty cell; `load` reads them back equal."""
    plain = pa.schema([(field.name, field.type) for field in ARROW_SCHEMA])
    table = pa.Table.from_pandas(validate(df)[plain.names], preserve_index=False).cast(plain)
    return write_atomically(path, lambda temporary: pyarrow.csv.write_csv(table, temporary))


def _load_folder(folder: Path) -> pd.DataFrame:
    parts = _live(_parts(folder))
    if not parts:
        raise NoRowsError(f"{folder}: holds no rows-<run_id>-<nnnn>.parquet, so nothing was recorded")
    # Reading leaves the interpreter lock alone, so that parts are read side by side.
    with ThreadPoolExecutor(_READERS) as pool:
        tables = list(pool.map(_read_part, [part.path for part in parts]))
    return _checked(folder, from_arrow(pa.concat_tables(tables)))


def _parts(folder: Path) -> list[_Part]:
    """Each part in order. A Parquet file of another name is refused, since a part that was renamed would otherwise
    drop its rows without a word."""
    parts = []
    for path in folder.glob("*.parquet"):
        match = _PART.fullmatch(path.name)
        if match is None:
            raise RowsError(f"{path}: foreign file; parts are named rows-<run_id>-<nnnn>.parquet")
        parts.append(_Part(match["run"], int(match["first"]), int(match["last"] or match["first"]), path))
    return sorted(parts)


def _live(parts: list[_Part]) -> list[_Part]:
    """The parts without those that a joined file of the same run has already."""
    joined = [part for part in parts if part.last > part.first]

    def is_joined(part: _Part) -> bool:
        covers = (j for j in joined if j != part and j.run == part.run)
        return any(j.first <= part.first and part.last <= j.last for j in covers)

    return [part for part in parts if not is_joined(part)]


def _read_part(path: Path) -> pa.Table:
    table = _read_parquet(path)
    # One part of another shape must be named itself; joined tables would only show that some part is.
    expected = {field.name: field.type for field in ARROW_SCHEMA}
    for name in _CATEGORIES:
        expected[name] = pa.dictionary(pa.int32(), pa.string())
    found = {field.name: field.type for field in table.schema}
    if found != expected:
        _checked(path, from_arrow(table))
        name = next(name for name in expected if found[name] != expected[name])
        raise RowsError(f"{path}: column {name} is {found[name]}; a row file has {expected[name]}")
    return table


def _read_parquet(path: Path) -> pa.Table:
    try:
        with _open_parquet(path) as file:
            # For a small part Arrow's own threads cost more than they give.
            return file.read(use_threads=file.metadata.num_rows > _GROUP)
    except (pa.ArrowException, OSError) as error:
        raise RowsError(f"{path}: truncated or not a Parquet file: {error}") from error


def _open_parquet(path: Path) -> pq.ParquetFile:
    held = pa.py_buffer(path.read_bytes())  # one read; a part is small, and opening by name costs more than reading
    try:
        return pq.ParquetFile(held, read_dictionary=_CATEGORIES)
    except KeyError:
        # A text column is missing; `validate` says which.
        return pq.ParquetFile(held)


def _read_csv(path: Path) -> pa.Table:
    kinds = {name: pa.dictionary(pa.int32(), pa.string()) for name in _CATEGORIES}
    types = {field.name: kinds.get(field.name, field.type) for field in ARROW_SCHEMA}
    options = pyarrow.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=False)
    try:
        parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
        return pyarrow.csv.read_csv(path, parse_options=parse, convert_options=options)
    except (pa.ArrowException, OSError) as error:
        raise RowsError(f"{path}: not a CSV file of rows: {error}") from error


def _checked(source: Path, df: pd.DataFrame) -> pd.DataFrame:
    try:
        return validate(df)
    except RowsError as error:
        raise RowsError(f"{source}: {error}") from error
