"""One against another: architectures, engines or implementations of a run, and two runs.

A comparison of two engines, implementations or runs takes the Cases that both judged: figures of different Cases
do not tell engines apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from .aggregate import aggregate, row_faults, sort_rows
from .columns import JUDGED, RowsError
from .schema import validate

FIGURES = ("verdict", "margin_max", "mismatched", "signed_bias")
CASE_KEYS = ["arch", "stage", "oracle", "case_id"]
CHANGES = (
    "now fails", "no longer judged", "only in a", "worse", "other bias", "better", "now passes", "newly judged",
    "only in b", "equal",
)  # fmt: skip
"""What became of a row from run a to run b, what asks for attention first."""
_COMPARED = ["margin_max", "mismatched", "signed_bias"]
_KEPT = ["engine", "implementation", "family", "preset", "tp_size", "tokens", "verdict", *_COMPARED, "fault", "case"]


def arch_against_arch(df: pd.DataFrame, figures: Sequence[str] = FIGURES) -> pd.DataFrame:
    """One row per stage and oracle, and each of `figures` once per architecture ("margin_max sm90", ...).

    Figures are added up over all Cases of an architecture, as `aggregate.py` says; engines and implementations
    of one architecture are taken together.

    Raises: RowsError where `df` is not a frame of rows.
    """
    return _beside(validate(df), "arch", ["stage", "oracle"], figures)


def engine_against_engine(df: pd.DataFrame, figures: Sequence[str] = FIGURES, by: str = "engine") -> pd.DataFrame:
    """One row per arch, stage and oracle, and each of `figures` once per engine ("margin_max deep_gemm", ...).

    Only Cases that every engine has judged on that arch, stage and oracle; `cases` says how many. No rows where
    none is common. by: 'implementation' sets implementations side by side instead.

    Raises: RowsError where `df` is not a frame of rows, ValueError for another `by`.
    """
    if by not in ("engine", "implementation"):
        raise ValueError(f"by must be 'engine' or 'implementation', got {by!r}")
    judged = validate(df)[df["verdict"].isin(JUDGED)]
    keys = judged[CASE_KEYS].astype(object)
    sides = judged[by].astype(object)
    per_case = sides.groupby([keys[name] for name in CASE_KEYS], sort=False).transform("nunique")
    wanted = sides.groupby(keys["arch"], sort=False).transform("nunique")
    return _beside(judged[(per_case == wanted) & (wanted > 1)], by, ["arch", "stage", "oracle"], figures, cases=True)


def _beside(df: pd.DataFrame, by: str, keys: list[str], figures: Sequence[str], *, cases: bool = False) -> pd.DataFrame:
    table = aggregate(df, [*keys, by])
    out = table[keys].drop_duplicates().reset_index(drop=True)
    sides = list(sort_rows(table[[by]].drop_duplicates(), [by])[by])
    if cases:
        counts = df.groupby(keys, observed=True)["case_id"].nunique().rename("cases").reset_index().astype(object)
        out = out.merge(counts.astype({"cases": "int64"}), on=keys, how="left")
    for figure in figures:
        for side in sides:
            of_side = table.loc[table[by] == side, [*keys, figure]]
            out = out.merge(of_side.rename(columns={figure: f"{figure} {side}"}), on=keys, how="left")
    for name in out.columns:
        if name.startswith("verdict "):
            out[name] = out[name].astype(object).fillna("")
    return out


def run_against_run(df_a: pd.DataFrame, df_b: pd.DataFrame) -> pd.DataFrame:
    """The rows of two runs joined, one row per arch, stage, oracle and Case of either; what got worse comes first.

    Columns: arch, engine and implementation ("x → y" where they differ), stage, oracle, family, preset, tp_size,
    tokens, case_id, change (a word of `CHANGES`), verdict_a, verdict_b, then margin_max, mismatched and signed_bias
    each as _a, _b and _change (b - a), case. A figure that is not in one of the runs is NaN, a verdict ''. Rows that
    neither run judged are left out. `change`: a row fails as in `row_faults`; among rows that both pass or both fail
    the mismatched elements decide, then the largest margin, then the bias.

    Where a run has several engines or implementations, rows are joined by these too. Raises: RowsError where a frame
    is none of rows, or where a Case still occurs twice in one run.
    """
    runs = {"a": validate(df_a), "b": validate(df_b)}
    several = any(df.duplicated(CASE_KEYS).any() for df in runs.values())
    keys = [*CASE_KEYS, *(["engine", "implementation"] if several else [])]
    sides = [_side(df, keys, name) for name, df in runs.items()]
    out = sides[0].merge(sides[1], on=keys, how="outer", suffixes=("_a", "_b"), indicator="where")
    for name in _KEPT:
        if name not in (*keys, "verdict", "fault", *_COMPARED):
            out[name] = _joined(out.pop(f"{name}_a"), out.pop(f"{name}_b"))
    judged = out["verdict_a"].isin(JUDGED) | out["verdict_b"].isin(JUDGED)
    out = out[judged].reset_index(drop=True)
    for name in _COMPARED:
        out[f"{name}_change"] = out[f"{name}_b"] - out[f"{name}_a"]
    out["change"] = _changes(out)
    for name in ("verdict_a", "verdict_b"):
        out[name] = out[name].fillna("")
    figures = [f"{name}_{part}" for name in _COMPARED for part in ("a", "b", "change")]
    first = ["arch", "engine", "implementation", "stage", "oracle", "family", "preset", "tp_size", "tokens", "case_id"]
    out = out[[*first, "change", "verdict_a", "verdict_b", *figures, "case"]]
    place = out["change"].map({word: index for index, word in enumerate(CHANGES)})
    order = np.lexsort([-out[f"{name}_change"].fillna(0).abs() for name in _COMPARED[:2]] + [place])
    return out.iloc[order].reset_index(drop=True)


def changes_per_stage(joined: pd.DataFrame) -> pd.DataFrame:
    """A frame of `run_against_run` counted: one row per arch, stage and oracle, a column per kind of change that
    occurs, and the largest margin and the mismatched elements of both runs."""
    keys = ["arch", "stage", "oracle"]
    groups = joined.groupby(keys, sort=False)
    counts = joined.groupby([*keys, "change"], sort=False).size().unstack(fill_value=0)
    counts = counts[[word for word in CHANGES if word in counts]]
    largest = groups[["margin_max_a", "margin_max_b"]].max()
    sums = groups[["mismatched_a", "mismatched_b"]].sum().astype("int64")
    return sort_rows(counts.join(largest).join(sums).reset_index(), keys)


def _side(df: pd.DataFrame, keys: list[str], name: str) -> pd.DataFrame:
    twice = df.duplicated(keys)
    if twice.any():
        row = df[twice].iloc[0]
        where = ", ".join(f"{key} {row[key]}" for key in keys)
        raise RowsError(f"run {name} has more than one row of {where}; give the rows of one run")
    out = df.assign(fault=row_faults(df))[list(dict.fromkeys([*keys, *_KEPT]))].copy()
    for column in out.columns:
        if isinstance(out[column].dtype, pd.CategoricalDtype):
            out[column] = out[column].astype(object)
    missing = ~out["verdict"].isin(JUDGED)
    out[_COMPARED] = out[_COMPARED].astype("float64").mask(missing)
    return out


def _joined(a: pd.Series, b: pd.Series) -> pd.Series:
    """What both runs say, "x → y" where they differ; numbers of a Case are the same in both."""
    both = a.notna() & b.notna() & (a != b)
    out = a.where(a.notna(), b)
    if pd.api.types.is_numeric_dtype(out.dtype):
        return out.astype("int64")
    if both.any():
        out = out.astype(object).mask(both, a[both].astype(object) + " → " + b[both].astype(object))
    return out


def _changes(out: pd.DataFrame) -> pd.Series:
    judged_a, judged_b = (out[f"verdict_{side}"].isin(JUDGED) for side in "ab")
    failed_a, failed_b = (judged & (out[f"fault_{side}"] != "") for judged, side in ((judged_a, "a"), (judged_b, "b")))
    more = {name: out[f"{name}_change"].fillna(0) for name in _COMPARED}
    same = more["mismatched"] == 0
    words = {
        "only in a": out["where"] == "left_only",
        "only in b": out["where"] == "right_only",
        "no longer judged": judged_a & ~judged_b,
        "now fails": failed_b & ~failed_a,
        "now passes": failed_a & ~failed_b,
        "newly judged": judged_b & ~judged_a,
        "worse": (more["mismatched"] > 0) | (same & (more["margin_max"] > 0)),
        "better": (more["mismatched"] < 0) | (same & (more["margin_max"] < 0)),
        "other bias": more["signed_bias"] != 0,
    }
    masks = [mask.to_numpy(dtype=bool) for mask in words.values()]
    return pd.Series(np.select(masks, list(words), default="equal"), index=out.index, dtype=object)
