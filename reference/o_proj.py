"""The two projections in float64, and the chain from attention output to hidden state.

    z[t, g, r] = sum_k x[t, g, k] * wo_a[g, r, k]      (block-diagonal: a group meets its own rows only)
    y[t, n]    = sum_c z[t, c] * wo_b[n, c]            (group-major: c = g * R + r)

BLAS sums in its own order, so a result s of n products is off by at most gamma_n * sum |products|,
gamma_n = n u/(1 - n u), u = 2^-53, where nothing over- or underflows (Higham, Accuracy and Stability of
Numerical Algorithms, Theorem 3.1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.formats import as_float64
from reference.rope import inverse_rope


@torch.no_grad()
def grouped_wo_a(x: Tensor, w: Tensor) -> Tensor:
    """x [T, G, K] times w [G, R, K], group by group: float64 [T, G, R], contiguous.

    BF16, FP16, FP32 or FP64 of any strides; FP64 whose last dim is contiguous is not copied.
    ValueError for shapes that do not fit, TypeError for other dtypes (dequantize codes first).
    """
    if x.dim() != 3 or w.dim() != 3 or x.shape[1] != w.shape[0] or x.shape[2] != w.shape[2]:
        raise ValueError(f"x must be [T, G, K] and w [G, R, K], got {list(x.shape)} and {list(w.shape)}")
    x, w = as_float64(x, "x"), as_float64(w, "w")
    z = x.new_empty(x.shape[0], w.shape[0], w.shape[1])
    # Group-first views have strides that BLAS takes as they are, for the output too.
    torch.bmm(x.transpose(0, 1), w.transpose(1, 2), out=z.transpose(0, 1))
    return z


@torch.no_grad()
def wo_b(z: Tensor, w: Tensor) -> Tensor:
    """z [T, G, R] or [T, G*R] (group-major) times w [hidden, G*R]: float64 [T, hidden].

    With the columns of one rank in w and its groups in z this is that rank's partial sum.
    ValueError for shapes that do not fit, TypeError for dtypes other than BF16, FP16, FP32, FP64.
    """
    if z.dim() not in (2, 3) or w.dim() != 2 or math.prod(z.shape[1:]) != w.shape[1]:
        got = f"{list(z.shape)} and {list(w.shape)}"
        raise ValueError(f"z must be [T, G, R] or [T, G*R] and w [hidden, G*R], got {got}")
    return as_float64(z, "z").flatten(1) @ as_float64(w, "w").T


_apply_wo_b = wo_b  # o_proj's argument has the same name


def o_proj(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor, wo_b: Tensor,
    *, n_groups: int, rope_dim: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The chain: o [T, H, D], positions int64 [T], cos_sin_cache [max_pos, rope_dim], wo_a [G, R, H/G * D],
    wo_b [hidden, G*R] -> (x [T, G, H/G * D], z [T, G, R], y [T, hidden]), all float64, G = n_groups.

    No step quantises or rounds to a narrower format. Errors as in inverse_rope, grouped_wo_a and wo_b, and
    ValueError where the heads do not divide into groups.
    """
    if o.dim() != 3 or n_groups < 1 or o.shape[1] % n_groups:
        raise ValueError(f"o must be [T, H, D], H a multiple of n_groups = {n_groups}; got {list(o.shape)}")
    tokens, heads, head_dim = o.shape
    x = inverse_rope(o, positions, cos_sin_cache, rope_dim=rope_dim)
    x = x.view(tokens, n_groups, heads // n_groups * head_dim)
    z = grouped_wo_a(x, wo_a)
    return x, z, _apply_wo_b(z, wo_b)
