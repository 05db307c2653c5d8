"""The zoo as a page: `python -m conformance.faults.page docs/faults.md` writes it from the registry."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from conformance.faults.fault import ALL
from conformance.faults.registry import FAULTS
from conformance.faults.reports import SUITE_FAULTS
from conformance.faults.variants import VARIANTS
from reports.files import write_text

_HEAD = """# Faults that the suite must see, and right answers that it must not flag

Written from `conformance/faults/registry.py`; `python -m conformance faults` runs it and prints which check sees
which fault, in which Case, at what cost. Every fault is one small change of a correct implementation, or of the suite
itself, after a public report. A fault counts as killed when some check fails within the first 60 Cases of the `ci`
profile, on every architecture where it is possible.
"""


_SOLE = """## No check is idle

For each check a fault that it alone sees: without the check the fault lives. They are right in the call that is
compared with the truth, or right by all oracles but one (`conformance/faults/behaviour.py`). The rows `wo_a/format` and
`wo_b/format` are no checks: what their bound admits they admit too. They are there for their figures.
"""


def _table(columns: str, rows: Iterable[tuple[str, ...]]) -> str:
    names = columns.split(", ")
    lines = [names, ["---"] * len(names), *[[cell.replace("|", "\\|") for cell in row] for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _archs(archs: tuple[str, ...]) -> str:
    return "all" if archs == ALL else ", ".join(archs)


def to_markdown() -> str:
    """The whole page."""
    faults = _table(
        "name, stage, change, public report, possible on",
        ((f"`{f.name}`", f.stage, f.change, f.source, _archs(f.archs)) for f in FAULTS if not f.sole),
    )
    sole = _table("check, fault, akin to", ((f"`{f.sole}`", f.change, f.source) for f in FAULTS if f.sole))
    suite = _table(
        "name, change, public report, seen by",
        ((f"`{f.name}`", f.change, f.source, f.check) for f in SUITE_FAULTS),
    )
    right = _table("name, what differs, exists on", ((f"`{v.name}`", v.about, _archs(v.archs)) for v in VARIANTS))
    parts = [_HEAD, "## Faults of an implementation\n", faults, "## Faults of the suite\n", suite]
    parts += [_SOLE, sole, "## Right answers that differ\n", right]
    return "\n".join(parts)


if __name__ == "__main__":
    write_text(sys.argv[1], to_markdown())
