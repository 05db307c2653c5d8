"""What an FP8 product may be called with: shapes, dtypes, strides, scale layouts, named one by one.

DeepGEMM itself checks less. It compares the group count of A and B twice and D's never (up to sgl-deep-gemm
0.1.5.post3 and tokenspeed-deepgemm 2.5.0), a width N that is no multiple of 8 ends in a device trap that
costs the CUDA context, and on Blackwell an FP32 scale with a mantissa is cut to its exponent in some layouts
(sglang #39193). Both engines run these checks, so a call that passes on one passes on the other. Sources:
DeepGEMM 54e2261 ``csrc/apis/einsum.hpp``, ``gemm.hpp``, ``csrc/utils/layout.hpp``,
``impls/sm90_fp8_gemm_1d2d.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oproj.activation import scale_columns, tma_aligned_size
from oproj.arch import Arch, get_arch

EXPRESSIONS = ("bhr,hdr->bhd",)
BLOCK_K = 128  # K elements of one main-loop step of the kernels; K must be a multiple
TMA_BYTES = 16  # tensor-map strides and base addresses are multiples of this

# Scale dtype that each recipe takes, by the row's own scale format.
_RECIPES: dict[str, dict[tuple[int, int, int], torch.dtype]] = {
    "fp32": {(1, 128, 128): torch.float32},
    "ue8m0_packed": {(1, 1, 128): torch.int32, (1, 1, 32): torch.int32, (1, 128, 128): torch.float32},
}
_OUTPUTS: dict[str, tuple[torch.dtype, ...]] = {
    "fp32": (torch.bfloat16,),
    "ue8m0_packed": (torch.bfloat16, torch.float32),
}


@dataclass(frozen=True)
class _Side:
    """One operand's logical size and where its axes lie in the tensors (codes and scales share the order)."""

    name: str
    mn: int  # tokens of a, output columns of b
    mn_axis: int
    k: int
    groups: int | None = None
    group_axis: int | None = None

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        if self.groups is None:
            return (rows, columns)
        return (rows, self.groups, columns) if self.mn_axis == 0 else (self.groups, rows, columns)


def check_fp8_einsum(
    arch: Arch | str,
    expr: str,
    a: Any,
    b: Any,
    d: torch.Tensor,
    c: torch.Tensor | None,
    recipe: tuple[int, int, int],
) -> tuple[int, int, int]:
    """Check the arguments of ``fp8_einsum`` for ``arch`` and return the recipe as a tuple of ints.

    For ``"bhr,hdr->bhd"``: a = (e4m3 ``[T, G, K]``, scales), b = (e4m3 ``[G, N, K]``, scales), d
    ``[T, G, N]``. Raises ``TypeError`` for a wrong type or dtype, ``ValueError`` for a wrong value, shape or
    stride; the text names the argument, what it is and what it has to be. T = 0 or N = 0: shapes and dtypes
    are checked, scale strides and values are not (DeepGEMM returns before it looks at them).
    """
    row = get_arch(arch)
    if expr not in EXPRESSIONS:
        raise ValueError(f"expr={expr!r} is not supported on {row.name}; supported: {', '.join(EXPRESSIONS)}")
    (a_codes, a_scale), (b_codes, b_scale) = _operand("a", a), _operand("b", b)
    _refuse_c(c)
    _check_devices(a=a_codes, a_scale=a_scale, b=b_codes, b_scale=b_scale, d=d)
    _check_codes("a", a_codes, "[T, G, K]")
    _check_codes("b", b_codes, "[G, N, K]")
    _check_output(row, d, "[T, G, N]")
    tokens, groups, k = a_codes.shape
    _agree("K", {"a": k, "b": b_codes.shape[2]})
    _agree("G", {"a": groups, "b": b_codes.shape[0], "d": d.shape[1]})
    _agree("T", {"a": tokens, "d": d.shape[0]})
    _agree("N", {"b": b_codes.shape[1], "d": d.shape[2]})
    if groups == 0:
        raise ValueError("a has G=0 groups; at least 1 is needed")
    sides = (
        (_Side("a", tokens, 0, k, groups, 1), a_scale),
        (_Side("b", b_codes.shape[1], 1, k, groups, 0), b_scale),
    )
    return _check_sizes_and_scales(row, sides, _recipe(row, recipe))


def check_fp8_gemm_nt(
    arch: Arch | str,
    a: Any,
    b: Any,
    d: torch.Tensor,
    c: torch.Tensor | None,
    recipe: tuple[int, int, int] | None,
) -> tuple[int, int, int]:
    """Check the arguments of ``fp8_gemm_nt`` for ``arch`` and return the recipe that applies.

    a = (e4m3 ``[M, K]``, scales), b = (e4m3 ``[N, K]``, scales), d ``[M, N]``. ``recipe=None`` picks
    DeepGEMM's default: (1, 128, 128) for FP32 weight scales, (1, 1, 128) for packed int32 ones. Raises as
    ``check_fp8_einsum`` does.
    """
    row = get_arch(arch)
    (a_codes, a_scale), (b_codes, b_scale) = _operand("a", a), _operand("b", b)
    _refuse_c(c)
    _check_devices(a=a_codes, a_scale=a_scale, b=b_codes, b_scale=b_scale, d=d)
    _check_codes("a", a_codes, "[M, K]")
    _check_codes("b", b_codes, "[N, K]")
    _check_output(row, d, "[M, N]")
    m, k = a_codes.shape
    n = b_codes.shape[0]
    _agree("K", {"a": k, "b": b_codes.shape[1]})
    _agree("M", {"a": m, "d": d.shape[0]})
    _agree("N", {"b": n, "d": d.shape[1]})
    if recipe is None:
        recipe = (1, 1, 128) if b_scale.dtype == torch.int32 and row.tma_aligned_scales else (1, 128, 128)
    sides = ((_Side("a", m, 0, k), a_scale), (_Side("b", n, 0, k), b_scale))
    return _check_sizes_and_scales(row, sides, _recipe(row, recipe))


def _operand(name: str, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name} is {type(pair).__name__}; expected a pair (codes, scales)")
    for label, part in ((f"{name}[0] (codes)", pair[0]), (f"{name}[1] (scales)", pair[1])):
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"{label} is {type(part).__name__}; expected a torch.Tensor")
    return pair[0], pair[1]


def _refuse_c(c: torch.Tensor | None) -> None:
    if c is not None:
        raise ValueError(
            f"c is {type(c).__name__}; only c=None is supported: the output projection never accumulates "
            "into an earlier result, and the FP8 kernels with BF16 output refuse it"
        )


def _check_devices(**tensors: torch.Tensor) -> None:
    if not isinstance(tensors["d"], torch.Tensor):
        raise TypeError(f"d is {type(tensors['d']).__name__}; expected a torch.Tensor")
    home = tensors["a"].device
    for name, tensor in tensors.items():
        if tensor.device != home:
            raise ValueError(f"{name} is on {tensor.device} but a is on {home}; all must be on one device")


def _check_codes(name: str, codes: torch.Tensor, layout: str) -> None:
    label = f"{name}[0] (codes)"
    if codes.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{label} has dtype {codes.dtype}; expected torch.float8_e4m3fn")
    _check_rank(label, codes, layout)
    _check_tma(label, codes)


def _check_output(row: Arch, d: torch.Tensor, layout: str) -> None:
    allowed = _OUTPUTS[row.scale_format]
    if d.dtype not in allowed:
        raise TypeError(f"d has dtype {d.dtype}; {row.name} writes {' or '.join(map(str, allowed))}")
    _check_rank("d", d, layout)
    _check_tma("d", d)


def _check_rank(label: str, tensor: torch.Tensor, layout: str) -> None:
    axes = layout.count(",") + 1
    if tensor.dim() != axes:
        raise ValueError(f"{label} has shape {tuple(tensor.shape)}; expected {axes} axes {layout}")


def _check_tma(label: str, tensor: torch.Tensor) -> None:
    """Unit last stride, and the outer strides and address that a TMA tensor map takes."""
    strides, size = tensor.stride(), tensor.element_size()
    if tensor.numel() == 0:
        return
    if strides[-1] != 1:
        raise ValueError(f"{label} has strides {strides}; the last one must be 1")
    if any(stride <= 0 or stride * size % TMA_BYTES for stride in strides[:-1]):
        raise ValueError(
            f"{label} has strides {strides}; the outer ones must be positive multiples of "
            f"{TMA_BYTES // size} elements ({TMA_BYTES} bytes)"
        )
    if tensor.data_ptr() % TMA_BYTES:
        raise ValueError(f"{label} starts at address {tensor.data_ptr():#x}; it must be aligned to {TMA_BYTES} bytes")


def _agree(axis: str, sizes: dict[str, int]) -> None:
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} has {axis}={size}" for name, size in sizes.items())
        raise ValueError(f"{found}; {axis} must be the same in {' and '.join(sizes)}")


def _recipe(row: Arch, recipe: Any) -> tuple[int, int, int]:
    known = _RECIPES[row.scale_format]
    if not isinstance(recipe, (tuple, list)) or tuple(recipe) not in known:
        supported = ", ".join(map(str, known))
        raise ValueError(f"recipe={recipe!r} is not supported on {row.name}; supported: {supported}")
    first, second, third = recipe
    return (int(first), int(second), int(third))


def _check_sizes_and_scales(
    row: Arch, sides: tuple[tuple[_Side, torch.Tensor], ...], recipe: tuple[int, int, int]
) -> tuple[int, int, int]:
    k, n = sides[0][0].k, sides[1][0].mn
    if k == 0 or k % BLOCK_K:
        raise ValueError(f"a has K={k}; K must be a positive multiple of {BLOCK_K}")
    if n % 8:
        raise ValueError(f"b has N={n}; N must be a multiple of 8 (the kernels trap on the device otherwise)")
    dtype = _RECIPES[row.scale_format][recipe]
    empty = any(side.mn == 0 for side, _ in sides)
    for (side, scale), gran_mn in zip(sides, recipe[:2], strict=True):
        label = f"{side.name}[1] (scales)"
        _check_scale_dtype(label, scale, row, recipe, dtype)
        _check_scale_shape(label, scale, side, gran_mn, recipe[2], dtype)
        if empty:
            continue
        if dtype == torch.int32:
            _check_packed_strides(label, scale, side)
        elif row.tma_aligned_scales:
            _check_powers_of_two(label, scale, row)
        elif gran_mn != 1:
            _check_contiguous_either_way(label, scale)
    return recipe


def _check_scale_dtype(
    label: str, scale: torch.Tensor, row: Arch, recipe: tuple[int, int, int], dtype: torch.dtype
) -> None:
    if scale.dtype != dtype:
        kind = "packed UE8M0" if dtype == torch.int32 else "FP32"
        raise TypeError(f"{label} has dtype {scale.dtype}; recipe {recipe} on {row.name} takes {kind} scales ({dtype})")


def _check_scale_shape(
    label: str, scale: torch.Tensor, side: _Side, gran_mn: int, gran_k: int, dtype: torch.dtype
) -> None:
    rows = -(-side.mn // gran_mn)
    expected = side.shape(rows, scale_columns(side.k, gran_k, dtype == torch.int32))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"{label} has shape {tuple(scale.shape)}; expected {expected} for {side.name} with K={side.k}, "
            f"{gran_mn} x {gran_k} elements a scale{', 4 scales a word' if dtype == torch.int32 else ''}"
        )


def _check_packed_strides(label: str, scale: torch.Tensor, side: _Side) -> None:
    """MN-major with a TMA-aligned column, groups back to back (DeepGEMM ``check_sf_layout``)."""
    column = tma_aligned_size(side.mn, 4)
    got, expected = list(scale.stride()), [0] * scale.dim()
    expected[side.mn_axis] = got[side.mn_axis] if side.mn == 1 else 1
    expected[-1] = column
    if side.group_axis is not None:
        expected[side.group_axis] = column * scale.shape[-1]
    if got != expected:
        raise ValueError(
            f"{label} has strides {tuple(got)}; expected {tuple(expected)}: MN-major, one column of "
            f"{side.mn} words padded to {column}"
        )


def _check_contiguous_either_way(label: str, scale: torch.Tensor) -> None:
    rows, columns = scale.shape[-2:]
    batch_fits = scale.dim() == 2 or scale.stride(0) == rows * columns
    if not batch_fits or tuple(scale.stride()[-2:]) not in ((columns, 1), (1, rows)):
        raise ValueError(
            f"{label} has strides {tuple(scale.stride())}; expected a contiguous tensor (or one that is "
            "contiguous after swapping its last two axes)"
        )


def _check_powers_of_two(label: str, scale: torch.Tensor, row: Arch) -> None:
    bits = scale.contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    exact = (bits > 0) & ((bits & 0x7FFFFF) == 0) & (exponent > 0) & (exponent < 255)
    if not bool(exact.all()):
        index = [int(i) for i in (~exact).nonzero()[0]]
        raise ValueError(
            f"{label} holds {float(scale[tuple(index)])!r} at {index}; {row.name} keeps the exponent alone, "
            "so FP32 scales must be powers of two in 2**-126..2**127"
        )
