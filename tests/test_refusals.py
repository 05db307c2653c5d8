"""Each assertion that the serving code lacks and needs, as a row: the gap, a call that falls into it, and our error.

Gaps: the quantiser's kernel assumes what it does not assert (vLLM 0.33.0 ``fused_inv_rope_fp8_quant.py``), DeepGEMM
54e2261 and its distributions take in silence what they should not. Two gaps no look at the arguments can see (a square
grid of weight scales given transposed, scales of the right shape written in another order): comparisons find those.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8_calls
from o_proj_arguments import arguments, in_slots, weight_of
from oproj.activation import QuantizedActivation
from oproj.engines import rope_checks
from oproj.engines.software import SoftwareEngine
from oproj.o_proj import deep_gemm_fp8_o_proj
from oproj.quantize import fused_inv_rope_fp8_quant
from quantizer_calls import random_call

Args = dict[str, Any]
Change = Callable[[Args], Args]
Row = tuple[str, Change, type[Exception], str]


def changed(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda args: {name: change(args[name])}


def meta(name: str) -> Change:
    return changed(name, lambda tensor: tensor.to("meta"))


QUANTISER: list[Row] = [
    (
        "dtype of o",
        changed("o", lambda o: o.half()),
        TypeError,
        r"o has dtype torch\.float16; expected torch\.bfloat16",
    ),
    ("o.stride(-1) == 1", changed("o", lambda o: o.mT.contiguous().mT), ValueError, r"o has strides .* must be 1"),
    ("o.stride(-1) of a padded head", changed("o", lambda o: o.repeat(1, 1, 2)[..., ::2]), ValueError, "o has strides"),
    ("dtype of positions", changed("positions", lambda p: p.int()), TypeError, r"positions has dtype torch\.int32"),
    ("length of positions", changed("positions", lambda p: p[:2]), ValueError, "positions has 2 entries; o has 3"),
    (
        "positions above the table",
        changed("positions", lambda p: p + 6),
        ValueError,
        r"positions lie in .* rows 0\.\.5",
    ),
    ("positions below 0", changed("positions", lambda p: p - 6), ValueError, r"positions lie in -\d"),
    (
        "last-dim contiguity of the cache",
        changed("cos_sin_cache", lambda c: c.T.contiguous().T),
        ValueError,
        "cos_sin_cache has strides .* must be 1",
    ),
    ("nope_dim even", lambda a: {"nope_dim": 447, "o": a["o"][..., 1:]}, ValueError, "nope_dim=447 .* must be even"),
    ("same device: positions", meta("positions"), ValueError, "positions is on meta but o is on cpu"),
    ("same device: cache", meta("cos_sin_cache"), ValueError, "cos_sin_cache is on meta but o is on cpu"),
    ("heads padding left on", changed("o", lambda o: o.repeat(1, 2, 1)), ValueError, "slice off padding heads"),
]


@pytest.mark.parametrize("gap, change, error, message", QUANTISER, ids=[row[0] for row in QUANTISER])
@pytest.mark.parametrize("packed", [False, True])
def test_what_the_quantiser_kernel_does_not_assert(gap, change, error, message, packed) -> None:
    args = random_call(3, tma_aligned_scales=packed)
    fused_inv_rope_fp8_quant(**args)  # it is the change that is refused
    with pytest.raises(error, match=message):
        fused_inv_rope_fp8_quant(**args | change(args))


def weight(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def apply(args: Args) -> Args:
        return {
            "wo_a": SimpleNamespace(
                **vars(args["wo_a"]) | {name: change(getattr(args["wo_a"], name)) for name, change in changes.items()}
            )
        }

    return apply


def slots(change: Callable[[QuantizedActivation], QuantizedActivation]) -> Change:
    return lambda args: {"o": change(in_slots(args, 4, 0))}


def contiguous_scale(x: QuantizedActivation) -> QuantizedActivation:
    return QuantizedActivation(x.data, x.scale.contiguous())


def unaligned_scale(x: QuantizedActivation) -> QuantizedActivation:
    tokens, _, columns = x.scale.shape
    tight = torch.empty_strided(x.scale.shape, (1, columns * tokens, tokens), dtype=x.scale.dtype)
    return QuantizedActivation(x.data, tight.copy_(x.scale))


BLOCK: list[Row] = [
    (
        "2-D wo_a of another kernel",
        weight(weight=lambda w: w.flatten(0, 1)),
        ValueError,
        r"wo_a\.weight has shape \(32,",
    ),
    ("another format of wo_a", weight(weight=lambda w: w.view(torch.int8)), TypeError, r"wo_a\.weight has dtype"),
    (
        "same device: wo_a",
        weight(weight=lambda w: w.to("meta")),
        ValueError,
        r"wo_a\.weight is on meta but o is on cpu",
    ),
    ("same device: scales", weight(weight_scale_inv=lambda s: s.to("meta")), ValueError, "b_scale is on meta"),
    ("groups of z", lambda a: {"n_groups": 1}, ValueError, r"wo_a\.weight has shape .* n_groups=1"),
    ("weight scales transposed", weight(weight_scale_inv=lambda s: s.mT), ValueError, r"b\[1\] \(scales\) has shape"),
    (
        "weight scales of too few groups",
        weight(weight_scale_inv=lambda s: s[:1]),
        ValueError,
        r"b\[1\] .* has shape \(1,",
    ),
    ("block 64 passes the quantiser only", lambda a: {"einsum_recipe": (1, 1, 64)}, ValueError, "is not supported"),
    (
        "slots of data and scale differ",
        slots(lambda x: QuantizedActivation(x.data, x.scale[:, :3])),
        ValueError,
        "must be .* equal T and slots",
    ),
]


@pytest.mark.parametrize("gap, change, error, message", BLOCK, ids=[row[0] for row in BLOCK])
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_what_the_block_does_not_assert(gap, change, error, message, arch) -> None:
    args = arguments(arch, 3)
    deep_gemm_fp8_o_proj(**args)
    with pytest.raises(error, match=message):
        deep_gemm_fp8_o_proj(**args | change(args))


@pytest.mark.parametrize("change", [contiguous_scale, unaligned_scale])
def test_scale_strides_of_a_quantised_activation(change) -> None:
    """Packed words must be where the kernel reads them; FP32 scales on SM90 may lie anywhere: they are copied."""
    args = arguments("sm100", 3)
    with pytest.raises(ValueError, match=r"a\[1\] \(scales\) has strides .* MN-major"):
        deep_gemm_fp8_o_proj(**args | slots(change)(args))
    deep_gemm_fp8_o_proj(**arguments("sm90", 3) | slots(change)(arguments("sm90", 3)))


def test_the_recipe_of_another_architecture() -> None:
    args = arguments("sm90", 3, engine=SoftwareEngine("sm90"))
    with pytest.raises(ValueError, match=r"recipe=\(1, 1, 128\) is not supported on sm90"):
        deep_gemm_fp8_o_proj(**args | {"einsum_recipe": (1, 1, 128)})


def test_fp32_scales_under_a_packed_recipe() -> None:
    args = arguments("sm100", 3)
    args["wo_a"].weight_scale_inv = weight_of("sm90", 2, 1024).weight_scale_inv
    with pytest.raises(TypeError, match=r"b\[1\] \(scales\) has dtype torch\.float32; .* packed UE8M0"):
        deep_gemm_fp8_o_proj(**args)


# Products -----------------------------------------------------------------------------------------------------------

FP32 = (1, 128, 128)


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120"])
def test_group_count_of_the_output(arch: str) -> None:
    """The assertion of every DeepGEMM that runs on torch 2.11 compares the groups of A and B twice."""
    call = fp8_calls.valid(arch, FP32, 5, 3, 256, 128)
    call.check()
    for groups in (2, 4):
        call.d = torch.empty((5, groups, 128), dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=f"a has G=3, b has G=3, d has G={groups}; G must be the same"):
            call.check()


@pytest.mark.parametrize("arch", ["sm100", "sm103", "sm120"])
@pytest.mark.parametrize("side", ["sa", "sb"])
@pytest.mark.parametrize("value", [1.5, 0.0, float("inf"), float("nan"), -1.0, 2.0**-127])
@pytest.mark.parametrize("contiguous", [True, False])
def test_fp32_scales_that_lose_their_mantissa_or_mean_nan(arch, side, value, contiguous) -> None:
    """Exponent fields alone are kept: 1.5 becomes 1, +Inf the byte of NaN, 0 2**-127; few layouts trap."""
    call = fp8_calls.valid(arch, FP32, 5, 2, 256, 128)
    call.check()
    scale = getattr(call, side).contiguous() if contiguous else getattr(call, side)
    scale[1, 1 if side == "sa" else 0, 1] = value
    setattr(call, side, scale)
    with pytest.raises(ValueError, match=rf"{side[1]}\[1\] \(scales\) holds .* powers of two"):
        call.check()


@pytest.mark.parametrize("rows, square", [(256, True), (128, False)])
def test_a_transposed_grid_is_seen_where_it_is_not_square(rows: int, square: bool) -> None:
    call = fp8_calls.valid("sm90", FP32, 3, 2, 256, rows)
    call.sb = call.sb.mT
    if square:  # R/128 == K/128: DeepGEMM reads it either way, and no shape or stride tells
        call.check()
        return
    with pytest.raises(ValueError, match=r"b\[1\] \(scales\) has shape \(2, 2, 1\); expected \(2, 1, 2\)"):
        call.check()


# Positions on a GPU -------------------------------------------------------------------------------------------------


class OnGpu:
    """What the checks ask of a tensor on a GPU."""

    device = torch.device("cuda", 0)
    shape = (3,)

    def __init__(self) -> None:
        self.looks = 0

    def min(self) -> int:
        self.looks += 1
        return 0

    def max(self) -> int:
        self.looks += 1
        return 9


@pytest.mark.parametrize(
    "asked, capturing, looks", [(None, False, 0), ("0", False, 0), ("1", True, 0), ("1", False, 2)]
)
def test_positions_on_a_gpu_are_looked_at_only_when_asked_and_never_in_a_capture(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, capturing: bool, looks: int
) -> None:
    monkeypatch.delenv(rope_checks.CHECK_POSITIONS, raising=False)
    if asked is not None:
        monkeypatch.setenv(rope_checks.CHECK_POSITIONS, asked)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    positions: Any = OnGpu()
    table = torch.zeros((6, 64))
    if looks:
        with pytest.raises(ValueError, match=r"positions lie in 0\.\.9; cos_sin_cache has rows 0\.\.5"):
            rope_checks._check_table(positions, table, 3, 64)
    else:
        rope_checks._check_table(positions, table, 3, 64)
    assert positions.looks == looks


def test_a_head_dim_that_is_no_power_of_two_is_for_the_serving_kernel_alone_to_refuse() -> None:
    args = random_call(3)
    shorter = args | {"o": args["o"][..., :384].contiguous(), "nope_dim": 320}
    assert fused_inv_rope_fp8_quant(**shorter)[0].shape == (3, 2, 768)
