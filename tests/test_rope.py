"""FP32 cos/sin tables of both layer kinds against float64 ones written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oproj.rope import ROPES, Rope, correction_range, cos_sin_cache, cos_sin_rows, get_rope, inverse_frequencies

KINDS = ["plain", "yarn"]
THETA = {"plain": 10_000.0, "yarn": 160_000.0}
EDGES = [0, 1, 2, 127, 128, 129, 255, 256, 257, 4095, 4096, 4097, 65_535, 65_536, 65_537, 2**20 - 2, 2**20 - 1]
positions = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**20 - 1))


def unscaled(kind: str) -> np.ndarray:
    """theta^(-2i/64) in float64."""
    return THETA[kind] ** (-np.arange(32) / 32)


def frequencies(kind: str) -> np.ndarray:
    """Inverse frequencies in float64: plain, or YaRN factor 16 with its ramp over pairs 15 to 25."""
    plain = unscaled(kind)
    if kind == "plain":
        return plain
    keep = 1 - np.clip((np.arange(32) - 15) / 10, 0, 1)
    return plain / 16 * (1 - keep) + plain * keep


def slack(kind: str, at: np.ndarray) -> np.ndarray:
    """How far an FP32 table entry may be from the float64 one, for positions ``at``; u = 2^-24.

    f = theta^(-2i/64) is rounded as a power and as its reciprocal: |f^ - f| <= 2u f. For YaRN (f/16 is exact) the
    ramp r and 1 - r add at most u each, r again u, and each product and the sum one more rounding:
        |w^ - w| <= u ((2 + 1 + 2) f/16 + (2 + 1 + 1) f + w) <= 5.4 u f
    The angle position * w is rounded once more, so |angle^ - angle| <= 6.4 u f position (3u for plain), to first order
    in u; with a factor to spare it is 8 u f position = 2^-21 f position, at most 2^-21 a position. The cosine is
    Lipschitz with constant 1, and its own rounding is at most 2^-25: |c^ - c| <= 2^-21 f position + 2^-24.
    """
    return at[:, None] * unscaled(kind) * 2.0**-21 + 2.0**-24


@pytest.mark.parametrize("kind", KINDS)
@given(drawn=st.lists(positions, min_size=1, max_size=40))
def test_rows_against_float64(kind: str, drawn: list[int]) -> None:
    at = np.array(drawn + EDGES)
    rows = cos_sin_rows(kind, at).astype(np.float64)
    angle = at[:, None] * frequencies(kind)
    assert rows.shape == (len(at), 64)
    assert (np.abs(rows[:, :32] - np.cos(angle)) <= slack(kind, at)).all()
    assert (np.abs(rows[:, 32:] - np.sin(angle)) <= slack(kind, at)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_slack_is_tight_enough_to_tell_frequencies_apart(kind: str) -> None:
    """Another theta, no ramp, a ramp moved by one pair, and positions off by one all leave the slack."""
    at = np.arange(4096)
    rows = cos_sin_rows(kind, at).astype(np.float64)
    moved = unscaled(kind) * np.where(np.arange(32) < 16, 1, 1 / 16)
    for wrong, shift in ((unscaled(kind) ** 1.01, 0), (moved, 0), (frequencies(kind), 1)):
        angle = (at + shift)[:, None] * wrong
        assert not (np.abs(rows[:, :32] - np.cos(angle)) <= slack(kind, at)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_inverse_frequencies_are_fp32_and_close(kind: str) -> None:
    found = inverse_frequencies(kind)
    assert found.dtype == np.float32 and found.shape == (32,)
    assert (np.abs(found.astype(np.float64) - frequencies(kind)) <= 5.4 * 2.0**-24 * 1.001 * unscaled(kind)).all()


def test_the_ramp_runs_over_pairs_15_to_25() -> None:
    assert correction_range(get_rope("yarn"), 64) == (15, 25)
    ratio = inverse_frequencies("yarn") / inverse_frequencies(Rope("unscaled", 160_000.0))
    assert (ratio[:16] == 1).all() and (ratio[25:] == 1 / 16).all()
    assert (np.diff(ratio[15:26]) < 0).all()


def test_the_two_layer_kinds_are_those_of_the_model() -> None:
    assert set(ROPES) == set(KINDS)
    plain, yarn = get_rope("plain"), get_rope("yarn")
    assert (plain.theta, plain.factor) == (10_000.0, 1.0)
    assert (yarn.theta, yarn.factor, yarn.original_max_position) == (160_000.0, 16.0, 65_536)
    assert (yarn.beta_fast, yarn.beta_slow) == (32.0, 1.0)
    assert get_rope(yarn) is yarn


@pytest.mark.parametrize("kind", KINDS)
@given(drawn=st.lists(positions, min_size=1, max_size=40))
def test_every_pair_lies_on_the_unit_circle(kind: str, drawn: list[int]) -> None:
    """Amplitude 1: an mscale of 1.277, or a table in BF16, leaves 2^-22."""
    rows = cos_sin_rows(kind, np.array(drawn)).astype(np.float64)
    assert (np.abs(rows[:, :32] ** 2 + rows[:, 32:] ** 2 - 1) <= 2.0**-22).all()


@pytest.mark.parametrize("kind", KINDS)
def test_position_zero_does_not_rotate(kind: str) -> None:
    row = cos_sin_rows(kind, np.array([0]))
    assert (row[0, :32] == 1).all()
    assert not row[0, 32:].view(np.int32).any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_holds_the_rows_across_the_pieces_it_is_built_from(kind: str) -> None:
    length = 65_536 + 130
    table = cos_sin_cache(kind, length)
    assert table.shape == (length, 64) and table.dtype == torch.float32 and table.is_contiguous()
    at = np.array([*range(300), *range(65_400, length)])
    assert np.array_equal(table.numpy()[at].view(np.int32), cos_sin_rows(kind, at).view(np.int32))


def test_a_table_is_shared_however_its_kind_is_named() -> None:
    assert cos_sin_cache("yarn", 77) is cos_sin_cache(get_rope("yarn"), max_position=77, rope_dim=64)


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_dtype_does_not_touch_the_table(kind: str) -> None:
    expected = cos_sin_cache(kind, 5003)
    torch.set_default_dtype(torch.bfloat16)
    try:
        table = cos_sin_cache(kind, 5004)  # another length: built anew
    finally:
        torch.set_default_dtype(torch.float32)
    assert table.dtype == torch.float32
    assert torch.equal(table[:5003].view(torch.int32), expected.view(torch.int32))


def test_other_widths_have_their_own_frequencies() -> None:
    rows = cos_sin_rows("plain", np.array([1]), rope_dim=8).astype(np.float64)
    expected = [1.0, 0.1, 0.01, 0.001]
    for i, frequency in enumerate(expected):
        assert abs(rows[0, i] - math.cos(frequency)) <= 2.0**-21
        assert abs(rows[0, 4 + i] - math.sin(frequency)) <= 2.0**-21


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    for call in (get_rope, inverse_frequencies, lambda kind: cos_sin_cache(kind, 8)):
        with pytest.raises(ValueError, match="rope kind='linear' is unknown; known kinds: plain, yarn"):
            call("linear")


@pytest.mark.parametrize("length, width", [(0, 64), (-1, 64), (8, 0), (8, 63), (8, -2)])
def test_impossible_sizes_are_refused(length: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"max_position={length} must be positive and rope_dim={width} even"):
        cos_sin_cache("plain", length, width)
