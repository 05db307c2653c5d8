"""Implementations with one planted fault each, and the Case that shows them. Most are the zoo's own."""

from __future__ import annotations

from typing import Any

import torch

from conformance.case import Case, CaseConfig
from conformance.faults.base import Faulty
from conformance.faults.einsum import TailDropped as LastBlockDropped
from conformance.faults.einsum import WholeChainOnly
from conformance.faults.layout import LastSlots, ScalesOfOtherSlots
from conformance.faults.layout import ScalesRepacked as Contiguous
from conformance.faults.layout import StridesIgnored as PaddingRead
from conformance.faults.quantize import OneBlockAnOctaveHigh as ScaleOneOctaveHigh
from conformance.faults.ranks import RankMissing as NotReduced
from conformance.faults.ranks import ReplicatedSummed as OnePartialTwice
from conformance.faults.rope import NextPosition
from conformance.inputs import Weights
from oproj.activation import QuantizedActivation

__all__ = [
    "Contiguous", "Faulty", "LastBlockDropped", "LastSlots", "NextPosition", "NotReduced", "NothingBack",
    "OnePartialTwice", "OneUlp", "PaddingRead", "Raises", "ScaleOneOctaveHigh", "ScalesOfOtherSlots",
    "WholeChainOnly", "case",
]  # fmt: skip


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


class OneUlp(Faulty):
    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        y = super().wo_b(z, weights, config=config)
        y.view(torch.int16)[2, 77] += 1
        return y


class Raises(Faulty):
    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        raise RuntimeError("device-side assert")


class NothingBack(Faulty):
    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> Any:
        return None
