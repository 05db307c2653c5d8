"""What the inverse-RoPE quantiser may be called with.

The serving kernel asserts six of these (vLLM 0.33.0 ``fused_inv_rope_fp8_quant.py``); the others it assumes, and reads
out of bounds or mixes lanes when they do not hold. Its lanes also need a head_dim that is a power of two; nothing here
does, so only the adapter of that kernel refuses another one (``conformance.adapters``).

Looking at positions on a GPU waits for the device, so their range is checked there only where ``OPROJ_CHECK_POSITIONS``
is 1, and never while a graph is captured.
"""

from __future__ import annotations

import os

import torch

BLOCKS = (32, 64, 128)
CHECK_POSITIONS = "OPROJ_CHECK_POSITIONS"


def check_inv_rope(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int,
    rope_dim: int,
    quant_group_size: int,
    tma_aligned_scales: bool,
    quantize: bool,
) -> None:
    """Raise ``TypeError`` (dtypes) or ``ValueError`` (values, shapes, strides) that names the bad argument."""
    for name, tensor, dtype, axes in (
        ("o", o, torch.bfloat16, "[T, heads, head_dim]"),
        ("positions", positions, torch.int64, "[T]"),
        ("cos_sin_cache", cos_sin_cache, torch.float32, "[max_position, rope_dim]"),
    ):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}; expected a torch.Tensor")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; expected {dtype}")
        if tensor.dim() != axes.count(",") + 1:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {axes}")
        if tensor.device != o.device:
            raise ValueError(f"{name} is on {tensor.device} but o is on {o.device}")
    for name, number in (
        ("n_groups", n_groups),
        ("heads_per_group", heads_per_group),
        ("rope_dim", rope_dim),
        ("nope_dim", nope_dim),
        ("quant_group_size", quant_group_size),
    ):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{name}={number!r} is {type(number).__name__}; expected int")
        if number < 1 and name in ("n_groups", "heads_per_group", "rope_dim"):
            raise ValueError(f"{name}={number} must be at least 1")
    if nope_dim < 0 or nope_dim % 2 or rope_dim % 2:
        raise ValueError(f"nope_dim={nope_dim} and rope_dim={rope_dim} must be even (and nope_dim >= 0)")
    _check_o(o, n_groups * heads_per_group, nope_dim + rope_dim)
    _check_blocks(nope_dim + rope_dim, quant_group_size, tma_aligned_scales and quantize)
    _check_table(positions, cos_sin_cache, o.shape[0], rope_dim)


def _check_o(o: torch.Tensor, heads: int, head_dim: int) -> None:
    if o.shape[1] != heads:
        raise ValueError(f"o has {o.shape[1]} heads; n_groups * heads_per_group = {heads} (slice off padding heads)")
    if o.shape[2] != head_dim:
        raise ValueError(f"o has head_dim {o.shape[2]}; nope_dim + rope_dim = {head_dim}")
    if o.numel() and (o.stride(2) != 1 or min(o.stride()) < 0):
        raise ValueError(f"o has strides {o.stride()}; the last one must be 1")


def _check_blocks(head_dim: int, quant_group_size: int, packed: bool) -> None:
    if quant_group_size not in BLOCKS:
        raise ValueError(f"quant_group_size={quant_group_size} is not supported; supported: {BLOCKS}")
    if head_dim % quant_group_size:
        raise ValueError(f"quant_group_size={quant_group_size} does not divide head_dim={head_dim}")
    if packed and head_dim // quant_group_size % 4:
        raise ValueError(
            f"head_dim={head_dim} has {head_dim // quant_group_size} blocks of quant_group_size={quant_group_size}; "
            "packed scales need a multiple of 4 per head"
        )


def _check_table(positions: torch.Tensor, cos_sin_cache: torch.Tensor, tokens: int, rope_dim: int) -> None:
    if positions.shape[0] != tokens:
        raise ValueError(f"positions has {positions.shape[0]} entries; o has {tokens} tokens")
    if cos_sin_cache.shape[1] != rope_dim:
        raise ValueError(f"cos_sin_cache has rows of {cos_sin_cache.shape[1]}; expected rope_dim={rope_dim}")
    if cos_sin_cache.numel() and cos_sin_cache.stride(1) != 1:
        raise ValueError(f"cos_sin_cache has strides {cos_sin_cache.stride()}; the last one must be 1")
    if tokens and _may_look(positions):
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= cos_sin_cache.shape[0]:
            raise ValueError(f"positions lie in {low}..{high}; cos_sin_cache has rows 0..{cos_sin_cache.shape[0] - 1}")


def _may_look(positions: torch.Tensor) -> bool:
    if positions.device.type == "cpu":
        return True
    if positions.device.type != "cuda" or os.environ.get(CHECK_POSITIONS) != "1":
        return False
    return not torch.cuda.is_current_stream_capturing()
