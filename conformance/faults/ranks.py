"""Faults of the sum over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from conformance.case import CaseConfig
from conformance.faults.base import Faulty
from oproj.wo_b import reduce_partials


class RankTwice(Faulty):
    """The first partial counts twice, the last one not at all."""

    reduction = "fp32"

    def reduce(self, partials: Sequence[torch.Tensor], *, config: CaseConfig) -> torch.Tensor:
        """As many terms as ranks."""
        return reduce_partials([partials[0], *partials[:-1]], "fp32")


class RankMissing(Faulty):
    """The last partial is skipped."""

    reduction = "fp32"

    def reduce(self, partials: Sequence[torch.Tensor], *, config: CaseConfig) -> torch.Tensor:
        """One term less."""
        return reduce_partials(list(partials[:-1]), "fp32")


class ReplicatedSummed(Faulty):
    """A tensor that every rank holds whole is summed over ranks."""

    reduction = "fp32"

    def reduce(self, partials: Sequence[torch.Tensor], *, config: CaseConfig) -> torch.Tensor:
        """The sum of equal terms."""
        return reduce_partials([partials[0]] * len(partials), "fp32")


class RingInBf16(Faulty):
    """FP32 accumulation is declared, and BF16 words are added one rank after another."""

    reduction = "fp32"

    def reduce(self, partials: Sequence[torch.Tensor], *, config: CaseConfig) -> torch.Tensor:
        """A rounding per rank."""
        return reduce_partials(list(partials), "bf16")
