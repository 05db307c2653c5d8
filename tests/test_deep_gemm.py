"""The GPU engine refuses where no DeepGEMM works, checks first, and hands calls on unchanged."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

from fake_deep_gemm import SIGNATURES, FakeDeepGemm, install, no_gpu, pretend_gpu
from fp8_calls import valid, valid_gemm
from oproj.arch import SM90, SM100
from oproj.engines import EngineUnavailable, discovery, get_engine
from oproj.engines.deep_gemm import DeepGemmEngine
from oproj.engines.software import SoftwareEngine


@pytest.fixture(autouse=True)
def _forget_findings():
    discovery.examined.cache_clear()
    yield
    discovery.examined.cache_clear()


@pytest.mark.parametrize("make", [DeepGemmEngine, lambda arch: get_engine("deep_gemm", arch)])
def test_without_a_gpu_the_engine_says_so_and_lists_what_was_found(monkeypatch, make):
    no_gpu(monkeypatch)
    install(monkeypatch, FakeDeepGemm(SM90))
    with pytest.raises(EngineUnavailable, match=r"(?s)GPU of row sm90.*no CUDA GPU.*deep_gemm from .*9\.9"):
        make("sm90")


def test_a_gpu_of_another_row_is_refused(monkeypatch):
    pretend_gpu(monkeypatch, SM100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA B200")
    install(monkeypatch, FakeDeepGemm(SM100))
    with pytest.raises(
        EngineUnavailable, match=r"needs a GPU of row sm90, and the current GPU is NVIDIA B200 \(sm100\)"
    ):
        DeepGemmEngine("sm90")


def test_where_no_candidate_works_every_reason_is_listed(monkeypatch):
    pretend_gpu(monkeypatch, SM90)
    install(
        monkeypatch, FakeDeepGemm(SM90, error=RuntimeError("Dimension specified as -1 but tensor has no dimensions"))
    )
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineUnavailable, match=r"(?s)no DeepGEMM works for sm90.*deep_gemm from.*another torch.*vllm"):
        DeepGemmEngine("sm90")


def test_the_engine_takes_the_candidate_that_works(monkeypatch):
    pretend_gpu(monkeypatch, SM90)
    fake = install(monkeypatch, FakeDeepGemm(SM90))
    engine = DeepGemmEngine("sm90")
    assert engine.module is fake
    described = engine.describe()
    assert (described["version"], described["torch"]) == ("9.9", torch.__version__)
    assert described["quantizer"] == "software" and described["arch"] == "sm90"
    assert engine.nan_policy == "laundered"
    engine.quantizer = "kernel"
    assert engine.nan_policy == "kept"


def engine_with(arch, **options):
    fake = FakeDeepGemm(arch, **options)
    return DeepGemmEngine(arch, module=fake, device="cpu"), fake


def filled(call):
    """The call with codes, so that a product can be computed."""
    for tensor in (call.a, call.b):
        tensor.copy_(torch.randint(-8, 9, tensor.shape, generator=torch.Generator().manual_seed(1)).to(tensor.dtype))
    return call


@pytest.mark.parametrize("arch, recipe", [("sm90", (1, 128, 128)), ("sm100", (1, 1, 128)), ("sm100", (1, 1, 32))])
def test_a_call_arrives_with_its_recipe_and_gives_the_same_bits(arch, recipe):
    engine, fake = engine_with(arch)
    call = filled(valid(arch, recipe, 5, 2, 256, 136))
    engine.fp8_einsum(call.expr, [call.a, call.sa], (call.b, call.sb), call.d, recipe=recipe)
    expected = torch.empty_like(call.d)
    SoftwareEngine(arch).fp8_einsum(call.expr, (call.a, call.sa), (call.b, call.sb), expected, recipe=recipe)
    assert torch.equal(call.d, expected) and bool(expected.any())
    gemm = filled(valid_gemm(arch, recipe, 5, 256, 136))
    engine.fp8_gemm_nt((gemm.a, gemm.sa), (gemm.b, gemm.sb), gemm.d, recipe=recipe)
    assert fake.calls == [("fp8_einsum", recipe), ("fp8_gemm_nt", recipe)]


@pytest.mark.parametrize("arch, recipe", [("sm90", (1, 128, 128)), ("sm100", (1, 1, 128))])
def test_gemm_without_a_recipe_hands_on_the_default(arch, recipe):
    engine, fake = engine_with(arch)
    call = filled(valid_gemm(arch, recipe, 3, 128, 8))
    engine.fp8_gemm_nt((call.a, call.sa), (call.b, call.sb), call.d)
    assert fake.calls == [("fp8_gemm_nt", recipe)]


def test_a_wrong_call_does_not_reach_the_library():
    engine, fake = engine_with("sm90")
    call = filled(valid("sm90", (1, 128, 128), 5, 2, 256, 136))
    with pytest.raises(ValueError, match="d has G=3"):
        engine.fp8_einsum(
            call.expr, (call.a, call.sa), (call.b, call.sb), torch.empty((5, 3, 136), dtype=torch.bfloat16)
        )
    gemm = filled(valid_gemm("sm90", (1, 128, 128), 5, 256, 136))
    with pytest.raises(TypeError, match=r"d has dtype torch\.float32"):
        engine.fp8_gemm_nt((gemm.a, gemm.sa), (gemm.b, gemm.sb), gemm.d.float())
    assert fake.calls == []


def test_zero_tokens_return_before_a_launch():
    engine, fake = engine_with("sm90", error=RuntimeError("a launch"))
    call = valid("sm90", (1, 128, 128), 0, 2, 256, 136)
    engine.fp8_einsum(call.expr, (call.a, call.sa), (call.b, call.sb), call.d)
    gemm = valid_gemm("sm90", (1, 128, 128), 0, 256, 136)
    engine.fp8_gemm_nt((gemm.a, gemm.sa), (gemm.b, gemm.sb), gemm.d)
    assert fake.calls == []


def test_tensors_of_another_device_are_refused():
    engine = DeepGemmEngine("sm90", module=FakeDeepGemm("sm90"), device="cuda:0")
    call = valid("sm90", (1, 128, 128), 5, 2, 256, 136)
    with pytest.raises(ValueError, match="the tensors are on cpu; this engine works on cuda:0"):
        engine.fp8_einsum(call.expr, (call.a, call.sa), (call.b, call.sb), call.d)


@pytest.mark.parametrize("packed, quantize", [(False, True), (True, True), (False, False)])
def test_the_quantiser_is_the_software_model_with_its_layout(packed, quantize):
    engine, _ = engine_with("sm90")
    o = torch.randn((3, 6, 512), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)[:, :4]
    positions = torch.tensor([0, 5, 7])
    angles = torch.arange(8)[:, None] / 10000.0 ** (torch.arange(32) / 32)
    cache = torch.cat([angles.cos(), angles.sin()], 1)
    arguments = {
        "n_groups": 2,
        "heads_per_group": 2,
        "nope_dim": 448,
        "rope_dim": 64,
        "quant_group_size": 128,
        "tma_aligned_scales": packed,
        "quantize": quantize,
    }
    mine = engine.inv_rope_fp8_quant(o, positions, cache, **arguments)
    theirs = SoftwareEngine("sm90").inv_rope_fp8_quant(o, positions, cache, **arguments)
    for left, right in zip(mine, theirs, strict=True):
        assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)
        assert torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    if quantize:
        behind = mine[1].as_strided((4, *mine[1].shape[1:]), mine[1].stride())[3]
        assert not bool(behind.any()), "scale rows behind the view are zero"


def test_the_stand_in_has_the_signatures_of_the_real_wheel():
    """What the engine passes by keyword is bound by sgl-deep-gemm 0.1.4.post1, whose signatures these are."""
    for name, text in SIGNATURES.items():
        assert str(inspect.signature(getattr(FakeDeepGemm("sm90"), name))) == text
