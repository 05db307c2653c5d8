"""What the scales of an FP8 product may be: recipe, dtype, shape, strides, values.

On Blackwell an FP32 scale with a mantissa is cut to its exponent in some layouts (sglang #39193): here it is refused.
Sources: DeepGEMM 54e2261 ``csrc/utils/layout.hpp``, ``csrc/apis/layout.hpp``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oproj.activation import scale_columns, tma_aligned_size
from oproj.arch import Arch
from oproj.engines.expressions import Product

# Scale dtype that each recipe takes, by the row's own scale format.
_RECIPES: dict[str, dict[tuple[int, int, int], torch.dtype]] = {
    "fp32": {(1, 128, 128): torch.float32},
    "ue8m0_packed": {(1, 1, 128): torch.int32, (1, 1, 32): torch.int32, (1, 128, 128): torch.float32},
}


@dataclass(frozen=True)
class Side:
    """One operand: its axes in order (codes and scales share it) and its sizes. ``mn`` is the row or column axis."""

    name: str
    axes: str
    sizes: dict[str, int]

    @property
    def mn_axis(self) -> str:
        return next(axis for axis in self.axes if axis not in "GK")

    @property
    def mn(self) -> int:
        return self.sizes[self.mn_axis]

    def ordered(self, mn: int, k: int, group: int) -> tuple[int, ...]:
        """One number per axis, in the order of the axes."""
        numbers = {self.mn_axis: mn, "K": k, "G": group}
        return tuple(numbers[axis] for axis in self.axes)


def chosen_recipe(row: Arch, recipe: Any) -> tuple[int, int, int]:
    """The recipe as ints. Raises ``ValueError`` that lists the ones ``row`` takes."""
    known = _RECIPES[row.scale_format]
    if not isinstance(recipe, (tuple, list)) or tuple(recipe) not in known:
        supported = ", ".join(map(str, known))
        raise ValueError(f"recipe={recipe!r} is not supported on {row.name}; supported: {supported}")
    first, second, third = recipe
    return (int(first), int(second), int(third))


def check_scales(
    row: Arch, product: Product, sides: tuple[tuple[Side, torch.Tensor], ...], recipe: tuple[int, int, int]
) -> None:
    """Raise ``TypeError`` or ``ValueError`` that names the first scale tensor that does not fit, and how."""
    empty = any(side.mn == 0 for side, _ in sides)
    for (side, scale), gran_mn in zip(sides, recipe[:2], strict=True):
        label = f"{side.name}[1] (scales)"
        _check_dtype(label, scale, row, product, recipe)
        _check_shape(label, scale, side, gran_mn, recipe[2])
        if empty:
            continue
        if scale.dtype == torch.int32:
            _check_packed_strides(label, scale, side)
        elif row.tma_aligned_scales:
            _check_powers_of_two(label, scale, row)
        elif gran_mn != 1:
            _check_contiguous_either_way(label, scale)


def _check_dtype(label: str, scale: torch.Tensor, row: Arch, product: Product, recipe: tuple[int, int, int]) -> None:
    dtype = _RECIPES[row.scale_format][recipe]
    if product.fp32_per_row and recipe == (1, 1, 128) and scale.dtype == torch.float32:
        return
    if scale.dtype != dtype:
        kind = "packed UE8M0" if dtype == torch.int32 else "FP32"
        raise TypeError(f"{label} has dtype {scale.dtype}; recipe {recipe} on {row.name} takes {kind} scales ({dtype})")


def _check_shape(label: str, scale: torch.Tensor, side: Side, gran_mn: int, gran_k: int) -> None:
    packed, k = scale.dtype == torch.int32, side.sizes["K"]
    expected = side.ordered(-(-side.mn // gran_mn), scale_columns(k, gran_k, packed), side.sizes.get("G", 1))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"{label} has shape {tuple(scale.shape)}; expected {expected} for {side.name} with K={k}, "
            f"{gran_mn} x {gran_k} elements a scale{', 4 scales a word' if packed else ''}"
        )


def _check_packed_strides(label: str, scale: torch.Tensor, side: Side) -> None:
    """MN-major with a TMA-aligned column, groups back to back (DeepGEMM ``check_sf_layout``)."""
    column, axis = tma_aligned_size(side.mn, 4), side.axes.index(side.mn_axis)
    step = scale.stride(axis) if side.mn == 1 else 1  # the stride of a single row means nothing
    expected = side.ordered(step, column, column * scale.shape[side.axes.index("K")])
    if tuple(scale.stride()) != expected:
        raise ValueError(
            f"{label} has strides {tuple(scale.stride())}; expected {expected}: MN-major, one column of "
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
