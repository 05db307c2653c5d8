"""Record golden vectors on a GPU and, on request, prove the software engine there in bulk.

    python -m conformance.record --out DIR [--prove]

DIR gets four ``golden_<arch>_*.npz`` files, ``evidence.json`` (records in the form of ``oproj/data/evidence.json``)
and, with ``--prove``, ``proof.json`` with every cell. A part that fails is reported and the rest goes on.
Exit codes: 0 all recorded and no bit differs; 1 something failed or differs; 3 no GPU or no working DeepGEMM;
4 nothing was compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from conformance import golden, golden_inputs, golden_special, proof
from conformance.golden import EINSUM, GEMM, GoldenSet
from conformance.warm_up import Call, calls_of, warm_up
from oproj.config import get_preset
from oproj.engines import Engine, EngineUnavailable

BUDGET = 200.0  # seconds that the bulk proof may take
FACTS = ("device", "driver", "cuda", "torch", "package", "version")
PARTS: dict[str, Callable[[], Iterator[GoldenSet]]] = {
    "blocks": golden_inputs.single_blocks,
    "full": golden_inputs.full_k,
    "shapes": golden_inputs.shapes,
    "special": golden_special.special,
}


@dataclass
class Part:
    """One golden file: what was recorded and how it compares with the software engine."""

    name: str
    sets: int = 0
    compared: int = 0
    mismatched: int = 0
    by_stage: dict[str, list[int]] = field(default_factory=dict)  # stage -> [compared, mismatched]
    problems: tuple[str, ...] = ()


def main(out: str | Path, prove: bool = False, *, arch: str | None = None, budget: float = BUDGET) -> int:
    """Record into directory ``out`` with the current GPU's DeepGEMM; returns the exit code."""
    from oproj.engines.deep_gemm import DeepGemmEngine
    from oproj.engines.discovery import current_gpu
    from oproj.engines.software import SoftwareEngine

    started = time.monotonic()
    row = current_gpu()[1]
    name = arch or (row.name if row else "sm90")
    try:
        hardware = DeepGemmEngine(name)
    except EngineUnavailable as error:
        print(f"nothing recorded: {error}", file=sys.stderr)
        return 3
    parts = list(_sets(name))
    calls = calls_of(item for _, sets in parts for item in sets)
    if prove:
        calls |= proof_calls()
    for line in warm_up(name, calls):
        print(f"warm-up: {line}", flush=True)
    print(f"{len(calls)} call shapes compiled after {time.monotonic() - started:.0f} s", flush=True)
    command = f"oproj record --out DIR{' --prove' if prove else ''}"
    return record(Path(out), hardware, SoftwareEngine(name), parts, prove=prove, budget=budget, command=command)


def record(
    out: Path,
    hardware: Engine,
    software: Engine,
    parts: Iterable[tuple[str, list[GoldenSet]]],
    *,
    prove: bool,
    budget: float = BUDGET,
    command: str = "",
    say: proof.Say = print,
) -> int:
    """Run the sets on ``hardware``, compare with ``software``, write the files, print the table; exit code."""
    out.mkdir(parents=True, exist_ok=True)
    described = hardware.describe()
    facts = {
        "arch": hardware.arch.name,
        **{key: described.get(key) for key in FACTS},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
    }
    done = [_record_part(out, name, sets, hardware, software, facts, say) for name, sets in parts]
    cells = proof.prove(hardware, software, budget=budget, say=say) if prove else []
    write_json(out / "evidence.json", {"schema": 1, "records": evidence(facts, done, cells)})
    if prove:
        write_json(out / "proof.json", {"schema": 1, **facts, "cells": [asdict(cell) for cell in cells]})
    for line in table(facts, done, cells):
        say(line)
    if sum(part.compared for part in done) + sum(cell.compared for cell in cells) == 0:
        return 4
    good = all(part.compared and not part.mismatched and not part.problems for part in done)
    return 0 if good and all(cell.passed for cell in cells) else 1


def _sets(arch: str) -> Iterator[tuple[str, list[GoldenSet]]]:
    for name, make in PARTS.items():
        yield name, [item for item in make() if golden.fits(arch, item)]


def proof_calls() -> set[Call]:
    """Shapes that the bulk proof will call."""
    calls: set[Call] = set()
    for model in proof.MODELS:
        whole = get_preset(model)
        for tp in proof.TP_SIZES:
            local = whole.shard(tp)
            calls |= {(EINSUM, t, local.n_groups, local.o_lora_rank, local.group_k) for t in proof.WO_A_TOKENS}
            calls |= {(GEMM, m, 1, local.hidden_size, local.wo_b_k) for m in proof.WO_B_TOKENS}
    return calls


def _record_part(
    out: Path,
    name: str,
    sets: list[GoldenSet],
    hardware: Engine,
    software: Engine,
    facts: dict[str, Any],
    say: proof.Say,
) -> Part:
    part = Part(name)
    problems, recorded = [], []
    for item in sets:
        try:
            result = golden.run(hardware, item)
            recorded.append(item.with_result(result))
            expected = golden.run(software, item)
        except Exception as error:  # one set's failure; it is printed and makes the exit code non-zero
            problems.append(f"{item.name}: {type(error).__name__}: {error}")
            continue
        wrong = golden.differing(result, expected)
        count = part.by_stage.setdefault("wo_a" if item.op == EINSUM else "wo_b", [0, 0])
        count[0] += wrong.size
        count[1] += int(wrong.sum())
        if wrong.any():
            first = proof.describe_first(item.name, wrong, result, expected)
            problems.append(f"{int(wrong.sum())} of {wrong.size} differ, {first}")
    part.sets = len(recorded)
    part.compared = sum(count[0] for count in part.by_stage.values())
    part.mismatched = sum(count[1] for count in part.by_stage.values())
    part.problems = tuple(problems)
    for line in problems:
        say(f"golden {name}: {line}")
    if recorded:
        golden.save(out / f"golden_{hardware.arch.name}_{name}.npz", recorded, facts)
    return part


def evidence(facts: dict[str, Any], parts: list[Part], cells: list[proof.Cell]) -> list[dict[str, Any]]:
    """Records for ``oproj/data/evidence.json``: one per stage from the golden vectors, one from the bulk proof."""
    records = []
    for stage in ("wo_a", "wo_b"):
        counts = np.array([part.by_stage[stage] for part in parts if stage in part.by_stage])
        if counts.size:
            detail = "golden vectors: " + ", ".join(part.name for part in parts if stage in part.by_stage)
            records.append(_evidence(facts, stage, int(counts[:, 0].sum()), int(counts[:, 1].sum()), detail))
        mine = [cell for cell in cells if cell.stage == stage and cell.compared]
        if mine:
            families = ", ".join(dict.fromkeys(cell.family for cell in mine))
            sizes = ", ".join(map(str, sorted({cell.tp for cell in mine})))
            tokens = ", ".join(map(str, mine[0].tokens))
            models = ", ".join(dict.fromkeys(cell.model for cell in mine))
            detail = f"bulk: {models}; tp {sizes}; tokens {tokens}; codes/scales {families}; every rank's outputs"
            compared, mismatched = sum(c.compared for c in mine), sum(c.mismatched for c in mine)
            records.append(_evidence(facts, stage, compared, mismatched, detail))
    return records


def _evidence(facts: dict[str, Any], stage: str, compared: int, mismatched: int, detail: str) -> dict[str, Any]:
    return {"stage": stage, "compared": compared, "mismatched": mismatched, "detail": detail, **facts}


def table(facts: dict[str, Any], parts: list[Part], cells: list[proof.Cell]) -> Iterator[str]:
    """The short table that ends a run."""
    yield "on " + ", ".join(f"{key} {facts[key]}" for key in ("arch", *FACTS)) + f", {facts['date']}"
    yield f"{'':<34}{'compared':>12}{'mismatched':>12}{'problems':>10}"
    for part in parts:
        label = f"golden {part.name}, {part.sets} sets"
        yield f"{label:<34}{part.compared:>12}{part.mismatched:>12}{len(part.problems):>10}"
    for row in proof.totals(cells):
        label = f"{row['stage']} {row['model']} tp{row['tp']}, {row['families']} families"
        yield f"{label:<34}{row['compared']:>12}{row['mismatched']:>12}{row['failed']:>10}"


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write JSON atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m conformance.record", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="directory for the files")
    parser.add_argument("--prove", action="store_true", help="also run the bulk proof")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for the bulk proof")
    arguments = parser.parse_args()
    sys.exit(main(arguments.out, arguments.prove, budget=arguments.budget))
