"""The software quantisers on torch tensors: whole matrices, and heads that are rotated back first.

What a quantiser does is its row in ``quantizer_table``; here are arguments, layouts and threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from oproj.activation import empty_scales, empty_values, scale_columns, tma_aligned_size
from oproj.engines.rope_checks import check_inv_rope
from oproj.engines.software import quant_lanes
from oproj.engines.software.gemm import run_parallel, thread_count
from oproj.engines.software.quant_lanes import ROTATIONS
from oproj.engines.software.quantizer_table import VLLM_FUSED, Quantizer, get_quantizer

VARIANTS = VLLM_FUSED.rotations
WORDS = {torch.bfloat16: (torch.int16, np.uint16), torch.float32: (torch.int32, np.uint32)}


def _flat_bits(x: torch.Tensor) -> np.ndarray:
    """The BF16 or FP32 bits of ``x``'s storage from its first element on, 1-D; elements are addressed by strides."""
    signed, unsigned = WORDS[x.dtype]
    extent = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return x.detach().as_strided((extent,), (1,)).view(signed).numpy().view(unsigned)


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
    source, rotation = _rotation_arguments(o, positions, cos_sin_cache, heads_per_group, nope_dim, rope_dim, variant)
    shape = (o.shape[0], n_groups, heads_per_group * (nope_dim + rope_dim))
    if not quantize:
        values = _rotated(source, rotation, shape)
        return values, torch.empty(0, dtype=torch.int32 if tma_aligned_scales else torch.float32)
    return _rotated_codes(source, rotation, shape, VLLM_FUSED, quant_group_size, tma_aligned_scales)


def rotate_and_quantize(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    quantizer: Quantizer | str = "rope-quant",
    *,
    n_groups: int,
    heads_per_group: int = 8,
    nope_dim: int = 448,
    rope_dim: int = 64,
    rotation: str = "fma_cos",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention accumulators rotated back in FP32 and quantised without a rounding between, as an epilogue does.

    o: FP32 (or BF16, where the row takes it) ``[T, n_groups*heads_per_group, nope_dim+rope_dim]``, unit last stride;
    positions and cos_sin_cache as ``oproj.quantize.fused_inv_rope_fp8_quant``. Returns e4m3 codes ``[T, G, K]``,
    strides ``(K, T*K, 1)``, and the packed scales int32 ``[T, G, K/(4*block)]``, strides ``(1, columns*Ta, Ta)``,
    ``Ta = 4*ceil(T/4)``; block is the largest of the row. ``rotation``: which product is fused, one the row declares.
    Source: FlashInfer 0.7.4 ``fmhaReduction.cu`` for ``rope-quant``. Raises ``TypeError``/``ValueError`` that names the
    argument, also for a NaN or an Inf of which the row's source says nothing.
    """
    row = get_quantizer(quantizer)
    if rotation not in row.rotations:
        raise ValueError(f"rotation={rotation!r} is not declared by {row.name}; declared: {row.rotations or 'none'}")
    _check_input("o", o, row)
    if o.dim() != 3:
        raise ValueError(f"o has shape {tuple(o.shape)}; expected [T, heads, head_dim]")
    if not o.numel():
        o = torch.empty(o.shape, dtype=o.dtype)  # an empty tensor may have any strides
    if o.stride(-1) != 1 and o.numel():
        raise ValueError(f"o has strides {o.stride()}; the last one must be 1")
    block = max(row.blocks)
    # The checks speak of BF16: half of an FP32 buffer's words stands for it, with the same shape.
    stand_in = o.view(torch.bfloat16)[..., : o.shape[-1]]
    packed = "packed" in row.formats
    sizes = (n_groups, heads_per_group, nope_dim, rope_dim, block, packed, True)
    check_inv_rope(stand_in, positions, cos_sin_cache, *sizes)
    source, turned = _rotation_arguments(o, positions, cos_sin_cache, heads_per_group, nope_dim, rope_dim, rotation)
    shape = (o.shape[0], n_groups, heads_per_group * (nope_dim + rope_dim))
    return _rotated_codes(source, turned, shape, row, block, packed)


def _rotation_arguments(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    heads_per_group: int,
    nope_dim: int,
    rope_dim: int,
    rotation: str,
) -> tuple[tuple, tuple]:
    """What the kernels take: bits of ``o`` with its strides, and everything of the rotation."""
    table = np.ascontiguousarray(cos_sin_cache.detach().numpy())
    source = (_flat_bits(o), np.array(o.stride()[:2], np.int64))
    return source, (positions.contiguous().numpy(), table, heads_per_group, nope_dim, rope_dim, ROTATIONS[rotation])


def _rotated(source: tuple, rotation: tuple, shape: tuple[int, int, int]) -> torch.Tensor:
    """BF16 values ``[T, G, K]``."""
    values = empty_values(*shape, torch.bfloat16)
    bits = values.transpose(0, 1).view(torch.int16).numpy().view(np.uint16)
    _by_tokens(shape[0], lambda t0, t1: quant_lanes.rotate_tokens(*source, t0, t1, *rotation, bits))
    return values


def _rotated_codes(
    source: tuple, rotation: tuple, shape: tuple[int, int, int], row: Quantizer, block: int, packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes ``[T, G, K]`` and scales ``[T, G, columns]`` in the MN-major layout."""
    tokens, groups, k = shape
    values = empty_values(tokens, groups, k, torch.float8_e4m3fn)
    codes = values.transpose(0, 1).view(torch.uint8).numpy()
    bits = np.zeros((groups, k // block, tma_aligned_size(tokens, 4)), np.int32)
    numbers = (block, row.rule(), codes, bits)
    _by_tokens(tokens, lambda t0, t1: quant_lanes.quantize_tokens(*source, t0, t1, *rotation, *numbers))
    _refuse_unstated(row, bits)
    return values, _mn_major_scales(bits, tokens, packed)


def quantize_matrix(
    x: torch.Tensor, quantizer: Quantizer | str, *, group_size: int = 128, packed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise BF16 or FP32 ``[M, K]`` (unit last stride) as the named row of ``quantizer_table`` does.

    Returns e4m3 codes ``[M, K]`` contiguous and scales as that producer writes them. Rows: FP32 ``[M, blocks]`` or,
    for ``packed``, UE8M0 int32 ``[M, blocks/4]``, contiguous or MN-major with strides ``(1, 4*ceil(M/4))``; tiles:
    FP32 ``[ceil(M/b), ceil(K/b)]``; channels: FP32 ``[M/b, K]``. Raises ``TypeError``/``ValueError`` that names the
    argument, also for a NaN or an Inf of which the row's source says nothing.
    """
    row = get_quantizer(quantizer)
    _check_matrix(x, row, group_size, packed)
    if row.shape == "rows":
        codes, bits = _quantized_rows(x, row, group_size)
        return codes, _row_scales(bits, x.shape[0], row.mn_major, packed)
    if row.shape == "channels":
        codes, bits = _quantized_rows(x.T.contiguous(), row, group_size)
        return codes.T.contiguous(), torch.from_numpy(bits[:, : x.shape[1]].copy()).view(torch.float32)
    tall, wide = -(-x.shape[0] // group_size), -(-x.shape[1] // group_size)
    padded = x.new_zeros((tall * group_size, wide * group_size))
    padded[: x.shape[0], : x.shape[1]] = x
    tiles = padded.view(tall, group_size, wide, group_size).transpose(1, 2).reshape(tall * wide, group_size**2)
    codes, bits = _quantized_rows(tiles, row, group_size**2)
    grid = codes.view(tall, wide, group_size, group_size).transpose(1, 2).reshape(padded.shape)
    scales = torch.from_numpy(bits[:, : tall * wide].reshape(tall, wide).copy()).view(torch.float32)
    return grid[: x.shape[0], : x.shape[1]].contiguous(), scales


def quantize_groups(
    x: torch.Tensor, *, group_size: int = 128, packed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise z, BF16 ``[M, K]``, per 1 x ``group_size`` as the serving engine does before ``wo_b``.

    Returns and raises as ``quantize_matrix`` with ``vllm-group-packed`` or ``vllm-group-unpacked``.
    """
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x has dtype {x.dtype}; expected torch.bfloat16")
    row = "vllm-group-packed" if packed else "vllm-group-unpacked"
    return quantize_matrix(x, row, group_size=group_size, packed=packed)


def _check_input(name: str, x: torch.Tensor, row: Quantizer) -> None:
    expected = [f"torch.{dtype}" for dtype in row.inputs]
    if str(x.dtype) not in expected:
        raise TypeError(f"{name} has dtype {x.dtype}; {row.name} takes {' or '.join(expected)}")
    if x.device.type != "cpu":
        raise ValueError(f"{name} is on {x.device}; the software quantisers work on CPU tensors")


def _check_matrix(x: torch.Tensor, row: Quantizer, group_size: int, packed: bool) -> None:
    if x.dim() != 2 or (x.numel() and x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}; expected [M, K] with unit last stride"
        )
    _check_input("x", x, row)
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    if group_size not in row.blocks:
        raise ValueError(f"group_size={group_size} is none of {row.name}; it has {row.blocks}")
    if ("packed" if packed else "fp32") not in row.formats:
        raise ValueError(f"packed={packed} is none of {row.name}; its scales are {' or '.join(row.formats)}")
    axis, size = ("M", x.shape[0]) if row.shape == "channels" else ("K", x.shape[1])
    whole = -(-size // group_size) * group_size if row.pads else size
    if whole % (group_size * (4 if packed else 1)):
        raise ValueError(f"{axis}={size} must be a multiple of {group_size * (4 if packed else 1)}")


def _quantized_rows(x: torch.Tensor, row: Quantizer, block: int) -> tuple[torch.Tensor, np.ndarray]:
    """e4m3 codes ``[M, K]`` and FP32 bits of the scales, int32 ``[blocks, Ma]``, per 1 x ``block``."""
    rows, k = x.shape
    codes = torch.empty((rows, k), dtype=torch.float8_e4m3fn)
    bits = np.zeros((-(-k // block), tma_aligned_size(rows, 4)), np.int32)
    source, target, rule = _flat_bits(x), codes.view(torch.uint8).numpy(), row.rule()
    _by_tokens(
        rows, lambda t0, t1: quant_lanes.quantize_rows(source, x.stride(0), t0, t1, k, block, rule, target, bits)
    )
    _refuse_unstated(row, bits)
    return codes, bits


def _refuse_unstated(row: Quantizer, bits: np.ndarray) -> None:
    """Raise where a scale is no number and the row's source does not say what happens then."""
    if row.inf_stated:
        return
    found = np.argwhere(bits >= quant_lanes.INF_BITS)
    if found.size:
        what = "an Inf" if row.nan_code is not None else "a NaN or an Inf"
        raise ValueError(
            f"{what} in {len(found)} blocks, first at (..., block, row) = {tuple(found[0].tolist())}: undefined for "
            f"{row.name} ({row.source})"
        )


def _mn_major_scales(bits: np.ndarray, tokens: int, packed: bool) -> torch.Tensor:
    """Scales ``[T, G, columns]`` in the MN-major layout from FP32 bits ``[G, blocks, Ta]``."""
    groups, blocks, _ = bits.shape
    scales = empty_scales(tokens, groups, scale_columns(blocks, 1, packed), packed)
    by_token = torch.from_numpy(bits[:, :, :tokens]).permute(2, 0, 1)
    return scales.copy_(_words(by_token) if packed else by_token.view(torch.float32))


def _words(bits: torch.Tensor) -> torch.Tensor:
    """Packed words ``[..., blocks/4]`` of FP32 bits of powers of two; Inf has byte 255."""
    quads = (bits >> 23).unflatten(-1, (bits.shape[-1] // 4, 4))
    return quads[..., 0] | quads[..., 1] << 8 | quads[..., 2] << 16 | quads[..., 3] << 24


def _row_scales(bits: np.ndarray, rows: int, mn_major: bool, packed: bool) -> torch.Tensor:
    """Scales ``[M, columns]`` in the producer's layout from FP32 bits ``[blocks, Ma]``."""
    if mn_major:
        return _mn_major_scales(bits[None], rows, packed)[:, 0]
    by_row = torch.from_numpy(bits[:, :rows]).T.contiguous()
    return _words(by_row) if packed else by_row.view(torch.float32)
