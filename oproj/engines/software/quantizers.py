"""The software quantisers on torch tensors: the serving engine's fused kernel and its ``wo_b`` quantiser.

Each quantiser is a row of numbers (floor of the block maximum, scale rule, code of a NaN) over one bit model,
``quant_lanes``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from oproj.activation import empty_scales, empty_values, scale_columns, tma_aligned_size, ue8m0_to_float
from oproj.engines.rope_checks import check_inv_rope
from oproj.engines.software import quant_lanes
from oproj.engines.software.gemm import run_parallel, thread_count

VARIANTS = ("fma_cos", "mul_mul_add")


@dataclass(frozen=True)
class Quantizer:
    """A block quantiser with power-of-two scales, as numbers."""

    name: str
    amax_floor: float
    min_scale_byte: int  # from a floor on the scale itself
    log2_rule: bool  # 2**ceil(log2(amax/448)) in FP32 instead of the exact ceiling
    nan_code: int
    source: str

    def rule(self) -> tuple[np.int32, int, bool, int]:
        """What the kernels of ``quant_lanes`` take: floor as FP32 bits, smallest exponent field, rule, code of NaN."""
        return _float_bits(self.amax_floor), self.min_scale_byte, self.log2_rule, self.nan_code


VLLM_FUSED = Quantizer(
    "vllm-fused", 1e-10, 0, True, 0x7E, "vLLM 0.33.0 deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py"
)
VLLM_GROUP = Quantizer("vllm-group", 1e-10, 94, False, 0xFE, "vLLM 0.33.0 csrc per_token_group_quant.cu")


def _float_bits(value: float) -> np.int32:
    return np.float32(value).view(np.int32)


def _flat_bits(x: torch.Tensor) -> np.ndarray:
    """The BF16 bits of ``x``'s storage from its first element on, 1-D; elements are addressed by strides."""
    extent = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return x.detach().as_strided((extent,), (1,)).view(torch.int16).numpy().view(np.uint16)


def _by_tokens(tokens: int, kernel: Callable[[int, int], None]) -> None:
    step = max(1, -(-tokens // (4 * thread_count())))
    run_parallel([partial(kernel, t0, min(t0 + step, tokens)) for t0 in range(0, tokens, step)])


def inv_rope_fp8_quant(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int = 448,
    rope_dim: int = 64,
    quant_group_size: int = 128,
    tma_aligned_scales: bool = False,
    quantize: bool = True,
    variant: str = "fma_cos",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The serving engine's fused kernel on CPU tensors; see ``oproj.quantize.fused_inv_rope_fp8_quant``.

    ``variant``: ``fma_cos`` (cosine product fused, as compiled today) or ``mul_mul_add`` (three roundings).
    """
    check_inv_rope(
        o,
        positions,
        cos_sin_cache,
        n_groups,
        heads_per_group,
        nope_dim,
        rope_dim,
        quant_group_size,
        tma_aligned_scales,
        quantize,
    )
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r} is unknown; known: {', '.join(VARIANTS)}")
    if o.device.type != "cpu":
        raise ValueError(f"o is on {o.device}; the software engine works on CPU tensors")
    source = (_flat_bits(o), np.array(o.stride()[:2], np.int64))
    table = np.ascontiguousarray(cos_sin_cache.detach().numpy())
    rotation = (positions.contiguous().numpy(), table, heads_per_group, nope_dim, rope_dim)
    shape = (o.shape[0], n_groups, heads_per_group * (nope_dim + rope_dim))
    if not quantize:
        values = _rotated(source, rotation, shape, variant)
        return values, torch.empty(0, dtype=torch.int32 if tma_aligned_scales else torch.float32)
    values, fields = _rotated_codes(source, rotation, shape, variant, quant_group_size)
    return values, _scales_from_fields(fields, o.shape[0], tma_aligned_scales)


def _rotated(source: tuple, rotation: tuple, shape: tuple[int, int, int], variant: str) -> torch.Tensor:
    """BF16 values ``[T, G, K]``."""
    values = empty_values(*shape, torch.bfloat16)
    bits = values.transpose(0, 1).view(torch.int16).numpy().view(np.uint16)
    fused = variant == "fma_cos"
    _by_tokens(shape[0], lambda t0, t1: quant_lanes.rotate_tokens(*source, t0, t1, *rotation, fused, bits))
    return values


def _rotated_codes(
    source: tuple, rotation: tuple, shape: tuple[int, int, int], variant: str, block: int
) -> tuple[torch.Tensor, np.ndarray]:
    """e4m3 codes ``[T, G, K]`` and UE8M0 bytes ``[G, K/block, Ta]`` of the fused kernel."""
    tokens, groups, k = shape
    values = empty_values(tokens, groups, k, torch.float8_e4m3fn)
    codes = values.transpose(0, 1).view(torch.uint8).numpy()
    fields = np.zeros((groups, k // block, tma_aligned_size(tokens, 4)), np.uint8)
    numbers = (variant == "fma_cos", block, *VLLM_FUSED.rule())
    _by_tokens(tokens, lambda t0, t1: quant_lanes.quantize_tokens(*source, t0, t1, *rotation, *numbers, codes, fields))
    return values, fields


def quantize_groups(
    x: torch.Tensor, *, group_size: int = 128, packed: bool = False, quantizer: Quantizer = VLLM_GROUP
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise BF16 ``[M, K]`` per 1 x ``group_size`` with power-of-two scales.

    Returns e4m3 codes ``[M, K]`` contiguous and scales ``[M, K/group_size]`` FP32, or packed int32
    ``[M, K/(4*group_size)]``, both MN-major with strides ``(1, 4*ceil(M/4))``. Raises ``TypeError``/``ValueError``.
    """
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x has dtype {x.dtype}; expected torch.bfloat16")
    if x.dim() != 2 or (x.numel() and x.stride(1) != 1):
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}; expected [M, K] with unit last stride"
        )
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    rows, k = x.shape
    if k % (group_size * (4 if packed else 1)):
        raise ValueError(f"K={k} must be a multiple of {group_size * (4 if packed else 1)}")
    codes = torch.empty((rows, k), dtype=torch.float8_e4m3fn)
    fields = np.zeros((1, k // group_size, tma_aligned_size(rows, 4)), np.uint8)
    bits, target = _flat_bits(x), codes.view(torch.uint8).numpy()
    _by_tokens(
        rows,
        lambda t0, t1: quant_lanes.quantize_rows(
            bits, x.stride(0), t0, t1, k, group_size, *quantizer.rule(), target, fields[0]
        ),
    )
    return codes, _scales_from_fields(fields, rows, packed)[:, 0]


def _scales_from_fields(fields: np.ndarray, tokens: int, packed: bool) -> torch.Tensor:
    """Scales ``[T, G, columns]`` in the MN-major layout from UE8M0 bytes ``[G, blocks, Ta]``."""
    groups, blocks, _ = fields.shape
    scales = empty_scales(tokens, groups, scale_columns(blocks, 1, packed), packed)
    by_token = torch.from_numpy(fields[:, :, :tokens]).permute(2, 0, 1)
    if packed:
        quads = by_token.unflatten(2, (blocks // 4, 4)).to(torch.int32)
        scales.copy_(quads[..., 0] | quads[..., 1] << 8 | quads[..., 2] << 16 | quads[..., 3] << 24)
    else:
        infinite = by_token == 255  # an infinite maximum has an infinite FP32 scale, but UE8M0 byte 255 is NaN
        scales.copy_(ue8m0_to_float(by_token).masked_fill(infinite, float("inf")))
    return scales
