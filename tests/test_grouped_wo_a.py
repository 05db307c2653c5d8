"""``DeepseekV4GroupedWoA``: ranks, layouts and activations bit by bit, and adapters on the group diagonal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from conformance.bounds import gamma
from o_proj_arguments import in_slots, same_bits
from oproj.arch import ARCHS, get_arch
from oproj.checkpoint import CheckpointError, wo_a_for_arch
from oproj.engines import EngineUnavailable
from oproj.engines.software import SoftwareEngine
from oproj.grouped_wo_a import DeepseekV4GroupedWoA
from oproj.o_proj import compute_fp8_einsum_recipe, grouped_wo_a
from quantizer_calls import random_call

K = 1024  # two heads of 448 + 64
SERVED = [("sm90", 128), ("sm90", 32), ("sm100", 128), ("sm100", 32), ("sm103", 32), ("sm120", 128), ("sm120", 32)]


def stored(groups: int, block: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Checkpoint tensors of all ranks, R = ``block``: random codes, scales that differ by block."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x7F, (groups * block, K)).astype(np.uint8)
    codes |= rng.integers(0, 2, codes.shape, np.uint8) << 7
    scale = torch.from_numpy(rng.integers(118, 137, (groups, K // block)).astype(np.uint8))
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    return {"weight": weight, "scale": scale.view(torch.float8_e8m0fnu)}


def module(arch: str, groups: int, block: int = 128, **options: Any) -> DeepseekV4GroupedWoA:
    return DeepseekV4GroupedWoA(K, groups * block, n_groups=groups, arch=arch, weight_block=(block, block), **options)


def loaded(arch: str, groups: int, block: int = 128, **options: Any) -> DeepseekV4GroupedWoA:
    wo_a = module(arch, groups, block, **options)
    wo_a.load_weights(stored(groups, block))
    return wo_a


def call(arch: str, tokens: int, groups: int, block: int = 128) -> dict[str, Any]:
    """Arguments of ``grouped_forward``; o is a slice of a padded buffer whose other heads hold NaN."""
    args = random_call(tokens, groups)
    wide = torch.full((tokens, 2 * groups + 3, 512), torch.nan, dtype=torch.bfloat16)
    recipe, packed = compute_fp8_einsum_recipe(block, arch=arch)
    basis = {name: args[name] for name in ("positions", "cos_sin_cache")}
    basis |= {"o": wide[:, : 2 * groups].copy_(args["o"]), "n_groups": groups, "heads_per_group": 2}
    basis |= {"nope_dim": 448, "rope_dim": 64, "o_lora_rank": block}
    return basis | {"einsum_recipe": recipe, "tma_aligned_scales": packed}


def inputs(args: dict[str, Any]) -> dict[str, Any]:
    dropped = ("o_lora_rank", "einsum_recipe", "tma_aligned_scales")
    return {name: value for name, value in args.items() if name not in dropped}


def of_rank(args: dict[str, Any], rank: int, local: int) -> dict[str, Any]:
    return args | {"o": args["o"][:, 2 * local * rank : 2 * local * (rank + 1)], "n_groups": local}


# Ranks and layouts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch, block", SERVED)
@pytest.mark.parametrize("tp_size", [2, 4, 8, 16])
def test_z_of_a_rank_is_the_slice_of_the_whole(arch: str, block: int, tp_size: int) -> None:
    groups, local = 16, 16 // tp_size
    args = call(arch, 2, groups, block)
    whole = loaded(arch, groups, block).grouped_forward(**args)
    for rank in {0, 1, tp_size - 1}:
        wo_a = loaded(arch, groups, block, tp_size=tp_size, tp_rank=rank)
        assert (wo_a.n_local_groups, wo_a.is_bmm, wo_a.bmm_batch_size) == (local, True, local)
        z = wo_a.grouped_forward(**of_rank(args, rank, local))
        assert same_bits(z, whole[:, rank * local : (rank + 1) * local])


@pytest.mark.parametrize("arch, block", SERVED)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_z_is_the_chain_on_the_weight_of_the_layout(arch: str, block: int, tokens: int) -> None:
    args, wo_a, state = call(arch, tokens, 3, block), loaded(arch, 3, block), stored(3, block)
    row = get_arch(arch)
    fp8 = block == 128 or row.mxfp8_wo_a
    values = torch.from_numpy(np.exp2(state["scale"].view(torch.uint8).numpy().astype(np.float64) - 127))
    if not fp8:
        exact = state["weight"].double() * values.repeat_interleave(block, 0).repeat_interleave(block, 1)
        assert torch.equal(wo_a.weight.double().flatten(0, 1), exact) and wo_a.weight.dtype == torch.bfloat16
        assert not hasattr(wo_a, "weight_scale") and not hasattr(wo_a, "weight_scale_inv")
    else:
        name = "weight_scale" if block == 32 else "weight_scale_inv"
        assert [key for key, _ in wo_a.named_parameters()] == ["weight", name]
        scale = getattr(wo_a, name)
        assert scale.stride() == ((256, 1, block) if row.tma_aligned_scales else (K // block, K // block, 1))
        per_row = row.tma_aligned_scales
        got = reference.dequantize(wo_a.weight, scale, block_k=block, block_mn=1 if per_row else block)
        want = reference.dequantize(state["weight"], state["scale"], block_k=block, block_mn=block)
        assert torch.equal(got.flatten(0, 1), want)
    plain = dict(wo_a.named_parameters())
    direct = grouped_wo_a(wo_a=SimpleNamespace(**plain), engine=SoftwareEngine(row), **args)
    z = wo_a.grouped_forward(**args)
    assert z.shape == (tokens, 3, block) and z.dtype == torch.bfloat16 and z.is_contiguous()
    assert same_bits(z, direct) and same_bits(wo_a(**args), z)


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120"])
def test_a_quantised_activation_in_wider_slots_gives_the_same_z(arch: str) -> None:
    args, wo_a = call(arch, 3, 2), loaded(arch, 2)
    quantised = in_slots(args, 4, 0)
    assert same_bits(wo_a.grouped_forward(**args | {"o": quantised}), wo_a.grouped_forward(**args))
    with pytest.raises(TypeError, match="o is a QuantizedActivation; grouped_input needs"):
        wo_a.grouped_input(**inputs(args | {"o": quantised}))


def test_bf16_weights_keep_their_groups() -> None:
    weight = torch.from_numpy(np.random.default_rng(2).standard_normal((4 * 24, K))).bfloat16()
    args = call("sm90", 3, 2) | {"o_lora_rank": 24}
    wo_a = DeepseekV4GroupedWoA(K, 4 * 24, n_groups=4, tp_size=2, tp_rank=1, arch="sm90", dtype=torch.bfloat16)
    report = wo_a.load_weights({"layers.0.attn.wo_a.weight": weight}, prefix="layers.0.attn.wo_a.")
    assert (report.tensor, report.stored, report.action) == ("layers.0.attn.wo_a.weight", "bf16", "kept")
    x = wo_a.grouped_input(**inputs(args))
    exact = reference.grouped_wo_a(x, weight.view(4, 24, K)[2:])
    assert same_bits(wo_a.grouped_forward(**args), exact.bfloat16())


def test_state_dict_goes_back_into_the_same_layout() -> None:
    source, target = loaded("sm100", 2), module("sm100", 2)
    strides = target.weight_scale_inv.stride()
    target.load_state_dict(source.state_dict())
    assert target.weight_scale_inv.stride() == strides == (256, 1, 128)
    args = call("sm100", 2, 2)
    assert same_bits(target.grouped_forward(**args), source.grouped_forward(**args))


# The grouped input --------------------------------------------------------------------------------------------------


def whole_numbers(seed: int, tokens: int, groups: int) -> dict[str, Any]:
    """Whole numbers, few of them not zero, and a table that turns by nothing or by a quarter: every step is exact."""
    rng = np.random.default_rng(seed)
    o = np.zeros((tokens, 2 * groups, 512))
    for head in o.reshape(-1, 512):
        head[rng.choice(448, 2, replace=False)] = rng.integers(-4, 5, 2)
        head[448 + rng.choice(64, 2, replace=False)] = rng.integers(-4, 5, 2)
    args = call("sm90", tokens, groups)
    table = torch.cat([torch.eye(2)[:, i : i + 1].expand(2, 32) for i in (0, 1)], dim=1)
    args["o"].copy_(torch.from_numpy(o))
    return args | {"positions": torch.from_numpy(rng.integers(0, 2, tokens)), "cos_sin_cache": table}


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_grouped_input_is_the_inverse_rotation(tokens: int) -> None:
    args = whole_numbers(3, tokens, 3)
    x = module("sm90", 3).grouped_input(**inputs(args))
    exact = reference.inverse_rope(args["o"], args["positions"], args["cos_sin_cache"], rope_dim=64)
    assert x.dtype == torch.bfloat16 and x.shape == (tokens, 3, K) and (not tokens or x.stride(2) == 1)
    assert torch.equal(x.double(), exact.view(tokens, 3, K))


# Adapters -----------------------------------------------------------------------------------------------------------


def integers(rng: np.random.Generator, shape: tuple[int, ...], limit: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-limit, limit + 1, shape).astype(np.float32))


def zero_weight(groups: int, **options: Any) -> DeepseekV4GroupedWoA:
    wo_a = module("sm90", groups, **options)
    scale = torch.full((groups, K // 128), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    wo_a.load_weights({"weight": torch.ones(groups * 128, K).to(torch.float8_e4m3fn), "scale": scale})
    return wo_a


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 4),
    tp=st.sampled_from([(1, 0), (2, 1), (4, 2)]),
    adapters=st.lists(
        st.tuples(st.sampled_from([1, 8, 64]), st.sampled_from([1.0, -0.5, 2.0, 0.0])), min_size=1, max_size=3
    ),
)
def test_adapters_add_the_group_diagonal_of_the_reference(seed, tokens, tp, adapters) -> None:
    rng, groups, (tp_size, rank) = np.random.default_rng(seed), 4, tp
    local = groups // tp_size
    wo_a = zero_weight(groups, tp_size=tp_size, tp_rank=rank)
    args = of_rank(whole_numbers(seed, tokens, groups), rank, local)
    x = reference.inverse_rope(args["o"], args["positions"], args["cos_sin_cache"], rope_dim=64).view(tokens, local, K)
    expected = x.sum(2, keepdim=True).expand(tokens, local, 128).clone()  # the weight is all ones
    for i, (r, scale) in enumerate(adapters):
        a, b = integers(rng, (r, K), 2), integers(rng, (groups * 128, r), 2)
        wo_a.add_adapter(f"adapter-{i}", a.bfloat16(), b, scale=scale)
        for g in range(local):
            rows = b[(rank * local + g) * 128 :][:128].double()
            expected[:, g] += scale * (x[:, g] @ a.double().T) @ rows.T
    assert same_bits(wo_a.grouped_forward(**args), expected.float().bfloat16())


@pytest.mark.parametrize("r", [1, 8, 64])
def test_delta_of_real_numbers_is_within_its_roundings(r: int) -> None:
    rng, groups = np.random.default_rng(r), 3
    wo_a, args = module("sm90", groups), call("sm90", 4, groups)
    a, b = (torch.from_numpy(rng.standard_normal(shape)).bfloat16() for shape in ((r, K), (groups * 128, r)))
    wo_a.add_adapter("one", a, b)
    x, rows = wo_a.grouped_input(**inputs(args)).double(), b.double().view(groups, 128, r)
    exact = torch.einsum("tgk,rk,gnr->tgn", x, a.double(), rows)
    size = torch.einsum("tgk,rk,gnr->tgn", x.abs(), a.double().abs(), rows.abs())
    found = wo_a.lora_delta(x.bfloat16())
    assert found.dtype == torch.float32 and found.shape == (4, groups, 128)
    assert bool(((found.double() - exact).abs() <= gamma(3, 2.0**-24) * size).all())
    assert bool((exact != 0).all())


def test_a_dense_column_parallel_delta_is_another() -> None:
    """Every group's input against every group's rows, summed: the cross terms that a flat LoRA layer adds."""
    rng, groups = np.random.default_rng(5), 3
    args, wo_a = whole_numbers(5, 3, groups), zero_weight(groups)
    a, b = integers(rng, (8, K), 2), integers(rng, (groups * 128, 8), 2)
    wo_a.add_adapter("one", a, b)
    x = wo_a.grouped_input(**inputs(args)).double()
    low, rows = x @ a.double().T, b.double().view(groups, 128, 8)
    dense = torch.einsum("thr,gnr->tgn", low, rows)
    diagonal = torch.einsum("tgr,gnr->tgn", low, rows)
    assert torch.equal(wo_a.lora_delta(x.bfloat16()).double(), diagonal)
    assert not bool((dense == diagonal).all(dim=2).any())  # in no token and no group
    base = x.sum(2, keepdim=True)
    assert not same_bits(wo_a.grouped_forward(**args), (base + dense).bfloat16())


def test_adapters_come_scale_and_go() -> None:
    args, wo_a = call("sm100", 3, 2), loaded("sm100", 2)
    plain = wo_a.grouped_forward(**args)
    rng = np.random.default_rng(6)
    a, b = integers(rng, (4, K), 2), integers(rng, (256, 4), 2)
    wo_a.add_adapter("one", a, b)
    once = wo_a.lora_delta(wo_a.grouped_input(**inputs(args)))
    assert not same_bits(wo_a.grouped_forward(**args), plain)
    a.zero_()  # the adapter is a copy
    assert torch.equal(wo_a.lora_delta(wo_a.grouped_input(**inputs(args))), once)
    wo_a.scale_adapter("one", -2.0)
    assert torch.equal(wo_a.lora_delta(wo_a.grouped_input(**inputs(args))), -2 * once)
    with pytest.raises(TypeError, match="adapters read the BF16 attention output"):
        wo_a.grouped_forward(**args | {"o": in_slots(args, 2, 0)})
    wo_a.scale_adapter("one", 0.0)
    assert same_bits(wo_a.grouped_forward(**args), plain)
    wo_a.remove_adapter("one")
    assert same_bits(wo_a.grouped_forward(**args), plain)
    for change in (wo_a.remove_adapter, lambda name: wo_a.scale_adapter(name, 1.0)):
        with pytest.raises(KeyError, match="adapter 'one' is not there; there are: none"):
            change("one")


def test_an_adapter_that_is_off_leaves_a_negative_zero() -> None:
    wo_a = DeepseekV4GroupedWoA(K, 16, n_groups=2, arch="sm90", dtype=torch.bfloat16)
    wo_a.load_weights({"weight": torch.full((16, K), -(2.0**-126)).bfloat16()})
    args = call("sm90", 1, 2) | {"o_lora_rank": 8}
    args["o"].fill_(2.0**-20)[..., 448:] = 0  # the sum, -896 * 2^-146, rounds to -0
    wo_a.add_adapter("one", torch.ones(1, K), torch.ones(16, 1), scale=0.0)
    assert (wo_a.grouped_forward(**args).view(torch.int16) == -(2**15)).all()


@pytest.mark.parametrize(
    "a, b, scale, error, message",
    [
        ((4, K + 1), (256, 4), 1.0, ValueError, rf"a has shape \(4, {K + 1}\); expected \(4, {K}\)"),
        ((4, K), (128, 4), 1.0, ValueError, r"b has shape \(128, 4\); expected \(256, 4\)"),
        ((4, K), (256, 5), 1.0, ValueError, r"b has shape \(256, 5\); expected \(256, 4\)"),
        ((0, K), (256, 0), 1.0, ValueError, "r >= 1"),
        ((4, K), (256, 4), float("nan"), ValueError, "scale=nan must be finite"),
    ],
)
def test_bad_adapters_are_named(a, b, scale, error, message) -> None:
    wo_a = module("sm90", 2)
    with pytest.raises(error, match=message):
        wo_a.add_adapter("x", torch.ones(a), torch.ones(b), scale=scale)
    with pytest.raises(TypeError, match="a has dtype torch"):
        wo_a.add_adapter("x", torch.ones(4, K, dtype=torch.float64), torch.ones(256, 4))
    wo_a.add_adapter("x", torch.ones(4, K), torch.ones(256, 4))
    with pytest.raises(ValueError, match="adapter 'x' is there already"):
        wo_a.add_adapter("x", torch.ones(4, K), torch.ones(256, 4))


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"tp_size": 16}, ValueError, "tp_size=16 does not divide n_groups=8"),
        ({"tp_size": 3}, ValueError, "tp_size=3 does not divide n_groups=8"),
        ({"n_groups": 0}, ValueError, "does not divide n_groups=0"),
        ({"tp_size": 2, "tp_rank": 2}, ValueError, "tp_rank=2"),
        ({"output_size": 1025}, ValueError, "a multiple of n_groups=8"),
        ({"input_size": 0}, ValueError, "input_size=0"),
        ({"output_size": 512}, ValueError, "64 is not a multiple of 128-row blocks"),
        ({"dtype": torch.float32}, TypeError, "dtype=torch.float32; expected"),
        ({"weight_block": (64, 64)}, ValueError, r"weight_block=\(64, 64\)"),
        ({"arch": "sm70"}, ValueError, "arch='sm70' is unknown"),
        ({"engine": SoftwareEngine(get_arch("sm100"))}, ValueError, "arch=sm90 but engine is for sm100"),
    ],
)
def test_bad_sizes_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    basis: dict[str, Any] = {"input_size": K, "output_size": 1024, "n_groups": 8, "arch": "sm90"} | changes
    with pytest.raises(error, match=message):
        DeepseekV4GroupedWoA(basis.pop("input_size"), basis.pop("output_size"), **basis)


def test_an_architecture_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineUnavailable, match="pass arch="):
        DeepseekV4GroupedWoA(K, 128, n_groups=1)
    engine = SoftwareEngine(get_arch("sm120"))
    assert DeepseekV4GroupedWoA(K, 128, n_groups=1, engine=engine).arch is get_arch("sm120")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_groups": 1}, "n_groups=1; this rank of wo_a has 2 of 2"),
        ({"heads_per_group": 1}, "= 512; wo_a has K=1024"),
        ({"o_lora_rank": 64}, "o_lora_rank=64; this wo_a has 128"),
        ({"tma_aligned_scales": True}, "tma_aligned_scales=True; sm90 has False"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "positions has 3 entries"),
        ({"o": torch.zeros(2, 512, 4).bfloat16().mT}, "the last one must be 1"),
    ],
)
def test_bad_calls_are_named(changes: dict[str, Any], message: str) -> None:
    wo_a = loaded("sm90", 2)
    with pytest.raises(ValueError, match=message):
        wo_a.grouped_forward(**call("sm90", 2, 2) | changes)
    if changes.keys() & inputs(call("sm90", 2, 2)).keys():
        with pytest.raises(ValueError, match=message):
            wo_a.grouped_input(**inputs(call("sm90", 2, 2) | changes))


def test_an_empty_weight_is_not_used() -> None:
    with pytest.raises(RuntimeError, match="holds no weights yet"):
        module("sm90", 2).grouped_forward(**call("sm90", 1, 2))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight": None}, r"w\.weight is missing; expected e4m3 or BF16 \(256, 1024\)"),
        ({"scale": None}, r"w\.scale is missing; expected torch.float8_e8m0fnu \(2, 8\)"),
        ({"weight": torch.zeros(128, K).to(torch.float8_e4m3fn)}, r"w\.weight has shape \(128, 1024\); expected \(256"),
        ({"weight": torch.zeros(256, K).bfloat16()}, r"w\.weight has dtype torch.bfloat16; expected torch.float8_e4m3"),
        ({"scale": torch.ones(2, 8)}, r"w\.scale has dtype torch.float32; expected torch.float8_e8m0fnu"),
        ({"bias": torch.ones(2)}, r"w\.bias is not a tensor of wo_a"),
        ({"weight_scale_inv": torch.ones(2, 8)}, r"both w\.scale and w\.weight_scale_inv are there"),
    ],
)
def test_bad_state_is_named_and_nothing_is_loaded(changes: dict[str, Any], message: str) -> None:
    wo_a = module("sm90", 2)
    state = {f"w.{name}": t for name, t in (stored(2, 128) | changes).items() if t is not None}
    with pytest.raises(CheckpointError, match=message):
        wo_a.load_weights(state, prefix="w.")
    assert not wo_a.loaded


def test_a_weight_of_another_layout_is_refused() -> None:
    state, sizes = stored(2, 128), {"n_groups": 2, "o_lora_rank": 128, "k": K}
    other = wo_a_for_arch(state["weight"], state["scale"], arch="sm100", **sizes)
    with pytest.raises(CheckpointError, match=r"weight_scale_inv is torch.int32 .*; sm90 expects torch.float32"):
        module("sm90", 2).set_weight(other)
    assert set(ARCHS) >= {arch for arch, _ in SERVED}
