"""One rank's layer with drawn weights on a device, for checks that need a whole call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from conformance.bulk import Draw
from oproj.activation import QuantizedActivation, empty_scales, empty_values
from oproj.arch import Arch
from oproj.config import OProjConfig
from oproj.engines import Engine
from oproj.o_proj import compute_fp8_einsum_recipe, deep_gemm_fp8_o_proj
from oproj.weights import layout_weight_scales
from oproj.wo_b import fp8_wo_b


class Layer:
    """One rank's weights and table on the device, and the arguments of its calls."""

    def __init__(self, arch: Arch, config: OProjConfig, draw: Draw, table: torch.Tensor) -> None:
        self.arch, self.config, self.draw, self.table = arch, config, draw, table
        groups, rank, k = config.n_groups, config.o_lora_rank, config.group_k
        self.wo_a = self._linear((groups, rank, k))
        self.wo_b = self._linear((1, config.hidden_size, config.wo_b_k))
        recipe, packed = compute_fp8_einsum_recipe(arch=arch)
        self.sizes: dict[str, Any] = {
            "n_groups": groups,
            "heads_per_group": config.heads_per_group,
            "nope_dim": config.nope_dim,
            "rope_dim": config.rope_dim,
            "o_lora_rank": rank,
            "einsum_recipe": recipe,
            "tma_aligned_scales": packed,
        }

    def _linear(self, shape: tuple[int, int, int]) -> Any:
        groups, rows, k = shape
        codes = self.draw.codes("normal", shape).view(torch.float8_e4m3fn)
        scale = self.draw.scales("pow2", (groups, rows // 128, k // 128))
        return SimpleNamespace(weight=codes, weight_scale_inv=layout_weight_scales(scale, arch=self.arch, rows=rows))

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """o, a slice of a buffer with padding heads, whose magnitudes differ by block; and positions."""
        config, device = self.config, self.draw.device
        o = torch.randn(
            (tokens, config.n_heads + 8, config.head_dim), device=device, generator=self.draw.generator
        ) * torch.exp2(self.draw.integers(-8, 9, (tokens, config.n_heads + 8, 1)).float())
        return o.bfloat16()[:, : config.n_heads], self.draw.integers(0, len(self.table), (tokens,))

    def z(self, o: Any, positions: Any, **how: Any) -> torch.Tensor:
        """z ``[T, G*R]`` of one hot call."""
        return deep_gemm_fp8_o_proj(o, positions, self.table, self.wo_a, lambda flat: flat, **self.sizes, **how)

    def y(self, z: torch.Tensor, engine: Engine, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's y."""
        return fp8_wo_b(z, self.wo_b.weight[0], self.wo_b.weight_scale_inv[0], engine=engine, out=out)

    def quantised(self, o: torch.Tensor, positions: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of ``engine``, whose device the tensors are on."""
        sizes = {name: value for name, value in self.sizes.items() if name not in ("o_lora_rank", "einsum_recipe")}
        table = self.table.to(o.device)
        return engine.inv_rope_fp8_quant(o, positions, table, quant_group_size=128, quantize=True, **sizes)

    def model_x(self, o: torch.Tensor, positions: torch.Tensor, model: Engine) -> QuantizedActivation:
        """The model's quantised groups, computed on the CPU, in the device's memory."""
        data, scale = self.quantised(o.cpu(), positions.cpu(), model)
        tokens, groups, k = data.shape
        there = empty_scales(tokens, groups, scale.shape[2], scale.dtype == torch.int32, o.device)
        return QuantizedActivation(
            empty_values(tokens, groups, k, data.dtype, o.device).copy_(data), there.copy_(scale)
        )
