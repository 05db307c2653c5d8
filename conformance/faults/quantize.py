"""Faults of the quantiser, each a change of one step of `Quantizing`."""

from __future__ import annotations

from typing import Any

import torch

from conformance.case import CaseConfig
from conformance.faults.base import E4M3_MAX, Faulty, Quantizing, power_of_two_scale
from oproj.activation import QuantizedActivation

_MANTISSA = 0x007FFFFF


def raw_scale(amax: torch.Tensor) -> torch.Tensor:
    """amax / 448 with its mantissa."""
    return amax / E4M3_MAX


def exponent_only(scale: torch.Tensor) -> torch.Tensor:
    """The power of two below an FP32 scale."""
    return (scale.contiguous().view(torch.int32) & ~_MANTISSA).view(torch.float32)


class ScaleRoundedLate(Quantizing):
    """Codes are made with the raw scale, then the stored one is rounded up."""

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """With a mantissa."""
        return raw_scale(amax)

    def stored(self, scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        """Rounded up."""
        return power_of_two_scale(amax, log2_rule=True)


class ScaleRoundedDown(Quantizing):
    """The exponent of the raw scale without the +1 for a mantissa; the cast saturates."""

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """Rounded down."""
        return exponent_only(raw_scale(amax))


class ScaleTruncated(Quantizing):
    """Codes are made with the raw scale, and its consumer keeps the exponent alone."""

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """With a mantissa."""
        return raw_scale(amax)

    def stored(self, scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        """Its exponent."""
        return exponent_only(scale)


class OneBlockAnOctaveHigh(Faulty):
    """One stored exponent too high by one; codes unchanged."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """In block 9 of the last group, of a token in the middle."""
        x = super().quantize(o, positions, cos_sin_cache, config=config)
        token = 2 * len(x.scale) // 3
        if x.scale.dtype == torch.int32:
            x.scale[token, -1, 2] += 1 << 8  # byte 1 of word 2: block 9
        else:
            x.scale[token, -1, 9] *= 2
        return x


class EveryScaleAnOctaveHigh(Quantizing):
    """Twice the scale, and codes that agree with it."""

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """An octave high."""
        return 2 * super().scale(amax)


class ExactCeiling(Quantizing):
    """The exact ceiling where the bits promised are those of a rounded logarithm."""

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """By exponent bits."""
        return power_of_two_scale(amax, log2_rule=False)


class LargeFloor(Quantizing):
    """Floor of the block maximum 1e-4."""

    floor = 1e-4


class NoFloor(Quantizing):
    """No floor: an all-zero block has scale 0 and codes 0/0."""

    floor = 0.0


class CastOverflows(ScaleRoundedDown):
    """No clamp before the cast: NaN from 464 on, which a scale that is too small reaches."""

    def cast(self, ratio: torch.Tensor) -> torch.Tensor:
        """NaN above the largest code's rounding range."""
        codes = super().cast(ratio)
        codes.view(torch.uint8)[~(ratio.abs() <= 464)] = 0x7F
        return codes


class CastTruncates(Quantizing):
    """Rounds toward zero."""

    def cast(self, ratio: torch.Tensor) -> torch.Tensor:
        """The code below: one step back where nearest even went outward."""
        codes = super().cast(ratio)
        codes.view(torch.uint8).sub_((codes.float().abs() > ratio.abs()).to(torch.uint8))
        return codes


class CastTiesAway(Quantizing):
    """Half-way values go away from zero."""

    def cast(self, ratio: torch.Tensor) -> torch.Tensor:
        """The next code where it is as near as nearest even's."""
        codes = super().cast(ratio)
        following = (codes.view(torch.uint8) + 1).view(torch.float8_e4m3fn)
        size, low, high = ratio.abs().double(), codes.double().abs(), following.double().abs()
        tie = (low < size) & (size - low == high - size)
        codes.view(torch.uint8).add_(tie.to(torch.uint8))
        return codes


class RoundedToBf16(Quantizing):
    """A rounding to BF16 between rotation and quantisation, undeclared."""

    def between(self, y: torch.Tensor) -> torch.Tensor:
        """Through BF16."""
        return y.bfloat16().float()


class OneCodeStep(Faulty):
    """One code is the neighbour of the right one: within every bound, and other bits."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """The last group's smallest live code of the last token, one step down."""
        x = super().quantize(o, positions, cos_sin_cache, config=config)
        if len(x.data) and x.data.dtype == torch.float8_e4m3fn:
            codes = x.data.view(torch.uint8)[-1, -1]
            live = ((codes & 0x7F) > 0x08).nonzero()
            if len(live):
                codes[live[0, 0]] -= 1
        return x
