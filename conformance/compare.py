"""Comparing tensors. A Comparison is data - counts, margins, metrics, the first bad element - and judges nothing.

Two ways: bit by bit (codes, scale bytes, BF16, FP32), where NaN equals NaN as a class because payloads are unspecified;
and values against float64 with a bound per element, margin = abs(error) / bound. A tensor of another shape or dtype
than expected is a Comparison too, with a `problem` and nothing compared.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

NAN = math.nan
LARGE = 0.98
"""Margins above this are kept for a map of where they are, also where the comparison holds. It decides nothing."""
_INT_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SIGN_BIT = {torch.float8_e4m3fn: 0x80, torch.bfloat16: 0x8000, torch.float16: 0x8000, torch.float32: 0x80000000}
_UE8M0_NAN = 255


@dataclass(frozen=True)
class BadElement:
    """The first element, in index order, that does not hold: where, both codes in hex, both values."""

    tensor: str
    at: tuple[int, ...]
    got: str
    want: str
    got_value: float
    want_value: float
    bound: float = NAN
    margin: float = NAN

    def to_json(self) -> str:
        """One line of JSON; NaN and Inf become text, since JSON has neither."""
        values = {k: v for k, v in dataclasses.asdict(self).items() if not (isinstance(v, float) and math.isnan(v))}
        for name, value in values.items():
            if isinstance(value, float) and math.isinf(value):
                values[name] = str(value)
        return json.dumps(values)

    def __str__(self) -> str:
        where = f"{self.tensor}[{', '.join(map(str, self.at))}]"
        text = f"{where}: got {self.got} ({self.got_value:g}), want {self.want} ({self.want_value:g})".replace(
            "  ", " "
        )
        return text if math.isnan(self.margin) else f"{text}, bound {self.bound:.3g}, margin {self.margin:.3g}"


@dataclass(frozen=True)
class Comparison:
    """What was compared and how far off it was.

    mismatched: elements with other bits (bitwise), or with a margin that is not <= 1 (values). Margins are NaN where
    there is no bound. rms_rel_error: sqrt(sum err^2 / sum want^2). signed_bias: sum(err * sign(want)) / sum(abs(want)),
    negative where results are drawn toward zero. calc_diff: 1 - 2<x,y>/(<x,x>+<y,y>). ulp_*: distance in steps of the
    output format; the histogram's keys are lower edges 0, 1, 2, 4, 8, ... of its bins. ambiguous: share of codes for
    which more than one value is attainable. elements: of each element the margin, or whether it is bad, of the shape of
    the tensor; None where there is nothing to map (none is bad, and no margin is large).
    """

    compared: int = 0
    mismatched: int = 0
    margin_max: float = NAN
    margin_p999: float = NAN
    margin_p50: float = NAN
    rms_rel_error: float = NAN
    signed_bias: float = NAN
    calc_diff: float = NAN
    sqnr_db: float = NAN
    ulp_max: float = NAN
    ulp_histogram: dict[int, int] = field(default_factory=dict)
    ambiguous: float = NAN
    first_bad: BadElement | None = None
    problem: str = ""
    elements: NDArray[Any] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class _Bits:
    """A tensor as integers: raw codes, values, steps on the number line, and where it is NaN."""

    codes: NDArray[np.int64]
    values: NDArray[np.float64]
    steps: NDArray[np.int64]
    nan: NDArray[np.bool_]
    digits: int


def layout_problem(name: str, got: object, want: torch.Tensor, *, strides: bool = False) -> str:
    """'' where ``got`` is a tensor of the shape and dtype (and ``strides``) of ``want``, else what differs.

    Strides count only along dims longer than 1: the others never enter an address.
    """
    if not isinstance(got, torch.Tensor):
        return f"{name} is {type(got).__name__}; expected a tensor"
    if got.layout != torch.strided or got.is_meta:
        return f"{name} is {got.layout} on {got.device}; expected a dense tensor with values"
    if got.shape != want.shape:
        return f"{name} has shape {list(got.shape)}; expected {list(want.shape)}"
    if got.dtype != want.dtype:
        return f"{name} has dtype {got.dtype}; expected {want.dtype}"
    used = [(g, w) for g, w, n in zip(got.stride(), want.stride(), want.shape, strict=True) if n > 1]
    if strides and want.numel() and any(g != w for g, w in used):
        return f"{name} has strides {list(got.stride())}; expected {list(want.stride())}"
    return ""


def compare_bits(got: torch.Tensor, want: torch.Tensor, name: str) -> Comparison:
    """Compare two tensors of one dtype bit by bit (e4m3, BF16, FP16, FP32; uint8 is UE8M0 bytes).

    NaN equals NaN; +0 and -0 differ. Metrics are those of the values that are finite on both sides.
    """
    problem = layout_problem(name, got, want)
    if problem:
        return Comparison(problem=problem)
    a, b = _bits(got), _bits(want)
    bad = (a.codes != b.codes) & ~(a.nan & b.nan)
    comparison = Comparison(
        compared=bad.size,
        mismatched=int(bad.sum()),
        **_metrics(a.values, b.values),
        **_ulps(a, b),
    )
    if not bad.any():
        return comparison
    at = _first(bad)
    return dataclasses.replace(comparison, first_bad=_bad_element(name, at, a, b), elements=bad)


def same_bits(got: torch.Tensor, want: torch.Tensor, name: str) -> Comparison:
    """As `compare_bits`, without the metrics where all bits are equal: what the many exact properties need."""
    problem = layout_problem(name, got, want)
    if problem:
        return Comparison(problem=problem)
    words = _INT_VIEW[want.element_size()]
    if torch.equal(got.detach().contiguous().view(words), want.detach().contiguous().view(words)):
        return Comparison(compared=want.numel())
    return compare_bits(got, want, name)


def compare_values(
    got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor, name: str, *, nan_expected: bool = False
) -> Comparison:
    """Compare ``got`` with the float64 values ``want``: every abs(got - want) must be within ``bound`` (same shape).

    Anything that is not finite on either side counts as mismatched, with margin Inf; ``nan_expected`` admits NaN where
    ``want`` is NaN. ULPs are steps between ``got`` and ``want`` rounded to its dtype.

    Raises ``ValueError`` where ``want`` and ``bound`` differ in shape, ``TypeError`` where either is not float64.
    """
    for label, tensor in (("want", want), ("bound", bound)):
        if tensor.dtype != torch.float64:
            raise TypeError(f"{label} of {name} has dtype {tensor.dtype}; expected float64")
    if want.shape != bound.shape:
        raise ValueError(f"bound of {name} has shape {list(bound.shape)}; expected {list(want.shape)}")
    if got.shape != want.shape:
        return Comparison(problem=f"{name} has shape {list(got.shape)}; expected {list(want.shape)}")
    if not got.dtype.is_floating_point:
        return Comparison(problem=f"{name} has dtype {got.dtype}; expected a floating-point dtype")
    a, b = _bits(got), _bits(want.to(got.dtype))
    exact, limit = want.contiguous().numpy(), bound.contiguous().numpy()
    margin = _margins(a.values, exact, limit)
    if nan_expected:
        margin = np.where(np.isnan(a.values) & np.isnan(exact), 0.0, margin)
    bad = ~(margin <= 1)
    comparison = Comparison(
        compared=bad.size,
        mismatched=int(bad.sum()),
        **_margin_figures(margin),
        **_metrics(a.values, exact),
        **_ulps(a, b),
    )
    if not (comparison.margin_max <= LARGE):
        comparison = dataclasses.replace(comparison, elements=margin)
    if not bad.any():
        return comparison
    at = _first(bad)
    element = _bad_element(name, at, a, b)
    element = dataclasses.replace(
        element, want_value=float(exact[at]), bound=float(limit[at]), margin=float(margin[at])
    )
    return dataclasses.replace(comparison, first_bad=element)


def merge(comparisons: Sequence[Comparison]) -> Comparison:
    """One Comparison of several tensors of a stage: counts add up, the first problem and first bad element stay.

    Metrics and margins are those of the first part (the values); its ULP histogram and elements too.
    """
    first = comparisons[0]
    return dataclasses.replace(
        first,
        compared=sum(c.compared for c in comparisons),
        mismatched=sum(c.mismatched for c in comparisons),
        first_bad=next((c.first_bad for c in comparisons if c.first_bad), None),
        problem=next((c.problem for c in comparisons if c.problem), ""),
    )


def _bits(tensor: torch.Tensor) -> _Bits:
    tensor = tensor.detach().contiguous()
    size = tensor.element_size()
    if tensor.dtype == torch.float64:  # dequantised values: no steps of their own
        values = tensor.numpy()
        return _Bits(tensor.view(torch.int64).numpy(), values, np.zeros(0, np.int64), np.isnan(values), 0)
    codes = tensor.view(_INT_VIEW[size]).to(torch.int64).numpy() & ((1 << 8 * size) - 1)
    if tensor.dtype == torch.uint8:  # UE8M0: a larger byte is a larger number
        nan = codes == _UE8M0_NAN
        return _Bits(codes, np.where(nan, NAN, np.ldexp(1.0, (codes - 127).astype(np.int32))), codes, nan, 2)
    values = tensor.to(torch.float64).numpy()
    sign = _SIGN_BIT[tensor.dtype]
    magnitude = codes & (sign - 1)
    return _Bits(codes, values, np.where(codes & sign, -magnitude, magnitude), np.isnan(values), 2 * size)


def _first(bad: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))


def _bad_element(name: str, at: tuple[int, ...], got: _Bits, want: _Bits) -> BadElement:
    codes = [f"0x{int(bits.codes[at]):0{bits.digits}x}" if bits.digits else "" for bits in (got, want)]
    return BadElement(name, at, codes[0], codes[1], float(got.values[at]), float(want.values[at]))


def _margins(got: NDArray[np.float64], want: NDArray[np.float64], bound: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(all="ignore"):
        error = np.abs(got - want)
        margin = np.where(error == 0, 0.0, error / bound)
        # A negative, zero or NaN bound allows nothing; an infinite one would allow everything, so it allows nothing.
        usable = np.isfinite(error) & np.isfinite(bound) & ((bound > 0) | (error == 0))
    return np.where(usable & ~np.isnan(margin), margin, np.inf)


def _margin_figures(margin: NDArray[np.float64]) -> dict[str, Any]:
    if not margin.size:
        return {}
    # 'higher' names a margin that occurs; interpolation would turn inf into NaN.
    p50, p999 = np.quantile(margin, [0.5, 0.999], method="higher")
    return {"margin_max": float(margin.max()), "margin_p999": float(p999), "margin_p50": float(p50)}


def _metrics(got: NDArray[np.float64], want: NDArray[np.float64]) -> dict[str, Any]:
    finite = np.isfinite(got) & np.isfinite(want)
    if not finite.any():
        return {}
    x, y = got[finite], want[finite]
    error = x - y
    # Pairwise sums, not BLAS: the same on every machine and number of threads.
    xx, yy, ee, xy = (float((p * q).sum()) for p, q in ((x, x), (y, y), (error, error), (x, y)))
    total = float(np.abs(y).sum())
    return {
        "rms_rel_error": math.sqrt(ee / yy) if yy > 0 else (0.0 if ee == 0 else math.inf),
        "signed_bias": float((error * np.sign(y)).sum()) / total if total > 0 else NAN,
        "calc_diff": 1 - 2 * xy / (xx + yy) if xx + yy > 0 else 0.0,
        "sqnr_db": 10 * math.log10(yy / ee) if ee > 0 and yy > 0 else (math.inf if ee == 0 else -math.inf),
    }


def _ulps(got: _Bits, want: _Bits) -> dict[str, Any]:
    both = ~(got.nan | want.nan)
    if not both.any() or got.steps.shape != both.shape:
        return {}
    distance = np.abs(got.steps[both] - want.steps[both])
    bins = np.where(distance > 0, np.frexp(distance.astype(np.float64))[1], 0)  # 0; 1; 2-3; 4-7; ...
    counts = np.bincount(bins)
    histogram = {(1 << (b - 1) if b else 0): int(n) for b, n in enumerate(counts) if n}
    return {"ulp_max": float(distance.max()), "ulp_histogram": histogram}
