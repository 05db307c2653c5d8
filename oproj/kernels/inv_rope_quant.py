"""``fused_inv_rope_fp8_quant`` on a GPU: one kernel for every mode, the bits of the software quantiser.

The kernel (``inv_rope_quant.cu``) is for heads of 512 = 448 + 64 values, any number of heads per group. A NaN in ``o``
becomes a NaN code (0x7F), so that z is NaN for that token and group; ``serving_nan=True`` gives the serving engine's
finite code 0x7E instead.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import numpy as np
import torch

from oproj.activation import empty_scales, empty_values, scale_columns, tma_aligned_size
from oproj.engines.into import check_out
from oproj.engines.rope_checks import check_inv_rope
from oproj.kernels import compile as compiler
from oproj.kernels.compile import LaunchShape

HEAD, NOPE, ROPE = 512, 448, 64
VARIANTS = ("fma_cos", "mul_mul_add")
# Limits of the launch shapes, in tokens times heads
FEW_TOKENS = 128 * 4  # up to here and to the next latency counts, not bandwidth
SMALL_CALL = 128 * 64
MEDIUM_CALL = 128 * 128
LARGE_CALL = 128 * 768  # from here on several tokens a warp pay
LARGE_CALL_OF_FEW_HEADS = 128 * 2048  # a token's table row is then shared by too few warps to hold several earlier
FEW_HEADS = 32


class KernelUnavailable(RuntimeError):
    """The kernel cannot run here; the text says why."""


@cache
def unavailable_reason() -> str | None:
    """Why the kernel cannot run on this machine, or ``None``."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability()[0] < 9:
        return "the e4m3 conversion and the launch need compute capability 9.0 or newer"
    try:
        importlib.import_module("cuda.core.utils")
    except ImportError as error:
        return f"cuda.core cannot be imported ({error}); install oproj[gpu]"
    return None


def launch_shape(tokens: int, heads: int, quantize: bool) -> LaunchShape:
    """How a call is cut; from medians on an H200 over 1 to 32,768 tokens, which ``benchmarks`` takes again."""
    work = tokens * heads
    if work <= FEW_TOKENS:
        return LaunchShape(1, 2, 16, True, True)
    if work <= SMALL_CALL or not quantize:
        return LaunchShape(1, 4, 10, True, True)
    if work <= MEDIUM_CALL:
        return LaunchShape(1, 8, 8, True, True)
    if work < (LARGE_CALL if heads > FEW_HEADS else LARGE_CALL_OF_FEW_HEADS):
        return LaunchShape(1, 8, 8, True, False)
    return LaunchShape(4, 4, 7, False, True)


def fused_inv_rope_fp8_quant(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int = NOPE,
    rope_dim: int = ROPE,
    quant_group_size: int = 128,
    tma_aligned_scales: bool = False,
    quantize: bool = True,
    *,
    variant: str = "fma_cos",
    log2_rule: bool = True,
    serving_nan: bool = False,
    early_positions: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse RoPE and quantisation of CUDA tensors; arguments, layouts and results of ``oproj.quantize``.

    variant, log2_rule: as the software quantiser's rows. early_positions: read positions and table before the
    preceding kernel of the stream has finished, which saves a memory latency in a graph; only where that kernel writes
    neither. out: (values, scales) to write into, of exactly the layout that would be allocated (scales with their
    padding rows). Nothing waits for the device; positions are not looked at. Raises ``TypeError``/``ValueError`` that
    names the argument, ``KernelUnavailable``.
    """
    reason = unavailable_reason()
    if reason:
        raise KernelUnavailable(f"the fused kernel cannot run: {reason}")
    check_inv_rope(
        o, positions, cos_sin_cache, n_groups, heads_per_group, nope_dim, rope_dim, quant_group_size,
        tma_aligned_scales, quantize,
    )  # fmt: skip
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r} is unknown; known: {', '.join(VARIANTS)}")
    if o.device.type != "cuda":
        raise ValueError(f"o is on {o.device}; the kernel works on CUDA tensors")
    if (nope_dim, rope_dim) != (NOPE, ROPE):
        raise ValueError(f"nope_dim={nope_dim}, rope_dim={rope_dim}; the kernel is built for {NOPE} + {ROPE}")
    if o.numel() and (o.data_ptr() % 16 or o.stride(0) % 8 or o.stride(1) % 8):
        raise ValueError(
            f"o has strides {o.stride()} and address {o.data_ptr():#x}; both must be multiples of 16 bytes"
        )
    if out is not None:
        check_out(
            out, o, n_groups=n_groups, heads_per_group=heads_per_group, nope_dim=nope_dim, rope_dim=rope_dim,
            quant_group_size=quant_group_size, tma_aligned_scales=tma_aligned_scales, quantize=quantize,
        )  # fmt: skip
    values, scales = out or _allocate(o, n_groups, heads_per_group, quant_group_size, tma_aligned_scales, quantize)
    if o.shape[0]:
        _launch(
            o, positions, cos_sin_cache, values, scales, heads_per_group, quant_group_size if quantize else 0,
            tma_aligned_scales, (variant == "fma_cos", log2_rule, serving_nan), early_positions,
        )  # fmt: skip
    return values, scales


def _allocate(
    o: torch.Tensor, groups: int, heads_per_group: int, block: int, packed: bool, quantize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, k = o.shape[0], heads_per_group * HEAD
    values = empty_values(tokens, groups, k, torch.float8_e4m3fn if quantize else torch.bfloat16, o.device)
    if not quantize:
        return values, torch.empty(0, dtype=torch.int32 if packed else torch.float32, device=o.device)
    return values, empty_scales(tokens, groups, scale_columns(k, block, packed), packed, o.device, zero_padding=False)


def _launch(
    o: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    heads_per_group: int,
    block: int,
    packed: bool,
    rules: tuple[bool, bool, bool],
    early_positions: bool,
) -> None:
    from cuda.core import Device, LaunchConfig, launch

    tokens, heads, _ = o.shape
    shape = launch_shape(tokens, heads, bool(block))
    config = ", ".join(map(_literal, (block, packed, shape.tokens, *rules)))
    macros = compiler.defines(config, shape, early_positions)
    device = Device(o.device.index)
    device.set_current()
    rows = tma_aligned_size(tokens, 4) if block else tokens
    blocks = -(-(-(-rows // shape.tokens) * heads) // shape.warps)
    launch(
        device.create_stream(compiler.TorchStream(o.device)),
        LaunchConfig(grid=(blocks,), block=(32 * shape.warps,), programmatic_stream_serialization=True),
        compiler.kernel(device.device_id, tuple(macros.items())),
        *[tensor.data_ptr() for tensor in (o, positions, table, values, scales)],
        *[np.uint32(n) for n in (tokens, heads, heads_per_group, rows)],
        *[np.int64(n) for n in (o.stride(0), o.stride(1), table.stride(0))],
    )


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
