"""What one rank of a tensor-parallel run does: its groups of wo_a, its part of wo_b, the sum with the other ranks.

Column-parallel wo_a needs no communication. Every sum over ranks is made by the collective it is served with, on BF16
words or FP32 words; `all_gather` gives every rank all partials, which it adds in the order of the ranks.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.case import Case
from conformance.inputs import Weights, build
from conformance.truth import model_of
from oproj.wo_b import COLLECTIVES, SUM_KINDS, BlockLinear, RowParallelWoB, all_reduce, reduce_partials

BACKENDS = ("gloo", "nccl")
ORDERED = "all_gather"  # every rank adds all partials itself, in the order of the ranks
SUMS = (*COLLECTIVES, ORDERED)
TWICE, MISSING_RANK, REPLICATED, RING = "tp-dup", "tp-miss", "tp-replicated", "bf16-ring"  # names of the fault zoo
DIES, HANGS = "rank-dies", "rank-hangs"
FAULTS = (TWICE, MISSING_RANK, REPLICATED, RING, DIES, HANGS)
DEATH_CODE = 9
Mark = Callable[[str], None]


class RankFailure(RuntimeError):
    """A rank died, raised or hung; the message names it."""


@dataclass(frozen=True)
class Plan:
    """A run of ``tp_size`` ranks over ``cases`` (rank 0 of each, all of one TP size).

    ``kinds`` are of `oproj.wo_b.reduce_partials`, ``collectives`` of `SUMS`; ``timeout``: seconds for the whole run.
    ``faults``: every Case is run once with each of these planted in the real ranks, of `FAULTS` or '' for none. Raises
    ``ValueError`` that names the argument.
    """

    cases: tuple[Case, ...]
    backend: str = "gloo"
    kinds: tuple[Any, ...] = SUM_KINDS
    collectives: tuple[str, ...] = ("all_reduce", ORDERED)
    timeout: float = 300.0
    faults: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        choices = (("backend", (self.backend,), BACKENDS), ("reduction", self.kinds, SUM_KINDS))
        for name, given, known in (*choices, ("collectives", self.collectives, SUMS)):
            if not given or not set(given) <= set(known):
                raise ValueError(f"{name}={', '.join(given) or 'nothing'} must be of {', '.join(known)}")
        if not self.cases or len({case.tp_size for case in self.cases}) != 1:
            raise ValueError("cases must be one or more, all of one tp_size")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be positive seconds")
        if not self.faults:
            raise ValueError("faults=() runs nothing; '' stands for no fault")
        for fault in self.faults:
            self._check_fault(fault)

    def _check_fault(self, fault: str) -> None:
        if fault and fault not in FAULTS:
            raise ValueError(f"fault={fault!r} is unknown; known: {', '.join(FAULTS)}")
        if fault in FAULTS[:4] and self.tp_size < 2:
            raise ValueError(f"fault={fault!r} needs 2 ranks or more, tp={self.tp_size}")
        if fault == RING and (self.tp_size < 3 or "fp32" not in self.kinds):
            raise ValueError(f"fault={RING!r} needs 3 ranks or more and the fp32 sum: two BF16 words have one sum")

    @property
    def tp_size(self) -> int:
        """How many ranks there are."""
        return self.cases[0].tp_size

    @property
    def runs(self) -> list[tuple[str, Case]]:
        """Every (fault, Case of rank 0) in the order of the run."""
        return [(fault, case) for fault in self.faults for case in self.cases]

    @property
    def sums(self) -> list[tuple[str, Any]]:
        """Every (collective, kind) that is run."""
        return [(collective, kind) for collective in self.collectives for kind in self.kinds]


@dataclass
class Gathered:
    """What all ranks made of one Case, in the order of the ranks, on the CPU.

    z: BF16 ``[T, G/TP, R]`` each; partials: BF16 ``[T, hidden]`` each; y by (collective, kind): ``[T, hidden]`` each,
    or of ``reduce_scatter`` ``[ceil(T/TP), hidden]`` each.
    """

    z: list[torch.Tensor]
    partials: list[torch.Tensor]
    y: dict[tuple[str, str], list[torch.Tensor]] = field(default_factory=dict)


class Rank:
    """One process of a run, after ``init_process_group``. ``mark`` is told each step before it begins."""

    def __init__(self, plan: Plan, device: torch.device, deadline: float, mark: Mark) -> None:
        self.plan, self.device, self.deadline, self.mark = plan, device, deadline, mark
        self.rank, self.last = dist.get_rank(), plan.tp_size - 1
        self.fault = ""
        self.group: Any = dist.group.WORLD
        self.side: Any = self.group if plan.backend == "gloo" else dist.new_group(backend="gloo")

    def run(self) -> Iterator[Gathered]:
        """Every run of the plan, the same on every rank."""
        for fault, case in self.plan.runs:
            self.fault = fault
            yield self.case(dataclasses.replace(case, tp_rank=self.rank))

    def case(self, case: Case) -> Gathered:
        """One Case: wo_a and wo_b of this rank, then every sum."""
        self.mark("wo_a")
        inputs, model = build(case), model_of(case.arch)
        x = model.quantize(inputs.o, inputs.positions, inputs.cos_sin_cache, config=inputs.config)
        z = model.wo_a(x, inputs.weights, config=inputs.config)
        self.mark("wo_b")
        self._end_or_hang()
        local = self._local(inputs.weights, model.engine)
        partial = RowParallelWoB(local)(z.flatten(1))
        self.mark("waiting for all ranks")
        self._meet()
        found = Gathered(self._all(z), self._all(partial.cpu()))
        for collective, kind in self.plan.sums:
            self.mark(f"{collective} {kind}")
            found.y[collective, kind] = self._all(self._sum(local, z, collective, kind).cpu())
        return found

    def _local(self, weights: Weights, engine: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """This rank's linear, its result where the collective takes it."""
        linear = BlockLinear(weights.wo_b.weight, weights.wo_b.weight_scale_inv, engine=engine)
        return lambda z: linear(z).to(self.device)

    def _sum(self, local: Callable[..., torch.Tensor], z: torch.Tensor, collective: str, kind: Any) -> torch.Tensor:
        faulty = self._planted(local, kind)
        used: Any = "bf16" if self.fault == RING else kind
        if collective == ORDERED:
            return reduce_partials(self._all(faulty(z.flatten(1)).cpu()), used)
        return RowParallelWoB(faulty, group=self.group, kind=used, collective=collective)(z.flatten(1))

    def _planted(self, local: Callable[..., torch.Tensor], kind: Any) -> Callable[..., torch.Tensor]:
        """``local`` with the plan's fault in what this rank hands to the sum."""
        fault = self.fault
        if fault == REPLICATED:  # its y is whole already, and is summed once more
            return lambda z: all_reduce(local(z), self.group, kind)
        if fault in (TWICE, MISSING_RANK) and self.rank == self.last:
            return lambda z: torch.zeros_like(local(z))
        if fault == TWICE and self.rank == 0:
            return lambda z: 2 * local(z)
        return local

    def _end_or_hang(self) -> None:
        if self.rank != self.last:
            return
        if self.fault == DIES:
            os._exit(DEATH_CODE)
        while self.fault == HANGS:
            time.sleep(1)

    def _meet(self) -> None:
        """Wait for all ranks; who does not come in time is named in the error."""
        left = timedelta(seconds=max(1.0, self.deadline - time.monotonic()))
        try:
            dist.monitored_barrier(self.side, timeout=left, wait_all_ranks=True)
        except RuntimeError as error:
            raise RankFailure(f"not all ranks came within {self.plan.timeout:g} s: {error}") from error

    def _all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """This tensor (BF16, CPU) of every rank, bit for bit."""
        words = mine.contiguous().view(torch.uint8)  # gloo takes no 16-bit integers
        every = [torch.empty_like(words) for _ in range(self.plan.tp_size)]
        if words.numel():
            dist.all_gather(every, words, group=self.side)
        return [each.view(torch.bfloat16) for each in every]
