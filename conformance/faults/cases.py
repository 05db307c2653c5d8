"""The Cases that the zoo runs in: the first ones of the `ci` profile."""

from __future__ import annotations

from conformance.case import Case
from conformance.grid import Grid

EXAMPLES = 60
_PRESETS = ("v4-flash", "v4.1-flash", "v4-flash-base", "v4-pro")


def ci_cases(arch: str, examples: int = EXAMPLES) -> list[Case]:
    """The first ``examples`` Cases of the profile on ``arch``."""
    cases = list(Grid(archs=(arch,), presets=_PRESETS, tokens=(5, 3), examples=4).cases())
    order = sorted(range(len(cases)), key=lambda n: (n * 7919) % len(cases))  # presets and sizes in turn
    return [cases[n] for n in order][:examples]
