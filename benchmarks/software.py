"""The software engine on the CPU: products, quantiser, start-up, memory, and the reference against a bare matmul."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.table import RUNS, Row, median_seconds, row
from oproj.engines.software import SoftwareEngine, gemm
from oproj.rope import cos_sin_cache
from reference import grouped_wo_a


def figures(*, quick: bool) -> list[Callable[[], Row]]:
    """The figures as calls that each return one row: figure, value, unit, target, runs, note."""
    tokens = 16 if quick else 64
    return [
        partial(products, "sm90", tokens, 5.0),
        partial(products, "sm100", tokens, 3.0),
        partial(products, "sm90", 1, None),
        partial(against_mmasim, "sm90"),
        partial(against_mmasim, "sm100"),
        partial(quantiser, tokens),
        start_up,
        partial(peak_memory, 16 if quick else 256),
        partial(reference_ratio, tokens),
    ]


def _operands(arch: str, tokens: int, columns: int, k: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    codes = [rng.integers(0, 127, (n, k), dtype=np.uint8) | (rng.integers(0, 2, (n, k), dtype=np.uint8) << 7) for n in
             (tokens, columns)]  # fmt: skip
    shapes = [(n, k // 128) for n in (tokens, columns)]
    if arch == "sm90":
        scales = [np.exp2(rng.integers(-9, 9, shape)).astype(np.float32) for shape in shapes]
    else:
        scales = [rng.integers(118, 137, shape).astype(np.uint8) for shape in shapes]
    return codes[0], scales[0], codes[1], scales[1]


def products(arch: str, tokens: int, target: float | None) -> Row:
    """One group of wo_a (1024 columns, K 4096), all cores."""
    engine, out = SoftwareEngine(arch), np.zeros((tokens, 1024), np.float32)
    operands = _operands(arch, tokens, 1024, 4096)
    seconds = median_seconds(lambda: gemm.matmul(engine.arch, *operands, 128, out))
    rate = tokens * 1024 * 4096 / seconds / 1e9
    return row(f"software engine, {arch}, {tokens} tokens", rate, "GMAC/s", f">= {target:g}" if target else "",
               note=f"{gemm.thread_count()} threads")  # fmt: skip


def against_mmasim(arch: str) -> Row:
    """The same fused sums on the software engine and on PyPI's mmasim in turn (one instruction wide)."""
    name = f"software engine against mmasim, {arch}, 64 x 256, K 4096"
    try:
        import mmasim.nv_ptx as mmasim
    except ImportError:
        return row(name, math.nan, "x", ">= 300", 0, "mmasim is not installed (extra bench)")
    tokens, columns, k = 64, 256, 4096
    a, sa, b, sb = _operands(arch, tokens, columns, k)
    fp8 = [torch.from_numpy(codes).view(torch.float8_e4m3fn) for codes in (a, b)]
    c = torch.zeros(tokens, columns)
    engine, out = SoftwareEngine(arch), np.zeros((tokens, columns), np.float32)
    if arch == "sm90":
        instruction: Any = mmasim.WGMMA("Hopper", "m64n256k32.f32.e4m3.e4m3")
    else:
        instruction = mmasim.TCGen05MMA("Blackwell", "m64n256k32.kind::f8f6f4.f32.e4m3.e4m3")

    def rival() -> None:
        for i in range(0, k, 32):
            instruction(fp8[0][:, i : i + 32], fp8[1][:, i : i + 32].T, c)

    ratios = []
    for _ in range(3):
        theirs = median_seconds(rival, 1)
        ours = median_seconds(lambda: gemm.matmul(engine.arch, a, sa, b, sb, 128, out))
        ratios.append(theirs / ours)
    return row(name, statistics.median(ratios), "x", ">= 300", 3)


def quantiser(tokens: int) -> Row:
    """The fused quantiser, V4-Pro on one rank."""
    engine = SoftwareEngine("sm90")
    o, table = torch.randn(tokens, 128, 512).bfloat16(), cos_sin_cache("plain", 4096)
    positions = torch.arange(tokens)
    seconds = median_seconds(lambda: engine.inv_rope_fp8_quant(o, positions, table, n_groups=16, heads_per_group=8))
    return row("software quantiser, 128 heads", o.numel() / seconds / 1e6, "M elements/s", ">= 300")


_START = """
import time; start = time.perf_counter()
import torch
from oproj.engines.software import SoftwareEngine
engine = SoftwareEngine("sm90")
a = torch.zeros(1, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
b = torch.zeros(8, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
engine.fp8_gemm_nt((a, torch.ones(1, 1)), (b, torch.ones(1, 1)), torch.empty(1, 8, dtype=torch.bfloat16))
print(time.perf_counter() - start)
"""


def _python(code: str) -> float:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    return float(done.stdout.split()[-1])


def start_up() -> Row:
    """From an empty interpreter to the first product, compiled code cached (importing torch included)."""
    times = [_python(_START) for _ in range(RUNS)]
    torch_alone = statistics.median(
        [
            _python("import time; s = time.perf_counter(); import torch; print(time.perf_counter() - s)")
            for _ in range(3)
        ]
    )
    return row(
        "start-up to the first product", statistics.median(times), "s", "< 2", note=f"torch alone {torch_alone:.2f} s"
    )


_MEMORY = """
import torch
from oproj.engines.software import SoftwareEngine
tokens, groups, rank, k = {tokens}, 16, 1024, 4096
codes = lambda *shape: torch.randint(0, 126, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
a, b = codes(groups, tokens, k).transpose(0, 1), codes(groups, rank, k)
sa, sb = torch.ones(tokens, groups, k // 128), torch.ones(groups, rank // 128, k // 128)
z = torch.zeros(tokens, groups, rank, dtype=torch.bfloat16)
SoftwareEngine("sm90").fp8_einsum("bhr,hdr->bhd", (a[:1], sa[:1]), (b[:, :128], sb[:, :1].contiguous()), z[:1, :, :128])
status = lambda key: int(open("/proc/self/status").read().split(key + ":")[1].split()[0]) / 2**20
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
before = status("VmRSS")
SoftwareEngine("sm90").fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb), z)
print(status("VmHWM") - before)
"""


def peak_memory(tokens: int) -> Row:
    """Peak above inputs and outputs of wo_a at V4-Pro on one rank."""
    peak = _python(_MEMORY.format(tokens=tokens))
    return row(f"peak memory above operands, V4-Pro TP1, {tokens} tokens", peak, "GiB", "< 1", 1)


def reference_ratio(tokens: int) -> Row:
    """reference.grouped_wo_a against a bare float64 matmul of the same size, in turn."""
    x, w = torch.randn(tokens, 2, 4096).double(), torch.randn(2, 1024, 4096).double()
    per_group, transposed = x.transpose(0, 1).contiguous(), w.transpose(1, 2)
    ratios = []
    for _ in range(RUNS):
        bare = median_seconds(lambda: torch.matmul(per_group, transposed), 3)
        ratios.append(median_seconds(lambda: grouped_wo_a(x, w), 3) / bare)
    return row("reference.grouped_wo_a / bare float64 matmul", statistics.median(ratios), "x", "<= 1.2")
