"""Where the error of a failed comparison sits: small maps over pairs of axes, as one line of JSON for its row.

A map has at most 16 x 16 tiles. A tile says which share of its elements is bad and, where there are margins, the
largest of them; elements along the axis that a map leaves out are all in its tiles.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from conformance.judge import FAIL, PASS, Verdict

MOST_TILES = 16
DIGITS = 3
"""Significant digits of a share and of a margin: enough for a colour and its tooltip."""
_AXES = {
    "quantize": ("token", "group", "channel"),
    "wo_a": ("token", "group", "rank"),
    "wo_b": ("token", "column"),
    "reduce": ("token", "column"),
    "o_proj": ("token", "column"),
}
_PAIRS = {1: ((0, 0),), 2: ((0, 1),), 3: ((1, 2), (0, 1))}


class _Comparison(Protocol):
    @property
    def elements(self) -> NDArray[Any] | None: ...

    @property
    def margin_max(self) -> float: ...


class _Result(Protocol):
    """What a map needs of a `StageResult`."""

    @property
    def stage(self) -> str: ...

    @property
    def oracle(self) -> str: ...

    @property
    def comparison(self) -> _Comparison: ...

    @property
    def verdict(self) -> Verdict: ...


def maps_of(results: Sequence[_Result]) -> list[str]:
    """The `error_map` of each row of a Case: of the one that tells most, '' for the others, which keeps rows small.

    Where comparisons fail, the one of the first stage that is off, of the oracle `bound` where that has failed, since
    it has margins too. Else the one with the largest margin, where it is large (`compare.LARGE`).
    """
    texts = [""] * len(results)
    place = _most_telling(results)
    if place is not None:
        elements = results[place].comparison.elements
        texts[place] = "" if elements is None else error_map(elements, results[place].stage)
    return texts


def _most_telling(results: Sequence[_Result]) -> int | None:
    having = [n for n, one in enumerate(results) if one.comparison.elements is not None]
    failed = [n for n in having if results[n].verdict.status == FAIL]
    if failed:
        of_first = [n for n in failed if results[n].stage == results[failed[0]].stage]
        return next((n for n in of_first if results[n].oracle == "bound"), of_first[0])
    passed = [n for n in having if results[n].verdict.status == PASS]
    return max(passed, key=lambda n: results[n].comparison.margin_max, default=None)


def error_map(margins_or_bad: NDArray[Any], stage: str) -> str:
    """JSON of where elements are bad: ``{"maps": [{"rows", "columns", "shape", "share", "max"}, ...]}``.

    margins_or_bad: one entry per element, 1 to 3 axes with tokens first; bool (True is bad) or floating-point margins,
    of which each that is not <= 1 is bad. stage: names the axes; one that is not known gets the names ``axis 0``, ...
    A tensor [token, group, x] makes two maps, group against x and token against group; others make one. ``shape``:
    elements along rows and columns before tiling. ``share``: bad elements of each tile over its elements. ``max``: the
    largest margin of each tile, ``"inf"`` for one without limit or NaN; null without margins.

    '' where there is no element. Raises ``TypeError`` for another dtype, ``ValueError`` for another number of axes.
    """
    values = np.asarray(margins_or_bad)
    if values.dtype != np.bool_ and not np.issubdtype(values.dtype, np.floating):
        raise TypeError(f"margins_or_bad has dtype {values.dtype}; expected bool or floating-point margins")
    if values.ndim not in _PAIRS:
        raise ValueError(f"margins_or_bad has shape {list(values.shape)}; expected 1 to 3 axes, tokens first")
    if not values.size:
        return ""
    margins = None if values.dtype == np.bool_ else np.where(np.isnan(values), np.inf, values)
    bad = values if margins is None else ~(margins <= 1)
    names = _axis_names(stage, values.ndim)
    maps = [_map(bad, margins, names, rows, columns) for rows, columns in _PAIRS[values.ndim]]
    return json.dumps({"maps": maps}, separators=(",", ":"))


def _axis_names(stage: str, axes: int) -> tuple[str, ...]:
    known = _AXES.get(stage, ())
    return known if len(known) == axes else tuple(f"axis {axis}" for axis in range(axes))


def _map(
    bad: NDArray[np.bool_], margins: NDArray[Any] | None, names: tuple[str, ...], rows: int, columns: int
) -> dict[str, Any]:
    if bad.ndim == 1:  # one row of tiles
        bad, margins, names = bad[None], None if margins is None else margins[None], ("", names[0])
        rows, columns = 0, 1
    share = _tiled(bad.astype(np.float64), rows, columns, np.add) / _tiled(np.ones(bad.shape), rows, columns, np.add)
    largest = None if margins is None else _tiled(margins, rows, columns, np.maximum)
    return {
        "rows": names[rows],
        "columns": names[columns],
        "shape": [bad.shape[rows], bad.shape[columns]],
        "share": [[_short(value) for value in line] for line in share],
        "max": None if largest is None else [[_short(value) for value in line] for line in largest],
    }


def _tiled(values: NDArray[Any], rows: int, columns: int, ufunc: np.ufunc) -> NDArray[Any]:
    """``values`` joined by ``ufunc`` over tiles of two axes, rows < columns, and over all of every other axis."""
    for axis in reversed(range(values.ndim)):
        if axis not in (rows, columns):
            values = ufunc.reduce(values, axis=axis)
    for axis in (0, 1):
        values = ufunc.reduceat(values, tile_edges(values.shape[axis])[:-1], axis=axis)
    return values


def tile_edges(length: int) -> NDArray[np.int64]:
    """First index of each tile along an axis of ``length`` >= 1, and ``length`` itself; tiles differ by at most one."""
    tiles = min(length, MOST_TILES)
    return np.arange(tiles + 1, dtype=np.int64) * length // tiles


def _short(value: float) -> float | str:
    if not math.isfinite(value):
        return "inf"
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded  # "0" is a third of "0.0", and most are
