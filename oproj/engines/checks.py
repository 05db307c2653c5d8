"""What an FP8 product may be called with: shapes, dtypes, strides, scale layouts, named one by one.

DeepGEMM itself checks less. It compares the group count of A and B twice and D's never (up to sgl-deep-gemm
0.1.5.post3 and tokenspeed-deepgemm 2.5.0), and a width N that is no multiple of 8 ends in a device trap that costs the
CUDA context. Both engines run these checks, so a call that passes on one passes on the other. Sources: DeepGEMM
54e2261 ``csrc/apis/einsum.hpp``, ``gemm.hpp``, ``impls/sm90_fp8_gemm_1d2d.cuh``; scales: ``scale_checks``.
"""

from __future__ import annotations

from typing import Any

import torch

from oproj.arch import Arch, get_arch
from oproj.engines.expressions import EINSUMS, GEMM_NT, Product
from oproj.engines.scale_checks import Side, check_scales, chosen_recipe

BLOCK_K = 128  # K elements of one main-loop step of the kernels; K must be a multiple
TMA_BYTES = 16  # tensor-map strides and base addresses are multiples of this

_OUTPUTS: dict[str, tuple[torch.dtype, ...]] = {
    "fp32": (torch.bfloat16,),
    "ue8m0_packed": (torch.bfloat16, torch.float32),
}


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

    Axes of every expression: ``oproj.engines.expressions``; ``"bhr,hdr->bhd"``: a = (e4m3 ``[T, G, K]``, scales),
    b = (e4m3 ``[G, N, K]``, scales), d ``[T, G, N]``. c: only where the expression accumulates, FP32 as d. Raises
    ``TypeError`` for a wrong type or dtype, ``ValueError`` for a wrong value, shape or stride; the text names the
    argument, what it is and what it has to be. T = 0 or N = 0: shapes and dtypes are checked, scale strides and
    values are not (DeepGEMM returns before it looks at them).
    """
    row = get_arch(arch)
    if expr not in row.einsum_expressions:
        supported = ", ".join(row.einsum_expressions)
        raise ValueError(f"expr={expr!r} is not supported on {row.name}; supported: {supported}")
    return _check_product(row, EINSUMS[expr], a, b, d, c, recipe)


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
    if recipe is None:
        _, b_scale = _operand("b", b)
        recipe = (1, 1, 128) if b_scale.dtype == torch.int32 and row.tma_aligned_scales else (1, 128, 128)
    return _check_product(row, GEMM_NT, a, b, d, c, recipe)


def _check_product(
    row: Arch, product: Product, a: Any, b: Any, d: torch.Tensor, c: torch.Tensor | None, recipe: Any
) -> tuple[int, int, int]:
    (a_codes, a_scale), (b_codes, b_scale) = _operand("a", a), _operand("b", b)
    if not product.accumulates:
        _refuse_c(c)
    _check_devices(a=a_codes, a_scale=a_scale, b=b_codes, b_scale=b_scale, d=d)
    _check_codes("a", a_codes, product.a)
    _check_codes("b", b_codes, product.b)
    _check_output(row, d, product.d)
    sizes = {
        name: dict(zip(axes, tensor.shape, strict=True))
        for name, axes, tensor in (("a", product.a, a_codes), ("b", product.b, b_codes), ("d", product.d, d))
    }
    for axis in ("K", "G", product.rows, "N"):
        _agree(axis, {name: size[axis] for name, size in sizes.items() if axis in size})
    if sizes["a"].get("G") == 0:
        raise ValueError("a has G=0 groups; at least 1 is needed")
    if c is not None:
        _check_c(c, d)
    chosen = chosen_recipe(row, recipe)
    k, n = sizes["a"]["K"], sizes["b"]["N"]
    if k == 0 or k % BLOCK_K:
        raise ValueError(f"a has K={k}; K must be a positive multiple of {BLOCK_K}")
    if n % 8:
        raise ValueError(f"b has N={n}; N must be a multiple of 8 (the kernels trap on the device otherwise)")
    sides = ((Side("a", product.a, sizes["a"]), a_scale), (Side("b", product.b, sizes["b"]), b_scale))
    check_scales(row, product, sides, chosen)
    return chosen


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


def _check_c(c: torch.Tensor, d: torch.Tensor) -> None:
    """DeepGEMM copies C into D and lets the kernel add to it."""
    if not isinstance(c, torch.Tensor):
        raise TypeError(f"c is {type(c).__name__}; expected a torch.Tensor or None")
    if d.dtype != torch.float32 or c.dtype != torch.float32:
        raise TypeError(f"c has dtype {c.dtype} and d {d.dtype}; a sum onto c takes torch.float32 for both")
    if c.device != d.device or c.shape != d.shape:
        raise ValueError(f"c has shape {tuple(c.shape)} on {c.device}; it must be as d, {tuple(d.shape)} on {d.device}")
    if c.data_ptr() == d.data_ptr() and c.numel() and c.stride() != d.stride():
        raise ValueError(f"c starts where d does but has strides {c.stride()}; d has {d.stride()}")
    _check_tma("c", c)


def _check_devices(**tensors: torch.Tensor) -> None:
    if not isinstance(tensors["d"], torch.Tensor):
        raise TypeError(f"d is {type(tensors['d']).__name__}; expected a torch.Tensor")
    home = tensors["a"].device
    for name, tensor in tensors.items():
        if tensor.device != home:
            raise ValueError(f"{name} is on {tensor.device} but a is on {home}; all must be on one device")


def _check_codes(name: str, codes: torch.Tensor, axes: str) -> None:
    label = f"{name}[0] (codes)"
    if codes.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{label} has dtype {codes.dtype}; expected torch.float8_e4m3fn")
    _check_rank(label, codes, axes)
    _check_tma(label, codes)


def _check_output(row: Arch, d: torch.Tensor, axes: str) -> None:
    allowed = _OUTPUTS[row.scale_format]
    if d.dtype not in allowed:
        raise TypeError(f"d has dtype {d.dtype}; {row.name} writes {' or '.join(map(str, allowed))}")
    _check_rank("d", d, axes)
    _check_tma("d", d)


def _check_rank(label: str, tensor: torch.Tensor, axes: str) -> None:
    if tensor.dim() != len(axes):
        layout = f"[{', '.join(axes)}]"
        raise ValueError(f"{label} has shape {tuple(tensor.shape)}; expected {len(axes)} axes {layout}")


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
    reach = 0  # of one step along the axes seen so far, innermost first
    for stride, length in sorted((stride, n) for stride, n in zip(strides, tensor.shape, strict=True) if n > 1):
        if label == "d" and stride <= reach:
            raise ValueError(f"{label} has strides {strides} for shape {tuple(tensor.shape)}; its elements overlap")
        reach += stride * (length - 1)
    if tensor.data_ptr() % TMA_BYTES:
        raise ValueError(f"{label} starts at address {tensor.data_ptr():#x}; it must be aligned to {TMA_BYTES} bytes")


def _agree(axis: str, sizes: dict[str, int]) -> None:
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} has {axis}={size}" for name, size in sizes.items())
        raise ValueError(f"{found}; {axis} must be the same in {' and '.join(sizes)}")
