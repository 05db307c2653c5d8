"""Inputs of a Case: the same bits everywhere, a rank's slice of the whole, and each family as it says it is."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.case import POSITION_FAMILIES, Case
from conformance.families import FAMILIES
from conformance.families_aimed import TINY
from conformance.implementation import SoftwareImplementation
from conformance.inputs import Inputs, build, build_o, build_positions, build_wo_a, build_wo_b, move
from conformance.streams import Lanes, Stream, Tile, e4m3_value, nearest_e4m3
from oproj.activation import unpack_ue8m0
from oproj.rope import cos_sin_rows
from reference import dequantize, grouped_wo_a

# First 16 hex digits of the SHA-256 of o, positions, wo_a codes, wo_a scales and wo_b codes, one Case per family.
DIGESTS = [
    ("normal", "b03832092334c755", "ab25350e3e65efeb", "7dd3fc8a615978e0", "dfebfdaa7edaf5d7", "8c360f56d081f6ba"),
    ("wide", "971d495cd4cc0569", "254d1eefec3ca925", "09ea4fbac283fc08", "887d0e191a020a1d", "e12ea70649afe20a"),
    ("outlier", "890415e57993a736", "5297b67a1ec11dc0", "774333627dac40a7", "dfebfdaa7edaf5d7", "5f104710ff8d17f0"),
    ("positive", "c87f9dda8d0048d4", "e52409468232c488", "5272dde671504316", "23a92a391c7e2d82", "68d58014617383c4"),
    ("sparse", "ef6e9f75796b2729", "e46b0150b4b7d30c", "1e91dcc87d76f0d9", "dfebfdaa7edaf5d7", "47ae46cd60b32ed6"),
    ("boundary", "a0911f039bf235c4", "ab25350e3e65efeb", "cd9999f0a5b1f790", "23a92a391c7e2d82", "138eb1593eda8407"),
    ("exact", "a74ca66c054dec71", "c3e9454373d79d97", "4ae92a602165bac1", "6ac6c403867d491b", "1f5f705981eba9f9"),
    ("address", "96cd5c5ba504c6d9", "36a6cf51fa0cd446", "d8e5aa7f93bbb7a8", "5d50fb55d809511a", "dc77670c6617c641"),
    ("one-hot", "337fa6dd0224e29b", "1ad9c5e8dac99386", "8ef913641b00f3be", "216ebb24c620281a", "81119cab41e2a3d4"),
    ("two-lanes", "852d24fe3dabb36e", "4120b38d629c2ead", "b2a7fcb175f2c30b", "73e81ed4eb7a7a61", "de861d8b3356fb3d"),
    ("tiny", "ff6335f74b3b4390", "ab25350e3e65efeb", "84cf0b7a43338154", "dfebfdaa7edaf5d7", "c13c919f4bbe91f4"),
    ("half-way", "27538671c723bfaa", "6664ae5023b10e02", "38552ab92d7590a6", "23a92a391c7e2d82", "16a4712d8f64849b"),
    ("cancelling", "b7e7f3c604ddc25e", "339be4850afee456", "bab7ad2bfc77241e", "dfebfdaa7edaf5d7", "ecb7f3be64b7ac4e"),
    ("large", "8c0a3c86f9e543ca", "77f6f34e6a98d53b", "a07d71a30afe336a", "23a92a391c7e2d82", "2a6e14757cb9f374"),
]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(("family", "o", "positions", "codes", "scales", "wo_b"), DIGESTS)
def test_tensors_of_a_case_have_the_recorded_bits(
    family: str, o: str, positions: str, codes: str, scales: str, wo_b: str
) -> None:
    i = list(FAMILIES).index(family)
    case = Case(
        "sm100" if i % 2 else "sm90",
        "v4-flash",
        3,
        n_groups=2,
        tp_size=2,
        tp_rank=1,
        o_lora_rank=512,
        hidden_size=256,
        family=family,
        seed=i,
        padded_heads=9 * (i % 2),
        position_family=POSITION_FAMILIES[i % 5],
    )
    inputs = build(case)
    assert inputs.weights.wo_a.weight_scale_inv is not None
    built = (
        inputs.o,
        inputs.positions,
        inputs.weights.wo_a.weight,
        inputs.weights.wo_a.weight_scale_inv,
        inputs.weights.wo_b.weight,
    )
    assert tuple(map(digest, built)) == (o, positions, codes, scales, wo_b)


def small(family: str, tokens: int = 3, arch: str = "sm90", tp: int = 1, rank: int = 0, **fields: object) -> Case:
    sizes = {"n_groups": 4, "o_lora_rank": 128, "hidden_size": 128} | fields
    return Case(arch, "v4-flash", tokens, tp_size=tp, tp_rank=rank, family=family, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("arch", "tp"), [("sm90", 2), ("sm100", 4)])
def test_a_rank_holds_its_slice_of_the_whole(family: str, arch: str, tp: int) -> None:
    sizes = {"o_lora_rank": 512} if arch == "sm100" else {}  # packed scales of wo_b
    whole, rank = small(family, arch=arch, **sizes), tp - 1
    part = small(family, arch=arch, tp=tp, rank=rank, **sizes)
    groups, local = slice(rank * 4 // tp, 4), 4 // tp
    assert torch.equal(build_o(part), build_o(whole)[:, -local * 8 :])
    for mine, theirs in ((build_wo_a(part), build_wo_a(whole)),):
        assert torch.equal(mine.weight.view(torch.uint8), theirs.weight.view(torch.uint8)[groups])
        assert mine.weight_scale_inv is not None and theirs.weight_scale_inv is not None
        assert torch.equal(mine.weight_scale_inv, theirs.weight_scale_inv[groups])
    mine_b, whole_b = build_wo_b(small(family, tp=tp, rank=rank)), build_wo_b(small(family))
    assert torch.equal(mine_b.weight.view(torch.uint8), whole_b.weight.view(torch.uint8)[:, -local * 128 :])
    assert mine_b.weight_scale_inv is not None and whole_b.weight_scale_inv is not None
    assert torch.equal(mine_b.weight_scale_inv, whole_b.weight_scale_inv[:, -local:])


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_tokens_are_the_head_of_more(family: str) -> None:
    assert torch.equal(build_o(small(family, tokens=2)), build_o(small(family, tokens=7))[:2])


@given(st.floats(-448, 448, width=32))
def test_nearest_e4m3_is_the_library_cast(value: float) -> None:
    cast = torch.tensor([value]).to(torch.float8_e4m3fn).view(torch.uint8).item()
    assert nearest_e4m3(value) & 0x7F == cast & 0x7F
    assert e4m3_value(nearest_e4m3(value)) == torch.tensor([cast], dtype=torch.uint8).view(torch.float8_e4m3fn).item()


def test_streams_of_other_seeds_names_and_purposes_are_others() -> None:
    keys = [(seed, name, purpose) for seed in (0, 1) for name in ("o", "wo_a") for purpose in ("a", "b")]
    words = {tuple(Stream(seed, name).raw(purpose, 4)) for seed, name, purpose in keys}
    assert len(words) == len(keys)
    numbers = Stream(0, "o").below("x", 7, (1000,))
    assert sorted(set(numbers)) == list(range(7))


def test_bells_are_centred_and_have_their_width() -> None:
    bell = Stream(0, "o").bell("x", (100_000,))
    assert abs(float(bell.mean())) < 0.01
    assert abs(float(bell.std()) - 3**-0.5) < 0.01
    codes = Stream(0, "w").bell_codes("x", (100_001,))
    values = np.array([e4m3_value(int(code)) for code in codes])
    assert abs(values.mean()) < 2
    assert abs(values.std() - 147.2) < 2
    assert values.max() == 448
    assert np.array_equal(codes[:30], Stream(0, "w").bell_codes("x", (30,)))


def scale_exponents(case: Case) -> torch.Tensor:
    """Scale bytes [T, G, blocks] that the software quantiser gives a packed Case."""
    inputs = build(case)
    x = SoftwareImplementation(case.arch).quantize(
        inputs.o, inputs.positions, inputs.cos_sin_cache, config=inputs.config
    )
    return unpack_ue8m0(x.scale)


def test_wide_spreads_scales_where_normal_has_one_or_two() -> None:
    assert len(scale_exponents(small("normal", tokens=16, arch="sm100")).unique()) <= 3
    assert len(scale_exponents(small("wide", tokens=16, arch="sm100")).unique()) >= 13
    tile = Tile(0, 1024, 4096, (128, 128))
    assert len(np.unique(FAMILIES["normal"].weights(Stream(0, "w"), tile)[1])) == 1
    assert len(np.unique(FAMILIES["wide"].weights(Stream(0, "w"), tile)[1])) == 9


def test_address_scales_change_along_every_axis() -> None:
    scales = scale_exponents(small("address", tokens=6, arch="sm100")).to(torch.int64)
    for dim in range(3):
        shifted = scales.roll(1, dim)
        assert ((scales - shifted).abs() >= 1).float().mean() > 0.99
    exponents = [FAMILIES["address"].weights(Stream(0, "w"), Tile(g, 512, 512, (128, 128)))[1] for g in (0, 1)]
    assert (exponents[0] != exponents[1]).all()
    assert (exponents[0] != exponents[0].T)[~np.eye(4, dtype=bool)].all()


def test_exact_products_are_held_by_codes_and_by_bf16() -> None:
    inputs = build(small("exact", tokens=6, position_family="far"))
    x = SoftwareImplementation("sm90").quantize(inputs.o, inputs.positions, inputs.cos_sin_cache, config=inputs.config)
    values = dequantize(x.data, x.scale, block_k=128)
    assert torch.equal(values, inputs.o.double().view(values.shape))
    wo_a = inputs.weights.wo_a
    assert wo_a.weight_scale_inv is not None
    weights = dequantize(wo_a.weight, wo_a.weight_scale_inv, block_k=128, block_mn=128)
    assert set(weights.unique().tolist()) == {-1.0, 0.0, 1.0}
    assert len(wo_a.weight_scale_inv.unique()) == 9
    z = grouped_wo_a(values, weights)
    assert z.abs().max() > 8
    assert torch.equal(z, z.bfloat16().double())


def test_boundary_maxima_lie_within_20_ulps_of_448_times_a_power_of_two() -> None:
    lanes = Lanes(8, 0, 4096, 512, 64)
    peaks = np.abs(FAMILIES["boundary"].activations(Stream(0, "o"), lanes)).reshape(8, 32, 128).max(-1)
    significand = np.frexp(peaks)[0] * 256
    assert set((significand - 224).astype(int).ravel()) >= {-2, -1, 0, 1, 2, 20}
    assert ((significand >= 222) & (significand <= 244)).all()


def test_signs_zeros_and_outliers_are_what_their_families_say() -> None:
    lanes = Lanes(16, 0, 4096, 512, 64)
    made = {name: FAMILIES[name].activations(Stream(0, "o"), lanes) for name in ("positive", "sparse", "outlier")}
    assert (made["positive"] >= 0).all() and made["positive"].max() > 1
    dead = (made["sparse"].reshape(16, 32, 128) == 0).all(-1).mean()
    assert 0.4 < dead < 0.6
    peaks = np.abs(made["outlier"]).reshape(16, 32, 128).max(-1)
    assert set(peaks[peaks > 1]) == {7168.0}
    assert 0.4 < (peaks > 1).mean() < 0.6
    codes, _ = FAMILIES["positive"].weights(Stream(0, "w"), Tile(0, 128, 128, (128, 128)))
    assert (codes < 0x80).all()


def activations(family: str, tokens: int = 16) -> np.ndarray:
    return FAMILIES[family].activations(Stream(0, "o"), LANES).reshape(LANES.tokens, 8, 512)[:tokens]


LANES = Lanes(16, 0, 4096, 512, 64)


def test_one_hot_has_one_lane_a_token_and_two_lanes_two_a_head() -> None:
    one, two = activations("one-hot"), activations("two-lanes")
    assert ((one != 0).sum((1, 2)) == 1).all()
    rotated = (one[..., 448:] != 0).any((1, 2))
    assert rotated.any() and not rotated.all() and len({tuple(at) for at in np.argwhere(one)[:, 1:]}) > 10
    assert ((two != 0).sum(2) == 2).all() and set(np.abs(two[two != 0])) == {1.0, 1024.0}
    large, small_one = (np.argwhere(np.abs(two) == size)[:, 2] for size in (1024, 1))
    assert (large >= 448).all() and (small_one >= 448).any() and (small_one < 448).any()
    assert (large // 2 != small_one // 2).all()


def test_tiny_blocks_have_their_maxima_at_the_floors() -> None:
    values = torch.from_numpy(activations("tiny")).bfloat16().double()
    peaks = set(values.unflatten(-1, (4, 128)).abs().amax(-1).unique().tolist())
    assert peaks == {float(torch.tensor(value).bfloat16()) for value in TINY.tolist()}
    assert {0.0, 2.0**-133, 2.0**-126} < peaks
    assert sum(0.99e-10 < p < 1.01e-10 for p in peaks) == 3 and sum(0.99e-4 < p < 1.01e-4 for p in peaks) == 3


def test_half_way_lanes_lie_between_two_codes_after_the_blocks_own_scale() -> None:
    inputs = build(small("half-way", tokens=6, position_family="far"))
    x = SoftwareImplementation("sm90").quantize(inputs.o, inputs.positions, inputs.cos_sin_cache, config=inputs.config)
    scaled = inputs.o.double().reshape(6, 4, 32, 128) / x.scale.double().unsqueeze(-1)
    codes = x.data.view(torch.uint8).reshape(scaled.shape) & 0x7F
    table = torch.tensor([e4m3_value(code) for code in range(0x7F)], dtype=torch.float64)
    middle = (table[1:] + table[:-1]) / 2
    plain = ~torch.from_numpy(Lanes(1, 0, 4096, 512, 64).rotated).reshape(32, 128)
    live = scaled.abs()[:, :, plain]
    between = torch.isin(live, middle)
    assert bool((between | (live == 448)).all()) and between.double().mean() > 0.9
    assert set(middle.tolist()) == set(live[between].unique().tolist())
    assert bool((codes[:, :, plain][between] % 2 == 0).all())  # ties to even


def test_cancelling_pairs_leave_little_of_what_goes_in() -> None:
    def kept(family: str) -> float:
        inputs = build(small(family, tokens=4))
        wo_a = inputs.weights.wo_a
        assert wo_a.weight_scale_inv is not None
        weights = dequantize(wo_a.weight, wo_a.weight_scale_inv, block_k=128, block_mn=128)
        o = inputs.o.double().reshape(4, 4, 4096)
        return float(grouped_wo_a(o, weights).abs().sum() / grouped_wo_a(o.abs(), weights.abs()).sum())

    assert 0 < kept("cancelling") < 0.1 * kept("normal")


def test_large_blocks_reach_far_on_both_sides() -> None:
    exponents = np.frexp(np.abs(activations("large")).reshape(-1, 128).max(-1))[1]
    assert exponents.min() < -15 and exponents.max() > 90


def test_padded_heads_are_poisoned_and_not_part_of_o() -> None:
    padded, plain = build_o(small("normal", padded_heads=40)), build_o(small("normal"))
    assert torch.equal(padded, plain)
    assert padded.stride() == (40 * 512, 512, 1)
    buffer = padded.as_strided((3, 40, 512), (40 * 512, 512, 1))
    assert (buffer[:, 32:] > 1e30).all()


def positions(family: str, tokens: int, seed: int = 0) -> list[int]:
    return build_positions(small("sparse", tokens=tokens, position_family=family, seed=seed)).tolist()


def test_positions_are_what_their_families_say() -> None:
    assert positions("start", 4) == [0, 1, 2, 3]
    known = [0, 1, 255, 256, 257, 4095, 4096, 4097, 65535, 65536, 65537]
    assert positions("boundaries", 12) == [*known, 0]
    assert {positions("boundaries", 1, seed=seed)[0] for seed in range(len(known))} == set(known)
    assert all(0 <= p < 4096 for p in positions("small", 9))
    far = positions("far", 9)
    assert far[0] == 2**20 - 1 and min(far) >= 2**20 - 2**16
    shuffled = positions("shuffled", 40)
    assert len(set(shuffled)) < 40 and shuffled != sorted(shuffled)
    assert positions("far", 0) == []


@pytest.mark.parametrize("kind", ["plain", "yarn"])
def test_table_has_the_real_rows_and_zeros_where_no_token_is(kind: str) -> None:
    inputs = build(small("sparse", tokens=12, position_family="boundaries", rope_kind=kind))
    table, used = inputs.cos_sin_cache, np.unique(inputs.positions.numpy())
    assert torch.equal(table[used], torch.from_numpy(cos_sin_rows(kind, used)))
    assert int((table != 0).any(1).sum()) == len(used)


def test_fp32_checkpoints_keep_their_significand_where_scales_are_fp32() -> None:
    def exponent_only(arch: str, family: str) -> bool:
        case = Case(arch, "v4-flash-base", 1, n_groups=2, o_lora_rank=256, hidden_size=128, family=family)
        scale = build_wo_a(case).weight_scale_inv
        assert scale is not None
        return scale.dtype == torch.int32 or bool((torch.frexp(scale)[0] == 0.5).all())

    assert not exponent_only("sm90", "normal")
    assert exponent_only("sm90", "exact")
    assert exponent_only("sm100", "normal")


def test_bf16_weights_are_the_fp8_ones_dequantised() -> None:
    def case(dtype: str) -> Case:
        return small("wide", wo_a_dtype=dtype)

    fp8, bf16 = build_wo_a(case("fp8")), build_wo_a(case("bf16"))
    assert fp8.weight_scale_inv is not None and bf16.weight_scale_inv is None
    exact = dequantize(fp8.weight, fp8.weight_scale_inv, block_k=128, block_mn=128)
    assert torch.equal(bf16.weight.double(), exact.flatten(0, 1))


def test_moving_keeps_strides_and_what_lies_behind_a_view() -> None:
    o = build_o(small("normal", padded_heads=40))
    assert move(o, torch.device("cpu")) is o
    moved = move(o, torch.device("meta"))
    assert (moved.shape, moved.stride()) == (o.shape, o.stride())
    assert moved.untyped_storage().nbytes() == o.untyped_storage().nbytes()
    inputs = build(small("normal"))
    assert isinstance(inputs.to(torch.device("cpu")), Inputs)
