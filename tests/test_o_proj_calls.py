"""Each bad argument of the o_proj block is named, and wo_b never called with what came of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from o_proj_arguments import RANK, arguments, in_slots
from oproj.engines.software import SoftwareEngine
from oproj.o_proj import deep_gemm_fp8_o_proj

BOTH = ["sm90", "sm100"]
Change = Callable[[dict[str, Any]], dict[str, Any]]


def other_weight(change: Callable[[torch.Tensor], Any]) -> Change:
    return lambda a: {"wo_a": SimpleNamespace(**vars(a["wo_a"]) | {"weight": change(a["wo_a"].weight)})}


def other_scale(change: Callable[[torch.Tensor], Any]) -> Change:
    return lambda a: {"wo_a": SimpleNamespace(weight=a["wo_a"].weight, weight_scale=change(a["wo_a"].weight_scale_inv))}


def quantised(**changes: Any) -> Change:
    return lambda a: {"o": in_slots(a, 4, 0)} | changes


BAD: list[tuple[Change, type[Exception], str]] = [
    (lambda a: {"o": a["o"].float()}, TypeError, r"o has dtype torch\.float32"),
    (lambda a: {"o": a["o"].tolist()}, TypeError, "o is list"),
    (lambda a: {"o": None}, TypeError, "o is NoneType"),
    (lambda a: {"o": a["o"][:, :3]}, ValueError, "o has 3 heads"),
    (lambda a: {"o": a["o"].mT.contiguous().mT}, ValueError, "o has strides"),
    (lambda a: {"positions": a["positions"] + 6}, ValueError, "positions lie in"),
    (lambda a: {"positions": None}, TypeError, "positions is NoneType"),
    (lambda a: {"n_groups": 1}, ValueError, r"wo_a\.weight has shape \(2, 16, 1024\); n_groups=1"),
    (lambda a: {"n_groups": 3}, ValueError, r"wo_a\.weight .* n_groups=3, o_lora_rank=16 .* need \(3, 16, 1024\)"),
    (lambda a: {"n_groups": -2}, ValueError, "n_groups=-2"),
    (lambda a: {"o_lora_rank": 8}, ValueError, r"wo_a\.weight .* o_lora_rank=8"),
    (lambda a: {"o_lora_rank": -16}, ValueError, "o_lora_rank=-16"),
    (lambda a: {"heads_per_group": 4}, ValueError, r"wo_a\.weight .* K = .* = 2048"),
    (lambda a: {"einsum_recipe": None}, ValueError, "einsum_recipe=None"),
    (lambda a: {"einsum_recipe": (128, 128)}, ValueError, r"einsum_recipe=\(128, 128\)"),
    (lambda a: {"einsum_recipe": (1, 1, 64)}, ValueError, r"recipe=\(1, 1, 64\) is not supported"),
    (lambda a: {"einsum_recipe": (1, 1, 48)}, ValueError, "quant_group_size=48"),
    (other_weight(lambda w: w.flatten(0, 1)), ValueError, r"wo_a\.weight has shape \(32, 1024\)"),
    (other_weight(lambda w: w.mT), ValueError, r"wo_a\.weight has shape \(2, 1024, 16\)"),
    (other_weight(lambda w: w.float()), TypeError, r"wo_a\.weight has dtype torch\.float32"),
    (other_weight(lambda w: w.view(torch.uint8)), TypeError, r"wo_a\.weight has dtype torch\.uint8"),
    (other_weight(lambda w: w.to("meta")), ValueError, r"wo_a\.weight is on meta but o is on cpu"),
    (other_weight(lambda w: None), TypeError, r"wo_a\.weight is NoneType"),
    (other_weight(lambda w: w.float().bfloat16().flatten()), ValueError, r"wo_a\.weight has shape \(32768,\)"),
    (other_weight(lambda w: w.float().bfloat16().flatten(0, 1).T), ValueError, r"wo_a\.weight has shape \(1024, 32\)"),
    (other_scale(lambda s: s.double()), TypeError, r"b\[1\] \(scales\) has dtype torch\.float64"),
    (other_scale(lambda s: s[:1]), ValueError, r"b\[1\] \(scales\) has shape \(1, "),
    (other_scale(lambda s: s.to("meta")), ValueError, "b_scale is on meta but a is on cpu"),
    (other_scale(lambda s: s.tolist()), TypeError, r"wo_a\.weight_scale is list"),
    (quantised(n_groups=5), ValueError, "n_groups=5"),
    (quantised(heads_per_group=4), ValueError, "K = .* = 2048"),
]


@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("change, error, message", BAD)
def test_a_bad_argument_is_named_before_wo_b_is_called(arch, change, error, message) -> None:
    args = arguments(arch, 3)
    args["wo_b"] = lambda flat: pytest.fail("wo_b was called")
    with pytest.raises(error, match=message):
        deep_gemm_fp8_o_proj(**args | change(args))


@pytest.mark.parametrize("arch", BOTH)
def test_a_quantised_input_refuses_a_bf16_weight(arch: str) -> None:
    args = arguments(arch, 3)
    wo_a = SimpleNamespace(weight=torch.zeros((2, RANK, 1024), dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"o is quantised but wo_a\.weight has dtype torch\.bfloat16"):
        deep_gemm_fp8_o_proj(**args | {"o": in_slots(args, 4, 0), "wo_a": wo_a})


def test_fewer_slots_than_groups_are_refused() -> None:
    wide, args = in_slots(arguments("sm90", 3), 2, 0), arguments("sm90", 3, 3)
    with pytest.raises(ValueError, match="n_groups=3 but the activation has 2 group slots"):
        deep_gemm_fp8_o_proj(**args | {"o": wide})


@pytest.mark.parametrize("arch", BOTH)
def test_scales_of_the_other_format_are_refused_by_the_recipe(arch: str) -> None:
    """Packed words under the FP32 recipe, or FP32 scales under a packed one."""
    args = arguments(arch, 3, engine=SoftwareEngine(arch))
    flipped = args | {"tma_aligned_scales": not args["tma_aligned_scales"]}
    with pytest.raises(TypeError, match=r"\(scales\) has dtype .*; recipe .* takes"):
        deep_gemm_fp8_o_proj(**flipped)
    with pytest.raises(TypeError, match=r"\(scales\) has dtype .*; recipe .* takes"):
        deep_gemm_fp8_o_proj(**args | {"o": in_slots(flipped, 4, 0)})
