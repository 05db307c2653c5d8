"""A regression planted in the software engine fails the gate, in a table that names architecture, stage and size."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from conformance import truth
from conformance.cli import app
from oproj.arch import Arch
from oproj.engines.software import gemm

SIZES = ["--preset", "v4-pro", "--tp", "8", "--tokens", "3", "--family", "wide"]  # where bits that are cut off show
matmul = gemm.matmul


def oproj(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Baselines of a small run of two architectures."""
    folder = tmp_path_factory.mktemp("sound")
    assert oproj("run", "--arch", "sm90,sm100", "--engine", "software", *SIZES, "--out", folder / "run").exit_code == 0
    done = oproj("rebaseline", folder / "run", "--baseline", folder / "baselines", "--reason", "sound")
    assert done.exit_code == 0, done.output
    return folder / "baselines"


def one_bit_less(arch: Arch, *operands: Any) -> None:
    """One more truncated bit in every fused sum."""
    mma = dataclasses.replace(arch.mma, frac_bits=arch.mma.frac_bits - 1, out_frac_bits=arch.mma.out_frac_bits - 1)
    matmul(dataclasses.replace(arch, mma=mma), *operands)


def promoted_every_512(arch: Arch, a: Any, a_scales: Any, b: Any, b_scales: Any, gran_k: int, out: np.ndarray) -> None:
    """One accumulator for 512 of K instead of 128, its scales inside; they are powers of two here."""
    if arch.promotion_k is None:
        return matmul(arch, a, a_scales, b, b_scales, gran_k, out)
    row = dataclasses.replace(arch, mma=dataclasses.replace(arch.mma, scales_inside=True), promotion_k=None)
    out[:] = 0
    for k in range(0, a.shape[1], 512):
        part, blocks = np.zeros_like(out), slice(k // gran_k, (k + 512) // gran_k)
        sides = [np.ascontiguousarray(codes[:, k : k + 512]) for codes in (a, b)]
        scales = [np.ascontiguousarray(scale[:, blocks]).view(np.int32) >> 23 & 0xFF for scale in (a_scales, b_scales)]
        matmul(row, sides[0], scales[0].astype(np.uint8), sides[1], scales[1].astype(np.uint8), gran_k, part)
        out += part
    return None


@pytest.mark.parametrize(
    "planted, archs",
    [(promoted_every_512, ["sm90"]), (one_bit_less, ["sm90", "sm100"])],
)
def test_a_planted_regression_fails_and_is_named(
    baselines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: Any, archs: list[str]
) -> None:
    monkeypatch.setattr(gemm, "matmul", planted)
    truth.model_of.cache_clear()
    oproj("run", "--arch", "sm90,sm100", "--engine", "software", *SIZES, "--out", tmp_path)
    result = oproj("gate", tmp_path, "--baseline", baselines)
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    table = [line.split() for line in lines if re.match(r" ?sm\d+ +software +\w+ +\w+ +v4-pro +8 +3 ", line)]
    assert {(arch, stage) for arch, _, stage, *_ in table} >= {(arch, "wo_a") for arch in archs}
    assert {arch for arch, *_ in table} == set(archs)
    assert "quantize" not in {stage for _, _, stage, *_ in table}
    assert re.search(r"the first of them again: oproj replay '\{.*--engine software", result.output)


def test_the_sound_engine_passes_its_own_baselines(baselines: Path) -> None:
    result = oproj("gate", baselines.parent / "run", "--baseline", baselines)
    assert result.exit_code == 0, result.output
