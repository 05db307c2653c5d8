"""The FP8 products that DeepGEMM names: where groups, rows, columns and the summed axis lie in each operand.

Axes as letters: G groups (one product each), T or M rows of D, N columns of D, K the summed axis. A scale tensor has
the axes of its codes, with K counted in blocks (or words of four) and rows or columns in blocks of the recipe. Which
expressions an architecture has is a column of its row (``Arch.einsum_expressions``). Source: DeepGEMM
``csrc/apis/einsum.hpp`` (``fp8_einsum``) and ``tests/test_einsum.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Product:
    """One named product; ``a``, ``b``, ``d`` are the axes of the tensors in their order."""

    name: str
    a: str
    b: str
    d: str
    fp32_per_row: bool = False  # recipe (1, 1, 128) takes FP32 powers of two beside packed words
    accumulates: bool = False  # an FP32 D may start from C

    @property
    def rows(self) -> str:
        """The letter of D's rows."""
        return next(axis for axis in self.a if axis not in "GK")

    @property
    def grouped(self) -> bool:
        """Whether there is an axis of groups."""
        return "G" in self.d

    def by_group(self, axes: str, tensor: torch.Tensor) -> torch.Tensor:
        """A view of an operand (or its scales) as ``[G, rows, K]`` or ``[G, columns, K]``, of D as ``[G, rows, N]``."""
        if not self.grouped:
            return tensor[None]
        last = "N" if "K" not in axes else "K"
        middle = next(axis for axis in axes if axis not in ("G", last))
        return tensor.permute([axes.index(axis) for axis in ("G", middle, last)])


EINSUMS = {
    product.name: product
    for product in (
        Product("bhr,hdr->bhd", "TGK", "GNK", "TGN"),
        Product("bhd,hdr->bhr", "TGK", "GKN", "TGN"),
        Product("bhd,bhr->hdr", "KGM", "KGN", "GMN", fp32_per_row=True, accumulates=True),
    )
}
GEMM_NT = Product("fp8_gemm_nt", "MK", "NK", "MN")
