"""The kill matrix of the fault zoo as tables: which fault was caught, and which right variant was not let pass."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from .columns import RowsError

KILL_VERSION = 1


def read_faults(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of `oproj faults`, from its file or as a dict, checked.

    It has version 1, `faults` (each with fault, arch, killed, checks, and maybe stage, source, case, case_number,
    seconds) and `variants` (each with variant, arch, alarms).

    Raises: RowsError that names the file and what is wrong with it.
    """
    name = "faults" if isinstance(source, Mapping) else str(source)
    try:
        found = dict(source) if isinstance(source, Mapping) else json.loads(Path(source).read_text(encoding="utf-8"))
        if found["version"] != KILL_VERSION:
            raise RowsError(f"{name}: version must be {KILL_VERSION}, it is {found['version']!r}")
        for kind, needed in (
            ("faults", ("fault", "arch", "killed", "checks")),
            ("variants", ("variant", "arch", "alarms")),
        ):
            for entry in found.get(kind, []):
                missing = [key for key in needed if key not in entry]
                if missing:
                    raise RowsError(f"{name}: an entry of {kind} lacks {', '.join(missing)}")
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise RowsError(f"{name}: not a file of `oproj faults --json`: {error!r}") from error
    return {"faults": list(found.get("faults", [])), "variants": list(found.get("variants", []))}


def kill_table(faults: Mapping[str, Any]) -> pd.DataFrame:
    """One row per fault, survivors first: verdict ('pass' where it was caught on every arch), fault, stage, caught on,
    missed on, first check, source."""
    rows: dict[str, dict[str, Any]] = {}
    for entry in faults["faults"]:
        row = rows.setdefault(
            str(entry["fault"]),
            {"stage": str(entry.get("stage", "")), "on": [], "missed": [], "checks": [], "source": ""},
        )
        row["on" if entry["killed"] else "missed"].append(str(entry["arch"]))
        row["checks"] += [str(check) for check in entry["checks"][:1]]
        row["source"] = str(entry.get("source", ""))
    table = pd.DataFrame(
        [
            {
                "fault": name,
                "verdict": "fail" if row["missed"] else "pass",
                "stage": row["stage"],
                "caught on": ", ".join(row["on"]),
                "missed on": ", ".join(row["missed"]),
                "first check": ", ".join(dict.fromkeys(row["checks"])),
                "source": row["source"],
            }
            for name, row in rows.items()
        ],
        columns=["fault", "verdict", "stage", "caught on", "missed on", "first check", "source"],
    )
    return table.sort_values("verdict", kind="stable").reset_index(drop=True)


def variant_table(faults: Mapping[str, Any]) -> pd.DataFrame:
    """One row per right variant and arch that was failed by a check: variant, arch, alarms."""
    rows = [
        {"variant": str(one["variant"]), "arch": str(one["arch"]), "alarm": str(alarm)}
        for one in faults["variants"]
        for alarm in one["alarms"]
    ]
    return pd.DataFrame(rows, columns=["variant", "arch", "alarm"])
