"""ULP histograms of rows added up: how many elements are how many steps of the output format away.

A step goes from one number of the format to the next, and the way between two numbers of different sign leads
across zero. So a result of 1e-9 where -1e-9 is right is tens of thousands of BF16 steps away, with an error that
any bound allows: read the share within one step, and the largest distance only beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd

from .columns import JUDGED, RowsError


def ulp_histograms(df: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The histograms of the judged rows, summed per combination of `keys` that has one.

    Columns: the keys, steps (lower edge of the bin: 0, 1, 2, 4, 8, ...), elements. Sorted by nothing.

    Raises: RowsError for a histogram that is not a JSON object of counts.
    """
    keys = list(keys)
    having = df.loc[df["verdict"].isin(JUDGED) & (df["ulp_histogram"] != ""), [*keys, "ulp_histogram"]]
    codes, texts = pd.factorize(having["ulp_histogram"])
    text_of, steps, elements = _parsed(texts)
    groups = having.groupby(keys, observed=True, sort=False)
    number, names = groups.ngroup().to_numpy(), groups.size().index.to_frame(index=False)
    # How often a group has a text, then its bins: the same text is parsed once.
    pairs = pd.DataFrame({"group": number, "text": codes}).value_counts(sort=False).reset_index(name="times")
    bins = pd.DataFrame({"text": text_of, "steps": steps, "elements": elements})
    joined = pairs.merge(bins, on="text")
    joined["elements"] *= joined["times"]
    sums = joined.groupby(["group", "steps"], sort=True)["elements"].sum().reset_index()
    out = names.iloc[sums["group"].to_numpy()].reset_index(drop=True).astype(object)
    return out.assign(steps=sums["steps"].to_numpy(np.int64), elements=sums["elements"].to_numpy(np.int64))


def within_one_step(histograms: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Share of the elements of `ulp_histograms` within one step: the keys and `within_1_ulp` in 0 .. 1."""
    keys = list(keys)
    close = histograms["elements"].where(histograms["steps"] <= 1, 0)
    sums = histograms[keys].assign(close=close, all=histograms["elements"])
    sums = sums.groupby(keys, sort=False)[["close", "all"]].sum().reset_index()
    return sums[keys].assign(within_1_ulp=sums["close"] / sums["all"].where(sums["all"] > 0))


def _parsed(texts: pd.Index) -> tuple[list[int], list[int], list[int]]:
    text_of: list[int] = []
    steps: list[int] = []
    elements: list[int] = []
    for index, text in enumerate(texts):
        for step, count in _histogram(text).items():
            text_of.append(index)
            steps.append(step)
            elements.append(count)
    return text_of, steps, elements


def _histogram(text: str) -> dict[int, int]:
    try:
        found = {int(step): count for step, count in json.loads(text).items()}
        if all(0 <= step < 2**63 and type(count) is int and 0 <= count < 2**63 for step, count in found.items()):
            return found
    except (ValueError, AttributeError):
        pass  # the same refusal as for counts that are none
    raise RowsError(f'column ulp_histogram must hold JSON objects of counts such as {{"0": 9}}, it has {text!r}')
