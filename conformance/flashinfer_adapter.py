"""FlashInfer's own functions as an implementation: rotation, block quantiser and FP8 block products.

| stage | function (flashinfer-python 0.7.4) |
|---|---|
| ``quantize``, rotation | ``rope.apply_rope_with_cos_sin_cache``, pairs of neighbours, sines negated; gives BF16 |
| ``quantize``, codes and scales | ``quantization.per_token_group_quant_8bit`` with power-of-two scales; takes BF16 |
| ``wo_a``, ``wo_b`` on SM90 | ``gemm.fp8_blockscale_gemm_sm90``, one call a group |
| ``wo_a``, ``wo_b`` on SM100 to SM120 | ``gemm.gemm_fp8_nt_groupwise`` (CUTLASS), a call a group, 4 tokens at least |

Rotated values are so rounded to BF16 before they are quantised, which the class declares. FlashInfer's fused way,
RopeQuant (`oproj.rope_quant`), is inside attention: its input is queries and a cache, not the attention output that a
Case has. The sum over ranks and wo_b's activation quantiser are this project's.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from conformance.case import CaseConfig
from conformance.implementation import EngineImplementation
from oproj.activation import (
    UE8M0_NAN,
    QuantizedActivation,
    empty_scales,
    empty_values,
    float_to_ue8m0,
    pack_ue8m0,
    scale_columns,
    ue8m0_to_float,
    unpack_ue8m0,
)
from oproj.arch import Arch, get_arch
from oproj.engines import EngineUnavailable, Operand, Recipe
from oproj.engines.deep_gemm import DeepGemmEngine
from oproj.engines.discovery import current_gpu
from oproj.engines.rope_checks import check_inv_rope

PACKAGE = "flashinfer-python"
BLOCK = 128
_PADDED = 4  # tokens of CUTLASS' blockwise product come in fours
HOPPER, BLACKWELL = "fp8_blockscale_gemm_sm90", "gemm_fp8_nt_groupwise"
ROPE, QUANTIZE = "apply_rope_with_cos_sin_cache", "per_token_group_quant_8bit"
# the arguments that are passed by name; a release that lacks one must not look like a bad call of ours
_ARGUMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    HOPPER: ("flashinfer.gemm", ("input", "weight", "input_scale", "weight_scale")),
    BLACKWELL: (
        "flashinfer.gemm",
        ("a", "b", "a_scale", "b_scale", "scale_major_mode", "scale_granularity_mnk", "out_dtype", "backend"),
    ),
    ROPE: ("flashinfer.rope", ("positions", "query", "key", "head_size", "cos_sin_cache", "is_neox")),
    QUANTIZE: (
        "flashinfer.quantization",
        ("x", "group_size", "column_major_scales", "scale_tma_aligned", "scale_ue8m0", "backend"),
    ),
}


def find(name: str) -> Callable[..., Any]:
    """FlashInfer's function ``name``; raises ``EngineUnavailable`` without it or without an argument that is passed."""
    where, arguments = _ARGUMENTS[name]
    try:
        module = importlib.import_module(where)
    except ImportError as error:
        raise EngineUnavailable(
            f"implementation 'flashinfer' needs FlashInfer: {where} cannot be imported ({error}); "
            f"pip install '{PACKAGE}>=0.7.4' (the extra `flashinfer`)"
        ) from error
    function = getattr(module, name, None)
    if function is None:
        raise EngineUnavailable(f"implementation 'flashinfer': {where} has no {name}; {PACKAGE} 0.7.4 has it")
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except TypeError as error:
        raise EngineUnavailable(f"implementation 'flashinfer': {where}.{name} of this release: {error}") from error
    return function


class FlashInferProducts:
    """DeepGEMM's two calls on FlashInfer's products, for ``arch``."""

    __name__ = "flashinfer"

    def __init__(self, arch: Arch) -> None:
        self.packed = arch.tma_aligned_scales
        self._product = self._on_blackwell if self.packed else self._on_hopper
        self._function = find(BLACKWELL if self.packed else HOPPER)

    def fp8_einsum(self, expr: str, a: Operand, b: Operand, d: torch.Tensor, *, recipe: Recipe) -> None:
        """``d[t, h] = a[t, h] . b[h].T``, group by group; other expressions than ``"bhr,hdr->bhd"`` are refused."""
        if expr != "bhr,hdr->bhd":
            raise ValueError(f"expr={expr!r} is none of FlashInfer's products; it has 'bhr,hdr->bhd'")
        (x, x_scale), (w, w_scale) = a, b
        for group in range(d.shape[1]):
            left, right = (x[:, group], x_scale[:, group]), (w[group], w_scale[group])
            d[:, group].copy_(self._product(left, right, recipe))

    def fp8_gemm_nt(self, a: Operand, b: Operand, d: torch.Tensor, *, recipe: Recipe) -> None:
        """``d[M, N] = a[M, K] . b[N, K].T``."""
        d.copy_(self._product(a, b, recipe))

    def _on_hopper(self, a: Operand, b: Operand, recipe: Recipe) -> torch.Tensor:
        # The kernel reads a's scales with the token fastest and columns of 4*ceil(M/4), whatever the strides: as here.
        return self._function(input=a[0], weight=b[0], input_scale=a[1], weight_scale=b[1].contiguous())

    def _on_blackwell(self, a: Operand, b: Operand, recipe: Recipe) -> torch.Tensor:
        if recipe[2] != BLOCK:
            raise ValueError(f"blocks of {recipe[2]}: FlashInfer's product takes one scale for {BLOCK} of K")
        rows = a[0].shape[0]
        missing = -rows % _PADDED
        x = torch.nn.functional.pad(a[0].view(torch.uint8), (0, 0, 0, missing)).view(a[0].dtype)
        x_scale = torch.nn.functional.pad(plain(a[1]), (0, 0, 0, missing), value=1.0)
        y = self._function(
            a=x,
            b=b[0],
            a_scale=x_scale.contiguous(),
            b_scale=weight_blocks(b[1], b[0].shape[0]),
            scale_major_mode="K",
            scale_granularity_mnk=(1, BLOCK, BLOCK),
            out_dtype=torch.bfloat16,
            backend="cutlass",
        )
        return y[:rows]


def plain(scale: torch.Tensor) -> torch.Tensor:
    """FP32 scales ``[rows, blocks]`` of FP32 or packed ones."""
    return ue8m0_to_float(unpack_ue8m0(scale)) if scale.dtype == torch.int32 else scale


def weight_blocks(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """FP32 scales ``[rows/128, K/128]`` of a weight whose packed scales stand once in every row.

    Raises ``ValueError`` where the 128 rows of a block have different ones: FlashInfer's product has no room for them.
    """
    values = plain(scale)
    if values.shape[0] != rows:
        return values.contiguous()
    blocks = values.unflatten(0, (-1, BLOCK))
    if not bool((blocks == blocks[:, :1]).all()):
        raise ValueError(f"weight scales differ within {BLOCK} rows; FlashInfer's product takes one for the block")
    return blocks[:, 0].contiguous()


class FlashInferEngine(DeepGemmEngine):
    """FlashInfer's products behind this project's checks; quantisation is that of `DeepGemmEngine`."""

    name = "flashinfer"

    def __init__(self, arch: Arch | str, device: torch.device) -> None:
        products: Any = FlashInferProducts(get_arch(arch))
        super().__init__(arch, module=products, device=device)
        self.distribution = PACKAGE
        try:
            self.version = metadata.version(PACKAGE)
        except metadata.PackageNotFoundError:  # a source tree on the path
            self.version = getattr(importlib.import_module("flashinfer"), "__version__", None)


class FlashInferImplementation(EngineImplementation):
    """FlashInfer on the current GPU, which must be of ``arch`` (a row or its name); see the module for who does what.

    Raises ``EngineUnavailable`` without FlashInfer, without one of its functions, and without such a GPU.
    """

    # Another order of the sum for few tokens (SM90), scales outside the tensor core (Blackwell): bounds decide.
    bitwise = ()
    o_known = "rounded"
    amax_floor = 448e-10  # the quantiser floors the scale, at 1e-10

    def __init__(self, arch: Arch | str) -> None:
        row = get_arch(arch)
        self._rotate, self._quantize = find(ROPE), find(QUANTIZE)
        find(BLACKWELL if row.tma_aligned_scales else HOPPER)  # a package is sooner installed than a GPU
        super().__init__(FlashInferEngine(row, _device(row)))

    def quantize(
        self, o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, *, config: CaseConfig
    ) -> QuantizedActivation:
        """FlashInfer's rotation by minus the position, then its block quantiser where wo_a is FP8."""
        block, packed, fp8 = (
            config.quant_group_size(self.arch),
            self.arch.tma_aligned_scales,
            config.fp8_wo_a(self.arch),
        )
        sizes = (config.n_groups, config.heads_per_group, config.nope_dim, config.rope_dim)
        check_inv_rope(o, positions, cos_sin_cache, *sizes, block, packed, fp8)
        x = self._turned(o, positions, cos_sin_cache, config) if len(o) else o
        x = x.reshape(len(o), config.n_groups * config.group_k)
        if not fp8:
            return QuantizedActivation(_as_values(x, config), torch.empty(0, device=o.device))
        if not len(o):
            columns = scale_columns(config.group_k, block, packed)
            scale = empty_scales(0, config.n_groups, columns, packed, o.device)
            return QuantizedActivation(_as_values(x.to(torch.float8_e4m3fn), config), scale)
        codes, scales = self._quantize(
            x=x,
            group_size=block,
            column_major_scales=True,
            scale_tma_aligned=True,
            scale_ue8m0=True,
            backend="cuda" if block == BLOCK else "cutile",  # the CUDA kernel has blocks of 128 alone
        )
        words = scales.reshape(len(o), config.n_groups, -1)
        words = _packed(words) if packed else words
        home = empty_scales(len(o), config.n_groups, words.shape[2], packed, o.device)
        return QuantizedActivation(_as_values(codes, config), home.copy_(words))

    def _turned(
        self, o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, config: CaseConfig
    ) -> torch.Tensor:
        cos, sin = cos_sin_cache.chunk(2, dim=-1)
        tail = o[..., config.nope_dim :].reshape(len(o), -1)
        turned, _ = self._rotate(
            positions=positions.contiguous(),
            query=tail,
            key=tail.new_zeros(len(o), config.rope_dim),  # the function rotates keys beside the queries
            head_size=config.rope_dim,
            cos_sin_cache=torch.cat((cos, -sin), dim=-1),
            is_neox=False,
        )
        return torch.cat((o[..., : config.nope_dim], turned.view(*o.shape[:2], -1)), dim=-1)


def _packed(scales: torch.Tensor) -> torch.Tensor:
    """Packed UE8M0 words of powers of two; Inf, which a block with an Inf has, is byte 255 as in the served kernel."""
    finite = scales.isfinite()
    exponents = float_to_ue8m0(torch.where(finite, scales, torch.ones_like(scales)))
    return pack_ue8m0(torch.where(finite, exponents, torch.full_like(exponents, UE8M0_NAN)))


def _as_values(x: torch.Tensor, config: CaseConfig) -> torch.Tensor:
    """``x`` ``[T, G*K]`` in the layout of the values, ``[T, G, K]``."""
    values = empty_values(len(x), config.n_groups, config.group_k, x.dtype, x.device)
    return values.copy_(x.view(len(x), config.n_groups, config.group_k))


def _device(row: Arch) -> torch.device:
    device, found, problem = current_gpu()
    if device is None or found is not row:
        seen = problem or f"the current GPU is of {found and found.name}"
        raise EngineUnavailable(f"implementation 'flashinfer' needs a GPU of row {row.name}: {seen}")
    return device
