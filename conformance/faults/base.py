"""Correct implementations to plant faults in: every stage as on the software engine, cut where a fault goes in."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from conformance.case import CaseConfig
from conformance.implementation import SoftwareImplementation
from conformance.inputs import LinearWeight, Weights
from oproj.activation import (
    QuantizedActivation,
    empty_scales,
    empty_values,
    pack_ue8m0,
    scale_columns,
    ue8m0_to_float,
    unpack_ue8m0,
)
from oproj.engines.software.lanes import jit
from oproj.engines.software.quant_lanes import scale_exponent
from oproj.weights import layout_weight_scales

E4M3_MAX = 448.0


class Faulty(SoftwareImplementation):
    """All stages of its own, so that the bits of each are judged too, and without a fault."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """As `SoftwareImplementation`."""
        return super().quantize(o, positions, cos_sin_cache, config=config)

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """As `SoftwareImplementation`."""
        return super().wo_a(x, weights, config=config)

    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """As `SoftwareImplementation`."""
        return super().wo_b(z, weights, config=config)


@jit
def _fields(amax_bits, log2_rule):
    out = np.empty_like(amax_bits)
    for i in range(len(amax_bits)):
        out[i] = scale_exponent(amax_bits[i], log2_rule)
    return out


def power_of_two_scale(amax: torch.Tensor, *, log2_rule: bool) -> torch.Tensor:
    """The smallest power of two that holds ``amax`` (FP32, any shape) within 448 times itself.

    ``log2_rule``: as FP32 ``exp2(ceil(log2(amax / 448)))`` gives it, which just above a boundary is an octave lower.
    """
    bits = np.ascontiguousarray(amax.numpy()).reshape(-1).view(np.int32)
    fields = _fields(bits, log2_rule).astype(np.int32) << np.int32(23)
    return torch.from_numpy(fields.view(np.float32)).view(amax.shape)


class Quantizing(Faulty):
    """The quantiser in torch, one method per step, with the software engine's bits."""

    floor = 1e-10

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Rotation, block maximum, scale, codes, layout."""
        y = self.rotate(o, self.table_rows(positions, cos_sin_cache), config)
        y = y.view(len(y), config.n_groups, config.group_k)
        if not config.fp8_wo_a(self.arch):
            values = empty_values(len(y), config.n_groups, config.group_k, torch.bfloat16)
            return QuantizedActivation(values.copy_(y.bfloat16()), torch.empty(0))
        y = self.between(y)
        blocks = y.unflatten(-1, (-1, config.quant_group_size(self.arch)))
        nan = torch.isnan(blocks)  # ignored by the maximum, and clamped, as the served kernel has it
        amax = blocks.masked_fill(nan, 0.0).abs().amax(-1).clamp(min=self.floor)
        scale = self.scale(amax)
        codes = self.cast((blocks / scale[..., None]).masked_fill(nan, E4M3_MAX))
        return self.lay_out(codes.flatten(-2), self.stored(scale, amax), config)

    def table_rows(self, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """The row of each token, FP32 ``[T, rope_dim]``."""
        return table[positions]

    def rotate(self, o: torch.Tensor, rows: torch.Tensor, config: CaseConfig) -> torch.Tensor:
        """FP32 ``[T, H, head_dim]``: the last dims turned back, cosine product fused unless the Case says otherwise."""
        y = o.float().clone(memory_format=torch.contiguous_format)
        half = config.rope_dim // 2
        cos, sin = rows[:, None, :half], rows[:, None, half:]
        even, odd = y[..., config.nope_dim :: 2].clone(), y[..., config.nope_dim + 1 :: 2].clone()
        if config.variant == "fma_cos":  # one rounding of even * cos + fl(odd * sin), exact enough in float64
            y[..., config.nope_dim :: 2] = (even.double() * cos.double() + (odd * sin).double()).float()
            y[..., config.nope_dim + 1 :: 2] = (odd.double() * cos.double() - (even * sin).double()).float()
        else:
            y[..., config.nope_dim :: 2] = even * cos + odd * sin
            y[..., config.nope_dim + 1 :: 2] = odd * cos - even * sin
        return y

    def between(self, y: torch.Tensor) -> torch.Tensor:
        """What happens between rotation and quantisation: nothing."""
        return y

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """The scale that codes are made with, from block maxima, FP32."""
        return power_of_two_scale(amax, log2_rule=True)

    def cast(self, ratio: torch.Tensor) -> torch.Tensor:
        """e4m3 of y / scale: clamped, nearest even."""
        return ratio.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)

    def stored(self, scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        """The scale that is handed on: the same one."""
        return scale

    def lay_out(self, codes: torch.Tensor, scale: torch.Tensor, config: CaseConfig) -> QuantizedActivation:
        """Codes ``[T, G, K]`` and FP32 scales ``[T, G, blocks]`` in the memory layout of the architecture."""
        return activation(codes, scale, packed=self.arch.tma_aligned_scales)


def activation(codes: torch.Tensor, scale: torch.Tensor, *, packed: bool) -> QuantizedActivation:
    """Codes e4m3 ``[T, G, K]`` and FP32 scales ``[T, G, blocks]`` in the layout that consumers read."""
    tokens, groups, k = codes.shape
    data = empty_values(tokens, groups, k, torch.float8_e4m3fn)
    data.view(torch.uint8).copy_(codes.view(torch.uint8))
    out = empty_scales(tokens, groups, scale_columns(scale.shape[-1], 1, packed), packed)
    return QuantizedActivation(data, out.copy_(words(scale) if packed else scale))


def words(scale: torch.Tensor) -> torch.Tensor:
    """Packed UE8M0 words of the exponents of FP32 scales; a mantissa is dropped."""
    return pack_ue8m0((scale.contiguous().view(torch.int32) >> 23 & 0xFF).to(torch.uint8))


def block_scales(x: QuantizedActivation) -> torch.Tensor:
    """FP32 scales ``[T, G, blocks]`` of an activation in either layout."""
    return ue8m0_to_float(unpack_ue8m0(x.scale)) if x.scale.dtype == torch.int32 else x.scale.clone()


def weight_scales(weight: LinearWeight, rows_per_block: int) -> torch.Tensor:
    """FP32 scales ``[G, R/block, K/block]`` of a weight in either layout."""
    scale = weight.weight_scale_inv
    if scale is None:
        raise ValueError("weight has no scales; a BF16 weight cannot have a fault of its scales")
    if scale.dtype == torch.int32:
        return ue8m0_to_float(unpack_ue8m0(scale))[..., ::rows_per_block, :]
    return scale.clone()


def with_wo_a_scales(weights: Weights, scale: torch.Tensor, implementation: Faulty, config: CaseConfig) -> Weights:
    """``weights`` with other scales of wo_a, FP32 ``[G, R/block, K/block]``, in the architecture's layout."""
    block = (config.weight_block[0], config.quant_group_size(implementation.arch))
    laid_out = layout_weight_scales(scale.contiguous(), arch=implementation.arch, rows=config.o_lora_rank, block=block)
    old = weights.wo_a
    return Weights(LinearWeight(old.weight, laid_out, old.block), weights.wo_b)
