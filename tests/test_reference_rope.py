"""reference.rope against complex arithmetic, exact integers and a 60-digit table."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import Yarn, cos_sin, inverse_rope

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_each_device = pytest.mark.parametrize("device", DEVICES)
few = settings(deadline=None, max_examples=40)
U = 2.0**-53  # unit roundoff of float64
small = st.integers(-1000, 1000)
V4_YARN = Yarn(factor=16, original_max_position=65536, beta_fast=32, beta_slow=1)
V4_COMPRESSED: dict = {"theta": 160000.0, "yarn": V4_YARN}
KINDS: dict[str, dict] = {
    "plain": {"theta": 10000.0},
    "yarn": V4_COMPRESSED,
    "yarn of other numbers": {"theta": 500.0, "yarn": Yarn(4, 300, 9, 2)},
}


def forward(values: list[float], row: list[float]) -> list[float]:
    """Rotation by plus the angle, as complex numbers; row is cos || sin."""
    half = len(row) // 2
    out: list[float] = []
    for pair in range(half):
        turned = complex(values[2 * pair], values[2 * pair + 1]) * complex(row[pair], row[half + pair])
        out += [turned.real, turned.imag]
    return out


def squares(values: list[float]) -> list[float]:
    """Squared norm of each pair."""
    return [a**2 + b**2 for a, b in zip(values[::2], values[1::2], strict=True)]


def integers(data: st.DataObject, *shape: int) -> torch.Tensor:
    drawn = data.draw(st.lists(small, min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(drawn, dtype=torch.float64).view(shape)


@few
@given(data=st.data(), pairs=st.integers(1, 4), plain=st.integers(0, 3), heads=st.integers(1, 2))
def test_it_is_the_inverse_of_the_forward_rotation(data, pairs, plain, heads) -> None:
    """Integers, so exact: forward(inverse(o)) is o times cos^2 + sin^2, whatever the table holds."""
    width, tokens, length = 2 * pairs, 3, 5
    o, table = integers(data, tokens, heads, plain + width), integers(data, length, width)
    positions = torch.tensor([data.draw(st.integers(0, length - 1)) for _ in range(tokens)])
    turned = inverse_rope(o, positions, table, rope_dim=width)
    for t in range(tokens):
        row = table[positions[t]].tolist()
        stretch = [row[i] ** 2 + row[pairs + i] ** 2 for i in range(pairs) for _ in (0, 1)]
        for h in range(heads):
            before, after = o[t, h].tolist(), turned[t, h].tolist()
            assert after[:plain] == before[:plain]
            expected = [a * b for a, b in zip(before[plain:], stretch, strict=True)]
            assert forward(after[plain:], row) == expected
            scaled = [a * b for a, b in zip(squares(before[plain:]), stretch[::2], strict=True)]
            assert squares(after[plain:]) == scaled


@few
@given(data=st.data())
def test_each_output_is_within_two_roundings_of_the_exact_value(data) -> None:
    """|error| <= gamma_2 * (|x cos| + |x' sin|), gamma_2 = 2u/(1-2u): two products, one sum.

    No underflow: the inputs are FP32, so a product is 0 or at least 2^-298.
    """
    lanes = st.floats(width=32, allow_nan=False, allow_infinity=False)
    even, odd, cos, sin = (data.draw(lanes) for _ in range(4))
    o, table = torch.tensor([[[even, odd]], [[cos, sin]]], dtype=torch.float32)
    got = inverse_rope(o, torch.tensor([0]), table, rope_dim=2)[0].tolist()
    e, o_, c, s = map(Fraction, (even, odd, cos, sin))
    gamma_2 = Fraction(2, 2**53 - 2)
    for value, first, second in ((got[0], e * c, o_ * s), (got[1], o_ * c, -e * s)):
        assert abs(Fraction(value) - (first + second)) <= gamma_2 * (abs(first) + abs(second))


@pytest.mark.parametrize("kind", KINDS)
def test_with_its_own_table_the_forward_rotation_brings_back_the_input(kind) -> None:
    positions = torch.tensor([0, 1, 255, 4097, 65537, 2**20 - 1])
    table = cos_sin(positions, **KINDS[kind])
    o = torch.randn(6, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turned = inverse_rope(o, torch.arange(6), table)
    for t in range(6):
        back = forward(turned[t].tolist(), table[t].tolist())
        for i, (now, was) in enumerate(zip(back, o[t].tolist(), strict=True)):
            # A rotation errs by at most gamma_2 |pair| a lane (Cauchy), so by 2 sqrt(2) u |pair| as a vector.
            # cos and sin are within an ulp, u below 1, hence |cos^2 + sin^2 - 1| <= 2 sqrt(2) u. In one lane
            # first rotation + second + that = (2 sqrt(2) + 2 + 2 sqrt(2)) u < 8u; 9u covers second order.
            pair = math.hypot(*o[t, i // 2 * 2 : i // 2 * 2 + 2].tolist())
            assert abs(now - was) <= 9 * U * pair


@on_each_device
def test_one_hot_lanes_show_pairing_and_sign(device: str) -> None:
    """Lane 2i meets lane 2i+1 and no other: even' = even cos + odd sin, odd' = odd cos - even sin."""
    width, head = 64, 512
    cosines, sines = [float(100 + i) for i in range(32)], [float(200 + i) for i in range(32)]
    table = torch.tensor([[0.0] * width, cosines + sines], dtype=torch.float32, device=device)
    one_hot = torch.eye(head, dtype=torch.bfloat16, device=device)[:, None]  # [token = lane, 1 head, 512]
    got = inverse_rope(one_hot, torch.ones(head, dtype=torch.int64, device=device), table)
    expected = torch.eye(head, dtype=torch.float64)[:, None]
    for i in range(32):
        even, odd = 448 + 2 * i, 449 + 2 * i
        expected[even, 0, even], expected[even, 0, odd] = cosines[i], -sines[i]
        expected[odd, 0, even], expected[odd, 0, odd] = sines[i], cosines[i]
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_position_0_is_the_identity(kind) -> None:
    o = torch.randn(3, 2, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    table = cos_sin(torch.arange(2), **KINDS[kind])
    assert torch.equal(inverse_rope(o, torch.zeros(3, dtype=torch.int64), table), o.double())
    assert not torch.equal(inverse_rope(o, torch.ones(3, dtype=torch.int64), table), o.double())


def test_values_before_the_last_rope_dim_keep_their_bits() -> None:
    o = torch.randn(2, 3, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    o[0, 0, :5] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 2.0**-1074])
    got = inverse_rope(o, torch.tensor([1, 2]), cos_sin(torch.arange(3)))
    bits, expected = (x[..., :448].contiguous().view(torch.int64) for x in (got, o))
    assert torch.equal(bits, expected)
    assert not (got[..., 448:] == o[..., 448:]).any()


def test_nan_spoils_its_pair_and_nothing_else() -> None:
    o = torch.ones(1, 512)
    o[0, 451] = math.nan
    got = inverse_rope(o, torch.tensor([1]), cos_sin(torch.arange(2)))
    assert got.isnan().nonzero()[:, 1].tolist() == [450, 451]


def exact_angle(position: int, pair: int, theta: float, yarn: Yarn | None) -> mpmath.mpf:
    """The angle by the published formula, in 60 digits."""
    plain = mpmath.power(theta, -mpmath.mpf(pair) / 32)
    if yarn is None:
        return position * plain
    low, high = (
        32 * mpmath.log(yarn.original_max_position / (turns * 2 * mpmath.pi)) / mpmath.log(theta)
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    low, high = mpmath.floor(low), mpmath.ceil(high)
    keep = 1 - min(max((pair - low) / (high - low), 0), 1)
    return position * (plain / yarn.factor * (1 - keep) + plain * keep)


@on_each_device
@pytest.mark.parametrize("kind", KINDS)
def test_the_table_is_the_formula(kind, device: str) -> None:
    """|error| <= 16u * plain angle (the docstring's promise) + 4u (cos and sin: four ulp just below 1)."""
    theta, yarn = KINDS[kind]["theta"], KINDS[kind].get("yarn")
    positions = [0, 1, 2, 127, 4096, 65535, 65537, 2**20 - 1, -3]
    table = cos_sin(torch.tensor(positions, device=device), **KINDS[kind])
    assert table.dtype == torch.float64 and table.shape == (9, 64)
    with mpmath.workdps(60):
        for row, position in zip(table.tolist(), positions, strict=True):
            for pair in range(32):
                angle = exact_angle(position, pair, theta, yarn)
                slack = 16 * U * abs(position) * theta ** (-pair / 32) + 4 * U
                assert abs(row[pair] - mpmath.cos(angle)) <= slack
                assert abs(row[32 + pair] - mpmath.sin(angle)) <= slack


def test_v4_yarn_ramps_over_pairs_15_to_25_and_divides_by_16_after() -> None:
    assert Yarn() == V4_YARN
    assert Yarn().ramp(64, 160000.0) == (15, 25)
    one, sixteen = cos_sin(torch.tensor([1, 16]), **V4_COMPRESSED)[:, 32:]  # sines
    plain = cos_sin(torch.tensor([1]), theta=160000.0)[0, 32:]
    assert torch.equal(one[:16], plain[:16]) and torch.equal(sixteen[25:], plain[25:])
    assert (one[16:] < plain[16:]).all() and (sixteen[:25] != plain[:25]).all()


def test_yarn_of_factor_1_is_the_plain_table() -> None:
    positions = torch.tensor([1, 77, 2**20 - 1])
    assert torch.equal(cos_sin(positions, yarn=Yarn(factor=1.0)), cos_sin(positions))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_narrow_table_is_taken_as_it_is(dtype) -> None:
    table = cos_sin(torch.arange(9)).to(dtype)
    o = torch.randn(4, 2, 70, generator=torch.Generator().manual_seed(3)).bfloat16()
    positions = torch.tensor([8, 0, 3, 3])
    got = inverse_rope(o, positions, table)
    assert got.dtype == torch.float64
    assert torch.equal(got, inverse_rope(o.double(), positions, table.double()))
    assert not torch.equal(got, inverse_rope(o, positions, cos_sin(torch.arange(9))))


@on_each_device
def test_strided_inputs_are_read_and_padding_is_not(device: str) -> None:
    """The served o is the first heads of a padded buffer; the table may be a slice of a wider one."""
    buffer = torch.full((5, 8, 512), math.nan, dtype=torch.bfloat16, device=device)
    buffer[:, :3] = torch.randn(5, 3, 512, generator=torch.Generator().manual_seed(2)).to(device)
    wide = torch.full((7, 128), math.nan, device=device)
    wide[:, ::2] = cos_sin(torch.arange(7, device=device)).float()
    spread = torch.tensor([6, -9, 0, -9, 2, -9, 2, -9, 5, -9], device=device)
    o, table, positions = buffer[:, :3], wide[:, ::2], spread[::2]
    got = inverse_rope(o, positions, table)
    assert not got.isnan().any() and got.is_contiguous()
    assert torch.equal(got, inverse_rope(o.contiguous(), positions.contiguous(), table.contiguous()))
    for t, position in enumerate(positions.tolist()):  # each token meets its own row
        alone = inverse_rope(o[t : t + 1], torch.tensor([position], device=device), table)
        assert torch.equal(got[t : t + 1], alone)


@on_each_device
def test_zero_tokens(device: str) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert cos_sin(none, **V4_COMPRESSED).shape == (0, 64)
    for table in (torch.ones(3, 64, device=device), torch.ones(0, 64, device=device)):
        got = inverse_rope(torch.empty(0, 4, 512, dtype=torch.bfloat16, device=device), none, table)
        assert got.shape == (0, 4, 512) and got.dtype == torch.float64


def test_inputs_are_not_modified_nor_returned() -> None:
    o = torch.randn(2, 3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    positions, table = torch.tensor([1, 2]), cos_sin(torch.arange(3))
    before = o.clone(), positions.clone(), table.clone()
    inverse_rope(o, positions, table).zero_()
    assert all(torch.equal(a, b) for a, b in zip((o, positions, table), before, strict=True))


GOOD_O, P, TABLE = torch.zeros(2, 3, 512), torch.tensor([0, 1]), torch.ones(2, 64)


@pytest.mark.parametrize(
    "o, positions, table, rope_dim, words",
    [
        (GOOD_O, torch.tensor([0, 2]), TABLE, 64, "position 2 is outside"),
        (GOOD_O, torch.tensor([-1, 0]), TABLE, 64, "position -1 is outside"),
        (GOOD_O, P, TABLE[:0], 64, "position 0 is outside"),
        (GOOD_O, torch.tensor([0, 1, 1]), TABLE, 64, "3 positions for 2 tokens"),
        (GOOD_O, torch.tensor([0]), TABLE, 64, "1 positions for 2 tokens"),
        (GOOD_O, P[:, None], TABLE, 64, r"positions must be int64 \[T\]"),
        (GOOD_O, P.float(), TABLE, 64, "positions must be int64"),
        (GOOD_O, P.bool(), TABLE, 64, "positions must be int64"),
        (GOOD_O, P, TABLE[:, :32], 64, "cos_sin_cache must be"),
        (GOOD_O, P, TABLE[None], 64, "cos_sin_cache must be"),
        (GOOD_O, P, TABLE, 32, "cos_sin_cache must be"),
        (GOOD_O[..., :63], P, TABLE, 64, "D >= rope_dim = 64"),
        (GOOD_O[0, 0], P, TABLE, 64, "o must be"),
        (GOOD_O, P, TABLE[:, :63], 63, "rope_dim = 63"),
        (GOOD_O, P, TABLE[:, :0], 0, "rope_dim = 0"),
        (GOOD_O, P, TABLE, -64, "rope_dim = -64"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(o, positions, table, rope_dim, words) -> None:
    inverse_rope(GOOD_O, P, TABLE)
    with pytest.raises(ValueError, match=words):
        inverse_rope(o, positions, table, rope_dim=rope_dim)


def test_codes_are_refused_as_values() -> None:
    for bad in (torch.uint8, torch.int64, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=r"^o is"):
            inverse_rope(GOOD_O.to(bad), P, TABLE)
        with pytest.raises(TypeError, match=r"^cos_sin_cache is"):
            inverse_rope(GOOD_O, P, TABLE.to(bad))


def test_table_parameters_out_of_range_are_refused() -> None:
    for bad in ({"theta": 1.0}, {"theta": math.nan}, {"rope_dim": 7}, {"rope_dim": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            cos_sin(P, **bad)
    with pytest.raises(ValueError, match="positions"):
        cos_sin(P.float())
    for bad in (
        {"factor": 0.0},
        {"factor": math.nan},
        {"beta_fast": 0.5},
        {"beta_slow": 0.0},
        {"original_max_position": 0},
    ):
        with pytest.raises(ValueError, match="positive"):
            Yarn(**bad)
