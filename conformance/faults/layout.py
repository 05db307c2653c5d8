"""Faults of layout: right numbers at other addresses."""

from __future__ import annotations

from typing import Any

import torch

from conformance.case import CaseConfig
from conformance.faults.base import Faulty, Quantizing, activation
from conformance.faults.quantize import raw_scale
from conformance.inputs import Weights
from oproj.activation import QuantizedActivation, tma_aligned_size

WRAP = 1 << 13  # stands for 2**32, scaled to tensors of a few tokens


class ScalesFlattened(Quantizing):
    """Scale rows written at t*G + g and read as [G][T]."""

    def lay_out(self, codes: torch.Tensor, scale: torch.Tensor, config: CaseConfig) -> QuantizedActivation:
        """Rows taken for another shape."""
        tokens, groups, blocks = scale.shape
        read = scale.reshape(groups, tokens, blocks).transpose(0, 1)
        return super().lay_out(codes, read, config)


class PaddingMismatch(Faulty):
    """The producer's K stride is align(T, 8), the consumer's align(T, 4)."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Written with the one stride, read with the other."""
        x = super().quantize(o, positions, cos_sin_cache, config=config)
        if not config.fp8_wo_a(self.arch):
            return x
        tokens, groups, columns = x.scale.shape
        written = torch.zeros((groups, columns, -(-tokens // 8) * 8), dtype=x.scale.dtype)
        written[:, :, :tokens] = x.scale.permute(1, 2, 0)
        aligned = tma_aligned_size(tokens, 4)
        return QuantizedActivation(x.data, written.as_strided(x.scale.shape, (1, columns * aligned, aligned)))


class PaddingUnwritten(Faulty):
    """Scale rows T..align4(T) keep what the allocator had there, and a consumer loads whole rows of four."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Padding rows full of 0xFF: NaN as a scale."""
        x = super().quantize(o, positions, cos_sin_cache, config=config)
        padding_rows(x.scale).view(torch.int32).fill_(-1)
        return x

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """A NaN that was loaded spreads over the tile."""
        z = super().wo_a(x, weights, config=config)
        if (padding_rows(x.scale).view(torch.int32) == -1).any():
            z[-1] = torch.nan
        return z


def padding_rows(scale: torch.Tensor) -> torch.Tensor:
    """The rows behind the last token of MN-major scales ``[T, G, columns]``, a view ``[Ta - T, G, columns]``."""
    if scale.dim() != 3 or not scale.numel():
        return scale.new_empty(0)
    tokens, aligned = len(scale), scale.stride(2)
    held = scale.untyped_storage().nbytes() // scale.element_size()
    if aligned <= tokens or held < scale.storage_offset() + scale.shape[1] * scale.shape[2] * aligned:
        return scale.new_empty(0)
    shape = (aligned - tokens, *scale.shape[1:])
    return scale.as_strided(shape, scale.stride(), scale.storage_offset() + tokens)


class WordsOred(Quantizing):
    """Four FP32 scales shifted into a word and ORed without masking their mantissas."""

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """With a mantissa."""
        return raw_scale(amax)

    def lay_out(self, codes: torch.Tensor, scale: torch.Tensor, config: CaseConfig) -> QuantizedActivation:
        """Bits of one scale in its neighbour's byte."""
        bits = (scale.contiguous().view(torch.int32).long() & 0xFFFFFFFF).unflatten(-1, (-1, 4))
        word = bits[..., 0] >> 23 | bits[..., 1] >> 15 | bits[..., 2] >> 7 | bits[..., 3] << 1
        word = word & 0xFFFFFFFF
        x = activation(codes, scale, packed=True)
        x.scale.copy_(torch.where(word >= 1 << 31, word - (1 << 32), word))
        return x


class StaleScales(Faulty):
    """The last token sees the scales of the previous call of the same shape, as a consumer that did not wait."""

    def __init__(self, arch: Any) -> None:
        super().__init__(arch)
        self._before: torch.Tensor | None = None

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """A first call is right."""
        before, self._before = self._before, x.scale.clone(memory_format=torch.preserve_format)
        if before is None or before.shape != x.scale.shape or not x.scale.numel():
            return super().wo_a(x, weights, config=config)
        scale = x.scale.clone(memory_format=torch.preserve_format)
        scale[-1] = before[-1]
        return super().wo_a(QuantizedActivation(x.data, scale), weights, config=config)


class AddressWraps(Faulty):
    """The address of an element of o is taken modulo a word that is too short."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Tokens behind the wrap are read from the front of the buffer."""
        offsets = torch.zeros(o.shape, dtype=torch.int64)
        for dim, (size, stride) in enumerate(zip(o.shape, o.stride(), strict=True)):
            index = torch.arange(size) * stride
            offsets += index.view([-1 if d == dim else 1 for d in range(o.dim())])
        flat = o.as_strided((int(offsets.max()) + 1,), (1,)) if o.numel() else o.flatten()
        return super().quantize(flat[offsets % WRAP], positions, cos_sin_cache, config=config)


class StridesIgnored(Faulty):
    """Takes o, a slice of padded heads, for contiguous."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Heads of the padding are read as heads of the next token."""
        flat = o.as_strided(o.shape, (o.shape[1] * o.shape[2], o.shape[2], 1))
        return super().quantize(flat, positions, cos_sin_cache, config=config)


class ScalesRepacked(Faulty):
    """Right numbers in another layout than the consumer's kernel addresses."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Contiguous scales."""
        x = super().quantize(o, positions, cos_sin_cache, config=config)
        return QuantizedActivation(x.data, x.scale.contiguous())


class LastSlots(Faulty):
    """Groups are taken from the wrong end of the slots."""

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """The last slots, dead ones among them."""
        live = QuantizedActivation(x.data[:, -config.n_groups :], x.scale[:, -config.n_groups :])
        return super().wo_a(live, weights, config=config)


class ScalesOfOtherSlots(Faulty):
    """Values are sliced and scales are not."""

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """Right values with the scales of the last slots."""
        live = QuantizedActivation(x.data[:, : config.n_groups], x.scale[:, -config.n_groups :])
        return super().wo_a(live, weights, config=config)
