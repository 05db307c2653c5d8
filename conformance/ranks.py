"""Tensor parallelism with real processes: ``python -m conformance.ranks``, alone or under ``torchrun``.

The block runs in one process per rank, gloo between CPUs or NCCL between GPUs, and rank 0 judges what all of them made
(`rank_checks`). Exit codes are those of ``oproj``; under ``torchrun`` that of rank 0 is in its report.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from conformance.case import PACKED_K, Case
from conformance.families import FAMILIES
from conformance.implementation import SoftwareImplementation
from conformance.rank_checks import RankChecks
from conformance.rank_launch import launch, work
from conformance.rank_worker import BACKENDS, FAULTS, ORDERED, Gathered, Plan, RankFailure
from conformance.runner import Judged, Row, Run, _row
from conformance.terminal import FAILED, INTERRUPTED, PASSED, guarded, integers, say, split, stop, verdict_code
from oproj.arch import ARCHS, get_arch
from oproj.config import PRESETS, get_preset
from oproj.engines import EngineUnavailable
from oproj.wo_b import SUM_KINDS
from reports.store import RowWriter, load, remove_parts
from reports.tables import print_rich

NAME = "ranks"
_MOST_RANKS_SHOWN = 8  # z is also compared with every TP size up to this one
_HIDDEN, _BLOCK = 256, 128


def make_case(arch: str, preset: str, tp_size: int, tokens: int, *, family: str, seed: int, full: bool) -> Case:
    """The Case of rank 0: real widths, or as few groups and columns as every TP size up to 8 can share.

    Raises ``ValueError`` that names the argument where ``tp_size`` does not divide the model.
    """
    model = get_preset(preset)
    sizes: dict[str, Any] = {}
    model.shard(tp_size)
    if not full:
        groups = min(max(_MOST_RANKS_SHOWN, tp_size), model.n_groups)
        rank = PACKED_K if get_arch(arch).tma_aligned_scales else _BLOCK
        sizes = {"hidden_size": _HIDDEN, "n_groups": groups, "o_lora_rank": rank}
    return Case(
        arch=arch, preset=preset, tokens=tokens, tp_size=tp_size, family=family, seed=seed,
        position_family="shuffled", **sizes,
    )  # fmt: skip


@dataclass(frozen=True)
class Judge:
    """Rank 0's last step: judges every Case of ``plan`` and writes the rows of ``run`` into ``folder``."""

    plan: Plan
    run: Run
    folder: Path

    def __call__(self, found: list[Gathered]) -> None:
        """Write the rows of what all ranks made of each Case."""
        with RowWriter(self.folder, self.run.run_id) as writer:
            for (fault, case), gathered in zip(self.plan.runs, found, strict=True):
                writer.extend(self.rows(fault, case, gathered))

    def rows(self, fault: str, case: Case, found: Gathered) -> list[Row]:
        """Rows of one run of a Case; their variant says what was summed and how, their implementation the fault."""
        implementation = SoftwareImplementation(case.arch)
        implementation.name = f"{NAME} with {fault}" if fault else NAME
        results = RankChecks(case, found).results()
        backend = self.plan.backend
        return [
            _row(case, Judged.of(implementation), self.run, result) | {"variant": f"{variant} {backend}"}
            for variant, result in results
        ]


def check_hardware(plan: Plan) -> None:
    """Raises ``EngineUnavailable`` where the plan's backend cannot run here."""
    if plan.backend != "nccl":
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", plan.tp_size))
    if not torch.cuda.is_available() or torch.cuda.device_count() < here:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise EngineUnavailable(f"backend='nccl' needs a GPU per rank: {here} ranks here, {found} GPU(s)")


def run_plan(plan: Plan, folder: Path, run: Run) -> None:
    """Run ``plan`` on new processes of this machine and write its rows into ``folder``. Raises as `launch` does."""
    check_hardware(plan)
    _clear(folder)
    launch(plan, Judge(plan, run, folder))


def run_as_rank(plan: Plan, folder: Path, run: Run) -> int:
    """This process as the rank that ``torchrun`` says it is; the exit code of the run on rank 0, 0 elsewhere."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if world != plan.tp_size:
        raise ValueError(f"tp={plan.tp_size} must be the number of processes, and torchrun started {world}")
    check_hardware(plan)
    if rank == 0:
        _clear(folder)
    work(plan, rank, "env://", partial(_say_step, rank), Judge(plan, run, folder))
    return _shown(folder) if rank == 0 else PASSED


def _clear(folder: Path) -> None:
    """An empty folder of rows, so that those of an earlier run are not taken for those of one that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_parts(folder)


def _say_step(rank: int, step: str) -> None:
    if os.environ.get("OPROJ_RANK_STEPS"):
        sys.stderr.write(f"rank {rank}: {step}\n")


def _shown(folder: Path) -> int:
    df = load(folder)
    print_rich(df)
    orders = df[(df["stage"] == "reduce") & (df["oracle"] == "bits") & (df["verdict"] != "fail")]
    orders = orders[orders["reason"].str.startswith("order")].drop_duplicates("variant")
    for row in orders.to_dict("records"):
        say(f"{row['variant']}: {row['reason']}")
    failed = df[df["verdict"] == "fail"]
    for row in failed.to_dict("records"):
        say(
            f"{row['implementation']}, {row['variant']}: {row['stage']} {row['oracle']}: {row['reason']}",
            style="bold red",
        )
    say(f"{len(df)} rows in {folder}")
    return verdict_code(df)


def main(
    arch: Annotated[str, typer.Option(help=f"Architecture: {', '.join(ARCHS)}.")],
    tp: Annotated[int, typer.Option(min=1, help="Ranks, one process each.")] = 2,
    tokens: Annotated[list[str] | None, typer.Option(help="Tokens of each Case; separate with commas.")] = None,
    preset: Annotated[str, typer.Option(help=f"Model: {', '.join(PRESETS)}.")] = "v4-flash",
    family: Annotated[str, typer.Option(help=f"Input family: {', '.join(FAMILIES)}.")] = "normal",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    full: Annotated[bool, typer.Option("--full", help="Real widths; by default groups and columns are cut.")] = False,
    backend: Annotated[str, typer.Option(help=f"Who sums: {', '.join(BACKENDS)}.")] = "gloo",
    reduction: Annotated[list[str] | None, typer.Option(help=f"Words summed: {', '.join(SUM_KINDS)}.")] = None,
    reduce_scatter: Annotated[bool, typer.Option("--reduce-scatter", help="Also scatter the rows of the sum.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which the run ends.")] = 300.0,
    fault: Annotated[
        list[str] | None, typer.Option(help=f"Planted in the real ranks, one after another: {', '.join(FAULTS)}.")
    ] = None,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder of the rows.")] = None,
) -> None:
    """Run the block on real tensor-parallel ranks and compare with one process and with float64."""

    def plan() -> Plan:
        counts = integers(tokens, (5,), "tokens")
        cases = tuple(make_case(arch, preset, tp, n, family=family, seed=seed, full=full) for n in counts)
        sums = ("all_reduce", *(("reduce_scatter",) if reduce_scatter else ()), ORDERED)
        return Plan(cases, backend, split(reduction, SUM_KINDS), sums, timeout, split(fault, ("",)))

    planned, run = guarded(plan), Run.now()
    folder = out or Path("out") / run.run_id
    try:
        if "RANK" in os.environ:
            raise typer.Exit(guarded(lambda: run_as_rank(planned, folder, run)))
        guarded(lambda: run_plan(planned, folder, run))
    except RankFailure as failure:
        stop(FAILED, str(failure))
    except KeyboardInterrupt:
        stop(INTERRUPTED, "stopped: no rank is left, and no row was written")
    raise typer.Exit(guarded(lambda: _shown(folder)))


if __name__ == "__main__":
    typer.run(main)
