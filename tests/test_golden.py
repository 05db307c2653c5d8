"""Bits that an H200 made: the software engine gives every one of them, and no model with a wrong fact does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mutants
from conformance import golden
from oproj.arch import SM90
from oproj.engines import get_engine
from oproj.engines.software import SoftwareEngine, gemm, lanes

FILES = sorted(Path(__file__).parent.joinpath("golden").glob("golden_sm90_*.npz"))
SETS = {item.name: item for path in FILES for item in golden.load(path)[1]}
PROVENANCE = ("arch", "device", "driver", "cuda", "torch", "package", "version", "date", "command")


def count_differing(engine, item):
    """Outputs of ``engine`` that are not the hardware's."""
    return int(golden.differing(golden.run(engine, item), item.d).sum())


def test_the_recorded_files_are_here_small_and_say_where_they_come_from():
    assert {path.name.split("_")[2] for path in FILES} == {"blocks.npz", "full.npz", "shapes.npz", "special.npz"}
    assert sum(path.stat().st_size for path in FILES) < 3_000_000
    for path in FILES:
        metadata, _ = golden.load(path)
        assert all(metadata[name] for name in PROVENANCE), metadata


@pytest.mark.parametrize("name", SETS)
def test_the_software_engine_gives_the_hardware_bits(name):
    item = SETS[name]
    assert item.d.size > 0
    assert count_differing(get_engine("software", "sm90"), item) == 0


@pytest.mark.parametrize("kind", ["nan", "inf", "minus zero", "overflow", "subnormal codes", "subnormal results"])
def test_the_vectors_hold_the_special_values(kind):
    """What the set names promise is in the data: a re-recording cannot lose it unseen."""
    codes = np.concatenate([s.a.ravel() for s in SETS.values()])
    results = np.concatenate([s.d.ravel() for s in SETS.values()]) & 0x7FFF
    scales = np.concatenate([s.sa.ravel() for s in SETS.values()])
    present = {
        "nan": ((codes & 0x7F) == 0x7F).any() and np.isnan(scales).any() and (results > 0x7F80).any(),
        "inf": np.isinf(scales).any() and (results == 0x7F80).any(),
        "minus zero": any(((s.a == 0x80).any() or (s.b == 0x80).any()) and (s.d == 0).any() for s in SETS.values()),
        "overflow": (SETS["special/overflow"].d & 0x7FFF == 0x7F80).any()
        and np.isfinite(SETS["special/overflow"].sa).all(),
        "subnormal codes": ((codes & 0x78) == 0).any() and ((codes & 0x7F) != 0).any(),
        "subnormal results": ((results > 0) & (results < 0x80)).any(),
    }
    assert present[kind]


def plain(name):
    """Sets of ordinary numbers that the NumPy model takes as they are: one group, einsum form."""
    return name.startswith(("block/", "full/"))


def special(name):
    """Sets of special values, in the same form."""
    return name.startswith("special/")


def model_differing(facts, name):
    """Outputs of the NumPy model that are not the hardware's."""
    item = SETS[name]
    per_row = np.repeat(item.sb[0], 128, axis=0)[: item.b.shape[1]]
    bits = mutants.chain(item.a[:, 0], item.sa[:, 0], item.b[0], per_row, facts)
    return int((~mutants.same_bits(bits, item.d[:, 0])).sum())


@pytest.mark.parametrize("name", [name for name in SETS if plain(name) or special(name)])
def test_the_numpy_model_gives_the_hardware_bits(name):
    assert model_differing(mutants.Facts(), name) == 0


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_wrong_fact_is_seen(name):
    """One fact changed, some recorded bit differs: the golden test would fail with that fact in the engine."""
    telling = ("full/promotion", "full/general") if "promotion" in name else filter(plain, SETS)
    assert any(model_differing(mutants.MUTANTS[name], item) for item in telling)


@pytest.mark.parametrize("name", mutants.SPECIAL_MUTANTS)
def test_a_special_value_dropped_is_seen(name):
    assert any(model_differing(mutants.SPECIAL_MUTANTS[name], item) for item in filter(special, SETS))


@pytest.mark.parametrize("change", [{"frac_bits": 12}, {"frac_bits": 14}, {"out_frac_bits": 23}, {"out_frac_bits": 12}])
def test_a_wrong_number_in_the_row_is_seen(change):
    """The same through the engine itself: the row's numbers reach the arithmetic."""
    wrong = SoftwareEngine(replace(SM90, mma=replace(SM90.mma, **change)))
    assert sum(count_differing(wrong, SETS[name]) for name in SETS if name.startswith("block/normal")) > 0


def test_an_unfused_promotion_in_the_engine_is_seen(monkeypatch):
    """The kernel's own source, with ``fma`` replaced by a product and a sum, fails the golden test."""
    tile = lanes.promoted_tile.py_func
    monkeypatch.setitem(tile.__globals__, "fma", lambda x, y, z: np.float32(np.float32(x * y) + z))
    item, tokens = SETS["full/promotion"], slice(0, 3)
    values, exponents = gemm.code_tables()
    codes, weight = item.a[tokens, 0], np.ascontiguousarray(item.b[0])
    scales = np.repeat(item.sb[0], 128, axis=0)[: weight.shape[0]]
    out = np.zeros((3, weight.shape[0]), np.float32)
    numbers = [np.int32(n) for n in (SM90.mma.frac_bits, SM90.mma.out_frac_bits, SM90.mma.zero_exponent)]
    operands = (values[codes], exponents[codes], np.ascontiguousarray(item.sa[tokens, 0]), weight, scales)
    tile(*operands, 0, out, values, exponents, *numbers)
    assert golden.differing(gemm.round_to_bf16_bits(out), item.d[tokens, 0]).any()
