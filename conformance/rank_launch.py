"""Starting one process per rank on this machine, and ending all of them when one dies, raises or hangs.

`torchrun` does the first part too and is supported; what it does not do is to name a rank that hangs. When a rank dies
its peers fail in their collectives an instant later, so errors inside of one are told apart from their cause.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.rank_worker import Gathered, Plan, Rank, RankFailure
from conformance.worker import start_worker

STARTS, STEP_BYTES = "starting", 64
PEER_LOST = 70  # exit code of a rank whose collective failed: another rank is the cause
_POLL, _SETTLE, _GRACE = 0.05, 2.0, 15.0  # seconds: between looks, for others to end, beyond the time limit
Then = Callable[[list[Gathered]], None]


class _Progress:
    """The step of every rank, in memory that parent and ranks share: a count, and the step's name."""

    def __init__(self, context: Any, ranks: int) -> None:
        self.counts = context.Array("i", ranks, lock=False)
        self.names = context.Array("c", ranks * STEP_BYTES, lock=False)
        for rank in range(ranks):
            self.mark(rank, STARTS)

    def mark(self, rank: int, step: str) -> None:
        text = step.encode()[: STEP_BYTES - 1].ljust(STEP_BYTES, b"\0")
        self.names[rank * STEP_BYTES : (rank + 1) * STEP_BYTES] = text
        self.counts[rank] += 1

    def step(self, rank: int) -> str:
        text: bytes = self.names[rank * STEP_BYTES : (rank + 1) * STEP_BYTES]
        return text.rstrip(b"\0").decode(errors="replace")

    def behind(self) -> list[int]:
        """The ranks that have done the fewest steps: all others wait for them."""
        counts = list(self.counts)
        return [rank for rank, count in enumerate(counts) if count == min(counts)]


def work(plan: Plan, rank: int, init_method: str, mark: Callable[[str], None], then: Then) -> None:
    """What a rank's process does; ``then`` is called on rank 0 with what all ranks made. Ends in the plan's time."""
    deadline = time.monotonic() + plan.timeout
    # Also where this thread is stuck in a call that never returns.
    faulthandler.dump_traceback_later(plan.timeout + _GRACE, exit=True)
    device = torch.device("cpu")
    if plan.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    mark("meeting the other ranks")
    options: dict[str, Any] = {} if init_method == "env://" else {"rank": rank, "world_size": plan.tp_size}
    dist.init_process_group(
        plan.backend, init_method=init_method, timeout=timedelta(seconds=plan.timeout + _GRACE), **options
    )
    try:
        found = list(Rank(plan, device, deadline, mark).run())
        mark("judging" if rank == 0 else "done")
        if rank == 0:
            then(found)
            mark("done")
    finally:
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def launch(plan: Plan, then: Then) -> None:
    """Run ``plan`` in ``plan.tp_size`` new processes of this machine; ``then`` (picklable) is called in that of rank 0.

    Raises `RankFailure` naming the ranks that died, raised, or were behind when the time was over. No process is left.
    """
    context = _context(plan)
    progress = _Progress(context, plan.tp_size)
    with tempfile.TemporaryDirectory(prefix="oproj-ranks-") as folder:
        common = (plan, folder, progress, then)
        processes = [context.Process(target=_process, args=(rank, *common)) for rank in range(plan.tp_size)]
        try:
            for process in processes:
                process.start()
            _watch(processes, progress, plan.timeout, Path(folder))
        finally:
            _end(processes)


def _context(plan: Plan) -> Any:
    """Ranks are forked from a server that has imported what they need and has no threads; one that will own a GPU is
    started from nothing, since a CUDA context does not outlive a fork."""
    if plan.backend == "nccl":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _process(rank: int, plan: Plan, folder: str, progress: _Progress, then: Then) -> None:
    start_worker(max(1, (os.cpu_count() or 1) // plan.tp_size))
    step = ""

    def mark(name: str) -> None:
        nonlocal step
        step = name
        progress.mark(rank, name)

    try:
        work(plan, rank, f"file://{folder}/rendezvous", mark, then)
    except BaseException as error:
        lost = isinstance(error, RuntimeError) and (step.startswith(_TOGETHER) or step.split()[0] in plan.collectives)
        _note(folder, rank).write_text(traceback.format_exc(), encoding="utf-8")
        sys.stderr.flush()
        os._exit(PEER_LOST if lost else 1)


_TOGETHER = ("meeting", "waiting")  # steps in which an error is another rank's


def _note(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.txt"


def _watch(processes: Sequence[BaseProcess], progress: _Progress, timeout: float, folder: Path) -> None:
    """Return when all ranks ended well. Raises `RankFailure` for the first reason why they will not."""
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            _settle(processes)
            break
        if time.monotonic() > deadline:
            raise RankFailure(_late(progress, timeout))
        time.sleep(_POLL)
    codes = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
    causes = {rank: code for rank, code in codes.items() if code != PEER_LOST} or codes
    if causes:
        raise RankFailure("; ".join(_ended(rank, code, progress, folder) for rank, code in causes.items()))


def _settle(processes: Sequence[BaseProcess]) -> None:
    """A rank whose peer died may be seen first; the peer then shows within this time."""
    until = time.monotonic() + _SETTLE
    while time.monotonic() < until and all(process.exitcode in (None, 0, PEER_LOST) for process in processes):
        time.sleep(_POLL)


def _late(progress: _Progress, timeout: float) -> str:
    behind = progress.behind()
    others = [rank for rank in range(len(progress.counts)) if rank not in behind]
    said = ", ".join(f"rank {rank} hangs in step {progress.step(rank)!r}" for rank in behind)
    waiting = ", ".join(f"rank {rank} in {progress.step(rank)!r}" for rank in others)
    return f"not done after {timeout:g} s: {said}" + (f"; waiting: {waiting}" if waiting else "")


def _ended(rank: int, code: int | None, progress: _Progress, folder: Path) -> str:
    note, step = _note(folder, rank), progress.step(rank)
    if note.exists():
        return f"rank {rank} raised in step {step!r}: {note.read_text(encoding='utf-8').strip().splitlines()[-1]}"
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return f"rank {rank} died with {how} in step {step!r}"


def _end(processes: Sequence[BaseProcess]) -> None:
    """End every process that still runs, and wait for it."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join()
            process.close()
