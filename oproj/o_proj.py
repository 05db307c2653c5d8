"""The block a serving engine calls: ``compute_fp8_einsum_recipe`` and ``deep_gemm_fp8_o_proj``.

Names, arguments and results of vLLM's ``deepseek_v4.nvidia.ops.o_proj``; the checks that it lacks are made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oproj.activation import QuantizedActivation
from oproj.arch import Arch, arch_of_capability, get_arch
from oproj.buffers import OProjBuffers
from oproj.engines import Engine, EngineUnavailable, Recipe
from oproj.quantize import engine_of_call, fused_inv_rope_fp8_quant


def compute_fp8_einsum_recipe(block_size: int = 128, *, arch: Arch | str | None = None) -> tuple[Recipe, bool]:
    """``(einsum_recipe, tma_aligned_scales)`` of the current CUDA device, or of ``arch`` when given.

    Up to compute capability 9: ``((1, 128, 128), False)`` whatever ``block_size``; from 10 on:
    ``((1, 1, block_size), True)``. V4 passes 128, V4.1 with 1x32 weight blocks 32. Raises ``ValueError`` for another
    ``block_size`` where it counts, ``EngineUnavailable`` without a CUDA device and without ``arch``.
    """
    packed = get_arch(arch).tma_aligned_scales if arch is not None else _current_device_packs()
    if not packed:
        return (1, 128, 128), False
    if block_size not in (32, 128):
        raise ValueError(f"block_size={block_size} is not served; DeepGEMM's recipes take 32 or 128")
    return (1, 1, block_size), True


def _current_device_packs() -> bool:
    if not torch.cuda.is_available():
        raise EngineUnavailable("no CUDA device to ask for its capability; pass arch=, for example arch='sm90'")
    capability = torch.cuda.get_device_capability()
    found = arch_of_capability(*capability)
    return found.tma_aligned_scales if found else capability[0] >= 10


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
    buffers: OProjBuffers | None = None,
) -> Any:
    """Inverse RoPE, quantisation, grouped ``wo_a``, then whatever ``wo_b`` returns for z ``[T, n_groups*o_lora_rank]``.

    o: BF16 ``[T, heads, head_dim]``, or a ``QuantizedActivation`` that is rotated already (then positions and table
    are not read, and its first ``n_groups`` slots are taken of data and scale). wo_a: has ``weight`` (e4m3
    ``[n_groups, o_lora_rank, K]`` with ``weight_scale`` or ``weight_scale_inv`` in the architecture's layout, or BF16
    of that shape or ``[n_groups*o_lora_rank, K]``). wo_b: any callable; it may return fewer rows than T. engine: who
    computes (default: found by device and scale format). buffers: memory for the quantised groups and z, so that this
    call allocates none; z is then overwritten by the next call. Raises ``TypeError``/``ValueError`` that names the bad
    argument. Works under ``torch.no_grad``, ``torch.compile(fullgraph=True)`` (``oproj.ops``) and for T = 0.
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
        buffers=buffers,
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
    buffers: OProjBuffers | None = None,
) -> torch.Tensor:
    """z BF16 ``[T, n_groups, o_lora_rank]``, contiguous; arguments as in ``deep_gemm_fp8_o_proj``."""
    values = o.data if isinstance(o, QuantizedActivation) else o
    _check_recipe(einsum_recipe)
    _check_weight(wo_a.weight, values, n_groups, o_lora_rank, heads_per_group * (nope_dim + rope_dim))
    fp8 = wo_a.weight.dtype == torch.float8_e4m3fn
    chosen = engine_of_call(engine, values, tma_aligned_scales)
    out, z = None, None
    if buffers is not None:
        buffers.check(values, n_groups, heads_per_group * (nope_dim + rope_dim), o_lora_rank)
        *out, z = buffers.views(values.shape[0])
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
            out=None if out is None else (out[0], out[1]),
        )
    if z is None:
        z = torch.empty((data.shape[0], n_groups, o_lora_rank), dtype=torch.bfloat16, device=data.device)
    if fp8:
        weight = (wo_a.weight, _weight_scale(wo_a))
        chosen.fp8_einsum("bhr,hdr->bhd", (data, scale), weight, z, recipe=einsum_recipe)
    else:
        bf16_groups(data, wo_a.weight, out=z)
    return z


def _check_recipe(recipe: Any) -> None:
    if not isinstance(recipe, (tuple, list)) or len(recipe) != 3:
        raise ValueError(f"einsum_recipe={recipe!r} must be (gran_m, gran_n, gran_k)")


def _check_weight(weight: Any, values: Any, n_groups: int, o_lora_rank: int, k: int) -> None:
    """Name what the GEMM would only call 'b', or take in silence: a weight of other groups, rank, K or device."""
    for name, tensor in (("o", values), ("wo_a.weight", weight)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}; expected a torch.Tensor")
    if weight.dtype not in (torch.float8_e4m3fn, torch.bfloat16):
        raise TypeError(f"wo_a.weight has dtype {weight.dtype}; expected float8_e4m3fn or bfloat16")
    shapes: list[tuple[int, ...]] = [(n_groups, o_lora_rank, k)]
    if weight.dtype == torch.bfloat16:  # as loaded: groups stacked along the rows
        shapes.append((n_groups * o_lora_rank, k))
    if min(shapes[0]) < 1 or tuple(weight.shape) not in shapes:
        raise ValueError(
            f"wo_a.weight has shape {tuple(weight.shape)}; n_groups={n_groups}, o_lora_rank={o_lora_rank} and "
            f"K = heads_per_group * (nope_dim + rope_dim) = {k} need {' or '.join(map(str, shapes))}"
        )
    if weight.device != values.device:
        raise ValueError(f"wo_a.weight is on {weight.device} but o is on {values.device}")


def _weight_scale(wo_a: Any) -> torch.Tensor:
    """``weight_scale`` if the attribute exists, else ``weight_scale_inv``, as the serving engine decides."""
    name = "weight_scale" if hasattr(wo_a, "weight_scale") else "weight_scale_inv"
    scale = getattr(wo_a, name, None)
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"wo_a.{name} is {type(scale).__name__}; an FP8 wo_a needs its scales there")
    return scale.detach()


def bf16_groups(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
    """``out[t, g] = x[t, g] . weight[g].T``: BF16 ``[T, G, K]`` and ``[G, R, K]`` (or ``[G*R, K]``) to ``[T, G, R]``.

    One batched matmul of the library on a GPU. On a CPU the sum is taken in float64 and rounded through FP32, since
    the BF16 product of CPU libraries differs with the processor's instructions.
    """
    per_group = weight.detach().unflatten(0, out.shape[1:]) if weight.dim() == 2 else weight.detach()
    a, b = x.transpose(0, 1), per_group.transpose(1, 2)
    if x.device.type == "cpu":
        out.copy_(torch.bmm(a.double(), b.double()).transpose(0, 1))
    elif torch.compiler.is_compiling():  # a strided out= breaks the graph
        out.copy_(torch.bmm(a, b).transpose(0, 1))
    else:
        torch.bmm(a, b, out=out.transpose(0, 1))
