"""What the tests of the o_proj block share: weights in each layout, one call's arguments, padded activations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from oproj.activation import QuantizedActivation, empty_scales, empty_values
from oproj.arch import Arch
from oproj.o_proj import compute_fp8_einsum_recipe, grouped_wo_a
from oproj.quantize import fused_inv_rope_fp8_quant
from oproj.weights import layout_weight_scales
from quantizer_calls import random_call

RANK = 16


def weight_of(arch: Arch | str, groups: int, k: int, block: int = 128, seed: int = 1) -> Any:
    """An FP8 ``wo_a``: random codes, scales that differ by group and block, in the layout of ``arch``."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x7F, (groups, RANK, k)).astype(np.uint8)
    codes |= rng.integers(0, 2, codes.shape, np.uint8) << 7
    scale = np.ldexp(1.0, rng.integers(-9, 9, (groups, -(-RANK // block), k // block))).astype(np.float32)
    return fp8_weight(arch, codes, scale, block)


def fp8_weight(arch: Arch | str, codes: np.ndarray, scale: np.ndarray, block: int = 128) -> Any:
    laid_out = layout_weight_scales(torch.from_numpy(scale), arch=arch, rows=RANK, block=(block, block))
    return SimpleNamespace(weight=torch.from_numpy(codes).view(torch.float8_e4m3fn), weight_scale_inv=laid_out)


def arguments(arch: Arch | str, tokens: int, groups: int = 2, block: int = 128, **changes: Any) -> dict[str, Any]:
    """One call: two heads of 448 + 64 a group (K = 1024), ``wo_b`` returns what it is given."""
    args = random_call(tokens, groups)
    recipe, packed = compute_fp8_einsum_recipe(block, arch=arch)
    basis = {name: args[name] for name in ("o", "positions", "cos_sin_cache")}
    sizes = {"n_groups": groups, "heads_per_group": 2, "nope_dim": 448, "rope_dim": 64, "o_lora_rank": RANK}
    basis |= sizes | {"einsum_recipe": recipe, "tma_aligned_scales": packed}
    return basis | {"wo_a": weight_of(arch, groups, 1024, block), "wo_b": lambda flat: flat} | changes


def z_of(args: dict[str, Any]) -> torch.Tensor:
    return grouped_wo_a(**{name: value for name, value in args.items() if name != "wo_b"})


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def in_slots(args: dict[str, Any], slots: int, first: int) -> QuantizedActivation:
    """The activation of ``args`` at slots ``first...`` of a wider buffer whose other slots hold NaN."""
    live, packed = args["n_groups"], args["tma_aligned_scales"]
    x, scale = fused_inv_rope_fp8_quant(
        args["o"], args["positions"], args["cos_sin_cache"], live, 2, tma_aligned_scales=packed
    )
    tokens = len(x)
    data = empty_values(tokens, slots, 1024, torch.float8_e4m3fn)
    data.view(torch.uint8).fill_(0x7F)
    wide = empty_scales(tokens, slots, scale.shape[2], packed)
    wide.fill_(-1 if packed else torch.nan)  # four bytes 255
    data.view(torch.uint8)[:, first : first + live] = x.view(torch.uint8)
    wide[:, first : first + live] = scale
    return QuantizedActivation(data, wide)
