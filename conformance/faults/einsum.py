"""Faults of the grouped product wo_a and of wo_b: which operands meet, and how they are summed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from conformance.case import CaseConfig
from conformance.faults.base import Faulty, activation, block_scales, weight_scales, with_wo_a_scales
from conformance.inputs import LinearWeight, Weights
from oproj.activation import QuantizedActivation
from oproj.arch import WGMMA_E4M3
from oproj.engines.software import gemm
from oproj.weights import layout_weight_scales


class HeadsDealtOut(Faulty):
    """Head h goes to group h mod G instead of h div 8."""

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """Codes and scales with their heads in another order."""
        x = x.sliced(config.n_groups)
        order = torch.arange(config.n_heads).view(config.heads_per_group, config.n_groups).T.flatten()

        def deal(values: torch.Tensor) -> torch.Tensor:
            heads = values.reshape(len(values), config.n_heads, -1)[:, order]
            return heads.reshape(values.shape)

        codes = deal(x.data.view(torch.uint8)).view(torch.float8_e4m3fn)
        dealt = activation(codes, deal(block_scales(x)), packed=self.arch.tma_aligned_scales)
        return super().wo_a(dealt, weights, config=config)


class _ScalesChanged(Faulty):
    """Weight scales that its method `change` made of the right ones."""

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """The same product with other weight scales."""
        scale = self.change(weight_scales(weights.wo_a, config.weight_block[0]))
        return super().wo_a(x, with_wo_a_scales(weights, scale, self, config), config=config)

    def change(self, scale: torch.Tensor) -> torch.Tensor:
        """FP32 ``[G, R/block, K/block]`` as the kernel reads it."""
        raise NotImplementedError


class WeightScalesTransposed(_ScalesChanged):
    """The memory of [R/128, K/128] read as [K/128, R/128]."""

    def change(self, scale: torch.Tensor) -> torch.Tensor:
        """Swapped axes."""
        groups, rows, blocks = scale.shape
        return scale.reshape(groups, blocks, rows).transpose(1, 2)


class NextGroupsScales(_ScalesChanged):
    """The scales of group g + 1."""

    def change(self, scale: torch.Tensor) -> torch.Tensor:
        """One group on."""
        return scale.roll(-1, 0)


class WeightScalesRoundedUp(_ScalesChanged):
    """Weight scales become powers of two, and codes are kept."""

    def change(self, scale: torch.Tensor) -> torch.Tensor:
        """ceil2."""
        mantissa, exponent = torch.frexp(scale)
        return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


class TailDropped(Faulty):
    """The end of K is skipped."""

    lanes, tokens = 128, slice(None)

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """Zeros for the last lanes of K."""
        data = x.data.clone(memory_format=torch.preserve_format)
        data.view(torch.uint8)[self.tokens, :, -self.lanes :] = 0
        return super().wo_a(QuantizedActivation(data, x.scale), weights, config=config)


class TailOf32Dropped(TailDropped):
    """The last instruction's 32 of K are skipped."""

    lanes = 32


class TailOfOneRowDropped(TailDropped):
    """The last 32 of K are skipped in one token's row."""

    lanes, tokens = 32, slice(-1, None)


class NeverPromoted(Faulty):
    """One accumulator of 13 fraction bits for all of K."""

    step = 0  # K elements of one accumulator; 0: all

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """The short accumulator's sums, added in FP32 where there are several."""
        x = x.sliced(config.n_groups)
        block = config.quant_group_size(self.arch)
        instruction = dataclasses.replace(WGMMA_E4M3, scales_inside=True)
        row = dataclasses.replace(self.arch, mma=instruction, promotion_k=None)
        sides = (x.data.transpose(0, 1), _bytes(block_scales(x)).transpose(0, 1))
        rows = weight_scales(weights.wo_a, config.weight_block[0]).repeat_interleave(config.weight_block[0], 1)
        other = (weights.wo_a.weight, _bytes(rows[:, : config.o_lora_rank]))
        z = torch.empty((len(x.data), config.n_groups, config.o_lora_rank), dtype=torch.bfloat16)
        for group in range(config.n_groups):
            operands = [tensor[group].contiguous().view(torch.uint8).numpy() for tensor in (*sides, *other)]
            z[:, group] = self._sum(row, operands, block, config.group_k)
        return z

    def _sum(self, row: Any, operands: list[np.ndarray], block: int, depth: int) -> torch.Tensor:
        a, a_scales, b, b_scales = operands
        step = self.step or depth
        total = np.zeros((len(a), len(b)), np.float32)
        for k in range(0, depth, step):
            codes = slice(k, k + step)
            part = np.zeros_like(total)
            columns = slice(k // block, (k + step) // block)
            x, x_scales = (np.ascontiguousarray(t) for t in (a[:, codes], a_scales[:, columns]))
            w, w_scales = (np.ascontiguousarray(t) for t in (b[:, codes], b_scales[:, columns]))
            gemm.matmul(row, x, x_scales, w, w_scales, block, part)
            total += part
        return torch.from_numpy(total).bfloat16()


class PromotedTooLate(NeverPromoted):
    """Promotion every 512 of K instead of 128."""

    step = 512


def _bytes(scale: torch.Tensor) -> torch.Tensor:
    return (scale.contiguous().view(torch.int32) >> 23 & 0xFF).to(torch.uint8)


class OneGroupTooMany(Faulty):
    """z has a group more than the operands, and nothing checks it."""

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """A last group that nobody wrote."""
        z = super().wo_a(x, weights, config=config)
        return torch.cat([z, torch.zeros_like(z[:, :1])], 1)


class OneGroupTooFew(Faulty):
    """z has a group less than the operands, and nothing checks it."""

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """The last group is missing."""
        return super().wo_a(x, weights, config=config)[:, :-1].contiguous()


def reversed_wo_a(implementation: Faulty, x: QuantizedActivation, weights: Weights, config: CaseConfig) -> torch.Tensor:
    """z BF16 ``[T, G, R]`` with K summed from its end."""
    x = x.sliced(config.n_groups)
    codes = x.data.view(torch.uint8).flip(-1).view(torch.float8_e4m3fn)
    flipped = activation(codes, block_scales(x).flip(-1), packed=implementation.arch.tma_aligned_scales)
    scale = weight_scales(weights.wo_a, config.weight_block[0]).flip(-1)
    block = (config.weight_block[0], config.quant_group_size(implementation.arch))
    laid_out = layout_weight_scales(scale.contiguous(), arch=implementation.arch, rows=config.o_lora_rank, block=block)
    old = weights.wo_a
    weight = old.weight.view(torch.uint8).flip(-1).view(torch.float8_e4m3fn)
    other = Weights(LinearWeight(weight, laid_out, old.block), weights.wo_b)
    return Faulty.wo_a(implementation, flipped, other, config=config)


class OtherOrderForFewTokens(Faulty):
    """Another order of K below a threshold of tokens."""

    threshold = 32

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """Summed from the end for few tokens."""
        if config.fp8_wo_a(self.arch) and len(x.data) < self.threshold:
            return reversed_wo_a(self, x, weights, config)
        return super().wo_a(x, weights, config=config)


class OtherOrderForOneToken(OtherOrderForFewTokens):
    """As above for a single token, in a kernel that promises no bits: only a token alone against its batch shows it."""

    threshold = 2
    bitwise = ("quantize",)


class LastBitOfY(Faulty):
    """One y is one BF16 step off."""

    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """The last token's last column."""
        y = super().wo_b(z, weights, config=config)
        if y.numel():
            y.view(torch.int16)[-1, -1] += 1
        return y


class ColumnDropped(Faulty):
    """One column of y is zero."""

    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """Never written."""
        y = super().wo_b(z, weights, config=config)
        y[:, -1] = 0
        return y


class ColumnDroppedWithoutPromise(ColumnDropped):
    """One column of y is zero, in a kernel that promises no bits."""

    bitwise = ("quantize",)


class WholeChainOnly(Faulty):
    """Right stages, and a chain that forgets the rotation."""

    def o_proj(
        self, o: Any, positions: Any, cos_sin_cache: Any, weights: Weights, *, config: CaseConfig
    ) -> torch.Tensor:
        """With cosines 1 and sines 0."""
        half = config.rope_dim // 2
        still = torch.cat([torch.ones(1, half), torch.zeros(1, half)], 1)
        return super().o_proj(o, torch.zeros_like(positions), still, weights, config=config)
