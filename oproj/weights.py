"""Weight scales: requantised to powers of two, and from block form to the layout that each kernel reads.

Sources: vLLM 0.33.0 ``quantization/utils/fp8_utils`` and DeepGEMM 54e2261 ``csrc/utils/layout.hpp``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oproj.activation import float_to_ue8m0, pack_ue8m0, tma_aligned_size
from oproj.arch import Arch, get_arch
from oproj.engines.software.quantizers import quantize_matrix


def layout_weight_scales(
    scale: torch.Tensor, *, arch: Arch | str, rows: int, block: tuple[int, int] = (128, 128)
) -> torch.Tensor:
    """FP32 block scales ``[..., ceil(rows/block[0]), K/block[1]]`` in the layout of ``arch``.

    FP32 rows (SM90) keep them contiguous. Packed rows repeat each scale for its rows and pack four K blocks a word:
    int32 ``[..., rows, K/(4*block[1])]``, row index with stride 1 and columns of ``4*ceil(rows/4)`` words. Leading
    dims (groups) are kept. Raises ``TypeError`` for another dtype, ``ValueError`` where the block rows do not cover
    ``rows`` or a scale is not a power of two on a packed row.
    """
    if scale.dtype != torch.float32:
        raise TypeError(f"scale has dtype {scale.dtype}; expected float32")
    if min(block) < 1:
        raise ValueError(f"block={block} must be at least 1")
    if scale.dim() < 2 or scale.shape[-2] != -(-rows // block[0]):
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}; {rows} rows in blocks of {block[0]} need {-(-rows // block[0])} "
            "scale rows"
        )
    if not get_arch(arch).tma_aligned_scales:
        return scale.clone(memory_format=torch.contiguous_format)  # contiguous() keeps odd strides of size-1 dims
    if scale.shape[-1] % 4:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}; {scale.shape[-1]} blocks do not fill int32 words; "
            "a multiple of 4 is needed"
        )
    per_row = float_to_ue8m0(scale).repeat_interleave(block[0], dim=-2)[..., :rows, :]
    words = pack_ue8m0(per_row)
    *batch, _, columns = words.shape
    buffer = torch.zeros((*batch, columns, tma_aligned_size(rows, 4)), dtype=torch.int32, device=scale.device)
    buffer[..., :rows] = words.transpose(-1, -2)
    return buffer.transpose(-1, -2)[..., :rows, :]


@dataclass(frozen=True)
class Requantization:
    """What powers of two as scales cost: new codes and scales, and their distance from the old weight."""

    codes: torch.Tensor  # e4m3, shape of the old codes
    scale: torch.Tensor  # FP32 powers of two, shape of the old scales
    max_relative_change: float  # max |new - old| / |old| over old weights that are not zero
    relative_frobenius: float  # ||new - old||_F / ||old||_F


def requantize_to_ue8m0(
    codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = (128, 128)
) -> Requantization:
    """FP8 weights with FP32 block scales in the form that UE8M0 can hold; lossy.

    codes e4m3 ``[..., N, K]``, scale FP32 ``[..., ceil(N/b), ceil(K/b)]``, ``block = (b, b)``. As the serving engine
    does at load: dequantise in FP32, block maximum with a floor of 1e-4, ``maximum / 448`` rounded up to ``2^k``, cast
    again (row ``vllm-requantize``; vLLM 0.33.0 ``quantization/utils/fp8_utils``). Raises ``TypeError``/``ValueError``
    for other dtypes and shapes, a scale that is not positive and finite, or a NaN code.
    """
    _check_requantize(codes, scale, block)
    codes, scale = codes.contiguous(), scale.detach()
    new_codes, new_scale = torch.empty(codes.shape, dtype=codes.dtype), torch.empty(scale.shape)
    largest, change, norm = 0.0, 0.0, 0.0
    matrices = (tensor.flatten(0, -3) if tensor.dim() > 2 else tensor[None] for tensor in (codes, scale))
    targets = (tensor.flatten(0, -3) if tensor.dim() > 2 else tensor[None] for tensor in (new_codes, new_scale))
    for old, old_scale, new, power in zip(*matrices, *targets, strict=True):
        for i in range(old_scale.shape[0]):  # a strip of blocks at a time, so that memory does not grow with N
            rows = slice(i * block[0], (i + 1) * block[0])
            before = _dequantized(old[rows], old_scale[i], block[1])
            new[rows], power[i : i + 1] = quantize_matrix(before, "vllm-requantize", group_size=block[0])
            difference = (_dequantized(new[rows], power[i], block[1]).double() - before.double()).abs()
            change, norm = change + float(difference.square().sum()), norm + float(before.double().square().sum())
            relative = (difference / before.double().abs()).nan_to_num(nan=0.0)  # 0/0: a zero stays a zero
            largest = max(largest, float(relative.max()) if relative.numel() else 0.0)
    return Requantization(new_codes, new_scale, largest, (change / norm) ** 0.5 if norm else 0.0)


def _dequantized(codes: torch.Tensor, scale: torch.Tensor, block_k: int) -> torch.Tensor:
    """FP32 ``[rows, K]`` of codes with one scale per ``block_k`` columns: one rounding of the product."""
    return codes.float() * scale.repeat_interleave(block_k)[: codes.shape[1]]


def _check_requantize(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> None:
    for name, tensor, dtype in (("codes", codes, torch.float8_e4m3fn), ("scale", scale, torch.float32)):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; expected {dtype}")
    if block[0] != block[1] or block[0] < 1:
        raise ValueError(f"block={block} must be square and at least 1")
    if codes.dim() < 2:
        raise ValueError(f"codes has shape {tuple(codes.shape)}; expected [..., N, K]")
    expected = (*codes.shape[:-2], *(-(-n // b) for n, b in zip(codes.shape[-2:], block, strict=True)))
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale has shape {tuple(scale.shape)}; codes {tuple(codes.shape)} need {expected}")
    bad = ~((scale > 0) & (scale < torch.inf))
    if bad.any():
        at = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(f"scale{list(at)} = {float(scale[at])!r}; expected a positive finite number")
    nan = (codes.view(torch.uint8) & 0x7F) == 0x7F
    if nan.any():
        raise ValueError(f"codes{[int(i) for i in nan.nonzero()[0]]} is a NaN; a weight has none")
