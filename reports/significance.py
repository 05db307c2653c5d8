"""Whether a figure of a run differs from the recorded one by more than its last bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Context, Decimal
from typing import Any

COUNTS = ("compared", "mismatched")
FLOATS = ("margin_max", "rms_rel_error", "signed_bias")
_SIGNIFICANT = 6
# Between the largest float64 and the last digit of the smallest.
_EVERY_DIGIT = Context(prec=700)


def sign(name: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> int:
    """1 where the size of figure `name` grew, -1 where it shrank, 0 where it is the same; NaN on one side is growth.

    The software engine gives the same bits everywhere, but the float64 reference beside it is a BLAS product,
    whose summation order differs by machine and thread count and moves its last bits. So figures are compared
    by their decimal text with 6 significant digits of the recorded one; a bias, which may be the small rest of
    errors that cancel, down to the place of the sixth digit of the RMS error, the size of what cancelled.

    Both the rounded and the truncated text must have moved: a figure at the edge of one of them (a power of two
    often is) would change it by its last bit, and it cannot be at the edge of both.
    """
    a, b = new[name], old[name]
    if math.isnan(a) or math.isnan(b):
        return int(math.isnan(a) != math.isnan(b))
    a, b = abs(a), abs(b)
    if name in FLOATS and math.isfinite(b):
        sizes = [old["rms_rel_error"], b] if name == "signed_bias" else [b]
        size = next((size for size in sizes if size > 0 and math.isfinite(size)), None)
        if size is not None and math.isfinite(a):
            signs = {_text_sign(a, b, size, rounding) for rounding in (ROUND_HALF_EVEN, ROUND_DOWN)}
            return signs.pop() if len(signs) == 1 else 0
    return int(a > b) - int(a < b)


def _text_sign(a: float, b: float, size: float, rounding: str) -> int:
    unit = Decimal(1).scaleb(Decimal(size).adjusted() - _SIGNIFICANT + 1)
    a_text, b_text = (Decimal(value).quantize(unit, rounding, _EVERY_DIGIT) for value in (a, b))
    return int(a_text > b_text) - int(a_text < b_text)


def direction(name: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    """'worse', 'better', or '' where figure `name` is the same: more compared is better, more of all else worse."""
    moved = sign(name, new, old)
    return {0: "", 1: "worse", -1: "better"}[-moved if name == "compared" else moved]
