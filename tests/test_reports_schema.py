"""A row is complete and typed, or refused by name."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports import RowsError, empty_frame, from_rows, make_row, validate
from reports.columns import COLUMNS, NAMES, SCHEMA_VERSION
from reports_rows import PLAIN, frame, frames, row


def test_a_row_has_every_column_in_order_and_fills_what_does_not_apply():
    made = row()
    assert tuple(made) == NAMES
    assert made["schema_version"] == SCHEMA_VERSION
    assert math.isnan(made["sqnr_db"])
    assert made["first_bad"] == ""


def test_every_column_has_a_meaning_and_a_known_dtype():
    assert all(column.meaning for column in COLUMNS)
    assert {column.dtype for column in COLUMNS} == {"int64", "float64", "category", "string"}


@pytest.mark.parametrize("name", [column.name for column in COLUMNS if column.required])
def test_a_missing_name_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"missing row field\(s\): {name}$"):
        make_row(**{key: value for key, value in PLAIN.items() if key != name})


@given(st.text(min_size=1).filter(lambda name: name not in NAMES))
def test_an_unknown_name_is_refused_by_name(name):
    with pytest.raises(ValueError, match=re.escape(f"unknown row field(s): {name};")):
        make_row(**PLAIN, **{name: 1})


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_a_value_of_the_wrong_type_is_refused_by_name(column):
    wrong = {"int64": [1.5, "1", True, None], "float64": ["1", None, True, [1]]}.get(column.dtype, [1, None, b"x"])
    for value in wrong:
        with pytest.raises(TypeError, match=rf"^{column.name} must be"):
            row(**{column.name: value})


BAD_VALUES = [
    ("schema_version", 1),
    ("compared", -1),
    ("compared", 2**63),
    ("mismatched", 1001),
    ("tokens", -1),
    ("oracle", "eyesight"),
    ("evidence", "hearsay"),
    ("verdict", "passed"),
    ("arch", ""),
    ("stage", ""),
    ("case_id", ""),
    ("run_id", "a/b"),
    ("run_id", ".hidden"),
    ("run_id", ""),
    ("time_utc", "yesterday"),
    ("time_utc", "2026-01-31T12:00:00"),
    ("time_utc", "2026-01-31T12:00:00+01:00"),
    ("case", "{"),
    ("case", "[1]"),
    ("case", '{"a":\n1}'),
    ("versions", "numpy 2"),
    ("versions", ""),
    ("ulp_histogram", "{1: 2}"),
    ("first_bad", "(0, 1)"),
    ("family", "\0"),
    ("family", "\ud800"),
]


@pytest.mark.parametrize("name, value", BAD_VALUES)
def test_a_value_out_of_its_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"\b{name} must"):
        row(**{name: value})


@pytest.mark.parametrize("verdict", ["skipped", "not applicable"])
def test_a_row_that_was_not_judged_says_why(verdict):
    with pytest.raises(ValueError, match="needs a reason"):
        row(verdict=verdict)
    assert row(verdict=verdict, reason="no such GPU")["verdict"] == verdict


def test_numpy_scalars_become_plain_numbers():
    made = row(compared=np.int32(7), seconds=np.float32(0.5), margin_max=1)
    assert [type(made[name]) for name in ("compared", "seconds", "margin_max")] == [int, float, float]


@given(frames)
@settings(max_examples=30)
def test_frames_of_rows_are_valid_with_the_dtypes_of_the_schema(df):
    assert validate(df) is df
    for column in COLUMNS:
        assert str(df[column.name].dtype) == column.dtype


def test_the_empty_frame_is_valid_and_has_the_dtypes_of_the_schema():
    df = validate(empty_frame())
    assert len(df) == 0
    assert {name: str(df[name].dtype) for name in NAMES} == {column.name: column.dtype for column in COLUMNS}


@pytest.mark.parametrize("dtype", ["object", "string", "category"])
def test_text_is_valid_in_any_text_dtype(dtype):
    df = frame({}, {})
    names = [column.name for column in COLUMNS if column.dtype in ("category", "string")]
    validate(df.astype(dict.fromkeys(names, dtype)))


BROKEN_FRAMES = {
    r"missing column\(s\): margin_max$": lambda df: df.drop(columns="margin_max"),
    r"foreign column\(s\): colour$": lambda df: df.assign(colour="red"),
    r"repeated column\(s\): arch$": lambda df: pd.concat([df, df[["arch"]]], axis=1),
    r"column compared must be int64, it is float64": lambda df: df.astype({"compared": "float64"}),
    r"column seconds must be float64, it is int64": lambda df: df.assign(seconds=1),
    r"column family must be text, it is int64": lambda df: df.assign(family=1),
    r"column reason must be text": lambda df: df.assign(reason=pd.Series([1, "x"], dtype=object)),
    r"column variant must be text": lambda df: df.assign(variant=pd.Categorical([1, 2])),
    r"column family has 2 missing": lambda df: df.assign(family=pd.Series([None, None], dtype="string")),
    r"schema_version must be 2, found 9": lambda df: df.assign(schema_version=9),
    r"column verdict must hold .*'passed'": lambda df: df.assign(verdict="passed"),
    r"column oracle must hold .*'eyes'": lambda df: df.assign(oracle="eyes"),
    r"column tokens has a negative number: -1": lambda df: df.assign(tokens=-1),
    r"case c0: mismatched 1001 exceeds compared 1000": lambda df: df.assign(mismatched=1001),
}


@pytest.mark.parametrize("message", BROKEN_FRAMES)
def test_a_broken_frame_is_refused_and_what_is_broken_is_named(message):
    with pytest.raises(RowsError, match=message):
        validate(BROKEN_FRAMES[message](frame({}, {})))


def test_rows_of_no_schema_make_no_frame():
    with pytest.raises(TypeError, match="arch must be text, got 3"):
        from_rows([{**row(), "arch": 3}])
    with pytest.raises(ValueError, match=r"missing row field\(s\): run_id"):
        from_rows([{}])
