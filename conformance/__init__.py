"""Conformance suite of the FP8 attention output projection: Cases, comparisons, verdicts, the command line."""

from __future__ import annotations

from conformance.case import Case, CaseConfig
from conformance.compare import Comparison, compare_bits, compare_values
from conformance.implementation import (
    EngineImplementation,
    Implementation,
    SoftwareImplementation,
    load_implementation,
)
from conformance.inputs import Inputs, LinearWeight, Weights, build
from conformance.judge import Verdict, judge

__all__ = [
    "Case", "CaseConfig", "Comparison", "EngineImplementation", "Implementation", "Inputs", "LinearWeight",
    "SoftwareImplementation", "Verdict", "Weights", "build", "compare_bits", "compare_values", "judge",
    "load_implementation",
]  # fmt: skip
