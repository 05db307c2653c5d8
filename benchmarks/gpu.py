"""The software engine on a GPU: the model's rate, and one whole V4-Pro layer. Empty without a CUDA device."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.table import RUNS, Row, row
from oproj.activation import empty_scales, empty_values
from oproj.arch import get_arch
from oproj.config import get_preset
from oproj.engines.software import SoftwareEngine
from oproj.weights import layout_weight_scales


def figures(*, quick: bool) -> list[Callable[[], Row]]:
    """The figures as calls that each return one row."""
    if not torch.cuda.is_available():
        return []
    tokens = 64 if quick else 1024
    return [partial(layer, arch, tokens, unit) for arch in ("sm90", "sm100") for unit in ("TMAC/s", "ms")]


def median_milliseconds(call: Callable[[], Any], runs: int = RUNS) -> float:
    """Median time between two events around ``call``, after one call to warm up."""
    call()
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def layer(name: str, tokens: int, unit: str) -> Row:
    """wo_a of one V4-Pro layer on one rank, all 16 groups, as ``fp8_einsum`` on the model of ``name``."""
    arch, config = get_arch(name), get_preset("v4-pro")
    groups, rank, k = config.n_groups, config.o_lora_rank, config.group_k
    packed = arch.tma_aligned_scales
    codes = torch.randint(0, 126, (tokens, groups, k), dtype=torch.uint8, device="cuda")
    a = empty_values(tokens, groups, k, torch.float8_e4m3fn, "cuda").copy_(codes.view(torch.float8_e4m3fn))
    b = torch.randint(0, 126, (groups, rank, k), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    sa = empty_scales(tokens, groups, k // 512 if packed else k // 128, packed, "cuda")
    sa.fill_(0x7F7F7F7F if packed else 1.0)
    sb = layout_weight_scales(torch.ones(groups, rank // 128, k // 128, device="cuda"), arch=arch, rows=rank)
    z = torch.empty((tokens, groups, rank), dtype=torch.bfloat16, device="cuda")
    engine = SoftwareEngine(arch, device="cuda")
    took = median_milliseconds(lambda: engine.fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb), z, recipe=arch.recipe()))
    name = f"software engine on a GPU, {name}, V4-Pro layer, {tokens} tokens"
    device = torch.cuda.get_device_name()
    if unit == "ms":
        return row(name, took, "ms", "< 1000", note=device)
    return row(name, tokens * groups * rank * k / took / 1e9, "TMAC/s", ">= 1", note=device)
