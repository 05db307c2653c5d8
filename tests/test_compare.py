"""Comparing names the planted fault at its coordinate; judging passes nothing that is empty, NaN, zero or stale."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.compare import (
    BadElement,
    Comparison,
    compare_bits,
    compare_values,
    layout_problem,
    merge,
)
from conformance.judge import FAIL, NOT_APPLICABLE, PASS, judge

INT = {
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float8_e4m3fn: torch.uint8,
    torch.uint8: torch.uint8,
}
DTYPES = list(INT)


def tensor(seed: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 4, 5)) -> torch.Tensor:
    """Finite numbers of every exponent, spread over all codes where the format is small."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.uint8, torch.float8_e4m3fn):
        codes = torch.randint(0, 120, shape, dtype=torch.uint8, generator=generator)
        return codes.view(dtype)
    return (torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-20, 20, shape, generator=generator)).to(
        dtype
    )


def planted(want: torch.Tensor, at: tuple[int, ...], change: int) -> torch.Tensor:
    """A copy whose code at one place is ``change`` higher."""
    got = want.clone()
    got.view(INT[want.dtype])[at] += change
    return got


places = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 4))


@given(st.integers(0, 10**6), st.sampled_from(DTYPES), places, st.integers(1, 5))
def test_one_element_off_by_ulps_is_named_at_its_place(
    seed: int, dtype: torch.dtype, at: tuple[int, int, int], ulps: int
) -> None:
    want = tensor(seed, dtype)
    got = planted(want, at, ulps)
    comparison = compare_bits(got, want, "z")
    assert (comparison.compared, comparison.mismatched, comparison.problem) == (60, 1, "")
    bad = comparison.first_bad
    assert bad is not None and bad.at == at and bad.tensor == "z"
    digits = 2 * want.element_size()
    assert int(bad.got, 16) - int(bad.want, 16) == ulps and len(bad.got) == len(bad.want) == 2 + digits
    assert comparison.ulp_max == ulps
    edge = 1 << (ulps.bit_length() - 1)
    assert comparison.ulp_histogram == {0: 59, edge: 1}
    assert judge(comparison, "bits", expected=60).status == FAIL


@given(st.integers(0, 10**6), st.sampled_from(DTYPES))
def test_equal_bits_pass_with_no_error_at_all(seed: int, dtype: torch.dtype) -> None:
    want = tensor(seed, dtype)
    comparison = compare_bits(want.clone(), want, "z")
    assert comparison.mismatched == 0 and comparison.first_bad is None
    assert comparison.rms_rel_error == 0 and comparison.sqnr_db == math.inf and comparison.ulp_max == 0
    assert abs(comparison.calc_diff) < 2.0**-50
    assert judge(comparison, "bits", expected=60).status == PASS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_nan_equals_nan_of_another_payload_and_nothing_else(dtype: torch.dtype) -> None:
    want = tensor(1, dtype)
    patterns = {
        torch.bfloat16: (0x7FC0, -0x0001),
        torch.float32: (0x7FC00000, -0x00000001),
        torch.float8_e4m3fn: (0x7F, 0xFF),
    }
    quiet, other = patterns[dtype]
    got, expecting = want.clone(), want.clone()
    got.view(INT[dtype])[1, 2, 3] = quiet
    comparison = compare_bits(got, want, "z")
    assert comparison.mismatched == 1 and comparison.first_bad is not None
    assert comparison.first_bad.at == (1, 2, 3) and math.isnan(comparison.first_bad.got_value)
    expecting.view(INT[dtype])[1, 2, 3] = other
    assert torch.isnan(expecting.float()).any()
    assert compare_bits(got, expecting, "z").mismatched == 0
    assert compare_bits(want, expecting, "z").mismatched == 1


def test_scale_byte_255_is_nan_and_signed_zeros_differ() -> None:
    nan = torch.tensor([255, 254], dtype=torch.uint8)
    assert compare_bits(nan, nan.clone(), "s").mismatched == 0
    assert compare_bits(nan, torch.tensor([254, 254], dtype=torch.uint8), "s").mismatched == 1
    zeros = torch.tensor([0.0, -0.0]).bfloat16()
    flipped = compare_bits(zeros, -zeros, "z")
    assert flipped.mismatched == 2 and flipped.ulp_max == 0


def test_transposed_output_is_found_and_named() -> None:
    square = tensor(3, torch.bfloat16, (6, 6))
    comparison = compare_bits(square.T, square, "z")
    assert comparison.mismatched == 30 and comparison.first_bad is not None and comparison.first_bad.at == (0, 1)
    oblong = tensor(3, torch.bfloat16, (6, 4))
    assert compare_bits(oblong.T, oblong, "z").problem == "z has shape [4, 6]; expected [6, 4]"


def test_wrong_shape_dtype_and_strides_are_named_not_raised() -> None:
    want = tensor(4, torch.bfloat16)
    assert "dtype torch.float32" in compare_bits(want.float(), want, "z").problem
    assert compare_bits(want[:2], want, "z").problem == "z has shape [2, 4, 5]; expected [3, 4, 5]"
    values = compare_values(want[:, :3], want.double(), want.double().abs(), "z")
    assert "shape [3, 3, 5]" in values.problem and values.compared == 0
    assert "dtype torch.int16" in compare_values(want.view(torch.int16), want.double(), want.double(), "z").problem
    assert layout_problem("z", None, want) == "z is NoneType; expected a tensor"
    strided = want.transpose(0, 1).contiguous().transpose(0, 1)
    assert layout_problem("z", strided, want) == ""
    assert "strides [5, 15, 1]; expected [20, 5, 1]" in layout_problem("z", strided, want, strides=True)
    # The stride of a dim of one element never enters an address.
    assert layout_problem("z", want[:1].as_strided((1, 4, 5), (99, 5, 1)), want[:1], strides=True) == ""
    for problem in (compare_bits(want[:2], want, "z"), compare_bits(want.float(), want, "z")):
        assert judge(problem, "bits", expected=60).status == FAIL


@given(st.integers(0, 10**6), places, st.floats(1.001, 1e6))
def test_margin_above_one_is_named_and_one_itself_passes(seed: int, at: tuple[int, int, int], factor: float) -> None:
    want = tensor(seed, torch.float32).double()
    bound = want.abs() * 2.0**-8 + 2.0**-30
    got = want.clone()
    got[at] += float(bound[at]) * factor
    comparison = compare_values(got.float(), want, torch.full_like(want, 1e30), "z")
    assert comparison.mismatched == 0
    exact = (got.float().double() - want).abs()  # a bound that the error just meets
    assert compare_values(got.float(), want, exact, "z").margin_max == 1
    tight = compare_values(got.float(), want, torch.where(exact == exact.max(), exact / 2, exact), "z")
    assert tight.mismatched == 1 and tight.margin_max == 2 and tight.first_bad is not None
    assert tight.first_bad.at == at and tight.first_bad.margin == 2
    assert judge(tight, "bound", expected=60).status == FAIL
    assert f"z[{', '.join(map(str, at))}]" in judge(tight, "bound", expected=60).reason


def test_error_one_ulp_beyond_its_bound_is_mismatched() -> None:
    got, bound = torch.tensor([2.0, 2.0]), torch.tensor([2.0, 2.0 - 2.0**-52], dtype=torch.float64)
    comparison = compare_values(got, torch.zeros(2).double(), bound, "z")
    assert comparison.mismatched == 1 and comparison.first_bad is not None and comparison.first_bad.at == (1,)


def test_nothing_that_is_not_finite_is_within_a_bound() -> None:
    want = tensor(5, torch.float32).double()
    wide = torch.full_like(want, 1e30)
    for poison in (math.nan, math.inf, -math.inf):
        got = want.float()
        got[2, 0, 1] = poison
        comparison = compare_values(got, want, wide, "z")
        assert comparison.mismatched == 1 and comparison.margin_max == math.inf
        assert comparison.first_bad is not None and comparison.first_bad.at == (2, 0, 1)
        assert not math.isnan(comparison.margin_p50)
        bad_want = want.clone()
        bad_want[0, 0, 0] = poison
        assert compare_values(want.float(), bad_want, wide, "z").mismatched == 1
        bad_bound = wide.clone()
        bad_bound[0, 1, 0] = poison
        shifted = (want + 1e-3).float()
        assert compare_values(shifted, want, bad_bound, "z").mismatched == 1
    expected = want.clone()
    expected[1, 1, 1] = math.nan
    got = expected.float()
    assert compare_values(got, expected, wide, "z", nan_expected=True).mismatched == 0
    assert compare_values(want.float(), expected, wide, "z", nan_expected=True).mismatched == 1


def test_zero_bound_demands_equality() -> None:
    want = tensor(6, torch.bfloat16)
    zero = torch.zeros(want.shape, dtype=torch.float64)
    assert compare_values(want, want.double(), zero, "z").margin_max == 0
    assert compare_values(planted(want, (0, 0, 0), 1), want.double(), zero, "z").margin_max == math.inf


def test_metrics_are_those_of_their_definitions() -> None:
    want = torch.tensor([1.0, -2.0, 3.0, 4.0], dtype=torch.float64)
    got = torch.tensor([0.5, -1.0, 3.0, 4.0])
    comparison = compare_values(got, want, torch.ones(4, dtype=torch.float64) * 2, "z")
    assert comparison.rms_rel_error == pytest.approx(math.sqrt(1.25 / 30))
    assert comparison.signed_bias == pytest.approx(-1.5 / 10)  # toward zero, although one error is positive
    assert comparison.calc_diff == pytest.approx(1 - 2 * 27.5 / (30 + 26.25))
    assert comparison.sqnr_db == pytest.approx(10 * math.log10(30 / 1.25))
    assert (comparison.margin_max, comparison.margin_p50, comparison.margin_p999) == (0.5, 0.25, 0.5)
    assert comparison.ulp_max == 2**23


def test_merged_parts_count_together_and_keep_the_first_fault() -> None:
    good, scales = tensor(7, torch.float8_e4m3fn), tensor(7, torch.uint8, (2, 2))
    parts = [compare_bits(good, good, "codes"), compare_bits(planted(scales, (1, 1), 1), scales, "scales")]
    both = merge(parts)
    assert (both.compared, both.mismatched) == (64, 1)
    assert both.first_bad is not None and both.first_bad.tensor == "scales" and both.first_bad.at == (1, 1)
    assert merge([parts[0], Comparison(problem="scales is NoneType")]).problem == "scales is NoneType"


def test_first_bad_is_json_and_reads_as_one_line() -> None:
    bad = BadElement("z", (1, 2), "0x7fc0", "0x3f80", math.nan, 1.0, 0.25, math.inf)
    assert json.loads(bad.to_json()) == {
        "tensor": "z",
        "at": [1, 2],
        "got": "0x7fc0",
        "want": "0x3f80",
        "want_value": 1.0,
        "bound": 0.25,
        "margin": "inf",
    }
    assert str(bad) == "z[1, 2]: got 0x7fc0 (nan), want 0x3f80 (1), bound 0.25, margin inf"


def outputs() -> dict[str, torch.Tensor]:
    """Outputs that never came from the computation, for a wanted tensor of `tensor(8)`."""
    want = tensor(8, torch.bfloat16)
    return {
        "all zero": torch.zeros_like(want),
        "constant": torch.full_like(want, 1.0),
        "NaN": torch.full_like(want, math.nan),
        "stale": tensor(9, torch.bfloat16),
        "empty": want[:0],
        "missing token": want[:2],
    }


@pytest.mark.parametrize("kind", outputs())
def test_judge_fails_what_was_not_computed(kind: str) -> None:
    got, want = outputs()[kind], tensor(8, torch.bfloat16)
    bound = want.double().abs() * 2.0**-8
    for oracle in ("bound", "format"):
        assert judge(compare_values(got, want.double(), bound, "z"), oracle, expected=60).status == FAIL
    for oracle in ("bits", "attainable"):
        assert judge(compare_bits(got, want, "z"), oracle, expected=60).status == FAIL


def test_nothing_compared_fails_and_a_case_without_tokens_is_no_pass() -> None:
    for oracle in ("bits", "attainable", "bound", "format"):
        assert judge(Comparison(), oracle, expected=60).reason == "nothing compared of 60 elements"
        assert judge(Comparison(compared=59, margin_max=0.0), oracle, expected=60).status == FAIL
        assert judge(Comparison(), oracle, expected=0).status == NOT_APPLICABLE
    empty = torch.zeros((0, 4), dtype=torch.bfloat16)
    assert judge(compare_bits(empty.float(), empty, "z"), "bits", expected=0).status == FAIL


def test_judge_fails_a_margin_that_is_missing_or_nan() -> None:
    good = Comparison(compared=4, margin_max=0.5, margin_p999=0.5, margin_p50=0.1)
    assert judge(good, "bound", expected=4).status == PASS
    for margin in (math.nan, 1.0000001, math.inf):
        assert judge(dataclasses.replace(good, margin_max=margin), "bound", expected=4).status == FAIL
    # A dilution: 3,999 right elements do not outvote one.
    margins = np.zeros(4000)
    margins[7] = 1.5
    want = torch.zeros(4000, dtype=torch.float64)
    comparison = compare_values(torch.from_numpy(margins).float(), want, torch.ones_like(want), "z")
    assert comparison.margin_p999 == 0 and judge(comparison, "bound", expected=4000).status == FAIL


def test_unknown_oracle_and_size_are_refused() -> None:
    with pytest.raises(ValueError, match="oracle='bit' is unknown; known oracles: bits"):
        judge(Comparison(), "bit", expected=1)
    with pytest.raises(ValueError, match="expected=-1"):
        judge(Comparison(), "bits", expected=-1)
    with pytest.raises(TypeError, match=r"want of z has dtype torch\.float32"):
        compare_values(torch.zeros(1), torch.zeros(1), torch.zeros(1), "z")
    with pytest.raises(ValueError, match="bound of z has shape"):
        compare_values(torch.zeros(1), torch.zeros(1).double(), torch.zeros(2).double(), "z")
