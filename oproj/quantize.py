"""``fused_inv_rope_fp8_quant``: attention output to quantised groups, in one call.

Signature, layouts and arithmetic of vLLM 0.33.0 ``deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from oproj.arch import Arch, arch_of_capability
from oproj.engines import Engine, EngineUnavailable, Operand, get_engine
from oproj.engines.into import quantize_into


def engine_for(tensor: torch.Tensor, packed: bool) -> Engine:
    """The engine that a call with this tensor and this scale format means.

    A CUDA tensor means ``deep_gemm`` on its device; a CPU tensor means ``software`` on SM100 for packed scales and on
    SM90 for FP32 ones. Raises ``EngineUnavailable`` for a device that no architecture row describes.
    """
    if tensor.device.type == "cuda":
        capability = torch.cuda.get_device_capability(tensor.device)
        arch = arch_of_capability(*capability)
        if arch is None:
            raise EngineUnavailable(
                f"{tensor.device} has compute capability {capability}; no architecture row covers it"
            )
        return _on_device(tensor.device, arch)
    return get_engine("software", "sm100" if packed else "sm90")


@cache
def _on_device(device: torch.device, arch: Arch) -> Engine:
    """The engine of one device, made once: finding a DeepGEMM that works is not for the hot call."""
    with torch.cuda.device(device):
        return get_engine("deep_gemm", arch)


def engine_of_call(engine: Engine | None, tensor: torch.Tensor, packed: bool) -> Engine:
    """``engine``, or ``engine_for``; in a call that ``torch.compile`` traces, the ops that mean the same engine.

    A traced call can only name an engine that the ops find again: ``software`` or ``deep_gemm`` as
    ``oproj.engines.get_engine`` makes it. Raises ``ValueError`` for another one.
    """
    if not torch.compiler.is_compiling():
        return engine or engine_for(tensor, packed)
    from oproj.ops import OpsEngine

    if isinstance(engine, OpsEngine):
        return engine
    if engine is None:  # on CUDA the device's own row counts, not this one
        return OpsEngine("sm100" if packed else "sm90", tensor.device)
    if engine.name not in ("software", "deep_gemm") or (engine.name == "software") != (tensor.device.type == "cpu"):
        raise ValueError(f"engine {engine.name!r} cannot be traced by torch.compile; call it eagerly")
    return OpsEngine(engine.arch, tensor.device)


def fused_inv_rope_fp8_quant(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int = 448,
    rope_dim: int = 64,
    quant_group_size: int = 128,
    tma_aligned_scales: bool = False,
    quantize: bool = True,
    *,
    engine: Engine | None = None,
    out: Operand | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse RoPE on the last ``rope_dim`` dims of every head, then block quantisation.

    o: BF16 ``[T, n_groups*heads_per_group, head_dim]``, unit last stride, other strides free (a slice of a padded
    buffer is the normal case). positions: int64 ``[T]``. cos_sin_cache: FP32 ``[max_position, rope_dim]``,
    cosines then sines. Returns values ``[T, G, K]`` (strides ``(K, T*K, 1)``; e4m3, or BF16 for ``quantize=False``)
    and scales: FP32 powers of two ``[T, G, K/block]`` or, for ``tma_aligned_scales``, packed UE8M0 int32
    ``[T, G, K/(4*block)]``, strides ``(1, columns*Ta, Ta)`` with ``Ta = 4*ceil(T/4)`` and zeroed rows ``T..Ta-1``;
    an empty tensor for ``quantize=False``. out: ``(values, scales)`` to write into and to return, of exactly those
    shapes, dtypes and strides (``oproj.buffers.OProjBuffers`` makes them).

    Raises ``TypeError``/``ValueError`` that names the bad argument (on a GPU, positions are not looked at: that
    would stall the stream), ``EngineUnavailable`` when no engine works for the tensors.
    """
    if not isinstance(o, torch.Tensor):
        raise TypeError(f"o is {type(o).__name__}; expected a torch.Tensor")
    chosen = engine_of_call(engine, o, tma_aligned_scales)
    how: dict[str, Any] = {
        "n_groups": n_groups,
        "heads_per_group": heads_per_group,
        "nope_dim": nope_dim,
        "rope_dim": rope_dim,
        "quant_group_size": quant_group_size,
        "tma_aligned_scales": tma_aligned_scales,
        "quantize": quantize,
    }
    if out is None:
        return chosen.inv_rope_fp8_quant(o, positions, cos_sin_cache, **how)
    quantize_into(chosen, out, o, positions, cos_sin_cache, **how)
    return out
