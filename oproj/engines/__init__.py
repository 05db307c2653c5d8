"""Who does the arithmetic: ``software`` (bit-exact model on the CPU) or ``deep_gemm`` (the real GPU).

Both have DeepGEMM's own call shape, so that one replaces the other and a user's kernel replaces both.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from oproj.arch import Arch, arch_of_capability, get_arch

Operand = tuple[torch.Tensor, torch.Tensor]
Recipe = tuple[int, int, int]
ENGINES = ("auto", "software", "deep_gemm")


class EngineUnavailable(RuntimeError):
    """The asked-for engine cannot work on this machine; the text says what was found and why it fails."""


class Engine(Protocol):
    """What an engine offers. ``name`` is 'software' or 'deep_gemm'; ``device`` is where its tensors live."""

    name: str
    arch: Arch
    device: torch.device

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
        """Grouped FP8 product into ``d``; ``"bhr,hdr->bhd"``: b tokens, h groups, r K, d output columns."""

    def fp8_gemm_nt(
        self,
        a: Operand,
        b: Operand,
        d: torch.Tensor,
        c: torch.Tensor | None = None,
        *,
        recipe: Recipe | None = None,
    ) -> None:
        """``d[M, N] = a[M, K] @ b[N, K].T`` in FP8."""

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inverse RoPE and block quantisation: ``(values [T, G, K], scales)``."""

    def describe(self) -> dict[str, Any]:
        """Versions and device, for the report."""


def _gpu_matches(arch: Arch) -> bool:
    return torch.cuda.is_available() and arch_of_capability(*torch.cuda.get_device_capability()) is arch


def get_engine(name: str, arch: Arch | str) -> Engine:
    """The engine ``name`` for ``arch`` (a row or its name).

    ``auto`` takes ``deep_gemm`` when the device is of that architecture and ``software`` otherwise. Raises
    ``ValueError`` for an unknown name, ``EngineUnavailable`` when ``deep_gemm`` cannot work here.
    """
    row = get_arch(arch)
    if name not in ENGINES:
        raise ValueError(f"engine={name!r} is unknown; known engines: {', '.join(ENGINES)}")
    if name == "software" or (name == "auto" and not _gpu_matches(row)):
        from oproj.engines.software import SoftwareEngine

        return SoftwareEngine(row)
    from oproj.engines.deep_gemm import DeepGemmEngine

    return DeepGemmEngine(row)
