"""Grouped FP8 products on the software tensor core: decoding, tiling over threads, BF16 rounding."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np

from oproj.arch import Arch
from oproj.engines.software import lanes, spec

TOKEN_CHUNK = 512  # tokens decoded at a time, so that memory does not grow with T
CANONICAL_NAN = np.float32(np.nan)


@lru_cache(maxsize=1)
def code_tables() -> tuple[np.ndarray, np.ndarray]:
    """FP32 value and int8 exponent of each e4m3 code; NaN codes decode to 0 and are tracked apart."""
    values = np.zeros(256, np.float32)
    exponents = np.full(256, lanes.ZERO_CODE_EXPONENT, np.int8)
    for code in range(256):
        if spec.is_nan_e4m3(code):
            continue
        m, e = spec.decode_e4m3(code)
        values[code] = m * 2.0 ** (e - spec.E4M3_FRACTION)
        if m:
            exponents[code] = e
    return values, exponents


@lru_cache(maxsize=1)
def thread_pool() -> ThreadPoolExecutor:
    """One pool a process, one thread a usable core (kernels release the GIL)."""
    return ThreadPoolExecutor(max_workers=thread_count(), thread_name_prefix="oproj-software")


def thread_count() -> int:
    """Cores this process may use; the environment variable OPROJ_THREADS lowers it."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(available, int(os.environ.get("OPROJ_THREADS", available))))


def run_parallel(tasks: list[Callable[[], None]]) -> None:
    """Run the tasks on the pool; the first error is raised after all have ended."""
    if thread_count() == 1 or len(tasks) == 1:
        for task in tasks:
            task()
        return
    for future in [thread_pool().submit(task) for task in tasks]:
        future.result()


def matmul(
    arch: Arch, a: np.ndarray, a_scales: np.ndarray, b: np.ndarray, b_scales: np.ndarray, gran_k: int,
    out: np.ndarray,
) -> None:
    """``out[T, N] = a[T, K] . b[N, K]`` in FP32 on the tensor core of ``arch``, before the output rounding.

    a, b: uint8 e4m3 codes; K a multiple of 128. a_scales [T, K/gran_k], b_scales [N, K/gran_k]: FP32 where ``arch``
    promotes with scales outside, else UE8M0 bytes (uint8). NaN codes and NaN bytes make their whole row or column
    NaN, which is what a NaN in any fused sum does to every sum after it.
    """
    values, exponents = code_tables()
    nan_columns = _nan_rows(b, b_scales)
    step = lanes.WIDTH
    mma = arch.mma
    rounding = (np.int32(mma.frac_bits), np.int32(mma.out_frac_bits), np.int32(mma.zero_exponent))
    if not arch.mma.scales_inside:
        b_side = np.ascontiguousarray(b_scales, dtype=np.float32)
    else:
        b_side = np.ascontiguousarray(b_scales).astype(np.int32) - 127
    for t0 in range(0, a.shape[0], TOKEN_CHUNK):
        rows = slice(t0, t0 + TOKEN_CHUNK)
        codes, result = np.ascontiguousarray(a[rows]), out[rows]
        a_values, a_exponents = values[codes], exponents[codes]
        if arch.mma.scales_inside:
            a_side = np.ascontiguousarray(a_scales[rows]).astype(np.int32) - 127
            tile, extra = lanes.scaled_tile, (np.int32(gran_k), *rounding)
        else:
            a_side = np.ascontiguousarray(a_scales[rows], dtype=np.float32)
            tile, extra = lanes.promoted_tile, rounding
        fixed = (a_values, a_exponents, a_side, b, b_side)
        run_parallel(
            [
                lambda n0=n0: tile(*fixed, n0, result, values, exponents, *extra)  # type: ignore[misc]
                for n0 in range(0, b.shape[0], step)
            ]
        )
        result[_nan_rows(codes, a_scales[rows])] = CANONICAL_NAN
    out[:, nan_columns] = CANONICAL_NAN


def _nan_rows(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows that hold a NaN code or, for UE8M0 bytes, a NaN scale."""
    nan = ((codes & 0x7F) == 0x7F).any(axis=1)
    return nan | (scales == 255).any(axis=1) if scales.dtype == np.uint8 else nan


def round_to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """BF16 bits (uint16) of FP32 values, round to nearest even; NaN becomes 0x7FFF as the hardware's conversion."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)
