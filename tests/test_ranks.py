"""Real tensor-parallel ranks: the sums they make, the faults planted in them, and ranks that die or hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from conformance import rank_launch, ranks
from conformance.case import Case
from conformance.inputs import build
from conformance.rank_checks import COMMUTES, IN_ORDER, NO_ORDER, RankChecks, order_of, simulated_sizes, simulated_z
from conformance.rank_worker import (
    DIES,
    HANGS,
    MISSING_RANK,
    ORDERED,
    REPLICATED,
    RING,
    SUMS,
    TWICE,
    Gathered,
    Plan,
    RankFailure,
)
from conformance.runner import Run
from conformance.truth import model_of
from oproj.wo_b import SUM_KINDS, reduce_partials, scatter_partials
from reports.gate import gate
from reports.store import load
from reports.tables import per_arch_stage

ZOO = (TWICE, MISSING_RANK, REPLICATED, RING)
HERE = Path(__file__).resolve().parents[1]


def case_of(tp_size: int, tokens: int = 5, arch: str = "sm90") -> Case:
    return ranks.make_case(arch, "v4-flash", tp_size, tokens, family="normal", seed=3, full=False)


def run(plan: Plan, folder: Path) -> pd.DataFrame:
    ranks.run_plan(plan, folder, Run.now())
    assert not multiprocessing.active_children()
    return load(folder)


# Real processes -----------------------------------------------------------------------------------------------------


def test_two_ranks_have_the_bits_of_the_simulated_ones(tmp_path: Path) -> None:
    df = run(Plan((case_of(2), case_of(2, tokens=4)), collectives=SUMS), tmp_path)
    assert set(df["verdict"]) == {"pass"}
    bits = df[(df["stage"] == "reduce") & (df["oracle"] == "bits")]
    assert len(bits) == 2 * len(SUMS) * len(SUM_KINDS)
    assert set(bits["compared"]) == {5 * 256, 4 * 256}
    assert set(bits["reason"]) == {COMMUTES, IN_ORDER}
    scattered = df[(df["oracle"] == "exact") & df["variant"].str.startswith("reduce_scatter")]
    assert set(scattered["compared"]) == {256}, "5 tokens on 2 ranks leave one row of zeros"
    z = df[df["stage"] == "wo_a"]
    assert set(z["compared"]) == {n * 8 * 128 * len((1, 2, 4, 8)) for n in (5, 4)}
    table = per_arch_stage(df)
    assert set(table["stage"]) == {"wo_a", "wo_b", "reduce", "o_proj"}
    assert gate(df, HERE / "reports" / "baselines", "software", ["sm90"]).compared > 0


def test_four_ranks_are_within_the_bound_and_each_fault_is_killed(tmp_path: Path) -> None:
    df = run(Plan((case_of(4),), collectives=SUMS, faults=("", *ZOO)), tmp_path)
    right = df[df["implementation"] == "ranks"]
    bits = right[(right["stage"] == "reduce") & (right["oracle"] == "bits")].set_index("variant")
    for variant, row in bits.iterrows():
        ordered = str(variant).startswith(ORDERED)
        assert row["verdict"] == ("pass" if ordered else "not applicable"), variant
        assert row["reason"] == (IN_ORDER if ordered else NO_ORDER)
    rest = right.drop(right.index[(right["stage"] == "reduce") & (right["oracle"] == "bits")])
    assert set(rest["verdict"]) == {"pass"}
    for fault in ZOO:
        of_fault = df[(df["implementation"] == f"ranks with {fault}") & df["stage"].isin(("reduce", "o_proj"))]
        bounds = of_fault[of_fault["oracle"] == "bound"].set_index(["stage", "variant"])["verdict"]
        killed = {variant for stage, variant in bounds.index[bounds == "fail"] if stage == "reduce"}
        kinds = ("fp32",) if fault == RING else SUM_KINDS
        assert killed == {f"{collective} {kind} gloo" for collective in SUMS for kind in kinds}, fault
        before = df[(df["implementation"] == f"ranks with {fault}") & df["stage"].isin(("wo_a", "wo_b"))]
        assert set(before["verdict"]) == {"pass"}, "the fault is in the sum alone"


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"^rank 1 died with exit code 9 in step 'wo_b'$"):
        run(Plan((case_of(2),), faults=(DIES,), timeout=120), tmp_path)
    assert time.monotonic() - started < 60, "its peer did not wait for the time limit"
    assert not multiprocessing.active_children()
    assert not list(tmp_path.glob("*.parquet"))


def test_a_rank_that_hangs_is_named_within_the_time_limit(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"not done after 10 s: rank 1 hangs in step 'wo_b'; waiting: rank 0 in"):
        run(Plan((case_of(2),), faults=(HANGS,), timeout=10), tmp_path)
    assert 10 <= time.monotonic() - started < 20
    assert not multiprocessing.active_children()


def test_no_rank_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "conformance.ranks", "--arch", "sm90", "--fault", HANGS, "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=HERE, stderr=subprocess.DEVNULL) as parent:
        found = wait_for(lambda: len(grandchildren(parent.pid)) == 2)
        every = [*children_of(parent.pid), *grandchildren(parent.pid)]
        parent.send_signal(signal.SIGKILL)
    assert found, "no ranks were started"
    assert wait_for(lambda: not any(command_of(pid) for pid in every))


def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["-m", "conformance.ranks", "--arch", "sm90", "--tp", "2", "--reduction", "fp32", "--out", str(tmp_path)]
    done = subprocess.run([*launcher, *options], cwd=HERE, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    df = load(tmp_path)
    assert set(df["verdict"]) == {"pass"}
    assert set(df["tp_size"]) == {2}


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return False


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def grandchildren(pid: int) -> list[int]:
    """The ranks of a run: they are forked from a server that the run started."""
    return [grandchild for child in children_of(pid) for grandchild in children_of(child)]


def command_of(pid: int) -> str:
    """What a living process runs; '' of one that has ended or is only waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


# The checks, on what ranks would have made --------------------------------------------------------------------------


def made_by(case: Case) -> Gathered:
    """What right ranks make, with sums in the order of the ranks, in one process."""
    model, parts = model_of(case.arch), []
    found = Gathered([], [])
    for rank in range(case.tp_size):
        parts.append(Case(**{**vars(case), "tp_rank": rank}))
        inputs = build(parts[-1])
        x = model.quantize(inputs.o, inputs.positions, inputs.cos_sin_cache, config=inputs.config)
        found.z.append(model.wo_a(x, inputs.weights, config=inputs.config))
        found.partials.append(model.wo_b(found.z[-1], inputs.weights, config=inputs.config))
    for kind in SUM_KINDS:
        whole = reduce_partials(found.partials, kind)  # type: ignore[arg-type]
        found.y["all_reduce", kind] = [whole.clone() for _ in range(case.tp_size)]
        shards = [scatter_partials(found.partials, rank, kind) for rank in range(case.tp_size)]  # type: ignore[arg-type]
        found.y["reduce_scatter", kind] = shards
    return found


def failed(case: Case, found: Gathered) -> set[tuple[str, str, str]]:
    results = list(RankChecks(case, found).results())
    assert results
    return {(variant, r.stage, r.oracle) for variant, r in results if r.verdict.status == "fail"}


def flip_last_bit(tensor: torch.Tensor, row: int = 0) -> None:
    tensor.view(torch.int16)[row].view(-1)[0] ^= 1


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_a_wrong_bit_anywhere_fails_where_it_is(arch: str) -> None:
    case = case_of(2, tokens=3, arch=arch)
    right = made_by(case)
    assert failed(case, right) == set()
    flip_last_bit(right.z[1])
    assert ("ranks", "wo_a", "bits") in failed(case, right)
    flip_last_bit(right.z[1])
    flip_last_bit(right.y["all_reduce", "fp32"][1])
    assert failed(case, right) == {("all_reduce fp32", "reduce", "exact")}, "one rank holds another y"
    flip_last_bit(right.y["all_reduce", "fp32"][1])
    flip_last_bit(right.y["reduce_scatter", "bf16"][1], row=1)
    assert failed(case, right) == {("reduce_scatter bf16", "reduce", "exact")}, "a row behind the tokens"
    flip_last_bit(right.y["reduce_scatter", "bf16"][1], row=1)
    flip_last_bit(right.partials[0])
    assert ("ranks", "wo_b", "bits") in failed(case, right)


def test_one_step_of_bf16_is_too_much_for_a_sum_in_fp32_of_any_order() -> None:
    case = case_of(4, tokens=2)
    found = made_by(case)
    for y in found.y["all_reduce", "fp32"]:
        y.view(torch.int16).bitwise_xor_(1)
    bound = next(r for v, r in RankChecks(case, found).results() if (v, r.oracle) == ("all_reduce fp32", "bound"))
    assert bound.stage == "reduce"
    assert bound.comparison.mismatched > 0.85 * 2 * 256, "all but sums in the middle of two BF16 numbers"


def test_z_is_the_same_at_every_size() -> None:
    case = case_of(4, tokens=2)
    assert simulated_sizes(case) == [1, 2, 4, 8]
    assert all(torch.equal(simulated_z(case, 1), simulated_z(case, n)) for n in (2, 4, 8))


@pytest.mark.parametrize(
    ("collective", "tp_size", "order"),
    [
        ("all_reduce", 2, COMMUTES),
        ("all_reduce", 3, NO_ORDER),
        ("reduce_scatter", 4, NO_ORDER),
        (ORDERED, 4, IN_ORDER),
    ],
)
def test_each_sum_says_whether_its_order_is_defined(collective: str, tp_size: int, order: str) -> None:
    assert order_of(collective, tp_size) == order


def test_without_tokens_nothing_is_compared() -> None:
    results = [result for _, result in RankChecks(case_of(2, tokens=0), made_by(case_of(2, tokens=0))).results()]
    assert {result.verdict.status for result in results} == {"not applicable", "pass"} - {"pass"}


# The command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--arch", "sm91"], 2, "sm91"),
        (["--arch", "sm90", "--tp", "3"], 2, "tp_size=3 does not divide"),
        (["--arch", "sm90", "--fault", "none"], 2, "fault='none' is unknown"),
        (["--arch", "sm90", "--fault", RING], 2, "needs 3 ranks"),
        (["--arch", "sm90", "--tp", "1", "--fault", TWICE], 2, "needs 2 ranks"),
        (["--arch", "sm90", "--reduction", "fp16"], 2, "reduction=fp16 must be of bf16, fp32"),
        (["--arch", "sm90", "--backend", "mpi"], 2, "backend=mpi must be of gloo, nccl"),
        (["--arch", "sm90", "--timeout", "0"], 2, "timeout=0.0 must be positive"),
        (["--arch", "sm90", "--tokens", "five"], 2, "--tokens takes whole numbers"),
        (["--arch", "sm90", "--tp", "8", "--backend", "nccl"], 3, "a GPU per rank"),
    ],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, options: list[str], code: int, message: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    app = ranks.typer.Typer()
    app.command()(ranks.main)
    done = CliRunner().invoke(app, options, env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    assert message in done.output


def test_the_size_must_be_what_torchrun_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(ValueError, match="tp=2 must be the number of processes, and torchrun started 4"):
        ranks.run_as_rank(Plan((case_of(2),)), tmp_path, Run.now())


def test_who_is_behind_is_told_from_who_waits() -> None:
    progress = rank_launch._Progress(multiprocessing.get_context("spawn"), 3)
    for rank, steps in enumerate((3, 1, 3)):
        for step in range(steps):
            progress.mark(rank, f"step {step}")
    assert progress.behind() == [1]
    assert rank_launch._late(progress, 5) == (
        "not done after 5 s: rank 1 hangs in step 'step 0'; waiting: rank 0 in 'step 2', rank 2 in 'step 2'"
    )


class Ended:
    """A process as `_watch` sees it, that ends after some looks."""

    def __init__(self, code: int, looks: int) -> None:
        self.code, self.looks = code, looks

    @property
    def exitcode(self) -> int | None:
        self.looks -= 1
        return self.code if self.looks < 0 else None

    def is_alive(self) -> bool:
        return self.exitcode is None


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([(rank_launch.PEER_LOST, 0), (9, 8)], "rank 1 died with exit code 9 in step 'starting'"),
        ([(rank_launch.PEER_LOST, 0), (-9, 8)], "rank 1 died with signal 9 in step 'starting'"),
        ([(1, 4), (rank_launch.PEER_LOST, 0)], "rank 0 raised in step 'starting': ValueError: no"),
        ([(rank_launch.PEER_LOST, 0), (0, 0)], "rank 0 raised in step 'starting': ValueError: no"),
    ],
)
def test_the_rank_that_failed_first_is_not_the_one_to_blame(
    tmp_path: Path, ends: list[tuple[int, int]], message: str
) -> None:
    """A rank whose collective lost its peer is seen before the peer that died."""
    rank_launch._note(tmp_path, 0).write_text("Traceback:\nValueError: no\n")
    progress = rank_launch._Progress(multiprocessing.get_context("spawn"), 2)
    processes: list[Any] = [Ended(*end) for end in ends]
    with pytest.raises(RankFailure, match=f"^{message}$"):
        rank_launch._watch(processes, progress, 30, tmp_path)
