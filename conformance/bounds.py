"""Derived error bounds: the only tolerances of the project.

Every function returns, per element, a float64 number that a correct implementation cannot exceed; its docstring is
the inequality with its source. Outside the hypothesis it raises ``NotApplicable`` (a ``ValueError``) naming the
element: a bound is never loosened to fit. An element fails when ``not (abs(error) / bound <= 1)``.

Sources: T-FDPA = MMA-Sim, arXiv 2511.10909, and Khattak & Mikaitis, arXiv 2512.07004; chains = DeepGEMM 54e2261;
gamma_n and any-order sums = Higham, Accuracy and Stability of Numerical Algorithms, ch. 3; block FMA = Blanchard,
Higham, Lopez, Mary, Pranesh, SISC 42(3), 2020. The textbook FP32 bound gamma_32(2^-24) * sum|ab| is *violated* by
2,893 of 5,000 published H100 outputs (MATLAB-tensor-core vectors), hence these. A = sum of |products|.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch

from conformance.apriori_bound import apriori_group
from conformance.operands import NotApplicable, finite_float64, gemm_operands, product, refuse_where, to_float64
from conformance.running_bound import U32, running_bound
from oproj.arch import Arch, get_arch

Output = Literal["bf16", "fp32"]
Rotation = Literal["fma_cos", "mul_mul_add"]
Reduction = Literal["bf16", "fp32"]
Order = Literal["ascending", "descending", "any"]
ORDERS: tuple[Order, ...] = get_args(Order)
Angle = Literal["exact", "fp32"]
UBF16, U64 = 2.0**-8, 2.0**-53
E4M3_RELATIVE, E4M3_ABSOLUTE, E4M3_MAX = 2.0**-4, 2.0**-10, 448.0
QUOTIENT = 2.0**-20  # y/scale for a general scale: reciprocal (2 ulp), product, and its share in the e4m3 rounding
LOG2_BAND = (0, 2, 4, 9, 20, 39)  # FP32 ulps above 448 * 2^k, see ``log2_excess``
F64_SLACK = 1.0 + 2.0**-36  # covers the rounding of a bound's own float64 sums of up to 2^16 non-negative terms
BF16_OVERFLOW = 2.0**128 - 2.0**119  # from here on, round to nearest gives infinity
F32_OVERFLOW = 2.0**128 - 2.0**103


def gamma(n: int, unit: float) -> float:
    """``gamma_n(u) = n*u / (1 - n*u)`` (Higham, ASNA, Lemma 3.1): n roundings of relative size u.

    Raises ``NotApplicable`` when ``n*u >= 1``.
    """
    if not 0 <= n * unit < 1:
        raise NotApplicable(f"gamma_n(u) needs 0 <= n*u < 1; n={n}, u={unit} gives {n * unit}")
    return n * unit / (1 - n * unit)


def half_ulp_bf16(x: Any) -> torch.Tensor:
    """``|bf16(x) - x| <= 2^(max(floor(log2|x|), -126) - 8) <= max(2^-8 |x|, 2^-134)``, round to nearest even.

    Also valid with ``bf16(x)`` in place of ``x``: rounding never moves x below its own binade. Float64, shape of ``x``.
    """
    return torch.as_tensor(_half_ulp(to_float64(x, "x")))


def _half_ulp(x: np.ndarray) -> np.ndarray:
    refuse_where(~(np.abs(x) < BF16_OVERFLOW), "x", x, "does not round to a finite BF16 number")
    exponent = np.frexp(x)[1] - 1
    return np.ldexp(1.0, np.where(x == 0, -126, np.maximum(exponent, -126)) - 8)


def grouped_gemm_bound(
    arch: Arch | str,
    a_codes: Any,
    a_scales: Any,
    w_codes: Any,
    w_scales: Any,
    *,
    z_hat: Any = None,
    output: Output = "bf16",
    fused: bool = True,
    gran_k: int | None = None,
    order: Order = "ascending",
    threads: int | None = None,
) -> torch.Tensor:
    """Running bound on ``|z^ - z|`` of ``fp8_einsum("bhr,hdr->bhd")``, z exact on the codes and scales given.

    One step sums k products and the accumulator, terms x_i, in units of ``lsb = 2^(e_max - F)``::

        step = sum_i [x_i not a multiple of lsb] * min(|x_i|, lsb) + rz
        rz   = 0 if E - frac_out <= e_max - F else 2^(E - frac_out),   E = max(floor(log2|s|), -126)

    Alignment drops less than one lsb, and at most all, of a term; the sum is exact; the output is truncated once, in
    units of 2^(E - frac_out), and loses nothing where that unit is not coarser. An error of the accumulator passes
    through unamplified. e_max and the sum s come from a replay of the chain. With ``u = 2^-24``::

        scales outside (SM90), per 128 of K, E_acc = sum of its steps, acc its sum, s = fl32(sa*sb):
            B += s*E_acc*(1+u) + u*|s*acc| [unless sa*sb is exact] + u*|s*acc| [unless fused] + max(u*|final|, 2^-150)
        scales inside (SM100, SM120): B = sum of all steps
        z:  B + half-ulp_bf16(z^)  [output="bf16"]  + gamma_K(2^-53) * A, the float64 reference's own error

    Codes float8_e4m3fn or uint8 ``[T, G, K]``, ``[G, R, K]``; scales in the layout of ``arch`` (see
    ``gemm_operands``, also for ``gran_k``). ``z_hat``: the judged BF16 result ``[T, G, R]``; the half-ulp is then that
    of the larger of it and the model's (a neighbouring binade is legitimate); its non-finite elements are ignored.
    ``order``: of K. The replay goes from its end where it is descending; of any order `apriori_bound` is returned.
    Returns float64 ``[T, G, R]``. Raises ``NotApplicable`` for NaN codes, unusable scales, overflow, K off the
    granularity, no output; ``ValueError``/``TypeError`` for bad arguments.
    """
    arch, to_bf16 = get_arch(arch), _rounds(output)
    if _any_order(order):
        return apriori_bound(arch, a_codes, a_scales, w_codes, w_scales, output=output, gran_k=gran_k, order=order)
    operands = gemm_operands(arch, a_codes, a_scales, w_codes, w_scales, gran_k)
    operands = operands.backwards() if order == "descending" else operands
    run = running_bound(arch, operands, fused=fused, threads=threads)
    over = ~(np.abs(run.result) < (BF16_OVERFLOW if to_bf16 else np.inf))
    refuse_where(over, "z", run.result, "(of the model) overflows: no bound holds")
    bound = run.bound + gamma(operands.depth, U64) * run.magnitude
    if to_bf16:
        bound += _half_ulp(_larger(np.abs(run.result), z_hat))
    return torch.as_tensor(bound * F64_SLACK)


def _larger(size: np.ndarray, z_hat: Any) -> np.ndarray:
    if z_hat is None:
        return size
    given = to_float64(z_hat, "z_hat")
    if given.shape != size.shape:
        raise ValueError(f"z_hat has shape {given.shape}; expected {size.shape}")
    return np.maximum(size, np.where(np.abs(given) < BF16_OVERFLOW, np.abs(given), 0.0))


def gemm_bound(
    arch: Arch | str, a_codes: Any, a_scales: Any, w_codes: Any, w_scales: Any, *, z_hat: Any = None, **options: Any
) -> torch.Tensor:
    """``grouped_gemm_bound`` of ``fp8_gemm_nt`` (one rank's ``wo_b``): ``[M, K] x [N, K] -> [M, N]``, float64.

    Scales FP32 ``[M, K/128]``, ``[ceil(N/128), K/128]`` or packed int32 ``[M, K/(4*gran_k)]``, ``[N, K/(4*gran_k)]``.
    Its kernel has the same arithmetic (DeepGEMM ``sm90_fp8_gemm_1d2d``, ``sm100_fp8_fp4_gemm_1d1d``).
    """
    shapes = [len(x.shape) for x in (a_codes, a_scales, w_codes, w_scales)]
    if shapes != [2, 2, 2, 2]:
        raise ValueError(f"codes and scales must be 2-D; got {shapes} dimensions")
    z_hat = None if z_hat is None else z_hat[:, None]
    return grouped_gemm_bound(
        arch, a_codes[:, None], a_scales[:, None], w_codes[None], w_scales[None], z_hat=z_hat, **options
    )[:, 0]


def apriori_bound(
    arch: Arch | str,
    a_codes: Any,
    a_scales: Any,
    w_codes: Any,
    w_scales: Any,
    *,
    kappa: int | None = None,
    output: Output = "bf16",
    gran_k: int | None = None,
    order: Order = "ascending",
) -> torch.Tensor:
    """Bound on ``|z^ - z|`` from magnitudes alone, without a replay: valid for any order inside a step.

    ``step_t <= (kappa * k * 2^-F + 2^-frac_out) * A_t``: at least the largest term is exact, each of the k others
    loses at most an lsb, and ``2^e_max <= kappa * max|x_i|``. Truncated terms do not grow, so the accumulator is at
    most the sum of the magnitudes before it and ``A_t <= sum_{j<=t} alpha_j`` (alpha: magnitudes of a step's
    products): step j of J is charged (J - j) times. e4m3 subnormals keep exponent -6, so kappa = 1 holds only without
    them; 8 if at most one factor of each product is subnormal, else 64. Per step ``2^(-126-frac_out) +
    (k+1)*2^(-126-F)`` covers FP32-subnormal accumulators (scales inside). Promotion as in ``grouped_gemm_bound`` with
    ``|final| <= (1+u)^blocks * sum of the blocks so far``; the half-ulp is that of ``|z| + B``.

    ``order``: of K. Of any order, each product is charged J times and each block once per block, as if it came first.
    ``kappa``: 1, 8 or 64; default, per output, what the codes need. Arguments and errors as ``grouped_gemm_bound``;
    a ``kappa`` too small for the codes raises ``NotApplicable``.
    """
    arch, to_bf16 = get_arch(arch), _rounds(output)
    any_order = _any_order(order)
    operands = gemm_operands(arch, a_codes, a_scales, w_codes, w_scales, gran_k)
    operands = operands.backwards() if order == "descending" else operands
    bound = np.empty(operands.shape)
    for group in range(operands.shape[1]):
        exact, arithmetic, magnitude = apriori_group(arch, operands, group, kappa, any_order)
        refuse_where(~(magnitude + arithmetic < BF16_OVERFLOW), f"A of group {group}", magnitude, "may overflow")
        error = arithmetic + gamma(operands.depth, U64) * magnitude
        bound[:, group] = error + (_half_ulp(np.abs(exact) + error * F64_SLACK) if to_bf16 else 0.0)
    return torch.as_tensor(bound * F64_SLACK)


def _any_order(order: str) -> bool:
    if order not in ORDERS:
        raise ValueError(f"order={order!r} must be one of {ORDERS}")
    return order == "any"


def _rounds(output: str) -> bool:
    if output not in ("bf16", "fp32"):
        raise ValueError(f"output={output!r} must be 'bf16' or 'fp32'")
    return output == "bf16"


def bf16_gemm_bound(a: Any, w: Any, *, result: Any = None) -> torch.Tensor:
    """Bound on ``|z^ - z|`` of a BF16 GEMM ``[..., M, K] x [..., N, K]`` whose order of summation is unknown.

    ``|z^ - z| <= gamma_K(2^-23) * A + K * 2^-126 * (2 + max|a| + max|w|) + half-ulp_bf16(|z| + that)``. It covers
    (Higham, ASNA, ch. 3) FP32 sums in any order and any split of K, each addition rounded to nearest or toward zero
    (at most K roundings of 2^-23), and chains of 16-wide tensor-core steps with F = 25 and 23 output bits: K/16 steps
    of at most ``(16 * 2^-25 + 2^-23) * A`` and as many FP32 additions stay below 0.4 * K * 2^-23 * A. The second term
    covers subnormals flushed in inputs, products and sums. Operands: finite BF16 tensors. ``result``: see ``z_hat``
    of ``grouped_gemm_bound``. Raises ``NotApplicable`` for NaN, Inf, possible overflow, K >= 2^23.
    """
    a64, w64 = finite_float64(a, "a"), np.swapaxes(finite_float64(w, "w"), -1, -2)
    depth = a64.shape[-1]
    magnitude = product(np.abs(a64), np.abs(w64))
    flushed = depth * 2.0**-126 * (2 + np.abs(a64).max(initial=0.0) + np.abs(w64).max(initial=0.0))
    error = (gamma(depth, 2.0**-23) + gamma(depth, U64)) * magnitude + flushed
    refuse_where(~(magnitude + error < BF16_OVERFLOW), "A", magnitude, "may overflow")
    size = np.abs(product(a64, w64)) + error * F64_SLACK
    return torch.as_tensor((error + _half_ulp(_larger(size, result))) * F64_SLACK)


def inverse_rope_bound(
    x: Any, cos: Any, sin: Any, variant: Rotation = "fma_cos", *, output: Output = "fp32"
) -> torch.Tensor:
    """Bound on ``|y^ - y|`` of the inverse rotation in FP32, table entries taken as given, ``u = 2^-24``.

    ``y0 = x0*c + x1*s``, ``y1 = x1*c - x0*s`` over the interleaved pairs of the last ``2*P`` dims; for y0::

        fma_cos      (sine product rounded, cosine product fused):  u*(|x1*s|*(1+u) + |y|)
        mul_mul_add  (three roundings):                     u*((|x0*c| + |x1*s|)*(1+u) + |y|)

    and likewise for y1, plus 2^-148 (underflow) and 2^-50*(|x0*c| + |x1*s|) (the float64 reference's own error);
    ``output="bf16"``: plus half-ulp_bf16(|y| + that). Dims that are not rotated are exact: 0. The variants are the
    two associations that one Triton source compiles to; they are declared, never mixed per element.

    x ``[..., D]`` BF16 or FP32 (or their values); cos, sin FP32 ``[..., P]``, ``2*P <= D``. Returns float64.
    Raises ``ValueError`` for an unknown variant, ``NotApplicable`` for NaN, Inf or overflow.
    """
    if variant not in ("fma_cos", "mul_mul_add"):
        raise ValueError(f"variant={variant!r} must be 'fma_cos' or 'mul_mul_add'")
    x64, c, s = finite_float64(x, "x"), finite_float64(cos, "cos"), finite_float64(sin, "sin")
    if c.shape != s.shape or 2 * c.shape[-1] > x64.shape[-1]:
        raise ValueError(f"cos {c.shape} and sin {s.shape} must be [..., P] with 2*P <= {x64.shape[-1]}")
    bound = np.zeros(x64.shape)
    first = x64.shape[-1] - 2 * c.shape[-1]
    x0, x1 = x64[..., first::2], x64[..., first + 1 :: 2]
    for lane, (own, other, sign) in enumerate(((x0, x1, 1.0), (x1, x0, -1.0))):
        fused, rounded = np.abs(own * c), np.abs(other * s)
        size, products = np.abs(own * c + sign * other * s), fused + rounded
        charged = rounded if variant == "fma_cos" else products
        error = U32 * (charged * (1 + U32) + size) + 2.0**-50 * products + 2.0**-148
        refuse_where(~(size + error < F32_OVERFLOW), "y", size, "overflows FP32")
        bound[..., first + lane :: 2] = error + (_half_ulp(size + error) if _rounds(output) else 0.0)
    return torch.as_tensor(bound * F64_SLACK)


def hidden_rotation_bound(x: Any, cos: Any, sin: Any) -> torch.Tensor:
    """Bound on ``|y^ - y|`` , y: x rotated back, ``y^``: a hidden v with ``bf16(v) = x`` rotated back in FP32.

    With h = half-ulp_bf16(x) and e = ``inverse_rope_bound(x, "mul_mul_add")``, ``u = 2^-24``, for y0::

        |c|*h0 + |s|*h1 + e + 2^-22 * (|c|*h0 + |s|*h1)

    v moves the products and y by at most ``|c|*h0 + |s|*h1`` each, which the roundings see as ``u*(2+u)`` of it. Dims
    that are not rotated: h. Valid for every association (fusing a product only drops a rounding). Arguments, result
    and refusals as ``inverse_rope_bound``.
    """
    bound = inverse_rope_bound(x, cos, sin, "mul_mul_add").numpy().copy()
    half = _half_ulp(to_float64(x, "x"))
    c, s = np.abs(to_float64(cos, "cos")), np.abs(to_float64(sin, "sin"))
    first = bound.shape[-1] - 2 * c.shape[-1]
    h0, h1 = half[..., first::2], half[..., first + 1 :: 2]
    bound[..., :first] += half[..., :first]
    for lane, (own, other) in enumerate(((h0, h1), (h1, h0))):
        bound[..., first + lane :: 2] += (c * own + s * other) * (1 + 2.0**-22)
    return torch.as_tensor(bound * F64_SLACK)


def table_bound(
    positions: Any, frequencies: Any, *, angle: Angle = "fp32", roundings: int = 0, ulps: float = 0.5
) -> torch.Tensor:
    """Bound on ``|entry - cos(p*w)|`` (and sin) of an FP32 table, ``u = 2^-24``.

    ``ulps * 2^-24 + 2^-52`` and, the derivatives of cos and sin being at most 1::

        angle="exact"  (p*w not rounded):       gamma_n(u) * p*w
        angle="fp32"   (fl32(fl32(p) * w)):     gamma_{n+1}(u) * p*w + 2^-150

    A number of at most 1 has ulps of at most 2^-24; ``ulps``: 0.5 where the function is correctly rounded, 2 for CUDA's
    ``cosf`` and ``sinf`` (CUDA C++ Programming Guide, mathematical functions). ``roundings``: n roundings between the
    ideal frequency and the FP32 one in use (Higham, ASNA, Lemma 3.1), 0 where ``frequencies`` *are* the definition; 2
    for ``1 / fl32(theta^(2i/d))``, whose tables so drift by up to 3*2^-24 of the angle.

    positions ``[n]``, integers of at most 2^24 (exact in FP32); frequencies ``[P]`` in (0, 1]. Returns float64
    ``[n, P]``. Raises ``NotApplicable`` outside that, ``ValueError`` for another ``angle``, ``roundings`` or ``ulps``.
    """
    if angle not in ("exact", "fp32"):
        raise ValueError(f"angle={angle!r} must be 'exact' or 'fp32'")
    if roundings < 0 or not 0.5 <= ulps < np.inf:
        raise ValueError(f"roundings={roundings} must be at least 0 and ulps={ulps} finite and at least 0.5")
    p, w = finite_float64(positions, "positions"), finite_float64(frequencies, "frequencies")
    refuse_where((p < 0) | (p > 2**24) | (p != np.floor(p)), "positions", p, "is no integer in 0..2^24")
    refuse_where((w <= 0) | (w > 1), "frequencies", w, "is not in (0, 1]")
    rounds = roundings + (angle == "fp32")
    error = gamma(rounds, U32) * np.multiply.outer(p, w) + (2.0**-150 if angle == "fp32" else 0.0)
    return torch.as_tensor((error + ulps * U32 + 2.0**-52) * F64_SLACK)


def log2_excess(exponent: Any) -> np.ndarray:
    """How far an amax may exceed ``448 * 2^k`` and still get the scale 2^k from an FP32 ``2^ceil(log2(raw))``.

    ``n(k) * 2^(k-15)``, FP32 ulps at 448*2^k, n = 0, 2, 4, 9, 20, 39 for ``max(k, -k-1)`` below 4, 8, 16, 32, 64 and
    from there on: exhaustive emulation of libdevice's log2 for raw = amax * fl(1/448), k >= -42, and one ulp more where
    n > 0 for raw = amax / 448. Relative to 448*2^k at most 39 * 2^-15 / 448 < 2^-18. Float64, shape of ``exponent``.
    """
    k = np.asarray(exponent, np.int64)
    ulps = np.array(LOG2_BAND, np.float64)[np.searchsorted((4, 8, 16, 32, 64), np.maximum(k, -k - 1), side="right")]
    return ulps * np.exp2(k - 15.0)


def quantize_bound(y: Any, scale: Any, slack: Any = 0.0) -> torch.Tensor:
    """Bound on ``|scale * code - y|`` of e4m3 quantisation, round to nearest even, when nothing clamps.

    ``max(2^-4 * (|y|+slack), 2^-10 * scale) + slack``: half a step is at most 2^-4 of a normal, 2^-10 of a subnormal
    code. ``slack``: what the quantiser's own input may differ from ``y`` (rotation, a bound on z). A scale that is not
    a power of two adds ``2^-20 * (|y|+slack)`` for the rounded quotient or reciprocal. Clamping is refused beyond what
    an FP32 log2 does: ``|y| - slack <= 448*scale + log2_excess`` must hold (the excess for powers of two only). Such a
    lane errs by at most ``log2_excess + slack < 2^-18 * |y| + slack``, inside the first term; where only the slack
    reaches beyond, clamping moves codes toward y.

    y ``[..., K]``; scale ``[..., K/block]`` (FP32 values), positive. Returns float64 ``[..., K]``. Raises
    ``NotApplicable`` naming the first clamped element, NaN or unusable scale.
    """
    size, per_block = np.abs(finite_float64(y, "y")), finite_float64(scale, "scale")
    refuse_where(per_block <= 0, "scale", per_block, "is not a positive scale")
    if per_block.shape[-1] == 0 or size.shape[-1] % per_block.shape[-1]:
        raise ValueError(f"scale {per_block.shape} must hold [..., K/block] scales for K={size.shape[-1]}")
    width = size.shape[-1] // per_block.shape[-1]
    fraction, exponent = np.frexp(per_block)
    power = fraction == 0.5
    excess = np.where(power, log2_excess(exponent - 1), E4M3_MAX * QUOTIENT * per_block)
    largest_kept = np.repeat(E4M3_MAX * per_block + excess, width, axis=-1)
    scales, quotient = np.repeat(per_block, width, axis=-1), np.repeat(np.where(power, 0.0, QUOTIENT), width, axis=-1)
    margin = finite_float64(slack, "slack")
    refuse_where(margin < 0, "slack", margin, "is negative")
    largest = size + margin
    refuse_where(size - margin > largest_kept, "|y|", size, "exceeds 448 * scale: it clamps")
    step = np.maximum(E4M3_RELATIVE * largest, E4M3_ABSOLUTE * scales)
    return torch.as_tensor((step + quotient * largest + margin) * F64_SLACK)


def format_bound_z(
    arch: Arch | str,
    y: Any,
    a_scales: Any,
    w_codes: Any,
    w_scales: Any,
    gemm: Any,
    *,
    slack: Any = 0.0,
    gran_k: int | None = None,
) -> torch.Tensor:
    """Bound on ``|z^ - z|`` against *unquantised* activations y: ``sum_k |w_k| * q_k + gemm``, rigorous and loose.

    ``q_k = quantize_bound(y_k, scale_k, slack_k)``; ``gemm``: the arithmetic bound on the codes consumed.
    y (and slack) ``[T, G, K]``, weights and all scales as in ``grouped_gemm_bound``, gemm ``[T, G, R]``.
    """
    arch, y64 = get_arch(arch), finite_float64(y, "y")
    slacks = np.broadcast_to(finite_float64(slack, "slack"), y64.shape)
    operands = gemm_operands(arch, np.zeros(y64.shape, np.uint8), a_scales, w_codes, w_scales, gran_k)
    bound = finite_float64(gemm, "gemm").copy()
    if bound.shape != operands.shape:
        raise ValueError(f"gemm has shape {bound.shape}; expected {operands.shape}")
    for group in range(bound.shape[1]):
        step = quantize_bound(y64[:, group], operands.activation_scales(group), slacks[:, group]).numpy()
        bound[:, group] += product(step, np.abs(operands.weights(group)).T)
    return torch.as_tensor(bound * F64_SLACK)


def format_bound_y(
    arch: Arch | str, z: Any, z_bound: Any, z_scales: Any, w_codes: Any, w_scales: Any, gemm: Any, **options: Any
) -> torch.Tensor:
    """Bound on ``|y^ - y|`` of ``wo_b`` against its unquantised input z, itself known within ``z_bound``.

    ``sum_k |w_k| * quantize_bound(z_k, scale_k, slack=z_bound_k) + gemm``: the bound on z goes through ``|wo_b|``
    beside wo_b's own quantisation and arithmetic. z, z_bound ``[M, K]``; scales and weights as in ``gemm_bound``,
    gemm ``[M, N]`` on the codes consumed. Returns float64 ``[M, N]``.
    """
    weight, slack = (w_codes[None], w_scales[None]), z_bound[:, None]
    return format_bound_z(arch, z[:, None], z_scales[:, None], *weight, gemm[:, None], slack=slack, **options)[:, 0]


def tp_reduction_bound(partials: Any, kind: Reduction, *, partial_bounds: Any = 0.0) -> torch.Tensor:
    """Bound on ``|Y^ - Y|`` of the sum of n ranks' BF16 partials p_r, with ``P = sum_r |p_r|``.

    ``sum_r (B_r + half-ulp_bf16(p_r))`` and, for n > 1::

        bf16  (BF16 additions in any order, ring or tree):    gamma_{n-1}(2^-8) * P
        fp32  (FP32 additions, one rounding to BF16):         gamma_{n-1}(2^-24) * P + half-ulp_bf16(|sum p_r| + that)

    (Higham, ASNA, ch. 3.) ``partial_bounds``: B_r, a GEMM bound with ``output="fp32"``. Both ``[n, ...]``; returns
    float64 ``[...]``. Raises ``NotApplicable`` when ``(n-1) * 2^-8 >= 1`` (bf16), for NaN, Inf or overflow;
    ``ValueError`` for an unknown ``kind`` or no partial.
    """
    if kind not in ("bf16", "fp32"):
        raise ValueError(f"kind={kind!r} must be 'bf16' or 'fp32'")
    p = finite_float64(partials, "partials")
    if p.ndim < 1 or p.size == 0:
        raise NotApplicable(f"partials {p.shape} hold nothing to reduce")
    n, size = p.shape[0], np.abs(p).sum(0)
    refuse_where(~(size * (1 + UBF16) ** n < BF16_OVERFLOW), "P", size, "may overflow")
    bound = np.broadcast_to(finite_float64(partial_bounds, "partial_bounds"), p.shape).sum(0) + _half_ulp(p).sum(0)
    if n > 1:
        added = gamma(n - 1, UBF16 if kind == "bf16" else U32) * size
        bound = bound + added
        if kind == "fp32":
            bound = bound + _half_ulp(np.abs(p.sum(0)) + added * F64_SLACK)
    return torch.as_tensor(bound * F64_SLACK)
