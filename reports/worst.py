"""Which rows to look at first: the worst, and the Cases that fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from .aggregate import FAULT_NAN, row_faults
from .columns import JUDGED, MARGIN_ORACLES, ORACLES, STAGES
from .formatting import records
from .schema import validate

_WORST_COLUMNS = [
    "arch", "engine", "implementation", "spec", "stage", "oracle", "family", "preset", "tp_size", "tokens", "case_id",
    "verdict", "fault", "margin_max", "mismatched", "compared", "ulp_max", "first_bad", "error_map", "reason", "case",
    "nan_margins",
]  # fmt: skip
_CASE_COLUMNS = [
    "arch", "engine", "implementation", "spec", "family", "preset", "tp_size", "tokens", "case_id", "case",
]  # fmt: skip


def worst_cases(df: pd.DataFrame, n: int = 20) -> pd.DataFrame:
    """The `n` worst judged rows, failures first. `fault` says why a row fails and is '' where it does not.

    Failures come in rounds: first the worst of each arch, stage and oracle, strongest oracle and first stage ahead,
    then the second of each, and so on; so none of these is hidden behind many failures of another. The worst are
    those with a NaN margin, then by margin, share of mismatched elements, and ULP; the rows that pass come so too.

    Raises: ValueError for a negative n, RowsError where `df` is not a frame of rows.
    """
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    judged = validate(df)[df["verdict"].isin(JUDGED)]
    fault = row_faults(judged)
    order = _worst_first(judged, (fault != "").to_numpy())[:n]
    nan_margins = (fault == FAULT_NAN).astype("int64")
    out = judged.iloc[order].assign(fault=fault.iloc[order], nan_margins=nan_margins.iloc[order])
    return out[_WORST_COLUMNS].reset_index(drop=True)


def _worst_first(judged: pd.DataFrame, failed: np.ndarray) -> np.ndarray:
    missing = judged["oracle"].isin(MARGIN_ORACLES) & judged["margin_max"].isna()
    worst = [
        judged["ulp_max"].fillna(-np.inf),
        judged["mismatched"] / judged["compared"].clip(lower=1),
        judged["margin_max"].fillna(-np.inf),
        missing,
    ]
    # lexsort takes its most significant key last, and sorts upward.
    keys = [-key.to_numpy(dtype=float) for key in worst]
    order = np.lexsort([*keys, ~failed])
    count = int(failed.sum())
    order[:count] = _in_rounds(judged, order[:count])
    return order


def _in_rounds(judged: pd.DataFrame, order: np.ndarray) -> np.ndarray:
    """`order` so that the first of each arch, stage and oracle comes before the second of any."""
    rows = judged[["arch", "stage", "oracle"]].iloc[order]
    turn = rows.groupby(["arch", "stage", "oracle"], observed=True, sort=False).cumcount().to_numpy()
    ranks = [_ranks(rows[name], known) for name, known in (("stage", STAGES), ("oracle", ORACLES))]
    return order[np.lexsort([*ranks, turn])]


def row_sample(df: pd.DataFrame, n: int) -> pd.DataFrame:
    """The `n` judged rows that are most worth a look, failures first: as `worst_cases`, but the rows that pass come in
    rounds too, so that each arch, stage and oracle is there with its worst."""
    judged = validate(df)[df["verdict"].isin(JUDGED)]
    failed = (row_faults(judged) != "").to_numpy()
    order = _worst_first(judged, failed)
    count = int(failed.sum())
    order[count:] = _in_rounds(judged, order[count:])
    return judged.iloc[order[:n]]


def _ranks(values: pd.Series, known: tuple[str, ...]) -> np.ndarray:
    places = {name: place for place, name in enumerate(known)}
    if isinstance(values.dtype, pd.CategoricalDtype):
        of_category = np.array([places.get(value, len(known)) for value in values.cat.categories], dtype=np.int64)
        return of_category[values.cat.codes.to_numpy()] if len(values) else np.zeros(0, dtype=np.int64)
    return np.array([places.get(value, len(known)) for value in values], dtype=np.int64)


def failing_cases(df: pd.DataFrame, n: int = 20) -> tuple[list[dict[str, Any]], int]:
    """The `n` first failing Cases in the order of `worst_cases`, and how many Cases fail at all.

    Each is a dict of arch, engine, implementation, spec, family, preset, tp_size, tokens, case_id, case, and
    `failures`: its failed rows as dicts of `worst_cases`, first stage first.

    Raises: ValueError for a negative n, RowsError where `df` is not a frame of rows.
    """
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    failed = worst_cases(df, int((row_faults(validate(df)) != "").sum()))
    number = failed.groupby(_CASE_COLUMNS, observed=True, sort=False).ngroup()
    cases: list[dict[str, Any]] = []
    for _, rows in failed[number < n].groupby(number[number < n], sort=True):
        # The first stage that is off spoils those behind it.
        ranks = (_ranks(rows[name], known) for name, known in (("oracle", ORACLES), ("stage", STAGES)))
        failures = records(rows.iloc[np.lexsort([*ranks])])
        cases.append({**{name: failures[0][name] for name in _CASE_COLUMNS}, "failures": failures})
    return cases, int(number.max()) + 1 if len(number) else 0
