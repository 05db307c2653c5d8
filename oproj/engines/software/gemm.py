"""Grouped FP8 products on the software tensor core: decoding, tiling over threads, BF16 rounding."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache, partial

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
    asked = os.environ.get("OPROJ_THREADS") or str(available)
    if not asked.isdecimal() or int(asked) < 1:
        raise ValueError(f"OPROJ_THREADS={asked!r} must be a whole number of at least 1")
    return min(available, int(asked))


def run_parallel(tasks: list[Callable[[], None]]) -> None:
    """Run the tasks on the pool, or here where there is one task or thread; the first error is raised at the end."""
    if len(tasks) == 1 or thread_count() == 1:
        for task in tasks:
            task()
        return
    futures = [thread_pool().submit(task) for task in tasks]
    wait(futures)
    for future in futures:
        future.result()


def matmul(
    arch: Arch,
    a: np.ndarray,
    a_scales: np.ndarray,
    b: np.ndarray,
    b_scales: np.ndarray,
    gran_k: int,
    out: np.ndarray,
) -> None:
    """``out[T, N] = a[T, K] . b[N, K]`` in FP32 on the tensor core of ``arch``, before the output rounding.

    a, b: uint8 e4m3 codes; K a multiple of 128. a_scales [T, K/gran_k], b_scales [N, K/gran_k]: FP32 where ``arch``
    promotes with scales outside, else UE8M0 bytes (uint8). NaN codes and NaN bytes make their whole row or column
    NaN, which is what a NaN in any fused sum does to every sum after it.
    """
    b_side = _kernel_scales(arch, b_scales)
    for t0 in range(0, a.shape[0], TOKEN_CHUNK):
        rows = slice(t0, t0 + TOKEN_CHUNK)
        _token_chunk(
            arch, np.ascontiguousarray(a[rows]), _kernel_scales(arch, a_scales[rows]), b, b_side, gran_k, out[rows]
        )
    out[_nan_rows(a, a_scales)] = CANONICAL_NAN
    out[:, _nan_rows(b, b_scales)] = CANONICAL_NAN


def _kernel_scales(arch: Arch, scales: np.ndarray) -> np.ndarray:
    """Scales as the tile kernels take them: FP32 values, or int32 exponents without the bias."""
    contiguous = np.ascontiguousarray(scales)
    return contiguous.astype(np.int32) - 127 if arch.mma.scales_inside else contiguous.astype(np.float32, copy=False)


def _token_chunk(
    arch: Arch, codes: np.ndarray, a_side: np.ndarray, b: np.ndarray, b_side: np.ndarray, gran_k: int, out: np.ndarray
) -> None:
    """Fill ``out`` [tokens, N] tile by tile, one task a tile of columns."""
    values, exponents = code_tables()
    numbers = (np.int32(arch.mma.frac_bits), np.int32(arch.mma.out_frac_bits), np.int32(arch.mma.zero_exponent))
    operands = (values[codes], exponents[codes], a_side, b, b_side)

    def tile(n0: int) -> None:
        if arch.promotion_k is None:
            lanes.scaled_tile(*operands, n0, out, values, exponents, np.int32(gran_k), *numbers)
        else:
            lanes.promoted_tile(*operands, n0, out, values, exponents, *numbers)

    run_parallel([partial(tile, n0) for n0 in range(0, b.shape[0], lanes.WIDTH)])


def _nan_rows(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows that hold a NaN code or, for UE8M0 bytes, a NaN scale."""
    nan = ((codes & 0x7F) == 0x7F).any(axis=1)
    return nan | (scales == 255).any(axis=1) if scales.dtype == np.uint8 else nan


def round_to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """BF16 bits (uint16) of FP32 values, round to nearest even; NaN becomes 0x7FFF as the hardware's conversion."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)
