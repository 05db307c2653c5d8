"""Compile DeepGEMM's kernels for many shapes at once: one process a core, all filling the same disk cache.

A kernel takes nvcc some seconds and a recording meets dozens of them; one after the other they would take longer
than the recording itself. A warm-up that fails costs time and nothing else: its errors are returned and printed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import numpy as np

from conformance.golden import EINSUM, GoldenSet, run
from conformance.worker import start_worker
from oproj.engines.deep_gemm import DeepGemmEngine

Call = tuple[str, int, int, int, int]  # op, tokens, groups (1 for a GEMM), columns, K


def calls_of(sets: Iterable[GoldenSet]) -> set[Call]:
    """The shapes of golden sets."""
    found: set[Call] = set()
    for item in sets:
        groups = item.a.shape[1] if item.op == EINSUM else 1
        found.add((item.op, item.a.shape[0], groups, item.b.shape[-2], item.a.shape[-1]))
    return found


def warm_up(arch: str, calls: Iterable[Call], workers: int | None = None) -> list[str]:
    """Run every call once on zeros in worker processes; returns one line per call that failed."""
    todo = sorted(set(calls))
    count = min(workers or 8, os.cpu_count() or 1, len(todo))
    if count == 0:
        return []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=start_worker) as pool:
        answers = pool.map(_one, [arch] * len(todo), todo)
        return [answer for answer in answers if answer]


@cache
def _engine(arch: str) -> DeepGemmEngine:
    return DeepGemmEngine(arch)


def _one(arch: str, call: Call) -> str:
    try:
        run(_engine(arch), zeros(call))
    except Exception as error:  # handed to the caller, which prints it
        return f"{call}: {type(error).__name__}: {error}"
    return ""


def zeros(call: Call) -> GoldenSet:
    """A set of that shape with zero codes and unit scales."""
    op, tokens, groups, columns, k = call
    blocks, rows = k // 128, -(-columns // 128)
    a, sa = np.zeros((tokens, groups, k), np.uint8), np.ones((tokens, groups, blocks), np.float32)
    b, sb = np.zeros((groups, columns, k), np.uint8), np.ones((groups, rows, blocks), np.float32)
    if op == EINSUM:
        return GoldenSet("warm-up", op, "", a, sa, b, sb)
    return GoldenSet("warm-up", op, "", a[:, 0], sa[:, 0], b[0], sb[0])
