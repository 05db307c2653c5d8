"""The ``software`` engine: DeepGEMM's call shape on the bit-exact model, any architecture row, CPU or (bulk) GPU."""

from __future__ import annotations

import platform
from typing import Any

import numba
import numpy as np
import torch

from oproj.activation import float_to_ue8m0, unpack_ue8m0
from oproj.arch import Arch, get_arch
from oproj.engines import Operand, Recipe
from oproj.engines.checks import check_fp8_einsum, check_fp8_gemm_nt
from oproj.engines.expressions import EINSUMS
from oproj.engines.software import gemm
from oproj.engines.software.quantizers import inv_rope_fp8_quant


class SoftwareEngine:
    """Bits of the tensor core without the tensor core.

    ``device``: where its tensors live. On ``"cuda"`` the products run as CUDA kernels (any NVIDIA GPU models any row;
    needs ``cuda.core``), the quantiser takes CPU tensors. Raises ``ValueError`` for an unknown architecture. Methods
    raise ``TypeError``/``ValueError`` that name the bad argument (``oproj.engines.checks``).
    """

    name = "software"

    def __init__(self, arch: Arch | str, device: torch.device | str = "cpu") -> None:
        self.arch = get_arch(arch)
        self.device = torch.device(device)

    def fp8_einsum(
        self,
        expr: str,
        a: Operand,
        b: Operand,
        d: torch.Tensor,
        c: torch.Tensor | None = None,
        *,
        recipe: Recipe = (1, 128, 128),
    ) -> None:
        """``d[t, h] = a[t, h] . b[h].T`` for ``"bhr,hdr->bhd"``: a ``[T, G, K]``, b ``[G, R, K]``, d ``[T, G, R]``.

        Further expressions of the row: ``oproj.engines.expressions``. Call shape of DeepGEMM ``csrc/apis/einsum.hpp``;
        arithmetic of ``oproj.engines.software.spec.chain``, then ``spec.reduce_add`` where c is given.
        """
        recipe = check_fp8_einsum(self.arch, expr, a, b, d, c, recipe)
        self._refuse_other_devices(d)
        product = EINSUMS[expr]
        left, right = (
            (product.by_group(axes, codes), product.by_group(axes, scale))
            for axes, (codes, scale) in ((product.a, a), (product.b, b))
        )
        start = None if c is None else product.by_group(product.d, c.detach()).clone()
        by_group = product.by_group(product.d, d)
        self._grouped(left, right, by_group, recipe)
        if start is not None:
            by_group.copy_(_reduce_add(start, by_group))

    def fp8_gemm_nt(
        self,
        a: Operand,
        b: Operand,
        d: torch.Tensor,
        c: torch.Tensor | None = None,
        *,
        recipe: Recipe | None = None,
    ) -> None:
        """``d[M, N] = a[M, K] . b[N, K].T`` (DeepGEMM 54e2261 ``csrc/apis/gemm.hpp``)."""
        chosen = check_fp8_gemm_nt(self.arch, a, b, d, c, recipe)
        self._refuse_other_devices(d)
        one = [(codes[None], scale[None]) for codes, scale in (a, b)]
        self._grouped(one[0], one[1], d[None], chosen)

    def inv_rope_fp8_quant(
        self,
        o: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        *,
        n_groups: int,
        heads_per_group: int,
        nope_dim: int = 448,
        rope_dim: int = 64,
        quant_group_size: int = 128,
        tma_aligned_scales: bool = False,
        quantize: bool = True,
        variant: str = "fma_cos",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inverse RoPE and quantisation, bit for bit as the serving kernel (see ``oproj.quantize``)."""
        return inv_rope_fp8_quant(
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
            variant=variant,
        )

    def describe(self) -> dict[str, Any]:
        """What computed the numbers: model, libraries, processor."""
        return {
            "engine": self.name,
            "arch": self.arch.name,
            "instruction": self.arch.mma.name,
            "numba": numba.__version__,
            "numpy": np.__version__,
            "torch": torch.__version__,
            "device": platform.processor() or platform.machine()
            if self.device.type == "cpu"
            else torch.cuda.get_device_name(self.device),
            "threads": gemm.thread_count(),
        }

    def _grouped(self, a: Operand, b: Operand, d: torch.Tensor, recipe: Recipe) -> None:
        """``d[g] = a[g] . b[g].T`` for ``[G, T, K]`` and ``[G, N, K]`` codes with any scales that the checks admit."""
        if d.numel() == 0:
            return
        d = d.detach()  # the kernel writes memory, whatever autograd thinks of it
        codes = [operand[0].detach().view(torch.uint8) for operand in (a, b)]
        scales = [self._per_row(operand[1], rows, gran) for operand, rows, gran in zip((a, b), d.shape[1:], recipe)]
        if d.device.type == "cpu":
            for group in range(d.shape[0]):
                x, sx, w, sw = (t[group].numpy() for t in (codes[0], scales[0], codes[1], scales[1]))
                d[group].copy_(self._on_cpu(x, sx, w, sw, recipe[2], d.dtype))
        else:
            from oproj.engines.software import cuda_twin

            d.copy_(cuda_twin.matmul(self.arch, codes[0], scales[0], codes[1], scales[1], recipe[2]))

    def _on_cpu(
        self, a: np.ndarray, a_scales: np.ndarray, b: np.ndarray, b_scales: np.ndarray, gran_k: int, dtype: torch.dtype
    ) -> torch.Tensor:
        out = np.zeros((a.shape[0], b.shape[0]), np.float32)
        gemm.matmul(self.arch, a, a_scales, np.ascontiguousarray(b), b_scales, gran_k, out)
        if dtype == torch.float32:
            return torch.from_numpy(out)
        return torch.from_numpy(gemm.round_to_bf16_bits(out).view(np.int16)).view(torch.bfloat16)

    def _per_row(self, scale: torch.Tensor, rows: int, gran_mn: int) -> torch.Tensor:
        """One scale per row and K block: FP32 values, or UE8M0 bytes where the row takes exponents inside."""
        scale = scale.detach()
        if scale.dtype == torch.int32:
            scale = unpack_ue8m0(scale)
        elif self.arch.mma.scales_inside:
            scale = float_to_ue8m0(scale)
        return scale.repeat_interleave(gran_mn, dim=1)[:, :rows] if gran_mn > 1 else scale

    def _refuse_other_devices(self, d: torch.Tensor) -> None:
        if d.device.type != self.device.type:
            raise ValueError(f"d is on {d.device}; this software engine works on {self.device.type} tensors")


def _reduce_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """FP32 ``x + y`` as ``spec.reduce_add``."""

    def flushed(value: torch.Tensor) -> torch.Tensor:
        return torch.where(value.abs() < torch.finfo(torch.float32).tiny, value * 0.0, value)

    return flushed(flushed(x) + flushed(y))
