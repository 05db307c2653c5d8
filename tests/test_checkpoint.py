"""Checkpoints: every stored form on every architecture row, by rank, and what is wrong with a bad one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import reference
from conformance.bounds import gamma
from fixtures.make_checkpoint import FORMS, INDEX, LAYER, V4, V41, tensors, write
from o_proj_arguments import same_bits
from oproj.arch import ARCHS, get_arch
from oproj.checkpoint import (
    ArchWeight,
    CheckpointError,
    e8m0_to_float,
    load_o_proj,
    tensor_names,
    wo_a_for_arch,
    wo_b_for_arch,
)
from oproj.engines.software import SoftwareEngine
from oproj.grouped_wo_a import DeepseekV4GroupedWoA
from oproj.o_proj import compute_fp8_einsum_recipe, deep_gemm_fp8_o_proj
from oproj.wo_b import fp8_wo_b
from quantizer_calls import random_call

TINY = Path(__file__).parent / "fixtures" / "deepseek-v4-tiny"
A, A_SCALE = f"layers.{LAYER}.attn.wo_a.weight", f"layers.{LAYER}.attn.wo_a.scale"
B, B_SCALE = f"layers.{LAYER}.attn.wo_b.weight", f"layers.{LAYER}.attn.wo_b.scale"


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bytes; FP8 included."""
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def values(found: ArchWeight, block: int) -> torch.Tensor:
    """Float64 weight as the kernel reads it."""
    if found.scale is None:
        return found.weight.double()
    rows = 1 if found.scale.dtype == torch.int32 else block
    return reference.dequantize(found.weight, found.scale, block_k=block, block_mn=rows)


def stored_values(content: dict[str, torch.Tensor], weight: str, scale: str, block: int) -> torch.Tensor:
    if scale not in content:
        return content[weight].double()
    return reference.dequantize(content[weight], content[scale], block_k=block, block_mn=block)


# The fixture --------------------------------------------------------------------------------------------------------


def test_the_fixture_is_what_its_script_writes(tmp_path: Path) -> None:
    fresh = write(tmp_path / "fresh", tensors())
    names = sorted(file.name for file in TINY.iterdir())
    assert names == sorted(file.name for file in fresh.iterdir()) and len(names) == 3
    assert all((TINY / name).read_bytes() == (fresh / name).read_bytes() for name in names)
    assert sum((TINY / name).stat().st_size for name in names) < 300_000


@pytest.mark.parametrize("arch", ARCHS)
def test_the_fixture_loads_on_every_row(arch: str) -> None:
    content, found = tensors(), load_o_proj(TINY, LAYER, V4, arch)
    a, b = found.wo_a, found.wo_b
    packed = get_arch(arch).tma_aligned_scales
    assert equal(a.weight, content[A].view(4, 128, 512)) and equal(b.weight, content[B])
    assert a.scale_name == b.scale_name == "weight_scale_inv" and a.scale is not None and b.scale is not None
    assert (a.scale.shape, a.scale.stride()) == (((4, 128, 1), (128, 1, 128)) if packed else ((4, 1, 4), (4, 4, 1)))
    assert (b.scale.shape, b.scale.stride()[0]) == (((32, 1), 1) if packed else ((1, 4), 4))
    assert torch.equal(values(a, 128).flatten(0, 1), stored_values(content, A, A_SCALE, 128))
    assert torch.equal(values(b, 128), stored_values(content, B, B_SCALE, 128))
    assert [(r.tensor, r.stored, r.action, r.lossy) for r in found.reports] == [
        (name, "e4m3+e8m0", "kept", False) for name in (A, B)
    ]


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_the_block_runs_on_what_was_loaded(arch: str, tokens: int) -> None:
    row, found = get_arch(arch), load_o_proj(TINY, LAYER, V4, arch)
    engine = SoftwareEngine(row)
    wo_a = DeepseekV4GroupedWoA(512, 512, n_groups=4, engine=engine)
    wo_a.set_weight(found.wo_a)
    recipe, packed = compute_fp8_einsum_recipe(arch=row)
    args = {name: value for name, value in random_call(tokens, 2).items() if name in ("positions", "cos_sin_cache")}
    sizes = {"n_groups": 4, "heads_per_group": 1, "nope_dim": 448, "rope_dim": 64, "o_lora_rank": 128}
    o = torch.from_numpy(np.random.default_rng(0).standard_normal((tokens, 4, 512))).bfloat16()
    assert found.wo_b.scale is not None
    y = deep_gemm_fp8_o_proj(
        o,
        **args,
        wo_a=wo_a,
        wo_b=lambda z: fp8_wo_b(z, found.wo_b.weight, found.wo_b.scale, engine=engine),
        **sizes,
        einsum_recipe=recipe,
        tma_aligned_scales=packed,
        engine=engine,
    )
    again = DeepseekV4GroupedWoA(512, 512, n_groups=4, engine=engine)
    again.load_weights({name: t for name, t in tensors().items() if "wo_a" in name}, prefix=A[: -len("weight")])
    z = again.grouped_forward(o, **args, **sizes, einsum_recipe=recipe, tma_aligned_scales=packed)
    assert y.shape == (tokens, 32) and y.dtype == torch.bfloat16
    assert same_bits(y, fp8_wo_b(z.flatten(1), found.wo_b.weight, found.wo_b.scale, engine=engine))


# Naming and files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_both_namings_and_every_kind_of_path_load_the_same(form: str, tmp_path: Path) -> None:
    config, content = FORMS[form], tensors(form)
    one = tmp_path / "one.safetensors"
    save_file(content, one)
    folder, alias = write(tmp_path / "index", content), write(tmp_path / "alias", tensors(form, transformers=True))
    bare = write(tmp_path / "bare", content)
    (bare / INDEX).unlink()
    basis = load_o_proj(content, LAYER, config, "sm90")
    for path in (one, folder, folder / INDEX, str(alias), bare):
        found = load_o_proj(path, LAYER, config, "sm90")
        for have, want in ((found.wo_a, basis.wo_a), (found.wo_b, basis.wo_b)):
            assert have.state_dict().keys() == want.state_dict().keys()
            assert all(equal(have.state_dict()[name], tensor) for name, tensor in want.state_dict().items())
    assert load_o_proj(alias, LAYER, config, "sm90").wo_a.report.tensor == "model.layers.3.self_attn.o_a_proj.weight"


@pytest.mark.parametrize("form", FORMS)
def test_what_is_loaded_is_aligned_and_shares_no_memory(form: str, tmp_path: Path) -> None:
    content, file = tensors(form), tmp_path / "one.safetensors"
    save_file(content, file)
    for source in (content, file):
        found = load_o_proj(source, LAYER, FORMS[form], "sm90")
        mine = [*found.wo_a.state_dict().values(), *found.wo_b.state_dict().values()]
        assert all(tensor.data_ptr() % 16 == 0 for tensor in mine)
        assert not {t.data_ptr() for t in mine} & {t.data_ptr() for t in content.values()}


def test_the_extra_layer_has_a_prefix_of_its_own() -> None:
    content = {name.replace("layers.3", "mtp.0"): tensor for name, tensor in tensors().items()}
    assert load_o_proj(content, "mtp.0", V4, "sm90").wo_b.report.tensor == "mtp.0.attn.wo_b.weight"
    with pytest.raises(CheckpointError, match=r"has neither layers\.0\.attn\.wo_a\.weight nor model\.layers\.0\."):
        load_o_proj(content, 0, V4, "sm90")
    both = tensors() | tensors(transformers=True)
    with pytest.raises(CheckpointError, match="holds both"):
        tensor_names(both, LAYER)


# Forms --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_bf16_weights_are_kept(arch: str) -> None:
    content, found = tensors("v4-bf16"), load_o_proj(tensors("v4-bf16"), LAYER, V4, arch)
    assert equal(found.wo_a.weight, content[A].view(4, 128, 512)) and equal(found.wo_b.weight, content[B])
    assert list(found.wo_a.state_dict()) == ["weight"]
    assert [report.action for report in found.reports] == ["kept", "kept"]


@pytest.mark.parametrize("arch", ARCHS)
def test_32_wide_blocks_are_served_or_dequantised(arch: str) -> None:
    content, found = tensors("v4.1"), load_o_proj(tensors("v4.1"), LAYER, V41, arch)
    served = get_arch(arch).mxfp8_wo_a
    assert torch.equal(values(found.wo_a, 32).flatten(0, 1), stored_values(content, A, A_SCALE, 32))
    assert torch.equal(values(found.wo_b, 32), stored_values(content, B, B_SCALE, 32))
    assert [(r.action, r.lossy) for r in found.reports] == [("kept" if served else "dequantized", False)] * 2
    assert found.wo_a.weight.dtype == (torch.float8_e4m3fn if served else torch.bfloat16)
    assert list(found.wo_a.state_dict()) == (["weight", "weight_scale"] if served else ["weight"])


@pytest.mark.parametrize("arch", ["sm90", "sm120"])
def test_dequantising_past_bf16_is_refused_or_reported(arch: str) -> None:
    content = tensors("v4.1")
    content[A].view(torch.uint8)[0, 0] = 0x7E  # 448
    content[A_SCALE].view(torch.uint8)[0, 0] = 254
    with pytest.raises(CheckpointError, match=rf"{A} dequantised exceeds the range of bfloat16"):
        load_o_proj(content, LAYER, V41, arch)
    content[A].view(torch.uint8)[:32, :32] = 0x3B  # 1.375, which loses bits below 2^-133
    content[A_SCALE].view(torch.uint8)[0, 0] = 1  # 2^-126: exact still
    assert not load_o_proj(content, LAYER, V41, arch).wo_a.report.lossy
    content[A].view(torch.uint8)[:32, :32] = 0x03  # 3 * 2^-9, times 2^-126: 0.75 steps of BF16's smallest
    assert load_o_proj(content, LAYER, V41, arch).wo_a.report.max_relative_change == 1 / 3


@pytest.mark.parametrize("arch", ARCHS)
def test_fp32_scales_are_requantised_only_when_asked(arch: str) -> None:
    config, content = FORMS["v4-fp32"], tensors("v4-fp32")
    exact = stored_values(content, A, A_SCALE, 128)
    if get_arch(arch).tma_aligned_scales:
        with pytest.raises(CheckpointError, match=rf"{A_SCALE} has FP32 .*{arch} packs.*pass requantize=True"):
            load_o_proj(content, LAYER, config, arch)
    else:
        kept = load_o_proj(content, LAYER, config, arch).wo_a
        assert torch.equal(values(kept, 128).flatten(0, 1), exact) and kept.report.action == "kept"
    found = load_o_proj(content, LAYER, config, arch, requantize=True)
    change = (values(found.wo_a, 128).flatten(0, 1) - exact).abs()
    report = found.wo_a.report
    assert report.action == "requantized" and report.stored == "e4m3+fp32" and report.lossy
    # The report is of FP32 products, each one rounding off the exact ones here.
    assert abs(report.relative_frobenius - float(change.norm() / exact.norm())) <= gamma(4, 2.0**-24)
    assert report.max_relative_change > 0 and found.wo_b.report.lossy
    assert equal(load_o_proj(tensors(), LAYER, V4, arch, requantize=True).wo_a.weight, tensors()[A].view(4, 128, 512))


@pytest.mark.parametrize("arch", ARCHS)
def test_fp32_powers_of_two_need_no_requantisation(arch: str) -> None:
    content = tensors()
    fp32 = content | {name: content[name].float() for name in (A_SCALE, B_SCALE)}
    found = load_o_proj(fp32, LAYER, replace(V4, checkpoint_scale="fp32"), arch)
    basis = load_o_proj(content, LAYER, V4, arch)
    assert found.wo_a.scale is not None and basis.wo_a.scale is not None
    assert equal(found.wo_a.scale, basis.wo_a.scale) and not found.wo_a.report.lossy


def test_every_e8m0_byte_has_its_value_or_is_refused() -> None:
    stored = torch.arange(1, 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert e8m0_to_float(stored).tolist() == [2.0 ** (byte - 127) for byte in range(1, 255)]
    for byte, meaning in ((0, r"2\^-127 in OCP MX, 0\.0 as served"), (255, r"NaN in OCP MX, \+Inf as served")):
        bad = torch.tensor([[127, 127], [127, byte]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        with pytest.raises(CheckpointError, match=rf"s\[1, 1\] is E8M0 byte {byte}: {meaning}"):
            e8m0_to_float(bad, "s")
    with pytest.raises(TypeError, match=r"scale has dtype torch\.uint8"):
        e8m0_to_float(torch.ones(2, dtype=torch.uint8))


# Ranks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16])
def test_a_rank_holds_its_groups_and_columns(arch: str, block: int, tp_size: int) -> None:
    rng, groups, r = np.random.default_rng(8), 16, 512
    shared: dict[str, Any] = {"arch": arch, "block": (block, block), "tp_size": tp_size}

    def fp8(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.from_numpy(rng.integers(0, 0x7F, shape).astype(np.uint8))
        scale = rng.integers(118, 137, tuple(-(-n // block) for n in shape)).astype(np.uint8)
        return codes.view(torch.float8_e4m3fn), torch.from_numpy(scale).view(torch.float8_e8m0fnu)

    a, b = fp8((groups * block, 512)), fp8((8, groups * r))
    exact = [reference.dequantize(*pair, block_k=block, block_mn=block) for pair in (a, b)]
    for rank in {0, tp_size // 2, tp_size - 1}:
        found = wo_a_for_arch(*a, n_groups=groups, o_lora_rank=block, k=512, tp_rank=rank, **shared)
        n = groups // tp_size * block
        assert found.weight.shape == (groups // tp_size, block, 512) and found.weight.is_contiguous()
        assert torch.equal(values(found, block).flatten(0, 1), exact[0][rank * n : (rank + 1) * n])
        found = wo_b_for_arch(*b, hidden_size=8, k=groups * r, tp_rank=rank, **shared)
        n = groups * r // tp_size
        assert found.weight.shape == (8, n) and found.weight.is_contiguous()
        assert torch.equal(values(found, block), exact[1][:, rank * n : (rank + 1) * n])


def test_a_sharded_config_reads_its_slice_of_the_files() -> None:
    whole = load_o_proj(TINY, LAYER, V4, "sm90")
    for tp_size in (2, 4):
        for rank in range(tp_size):
            found = load_o_proj(TINY, LAYER, V4.shard(tp_size, rank), "sm90")
            n = 4 // tp_size
            assert equal(found.wo_a.weight, whole.wo_a.weight[rank * n : (rank + 1) * n])
            assert equal(found.wo_b.weight, whole.wo_b.weight[:, 128 * rank * n : 128 * (rank + 1) * n])
    with pytest.raises(CheckpointError, match=r"wo_b\.weight: a rank's K=256 \(tp_size=2\) is not a multiple of 512"):
        load_o_proj(TINY, LAYER, V4.shard(2), "sm100")


def test_ranks_that_do_not_divide_are_named() -> None:
    content = tensors()
    sizes = {"n_groups": 4, "o_lora_rank": 128, "k": 512, "arch": "sm90"}
    with pytest.raises(ValueError, match="tp_size=3 does not divide n_groups=4"):
        wo_a_for_arch(content[A], content[A_SCALE], tp_size=3, **sizes)
    with pytest.raises(ValueError, match="tp_rank=4 must lie in"):
        wo_a_for_arch(content[A], content[A_SCALE], tp_size=4, tp_rank=4, **sizes)
    with pytest.raises(ValueError, match="tp_size=3 does not divide K=512"):
        wo_b_for_arch(content[B], content[B_SCALE], hidden_size=32, k=512, arch="sm90", tp_size=3)


# What is wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, change, message",
    [
        (A, None, r"is missing; expected e4m3 or BF16 \(512, 512\)"),
        (A_SCALE, None, r"is missing; expected torch\.float8_e8m0fnu \(4, 4\)"),
        (B, None, r"is missing; expected e4m3 or BF16 \(32, 512\)"),
        (B_SCALE, None, r"is missing; expected torch\.float8_e8m0fnu \(1, 4\)"),
        (A, lambda t: t[:384], r"has shape \(384, 512\); expected \(512, 512\)"),
        (A, lambda t: t.view(256, 1024), r"has shape \(256, 1024\); expected \(512, 512\)"),
        (
            B,
            lambda t: t.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn),
            r"shape \(512, 32\); expected \(32",
        ),
        (B_SCALE, lambda t: t.view(4, 1), r"has shape \(4, 1\); expected \(1, 4\), one a 128x128 block"),
        (A, lambda t: t.float(), r"has dtype torch\.float32; expected float8_e4m3fn or bfloat16"),
        (A_SCALE, lambda t: t.float(), r"has dtype torch\.float32; .*\(checkpoint_scale='e8m0'\)"),
        (A_SCALE, lambda t: t.view(torch.uint8), r"has dtype torch\.uint8; expected torch\.float8_e8m0fnu"),
        (A_SCALE, lambda t: t.view(torch.uint8).clone().fill_(255).view(t.dtype), r"\[0, 0, 0\] is E8M0 byte 255"),
        (A, lambda t: t.view(torch.uint8).clone().fill_(0xFF).view(t.dtype), r"\[0, 0, 0\] .* is an e4m3 NaN"),
    ],
)
def test_a_bad_tensor_is_named(name: str, change: Any, message: str, tmp_path: Path) -> None:
    content = tensors()
    tensor = content.pop(name)
    if change is not None:
        content[name] = change(tensor)
    for source in (content, write(tmp_path, content)):
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ".*" + message):
            load_o_proj(source, LAYER, V4, "sm90")


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_fp32_scales_are_named(value: float) -> None:
    content = tensors("v4-fp32")
    content[B_SCALE][0, 2] = value
    for requantize in (False, True):
        with pytest.raises(CheckpointError, match=rf"wo_b\.scale\[0, 2\] = {value!r}; expected a positive finite"):
            load_o_proj(content, LAYER, FORMS["v4-fp32"], "sm90", requantize=requantize)


def test_a_scale_beside_a_bf16_weight_is_refused() -> None:
    content = tensors("v4-bf16") | {A_SCALE: torch.ones(4, 4)}
    with pytest.raises(CheckpointError, match=r"wo_a\.scale is there although .* is bfloat16"):
        load_o_proj(content, LAYER, V4, "sm90")


SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("length", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_named(length: int, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "copy"))
    whole = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(whole[:length])
    with pytest.raises(CheckpointError, match=rf"{SHARD} is no whole safetensors file"):
        load_o_proj(folder, LAYER, V4, "sm90")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is no JSON"),
        ("[]", "has no 'weight_map'"),
        ('{"weight_map": {"x": 1}}', "has no 'weight_map'"),
        (json.dumps({"weight_map": {A: "../other.safetensors"}}), "expected a file name without a folder"),
        (json.dumps({"weight_map": {A: "absent.safetensors"}}), r"absent\.safetensors is missing; the index names it"),
        (json.dumps({"weight_map": {A: SHARD.replace("1-of", "2-of")}}), rf"holds no {A}; the index says it does"),
    ],
)
def test_a_bad_index_is_named(text: str, message: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "copy"))
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_o_proj(folder, LAYER, V4, "sm90")


def test_nothing_to_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds neither .* nor a \.safetensors file"):
        load_o_proj(tmp_path, LAYER, V4, "sm90")
    with pytest.raises(FileNotFoundError, match="is neither a file nor a folder"):
        load_o_proj(tmp_path / "absent", LAYER, V4, "sm90")
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"x is in both .*a\.safetensors and .*b\.safetensors"):
        load_o_proj(tmp_path, LAYER, V4, "sm90")
