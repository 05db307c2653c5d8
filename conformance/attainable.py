"""Which scales and FP8 codes some correctly rounded evaluation allows: an oracle that needs no declared arithmetic.

The number that a quantiser sees is known within an interval ``[lo, hi]``: the exact rotation with the bound of every
association of its three FP32 roundings (nothing where none of them rounds) or, where o is only the BF16 rounding of a
hidden FP32 accumulator, half a BF16 ulp of each input more (``bounds.hidden_rotation_bound``). Then, per block::

    amin = max_i min|[lo_i, hi_i]|,  amax = max_i max|[lo_i, hi_i]|,  both at least the floor
    legal scales  2^R(amin) .. 2^R(amax),  R(a) the smallest e with 448 * 2^e >= a; and 2^(R(amin)-1) where
                  amin <= 448 * 2^(R(amin)-1) + bounds.log2_excess;
                  rule "fp32": min and max of fl(a/448), fl(a * fl(1/448)) over amin, amax
    legal codes   q(lo/s) .. q(hi/s) for the scale s in fact emitted, q: nearest e4m3, ties to even, clamped to 448

Rounding to nearest is monotone, so endpoints suffice. Lanes of a pair are taken independently: never a false alarm, but
not every code inside is reached. The sign of a zero is free. NaN is never legal: inputs are finite (others raise
``NotApplicable``), and no finite input gives a NaN. For an FP32 scale that is no power of two, the quotient may be off
by ``bounds.QUOTIENT`` (reciprocals). Where a scale is no positive number, no code of its block is legal.

An implementation declares what it knows in attributes, all optional:

* ``o_known``: ``"exact"`` (default; o itself is rotated and quantised), ``"half-ulp"`` (o is the accumulator rounded to
  BF16), ``"rounded"`` (what comes out of the rotation is rounded to BF16 before it is quantised);
* ``scale_rule``: ``"ceil2"`` (default; powers of two, exactly or by FP32 log2) or ``"fp32"`` (amax/448, FP32 scales);
* ``amax_floor``: least amax of a block; default that of the serving engine's fused quantiser, 1e-10.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from conformance import bounds
from conformance.compare import BadElement, Comparison
from conformance.operands import E4M3_VALUES, NotApplicable, finite_float64
from conformance.truth import O_KNOWN, Truth, scale_values
from oproj.activation import QuantizedActivation, unpack_ue8m0
from oproj.engines.software.quantizer_table import VLLM_FUSED

SCALE_RULES = ("ceil2", "fp32")
LARGEST, NAN_CODE = 0x7E, 0x7F
_BROKEN = 1000  # stands for a NaN code: above every legal one


class Intervals(NamedTuple):
    """Ends of what each lane may hold, float64 ``[..., K]``."""

    lo: np.ndarray
    hi: np.ndarray


class Legal(NamedTuple):
    """Smallest and largest legal scale, float64 ``[..., K/block]``; of the powers of two between, all are legal."""

    lo: np.ndarray
    hi: np.ndarray
    rule: str


def compare_attainable(x: QuantizedActivation, truth: Truth, implementation: Any = None) -> Comparison:
    """Scales, then codes, of ``x`` that no correct evaluation of the Case gives; ``ambiguous``: share of free codes.

    x: e4m3 ``[T, G, K]`` and scales in the layout of the arch. Raises ``NotApplicable`` where wo_a is BF16 or an input
    is not finite, ``ValueError`` for a declaration of ``implementation`` (see the module) that is none of the known.
    """
    if not truth.fp8:
        raise NotApplicable("a BF16 wo_a has no codes; its values are judged by their bound")
    rule, floor = _declared(truth, implementation)
    spread = intervals(truth, getattr(implementation, "o_known", "exact"))
    legal = legal_scales(spread, truth.block, rule, floor)
    return compare_blocks(x.data, x.scale, spread, legal)


def _declared(truth: Truth, implementation: Any) -> tuple[str, float]:
    rule = getattr(implementation, "scale_rule", "ceil2")
    floor = float(getattr(implementation, "amax_floor", VLLM_FUSED.amax_floor))
    if rule not in SCALE_RULES:
        raise ValueError(f"scale_rule={rule!r} must be one of {SCALE_RULES}")
    if rule == "fp32" and truth.arch.tma_aligned_scales:
        raise ValueError(f"scale_rule='fp32' but {truth.arch.name} packs powers of two; it must be 'ceil2'")
    if not 0 <= floor < np.inf:
        raise ValueError(f"amax_floor={floor} must be a finite number of at least 0")
    return rule, float(np.float32(floor))


def intervals(truth: Truth, o_known: str = "exact") -> Intervals:
    """What each lane of the Case may hold before it is quantised, ``[T, G, K]``."""
    inputs, config = truth.inputs, truth.config
    half, shape = config.rope_dim // 2, truth.x.shape
    rows = inputs.cos_sin_cache[inputs.positions][:, None]
    cos, sin = rows[..., :half], rows[..., half:]
    centre = finite_float64(truth.x, "o")
    if o_known == "half-ulp":
        radius = bounds.hidden_rotation_bound(inputs.o, cos, sin).view(shape).numpy()
        return Intervals(centre - radius, centre + radius)
    if o_known not in O_KNOWN:
        raise ValueError(f"o_known={o_known!r} must be one of {O_KNOWN}")
    lo, hi = centre.copy(), centre.copy()
    turned = slice(config.head_dim - config.rope_dim, None)  # of every head
    radius = rotation_radius(inputs.o[..., turned], cos, sin).reshape(*shape[:2], config.heads_per_group, -1)
    heads = (*shape[:2], config.heads_per_group, config.head_dim)
    lo.reshape(heads)[..., turned] -= radius
    hi.reshape(heads)[..., turned] += radius
    return Intervals(*(_bf16(ends) for ends in (lo, hi))) if o_known == "rounded" else Intervals(lo, hi)


def _bf16(x: np.ndarray) -> np.ndarray:
    """Through FP32 to BF16, nearest even, as an FP32 rotation is rounded: monotone, so ends stay ends."""
    return torch.from_numpy(x).float().bfloat16().double().numpy()


def rotation_radius(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> np.ndarray:
    """Bound over every association of the rotation of ``x`` ``[..., 2P]``; 0 where neither product nor sum rounds."""
    radius = bounds.inverse_rope_bound(x, cos, sin, "mul_mul_add").numpy().copy()
    values, c, s = x.double().numpy(), cos.double().numpy(), sin.double().numpy()
    for lane, sign in ((0, 1.0), (1, -1.0)):
        own, other = values[..., lane::2] * c, values[..., 1 - lane :: 2] * (sign * s)
        exact = _is_fp32(own) & _is_fp32(other) & _is_fp32(own + other)
        radius[..., lane::2][exact] = 0.0
    return radius


def _is_fp32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) == x


def legal_scales(spread: Intervals, block: int, rule: str = "ceil2", floor: float = 0.0) -> Legal:
    """Scales that a block of ``block`` lanes may get; ``floor``: an FP32 number."""
    size_lo, size_hi = np.abs(spread.lo), np.abs(spread.hi)
    straddles = (spread.lo <= 0) & (spread.hi >= 0)
    blocks = (*spread.lo.shape[:-1], spread.lo.shape[-1] // block, block)
    least = np.where(straddles, 0.0, np.minimum(size_lo, size_hi)).reshape(blocks).max(-1)
    amin = np.maximum(least, floor)
    amax = np.maximum(np.maximum(size_lo, size_hi).reshape(blocks).max(-1), floor)
    if rule == "fp32":
        inverse = float(np.float32(1 / bounds.E4M3_MAX))
        candidates = [
            _fl32(a) for a in (amin / bounds.E4M3_MAX, amin * inverse, amax / bounds.E4M3_MAX, amax * inverse)
        ]
        return Legal(np.minimum(*candidates[:2]), np.maximum(*candidates[2:]), rule)
    lowest, highest = ceil_exponent(amin), ceil_exponent(amax)
    band = amin <= bounds.E4M3_MAX * np.exp2(lowest - 1.0) + bounds.log2_excess(lowest - 1)
    return Legal(np.exp2(lowest - band.astype(np.float64)), np.exp2(highest.astype(np.float64)), rule)


def _fl32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(np.float64)


def ceil_exponent(a: np.ndarray) -> np.ndarray:
    """The smallest e >= -126 with ``448 * 2^e >= a``, exact: 448 is 0.875 * 2^9."""
    fraction, exponent = np.frexp(a)
    exponents = np.where(fraction <= 0.875, exponent - 9, exponent - 8)
    return np.where(a > 0, np.maximum(exponents, -126), -126).astype(np.int64)


def nearest_code(x: np.ndarray) -> np.ndarray:
    """Number of the e4m3 value nearest to float64 ``x``, -126..126 in order of value: ties to even, clamped.

    A normal's exponent and three fraction bits are the number but for an offset, so it is rounded as an integer.
    """
    size = np.abs(x)
    bits = size.view(np.int64)
    normal = ((bits + ((1 << 48) - 1) + ((bits >> 49) & 1)) >> 49) - ((1023 - 7) << 3)
    number = np.where(size < 2.0**-6, np.rint(np.minimum(size, 1.0) * 512).astype(np.int64), normal)
    return np.where(x < 0, -1, 1) * np.minimum(number, LARGEST)


def compare_blocks(data: torch.Tensor, scale: torch.Tensor, spread: Intervals, legal: Legal) -> Comparison:
    """``compare_attainable`` for codes ``[..., K]`` and scales ``[..., K/block]`` (or packed) with given intervals."""
    emitted = scale_values(scale).numpy()
    usable = np.isfinite(emitted) & (emitted > 0)
    bad_scale = ~(usable & (emitted >= legal.lo) & (emitted <= legal.hi))
    if legal.rule == "ceil2":
        bad_scale |= np.frexp(emitted)[0] != 0.5
    codes = data.contiguous().view(torch.uint8).numpy()
    number = (codes & 0x7F).astype(np.int64)
    number = np.where(number == NAN_CODE, _BROKEN, np.where(codes & 0x80, -number, number))
    lo, hi = _legal_codes(spread, np.where(usable, emitted, 1.0))
    wide = np.repeat(usable, codes.shape[-1] // usable.shape[-1], axis=-1)
    bad_code = ~((number >= lo) & (number <= hi) & wide)
    first = None
    if bad_scale.any():
        first = _bad_scale(scale, emitted, legal, _first(bad_scale))
    elif bad_code.any():
        at = _first(bad_code)
        first = _bad_code(int(codes[at]), int(lo[at]), int(hi[at]), at)
    return Comparison(
        compared=codes.size + emitted.size,
        mismatched=int(bad_scale.sum()) + int(bad_code.sum()),
        ambiguous=float((lo != hi).mean()) if lo.size else float("nan"),
        first_bad=first,
        elements=bad_code if bad_code.any() else None,
    )


def _legal_codes(spread: Intervals, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    width = spread.lo.shape[-1] // scales.shape[-1]
    # The quotient by a power of two is exact; another one may be off either way.
    slack = np.where(np.frexp(scales)[0] == 0.5, 0.0, bounds.QUOTIENT)
    per_lane = np.repeat(scales, width, axis=-1)
    lo, hi = spread.lo / per_lane, spread.hi / per_lane
    if slack.any():
        slacks = np.repeat(slack, width, axis=-1)
        lo, hi = lo - slacks * np.abs(lo), hi + slacks * np.abs(hi)
    low = nearest_code(lo)
    return low, low if np.array_equal(lo, hi) else nearest_code(hi)


def _first(bad: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))


def _bad_scale(scale: torch.Tensor, emitted: np.ndarray, legal: Legal, at: tuple[int, ...]) -> BadElement:
    if scale.dtype == torch.int32:
        got = f"0x{int(unpack_ue8m0(scale)[at]):02x}"
        ends = [f"0x{int(np.log2(end[at])) + 127:02x}" for end in (legal.lo, legal.hi)]
    else:
        got = f"0x{scale[at].numpy().view(np.uint32):08x}"
        ends = [f"0x{np.float32(end[at]).view(np.uint32):08x}" for end in (legal.lo, legal.hi)]
    return BadElement("scales", at, got, _span(*ends), float(emitted[at]), float(legal.lo[at]))


def _bad_code(code: int, lo: int, hi: int, at: tuple[int, ...]) -> BadElement:
    ends = [abs(n) | (0x80 if n < 0 else 0) for n in (lo, hi)]
    values = [float(E4M3_VALUES[c]) for c in (code, ends[0])]
    return BadElement("codes", at, f"0x{code:02x}", _span(*(f"0x{end:02x}" for end in ends)), *values)


def _span(lo: str, hi: str) -> str:
    return lo if lo == hi else f"{lo}..{hi}"
