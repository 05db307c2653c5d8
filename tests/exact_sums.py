"""Exact values of many block-scaled sums at once: integers in float64 where they fit, Python integers beyond.

A product of two e4m3 codes is an integer below 2**36 in units of 2**-18, so the sum of one step of 32 is exact in
float64 in any order; scales then shift or multiply whole steps as Python integers.
"""

from __future__ import annotations

import numpy as np

import exact_fp8 as exact
from bound_problems import E4M3_VALUES, Problem

UNIT = exact.UNIT  # everything is in units of 2**-UNIT
STEP = exact.STEP_K


def units(x: np.ndarray) -> np.ndarray:
    """Float64 numbers as Python integers in units of ``2**-UNIT``; exact, or ``ValueError``."""
    fraction, exponent = np.frexp(x)
    mantissa = (fraction * 2.0**53).astype(np.int64).astype(object)
    shift = np.where(x == 0, 0, exponent.astype(np.int64) - 53 + UNIT)
    if (shift < 0).any():
        raise ValueError(f"a number below 2**{52 - UNIT} may not be held")
    return mantissa << shift.astype(object)


def step_sums(p: Problem) -> np.ndarray:
    """Unscaled sum of every step, object ``[T, G, R, K/32]``, in units of 2**-18."""
    tokens, groups, rows = *p.a.shape[:2], p.w.shape[1]
    a = (E4M3_VALUES[p.a] * 2.0**9).reshape(tokens, groups, -1, STEP)
    w = (E4M3_VALUES[p.w] * 2.0**9).reshape(groups, rows, -1, STEP)
    return np.einsum("tgsk,grsk->tgrs", a, w, optimize=True).astype(np.int64).astype(object)


def exact_values(p: Problem) -> np.ndarray:
    """Every output, object ``[T, G, R]``, in units of ``2**-UNIT``."""
    sums, row = step_sums(p), exact.ROWS[p.arch]
    if row.promotion is None:
        per_step = (p.gran_k or STEP) // STEP
        a, w = (_exponents(words.numpy(), per_step, sums.shape[-1]) for words in (p.a_scales, p.w_scales))
        shift = (a[:, :, None] + w[None]).astype(object) + (UNIT - 18)
        return (sums << shift).sum(-1)
    blocks = sums.reshape(*sums.shape[:-1], -1, row.promotion // STEP).sum(-1)
    a, w = (units(scales.double().numpy()) for scales in (p.a_scales, p.w_scales))
    w = np.repeat(w, 128, axis=1)[:, : sums.shape[2]]
    return (blocks * a[:, :, None] * w[None]).sum(-1) >> (UNIT + 18)


def _exponents(words: np.ndarray, per_step: int, steps: int) -> np.ndarray:
    """Exponent of every step from packed UE8M0 words, int64 ``[..., steps]``."""
    contiguous = np.ascontiguousarray(words)
    as_bytes = contiguous.view(np.uint8).reshape(*words.shape[:-1], -1).astype(np.int64) - 127
    return np.repeat(as_bytes, per_step, axis=-1)[..., :steps]
