"""Bit-exact model of the tensor cores and of the quantisers, on the CPU."""

from oproj.engines.software.engine import SoftwareEngine

__all__ = ["SoftwareEngine"]
