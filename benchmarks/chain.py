"""The whole chain on a GPU: quantise, wo_a, wo_b of V4-Pro, each stage's time and its share of its limit.

Limits: bytes over the device's copy rate for the quantisers; for the products the larger of bytes over that rate and
operations over the dense FP8 peak of the datasheet (1,979 TFLOP/s on Hopper).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.kernel import bytes_of, copy_rate, graph_us, inputs, serving
from benchmarks.table import Row, row
from oproj import kernels
from oproj.config import get_preset
from oproj.engines import EngineUnavailable, get_engine
from oproj.rope import cos_sin_cache
from oproj.weights import layout_weight_scales

FP8_PEAK = 1979e6  # operations a microsecond
TOKENS = (1, 64, 512, 2048, 8192)


def figures(*, quick: bool) -> list[Callable[[], list[Row]]]:
    """One call a tensor-parallel size and token count. Empty without a GPU that runs DeepGEMM and the kernel."""
    if kernels.unavailable_reason():
        return []
    return [partial(chain, tp, tokens) for tp in (1, 8) for tokens in (TOKENS[:2] if quick else TOKENS)]


def _weight(rows: int, k: int, groups: int | None, arch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (rows, k) if groups is None else (groups, rows, k)
    codes = torch.randint(0, 126, shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    blocks = torch.ones((*shape[:-2], math.ceil(rows / 128), k // 128), device="cuda")
    return codes, layout_weight_scales(blocks, arch=arch, rows=rows)


def chain(tp: int, tokens: int) -> list[Row]:
    """Stage times at one shape; at TP 1 also quantise + wo_a with the serving kernel over the same with ours."""
    try:
        engine = get_engine("auto", _arch())
    except EngineUnavailable as error:
        return [row(f"chain, TP {tp}, T={tokens}", math.nan, "us", note=str(error).splitlines()[0])]
    config = get_preset("v4-pro").shard(tp)
    groups, rank, hidden, k = config.n_groups, config.o_lora_rank, config.hidden_size, config.wo_b_k
    packed, recipe = engine.arch.tma_aligned_scales, engine.arch.recipe()
    table = cos_sin_cache("yarn", 1 << 17).cuda()
    sets = list(inputs(tokens, config.n_heads))
    mode: dict[str, Any] = {"n_groups": groups, "heads_per_group": 8, "tma_aligned_scales": packed}
    outs = [kernels.fused_inv_rope_fp8_quant(o, p, table, **mode) for o, p in sets]
    wo_a, wo_b = _weight(rank, config.group_k, groups, engine.arch), _weight(hidden, k, None, engine.arch)
    z = torch.randn(tokens, groups, rank, device="cuda").bfloat16()
    y = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    flat, rows = z.flatten(1), kernels.quantize_rows(z.flatten(1), packed=packed)

    def quantise(o: torch.Tensor, p: torch.Tensor, out: Any) -> None:
        kernels.fused_inv_rope_fp8_quant(o, p, table, **mode, out=out)

    def project(x: Any) -> None:
        engine.fp8_einsum("bhr,hdr->bhd", x, wo_a, z, recipe=recipe)

    stages: dict[str, tuple[list[Callable[[], Any]], float]] = {
        "quantise": ([partial(quantise, o, p, out) for (o, p), out in zip(sets, outs, strict=True)],
                     bytes_of(tokens, config.n_heads, packed) / copy_rate()),
        "wo_a": ([partial(project, out) for out in outs], _product(tokens, groups * rank, config.group_k, groups)),
        "quantise z": ([partial(kernels.quantize_rows, flat, packed=packed, out=rows)], 3 * tokens * k / copy_rate()),
        "wo_b": ([partial(engine.fp8_gemm_nt, rows, wo_b, y, recipe=recipe)], _product(tokens, hidden, k, 1)),
    }  # fmt: skip
    label, result = f"V4-Pro TP {tp}, T={tokens}", []
    times = {name: graph_us(calls) for name, (calls, _) in stages.items()}
    for name, (_, limit) in stages.items():
        result.append(
            row(f"{name}, share of its limit, {label}", limit / times[name], "x", note=f"{times[name]:.1f} us")
        )
    result.append(row(f"whole chain, {label}", sum(times.values()), "us"))
    theirs = serving(mode, sets, table) if tp == 1 else None
    if theirs is not None:
        ratio = (theirs + times["wo_a"]) / (times["quantise"] + times["wo_a"])
        result.append(
            row(f"quantise + wo_a, serving / fused, {label}", ratio, "x", ">= 1.15" if tokens == 8192 else "")
        )
    return result


def _arch() -> str:
    from oproj.arch import arch_of_capability

    found = arch_of_capability(*torch.cuda.get_device_capability())
    return found.name if found else "sm90"


def _product(tokens: int, columns: int, k: int, groups: int) -> float:
    """Lower limit of an FP8 product in microseconds; ``columns`` over all groups, K of one group."""
    moved = tokens * k * groups + columns * k + 2 * tokens * columns
    return max(moved / copy_rate(), 2 * tokens * columns * k / FP8_PEAK)
