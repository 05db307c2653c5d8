"""Bulk proof: DeepGEMM on a GPU against the software engine, bit for bit, over the local shapes of the model family.

The software engine computes each (model, family) once, for 1000 tokens and all groups. The GPU is then called for
every rank of every tensor-parallel size and every token count on slices of the same inputs. So the comparison also
shows that a token's bits depend neither on the batch nor on how the groups are split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from conformance.golden import activation_scales, codes_tensor, differing, weight_scales
from conformance.golden_inputs import bulk_codes, generator, pair, scales
from oproj.activation import empty_values
from oproj.arch import Arch
from oproj.config import OProjConfig, get_preset
from oproj.engines import Engine

MODELS = ("v4-flash", "v4-pro")
TP_SIZES = (1, 2, 4, 8)
WO_A_TOKENS = (1, 3, 64, 129, 1000)
WO_B_TOKENS = (1, 64, 129)
# (code family, scale choice); the first is what the serving engine's quantiser makes
WO_A_FAMILIES = (
    ("normal", "pow2"),
    ("wide", "general"),
    ("positive", "general"),
    ("cancel", "general"),
    ("bits", "pow2"),
)
WO_B_FAMILIES = (("normal", "pow2"), ("wide", "general"))
SPREAD = 3  # scales lie in 2**-3 .. 2**3

Say = Callable[[str], None]


@dataclass
class Cell:
    """One stage, model, tensor-parallel size and input family: all ranks and token counts together."""

    stage: str
    model: str
    tp: int
    family: str
    tokens: tuple[int, ...]
    compared: int = 0
    mismatched: int = 0
    first: str = ""  # first differing coordinate with both bit patterns
    error: str = ""  # why the cell, or a part of it, did not run
    seconds: float = 0.0

    def add(self, where: str, hardware: np.ndarray, software: np.ndarray) -> None:
        """Count one call's outputs (uint16 bits of equal shape)."""
        if hardware.shape != software.shape:
            raise ValueError(f"hardware {hardware.shape} and software {software.shape} must have one shape")
        wrong = differing(hardware, software)
        self.compared += wrong.size
        self.mismatched += int(wrong.sum())
        if wrong.any() and not self.first:
            self.first = describe_first(where, wrong, hardware, software)

    @property
    def passed(self) -> bool:
        """Everything that the cell holds ran, and no bit differs."""
        return self.compared > 0 and self.mismatched == 0 and not self.error


def describe_first(where: str, wrong: np.ndarray, hardware: np.ndarray, software: np.ndarray) -> str:
    """Coordinate and both BF16 bit patterns of the first differing output."""
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{where} at {index}: hardware 0x{int(hardware[index]):04x}, software 0x{int(software[index]):04x}"


@dataclass
class _Inputs:
    """Codes and FP32 scales of one product family, einsum form: a ``[T, G, K]``, b ``[G, N, K]``."""

    a: np.ndarray
    sa: np.ndarray
    b: np.ndarray
    sb: np.ndarray
    bits: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint16))  # software result [T, G, N]


def prove(
    hardware: Engine,
    software: Engine,
    *,
    budget: float,
    say: Say = print,
    models: tuple[str, ...] = MODELS,
    tp_sizes: tuple[int, ...] = TP_SIZES,
    wo_a_tokens: tuple[int, ...] = WO_A_TOKENS,
    wo_b_tokens: tuple[int, ...] = WO_B_TOKENS,
) -> list[Cell]:
    """Compare both engines over all cells. A failing cell is reported and the rest goes on; cells that ``budget``
    (seconds) leaves no time for are returned with an error."""
    start = time.monotonic()
    cells: list[Cell] = []
    for stage, family, choice, name in _plan(hardware.arch, models):
        config, label = get_preset(name), f"{family}/{choice}"
        tokens = wo_a_tokens if stage == "wo_a" else wo_b_tokens
        mine = [Cell(stage, name, tp, label, tokens) for tp in tp_sizes if tp in config.tp_sizes()]
        cells += mine
        before = time.monotonic()
        work = _wo_a if stage == "wo_a" else _wo_b
        if before - start > budget:
            _fail(mine, f"left out: the time budget of {budget:.0f} s is used up")
        else:
            try:
                work(hardware, software, config, mine, (family, choice), tokens)
            except Exception as error:  # whatever the library raises is one cell's failure, and is printed
                _fail(mine, f"{type(error).__name__}: {error}")
        took = time.monotonic() - before
        for cell in mine:
            cell.seconds = round(took / len(mine), 2)
            say(progress_line(cell))
    return cells


def progress_line(cell: Cell) -> str:
    """One line about a finished cell."""
    text = f"{cell.stage} {cell.model} tp{cell.tp} {cell.family}: {cell.compared} compared, {cell.mismatched} differ"
    return " | ".join(part for part in (text, cell.first, cell.error) if part)


def _fail(cells: list[Cell], why: str) -> None:
    for cell in cells:
        cell.error = cell.error or why


def _plan(arch: Arch, models: tuple[str, ...]) -> Iterator[tuple[str, str, str, str]]:
    """(stage, family, scale choice, model), the served family first; rows with UE8M0 scales take powers of two."""
    for stage, families in (("wo_a", WO_A_FAMILIES), ("wo_b", WO_B_FAMILIES)):
        for family, choice in families:
            for model in models:
                yield stage, family, "pow2" if arch.tma_aligned_scales else choice, model


def _inputs(name: str, family: str, choice: str, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> _Inputs:
    rng = generator(name)
    a, b = pair(family, rng, a_shape, b_shape, bulk_codes)
    blocks = a_shape[-1] // 128
    sa = scales(choice, rng, (*a_shape[:-1], blocks), SPREAD)
    sb = scales(choice, rng, (b_shape[0], -(-b_shape[1] // 128), blocks), SPREAD)
    return _Inputs(a, sa, b, sb)


def _wo_a(
    hardware: Engine,
    software: Engine,
    config: OProjConfig,
    cells: list[Cell],
    family: tuple[str, str],
    tokens: tuple[int, ...],
) -> None:
    groups, k, n = config.n_groups, config.group_k, config.o_lora_rank
    data = _inputs(f"proof/wo_a/{config.name}/{family}", *family, (max(tokens), groups, k), (groups, n, k))
    data.bits = _einsum(software, data, slice(None), slice(None))
    for cell in cells:
        local = config.shard(cell.tp).n_groups
        for rank in range(cell.tp):
            mine = slice(rank * local, (rank + 1) * local)
            for count in tokens:
                rows = _rows(count, max(tokens))
                where = f"{cell.stage} {cell.model} tp{cell.tp} rank {rank} T={count} (t, g, n)"
                cell.add(where, _einsum(hardware, data, rows, mine), data.bits[rows, mine])


def _wo_b(
    hardware: Engine,
    software: Engine,
    config: OProjConfig,
    cells: list[Cell],
    family: tuple[str, str],
    tokens: tuple[int, ...],
) -> None:
    for cell in cells:
        k = config.shard(cell.tp).wo_b_k
        name = f"proof/wo_b/{config.name}/{family}/{k}"
        data = _inputs(name, *family, (max(tokens), 1, k), (1, config.hidden_size, k))
        data.bits = _gemm(software, data, slice(None))
        for count in tokens:
            rows = _rows(count, max(tokens))
            where = f"{cell.stage} {cell.model} tp{cell.tp} M={count} (m, n)"
            cell.add(where, _gemm(hardware, data, rows), data.bits[rows])


def _rows(count: int, total: int) -> slice:
    """``count`` rows out of the middle, so that token counts do not all begin with the same rows."""
    start = (total - count) // 2
    return slice(start, start + count)


def _einsum(engine: Engine, data: _Inputs, rows: slice, groups: slice) -> np.ndarray:
    device = engine.device
    codes = codes_tensor(data.a[rows, groups])
    tokens, count, k = codes.shape
    values = empty_values(tokens, count, k, torch.float8_e4m3fn, device).copy_(codes)
    weight = codes_tensor(data.b[groups]).to(device)
    n = weight.shape[1]
    out = torch.full((tokens, count, n), float("nan"), dtype=torch.bfloat16, device=device)
    a = (values, activation_scales(engine.arch, data.sa[rows, groups], device))
    b = (weight, weight_scales(engine.arch, data.sb[groups], n, device))
    engine.fp8_einsum("bhr,hdr->bhd", a, b, out, recipe=engine.arch.recipe())
    return bits(out)


def _gemm(engine: Engine, data: _Inputs, rows: slice) -> np.ndarray:
    device = engine.device
    codes = codes_tensor(data.a[rows, 0]).to(device)
    weight = codes_tensor(data.b[0]).to(device)
    n = weight.shape[0]
    out = torch.full((codes.shape[0], n), float("nan"), dtype=torch.bfloat16, device=device)
    a = (codes, activation_scales(engine.arch, data.sa[rows], device)[:, 0])
    b = (weight, weight_scales(engine.arch, data.sb, n, device)[0])
    engine.fp8_gemm_nt(a, b, out, recipe=engine.arch.recipe())
    return bits(out)


def bits(out: torch.Tensor) -> np.ndarray:
    """BF16 bits as uint16 on the CPU."""
    return out.cpu().view(torch.int16).numpy().view(np.uint16)


def totals(cells: list[Cell]) -> list[dict[str, Any]]:
    """One row per stage, model and tensor-parallel size, all families together."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for cell in cells:
        key = (cell.stage, cell.model, cell.tp)
        row = rows.setdefault(
            key,
            {
                "stage": cell.stage,
                "model": cell.model,
                "tp": cell.tp,
                "tokens": cell.tokens,
                "families": 0,
                "compared": 0,
                "mismatched": 0,
                "failed": 0,
            },
        )
        row["families"] += 1
        row["compared"] += cell.compared
        row["mismatched"] += cell.mismatched
        row["failed"] += bool(cell.error)
    return list(rows.values())
