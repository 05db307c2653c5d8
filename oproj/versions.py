"""Which combinations of packages have run, which fail and how: ``oproj/data/versions.json`` and what it says of here.

A field that is null in a combination does not matter for it. A torch of two numbers means every release of that series.
``source`` is ``measured`` (a run on the GPU named in ``where``) or ``published`` (read in the packages).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

RESULTS = ("works", "fails", "untested")
SOURCES = ("measured", "published")
DEEP_GEMMS = ("sgl-deep-gemm", "tokenspeed-deepgemm", "deep-gemm")  # all install the import name deep_gemm
BESIDE = ("apache-tvm-ffi", "flashinfer-python", "vllm")
PACKAGES = (*DEEP_GEMMS, *BESIDE)


@cache
def combinations() -> tuple[dict[str, Any], ...]:
    """Every recorded combination."""
    text = resources.files("oproj").joinpath("data/versions.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["combinations"])


def tested(torch: str, packages: Mapping[str, str | None]) -> dict[str, Any]:
    """What is recorded of the installed packages: ``{"result", "installed", "known"}``.

    torch: its version; packages: version (or ``None``) of each of ``PACKAGES``. ``result`` is ``works``, ``fails``,
    ``untested`` or ``nothing`` (no DeepGEMM installed). ``known`` are the combinations of exactly what is installed;
    without one, those of the same DeepGEMM in other company.
    """
    own = {name: packages[name] for name in (*DEEP_GEMMS, "vllm") if packages.get(name)}
    installed = {"torch": torch.split("+")[0], **{name: packages[name] for name in PACKAGES if packages.get(name)}}
    if not own:
        return {"result": "nothing", "installed": installed, "known": []}
    same = [row for row in combinations() if own.get(row["deep_gemm"]) == row["deep_gemm_version"]]
    exact = [row for row in same if _fits(row, installed)]
    results = {row["result"] for row in exact}
    # several DeepGEMMs overwrite each other's files, so no record speaks of them together
    several = len([name for name in own if name != "vllm"]) > 1
    result = next((r for r in ("fails", "works") if r in results and not several), "untested")
    return {"result": result, "installed": installed, "known": exact or same}


def _fits(row: Mapping[str, Any], installed: Mapping[str, str | None]) -> bool:
    if row["torch"] is not None and not f"{installed['torch']}.".startswith(f"{row['torch']}."):
        return False
    return all(row[name] is None or row[name] == installed.get(name) for name in BESIDE)


def lines(found: Mapping[str, Any]) -> list[str]:
    """``tested``'s answer as plain lines for people."""
    installed = ", ".join(f"{name} {version}" for name, version in found["installed"].items())
    meaning = {
        "works": "this combination has run",
        "fails": "this combination is known to fail",
        "untested": "nobody has recorded a run of this combination",
        "nothing": "no DeepGEMM is installed; the software engine needs none",
    }
    return [f"{found['result']}: {meaning[found['result']]} ({installed})", *map(_line, found["known"])]


def _line(row: Mapping[str, Any]) -> str:
    parts = [f"torch {row['torch'] or 'any'}", f"{row['deep_gemm']} {row['deep_gemm_version']}"]
    parts += [f"{name} {row[name]}" for name in BESIDE if row[name] and name != row["deep_gemm"]]
    symptom = f"; {row['symptom']}" if row["symptom"] else ""
    return f"  {', '.join(parts)}: {row['result']} ({row['source']}, {row['where']}){symptom}"
