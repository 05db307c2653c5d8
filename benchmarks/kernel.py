"""The fused kernel on a GPU: share of the device's copy bandwidth, and ratios to what serves today, in one run.

Every call is timed as the median replay of a CUDA graph that rotates over several input sets (cold L2). The serving
engine's kernel is timed with and without programmatic dependent launch, and its better time counts: launched back to
back with it, waiting blocks of the next call take the place of working ones.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from benchmarks.gpu import median_milliseconds
from benchmarks.table import Row, row
from oproj import kernels
from oproj.rope import cos_sin_cache

Call = Callable[[], Any]
SHAPES = [(tokens, 128) for tokens in (1, 8, 64, 128, 512, 1003, 2048, 8192, 32768)] + [(8192, 16)]


def figures(*, quick: bool) -> list[Callable[[], list[Row]]]:
    """One call a shape and scale format, each returning its rows. Empty where the kernel cannot run."""
    if kernels.unavailable_reason():
        return []
    shapes = [(64, 128), (1003, 16)] if quick else SHAPES
    return [partial(shape, tokens, heads, packed) for tokens, heads in shapes for packed in (True, False)]


WARM_UP_MS, REPLAYS = 30, 15


def graph_us(calls: list[Call]) -> float:
    """Median time of one call in microseconds, from replays of a graph of all of them, after a warm-up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    repeats = max(1, 32 // len(calls)) if len(calls) > 4 else 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times: list[float] = []
    warm = 0.0
    while len(times) < REPLAYS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took = start.elapsed_time(end)
        if warm < WARM_UP_MS:  # clocks rise under load
            warm += took
        else:
            times.append(took)
    return statistics.median(times) * 1e3 / (repeats * len(calls))


@cache
def copy_rate() -> float:
    """Bytes per microsecond of a device-to-device copy, read plus written; on the stream, where a graph would use the
    slower copy engines."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_milliseconds(lambda: target.copy_(source)) * 1e3)


def inputs(tokens: int, heads: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(o, positions) sets that together exceed the L2."""
    count = max(2, min(16, math.ceil(2e8 / (tokens * heads * 1024)))) if tokens * heads < 1e6 else 2
    for _ in range(count):
        o = torch.randn(tokens, heads, 512, dtype=torch.bfloat16, device="cuda")
        yield o, torch.randint(0, 1 << 17, (tokens,), device="cuda")


def bytes_of(tokens: int, heads: int, packed: bool) -> int:
    """What must move: BF16 in, FP8 and scales out, one table row a token."""
    return tokens * (heads * (1024 + 512 + (4 if packed else 16)) + 256 + 8)


def serving(mode: dict[str, Any], sets: list[Any], table: torch.Tensor) -> float | None:
    """The better of the serving kernel's two times, or ``None`` where no vLLM is named (``OPROJ_VLLM``)."""
    from conformance import vllm_kernel

    if not os.environ.get("OPROJ_VLLM"):
        return None
    kernel, _ = vllm_kernel.load()
    times = []
    for dependent in (True, False):
        vllm_kernel.DEPENDENT_LAUNCH = dependent
        times.append(graph_us([partial(kernel, o, positions, table, **mode) for o, positions in sets]))
    return min(times)


def eager(o: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch operations (FP32 scales, block 128), for torch.compile too."""
    x = o.float()
    cos, sin = table[positions][:, None, :32], table[positions][:, None, 32:]
    even, odd = x[..., 448::2], x[..., 449::2]
    turned = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2)
    blocks = torch.cat([x[..., :448], turned], -1).unflatten(-1, (4, 128))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=1e-10) * (1 / 448))))
    codes = (blocks / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    grouped = codes.flatten(-2).unflatten(1, (-1, 8)).flatten(2).transpose(0, 1).contiguous()
    return grouped, scale.unflatten(1, (-1, 8)).flatten(2).permute(1, 2, 0).contiguous()


def shape(tokens: int, heads: int, packed: bool) -> list[Row]:
    """Rows of one shape."""
    table = cos_sin_cache("yarn", 1 << 17).cuda()
    sets = list(inputs(tokens, heads))
    mode: dict[str, Any] = {"n_groups": heads // 8, "heads_per_group": 8, "tma_aligned_scales": packed}
    outs = [kernels.fused_inv_rope_fp8_quant(o, positions, table, **mode) for o, positions in sets]
    early = tokens * heads <= 128 * 128
    ours = graph_us(
        [
            partial(kernels.fused_inv_rope_fp8_quant, o, p, table, **mode, out=out, early_positions=early)
            for (o, p), out in zip(sets, outs, strict=True)
        ]
    )
    label = f"T={tokens}, {heads} heads, {'packed' if packed else 'FP32'} scales"
    share = bytes_of(tokens, heads, packed) / ours / copy_rate()
    rows = [
        row(f"fused kernel, share of copy, {label}", share, "x", _share_target(tokens, heads), note=f"{ours:.2f} us")
    ]
    theirs = serving(mode, sets, table)
    if theirs is not None:
        target = ">= 1.5" if tokens >= 1000 else ">= 1.25" if tokens <= 128 else ""
        rows.append(row(f"serving kernel / fused kernel, {label}", theirs / ours, "x", target, note=f"{theirs:.2f} us"))
    if not packed and 64 <= tokens <= 8192:
        for name, call in (("torch eager", eager), ("torch.compile", torch.compile(eager, dynamic=False))):
            plain = graph_us([partial(call, o, p, table) for o, p in sets])
            rows.append(row(f"{name} / fused kernel, {label}", plain / ours, "x", note=f"{plain:.0f} us"))
    return rows


def _share_target(tokens: int, heads: int) -> str:
    if heads < 128:
        return ">= 0.88"
    return {2048: ">= 0.88", 8192: ">= 0.93", 32768: ">= 0.93"}.get(tokens, "")
