"""Outputs without any work in them: each must fail every check of its stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from conformance.case import Case, CaseConfig
from conformance.faults.base import Faulty
from conformance.inputs import Weights, build
from conformance.truth import Truth
from oproj.activation import QuantizedActivation


class Vacuous(Faulty):
    """Right shapes, dtypes and strides; contents from the class alone."""

    code, scale, word, value = 0, 0.0, 0, 0.0

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Filled."""
        x = super().quantize(o, positions, cos_sin_cache, config=config)
        if x.data.dtype == torch.bfloat16:
            x.data.fill_(self.value)
            return x
        x.data.view(torch.uint8).fill_(self.code)
        x.scale.fill_(self.word if x.scale.dtype == torch.int32 else self.scale)
        return x

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """Filled."""
        return torch.full((len(x.data), config.n_groups, config.o_lora_rank), self.value, dtype=torch.bfloat16)

    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """Filled."""
        return torch.full((len(z), config.hidden_size), self.value, dtype=torch.bfloat16)

    def reduce(self, partials: Sequence[torch.Tensor], *, config: CaseConfig) -> torch.Tensor:
        """Filled."""
        return torch.full_like(partials[0], self.value)


class AllZero(Vacuous):
    """Zeros, under scales of one."""

    scale, word = 1.0, 0x7F7F7F7F


class Constant(Vacuous):
    """One value everywhere, loud enough to be no result."""

    code, scale, word, value = 0x7E, 2.0**20, 0x73737373, 2.0**100


class NanFilled(Vacuous):
    """NaN everywhere."""

    code, scale, word, value = 0x7F, float("nan"), -1, float("nan")


class _Held(Faulty):
    """Outputs that were there before the call."""

    def __init__(self, arch: Any, case: Case) -> None:
        super().__init__(arch)
        self.truth = Truth(build(case))


class CopiedReference(_Held):
    """The float64 reference handed back as it is."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Float64 values."""
        return QuantizedActivation(self.truth.x, torch.ones(1))

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """Float64 z."""
        return self.truth.z

    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """Float64 y."""
        return self.truth.y_of(self.truth.z)

    def reduce(self, partials: Sequence[torch.Tensor], *, config: CaseConfig) -> torch.Tensor:
        """A float64 sum."""
        return torch.stack(list(partials)).double().sum(0)


class Stale(_Held):
    """The right outputs of another Case of the same shape."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Another o."""
        return self.truth.model_x

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """Another x."""
        return self.truth.model_z(self.truth.model_x)

    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """Another z."""
        return self.truth.model_y(self.truth.model_z(self.truth.model_x))

    def reduce(self, partials: Sequence[torch.Tensor], *, config: CaseConfig) -> torch.Tensor:
        """Other partials."""
        return self.truth.model_y(self.truth.model_z(self.truth.model_x))


def other(case: Case) -> Case:
    """A Case of the same shape with other data."""
    return dataclasses.replace(case, seed=case.seed + 1)


VACUOUS: dict[str, Callable[[Any, Case], Any]] = {
    "all-zero": lambda arch, case: AllZero(arch),
    "constant": lambda arch, case: Constant(arch),
    "nan": lambda arch, case: NanFilled(arch),
    "copied-reference": CopiedReference,
    "stale": lambda arch, case: Stale(arch, other(case)),
}


def vacuous(name: str, stage: str, case: Case) -> Faulty:
    """A right implementation but for ``stage``, which gives the named output without work.

    One stage at a time: zeros are the right answer of a stage that is handed zeros.
    """
    implementation = Faulty(case.arch)
    empty = VACUOUS[name](case.arch, case)
    setattr(implementation, stage, getattr(empty, stage))
    return implementation
