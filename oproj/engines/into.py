"""Quantise into buffers that the caller owns."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

from oproj.activation import scale_columns, tma_aligned_size
from oproj.engines import Engine, Operand


@cache
def _takes_out(kind: type) -> bool:
    return "out" in inspect.signature(kind.inv_rope_fp8_quant).parameters  # type: ignore[attr-defined]


def quantize_into(
    engine: Engine, out: Operand, o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, **how: Any
) -> None:
    """``engine.inv_rope_fp8_quant`` into ``out = (values, scales)``; scale rows ``T..Ta-1`` behind the view are zero.

    An engine whose method has an argument ``out`` writes there itself and allocates nothing; the result of any other
    engine is copied. For ``quantize=False`` scales are not touched. Raises ``TypeError``/``ValueError`` for buffers of
    another dtype, shape, stride or device.
    """
    if torch.compiler.is_compiling():  # the op checks when it runs
        engine.inv_rope_fp8_quant(o, positions, cos_sin_cache, out=out, **how)  # type: ignore[call-arg]
        return
    check_out(out, o, **how)
    if _takes_out(type(engine)):
        engine.inv_rope_fp8_quant(o, positions, cos_sin_cache, out=out, **how)  # type: ignore[call-arg]
        return
    values, scales = engine.inv_rope_fp8_quant(o, positions, cos_sin_cache, **how)
    out[0].copy_(values)
    if how["quantize"]:
        out[1].copy_(scales)
        _zero_tail(out[1])


def check_out(
    out: Operand,
    o: torch.Tensor,
    *,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int,
    rope_dim: int,
    quant_group_size: int,
    tma_aligned_scales: bool,
    quantize: bool,
) -> None:
    """Raise where ``out`` is not what the quantiser would have returned for these arguments."""
    if not isinstance(o, torch.Tensor) or o.dim() != 3 or quant_group_size < 1:
        return  # the engine names these
    tokens, k = o.shape[0], heads_per_group * (nope_dim + rope_dim)
    dtype = torch.float8_e4m3fn if quantize else o.dtype
    check_tensor("values", out[0], dtype, (tokens, n_groups, k), (k, tokens * k, 1), o.device)
    if quantize:
        columns, aligned = scale_columns(k, quant_group_size, tma_aligned_scales), tma_aligned_size(tokens, 4)
        word = torch.int32 if tma_aligned_scales else torch.float32
        strides = (1, columns * aligned, aligned)
        check_tensor("scales", out[1], word, (tokens, n_groups, columns), strides, o.device)
        last = out[1].storage_offset() + n_groups * columns * aligned  # the padding rows are written too
        if last * 4 > out[1].untyped_storage().nbytes():
            raise ValueError(f"scales has no room for its padding rows {tokens}..{aligned - 1}; use OProjBuffers")


def check_tensor(
    name: str, tensor: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device
) -> None:
    """Raise ``TypeError``/``ValueError`` that names the buffer and what it should be."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"buffer {name} is {type(tensor).__name__}; expected a torch.Tensor")
    if tensor.dtype != dtype:
        raise TypeError(f"buffer {name} has dtype {tensor.dtype}; expected {dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"buffer {name} has shape {tuple(tensor.shape)}; expected {shape}")
    if shape[0] and tuple(tensor.stride()) != strides:
        raise ValueError(f"buffer {name} has strides {tuple(tensor.stride())}; expected {strides}")
    if tensor.device != device:
        raise ValueError(f"buffer {name} is on {tensor.device} but o is on {device}")


def _zero_tail(scales: torch.Tensor) -> None:
    tokens, aligned = scales.shape[0], scales.stride(2)
    if tokens and aligned > tokens:
        tail = (aligned - tokens, *scales.shape[1:])
        scales.as_strided(tail, scales.stride(), scales.storage_offset() + tokens).zero_()
