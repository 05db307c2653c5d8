"""Making rows and frames of the schema, and refusing what is not one.

The columns themselves, with their meanings, are in `columns.py`.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from .aggregate import rank
from .columns import BY_NAME, COLUMNS, JUDGED, NAMES, SCHEMA_VERSION, WORDS, Column, RowsError

_NOT_EMPTY = ("run_id", "arch", "engine", "implementation", "stage", "case_id")
_JSON = ("case", "ulp_histogram", "first_bad", "error_map", "versions")
_DEFAULTS: dict[str, Any] = {"int64": 0, "float64": math.nan, "category": "", "string": ""}
_ARROW = {"int64": pa.int64(), "float64": pa.float64(), "category": pa.string(), "string": pa.string()}

ARROW_SCHEMA = pa.schema([pa.field(c.name, _ARROW[c.dtype], nullable=False) for c in COLUMNS])
"""Types on disk; text is plain UTF-8 there, and becomes categorical when it is read."""
STRING_DTYPE = pd.StringDtype("pyarrow")


def make_row(**fields: Any) -> dict[str, Any]:
    """One row as a plain dict in column order, every column present and of its type.

    Metrics that are left out become NaN or '' ("does not apply"); `schema_version` is filled in. NumPy
    scalars are taken.

    Raises: ValueError for an unknown or missing name or a value out of its range, TypeError for a wrong type.
    """
    unknown = [name for name in fields if name not in BY_NAME]
    if unknown:
        raise ValueError(f"unknown row field(s): {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}")
    missing = [c.name for c in COLUMNS if c.required and c.name not in fields]
    if missing:
        raise ValueError(f"missing row field(s): {', '.join(missing)}")
    given = {"schema_version": SCHEMA_VERSION, **fields}
    row = {c.name: _typed(c, given.get(c.name, _DEFAULTS[c.dtype])) for c in COLUMNS}
    _check_values(row)
    return row


def _typed(column: Column, value: Any) -> Any:
    convert = {"int64": _as_int, "float64": _as_float}.get(column.dtype, _as_text)
    return convert(column.name, value)


def _as_int(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got the truth value {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}") from None
    if not 0 <= number < 2**63:
        raise ValueError(f"{name} must lie in 0 .. 2**63 - 1, got {number}")
    return number


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, (bool, np.bool_, str)) or value is None:
        raise TypeError(f"{name} must be a number (NaN where it does not apply), got {value!r}")
    try:
        return float(value)
    except TypeError:
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}") from None


def _as_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {value!r} of type {type(value).__name__}")
    if "\0" in value or any(0xD800 <= ord(char) <= 0xDFFF for char in value):
        raise ValueError(f"{name} must be UTF-8 text without NUL, got {value!r}")
    return value


def _check_values(row: dict[str, Any]) -> None:
    if row["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema_version must be {SCHEMA_VERSION}, got {row['schema_version']}")
    for name, words in WORDS.items():
        if row[name] not in words:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {row[name]!r}")
    for name in _NOT_EMPTY:
        if not row[name]:
            raise ValueError(f"{name} must not be empty")
    if row["mismatched"] > row["compared"]:
        raise ValueError(f"mismatched must be at most compared, got {row['mismatched']} of {row['compared']}")
    if row["verdict"] not in JUDGED and not row["reason"]:
        raise ValueError(f"a row with verdict {row['verdict']!r} needs a reason")
    check_run_id(row["run_id"])
    _check_time(row["time_utc"])
    for name in _JSON:
        _check_json(name, row[name])


def check_run_id(run_id: str) -> str:
    """`run_id` itself, or ValueError where it could not be part of a file name."""
    if not isinstance(run_id, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", run_id):
        raise ValueError(f"run_id must be ASCII letters, digits, '_', '-', '.' (not first), got {run_id!r}")
    return run_id


def _check_time(text: str) -> None:
    try:
        offset = datetime.fromisoformat(text.replace("Z", "+00:00")).utcoffset()
    except ValueError:
        offset = None
    if offset != timedelta(0):
        raise ValueError(f"time_utc must be ISO 8601 in UTC, e.g. 2026-01-31T12:00:00Z, got {text!r}")


def _check_json(name: str, text: str) -> None:
    if text == "" and not BY_NAME[name].required:
        return
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} must be JSON, got {text!r}: {error}") from None
    if name in ("case", "versions") and not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {text!r}")
    if name == "case" and len(text.splitlines()) != 1:
        raise ValueError(f"case must be one line of JSON, got {text!r}")


def from_rows(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows of `make_row`, checked again, as one frame with the dtypes of `COLUMNS`."""
    checked = [make_row(**row) for row in rows]
    return from_arrow(pa.Table.from_pylist(checked, schema=ARROW_SCHEMA))


def empty_frame() -> pd.DataFrame:
    """A frame with every column and no rows."""
    return from_rows([])


def from_arrow(table: pa.Table) -> pd.DataFrame:
    """An Arrow table as a frame: text columns of the schema get their dtypes, their categories sorted as people expect
    (`aggregate.rank`); all others stay as they are."""
    for index, field in enumerate(table.schema):
        column = BY_NAME.get(field.name)
        if column is not None and column.dtype in ("category", "string") and _is_text(field.type):
            values = table.column(index)
            if column.dtype == "string":
                values = values.cast(pa.string())
            elif not pa.types.is_dictionary(field.type):
                values = values.cast(pa.string()).dictionary_encode()
            table = table.set_column(index, field.name, values)
    mapper: Callable[[pa.DataType], Any] = {pa.string(): STRING_DTYPE}.get
    df = table.unify_dictionaries().to_pandas(types_mapper=mapper)
    for name in df.columns:
        if name in BY_NAME and isinstance(df[name].dtype, pd.CategoricalDtype):
            df[name] = df[name].cat.reorder_categories(sorted(df[name].cat.categories, key=partial(rank, name)))
    return df


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def validate(df: pd.DataFrame) -> pd.DataFrame:
    """`df` itself where it is a frame of this schema.

    Text may be of any text dtype; numbers must be int64 and float64 as the schema says. Columns may come in
    any order.

    Raises: RowsError that names the missing, foreign or repeated column, the wrong dtype, the schema version,
    or the value out of its range.
    """
    _check_names([str(name) for name in df.columns])
    for column in COLUMNS:
        _check_dtype(column, df[column.name])
    versions = sorted(set(df["schema_version"].unique()) - {SCHEMA_VERSION})
    if versions:
        raise RowsError(f"schema_version must be {SCHEMA_VERSION}, found {', '.join(map(str, versions))}")
    for name, words in WORDS.items():
        foreign = sorted(set(df[name].unique()) - set(words))
        if foreign:
            raise RowsError(f"column {name} must hold {', '.join(map(repr, words))}; found {foreign[0]!r}")
    for column in COLUMNS:
        if column.dtype == "int64" and (df[column.name] < 0).any():
            raise RowsError(f"column {column.name} has a negative number: {df[column.name].min()}")
    if (df["mismatched"] > df["compared"]).any():
        row = df[df["mismatched"] > df["compared"]].iloc[0]
        counts = f"mismatched {row['mismatched']} exceeds compared {row['compared']}"
        raise RowsError(f"case {row['case_id']}: {counts}")
    return df


def _check_names(names: list[str]) -> None:
    missing = [name for name in NAMES if name not in names]
    if missing:
        raise RowsError(f"missing column(s): {', '.join(missing)}")
    foreign = [name for name in names if name not in BY_NAME]
    if foreign:
        raise RowsError(f"foreign column(s): {', '.join(foreign)}")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise RowsError(f"repeated column(s): {', '.join(repeated)}")


def _check_dtype(column: Column, values: pd.Series) -> None:
    if column.dtype in ("int64", "float64"):
        if str(values.dtype) != column.dtype:
            raise RowsError(f"column {column.name} must be {column.dtype}, it is {values.dtype}")
        return
    held = values.cat.categories if isinstance(values.dtype, pd.CategoricalDtype) else values
    text = len(held) == 0 or isinstance(held.dtype, pd.StringDtype)
    if not text and pd.api.types.infer_dtype(held, skipna=True) != "string":
        raise RowsError(f"column {column.name} must be text, it is {held.dtype}")
    if values.isna().any():
        raise RowsError(f"column {column.name} has {int(values.isna().sum())} missing value(s)")
