"""Codes and scales that vLLM's kernel and the fused kernel wrote on an H200: the software quantiser gives them all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from conformance import golden_quantizer
from oproj.engines.software.quantizers import quantize_matrix

METADATA, ARRAYS = golden_quantizer.load(Path(__file__).parent / "golden" / "golden_quantizer.npz")


def test_the_file_says_where_it_comes_from():
    assert all(METADATA[key] for key in ("device", "driver", "cuda", "torch", "kernels", "date", "command"))
    assert {key.split("/")[0] for key in ARRAYS} == {"o", "positions", "table", *golden_quantizer.MODES}


@pytest.mark.parametrize("mode", golden_quantizer.MODES)
def test_the_software_quantiser_gives_the_hardware_bits(mode):
    for key, bits in golden_quantizer.replay(ARRAYS, mode).items():
        assert bits.size == ARRAYS[key].size
        assert np.array_equal(bits, ARRAYS[key]), f"{np.argwhere(bits != ARRAYS[key])[:3].tolist()} of {key} differ"


def test_special_values_are_in_the_vectors():
    codes, scales = ARRAYS["fp32-128/values"], ARRAYS["fp32-128/scales"]
    assert (codes == 0x7E).any() and (codes == 0x80).any() and (codes == 0).any()
    assert (scales == 0x7F800000).any()  # an infinite maximum
    assert (scales == (127 - 42) << 23).any()  # a block of zeros
    nan = (ARRAYS["o"] & 0x7FFF) > 0x7F80
    assert nan.any() and (ARRAYS["bf16/values"] == 0x7FFF).any()


@pytest.mark.parametrize("row", ["deep-gemm-token", "vllm-group-unpacked"])
def test_another_quantiser_is_seen(row):
    """The head that holds a zero block, by a row with another floor or NaN rule does not give the recorded scales."""
    o, _, _ = golden_quantizer.tensors(ARRAYS, "cpu")
    _, scales = quantize_matrix(o[:, 3, :384].contiguous(), row, group_size=128)
    recorded = ARRAYS["fp32-128/scales"][:, 0, 12:15]
    assert not np.array_equal(scales.contiguous().view(torch.int32).numpy(), recorded)
    _, scales = quantize_matrix(o[:, 3, :384].contiguous(), "vllm-fused", group_size=128)
    assert np.array_equal(scales.contiguous().view(torch.int32).numpy(), recorded)
