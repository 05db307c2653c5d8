"""The serving engine's quantiser of z for ``wo_b`` on a GPU: the bits of the software rows ``vllm-group-*``."""

from __future__ import annotations

import numpy as np
import torch

from oproj.activation import scale_columns, tma_aligned_size
from oproj.engines.into import check_tensor
from oproj.kernels import compile as compiler
from oproj.kernels.inv_rope_quant import KernelUnavailable, unavailable_reason

GROUPS = (32, 128)
WARPS = 4
NAME = "quantize_rows"
Pair = tuple[torch.Tensor, torch.Tensor]


def allocate_rows(rows: int, k: int, group_size: int, packed: bool, device: torch.device | str) -> Pair:
    """Uninitialised codes ``[M, K]`` and MN-major scales ``[M, columns]`` with strides ``(1, 4*ceil(M/4))``."""
    columns, aligned = scale_columns(k, group_size, packed), tma_aligned_size(rows, 4)
    buffer = torch.empty((columns, aligned), dtype=torch.int32 if packed else torch.float32, device=device)
    codes = torch.empty((rows, k), dtype=torch.float8_e4m3fn, device=device)
    return codes, buffer.as_strided((rows, columns), (1, aligned))


def quantize_rows(x: torch.Tensor, *, group_size: int = 128, packed: bool = False, out: Pair | None = None) -> Pair:
    """Codes and scales of BF16 ``[M, K]`` (unit last stride) per 1 x ``group_size``, on the current stream.

    out: buffers of ``allocate_rows`` to write into, padding rows included. Nothing waits for the device. Raises
    ``TypeError``/``ValueError`` that names the argument, ``KernelUnavailable``.
    """
    reason = unavailable_reason()
    if reason:
        raise KernelUnavailable(f"the row quantiser cannot run: {reason}")
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x has dtype {x.dtype}; expected torch.bfloat16")
    if x.device.type != "cuda":
        raise ValueError(f"x is on {x.device}; the kernel works on CUDA tensors")
    if x.dim() != 2 or (x.numel() and (x.stride(1) != 1 or x.stride(0) % 4 or x.data_ptr() % 8)):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, strides {x.stride()}; expected [M, K], rows aligned to 8 bytes"
        )
    if group_size not in GROUPS:
        raise ValueError(f"group_size={group_size} is not served; served: {GROUPS}")
    rows, k = x.shape
    step = max(128, group_size * (4 if packed else 1))
    if k % step:
        raise ValueError(f"x has K={k}; it must be a multiple of {step}")
    if out is not None:
        columns, aligned = scale_columns(k, group_size, packed), tma_aligned_size(rows, 4)
        check_tensor("codes", out[0], torch.float8_e4m3fn, (rows, k), (k, 1), x.device)
        word = torch.int32 if packed else torch.float32
        check_tensor("scales", out[1], word, (rows, columns), (1, aligned), x.device)
        if (out[1].storage_offset() + columns * aligned) * 4 > out[1].untyped_storage().nbytes():
            raise ValueError(f"buffer scales has no room for its padding rows {rows}..{aligned - 1}")
    codes, scales = out or allocate_rows(rows, k, group_size, packed, x.device)
    if rows and k:
        _launch(x, codes, scales, group_size, packed)
    return codes, scales


def _launch(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, group_size: int, packed: bool) -> None:
    from cuda.core import Device, LaunchConfig, launch

    rows, k = x.shape
    aligned = tma_aligned_size(rows, 4)
    device = Device(x.device.index)
    device.set_current()
    macros = {"ROWS_CONFIG": f"{group_size}, {str(packed).lower()}", "WARPS": str(WARPS)}
    launch(
        device.create_stream(compiler.TorchStream(x.device)),
        LaunchConfig(
            grid=(-(-aligned * (-(-k // 512)) // WARPS),), block=(32 * WARPS,), programmatic_stream_serialization=True
        ),
        compiler.kernel(device.device_id, tuple(macros.items()), NAME),
        *[tensor.data_ptr() for tensor in (x, codes, scales)],
        *[np.uint32(n) for n in (rows, k, aligned)],
        np.int64(x.stride(0)),
    )
