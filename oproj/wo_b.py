"""The second projection ``wo_b``: one rank's linear as each architecture is served, and the sum over ranks.

Sources: vLLM 0.33.0 ``kernels/linear`` with ``per_token_group_quant.cu`` (exact power-of-two ceiling, scale floor
1e-10) and ``sp_reduce_scatter``; DeepSeek-V4 ``inference/model.py`` for the FP32 sum.

    weights    architecture          z becomes                       weight
    V4         SM90                  e4m3 1x128, FP32 scales         e4m3 128x128, FP32 scales
    V4         SM100, SM103, SM120   e4m3 1x128, packed UE8M0        e4m3, packed UE8M0 per row
    V4.1       SM100, SM103          e4m3 1x32, packed UE8M0         e4m3, packed UE8M0 per row
    V4.1       SM90, SM120           BF16 as it is                   BF16, dequantised at load

The served MXFP8 kernel swizzles its scales in 128x4 tiles; here they keep DeepGEMM's MN-major order, the same bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from oproj import kernels
from oproj.activation import QuantizedActivation
from oproj.arch import Arch, get_arch
from oproj.engines import Engine, get_engine
from oproj.engines.software.quantizers import quantize_groups
from oproj.o_proj import bf16_groups
from oproj.weights import layout_weight_scales

SumKind = Literal["bf16", "fp32"]
SUM_KINDS: tuple[str, ...] = ("bf16", "fp32")
COLLECTIVES = ("all_reduce", "reduce_scatter")


def quantize_z(z: torch.Tensor, arch: Arch | str, *, group_size: int = 128) -> QuantizedActivation:
    """Quantise BF16 z ``[M, K]`` (unit last stride) per 1 x ``group_size`` as ``arch`` is served.

    data e4m3 ``[M, K]``; scale FP32 ``[M, K/group_size]`` or packed int32 ``[M, K/(4*group_size)]``, MN-major. A CUDA
    tensor is quantised by ``oproj.kernels``, or where that cannot run on the host. Raises ``TypeError``/``ValueError``
    that names the argument.
    """
    if z.device.type == "cuda" and kernels.unavailable_reason() is None:
        packed = get_arch(arch).tma_aligned_scales
        data, scale = kernels.quantize_rows(z, group_size=group_size, packed=packed)
        return QuantizedActivation(data, scale, z.dtype, z.shape)
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


def bf16_wo_b(z: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """This rank's y ``[M, hidden]`` BF16 from z ``[M, K]`` and weight ``[hidden, K]``, both BF16.

    The library's product on a GPU; on a CPU summed in float64 (``oproj.o_proj.bf16_groups``). Raises ``TypeError``/
    ``ValueError`` that names the bad argument.
    """
    for name, tensor in (("z", z), ("weight", weight)):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{name} has dtype {tensor.dtype}; expected torch.bfloat16")
        if tensor.dim() != 2 or weight.dim() != 2 or tensor.shape[1] != weight.shape[1]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; expected z [M, K] and weight [hidden, K] with the same K"
            )
    out = _checked_out(out, (z.shape[0], weight.shape[0]), z.device)
    bf16_groups(z[:, None], weight[None], out=out[:, None])
    return out


class BlockLinear:
    """One rank's ``wo_b`` as a callable: z BF16 ``[M, K]`` to y BF16 ``[M, hidden]``, into ``out`` when given.

    weight: e4m3 ``[hidden, K]`` with ``weight_scale`` in the layout of ``engine.arch``, or BF16 without scale and
    engine. ``group_size``: elements of z per activation scale. Raises ``TypeError``/``ValueError`` for other
    combinations.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None = None,
        *,
        engine: Engine | None = None,
        group_size: int = 128,
    ) -> None:
        fp8 = weight.dtype == torch.float8_e4m3fn
        if not fp8 and weight.dtype != torch.bfloat16:
            raise TypeError(f"weight has dtype {weight.dtype}; expected float8_e4m3fn or bfloat16")
        if weight.dim() != 2:
            raise ValueError(f"weight has shape {tuple(weight.shape)}; expected [hidden, K]")
        if fp8 and engine is None:
            raise ValueError("engine=None; an FP8 weight needs the engine that multiplies it")
        if fp8 != (weight_scale is not None):
            raise ValueError(f"weight_scale is {'missing' if fp8 else 'given'}; an FP8 weight has one, BF16 has none")
        self.weight, self.weight_scale, self.engine, self.group_size = weight, weight_scale, engine, group_size

    @classmethod
    def from_checkpoint(
        cls,
        codes: torch.Tensor,
        scale: torch.Tensor,
        *,
        arch: Arch | str,
        block: tuple[int, int] = (128, 128),
        engine: Engine | None = None,
    ) -> BlockLinear:
        """As ``arch`` is served (table above) from e4m3 ``[hidden, K]`` and FP32 scales ``[hidden/b, K/b]``.

        ``block``: (128, 128) of V4 or (32, 32) of V4.1. ``engine``: the one that ``auto`` picks unless given. Raises
        ``ValueError`` for another block, and as ``oproj.weights.layout_weight_scales`` does.
        """
        row = get_arch(arch)
        if block not in ((128, 128), (32, 32)):
            raise ValueError(f"block={block} is not served; expected (128, 128) or (32, 32)")
        if codes.dtype != torch.float8_e4m3fn:
            raise TypeError(f"codes has dtype {codes.dtype}; expected torch.float8_e4m3fn")
        if scale.dtype != torch.float32:
            raise TypeError(f"scale has dtype {scale.dtype}; expected torch.float32")
        if codes.dim() != 2:
            raise ValueError(f"codes has shape {tuple(codes.shape)}; expected [hidden, K]")
        expected = tuple(-(-n // b) for n, b in zip(codes.shape, block, strict=True))
        if tuple(scale.shape) != expected:
            raise ValueError(f"scale has shape {tuple(scale.shape)}; codes {tuple(codes.shape)} need {expected}")
        if block == (32, 32) and not row.mxfp8_wo_a:
            spread = scale.repeat_interleave(32, 0)[: codes.shape[0]].repeat_interleave(32, 1)[:, : codes.shape[1]]
            return cls((codes.float() * spread).bfloat16())
        laid_out = layout_weight_scales(scale, arch=row, rows=codes.shape[0], block=block)
        return cls(codes, laid_out, engine=engine or get_engine("auto", row), group_size=block[1])

    def __call__(self, z: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.weight_scale is None or self.engine is None:
            return bf16_wo_b(z, self.weight, out=out)
        return fp8_wo_b(z, self.weight, self.weight_scale, engine=self.engine, group_size=self.group_size, out=out)


def reduce_partials(
    partials: Sequence[torch.Tensor], kind: SumKind = "bf16", *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """y BF16 ``[M, hidden]`` from every rank's BF16 partial of that shape, added in the order of the ranks.

    ``bf16`` (serving): ``((p0 + p1) + p2) + ...``, each sum rounded to BF16. ``fp32`` (DeepSeek's reference; also what
    a switch that accumulates in FP32 does): the same order in FP32, one rounding to BF16 at the end. A collective
    library adds in an order of its own, so with more than two ranks its bits may differ within
    ``tp_reduction_bound``; with two, addition commutes and they may not (NaN payloads aside). Raises ``TypeError``/
    ``ValueError`` that names the bad argument.
    """
    _check_kind(kind)
    if partials is None or len(partials) == 0:
        raise ValueError("partials is empty; at least one rank's y is needed")
    for rank, partial in enumerate(partials):
        _check_partial(f"partials[{rank}]", partial)
        if partial.shape != partials[0].shape:
            raise ValueError(
                f"partials[{rank}] has shape {tuple(partial.shape)}; partials[0] has {tuple(partials[0].shape)}"
            )
    out = _checked_out(out, tuple(partials[0].shape), partials[0].device)
    total = partials[0] if kind == "bf16" else partials[0].float()
    for partial in partials[1:]:
        total = total + partial
    return out.copy_(total)


def padded_rows(y: torch.Tensor, tp_size: int) -> torch.Tensor:
    """y ``[M, hidden]`` with zero rows behind it up to a multiple of ``tp_size`` (y itself where none is missing)."""
    if tp_size < 1:
        raise ValueError(f"tp_size={tp_size} must be at least 1")
    missing = -y.shape[0] % tp_size
    return torch.cat([y, y.new_zeros((missing, *y.shape[1:]))]) if missing else y


def scatter_partials(partials: Sequence[torch.Tensor], rank: int, kind: SumKind = "bf16") -> torch.Tensor:
    """Rank ``rank``'s rows of the sum: ``ceil(M/TP)`` of them from row ``rank*ceil(M/TP)`` on, zero from row M on."""
    if not 0 <= rank < len(partials):
        raise ValueError(f"rank={rank} must lie in 0..{len(partials) - 1}, one for each of the partials")
    whole = padded_rows(reduce_partials(partials, kind), len(partials))
    rows = whole.shape[0] // len(partials)
    return whole[rank * rows : (rank + 1) * rows].clone()


def all_reduce(
    y: torch.Tensor, group: dist.ProcessGroup, kind: SumKind = "bf16", *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum over ``group`` of every rank's BF16 y ``[M, hidden]``, on every rank; ``y`` is kept unless it is ``out``.

    ``bf16`` adds BF16 words as serving does, ``fp32`` adds FP32 words and rounds once (an FP32 buffer is allocated).
    """
    _check_kind(kind)
    _check_partial("y", y)
    out = _checked_out(out, tuple(y.shape), y.device)
    if y.numel() == 0:  # every rank has the same M, so all of them leave here
        return out
    total = y.float() if kind == "fp32" else out.copy_(y)
    dist.all_reduce(total, group=group)
    return out if total is out else out.copy_(total)


def reduce_scatter(
    y: torch.Tensor, group: dist.ProcessGroup, kind: SumKind = "bf16", *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over ``group``: BF16 ``[ceil(M/TP), hidden]``, rows past M zero (``padded_rows``)."""
    _check_kind(kind)
    _check_partial("y", y)
    tp_size = dist.get_world_size(group)
    out = _checked_out(out, (-(-y.shape[0] // tp_size), y.shape[1]), y.device)
    if y.numel() == 0:
        return out
    whole = padded_rows(y, tp_size).contiguous()
    total = out if kind == "bf16" and out.is_contiguous() else out.new_empty(out.shape, dtype=_word(kind))
    dist.reduce_scatter_tensor(total, whole.to(total.dtype), group=group)
    return out if total is out else out.copy_(total)


class RowParallelWoB(torch.nn.Module):
    """``wo_b`` over all ranks: this rank's linear, then the sum; fits where ``deep_gemm_fp8_o_proj`` takes a ``wo_b``.

    local: any callable from z ``[M, K]`` to BF16 ``[M, hidden]`` (it is handed ``out`` if it has such a parameter).
    ``group``: a ``torch.distributed`` process group; without one the partial is the result, for a caller that sums it
    (``reduce_partials``). ``kind`` is of ``reduce_partials``. ``collective``: ``all_reduce`` returns ``[M, hidden]``,
    ``reduce_scatter`` this rank's ``[ceil(M/TP), hidden]``.
    """

    def __init__(
        self,
        local: Callable[..., torch.Tensor],
        *,
        group: dist.ProcessGroup | None = None,
        kind: SumKind = "bf16",
        collective: str = "all_reduce",
    ) -> None:
        super().__init__()
        _check_kind(kind)
        if not callable(local):
            raise TypeError(f"local is {type(local).__name__}; expected a callable")
        if collective not in COLLECTIVES:
            raise ValueError(f"collective={collective!r} is unknown; known: {', '.join(COLLECTIVES)}")
        self.local, self.group, self.kind, self.collective = local, group, kind, collective
        self._local_takes_out = "out" in inspect.signature(local).parameters

    def forward(self, z: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """y as ``collective`` says, in ``out`` when given. Raises ``TypeError``/``ValueError`` for a bad partial."""
        whole = self.group is None or self.collective == "all_reduce"
        given: dict[str, Any] = {"out": out} if whole and out is not None and self._local_takes_out else {}
        partial = self.local(z, **given)
        _check_partial("the result of local", partial)
        if partial.shape[0] != z.shape[0]:
            raise ValueError(f"the result of local has {partial.shape[0]} rows; z has {z.shape[0]}")
        if self.group is None:
            return (
                partial if out is None or partial is out else _checked_out(out, partial.shape, z.device).copy_(partial)
            )
        if self.collective == "all_reduce":
            return all_reduce(partial, self.group, self.kind, out=out)
        return reduce_scatter(partial, self.group, self.kind, out=out)


def _word(kind: SumKind) -> torch.dtype:
    return torch.float32 if kind == "fp32" else torch.bfloat16


def _check_kind(kind: Any) -> None:
    if kind not in SUM_KINDS:
        raise ValueError(f"kind={kind!r} is unknown; known: {', '.join(SUM_KINDS)}")


def _check_partial(name: str, y: Any) -> None:
    if not isinstance(y, torch.Tensor):
        raise TypeError(f"{name} is {type(y).__name__}; expected a torch.Tensor")
    if y.dtype != torch.bfloat16:
        raise TypeError(f"{name} has dtype {y.dtype}; partials are torch.bfloat16")
    if y.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(y.shape)}; expected [M, hidden]")


def _checked_out(out: torch.Tensor | None, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """``out``, or a new BF16 tensor of ``shape``."""
    if out is None:
        return torch.empty(tuple(shape), dtype=torch.bfloat16, device=device)
    if out.dtype != torch.bfloat16:
        raise TypeError(f"out has dtype {out.dtype}; expected torch.bfloat16")
    if tuple(out.shape) != tuple(shape) or out.device != device:
        raise ValueError(f"out has shape {tuple(out.shape)} on {out.device}; expected {tuple(shape)} on {device}")
    return out
