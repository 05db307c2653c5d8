"""Arguments at the edge of what a call takes: odd strides, nothing at all, other dtypes, buffers of another call."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.__main__ import main as benchmarks
from oproj.buffers import OProjBuffers
from oproj.engines.into import check_tensor
from oproj.engines.software.quantizers import rotate_and_quantize
from oproj.grouped_lora import GroupedLora
from oproj.grouped_wo_a import DeepseekV4GroupedWoA
from oproj.kernels import inv_rope_quant, row_quantizer
from oproj.rope_quant import query_positions
from oproj.safetensors_files import INDEX, CheckpointError, open_checkpoint
from oproj.weights import layout_weight_scales, requantize_to_ue8m0
from oproj.wo_b import BlockLinear, bf16_wo_b, reduce_partials

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "scale", [torch.ones(4, 8)[:1, :5], torch.ones(8, 1).T, torch.ones(3, 4, 8)[:, :1, :2], torch.ones(1, 9)[:, :1]]
)
def test_fp32_scales_have_the_strides_of_a_fresh_tensor(scale):
    laid_out = layout_weight_scales(scale, arch="sm90", rows=128)
    assert laid_out.stride() == torch.empty(scale.shape).stride() and torch.equal(laid_out, scale)


def test_scales_that_cannot_be_laid_out_are_named():
    with pytest.raises(ValueError, match=r"scale has shape \(1, 3\); 3 blocks do not fill int32 words"):
        layout_weight_scales(torch.ones(1, 3), arch="sm100", rows=128)
    with pytest.raises(ValueError, match="block="):
        layout_weight_scales(torch.ones(1, 4), arch="sm100", rows=128, block=(0, 128))


@pytest.mark.parametrize("strides", [(7, 3, 2), (1, 1, 1), (0, 0, 0)])
def test_no_tokens_of_any_strides_are_quantised_to_nothing(strides):
    o = torch.empty_strided((0, 8, 512), strides)
    codes, scale = rotate_and_quantize(o, torch.zeros(0, dtype=torch.int64), torch.ones(4, 64), n_groups=1)
    assert codes.shape == (0, 1, 4096) and scale.shape == (0, 1, 8)
    with pytest.raises(ValueError, match="o has shape"):
        rotate_and_quantize(torch.tensor(1.0), torch.zeros(1, dtype=torch.int64), torch.ones(4, 64), n_groups=1)


def test_requantisation_takes_empty_and_transposed_weights():
    assert requantize_to_ue8m0(torch.empty(0, 128, dtype=E4M3), torch.empty(0, 1)).codes.shape == (0, 128)
    codes, scale = torch.randn(256, 128).to(E4M3), torch.tensor([[1.5], [0.3]])
    turned, straight = requantize_to_ue8m0(codes.T, scale.T), requantize_to_ue8m0(codes.T.contiguous(), scale.T)
    assert torch.equal(turned.codes.view(torch.uint8), straight.codes.view(torch.uint8))
    with pytest.raises(ValueError, match="block="):
        requantize_to_ue8m0(codes, scale, (0, 0))


def test_wo_b_names_what_it_refuses():
    with pytest.raises(TypeError, match=r"scale has dtype torch\.float64"):
        BlockLinear.from_checkpoint(
            torch.zeros(32, 32).to(E4M3), torch.ones(1, 1).double(), arch="sm90", block=(32, 32)
        )
    with pytest.raises(ValueError, match="codes has shape"):
        BlockLinear.from_checkpoint(torch.zeros(1, 32, 32).to(E4M3), torch.ones(1, 1, 1), arch="sm90")
    with pytest.raises(ValueError, match=r"weight has shape|z has shape"):
        bf16_wo_b(torch.ones(1, 1).bfloat16(), torch.tensor(1.0).bfloat16())
    stacked = torch.randn(2, 3, 4).bfloat16()
    assert torch.equal(reduce_partials(stacked), reduce_partials(list(stacked)))


def test_query_lengths_are_whole_numbers():
    with pytest.raises(ValueError, match="q_len"):
        query_positions(torch.tensor([3]), q_len=1.5)
    with pytest.raises(ValueError, match="cum_seq_lens_q has dtype"):
        query_positions(torch.tensor([3]), cum_seq_lens_q=torch.tensor([0.0, 2.5]))


@pytest.mark.parametrize("content", ['{"weight_map": {"w": ".."}}', '{"weight_map": {"w": ""}}', "[" * 100_000])
def test_an_index_names_files_of_its_own_folder(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


def test_wo_a_can_be_made_without_memory():
    meta, real = (DeepseekV4GroupedWoA(512, 512, n_groups=4, arch="sm100", device=d) for d in ("meta", "cpu"))
    for name, parameter in real.named_parameters():
        assert meta.get_parameter(name).is_meta and meta.get_parameter(name).stride() == parameter.stride()


def test_an_adapter_of_no_tensor_and_buffers_of_no_size_are_named():
    with pytest.raises(TypeError, match="adapter 'x': a is list"):
        GroupedLora(4, 2, 1, 0, 1).add("x", [1], torch.ones(2, 1))
    sizes = {"n_groups": 1, "nope_dim": 448, "rope_dim": 64, "o_lora_rank": 1, "tma_aligned_scales": False}
    with pytest.raises(ValueError, match="heads_per_group"):
        OProjBuffers.allocate(1, heads_per_group=-1, einsum_recipe=(1, 128, 128), **sizes)
    with pytest.raises(ValueError, match="einsum_recipe"):
        OProjBuffers.allocate(1, heads_per_group=1, einsum_recipe=(1, 128, 0), **sizes)


def test_the_kernels_refuse_what_they_would_read_wrongly(monkeypatch):
    for module in (inv_rope_quant, row_quantizer):
        monkeypatch.setattr(module, "unavailable_reason", lambda: None)
    call = (torch.zeros(1, 8, 512).bfloat16(), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 64), 1, 8)
    with pytest.raises(ValueError, match="variant='fma_sin'"):
        inv_rope_quant.fused_inv_rope_fp8_quant(*call, variant="fma_sin")
    with pytest.raises(ValueError, match="o is on cpu"):
        inv_rope_quant.fused_inv_rope_fp8_quant(*call)
    with pytest.raises(ValueError, match="x is on cpu"):
        row_quantizer.quantize_rows(call[0].flatten(1))
    codes, scales = row_quantizer.allocate_rows(3, 512, 128, True, "cpu")
    check_tensor("scales", scales, torch.int32, (3, 1), (1, 4), codes.device)


@pytest.mark.parametrize(("arguments", "named"), [(["--only", "nope"], "'nope'"), (["--out", "FILE/x"], "--out")])
def test_benchmarks_refuse_bad_usage(monkeypatch, capsys, tmp_path, arguments, named):
    (tmp_path / "file").touch()
    given = [argument.replace("FILE", str(tmp_path / "file")) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *given])
    with pytest.raises(SystemExit) as stopped:
        benchmarks()
    assert stopped.value.code == 2 and named in capsys.readouterr().err
