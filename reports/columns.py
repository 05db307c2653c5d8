"""The one row format of every result, version 2.

One row per (run, arch, engine, implementation, stage, oracle, case). A row says what was compared, how far
off it was, and what was decided; nothing in a later table comes from anywhere else.

Metrics other than the margins are for people and never decide. NaN in a float column means "does not apply
to this oracle or stage" - except in the margins of an oracle that has one (`MARGIN_ORACLES`), where NaN is a
failure.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 2

ORACLES = ("bits", "exact", "attainable", "bound", "format")
"""Strongest first; `exact`: properties that hold bit for bit without a truth, e.g. alone and in a batch."""
MARGIN_ORACLES = ("bound", "format")
"""Oracles whose verdict is margin <= 1 for each element, so a judged row must have its margins."""
EVIDENCE = ("measured", "published", "assumed")
VERDICTS = ("pass", "fail", "not applicable", "skipped")
JUDGED = ("pass", "fail")
"""Verdicts of a comparison that took place. The counts of other rows enter no sum."""
STAGES = ("quantize", "wo_a", "wo_b", "reduce", "o_proj")
"""Known stages in the order of the data; tables sort by it. Other names are allowed and come after."""
MARGINS = ("margin_max", "margin_p999", "margin_p50")


class RowsError(ValueError):
    """Rows, or a file of rows, that cannot be used; the message names the thing."""


class NoRowsError(RowsError):
    """A well-formed place that holds no rows: nothing was recorded, hence nothing compared."""


@dataclass(frozen=True)
class Column:
    """One column: its pandas dtype ('category' and 'string' hold text), default and meaning."""

    name: str
    dtype: str
    meaning: str
    required: bool = True


def _optional(name: str, dtype: str, meaning: str) -> Column:
    return Column(name, dtype, meaning, required=False)


COLUMNS: tuple[Column, ...] = (
    _optional("schema_version", "int64", "version of this table"),
    Column("run_id", "category", "name of the run: letters, digits, '.', '_' and '-'"),
    Column("time_utc", "string", "ISO 8601 time with the offset of UTC"),
    Column("git_revision", "category", "revision of the suite"),
    Column("arch", "category", "architecture row, e.g. sm90"),
    Column("engine", "category", "who did the arithmetic: software, deep_gemm"),
    Column("implementation", "category", "name of the implementation under test"),
    _optional("spec", "category", "what --implementation takes to judge it again, or '' for an engine's own"),
    Column("stage", "category", "quantize, wo_a, wo_b, reduce, o_proj"),
    Column("oracle", "category", ", ".join(ORACLES)),
    Column("evidence", "category", "what stands behind the arch row: measured, published or assumed"),
    Column("preset", "category", "model preset, or '' for plain dims"),
    Column("tp_size", "int64", "tensor parallel size"),
    Column("tp_rank", "int64", "tensor parallel rank"),
    Column("tokens", "int64", "tokens of the case"),
    Column("family", "category", "input family"),
    Column("variant", "category", "implementation variant, or ''"),
    Column("case_id", "string", "short id of the case"),
    Column("case", "string", "the case as one line of JSON; replay takes it"),
    Column("compared", "int64", "elements that were compared"),
    Column("mismatched", "int64", "compared elements that failed the oracle"),
    _optional("margin_max", "float64", "largest abs(error) / bound; at most 1 passes"),
    _optional("margin_p999", "float64", "99.9th percentile of abs(error) / bound"),
    _optional("margin_p50", "float64", "median of abs(error) / bound"),
    _optional("rms_rel_error", "float64", "root of the mean squared relative error"),
    _optional("signed_bias", "float64", "mean signed relative error"),
    _optional("calc_diff", "float64", "1 - 2<x,y> / (<x,x> + <y,y>)"),
    _optional("sqnr_db", "float64", "signal over error, in dB"),
    _optional("ulp_max", "float64", "largest distance in steps of the output format"),
    _optional("ulp_histogram", "string", "JSON: distance in steps -> elements; '' where it does not apply"),
    _optional("ambiguous", "float64", "attainable: share of elements with more than one legal code"),
    _optional("first_bad", "string", "JSON: coordinate and values of the first failed element, or ''"),
    _optional(
        "error_map", "string", "JSON: where the error sits, of the comparison that tells most of its Case; else ''"
    ),
    Column("seconds", "float64", "time of the case"),
    Column("verdict", "category", "pass, fail, not applicable or skipped"),
    _optional("reason", "string", "why it failed, does not apply or was skipped"),
    Column("versions", "category", "JSON object: software, driver and device versions"),
)

BY_NAME = {column.name: column for column in COLUMNS}
NAMES = tuple(BY_NAME)
WORDS = {"oracle": ORACLES, "evidence": EVIDENCE, "verdict": VERDICTS}
"""Columns that hold one of a few words."""
