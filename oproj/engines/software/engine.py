"""The ``software`` engine: DeepGEMM's call shape on the bit-exact model, CPU tensors, any architecture row."""

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
from oproj.engines.software import gemm
from oproj.engines.software.quantizers import inv_rope_fp8_quant


class SoftwareEngine:
    """Bits of the tensor core without the tensor core.

    Raises ``ValueError`` for an unknown architecture. Methods raise ``TypeError``/``ValueError`` that name the bad
    argument (``oproj.engines.checks``); tensors must live on the CPU.
    """

    name = "software"
    device = torch.device("cpu")

    def __init__(self, arch: Arch | str) -> None:
        self.arch = get_arch(arch)

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

        Call shape of DeepGEMM 54e2261 ``csrc/apis/einsum.hpp``; arithmetic of ``oproj.engines.software.spec.chain``.
        """
        recipe = check_fp8_einsum(self.arch, expr, a, b, d, c, recipe)
        self._refuse_other_devices(d)
        for group in range(d.shape[1]):
            self._product((a[0][:, group], a[1][:, group]), (b[0][group], b[1][group]), d[:, group], recipe)

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
        self._product(a, b, d, chosen)

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
            "device": platform.processor() or platform.machine(),
            "threads": gemm.thread_count(),
        }

    def _product(self, a: Operand, b: Operand, d: torch.Tensor, recipe: Recipe) -> None:
        """One ``[T, K] x [N, K]`` product with any scale layout that the checks admit."""
        tokens, columns = d.shape
        if tokens == 0 or columns == 0:
            return
        a_scales = self._scales(a[1], tokens, recipe[0])
        b_scales = self._scales(b[1], columns, recipe[1])
        out = np.zeros((tokens, columns), np.float32)
        gemm.matmul(self.arch, _codes(a[0]), a_scales, _codes(b[0]), b_scales, recipe[2], out)
        if d.dtype == torch.float32:
            d.copy_(torch.from_numpy(out))
        else:
            d.copy_(torch.from_numpy(gemm.round_to_bf16_bits(out).view(np.int16)).view(torch.bfloat16))

    def _scales(self, scale: torch.Tensor, rows: int, gran_mn: int) -> np.ndarray:
        """One scale per row and K block: FP32 values, or UE8M0 bytes where the row takes exponents inside."""
        if scale.dtype == torch.int32:
            per_row = unpack_ue8m0(scale)
        elif self.arch.mma.scales_inside:
            per_row = float_to_ue8m0(scale)
        else:
            per_row = scale
        return np.ascontiguousarray(per_row.numpy().repeat(gran_mn, axis=0)[:rows])

    def _refuse_other_devices(self, d: torch.Tensor) -> None:
        if d.device.type != "cpu":
            raise ValueError(f"d is on {d.device}; the software engine works on CPU tensors")


def _codes(codes: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(codes.detach().view(torch.uint8).numpy())
