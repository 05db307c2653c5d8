"""The fused kernel as far as a machine without a GPU can show it: it compiles everywhere, and it refuses clearly."""

from __future__ import annotations

import itertools

import pytest
import torch

from oproj import kernels
from oproj.kernels import compile as compiler
from oproj.kernels import row_quantizer
from oproj.kernels.compile import LaunchShape
from oproj.kernels.inv_rope_quant import launch_shape

TARGETS = ("sm_90a", "sm_100a", "sm_120a")
BLOCKS = (128, 64, 32, 0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("block", BLOCKS)
def test_every_mode_compiles_for_every_target(target, block):
    """NVRTC needs no GPU. A broken line in the source fails here for all three architectures."""
    for packed, shape in ((False, LaunchShape(4, 4, 1, True, True)), (True, LaunchShape(1, 4, 1, False, False))):
        config = f"{block}, {str(packed).lower()}, {shape.tokens}, true, true, false"
        macros = compiler.defines(config, shape, shape.tokens == 1)
        code = compiler.program(macros, target).compile("cubin").code
        assert len(code) > 1000 and compiler.NAME.encode() in code


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", ["128, false", "128, true", "32, true"])
def test_the_row_quantiser_compiles_for_every_target(target, config):
    code = compiler.program({"ROWS_CONFIG": config, "WARPS": "4"}, target).compile("cubin").code
    assert len(code) > 1000 and row_quantizer.NAME.encode() in code


def test_a_broken_source_does_not_compile(monkeypatch):
    monkeypatch.setattr(compiler, "source", lambda: "this is not CUDA")
    with pytest.raises(Exception, match=r"(?i)compil|nvrtc"):
        compiler.program({}, "sm_90a").compile("cubin")


def test_without_a_gpu_the_kernel_says_why():
    if torch.cuda.is_available():
        assert kernels.unavailable_reason() is None
        return
    assert "no CUDA device" in kernels.unavailable_reason()
    with pytest.raises(kernels.KernelUnavailable, match="no CUDA device"):
        kernels.fused_inv_rope_fp8_quant(
            torch.zeros(1, 8, 512).bfloat16(), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 64), 1, 8
        )


def test_launch_shapes_cover_every_call_and_hold_the_aligned_store():
    """Tokens a warp divides the padded token count (a multiple of 4), and a block never exceeds 1,024 threads."""
    for tokens, heads in itertools.product((1, 3, 64, 1003, 8192, 65537), (8, 16, 64, 128)):
        for quantize in (True, False):
            shape = launch_shape(tokens, heads, quantize)
            assert 4 % shape.tokens == 0 and shape.warps * 32 <= 1024 and shape.blocks >= 1
    assert launch_shape(8192, 128, True) != launch_shape(1, 128, True)
