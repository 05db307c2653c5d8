"""The block as a serving engine calls it: recipe, weights, slots, and z bit by bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from o_proj_arguments import RANK, arguments, fp8_weight, in_slots, same_bits, weight_of, z_of
from oproj.arch import ARCHS, get_arch
from oproj.engines import EngineUnavailable
from oproj.engines.software import SoftwareEngine, spec
from oproj.o_proj import compute_fp8_einsum_recipe, deep_gemm_fp8_o_proj
from oproj.quantize import fused_inv_rope_fp8_quant
from quantizer_calls import codes_of, exponent_bytes

SERVED = [("sm90", 128), ("sm100", 128), ("sm100", 32), ("sm103", 128), ("sm120", 128)]
BOTH = ["sm90", "sm100"]


# Recipe -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_recipe_of_every_row(arch: str) -> None:
    for block in (128, 32):
        expected = ((1, 128, 128), False) if arch == "sm90" else ((1, 1, block), True)
        assert compute_fp8_einsum_recipe(block, arch=arch) == expected
    assert compute_fp8_einsum_recipe(arch=get_arch(arch)) == compute_fp8_einsum_recipe(128, arch=arch)


@pytest.mark.parametrize("block", [0, 64, 256])
def test_a_block_size_without_a_recipe_is_refused_where_it_counts(block: int) -> None:
    assert compute_fp8_einsum_recipe(block, arch="sm90") == ((1, 128, 128), False)
    with pytest.raises(ValueError, match=f"block_size={block} is not served"):
        compute_fp8_einsum_recipe(block, arch="sm100")


@pytest.mark.parametrize(
    "major, minor, packed", [(8, 9, False), (9, 0, False), (10, 0, True), (11, 0, True), (12, 1, True)]
)
def test_recipe_of_the_current_device(major: int, minor: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))
    assert compute_fp8_einsum_recipe(32) == (((1, 1, 32), True) if packed else ((1, 128, 128), False))


def test_without_a_gpu_the_row_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineUnavailable, match=r"no CUDA device .*pass arch="):
        compute_fp8_einsum_recipe()
    with pytest.raises(ValueError, match="arch='sm70' is unknown"):
        compute_fp8_einsum_recipe(arch="sm70")


# Bits of z ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch, block", SERVED)
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 6])
def test_the_chain_is_its_stages(arch: str, block: int, tokens: int) -> None:
    args, engine = arguments(arch, tokens, 3, block), SoftwareEngine(arch)
    recipe, packed = args["einsum_recipe"], args["tma_aligned_scales"]
    x, scale = fused_inv_rope_fp8_quant(
        args["o"], args["positions"], args["cos_sin_cache"], 3, 2, 448, 64, recipe[2], packed, engine=engine
    )
    z = torch.full((tokens, 3, RANK), torch.nan, dtype=torch.bfloat16)
    weight = (args["wo_a"].weight, args["wo_a"].weight_scale_inv)
    engine.fp8_einsum("bhr,hdr->bhd", (x, scale), weight, z, recipe=recipe)
    found = z_of(args | {"engine": engine})
    assert found.dtype == torch.bfloat16 and found.is_contiguous() and same_bits(found, z)
    assert same_bits(deep_gemm_fp8_o_proj(**args), z.flatten(1))  # the engine is found by the scale format


@pytest.mark.parametrize("arch", BOTH)
def test_z_is_the_chain_of_the_scalar_tensor_core(arch: str) -> None:
    args, row = arguments(arch, 2), get_arch(arch)
    x, scale = fused_inv_rope_fp8_quant(
        args["o"], args["positions"], args["cos_sin_cache"], 2, 2, tma_aligned_scales=row.tma_aligned_scales
    )
    a, b = codes_of(x).tolist(), codes_of(args["wo_a"].weight).tolist()
    if row.tma_aligned_scales:
        a_scale, b_scale = (exponent_bytes(s).tolist() for s in (scale, args["wo_a"].weight_scale_inv))
    else:
        a_scale, b_scale = scale.tolist(), args["wo_a"].weight_scale_inv.repeat_interleave(RANK, 1).tolist()
    expected = [
        [
            [spec.bf16_bits(spec.chain(row, a[t][g], b[g][n], a_scale[t][g], b_scale[g][n])) for n in range(RANK)]
            for g in range(2)
        ]
        for t in range(2)
    ]
    assert (z_of(args).view(torch.int16).numpy().view(np.uint16)).tolist() == expected


def integer_case(seed: int, tokens: int, groups: int, block: int) -> dict[str, Any]:
    """Whole numbers whose every step is exact: at most 8 non-zero x a group, |x| <= 4, |w| <= 2, scales 1, 2, 4.

    Then codes hold x, |z| <= 8 * 4 * 2 * 4 = 256 is a BF16 integer, and the table turns by nothing or by a quarter.
    """
    rng = np.random.default_rng(seed)
    o = np.zeros((tokens, 2 * groups, 512))
    for head in o.reshape(-1, 512):
        head[rng.choice(512, 2, replace=False)] = rng.integers(-4, 5, 2)
        head[448 + rng.choice(64, 2, replace=False)] = rng.integers(-4, 5, 2)
    table = torch.cat([torch.eye(2, dtype=torch.float32)[:, i : i + 1].expand(2, 32) for i in (0, 1)], dim=1)
    weight = rng.integers(-2, 3, (groups, RANK, 1024))
    scale = 2.0 ** rng.integers(0, 3, (groups, 1, 1024 // block))
    return {
        "o": torch.from_numpy(o).bfloat16(),
        "positions": torch.from_numpy(rng.integers(0, 2, tokens)),
        "cos_sin_cache": table,
        "codes": torch.from_numpy(weight).to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8).numpy(),
        "scale": scale.astype(np.float32),
        "exact": torch.from_numpy(weight * scale.repeat(block, 2)),
    }


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1), tokens=st.integers(0, 5), groups=st.integers(1, 3), served=st.sampled_from(SERVED)
)
def test_z_of_whole_numbers_is_the_float64_reference(seed: int, tokens: int, groups: int, served: Any) -> None:
    arch, block = served
    case = integer_case(seed, tokens, groups, block)
    inputs = {name: case[name] for name in ("o", "positions", "cos_sin_cache")}
    _, expected, _ = reference.o_proj(*inputs.values(), case["exact"], torch.zeros(1, groups * RANK), n_groups=groups)
    assert torch.equal(expected.bfloat16().double(), expected)  # the premise: BF16 holds every sum
    args = arguments(arch, tokens, groups, block, **inputs)
    assert torch.equal(z_of(args | {"wo_a": fp8_weight(arch, case["codes"], case["scale"], block)}).double(), expected)
    for weight in (case["exact"], case["exact"].flatten(0, 1)):
        bf16_wo_a = SimpleNamespace(weight=weight.bfloat16())
        assert torch.equal(z_of(args | {"wo_a": bf16_wo_a}).double(), expected)


@pytest.mark.parametrize("arch, block", SERVED)
def test_z_of_a_group_does_not_depend_on_the_other_groups_or_tokens(arch: str, block: int) -> None:
    """What makes z the same at every tensor-parallel size and in every batch."""
    args = arguments(arch, 5, 4, block)
    whole = z_of(args)
    for first, count in ((0, 2), (2, 2), (3, 1)):
        shard = {name: getattr(args["wo_a"], name)[first : first + count] for name in ("weight", "weight_scale_inv")}
        heads = args["o"][:, 2 * first : 2 * (first + count)]
        local = z_of(args | {"o": heads, "wo_a": SimpleNamespace(**shard), "n_groups": count})
        assert same_bits(local, whole[:, first : first + count])
    alone = z_of(args | {"o": args["o"][3:4], "positions": args["positions"][3:4]})
    assert same_bits(alone, whole[3:4])


# wo_b and the scales ------------------------------------------------------------------------------------------------


def test_wo_b_gets_z_flat_and_its_result_is_passed_on() -> None:
    args = arguments("sm90", 3)
    z = z_of(args)
    seen = []
    marker = object()
    assert deep_gemm_fp8_o_proj(**args | {"wo_b": lambda flat: (seen.append(flat), marker)[1]}) is marker
    assert len(seen) == 1 and seen[0].is_contiguous() and same_bits(seen[0], z.reshape(3, 2 * RANK))
    fewer = deep_gemm_fp8_o_proj(**args | {"wo_b": lambda flat: flat[1:2, :4]})  # a reduce-scatter keeps some rows
    assert same_bits(fewer, z.reshape(3, 2 * RANK)[1:2, :4])
    projection = torch.nn.Linear(2 * RANK, 8, bias=False, dtype=torch.bfloat16)
    assert deep_gemm_fp8_o_proj(**args | {"wo_b": projection}).shape == (3, 8)


@pytest.mark.parametrize("arch", BOTH)
def test_weight_scale_goes_before_weight_scale_inv(arch: str) -> None:
    args = arguments(arch, 3)
    right, wrong = args["wo_a"].weight_scale_inv, weight_of(arch, 2, 1024, seed=9).weight_scale_inv
    expected = z_of(args)
    for names, same in (
        ({"weight_scale": right}, True),
        ({"weight_scale": right, "weight_scale_inv": wrong}, True),
        ({"weight_scale": wrong, "weight_scale_inv": right}, False),
    ):
        assert same_bits(z_of(args | {"wo_a": SimpleNamespace(weight=args["wo_a"].weight, **names)}), expected) is same


def test_the_existence_of_weight_scale_decides_even_if_it_is_none() -> None:
    args = arguments("sm90", 3)
    args["wo_a"].weight_scale = None
    with pytest.raises(TypeError, match=r"wo_a\.weight_scale is NoneType"):
        deep_gemm_fp8_o_proj(**args)
    bare = SimpleNamespace(weight=args["wo_a"].weight)
    with pytest.raises(TypeError, match=r"wo_a\.weight_scale_inv is NoneType"):
        deep_gemm_fp8_o_proj(**args | {"wo_a": bare})


def test_bf16_weights_need_no_scale_and_gradients_are_not_in_the_way() -> None:
    args = arguments("sm90", 3)
    weight = torch.randn((2, RANK, 1024), generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = z_of(args | {"wo_a": SimpleNamespace(weight=weight, weight_scale=None)})
    assert expected.is_contiguous() and expected.abs().max() > 0
    assert same_bits(z_of(args | {"wo_a": SimpleNamespace(weight=torch.nn.Parameter(weight))}), expected)
    args["wo_a"].weight_scale_inv.requires_grad_()
    assert z_of(args).shape == (3, 2, RANK)


# Quantised input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("slots", [2, 3, 16])
def test_the_first_slots_of_a_quantised_activation_are_taken(arch: str, tokens: int, slots: int) -> None:
    """Positions and table are not looked at: the activation is rotated already."""
    args = arguments(arch, tokens)
    rotated = {"o": in_slots(args, slots, 0), "positions": None, "cos_sin_cache": None}
    z = z_of(args | rotated)
    assert z.shape == (tokens, 2, RANK) and same_bits(z, z_of(args))
    assert same_bits(deep_gemm_fp8_o_proj(**args | rotated), z.flatten(1))


@pytest.mark.parametrize("arch", BOTH)
def test_dead_slots_in_front_reach_z(arch: str) -> None:
    args = arguments(arch, 5)
    assert z_of(args | {"o": in_slots(args, 16, 14)}).isnan().all()


def test_token_major_values_are_taken_too() -> None:
    args = arguments("sm100", 5)
    wide = in_slots(args, 4, 0)
    wide.data = wide.data.contiguous()
    assert wide.data.stride() == (4 * 1024, 1024, 1)
    assert same_bits(z_of(args | {"o": wide}), z_of(args))
