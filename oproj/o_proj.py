"""The block a serving engine calls: ``compute_fp8_einsum_recipe`` and ``deep_gemm_fp8_o_proj``.

Names, arguments and results of vLLM's ``deepseek_v4.nvidia.ops.o_proj``; the checks that it lacks are made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oproj.activation import QuantizedActivation
from oproj.arch import Arch, arch_of_capability, get_arch
from oproj.engines import Engine, EngineUnavailable, Recipe
from oproj.quantize import engine_for, fused_inv_rope_fp8_quant


def compute_fp8_einsum_recipe(block_size: int = 128, *, arch: Arch | str | None = None) -> tuple[Recipe, bool]:
    """``(einsum_recipe, tma_aligned_scales)`` of the current CUDA device, or of ``arch`` when given.

    Up to compute capability 9: ``((1, 128, 128), False)`` whatever ``block_size``; from 10 on:
    ``((1, 1, block_size), True)``. V4 passes 128, V4.1 with 1x32 weight blocks 32. Raises ``ValueError`` for another
    ``block_size``, ``EngineUnavailable`` without a CUDA device and without ``arch``.
    """
    if block_size not in (32, 128):
        raise ValueError(f"block_size={block_size} is not served; DeepGEMM's recipes take 32 or 128")
    if arch is not None:
        row = get_arch(arch)
        return row.recipe(block_size), row.tma_aligned_scales
    if not torch.cuda.is_available():
        raise EngineUnavailable("no CUDA device to ask for its capability; pass arch=, for example arch='sm90'")
    capability = torch.cuda.get_device_capability()
    found = arch_of_capability(*capability)
    packed = found.tma_aligned_scales if found else capability[0] >= 10
    return ((1, 1, block_size) if packed else (1, 128, 128)), packed


def deep_gemm_fp8_o_proj(
    o: torch.Tensor | QuantizedActivation,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    wo_a: Any,
    wo_b: Callable[[torch.Tensor], Any],
    *,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int,
    rope_dim: int,
    o_lora_rank: int,
    einsum_recipe: Recipe,
    tma_aligned_scales: bool,
    engine: Engine | None = None,
) -> Any:
    """Inverse RoPE, quantisation, grouped ``wo_a``, then whatever ``wo_b`` returns for z ``[T, n_groups*o_lora_rank]``.

    o: BF16 ``[T, heads, head_dim]``, or a ``QuantizedActivation`` that is rotated already (then positions and table
    are not read, and its first ``n_groups`` slots are taken of data and scale). wo_a: has ``weight`` (e4m3
    ``[n_groups, o_lora_rank, K]`` with ``weight_scale`` or ``weight_scale_inv`` in the architecture's layout, or BF16
    of as many elements). wo_b: any callable; it may return fewer rows than T. Raises ``TypeError``/``ValueError`` that
    names the bad argument.
    """
    z = grouped_wo_a(
        o,
        positions,
        cos_sin_cache,
        wo_a,
        n_groups=n_groups,
        heads_per_group=heads_per_group,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        o_lora_rank=o_lora_rank,
        einsum_recipe=einsum_recipe,
        tma_aligned_scales=tma_aligned_scales,
        engine=engine,
    )
    return wo_b(z.flatten(1))


def grouped_wo_a(
    o: torch.Tensor | QuantizedActivation,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    wo_a: Any,
    *,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int,
    rope_dim: int,
    o_lora_rank: int,
    einsum_recipe: Recipe,
    tma_aligned_scales: bool,
    engine: Engine | None = None,
) -> torch.Tensor:
    """z BF16 ``[T, n_groups, o_lora_rank]``, contiguous; arguments as in ``deep_gemm_fp8_o_proj``."""
    fp8 = wo_a.weight.dtype == torch.float8_e4m3fn
    probe = o.data if isinstance(o, QuantizedActivation) else o
    chosen = engine or engine_for(probe, tma_aligned_scales)
    if isinstance(o, QuantizedActivation):
        if not fp8:
            raise TypeError(f"o is quantised but wo_a.weight has dtype {wo_a.weight.dtype}; it must be float8_e4m3fn")
        x = o.sliced(n_groups)
        data, scale = x.data, x.scale
    else:
        data, scale = fused_inv_rope_fp8_quant(
            o,
            positions,
            cos_sin_cache,
            n_groups,
            heads_per_group,
            nope_dim,
            rope_dim,
            einsum_recipe[2],
            tma_aligned_scales,
            fp8,
            engine=chosen,
        )
    z = torch.empty((data.shape[0], n_groups, o_lora_rank), dtype=torch.bfloat16, device=data.device)
    if fp8:
        weight = (wo_a.weight, _weight_scale(wo_a))
        chosen.fp8_einsum("bhr,hdr->bhd", (data, scale), weight, z, recipe=einsum_recipe)
    else:
        _bf16_product(data, wo_a.weight, z)
    return z


def _weight_scale(wo_a: Any) -> torch.Tensor:
    """``weight_scale`` if the attribute exists, else ``weight_scale_inv``, as the serving engine decides."""
    name = "weight_scale" if hasattr(wo_a, "weight_scale") else "weight_scale_inv"
    scale = getattr(wo_a, name, None)
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"wo_a.{name} is {type(scale).__name__}; an FP8 wo_a needs its scales there")
    return scale


def _bf16_product(x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor) -> None:
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"wo_a.weight has dtype {weight.dtype}; expected float8_e4m3fn or bfloat16")
    groups, rank, k = z.shape[1], z.shape[2], x.shape[2]
    if weight.numel() != groups * rank * k:
        raise ValueError(
            f"wo_a.weight has shape {tuple(weight.shape)}; n_groups={groups}, o_lora_rank={rank}, K={k} need "
            f"{groups * rank * k} elements"
        )
    per_group = weight.view(groups, rank, k)
    torch.bmm(x.transpose(0, 1), per_group.transpose(1, 2), out=z.transpose(0, 1))
