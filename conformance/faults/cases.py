"""The Cases that the zoo runs in: the first ones of the `ci` profile."""

from __future__ import annotations

from functools import cache

from conformance.case import Case
from conformance.strategies import profile_cases

EXAMPLES = 60


@cache
def ci_cases(arch: str, examples: int = EXAMPLES) -> tuple[Case, ...]:
    """The first ``examples`` Cases of the profile on ``arch``."""
    return tuple(profile_cases("ci", arch, examples))
