"""Where the named quantisers write their scales, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from oproj.engines.software.quantizer_table import BOUND_ONLY, QUANTIZERS, get_quantizer
from oproj.engines.software.quantizers import quantize_matrix


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("name", [name for name, row in QUANTIZERS.items() if row.shape == "rows"])
def test_scales_lie_as_the_producer_writes_them(name: str, rows: int) -> None:
    row = QUANTIZERS[name]
    block = max(row.blocks)
    x = torch.ones((rows, 8 * block), dtype=getattr(torch, row.inputs[0]))
    for form in row.formats:
        _, scale = quantize_matrix(x, name, group_size=block, packed=form == "packed")
        columns = 2 if form == "packed" else 8
        assert scale.shape == (rows, columns)
        assert scale.stride() == (1, -(-rows // 4) * 4) if row.mn_major else scale.is_contiguous()


@pytest.mark.parametrize(
    "name, x, changes, error, message",
    [
        ("fp32-epilogue", (1, 512), {}, ValueError, "is bound only: .*approximate reciprocal"),
        ("nobody", (1, 512), {}, ValueError, "quantizer='nobody' is unknown; known: vllm-fused, "),
        ("vllm-group-unpacked", (1, 512), {}, TypeError, r"x has dtype torch\.float32; .* takes torch\.bfloat16"),
        ("act-quant", (1, 512), {"packed": True}, ValueError, "packed=True is none of act-quant; its scales are fp32"),
        ("rope-quant", (1, 512), {}, ValueError, "packed=False is none of rope-quant; its scales are packed"),
        ("act-quant", (1, 512), {"group_size": 16}, ValueError, "group_size=16 is none of act-quant"),
        ("act-quant", (1, 200), {}, ValueError, "K=200 must be a multiple of 128"),
        ("deep-gemm-token", (1, 256), {"packed": True}, ValueError, "K=256 must be a multiple of 512"),
        ("deep-gemm-channel", (200, 8), {}, ValueError, "M=200 must be a multiple of 128"),
        ("act-quant", (1, 1, 512), {}, ValueError, r"x has shape \(1, 1, 512\)"),
    ],
)
def test_bad_arguments_are_named(name, x, changes, error, message) -> None:
    with pytest.raises(error, match=message):
        quantize_matrix(torch.ones(x), name, **changes)


def test_names_and_rows_mean_the_same() -> None:
    assert get_quantizer("act-quant") is get_quantizer(QUANTIZERS["act-quant"])
    assert not set(BOUND_ONLY) & set(QUANTIZERS)
