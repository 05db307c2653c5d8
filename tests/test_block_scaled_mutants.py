"""No wrong fact about the block-scaled instruction passes: published vectors and mmasim refuse each of them.

No hardware with this instruction has been recorded yet. What stands in for golden vectors: the directed vectors of
``test_spec`` and sums computed by PyPI's mmasim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

import block_scaled_model as model
from block_scaled_model import CHAIN_MUTANTS, MUTANTS, Facts
from oproj.arch import SM100, TCGEN05_MXF8F6F4
from oproj.engines.software import gemm, spec
from test_mmasim import CODES, ROWS, SCALES, draw, theirs
from test_spec import MX_VECTORS, VECTORS, codes

Sum = tuple[list[int], list[int], int, int, int, int]  # codes a and b, C bits, bytes a and b, FP32 bits of the result
INSTRUCTION = "sm100 tcgen05 block-scaled"
SPECIAL: dict[str, Sum] = {
    "a NaN code": ([0x7F], [0x38], 0, 127, 127, model.NAN),
    "a negative NaN code beside zero": ([0x00], [0xFF], 0, 127, 127, model.NAN),
    "an infinite accumulator": ([0x38], [0x38], model.INF, 127, 127, model.INF),
}


def padded(row: list[int]) -> list[int]:
    return row + [0] * (32 - len(row))


@lru_cache(maxsize=1)
def directed() -> dict[str, Sum]:
    """Every directed vector of the row, as 32 products."""
    plain = {
        name: (codes(a), codes(b), spec.float_bits(float(c)), 127, 127, bits)
        for name, (a, b, c, _, bits) in VECTORS.items()
    }
    scaled = {name: (codes(a), codes(b), *rest) for name, (a, b, *rest) in MX_VECTORS.items()}
    return {name: (padded(a), padded(b), *rest) for name, (a, b, *rest) in (plain | scaled | SPECIAL).items()}


@lru_cache(maxsize=1)
def random_sums() -> list[Sum]:
    """A few hundred sums of every family with mmasim's results."""
    rng, drawn = np.random.default_rng(11), []
    instruction = ROWS[INSTRUCTION][1]()
    for family in CODES:
        for scales in SCALES:
            sums = draw(rng, TCGEN05_MXF8F6F4, 1, family, scales)
            results = theirs(instruction, TCGEN05_MXF8F6F4, sums)
            drawn += [(*sums.one(0, lane), int(results[0, lane])) for lane in range(60)]
    return drawn


def differing(facts: Facts, sums: list[Sum]) -> int:
    return sum(model.fused_sum(*arguments, facts) != bits for *arguments, bits in sums)


def test_the_model_gives_every_directed_vector_and_every_sum_of_mmasim():
    assert [name for name, (*arguments, bits) in directed().items() if model.fused_sum(*arguments) != bits] == []
    assert differing(Facts(), random_sums()) == 0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_fact_is_seen(name):
    assert differing(MUTANTS[name], list(directed().values())) + differing(MUTANTS[name], random_sums()) > 0


SEEN_BY = {
    "F = 24": "25-bit edge kept",
    "F = 26": "25-bit edge lost",
    "a zero with exponent -132": "a zero takes part with exponent -133, not -132",
    "a zero with exponent -134": "a zero takes part with exponent -133, not -134",
    "floor instead of truncation": "25 bits toward zero, negative",
    "nearest instead of truncation": "25 bits toward zero, positive",
    "13 output bits": "alignment drops bits",
    "scale applied after the sum": "scale joins before alignment",
    "NaN dropped": "scale byte 0xFF is NaN",
    "Inf dropped": "overflow is Inf",
    "subnormal codes flushed": "a subnormal factor keeps e = -6",
    "subnormal accumulators flushed": "smallest C beside zero products",
    "subnormal results flushed": "smallest subnormal kept",
}


@pytest.mark.parametrize("name", SEEN_BY)
def test_the_directed_vector_made_for_a_fact_sees_it_wrong(name):
    *arguments, bits = directed()[SEEN_BY[name]]
    assert model.fused_sum(*arguments, MUTANTS[name]) != bits


@pytest.mark.parametrize(
    "change",
    [{"frac_bits": 24}, {"frac_bits": 26}, {"out_frac_bits": 22}, {"zero_exponent": -132}, {"zero_exponent": -134},
     {"scales_inside": False}],
)  # fmt: skip
def test_a_wrong_number_in_the_row_is_seen(change):
    """The same through the row itself and the scalar specification."""
    wrong, every = replace(TCGEN05_MXF8F6F4, **change), [*directed().values(), *random_sums()]
    right = [spec.fdpa(a, b, c, TCGEN05_MXF8F6F4, *rest) == bits for a, b, c, *rest, bits in every]
    assert all(right)
    assert any(spec.fdpa(a, b, c, wrong, *rest) != bits for a, b, c, *rest, bits in every)


@lru_cache(maxsize=1)
def chains() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes [4, 512] and [8, 512], bytes [4, 4] and [8, 4], and mmasim's accumulators [4, 8]: one over all of K."""
    rng, instruction = np.random.default_rng(12), ROWS[INSTRUCTION][1]()
    a, b = (rng.integers(0x10, 0x60, (rows, 512), dtype=np.uint8) for rows in (4, 8))
    sa, sb = (rng.integers(121, 134, (rows, 4), dtype=np.uint8) for rows in (4, 8))
    c = torch.zeros(4, 8)
    shape = (4, 8, 1)
    for k in range(0, 512, 32):
        pieces = [
            torch.from_numpy(np.ascontiguousarray(np.broadcast_to(x, (4, 8, 32)))).view(torch.float8_e4m3fn)
            for x in (a[:, None, k : k + 32], b[None, :, k : k + 32])
        ]
        scales = [
            torch.from_numpy(np.ascontiguousarray(np.broadcast_to(x, shape))).view(torch.float8_e8m0fnu)
            for x in (sa[:, None, k // 128, None], sb[None, :, k // 128, None])
        ]
        c = instruction.dpa(*pieces, c, *scales)
    return a, b, sa, sb, c.numpy().view(np.uint32)


def model_chains(facts: Facts) -> np.ndarray:
    a, b, sa, sb, expected = chains()
    found = [
        [model.chain(x.tolist(), y.tolist(), np.repeat(s, 4).tolist(), np.repeat(t, 4).tolist(), facts)
         for y, t in zip(b, sb, strict=True)]
        for x, s in zip(a, sa, strict=True)
    ]  # fmt: skip
    return np.array(found, np.uint32) != expected


def test_model_specification_and_engine_chain_one_accumulator_over_all_of_k():
    a, b, sa, sb, expected = chains()
    assert not model_chains(Facts()).any()
    out = np.zeros(expected.shape, np.float32)
    gemm.matmul(SM100, a, sa, b, sb, 128, out)
    assert (out.view(np.uint32) == expected).all()
    assert spec.chain(SM100, a[1].tolist(), b[2].tolist(), sa[1].tolist(), sb[2].tolist()) == expected[1, 2]


@pytest.mark.parametrize("name", CHAIN_MUTANTS)
def test_a_promotion_that_the_chain_does_not_have_is_seen(name):
    assert model_chains(CHAIN_MUTANTS[name]).any()
