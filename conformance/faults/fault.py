"""What a fault is, and which Cases can show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conformance.case import Case
from oproj.arch import get_arch

ALL = ("sm90", "sm100", "sm120")
PACKED = ("sm100", "sm120")


def always(case: Case) -> bool:
    """A change that any Case with tokens can show."""
    return case.tokens > 0


def fp8(case: Case) -> bool:
    """Codes and scales exist."""
    return always(case) and case.wo_a_dtype == "fp8"


def many_groups(case: Case) -> bool:
    """More than one group on this rank."""
    return fp8(case) and case.config.n_groups > 1


def slots(case: Case) -> bool:
    """Dead slots exist."""
    return fp8(case) and case.padding_slots > 0


def padded(case: Case) -> bool:
    """o is a slice of a wider buffer, with a token behind the first."""
    return case.tokens > 1 and case.padded_heads > case.config.n_heads


def many_ranks(case: Case) -> bool:
    """There is a sum over ranks."""
    return always(case) and case.tp_size > 1


@dataclass(frozen=True)
class Fault:
    """One mutation of a correct implementation.

    stage: the first one whose output differs. source: public reports, 'project#number'. build: of an arch row, a
    fresh implementation. fits: whether a Case can show it at all (elsewhere the change has nothing to change).
    sole: the one check that sees it ('stage/oracle', or 'stage/property'), where it is there to show what that is for.
    """

    name: str
    stage: str
    change: str
    source: str
    build: Callable[[Any], Any]
    archs: tuple[str, ...] = ALL
    fits: Callable[[Case], bool] = always
    sole: str = ""

    def implementation(self, arch: str) -> Any:
        """A fresh implementation with this fault; ``ValueError`` where it is not possible on ``arch``."""
        if arch not in self.archs:
            raise ValueError(f"fault {self.name} is not possible on {arch}; possible: {', '.join(self.archs)}")
        return self.build(get_arch(arch))
