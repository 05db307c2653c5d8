"""The second projection ``wo_b`` in FP8 blocks: quantise z as served, then one FP8 GEMM.

Source: vLLM 0.33.0 ``kernels/linear`` with ``per_token_group_quant.cu`` (exact power-of-two ceiling, scale floor
1e-10); V4 uses 1 x 128 blocks on every architecture, with FP32 scales on SM90 and packed UE8M0 elsewhere.
"""

from __future__ import annotations

import torch

from oproj.activation import QuantizedActivation
from oproj.arch import Arch, get_arch
from oproj.engines import Engine
from oproj.engines.software.quantizers import quantize_groups


def quantize_z(z: torch.Tensor, arch: Arch | str, *, group_size: int = 128) -> QuantizedActivation:
    """Quantise BF16 z ``[M, K]`` (unit last stride) per 1 x ``group_size`` as ``arch`` is served.

    data e4m3 ``[M, K]``; scale FP32 ``[M, K/group_size]`` or packed int32 ``[M, K/(4*group_size)]``, MN-major. A CUDA
    tensor is quantised on the host and copied back. Raises ``TypeError``/``ValueError`` that names the argument.
    """
    data, scale = quantize_groups(z.cpu(), group_size=group_size, packed=get_arch(arch).tma_aligned_scales)
    if z.device.type != "cpu":
        on_device = torch.empty_strided(scale.shape, scale.stride(), dtype=scale.dtype, device=z.device)
        data, scale = data.to(z.device), on_device.copy_(scale)
    return QuantizedActivation(data, scale, z.dtype, z.shape)


def fp8_wo_b(
    z: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    engine: Engine,
    group_size: int = 128,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's y ``[M, hidden]`` BF16 from z ``[M, K]`` BF16 and e4m3 weight ``[hidden, K]`` with its scales.

    Writes into ``out`` when given. Raises as ``quantize_z`` and the engine's ``fp8_gemm_nt`` do.
    """
    x = quantize_z(z, engine.arch, group_size=group_size)
    if out is None:
        out = torch.empty((z.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=z.device)
    recipe = (1, 1, group_size) if engine.arch.tma_aligned_scales else (1, 128, 128)
    engine.fp8_gemm_nt((x.data, x.scale), (weight, weight_scale), out, recipe=recipe)
    return out
