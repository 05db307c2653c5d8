"""Inputs of a Case: the same bits everywhere, a rank's slice of the whole, and each family as it says it is."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.case import POSITION_FAMILIES, Case
from conformance.families import FAMILIES, Lanes, Stream, Tile, e4m3_value, nearest_e4m3
from conformance.implementation import SoftwareImplementation
from conformance.inputs import Inputs, build, build_o, build_wo_a, build_wo_b, move
from oproj.activation import unpack_ue8m0
from oproj.rope import cos_sin_rows
from reference import dequantize, grouped_wo_a

# First 16 hex digits of the SHA-256 of o, positions, wo_a codes, wo_a scales and wo_b codes, one Case per family.
DIGESTS = [
    ("normal", "b03832092334c755", "ab25350e3e65efeb", "7dd3fc8a615978e0", "dfebfdaa7edaf5d7", "8c360f56d081f6ba"),
    ("wide", "971d495cd4cc0569", "254d1eefec3ca925", "09ea4fbac283fc08", "887d0e191a020a1d", "e12ea70649afe20a"),
    ("outlier", "890415e57993a736", "6fb9ebbfa62f95c0", "774333627dac40a7", "dfebfdaa7edaf5d7", "5f104710ff8d17f0"),
    ("positive", "c87f9dda8d0048d4", "e52409468232c488", "5272dde671504316", "23a92a391c7e2d82", "68d58014617383c4"),
    ("sparse", "ef6e9f75796b2729", "e46b0150b4b7d30c", "1e91dcc87d76f0d9", "dfebfdaa7edaf5d7", "47ae46cd60b32ed6"),
    ("boundary", "a0911f039bf235c4", "ab25350e3e65efeb", "cd9999f0a5b1f790", "23a92a391c7e2d82", "138eb1593eda8407"),
    ("exact", "a74ca66c054dec71", "c3e9454373d79d97", "4ae92a602165bac1", "6ac6c403867d491b", "1f5f705981eba9f9"),
    ("address", "96cd5c5ba504c6d9", "6fb9ebbfa62f95c0", "d8e5aa7f93bbb7a8", "5d50fb55d809511a", "dc77670c6617c641"),
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


def test_padded_heads_are_poisoned_and_not_part_of_o() -> None:
    padded, plain = build_o(small("normal", padded_heads=40)), build_o(small("normal"))
    assert torch.equal(padded, plain)
    assert padded.stride() == (40 * 512, 512, 1)
    buffer = padded.as_strided((3, 40, 512), (40 * 512, 512, 1))
    assert (buffer[:, 32:] > 1e30).all()


def positions(family: str, tokens: int) -> list[int]:
    return build(small("sparse", tokens=tokens, position_family=family)).positions.tolist()


def test_positions_are_what_their_families_say() -> None:
    assert positions("start", 4) == [0, 1, 2, 3]
    assert positions("boundaries", 11) == [0, 1, 255, 256, 257, 4095, 4096, 65535, 65536, 0, 1]
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
