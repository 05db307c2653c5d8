"""Every public name of the two source documents is here, with its arguments in their order and their defaults.

A drop-in path must take the calls that a serving engine makes; what this project adds comes behind, by keyword only.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

from oproj.activation import QuantizedActivation
from oproj.rope_quant import rope_quant_attn_out

NONE = inspect.Parameter.empty
# name of the document -> (where it is here, positional arguments, keyword arguments, additions by keyword); a value is
# the default, NONE where the argument must be given
PLACE = {"n_groups": NONE, "heads_per_group": NONE, "nope_dim": NONE, "rope_dim": NONE}
RECIPE = {"o_lora_rank": NONE, "einsum_recipe": NONE, "tma_aligned_scales": NONE}
ATTENTION = {"o": NONE, "positions": NONE, "cos_sin_cache": NONE}
FUSED = {"nope_dim": 448, "rope_dim": 64, "quant_group_size": 128, "tma_aligned_scales": False, "quantize": True}
Names = dict[str, Any]
NAMES: dict[str, tuple[str, Names, Names, Names]] = {
    "compute_fp8_einsum_recipe": ("oproj.o_proj", {"block_size": 128}, {}, {"arch": None}),
    "deep_gemm_fp8_o_proj": (
        "oproj.o_proj",
        ATTENTION | {"wo_a": NONE, "wo_b": NONE},
        PLACE | RECIPE,
        {"engine": None, "buffers": None},
    ),
    "rope_quant_attn_out": ("oproj.rope_quant", {"num_tokens": NONE, "device": None}, {}, {}),
    "rope_quant_unsupported_reason": ("oproj.rope_quant", {"layer": NONE}, {}, {}),
    "DeepseekV4GroupedWoA": (
        "oproj.grouped_wo_a",
        {"input_size": NONE, "output_size": NONE},
        {"n_groups": NONE},
        {
            "tp_size": 1,
            "tp_rank": 0,
            "arch": None,
            "dtype": torch.float8_e4m3fn,
            "weight_block": (128, 128),
            "checkpoint_scale": "e8m0",
            "engine": None,
            "device": None,
        },
    ),
    "DeepseekV4GroupedWoA.grouped_input": ("oproj.grouped_wo_a", {"self": NONE} | ATTENTION, PLACE, {}),
    "DeepseekV4GroupedWoA.grouped_forward": ("oproj.grouped_wo_a", {"self": NONE} | ATTENTION, PLACE | RECIPE, {}),
    "fused_inv_rope_fp8_quant": (
        "oproj.quantize",
        ATTENTION | {"n_groups": NONE, "heads_per_group": NONE} | FUSED,
        {},
        {"engine": None, "out": None},
    ),
    "QuantizedActivation": (
        "oproj.activation",
        {"data": NONE, "scale": NONE, "orig_dtype": torch.bfloat16, "orig_shape": None, "quant_key": None},
        {},
        {},
    ),
    "QuantizedActivation.weak_ref": ("oproj.activation", {"self": NONE}, {}, {}),
}


def found(name: str) -> Any:
    here: Any = importlib.import_module(NAMES[name][0])
    for part in name.split("."):
        here = getattr(here, part)
    return here


@pytest.mark.parametrize("name", NAMES)
def test_the_arguments_are_those_of_the_document(name: str) -> None:
    _, positional, keyword, added = NAMES[name]
    parameters = inspect.signature(found(name)).parameters.values()
    by_place = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_keyword = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert by_place == list(positional.items())
    assert by_keyword == keyword | added
    assert len(by_place) + len(by_keyword) == len(parameters), "no * or ** argument swallows a misspelt name"


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_says_what_it_does(name: str) -> None:
    assert (found(name).__doc__ or "").strip()


def test_a_quantized_activation_is_mutable_and_its_weak_ref_owns_nothing() -> None:
    x = rope_quant_attn_out(3, "cpu")
    again = x.weak_ref()
    assert isinstance(again, QuantizedActivation) and again is not x
    assert again.data.data_ptr() == x.data.data_ptr() and again.scale.stride() == x.scale.stride()
    assert (again.orig_dtype, again.orig_shape, again.quant_key) == (x.orig_dtype, x.orig_shape, x.quant_key)
    x.orig_shape = torch.Size((1,))
    assert again.orig_shape == (3, 16, 4096)


@pytest.mark.parametrize("tokens, aligned", [(0, 0), (1, 4), (5, 8)])
def test_the_buffers_of_the_fused_epilogue(tokens: int, aligned: int) -> None:
    x = rope_quant_attn_out(tokens, "cpu")
    assert (x.data.shape, x.data.dtype) == ((tokens, 16, 4096), torch.float8_e4m3fn)
    assert (x.scale.shape, x.scale.dtype) == ((tokens, 16, 8), torch.int32)
    assert (x.orig_dtype, x.orig_shape) == (torch.bfloat16, x.data.shape)
    if tokens:
        assert x.data.stride() == (4096, 4096 * tokens, 1) and x.scale.stride() == (1, 8 * aligned, aligned)
