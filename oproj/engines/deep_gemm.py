"""The real GPU: DeepGEMM's FP8 products behind this project's checks."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from oproj import kernels
from oproj.activation import empty_scales, empty_values
from oproj.arch import Arch, get_arch
from oproj.engines import EngineUnavailable, Operand, Recipe
from oproj.engines.checks import check_fp8_einsum, check_fp8_gemm_nt
from oproj.engines.discovery import current_gpu, discover, first_working


class DeepGemmEngine:
    """``fp8_einsum`` and ``fp8_gemm_nt`` of a DeepGEMM that was proven to work on the current GPU.

    ``quantizer`` says who quantises in ``inv_rope_fp8_quant``: ``"kernel"``, the fused GPU kernel, or where that
    cannot run ``"software"``, the bit-exact model on the CPU.
    """

    name = "deep_gemm"

    def __init__(
        self, arch: Arch | str, *, module: ModuleType | None = None, device: torch.device | str = "cuda"
    ) -> None:
        """Find a DeepGEMM for ``arch`` (a row or its name), or take ``module`` on ``device`` unproven.

        Raises ``EngineUnavailable`` with every candidate and why it fails when none works, or when the
        current device is not of that row.
        """
        self.arch = get_arch(arch)
        self.distribution: str | None = None
        self.version: str | None = None
        if module is None:
            self.device = _device_of(self.arch)
            module = self._proven_module()
        else:
            self.device = torch.device(device)
            self.version = getattr(module, "__version__", None)
        self.module = module
        kernel_runs = self.device.type == "cuda" and kernels.unavailable_reason() is None
        self.quantizer = "kernel" if kernel_runs else "software"

    @property
    def nan_policy(self) -> str:
        """``"kept"`` where the fused kernel quantises: a NaN of o is a NaN code; the model launders it, as served."""
        return "kept" if self.quantizer == "kernel" else "laundered"

    def _proven_module(self) -> ModuleType:
        finding = first_working()
        if finding is None:
            lines = "\n  ".join(finding.line() for finding in discover())
            raise EngineUnavailable(f"no DeepGEMM works for {self.arch.name}; found:\n  {lines}")
        self.distribution, self.version = finding.distribution, finding.version
        return importlib.import_module(finding.module)

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
        """``d[b, h, d] = sum_r a[b, h, r] * b[h, d, r]`` on the GPU; operands and errors as in ``checks``.

        T = 0 (or N = 0) returns without a launch; d holds no element then.
        """
        recipe = check_fp8_einsum(self.arch, expr, a, b, d, c, recipe)
        self._check_home(d)
        if d.numel() == 0:
            return
        with _current(self.device):
            extra = {} if c is None else {"c": c}
            self.module.fp8_einsum(expr, tuple(a), tuple(b), d, recipe=recipe, **extra)

    def fp8_gemm_nt(
        self,
        a: Operand,
        b: Operand,
        d: torch.Tensor,
        c: torch.Tensor | None = None,
        *,
        recipe: Recipe | None = None,
    ) -> None:
        """``d[M, N] = a[M, K] @ b[N, K].T`` on the GPU; ``recipe=None`` goes by the scales, as in DeepGEMM."""
        recipe = check_fp8_gemm_nt(self.arch, a, b, d, c, recipe)
        self._check_home(d)
        if d.numel() == 0:
            return
        with _current(self.device):
            self.module.fp8_gemm_nt(tuple(a), tuple(b), d, recipe=recipe)

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
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales on this engine's device: by the fused kernel (``oproj.kernels``), or, where that cannot
        run, by the software model on the CPU (``quantizer`` says which).

        Bits, shapes, strides and errors are those of the software engine; scale rows behind the view are zero.
        """
        if self.quantizer == "kernel" and (nope_dim, rope_dim) == (448, 64):
            return kernels.fused_inv_rope_fp8_quant(
                o,
                positions,
                cos_sin_cache,
                n_groups,
                heads_per_group,
                nope_dim,
                rope_dim,
                quant_group_size,
                tma_aligned_scales,
                quantize,
                out=out,
            )
        from oproj.engines.software import SoftwareEngine

        values, scales = SoftwareEngine(self.arch).inv_rope_fp8_quant(
            o.cpu(),
            positions.cpu(),
            cos_sin_cache.cpu(),
            n_groups=n_groups,
            heads_per_group=heads_per_group,
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            quant_group_size=quant_group_size,
            tma_aligned_scales=tma_aligned_scales,
            quantize=quantize,
        )
        tokens, groups, k = values.shape
        values = empty_values(tokens, groups, k, values.dtype, self.device).copy_(values)
        if scales.dim() != 3:  # BF16 mode: an empty placeholder
            return values, scales.to(self.device)
        home = empty_scales(tokens, groups, scales.shape[2], scales.dtype == torch.int32, self.device)
        return values, home.copy_(scales)

    def describe(self) -> dict[str, Any]:
        """Engine, row, device, driver, CUDA, torch, DeepGEMM package and version, and who quantises."""
        from oproj.environment import driver_version

        on_gpu = self.device.type == "cuda"
        return {
            "engine": self.name,
            "arch": self.arch.name,
            "device": torch.cuda.get_device_name(self.device) if on_gpu else str(self.device),
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "package": self.distribution or self.module.__name__,
            "version": self.version,
            "file": getattr(self.module, "__file__", None),
            "quantizer": self.quantizer,
        }

    def _check_home(self, d: torch.Tensor) -> None:
        if d.device.type != self.device.type or (d.device.index or 0) != (self.device.index or 0):
            raise ValueError(f"the tensors are on {d.device}; this engine works on {self.device}")


def _device_of(arch: Arch) -> torch.device:
    device, found, problem = current_gpu()
    if device is None or found is not arch:
        seen = problem or f"the current GPU is {torch.cuda.get_device_name(device)} ({found and found.name})"
        lines = "\n  ".join(finding.line() for finding in discover())
        raise EngineUnavailable(
            f"engine 'deep_gemm' needs a GPU of row {arch.name}, and {seen}; DeepGEMM here:\n  {lines}"
        )
    return device


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """DeepGEMM launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
