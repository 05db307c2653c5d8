"""Number formats as float64: e4m3 codes, UE8M0 scale bytes, packed scale words, block-scaled tensors.

e4m3 (OCP FP8; no infinity): sign, 4 exponent bits E, 3 fraction bits M, bias 7.
    E > 0: (1 + M/8) * 2^(E-7);  E = 0: M/8 * 2^-6;  E = 15 and M = 7: NaN
UE8M0 (OCP MX): byte b means 2^(b-127), 255 is NaN; there is no zero and no sign.
Packed UE8M0: an int32 word holds the scales of blocks 4j .. 4j+3, block 4j in its lowest byte.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _e4m3_value(code: int) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    significand = fraction + 8 if exponent else fraction  # in eighths
    magnitude = math.ldexp(significand, max(exponent, 1) - 7 - 3)
    return -magnitude if code & 128 else magnitude


_E4M3 = [_e4m3_value(code) for code in range(256)]
_UE8M0 = [math.ldexp(1.0, byte - 127) for byte in range(255)] + [math.nan]


def as_float64(tensor: Tensor, name: str) -> Tensor:
    """The same values in float64 (exact). A float64 tensor comes back as it is, not copied.

    TypeError for other dtypes than BF16, FP16, FP32, FP64: codes mean nothing without their scales.
    """
    if tensor.dtype not in _WIDE:
        raise TypeError(f"{name} is {tensor.dtype}; wanted: BF16, FP16, FP32, FP64 (dequantize codes first)")
    return tensor.to(torch.float64)


def _look_up(table: list[float], codes: Tensor, narrow: torch.dtype, name: str) -> Tensor:
    if codes.dtype not in (torch.uint8, narrow):
        raise TypeError(f"{name}: dtype {codes.dtype}; wanted: uint8 or {narrow}")
    values = torch.tensor(table, dtype=torch.float64, device=codes.device)
    index = codes.view(torch.uint8).reshape(-1).to(torch.int32)
    return values.index_select(0, index).view(codes.shape)


def e4m3_to_float64(codes: Tensor) -> Tensor:
    """Values of e4m3 codes (uint8 or float8_e4m3fn, any shape and strides): float64, contiguous. Exact."""
    return _look_up(_E4M3, codes, torch.float8_e4m3fn, "codes")


def ue8m0_to_float64(bytes_: Tensor) -> Tensor:
    """Values of UE8M0 bytes (uint8 or float8_e8m0fnu, any shape and strides): float64, contiguous. Exact."""
    return _look_up(_UE8M0, bytes_, torch.float8_e8m0fnu, "scale bytes")


def unpack_ue8m0(words: Tensor) -> Tensor:
    """Scale bytes of packed words: int32 [..., W] of any strides -> uint8 [..., 4 W], lowest byte first."""
    if words.dtype != torch.int32:
        raise TypeError(f"packed scale words: dtype {words.dtype}; wanted: int32")
    shifted = [words >> shift & 255 for shift in (0, 8, 16, 24)]  # the mask undoes the sign extension
    return torch.stack(shifted, dim=-1).flatten(-2).to(torch.uint8)


def _scale_values(scale: Tensor, blocks: int) -> Tensor:
    """Float64 scales [..., rows, blocks] of FP32/FP64 values, UE8M0 bytes, or packed int32 words."""
    if scale.dtype in (torch.float32, torch.float64):
        return scale.to(torch.float64)
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return ue8m0_to_float64(scale)
    if scale.dtype != torch.int32:
        raise TypeError(f"scale: dtype {scale.dtype}; wanted: FP32, FP64, UE8M0 bytes or packed int32")
    if scale.shape[-1] != -(-blocks // 4):
        raise ValueError(f"scale {list(scale.shape)}: {blocks} blocks need {-(-blocks // 4)} packed words")
    return ue8m0_to_float64(unpack_ue8m0(scale))[..., :blocks]


def dequantize(codes: Tensor, scale: Tensor, *, block_k: int, block_mn: int = 1) -> Tensor:
    """code * scale for e4m3 codes [..., MN, K], one scale per block_mn rows and block_k values of K.

    scale [..., ceil(MN/block_mn), S]: FP32 (or FP64) and UE8M0 bytes have S = K/block_k; int32 is packed
    UE8M0, S = ceil(K/block_k/4). Activations are [T, G, K] or [T, K] with block_mn = 1; weights [G, R, K] or
    [hidden, K] with block_mn = 128 where 128 rows share an FP32 scale, and 1 for packed ones. Any strides.
    Returns float64 [..., MN, K], contiguous; exact for FP32 and UE8M0 (4 and 24 significand bits fit in 53).
    NaN, Inf and 0 * Inf = NaN as IEEE 754 says. ValueError for shapes that do not fit, TypeError for dtypes.
    Layouts: DeepGEMM csrc/utils/layout.hpp, csrc/apis/einsum.hpp.
    """
    shapes = f"codes {list(codes.shape)}, scale {list(scale.shape)}, block_mn {block_mn}, block_k {block_k}"
    if block_k < 1 or block_mn < 1:
        raise ValueError(f"{shapes}: block sizes must be positive")
    if codes.dim() < 2 or scale.dim() != codes.dim():
        raise ValueError(f"{shapes}: codes and scale need the same rank, 2 or more")
    rows, k = codes.shape[-2:]
    if k % block_k:
        raise ValueError(f"{shapes}: K = {k} must be a multiple of block_k")
    factors = _scale_values(scale, k // block_k)
    wanted = [*codes.shape[:-2], -(-rows // block_mn), k // block_k]
    if list(factors.shape) != wanted:
        raise ValueError(f"{shapes}: the scales must be {wanted} (before packing)")
    if block_mn > 1:
        factors = factors.index_select(-2, torch.arange(rows, device=scale.device) // block_mn)
    values = e4m3_to_float64(codes)
    values.unflatten(-1, (k // block_k, block_k)).mul_(factors.unsqueeze(-1))
    return values
