"""The fast twin on a GPU, for bulk proof: the model of any architecture row on the CUDA cores of any NVIDIA GPU.

``twin.cu`` is compiled at first use by NVRTC through ``cuda.core`` (extra ``gpu``), so no CUDA toolkit is needed. A
first form in Triton gave the same bits at a fortieth of the speed, since its tiles cannot keep operands in registers.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import torch

from oproj.arch import MMA, Arch
from oproj.kernels.compile import TorchStream

TILE = 64
THREADS = 256


@cache
def _kernel(mma: MMA, promotes: bool, device_index: int) -> Any:
    from cuda.core import Device, Program, ProgramOptions

    device = Device(device_index)
    device.set_current()
    source = resources.files("oproj.engines.software").joinpath("twin.cu").read_text(encoding="utf-8")
    name = f"twin<{mma.frac_bits},{mma.out_frac_bits},{mma.zero_exponent},{'true' if promotes else 'false'}>"
    program = Program(source, code_type="c++", options=ProgramOptions(std="c++17", arch=f"sm_{device.arch}"))
    return program.compile("cubin", name_expressions=(name,)).get_kernel(name)


def matmul(
    arch: Arch, a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, gran_k: int
) -> torch.Tensor:
    """``out[g] = a[g] . b[g].T`` in FP32 on the tensor core of ``arch``, before the output rounding.

    a uint8 ``[G, T, K]``, b uint8 ``[G, N, K]`` e4m3 codes on a CUDA device, K a multiple of 128; scales
    ``[G, T or N, K/gran_k]``: FP32 where ``arch`` promotes with scales outside, else UE8M0 bytes (uint8). Raises
    ``ImportError`` without ``cuda.core``.
    """
    from cuda.core import Device, LaunchConfig, launch

    groups, tokens, k = a.shape
    columns = b.shape[1]
    out = torch.empty((groups, tokens, columns), dtype=torch.float32, device=a.device)
    if out.numel() == 0:
        return out
    nan = _nan_rows(a, a_scales)[:, :, None] | _nan_rows(b, b_scales)[:, None, :]
    operands = [a.contiguous(), b.contiguous(), _kernel_scales(arch, a_scales), _kernel_scales(arch, b_scales), out]
    device = Device(a.device.index)
    device.set_current()
    grid = (-(-columns // TILE), -(-tokens // TILE), groups)
    launch(
        device.create_stream(TorchStream(a.device)),
        LaunchConfig(grid=grid, block=(THREADS,)),
        _kernel(arch.mma, arch.promotion_k is not None, device.device_id),
        *[tensor.data_ptr() for tensor in operands],
        *[tokens, columns, k, gran_k, arch.promotion_k or 0],
    )
    return out.masked_fill_(nan, float("nan"))


def _kernel_scales(arch: Arch, scales: torch.Tensor) -> torch.Tensor:
    return (scales.to(torch.int32) - 127 if arch.mma.scales_inside else scales.float()).contiguous()


def _nan_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows that hold a NaN code or, for UE8M0 bytes, a NaN scale."""
    nan = ((codes & 0x7F) == 0x7F).any(-1)
    return nan | (scales == 255).any(-1) if scales.dtype == torch.uint8 else nan
