"""Dimensions of the attention output projection: presets of the DeepSeek-V4 family and tensor-parallel shards.

Numbers from vLLM 0.33.0 (``deepseek_v4``, ``deepseek_v41``) and the published model configurations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from oproj.arch import Arch, get_arch

CheckpointScale = Literal["e8m0", "fp32"]


@dataclass(frozen=True)
class OProjConfig:
    """One rank's output projection. ``n_heads`` and ``n_groups`` are the rank's own once ``shard`` was called."""

    name: str
    hidden_size: int
    n_heads: int
    n_groups: int
    nope_dim: int = 448
    rope_dim: int = 64
    o_lora_rank: int = 1024
    weight_block: tuple[int, int] = (128, 128)  # rows x K of one FP8 checkpoint scale
    checkpoint_scale: CheckpointScale = "e8m0"
    n_layers: int = 1
    max_position: int = 1_048_576
    tp_size: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        for field in ("hidden_size", "n_heads", "n_groups", "o_lora_rank", "max_position", "tp_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.n_heads % self.n_groups:
            raise ValueError(f"n_heads={self.n_heads} is not a multiple of n_groups={self.n_groups}")
        if self.rope_dim % 2 or self.rope_dim < 2 or self.nope_dim < 0 or self.nope_dim % 2:
            raise ValueError(
                f"rope_dim={self.rope_dim} must be even and positive, nope_dim={self.nope_dim} even and >= 0"
            )
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"tp_rank={self.tp_rank} must lie in 0..{self.tp_size - 1}")

    @property
    def head_dim(self) -> int:
        """Width of one head: un-rotated dims first, rotated dims last."""
        return self.nope_dim + self.rope_dim

    @property
    def heads_per_group(self) -> int:
        """Consecutive heads that one row group of ``wo_a`` reads."""
        return self.n_heads // self.n_groups

    @property
    def group_k(self) -> int:
        """K of one group of ``wo_a``."""
        return self.heads_per_group * self.head_dim

    @property
    def wo_b_k(self) -> int:
        """K of this rank's part of ``wo_b``."""
        return self.n_groups * self.o_lora_rank

    def quant_group_size(self, arch: Arch | str) -> int:
        """K elements per activation scale as served: 32 for MXFP8 weights where the row serves them, else 128."""
        return 32 if self.weight_block == (32, 32) and get_arch(arch).mxfp8_wo_a else 128

    def fp8_wo_a(self, arch: Arch | str) -> bool:
        """Whether ``wo_a`` stays FP8 on ``arch`` (V4.1's 32x32 blocks are dequantised elsewhere than on SM100)."""
        return self.weight_block != (32, 32) or get_arch(arch).mxfp8_wo_a

    def shard(self, tp_size: int, rank: int = 0) -> OProjConfig:
        """The local dimensions of ``rank`` among ``tp_size``: heads and groups are split, hidden is not.

        Raises ``ValueError`` where heads or groups do not divide (8 groups cannot be split over 16 ranks).
        """
        if self.tp_size != 1:
            raise ValueError(f"{self.name} is already rank {self.tp_rank} of {self.tp_size}; shard the whole config")
        if tp_size < 1:
            raise ValueError(f"tp_size={tp_size} must be at least 1")
        for field in ("n_heads", "n_groups"):
            if getattr(self, field) % tp_size:
                raise ValueError(
                    f"tp_size={tp_size} does not divide {field}={getattr(self, field)} of {self.name}; "
                    f"possible sizes: {', '.join(map(str, self.tp_sizes()))}"
                )
        return replace(
            self,
            n_heads=self.n_heads // tp_size,
            n_groups=self.n_groups // tp_size,
            tp_size=tp_size,
            tp_rank=rank,
        )

    def tp_sizes(self) -> list[int]:
        """Tensor-parallel sizes that divide both heads and groups."""
        return [n for n in range(1, self.n_groups + 1) if self.n_groups % n == 0 and self.n_heads % n == 0]


PRESETS: dict[str, OProjConfig] = {
    config.name: config
    for config in (
        OProjConfig("v4-flash", hidden_size=4096, n_heads=64, n_groups=8, n_layers=43),
        OProjConfig("v4-flash-base", hidden_size=4096, n_heads=64, n_groups=8, n_layers=43, checkpoint_scale="fp32"),
        OProjConfig("v4-pro", hidden_size=7168, n_heads=128, n_groups=16, n_layers=61),
        OProjConfig("v4.1-flash", hidden_size=5120, n_heads=64, n_groups=8, n_layers=40, weight_block=(32, 32)),
    )
}


def get_preset(name: str) -> OProjConfig:
    """A preset by name; ``ValueError`` lists the known ones."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"preset={name!r} is unknown; known presets: {', '.join(PRESETS)}") from None
