"""The adapter of FlashInfer, on stand-ins that have the signatures of flashinfer-python 0.7.4 and read memory as its
kernels do; and what is said where FlashInfer, one of its functions or a GPU is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from typer.testing import CliRunner

from conformance import flashinfer_adapter
from conformance.case import Case
from conformance.cli import app
from conformance.implementation import load_implementation
from conformance.inputs import build
from conformance.stages import run_stages
from oproj.arch import get_arch
from oproj.engines import EngineUnavailable

SPEC = "conformance.adapters:FlashInferImplementation"
SMALL: dict[str, Any] = {"n_groups": 2, "o_lora_rank": 256, "hidden_size": 128, "padded_heads": 20}


def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert cos_sin_cache.dtype == torch.float32 and cos_sin_cache.is_contiguous() and positions.is_contiguous()
    assert query.dtype == key.dtype == torch.bfloat16 and not is_neox

    def turned(x: torch.Tensor) -> torch.Tensor:
        x = x.view(x.shape[0], -1, head_size).float()
        cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
        even, odd = x[..., ::2], x[..., 1::2]
        pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        return pairs.flatten(1).bfloat16()

    return turned(query), turned(key)


def per_token_group_quant_8bit(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    backend: Literal["cutile", "cuda"] = "cutile",
) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16
    assert column_major_scales and scale_tma_aligned and scale_ue8m0
    assert backend == "cutile" or group_size == 128
    blocks = x.float().unflatten(1, (-1, group_size))
    size = torch.fmax(blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1), torch.tensor(eps))
    scale = torch.exp2(torch.ceil(torch.log2(torch.fmax(size / 448, torch.tensor(1e-10)))))
    codes = torch.fmin(torch.fmax(blocks / scale[..., None], torch.tensor(-448.0)), torch.tensor(448.0))
    storage = torch.empty(scale.shape[1], -(-len(x) // 4) * 4)
    storage[:, : len(x)] = scale.t()
    return codes.flatten(1).to(torch.float8_e4m3fn), storage[:, : len(x)].t()


def fp8_blockscale_gemm_sm90(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    assert input_scale is not None and weight_scale is not None and input.is_contiguous() and weight.is_contiguous()
    (m, k), n = input.shape, weight.shape[0]
    assert weight_scale.shape == (n // 128, k // 128) and weight_scale.is_contiguous()
    # TMA descriptor of a's scales: from the address on, tokens fastest, columns of 4*ceil(M/4)
    scale = torch.as_strided(input_scale, (m, k // 128), (1, -(-m // 4) * 4))
    return _product(input, scale, weight, weight_scale)


def gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: Literal["MN", "K"] | None = None,
    mma_sm: int = 1,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: Literal["cutlass", "trtllm", "cutile", "cute-dsl", "auto"] = "cutlass",
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[0]
    assert m % 4 == 0 and scale_major_mode == "K" and scale_granularity_mnk == (1, 128, 128) and backend == "cutlass"
    assert a_scale.shape == (m, k // 128) and b_scale.shape == (n // 128, k // 128)
    assert all(t.is_contiguous() for t in (a, b, a_scale, b_scale)) and a_scale.dtype == b_scale.dtype == torch.float32
    return _product(a, a_scale, b, b_scale)


def _product(a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
    x = a.double() * sa.double().repeat_interleave(128, 1)
    w = b.double() * sb.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (x @ w.T).bfloat16()


REAL: dict[str, tuple[Callable[..., Any], ...]] = {
    "flashinfer.rope": (apply_rope_with_cos_sin_cache,),
    "flashinfer.quantization": (per_token_group_quant_8bit,),
    "flashinfer.gemm": (fp8_blockscale_gemm_sm90, gemm_fp8_nt_groupwise),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has FlashInfer and the GPU asked for, as far as the adapter can tell."""
    package = ModuleType("flashinfer")
    package.__dict__.update(__path__=[], __version__="0.7.4")
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    for name, functions in REAL.items():
        module = ModuleType(name)
        module.__dict__.update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flashinfer_adapter, "_device", lambda row: torch.device("cpu"))


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize(
    "more",
    [
        {"tokens": 5, "family": "wide", "padding_slots": 1, "position_family": "small"},
        {"tokens": 3, "family": "tiny", "position_family": "start"},
        {"tokens": 5, "family": "wide", "wo_a_dtype": "bf16", "position_family": "small"},
        {"tokens": 0},
    ],
)
def test_every_stage_of_it_passes(installed: None, arch: str, more: dict[str, Any]) -> None:
    mine = load_implementation(SPEC, arch)
    results = run_stages(Case(arch, "v4-flash", **SMALL, **more), mine)
    assert [f"{r.stage} {r.oracle}: {r.verdict.reason}" for r in results if r.verdict.status == "fail"] == []
    if more["tokens"]:
        passed = {(r.stage, r.oracle) for r in results if r.verdict.status == "pass"}
        assert {("quantize", "bound"), ("wo_a", "bound"), ("wo_b", "bound")} <= passed
        assert (("quantize", "attainable") in passed) == ("wo_a_dtype" not in more)
    assert mine.engine.describe() | {"engine": "flashinfer", "version": "0.7.4"} == mine.engine.describe()  # type: ignore[attr-defined]


def test_the_rounding_before_the_quantiser_is_seen_where_it_is_not_declared(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_adapter.FlashInferImplementation, "o_known", "exact")
    case = Case("sm90", "v4-flash", 5, family="wide", position_family="small", **SMALL)
    results = run_stages(case, load_implementation(SPEC, "sm90"))
    failed = {(r.stage, r.oracle) for r in results if r.verdict.status == "fail"}
    assert ("quantize", "attainable") in failed and {stage for stage, _ in failed} == {"quantize"}


def test_what_its_products_have_no_room_for_is_refused(installed: None) -> None:
    products = flashinfer_adapter.FlashInferProducts(get_arch("sm100"))
    x = torch.zeros(4, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="blocks of 32: FlashInfer's product takes one scale for 128 of K"):
        products.fp8_gemm_nt((x, x), (x, x), torch.zeros(4, 4), recipe=(1, 1, 32))
    with pytest.raises(ValueError, match="expr='bhr,hdr->hbd' is none of FlashInfer's products"):
        products.fp8_einsum("bhr,hdr->hbd", (x, x), (x, x), torch.zeros(4, 4), recipe=(1, 1, 128))
    words = torch.full((256, 2), 0x7F7F7F7F, dtype=torch.int32)
    assert flashinfer_adapter.weight_blocks(words, 256).tolist() == [[1.0] * 8] * 2
    words[130, 1] += 1
    with pytest.raises(ValueError, match="weight scales differ within 128 rows"):
        flashinfer_adapter.weight_blocks(words, 256)


def test_without_it_the_command_ends_with_3_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(
        EngineUnavailable, match=r"flashinfer\.rope cannot be imported .*pip install 'flashinfer-python"
    ):
        load_implementation(SPEC, "sm90")
    result = CliRunner().invoke(app, ["run", "--arch", "sm90", "--implementation", SPEC])
    assert result.exit_code == 3
    assert "pip install 'flashinfer-python>=0.7.4'" in " ".join(result.stderr.split())


def test_without_a_gpu_of_the_row_it_is_missing(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(flashinfer_adapter, "find", lambda name: None)
    monkeypatch.setattr(flashinfer_adapter, "current_gpu", lambda: (None, None, "no CUDA GPU: torch sees none"))
    with pytest.raises(EngineUnavailable, match="'flashinfer' needs a GPU of row sm100: no CUDA GPU: torch sees none"):
        load_implementation(SPEC, "sm100")
    found = (torch.device("cuda", 0), get_arch("sm90"), "")
    monkeypatch.setattr(flashinfer_adapter, "current_gpu", lambda: found)
    with pytest.raises(EngineUnavailable, match="needs a GPU of row sm100: the current GPU is of sm90"):
        load_implementation(SPEC, "sm100")


def test_a_release_without_a_function_or_an_argument_is_missing(installed: None) -> None:
    def older(x: torch.Tensor, group_size: int) -> None: ...

    module: Any = sys.modules["flashinfer.quantization"]
    module.per_token_group_quant_8bit = older
    with pytest.raises(EngineUnavailable, match=r"per_token_group_quant_8bit of this release: .*column_major_scales"):
        load_implementation(SPEC, "sm90")
    del module.per_token_group_quant_8bit
    with pytest.raises(EngineUnavailable, match=r"flashinfer\.quantization has no per_token_group_quant_8bit"):
        load_implementation(SPEC, "sm90")


def test_arguments_that_address_outside_never_reach_it(installed: None) -> None:
    mine, case = load_implementation(SPEC, "sm90"), Case("sm90", "v4-flash", 3, **SMALL)
    inputs = build(case)
    far = inputs.positions + len(inputs.cos_sin_cache)
    with pytest.raises(ValueError, match="positions lie in"):
        mine.quantize(inputs.o, far, inputs.cos_sin_cache, config=case.config)


def test_it_is_published_under_the_name_flashinfer() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert (
        f'\nflashinfer = "{SPEC}"\n' in text.split('[project.entry-points."oproj.implementations"]')[1].split("\n[")[0]
    )
