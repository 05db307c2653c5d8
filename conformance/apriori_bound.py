"""Evaluation of the a-priori bound by float64 products of magnitudes; the inequality is in ``bounds.py``."""

from __future__ import annotations

import numpy as np

from conformance.operands import E4M3_SUBNORMAL, GemmOperands, product, refuse_where
from conformance.running_bound import HALF_MIN_F32, U32
from oproj.arch import Arch


def apriori_group(
    arch: Arch, operands: GemmOperands, group: int, kappa: int | None, any_order: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exact result, bound on the FP32 result's error, and sum of magnitudes of one group, float64 ``[T, R]``.

    ``any_order``: every product is charged as if it came first.
    """
    mma, steps = arch.mma, operands.depth // arch.mma.k
    a, w = operands.activations(group), operands.weights(group).T
    size_a, size_w = np.abs(a), np.abs(w)
    per_step, promotion = _charges(arch, operands, any_order)
    constant = _kappa(operands, group, kappa) * mma.k * 2.0**-mma.frac_bits + 2.0**-mma.out_frac_bits
    bound = constant * product(size_a * per_step, size_w) + product(size_a * promotion, size_w)
    tiny = 2.0 ** (-126 - mma.out_frac_bits) + (mma.k + 1) * 2.0 ** (-126 - mma.frac_bits)
    smallest = steps * (tiny if mma.scales_inside else HALF_MIN_F32)
    return product(a, w), bound + smallest, product(size_a, size_w)


def _charges(arch: Arch, operands: GemmOperands, any_order: bool) -> tuple[np.ndarray, np.ndarray]:
    """Per k: how many steps see its product, and the relative FP32 roundings of promotion that do."""
    depth, block = operands.depth, arch.promotion_k or operands.depth
    position = np.zeros(depth, dtype=np.int64) if any_order else np.arange(depth)
    steps = (block - position % block + arch.mma.k - 1) // arch.mma.k
    if arch.promotion_k is None:
        return steps.astype(np.float64), np.zeros(depth)
    products = operands.a_scales[:, :, None].astype(np.float64) * operands.w_scales[None].astype(np.float64)
    inexact = bool((products.astype(np.float32) != products).any())
    blocks = depth // block
    grown = (1 + U32) ** (blocks + 3)  # fl32(sa*sb), and the running final that each block rounds once
    return steps * grown, U32 * (inexact + blocks - position // block) * grown


def _kappa(operands: GemmOperands, group: int, given: int | None) -> np.ndarray:
    """The kappa that the codes of each output need ``[T, R]``, or ``given`` where that is not too small."""
    sub_a = E4M3_SUBNORMAL[operands.a_codes[:, group]]
    sub_w = E4M3_SUBNORMAL[operands.w_codes[group]]
    both = sub_a.astype(np.float32) @ sub_w.T.astype(np.float32) > 0
    needed = np.where(both, 64, np.where(sub_a.any(1)[:, None] | sub_w.any(1)[None], 8, 1))
    if given is None:
        return needed
    refuse_where(needed > given, f"kappa of group {group}", needed, f"is what the subnormal codes need; kappa={given}")
    return np.full_like(needed, given)
