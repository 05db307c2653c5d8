"""The stages as plain torch, to be handed on as source text: each function needs torch and its neighbours alone.

`exports` joins them into the executable reference of a FlashInfer-Bench definition. Codes leave as whole multiples of
2^-9, the smallest e4m3 step, and scales as exponents: that benchmark fails an element only where its absolute and its
relative error both exceed 1e-2, and between two different codes or exponents in these forms both always do.
"""

from __future__ import annotations

import torch


def fused_multiply_add(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x * y + z of FP32 values, rounded once to FP32: in float64 the product is exact and the sum is rounded to odd."""
    product, addend = x.double() * y.double(), z.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # exact (TwoSum)
    even = (total.view(torch.int64) & 1) == 0
    odd = torch.nextafter(total, torch.copysign(torch.full_like(total, torch.inf), error))
    return torch.where((error != 0) & even & total.isfinite(), odd, total).float()


def rotate_back(o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """Inverse RoPE of the last 64 of each head's values: o [T, H, D] BF16 or FP32 -> FP32, the cosine product fused."""
    values = o.float()
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    rope_dim = 2 * cos.shape[-1]
    even, odd = values[..., -rope_dim::2], values[..., 1 - rope_dim :: 2]
    turned = (fused_multiply_add(even, cos, odd * sin), fused_multiply_add(odd, cos, -(even * sin)))
    return torch.cat((values[..., :-rope_dim], torch.stack(turned, dim=-1).flatten(-2)), dim=-1)


def ceil_exponents(amax: torch.Tensor) -> torch.Tensor:
    """Smallest k with 2^k >= amax * fl(1/448), int32."""
    mantissa, exponent = torch.frexp(amax * torch.tensor(1 / 448, dtype=torch.float32, device=amax.device))
    return exponent - (mantissa == 0.5).int()


def log2_exponents(amax: torch.Tensor) -> torch.Tensor:
    """ceil(log2(amax / 448)) as the serving kernel's FP32 log2 gives it: k also for a few ulps above 448 * 2^k."""
    exponent = ceil_exponents(amax)
    lower = exponent - 1
    above = amax.view(torch.int32) - (((lower + 135) << 23) | 0x600000)  # ulps above 448 * 2^lower
    band = torch.full_like(exponent, 38)
    for low, high, width in ((-126, 63, 19), (-32, 31, 8), (-16, 15, 3), (-8, 7, 1), (-4, 3, 0)):
        if low == -126:
            band = torch.where(lower <= high, width, band)
        else:
            band = torch.where((lower >= low) & (lower <= high), width, band)
    return torch.where((above > 0) & (above <= band), lower, exponent)


def quantize_blocks(x: torch.Tensor, rule: str, lowest: int = -127) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 x [..., K] in blocks of 128: values of the e4m3 codes, FP32 [..., K], and scale exponents [..., K/128]."""
    blocks = x.unflatten(-1, (-1, 128))
    amax = blocks.abs().amax(-1).clamp(min=1e-10)
    exponents = (log2_exponents(amax) if rule == "log2" else ceil_exponents(amax)).clamp(min=lowest)
    scaled = blocks * torch.exp2(-exponents.float()).unsqueeze(-1)
    codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.float().flatten(-2), exponents


def rotate_and_quantize(
    o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, groups: int, rule: str
) -> dict[str, torch.Tensor]:
    """x_steps int32 [T, G, K], e4m3 values in units of 2^-9, and x_exponents int32 [T, G, K/128]."""
    x = rotate_back(o, positions, cos_sin_cache).reshape(o.shape[0], groups, -1)
    values, exponents = quantize_blocks(x, rule)
    return {"x_steps": (values * 512).int(), "x_exponents": exponents.int()}


def weight_values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float64 values of e4m3 codes [..., N, K] with an FP32 scale per 128 x 128 block, [..., ceil(N/128), K/128]."""
    spread = scale.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return codes.float().double() * spread[..., : codes.shape[-2], : codes.shape[-1]]


def grouped_wo_a(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> dict[str, torch.Tensor]:
    """z BF16 [T, G, R] of codes x [T, G, K] with scales [T, G, K/128] and weight [G, R, K]: summed in float64."""
    values = x.float().double() * x_scale.double().repeat_interleave(128, -1)
    z = torch.einsum("tgk,grk->tgr", values, weight_values(weight, weight_scale))
    return {"z": z.to(torch.bfloat16)}


def wo_b(z: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """y BF16 [T, hidden] of z BF16 [T, G*R], quantised per 1 x 128 as served, and weight [hidden, G*R]."""
    values, exponents = quantize_blocks(z.float(), "ceil", lowest=-33)
    x = values.double() * torch.exp2(exponents.double()).repeat_interleave(128, -1)
    return {"y": (x @ weight_values(weight, weight_scale).T).to(torch.bfloat16)}


QUANTIZERS = (
    fused_multiply_add, rotate_back, ceil_exponents, log2_exponents, quantize_blocks, rotate_and_quantize
)  # fmt: skip
WO_A = (weight_values, grouped_wo_a)
WO_B = (ceil_exponents, log2_exponents, quantize_blocks, weight_values, wo_b)
