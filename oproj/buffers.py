"""Memory of the hot call, allocated once and used for every batch up to a largest one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oproj.activation import scale_columns, tma_aligned_size


@dataclass(frozen=True)
class OProjBuffers:
    """Flat memory for quantised groups, their scales and z; ``views(T)`` cuts it for a batch of T tokens.

    A call that is given buffers allocates none of these three, and its results are overwritten by the next call with
    the same buffers. ``scales`` is empty for a BF16 ``wo_a``.
    """

    values: torch.Tensor
    scales: torch.Tensor
    z: torch.Tensor
    max_tokens: int
    n_groups: int
    k: int
    o_lora_rank: int

    @classmethod
    def allocate(
        cls,
        max_tokens: int,
        *,
        n_groups: int,
        heads_per_group: int,
        nope_dim: int,
        rope_dim: int,
        o_lora_rank: int,
        einsum_recipe: tuple[int, int, int],
        tma_aligned_scales: bool,
        quantize: bool = True,
        device: torch.device | str | None = None,
    ) -> OProjBuffers:
        """Buffers for the call of ``deep_gemm_fp8_o_proj`` with these arguments and at most ``max_tokens`` tokens.

        quantize: False for a BF16 ``wo_a``. Raises ``ValueError`` for a size below 1.
        """
        k = heads_per_group * (nope_dim + rope_dim)
        for name, number in (
            ("max_tokens", max_tokens),
            ("n_groups", n_groups),
            ("heads_per_group * (nope_dim + rope_dim)", k),
            ("o_lora_rank", o_lora_rank),
            ("einsum_recipe[2]", einsum_recipe[2]),
        ):
            if number < 1:
                raise ValueError(f"{name}={number} must be at least 1")
        columns = scale_columns(k, einsum_recipe[2], tma_aligned_scales) if quantize else 0
        words = n_groups * columns * tma_aligned_size(max_tokens, 4)
        dtype = torch.float8_e4m3fn if quantize else torch.bfloat16
        return cls(
            torch.empty(max_tokens * n_groups * k, dtype=dtype, device=device),
            torch.zeros(words, dtype=torch.int32 if tma_aligned_scales else torch.float32, device=device),
            torch.empty(max_tokens * n_groups * o_lora_rank, dtype=torch.bfloat16, device=device),
            max_tokens,
            n_groups,
            k,
            o_lora_rank,
        )

    def views(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(values [T, G, K], scales [T, G, columns], z [T, G, R])`` with the exact strides of the path; no copy.

        Raises ``ValueError`` for more tokens than there is room for.
        """
        if not 0 <= tokens <= self.max_tokens:
            raise ValueError(f"buffers are for at most {self.max_tokens} tokens; o has {tokens}")
        groups, k, rank = self.n_groups, self.k, self.o_lora_rank
        aligned = tma_aligned_size(tokens, 4)
        columns = self.scales.numel() // (groups * tma_aligned_size(self.max_tokens, 4))
        values = self.values.as_strided((tokens, groups, k), (k, max(tokens, 1) * k, 1))
        scales = self.scales.as_strided((tokens, groups, columns), (1, columns * aligned, aligned))
        return values, scales, self.z.as_strided((tokens, groups, rank), (groups * rank, rank, 1))

    def check(self, values: Any, n_groups: int, k: int, o_lora_rank: int) -> None:
        """Raise ``ValueError`` where these buffers are for another call or device than that of ``values``."""
        for name, mine, asked in (
            ("n_groups", self.n_groups, n_groups),
            ("K", self.k, k),
            ("o_lora_rank", self.o_lora_rank, o_lora_rank),
        ):
            if mine != asked:
                raise ValueError(f"buffers are for {name}={mine}; the call has {name}={asked}")
        if self.z.device != values.device:
            raise ValueError(f"buffers are on {self.z.device} but o is on {values.device}")
