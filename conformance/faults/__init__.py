"""The fault zoo: known faults as small mutations of correct code, and the right answers that must not be flagged."""

from __future__ import annotations

from conformance.faults.fault import Fault
from conformance.faults.registry import FAULTS, get_faults
from conformance.faults.variants import VARIANTS, Variant

__all__ = ["FAULTS", "VARIANTS", "Fault", "Variant", "get_faults"]
