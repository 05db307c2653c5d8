"""What hardware has confirmed: records of comparisons between the software model and a real GPU.

The records live in ``oproj/data/evidence.json``; ``oproj record`` prints a new one after a run on a GPU.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any, Literal

Evidence = Literal["measured", "published", "assumed"]


@cache
def records() -> tuple[dict[str, Any], ...]:
    """All recorded hardware comparisons: arch, stage, compared, mismatched, device, versions, date, command."""
    text = resources.files("oproj").joinpath("data/evidence.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["records"])


@cache
def measured_stages(arch: str) -> frozenset[str]:
    """Stages of ``arch`` whose recorded comparisons hold no differing bit (one bad record withdraws the stage)."""
    mine = [record for record in records() if record["arch"] == arch]
    bad = {record["stage"] for record in mine if record["mismatched"] != 0}
    return frozenset(record["stage"] for record in mine if record["compared"] > 0) - bad
