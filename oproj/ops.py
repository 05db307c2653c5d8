"""The path as torch custom ops, so that ``torch.compile`` and graph capture see its shapes and not its inside.

An op takes no Python object for an engine. It finds one when it runs: on a CUDA tensor ``deep_gemm`` of that device, on
a CPU tensor ``software`` of the row ``arch``; ``arch=""`` means ``oproj.quantize.engine_for`` (SM100 for packed
scales, SM90 for FP32 ones). Every check of the engine is made when the op runs; a fake run (tracing) works on shapes.
``OpsEngine`` gives the ops an engine's call shape. Eager calls of ``oproj`` go to the engine directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oproj.activation import empty_values, scale_columns, tma_aligned_size
from oproj.arch import Arch, get_arch
from oproj.engines import Engine, Operand, Recipe, get_engine
from oproj.engines.into import quantize_into
from oproj.quantize import engine_for

EXPRESSION = "bhr,hdr->bhd"


def _engine(tensor: torch.Tensor, packed: bool, arch: str) -> Engine:
    if arch and tensor.device.type == "cpu":
        return get_engine("software", arch)
    return engine_for(tensor, packed)


@torch.library.custom_op("oproj::inv_rope_fp8_quant", mutates_args=())
def inv_rope_fp8_quant(
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
    arch: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales as ``oproj.quantize.fused_inv_rope_fp8_quant`` returns them, with their exact strides."""
    return _engine(o, tma_aligned_scales, arch).inv_rope_fp8_quant(
        o,
        positions,
        cos_sin_cache,
        n_groups=n_groups,
        heads_per_group=heads_per_group,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        quant_group_size=quant_group_size,
        tma_aligned_scales=tma_aligned_scales,
        quantize=quantize,
    )


@inv_rope_fp8_quant.register_fake
def _(
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
    arch: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, k = o.shape[0], heads_per_group * (nope_dim + rope_dim)
    values = empty_values(tokens, n_groups, k, torch.float8_e4m3fn if quantize else o.dtype, o.device)
    word = torch.int32 if tma_aligned_scales else torch.float32
    if not quantize:
        return values, torch.empty(0, dtype=word, device=o.device)
    columns, aligned = scale_columns(k, quant_group_size, tma_aligned_scales), tma_aligned_size(tokens, 4)
    shape, strides = (tokens, n_groups, columns), (1, columns * aligned, aligned)
    return values, torch.empty_strided(shape, strides, dtype=word, device=o.device)


@torch.library.custom_op("oproj::inv_rope_fp8_quant_out", mutates_args=("values", "scales"))
def inv_rope_fp8_quant_out(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int,
    rope_dim: int,
    quant_group_size: int,
    tma_aligned_scales: bool,
    quantize: bool,
    arch: str = "",
) -> None:
    """As ``inv_rope_fp8_quant`` into values and scales of exactly that shape, dtype and strides."""
    quantize_into(
        _engine(o, tma_aligned_scales, arch),
        (values, scales),
        o,
        positions,
        cos_sin_cache,
        n_groups=n_groups,
        heads_per_group=heads_per_group,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        quant_group_size=quant_group_size,
        tma_aligned_scales=tma_aligned_scales,
        quantize=quantize,
    )


@torch.library.custom_op("oproj::fp8_einsum", mutates_args=("d",))
def fp8_einsum(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    d: torch.Tensor,
    recipe: Sequence[int],
    expr: str = EXPRESSION,
    arch: str = "",
) -> None:
    """Grouped FP8 product into d: a e4m3 ``[T, G, K]``, b e4m3 ``[G, N, K]``, d BF16 ``[T, G, N]``."""
    chosen = (recipe[0], recipe[1], recipe[2])
    engine = _engine(a, a_scale.dtype == torch.int32, arch)
    engine.fp8_einsum(expr, (a, a_scale), (b, b_scale), d, recipe=chosen)


@torch.library.custom_op("oproj::fp8_gemm_nt", mutates_args=("d",))
def fp8_gemm_nt(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    d: torch.Tensor,
    recipe: Sequence[int],
    arch: str = "",
) -> None:
    """FP8 product into d: a e4m3 ``[M, K]``, b e4m3 ``[N, K]``, d BF16 ``[M, N]``. An empty recipe is the default."""
    chosen = (recipe[0], recipe[1], recipe[2]) if len(recipe) else None
    engine = _engine(a, a_scale.dtype == torch.int32, arch)
    engine.fp8_gemm_nt((a, a_scale), (b, b_scale), d, recipe=chosen)


@fp8_einsum.register_fake
@fp8_gemm_nt.register_fake
@inv_rope_fp8_quant_out.register_fake
def _(*_: Any, **__: Any) -> None:
    """Results are in the arguments."""


class OpsEngine:
    """The ops in an engine's call shape: what a traced call uses in the place of an engine.

    arch: the row whose model runs on CPU tensors (a row or its name). On CUDA tensors the row is the device's own,
    whatever is said here.
    """

    name = "ops"

    def __init__(self, arch: Arch | str, device: torch.device | str = "cpu") -> None:
        self.arch = get_arch(arch)
        self.device = torch.device(device)

    def describe(self) -> dict[str, Any]:
        """Name and row; the engine that the ops find describes itself."""
        return {"engine": self.name, "arch": self.arch.name}

    def fp8_einsum(
        self, expr: str, a: Operand, b: Operand, d: torch.Tensor, c: Any = None, *, recipe: Recipe = (1, 128, 128)
    ) -> None:
        """As ``Engine.fp8_einsum``; c is refused."""
        _refuse(c)
        fp8_einsum(*_detached(*a, *b), d, list(recipe), expr, self.arch.name)

    def fp8_gemm_nt(
        self, a: Operand, b: Operand, d: torch.Tensor, c: Any = None, *, recipe: Recipe | None = None
    ) -> None:
        """As ``Engine.fp8_gemm_nt``; c is refused."""
        _refuse(c)
        fp8_gemm_nt(*_detached(*a, *b), d, list(recipe or ()), self.arch.name)

    def inv_rope_fp8_quant(
        self,
        o: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        *,
        n_groups: int,
        heads_per_group: int,
        nope_dim: int,
        rope_dim: int,
        quant_group_size: int,
        tma_aligned_scales: bool,
        quantize: bool,
        out: Operand | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``Engine.inv_rope_fp8_quant``, into ``out`` when given."""
        tensors = _detached(o, positions, cos_sin_cache)
        sizes = (n_groups, heads_per_group, nope_dim, rope_dim, quant_group_size)
        if out is None:
            return inv_rope_fp8_quant(*tensors, *sizes, tma_aligned_scales, quantize, self.arch.name)
        inv_rope_fp8_quant_out(*tensors, *out, *sizes, tma_aligned_scales, quantize, self.arch.name)
        return out


def _refuse(c: Any) -> None:
    if c is not None:
        raise ValueError(f"c is {type(c).__name__}; only c=None is supported")


def _detached(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The path has no gradient; an op that wrote into a tensor beside tracked ones would be refused by autograd."""
    return tuple(tensor.detach() for tensor in tensors)
