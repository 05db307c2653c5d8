"""Implementations with one planted fault each, and the Case that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from conformance.case import Case, CaseConfig
from conformance.implementation import SoftwareImplementation
from conformance.inputs import Weights
from oproj.activation import QuantizedActivation


def case(arch: str = "sm90", **fields: Any) -> Case:
    """Two live groups with K = 4096, two ranks, padded heads and one dead slot."""
    sizes = {
        "n_groups": 4,
        "tp_size": 2,
        "tp_rank": 1,
        "o_lora_rank": 256,
        "hidden_size": 128,
        "family": "wide",
        "padded_heads": 20,
        "padding_slots": 1,
        "position_family": "small",
    }
    return Case(arch, "v4-flash", **{"tokens": 5, **sizes, **fields})  # type: ignore[arg-type]


class Faulty(SoftwareImplementation):
    """The quantiser's own copy, so that its bits are judged too, and without a fault of its own."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        return super().quantize(o, positions, cos_sin_cache, config=config)

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        return super().wo_a(x, weights, config=config)

    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        return super().wo_b(z, weights, config=config)


class LastBlockDropped(Faulty):
    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        data = x.data.clone(memory_format=torch.preserve_format)
        data.view(torch.uint8)[..., -128:] = 0
        return super().wo_a(QuantizedActivation(data, x.scale), weights, config=config)


class ScaleOneOctaveHigh(Faulty):
    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        x = super().quantize(o, positions, cos_sin_cache, config=config)
        if x.scale.dtype == torch.int32:
            x.scale[3, 1, 2] += 1 << 8  # byte 1 of word 2: block 9
        else:
            x.scale[3, 1, 9] *= 2
        return x


class NotReduced(Faulty):
    def reduce(self, partials: Sequence[torch.Tensor], *, config: CaseConfig) -> torch.Tensor:
        return partials[0]


class OnePartialTwice(Faulty):
    def reduce(self, partials: Sequence[torch.Tensor], *, config: CaseConfig) -> torch.Tensor:
        return (partials[0].float() + partials[0].float()).bfloat16()


class PaddingRead(Faulty):
    """Takes o for contiguous, as a kernel does that ignores its strides."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        flat = o.as_strided(o.shape, (o.shape[1] * o.shape[2], o.shape[2], 1))
        return super().quantize(flat, positions, cos_sin_cache, config=config)


class LastSlots(Faulty):
    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        live = QuantizedActivation(x.data[:, -config.n_groups :], x.scale[:, -config.n_groups :])
        return super().wo_a(live, weights, config=config)


class ScalesOfOtherSlots(Faulty):
    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        live = QuantizedActivation(x.data[:, : config.n_groups], x.scale[:, -config.n_groups :])
        return super().wo_a(live, weights, config=config)


class NextPosition(Faulty):
    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        return super().quantize(o, (positions + 1) % len(cos_sin_cache), cos_sin_cache, config=config)


class WholeChainOnly(Faulty):
    """Right stages, and a chain that forgets the rotation."""

    def o_proj(
        self, o: Any, positions: Any, cos_sin_cache: Any, weights: Weights, *, config: CaseConfig
    ) -> torch.Tensor:
        return super().o_proj(o, torch.zeros_like(positions), cos_sin_cache[:1] * 0 + 1, weights, config=config)


class OneUlp(Faulty):
    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        y = super().wo_b(z, weights, config=config)
        y.view(torch.int16)[2, 77] += 1
        return y


class Contiguous(Faulty):
    """Right numbers in another layout than the consumer's kernel addresses."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        x = super().quantize(o, positions, cos_sin_cache, config=config)
        return QuantizedActivation(x.data, x.scale.contiguous())


class Raises(Faulty):
    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        raise RuntimeError("device-side assert")


class NothingBack(Faulty):
    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> Any:
        return None
