"""Valid calls of an FP8 product, in the layouts of every architecture row, for tests to spoil or to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oproj.activation import empty_scales, empty_values, scale_columns
from oproj.arch import ARCHS
from oproj.engines.checks import check_fp8_einsum, check_fp8_gemm_nt

E4M3 = torch.float8_e4m3fn


@dataclass
class Call:
    """A valid call that a test spoils."""

    arch: str
    recipe: Any
    a: torch.Tensor
    sa: torch.Tensor
    b: torch.Tensor
    sb: torch.Tensor
    d: Any
    c: Any = None
    expr: str = "bhr,hdr->bhd"

    def check(self) -> tuple[int, int, int]:
        if self.expr == "gemm":
            return check_fp8_gemm_nt(self.arch, (self.a, self.sa), (self.b, self.sb), self.d, self.c, self.recipe)
        pairs = ((self.a, self.sa), (self.b, self.sb))
        return check_fp8_einsum(self.arch, self.expr, *pairs, self.d, self.c, self.recipe)


def weight_words(groups: int, rows: int, columns: int) -> torch.Tensor:
    """Packed weight scales ``[G, rows, columns]``, MN-major."""
    return empty_scales(rows, groups, columns, True).transpose(0, 1)


def valid(arch: str, recipe: tuple[int, int, int], tokens: int, groups: int, k: int, n: int) -> Call:
    packed = ARCHS[arch].tma_aligned_scales and recipe != (1, 128, 128)
    columns = scale_columns(k, recipe[2], packed)
    sa = empty_scales(tokens, groups, columns, packed)
    sb: torch.Tensor
    if packed:
        sa.fill_(0x7F7F7F7F)
        sb = weight_words(groups, n, columns).fill_(0x7F7F7F7F)
    else:
        sa.fill_(0.5)
        sb = torch.full((groups, -(-n // 128), columns), 2.0)
    a = empty_values(tokens, groups, k, E4M3)
    return Call(
        arch,
        recipe,
        a,
        sa,
        torch.empty((groups, n, k), dtype=E4M3),
        sb,
        torch.empty((tokens, groups, n), dtype=torch.bfloat16),
    )


def valid_gemm(arch: str, recipe: tuple[int, int, int], m: int, k: int, n: int) -> Call:
    call = valid(arch, recipe, m, 1, k, n)
    call.a, call.sa, call.d = call.a[:, 0], call.sa[:, 0], call.d[:, 0]
    call.b, call.sb, call.expr = call.b[0], call.sb[0], "gemm"
    return call
