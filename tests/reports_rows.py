"""Rows for the tests of `reports`: one plain row to vary, and frames that hypothesis draws."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd
from hypothesis import strategies as st

from reports import from_rows, make_row
from reports.columns import MARGIN_ORACLES, MARGINS, ORACLES, VERDICTS

PLAIN: dict[str, Any] = {
    "run_id": "r1",
    "time_utc": "2026-01-31T12:00:00Z",
    "git_revision": "0123abc",
    "arch": "sm90",
    "engine": "software",
    "implementation": "software",
    "stage": "wo_a",
    "oracle": "bound",
    "evidence": "measured",
    "preset": "v4-pro",
    "tp_size": 8,
    "tp_rank": 0,
    "tokens": 3,
    "family": "normal",
    "variant": "",
    "case_id": "c0",
    "case": '{"preset": "v4-pro", "seed": 1}',
    "compared": 1000,
    "mismatched": 0,
    "margin_max": 0.5,
    "margin_p999": 0.25,
    "margin_p50": 0.125,
    "rms_rel_error": 2.0**-9,
    "signed_bias": -(2.0**-20),
    "calc_diff": 2.0**-30,
    "ulp_max": 1.0,
    "ulp_histogram": '{"0": 900, "1": 100}',
    "seconds": 0.5,
    "verdict": "pass",
    "versions": '{"numpy": "2.4.6", "torch": "2.13.0", "cuda": null}',
}


def row(**changes: Any) -> dict[str, Any]:
    """The plain row, a passing one, with changes."""
    return make_row(**{**PLAIN, **changes})


def frame(*changes: dict[str, Any]) -> pd.DataFrame:
    """A frame of plain rows, each with its changes and a case_id of its own."""
    return from_rows(row(**{"case_id": f"c{i}", **change}) for i, change in enumerate(changes))


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
NASTY = st.sampled_from(["<script>alert(1)</script>", "a|b", "[red]x", "it's", 'q"q', "x\ny", "&lt;", "`", "\\", ""])
# Multiples of 2^-10 of small size: sums of their squares times counts are exact, in whatever order.
_EXACT = st.integers(-(2**10), 2**10).map(lambda k: k / 2**10)
_EXACT_OR_NAN = _EXACT.map(abs) | st.just(math.nan)


@st.composite
def rows(draw: st.DrawFn, text: st.SearchStrategy[str] = NASTY) -> dict[str, Any]:
    """A row with any verdict, few different keys, and figures that add up without rounding."""
    verdict = draw(st.sampled_from(VERDICTS))
    oracle = draw(st.sampled_from(ORACLES))
    compared = draw(st.integers(0, 2**20) | st.just(0))
    margin = _EXACT.map(abs) if oracle in MARGIN_ORACLES else _EXACT_OR_NAN
    if draw(st.integers(0, 9)) == 0:
        margin = _EXACT_OR_NAN
    return row(
        arch=draw(st.sampled_from(["sm90", "sm100", "sm120"])),
        engine=draw(st.sampled_from(["software", "deep_gemm"])),
        stage=draw(st.sampled_from(["quantize", "wo_a", "wo_b", "o_proj", "mine"])),
        oracle=oracle,
        evidence=draw(st.sampled_from(["measured", "published"])),
        tp_size=draw(st.sampled_from([1, 8])),
        family=draw(text),
        case_id=draw(st.uuids()).hex,
        case=json.dumps({"family": draw(text)}),
        compared=compared,
        mismatched=draw(st.integers(0, compared)) if draw(st.booleans()) else 0,
        margin_max=draw(margin),
        margin_p999=draw(margin),
        margin_p50=draw(margin),
        rms_rel_error=draw(_EXACT_OR_NAN),
        signed_bias=draw(_EXACT | st.just(math.nan)),
        calc_diff=draw(_EXACT_OR_NAN),
        ulp_max=draw(_EXACT_OR_NAN),
        verdict=verdict,
        reason=draw(text) or "no reason",
    )


frames = st.lists(rows(), min_size=1, max_size=12).map(from_rows)


@st.composite
def passing_rows(draw: st.DrawFn) -> dict[str, Any]:
    """A row that passes, of an oracle with margins."""
    drawn = draw(rows())
    names = ("margin_max", "margin_p999", "margin_p50")
    margins = {name: 0.0 if math.isnan(drawn[name]) else drawn[name] for name in names}
    oracle = draw(st.sampled_from(MARGIN_ORACLES))
    changes = {"oracle": oracle, "mismatched": 0, "verdict": "pass", "compared": drawn["compared"] + 1}
    return make_row(**{**drawn, **margins, **changes})


SKIPPED = {"verdict": "skipped", "reason": "no GPU", "compared": 0}
NOT_APPLICABLE = {"verdict": "not applicable", "reason": "judged by itself", "compared": 0}
GOOD = (
    {"family": "wide", "margin_max": 0.75},
    {"arch": "sm100", "evidence": "published"},
    {"arch": "sm100", "stage": "quantize", "oracle": "attainable", **dict.fromkeys(MARGINS, math.nan)},
    {"oracle": "bits", **NOT_APPLICABLE},
)


def run(*changes, **change):
    """The run GOOD with its first row changed, and more rows."""
    return frame({**GOOD[0], **change}, *GOOD[1:], *changes)


EMPTY = {
    "no rows": from_rows([]),
    "all skipped": frame(*({**row, **SKIPPED} for row in GOOD)),
    "all not applicable": frame(*({**row, **NOT_APPLICABLE} for row in GOOD)),
}
