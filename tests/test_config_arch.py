"""Numbers of the models and of the architectures, against the published ones written out here."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oproj import evidence
from oproj.arch import ARCHS, SM90, SM100, SM103, SM120, arch_of_capability, get_arch
from oproj.config import PRESETS, OProjConfig, get_preset

# model: hidden, heads, groups, layers, FP8 block, checkpoint scale, shape of wo_a's checkpoint scale
MODELS = {
    "v4-flash": (4096, 64, 8, 43, (128, 128), "e8m0", (64, 32)),
    "v4-flash-base": (4096, 64, 8, 43, (128, 128), "fp32", (64, 32)),
    "v4-pro": (7168, 128, 16, 61, (128, 128), "e8m0", (128, 32)),
    "v4.1-flash": (5120, 64, 8, 40, (32, 32), "e8m0", (256, 128)),
}
# TP size: heads, groups and K of wo_b on one rank
SMALL = {1: (64, 8, 8192), 2: (32, 4, 4096), 4: (16, 2, 2048), 8: (8, 1, 1024)}
PRO = {1: (128, 16, 16384), 2: (64, 8, 8192), 4: (32, 4, 4096), 8: (16, 2, 2048), 16: (8, 1, 1024)}
LOCAL = {"v4-flash": SMALL, "v4-flash-base": SMALL, "v4-pro": PRO, "v4.1-flash": SMALL}

configs = st.builds(
    lambda groups, heads_per_group, rank: OProjConfig("drawn", 256, groups * heads_per_group, groups, o_lora_rank=rank),
    st.integers(1, 24),
    st.integers(1, 12),
    st.sampled_from([8, 128, 1024]),
)


def test_the_presets_are_the_four_models() -> None:
    assert set(PRESETS) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_preset_numbers(name: str) -> None:
    c = get_preset(name)
    found = (c.hidden_size, c.n_heads, c.n_groups, c.n_layers, c.weight_block, c.checkpoint_scale)
    rows, columns = c.weight_block
    assert (*found, (c.n_groups * c.o_lora_rank // rows, c.group_k // columns)) == MODELS[name]
    assert (c.nope_dim, c.rope_dim, c.head_dim, c.o_lora_rank, c.heads_per_group) == (448, 64, 512, 1024, 8)
    assert (c.group_k, c.max_position, c.tp_size, c.tp_rank) == (4096, 2**20, 1, 0)


@pytest.mark.parametrize("name, tp", [(name, tp) for name, sizes in LOCAL.items() for tp in sizes])
def test_local_shapes_of_every_tp_size(name: str, tp: int) -> None:
    for rank in (0, tp - 1):
        local = get_preset(name).shard(tp, rank)
        assert (local.n_heads, local.n_groups, local.wo_b_k) == LOCAL[name][tp]
        assert (local.heads_per_group, local.group_k, local.hidden_size) == (8, 4096, MODELS[name][0])
        assert (local.tp_size, local.tp_rank) == (tp, rank)


@pytest.mark.parametrize("name", MODELS)
def test_possible_tp_sizes(name: str) -> None:
    assert get_preset(name).tp_sizes() == list(LOCAL[name])


@pytest.mark.parametrize(
    "name, tp, field, possible",
    [
        ("v4-flash", 16, "n_groups=8", "1, 2, 4, 8"),
        ("v4.1-flash", 16, "n_groups=8", "1, 2, 4, 8"),
        ("v4-pro", 32, "n_groups=16", "1, 2, 4, 8, 16"),
        ("v4-pro", 3, "n_heads=128", "1, 2, 4, 8, 16"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_the_possible_ones(name, tp, field, possible) -> None:
    with pytest.raises(
        ValueError, match=f"tp_size={tp} does not divide {field} of {name}; possible sizes: {possible}$"
    ):
        get_preset(name).shard(tp)


@pytest.mark.parametrize(
    "tp, rank, message",
    [
        (0, 0, "tp_size=0"),
        (-2, 0, "tp_size=-2"),
        (4, 4, r"tp_rank=4 must lie in 0\.\.3"),
        (4, -1, r"tp_rank=-1 must lie in 0\.\.3"),
    ],
)
def test_sizes_and_ranks_out_of_range_are_refused(tp: int, rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_preset("v4-pro").shard(tp, rank)


def test_a_second_shard_is_refused() -> None:
    with pytest.raises(ValueError, match="v4-pro is already rank 1 of 4"):
        get_preset("v4-pro").shard(4, 1).shard(2)


@given(config=configs)
def test_shards_cover_all_heads_and_groups_once(config: OProjConfig) -> None:
    for tp in config.tp_sizes():
        shards = [config.shard(tp, rank) for rank in range(tp)]
        for field in ("n_heads", "n_groups"):
            starts = [shard.tp_rank * getattr(shard, field) for shard in shards]
            owned = [
                i for start, s in zip(starts, shards, strict=True) for i in range(start, start + getattr(s, field))
            ]
            assert owned == list(range(getattr(config, field)))
        assert sum(shard.wo_b_k for shard in shards) == config.wo_b_k
        assert {(s.group_k, s.heads_per_group, s.hidden_size, s.o_lora_rank) for s in shards} == {
            (config.group_k, config.heads_per_group, 256, config.o_lora_rank)
        }


@given(config=configs, tp=st.integers(1, 300))
def test_shard_takes_exactly_the_listed_sizes(config: OProjConfig, tp: int) -> None:
    if tp in config.tp_sizes():
        assert config.shard(tp).n_groups * tp == config.n_groups
    else:
        assert config.n_groups % tp or config.n_heads % tp
        with pytest.raises(ValueError, match=f"tp_size={tp} does not divide"):
            config.shard(tp)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"n_heads": 0}, "n_heads=0"),
        ({"n_groups": 0}, "n_groups=0"),
        ({"o_lora_rank": 0}, "o_lora_rank=0"),
        ({"max_position": 0}, "max_position=0"),
        ({"n_heads": 65}, "n_heads=65 is not a multiple of n_groups=8"),
        ({"rope_dim": 63}, "rope_dim=63"),
        ({"rope_dim": 0}, "rope_dim=0"),
        ({"nope_dim": 447}, "nope_dim=447"),
        ({"nope_dim": -2}, "nope_dim=-2"),
    ],
)
def test_impossible_dimensions_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(get_preset("v4-flash"), **change)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"preset='v5' is unknown; known presets: v4-flash, .*v4\.1-flash"):
        get_preset("v5")
    with pytest.raises(ValueError, match="arch='sm89' is unknown; known rows: sm90, sm100, sm103, sm120"):
        get_arch("sm89")


@pytest.mark.parametrize(
    "row, products, frac_bits, out_frac_bits, inside, promotion, scales, recipe",
    [
        (SM90, 32, 13, 13, False, 128, "fp32", (1, 128, 128)),
        (SM100, 32, 25, 23, True, None, "ue8m0_packed", (1, 1, 128)),
        (SM103, 32, 25, 23, True, None, "ue8m0_packed", (1, 1, 128)),
        (SM120, 32, 25, 23, True, None, "ue8m0_packed", (1, 1, 128)),
    ],
)
def test_architecture_rows(row, products, frac_bits, out_frac_bits, inside, promotion, scales, recipe) -> None:
    mma = row.mma
    assert (mma.k, mma.frac_bits, mma.out_frac_bits, mma.zero_exponent) == (products, frac_bits, out_frac_bits, -133)
    assert (mma.scales_inside, row.promotion_k, row.scale_format) == (inside, promotion, scales)
    assert row.recipe() == row.recipe(128) == recipe
    assert row.tma_aligned_scales is (scales == "ue8m0_packed")
    assert get_arch(row.name) is get_arch(row.name.upper()) is get_arch(row) is row


def test_instructions_of_blackwell_are_not_called_measured() -> None:
    assert {row.name: row.mma.evidence for row in ARCHS.values()} == {
        "sm90": "measured",
        "sm100": "published",
        "sm103": "published",
        "sm120": "published",
    }


@pytest.mark.parametrize(
    "capability, name",
    [
        ((9, 0), "sm90"),
        ((10, 0), "sm100"),
        ((10, 3), "sm103"),
        ((12, 0), "sm120"),
        ((12, 1), "sm120"),
        ((8, 9), None),
        ((11, 0), None),
    ],
)
def test_row_of_a_device(capability: tuple[int, int], name: str | None) -> None:
    found = arch_of_capability(*capability)
    assert (found and found.name) == name


def test_32_wide_blocks_are_served_in_fp8_on_sm100_alone() -> None:
    """V4.1's weights have 32 x 32 blocks; SM90 and SM120 dequantise them at load."""
    served = {
        name: (get_preset("v4.1-flash").fp8_wo_a(name), get_preset("v4.1-flash").quant_group_size(name))
        for name in ARCHS
    }
    assert served == {"sm90": (False, 128), "sm100": (True, 32), "sm103": (True, 32), "sm120": (False, 128)}
    for preset in ("v4-flash", "v4-flash-base", "v4-pro"):
        assert {(get_preset(preset).fp8_wo_a(n), get_preset(preset).quant_group_size(n)) for n in ARCHS} == {
            (True, 128)
        }


def record(stage: str, compared: int, mismatched: int, arch: str = "sm90") -> dict[str, object]:
    return {"arch": arch, "stage": stage, "compared": compared, "mismatched": mismatched}


def test_a_stage_is_measured_by_a_comparison_without_a_differing_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    records = (
        record("wo_a", 100, 0),
        record("wo_b", 100, 0),
        record("wo_b", 100, 1),  # one bad record withdraws the stage
        record("quantize", 0, 0),  # nothing compared
        record("o_proj", 100, 0, arch="sm100"),
    )
    monkeypatch.setattr(evidence, "records", lambda: records)
    assert evidence.measured_stages.__wrapped__("sm90") == {"wo_a"}
    monkeypatch.setattr("oproj.arch.measured_stages", evidence.measured_stages.__wrapped__)
    stages = ("wo_a", "wo_b", "quantize", "o_proj")
    assert [SM90.evidence(stage) for stage in stages] == ["measured", "published", "published", "published"]
    assert [SM100.evidence(stage) for stage in stages] == ["published", "published", "published", "measured"]
    assert {SM120.evidence(stage) for stage in stages} == {"assumed"}
