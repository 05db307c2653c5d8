"""Shards of Cases, and what a Ray task does with one: it runs them and leaves their rows in one Parquet part.

This module knows nothing of Ray: its functions run wherever a process is.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice

import torch

import oproj
from conformance.case import Case
from conformance.judge import FAIL
from conformance.runner import Judged, Run, Target, git_revision, judged_by, run_cases
from conformance.sweep_parts import publish
from reports.store import RowWriter

MOST_CASES = 32  # of a shard: some 10 to 30 s of work, which is what a lost worker costs
_SHARDS_PER_CORE = 4  # at least, so that no core waits long for the last one
_ONE_PART = 1 << 40  # rows; more than a shard has


@dataclass(frozen=True)
class Shard:
    """Cases of one arch that a task runs, and the number of its part."""

    number: int
    cases: tuple[Case, ...]

    @property
    def arch(self) -> str:
        """Of all its Cases."""
        return self.cases[0].arch


@dataclass(frozen=True)
class Done:
    """What a task tells of its shard: number, temporary name of the part, whether each Case failed, rows, process."""

    number: int
    left: str
    failed: tuple[bool, ...]
    rows: int
    pid: int


@dataclass(frozen=True)
class Driver:
    """What a worker takes over from the process that submits: it is of this release, and runs in this folder."""

    version: str
    folder: str

    @classmethod
    def here(cls) -> Driver:
        """This process."""
        return cls(oproj.__version__, os.getcwd())


def shards(cases: Iterable[Case], size: int, first: int = 0) -> Iterator[Shard]:
    """``cases`` by ``size`` of one arch each, the archs in turn; numbers from ``first``.

    Raises ``ValueError`` for a size below 1.
    """
    if size < 1:
        raise ValueError(f"size={size} of a shard must be at least 1")
    by_arch: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_arch[case.arch].append(case)
    # In turn, or nodes that serve the last arch alone would wait for all others.
    waiting = [iter(of_arch) for of_arch in by_arch.values()]
    while waiting:
        for of_arch in list(waiting):
            chosen = tuple(islice(of_arch, size))
            if chosen:
                yield Shard(first, chosen)
                first += 1
            else:
                waiting.remove(of_arch)


def shard_size(cases: int, cores: int) -> int:
    """Cases of a shard, so that each core has several shards, and a lost one costs little."""
    return max(1, min(MOST_CASES, cases // (_SHARDS_PER_CORE * max(1, cores))))


def run_shard(shard: Shard, url: str, target: Target, run: Run, timeout: float, driver: Driver) -> Done:
    """Run the Cases of ``shard`` in this process, and leave their rows in one part under ``url``.

    An implementation that is not ours has a process of its own beside this one. Raises ``ValueError`` where this
    machine has another release or revision of oproj than ``driver`` and ``run``.
    """
    _prepare(driver, run.git_revision)
    failed, rows = [], 0
    with tempfile.TemporaryDirectory(prefix="oproj-shard-") as name:
        with RowWriter(name, run.run_id, flush_every=_ONE_PART) as writer:
            for of_case in run_cases(shard.cases, target, run, timeout=timeout):
                writer.extend(of_case)
                failed.append(any(row["verdict"] == FAIL for row in of_case))
                rows += len(of_case)
        left = publish(writer.paths[0], url, part_name(run, shard.number))
    return Done(shard.number, left, tuple(failed), rows, os.getpid())


def describe(target: Target, arch: str, timeout: float, driver: Driver) -> Judged:
    """What ``target`` names for ``arch`` on the machine of a worker. Raises what `judged_by` and `run_shard` do."""
    _prepare(driver)
    return judged_by(target, arch, timeout)


def part_name(run: Run, number: int) -> str:
    """The file of shard ``number``, as `reports.store` names parts."""
    return f"rows-{run.run_id}-{number:04d}.parquet"


_revision = cache(git_revision)  # a worker has imported its modules once, too


def _prepare(driver: Driver, revision: str = "") -> None:
    own = oproj.__version__
    if own != driver.version:
        raise ValueError(f"a worker has oproj {own} and the driver {driver.version}; install one release on all")
    here = _revision() if revision else ""
    if here and here != revision:
        raise ValueError(f"a worker has git revision {here} of oproj and the driver {revision}; check out one on all")
    if os.path.isdir(driver.folder):
        os.chdir(driver.folder)  # the file of an implementation may be named from there
    os.environ["OPROJ_THREADS"] = "1"  # of the one core that a task has
    torch.set_num_threads(1)
