"""From rows to groups: the one place where results are added up.

Only judged rows (verdict pass or fail) enter a figure. Over the rows of a group:

    compared, mismatched     sums
    margin_max, margin_p999,
    margin_p50               the largest of the rows'; for a percentile that is an upper bound of the
                             group's own, since the margins of single elements are not kept
    rms_rel_error            sqrt(sum(compared * rms^2) / sum(compared)), over the rows that have one
    signed_bias              sum(compared * bias) / sum(compared), over the rows that have one
    calc_diff, ulp_max       the largest of the rows'

A NaN margin where the oracle has margins makes the group's margin NaN, and the group fails.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from .columns import JUDGED, MARGIN_ORACLES, MARGINS, ORACLES, STAGES

NOTHING = "nothing compared"
FAULT_NAN = "a margin is NaN"
_LARGEST = (*MARGINS, "calc_diff", "ulp_max")
_COUNTS = ["cases", "not_judged", "compared", "mismatched", "nan_margins"]


def row_faults(df: pd.DataFrame) -> pd.Series:
    """For each row what makes it a failure, or ''. Text, indexed as `df`.

    A row fails by its verdict, and also where its verdict is 'pass' and its own figures say otherwise: that
    is a fault of whoever wrote the row, and must not look like a pass.
    """
    passed = df["verdict"] == "pass"
    has_margin = df["oracle"].isin(MARGIN_ORACLES)
    faults = {
        FAULT_NAN: _must_have_margins(df) & df[list(MARGINS)].isna().any(axis=1),
        "the comparison failed": df["verdict"] == "fail",
        "passed with nothing compared": passed & (df["compared"] == 0),
        "passed with mismatched elements": passed & (df["mismatched"] > 0),
        "passed with a margin above 1": passed & has_margin & ~(df["margin_max"] <= 1),
    }
    text = np.select([mask.to_numpy(dtype=bool) for mask in faults.values()], list(faults), default="")
    return pd.Series(text, index=df.index, dtype=object)


def _must_have_margins(df: pd.DataFrame) -> pd.Series:
    return df["verdict"].isin(JUDGED) & df["oracle"].isin(MARGIN_ORACLES) & (df["compared"] > 0)


def aggregate(df: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """One row per combination of `keys` that occurs, sorted; figures as the module says.

    Columns: the keys, cases and not_judged (rows), compared, mismatched, nan_margins (judged rows without a
    margin they must have), the margins, rms_rel_error, signed_bias, calc_diff, ulp_max, evidence (each that
    occurs), verdict. The verdict is 'fail' where any row
    fails, else 'not applicable' where no row applies, else 'nothing compared' where nothing was, else 'pass'.
    """
    keys = list(keys)
    groups = _prepared(df, keys).groupby(keys, observed=True, sort=False)
    sums = groups[[*_COUNTS, "not_applicable", "failed", "rows"]].sum()
    largest = groups[list(_LARGEST)].max()
    poisoned = groups[[f"nan_{name}" for name in MARGINS]].any()
    for name in MARGINS:
        largest[name] = largest[name].mask(poisoned[f"nan_{name}"])
    weighted = groups[["rms_sum", "rms_weight", "bias_sum", "bias_weight"]].sum()
    out = sums[_COUNTS].join(largest[list(MARGINS)])
    out["rms_rel_error"] = np.sqrt(_ratio(weighted["rms_sum"], weighted["rms_weight"]))
    out["signed_bias"] = _ratio(weighted["bias_sum"], weighted["bias_weight"])
    out = out.join(largest[["calc_diff", "ulp_max"]])
    out["evidence"] = groups["evidence"].agg(lambda values: ", ".join(sorted(set(values)))).astype(object)
    out["verdict"] = _verdicts(sums)
    return sort_rows(out.reset_index(), keys)


def overall_verdict(df: pd.DataFrame) -> str:
    """'fail' where any row fails, else 'nothing compared' where nothing was, else 'pass'."""
    if (row_faults(df) != "").any():
        return "fail"
    compared = df["compared"].where(df["verdict"].isin(JUDGED), 0).sum()
    return "pass" if compared > 0 else NOTHING


def _prepared(df: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    judged = df["verdict"].isin(JUDGED)
    out = df[keys].copy()
    out["evidence"] = df["evidence"].astype(object)
    out["rows"] = 1
    out["cases"] = judged.astype("int64")
    out["not_judged"] = 1 - out["cases"]
    out["not_applicable"] = (df["verdict"] == "not applicable").astype("int64")
    out["failed"] = (row_faults(df) != "").astype("int64")
    out["compared"] = df["compared"].where(judged, 0)
    out["mismatched"] = df["mismatched"].where(judged, 0)
    for name in _LARGEST:
        out[name] = df[name].where(judged)
    must_have = _must_have_margins(df)
    out["nan_margins"] = (must_have & df[list(MARGINS)].isna().any(axis=1)).astype("int64")
    for name in MARGINS:
        out[f"nan_{name}"] = must_have & df[name].isna()
    for short, values in (("rms", df["rms_rel_error"] ** 2), ("bias", df["signed_bias"])):
        weight = out["compared"].where(values.notna(), 0)
        out[f"{short}_weight"] = weight
        out[f"{short}_sum"] = (weight * values).where(weight > 0, 0.0)
    return out


def _ratio(total: pd.Series, weight: pd.Series) -> pd.Series:
    return total / weight.where(weight > 0)


def _verdicts(sums: pd.DataFrame) -> np.ndarray:
    conditions = [sums["failed"] > 0, sums["not_applicable"] == sums["rows"], sums["compared"] == 0]
    words = ["fail", "not applicable", NOTHING]
    return np.select([c.to_numpy(dtype=bool) for c in conditions], words, default="pass").astype(object)


def sort_rows(table: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """A small table sorted by `keys` as people expect, its key columns as plain text, with a new index."""
    table = table.copy()
    for key in keys:
        if isinstance(table[key].dtype, pd.CategoricalDtype):
            table[key] = table[key].astype(object)
    ranks = list(zip(*([rank(key, value) for value in table[key]] for key in keys)))
    order = sorted(range(len(table)), key=ranks.__getitem__)
    return table.iloc[order].reset_index(drop=True)


def rank(key: str, value: object) -> tuple[int, list[tuple[int, int, str]]]:
    """Stages and oracles by their place in the pipeline, other names so that sm90 comes before sm100."""
    known = {"stage": STAGES, "oracle": ORACLES}.get(key, ())
    place = known.index(str(value)) if value in known else len(known)
    parts = re.findall(r"[0-9]+|[^0-9]+", str(value))
    return place, [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
