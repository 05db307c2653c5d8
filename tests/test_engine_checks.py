"""Every way to call an FP8 product wrongly is refused with a text that names the argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_calls import E4M3, Call, valid, valid_gemm
from oproj.activation import empty_values
from oproj.arch import ARCHS
from oproj.engines.checks import check_fp8_einsum

BLACKWELL = [name for name, arch in ARCHS.items() if arch.tma_aligned_scales]

RECIPES = {arch: [(1, 1, 128), (1, 1, 32), (1, 128, 128)] if arch in BLACKWELL else [(1, 128, 128)] for arch in ARCHS}
ARCH_RECIPE = st.sampled_from([(arch, recipe) for arch in ARCHS for recipe in RECIPES[arch]])
SIZES = st.tuples(
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 9).map(lambda i: 128 * i),
    st.integers(1, 33).map(lambda i: 8 * i),
)


@given(ARCH_RECIPE, SIZES)
def test_valid_calls_pass(arch_recipe, sizes):
    arch, recipe = arch_recipe
    assert valid(arch, recipe, *sizes).check() == recipe
    tokens, _, k, n = sizes
    assert valid_gemm(arch, recipe, tokens, k, n).check() == recipe


@given(ARCH_RECIPE, SIZES)
def test_zero_tokens_and_zero_columns_pass_whatever_the_scale_strides(arch_recipe, sizes):
    arch, recipe = arch_recipe
    call = valid(arch, recipe, 0, *sizes[1:])
    call.sa, call.sb = not_last(call.sa), not_last(call.sb)
    assert call.check() == recipe
    call = valid(arch, recipe, 0, *sizes[1:])
    call.sa = call.sa[..., :-1]
    with pytest.raises(ValueError, match=re.escape("a[1] (scales) has shape")):
        call.check()


def spoil(part: str, change: Callable[[Any], Any]) -> Callable[[Call], None]:
    return lambda call: setattr(call, part, change(getattr(call, part)))


def wider(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """The same layout with one more element along ``axis``."""
    shape = list(tensor.shape)
    shape[axis] += 8 if axis in (-1, tensor.dim() - 1) else 1
    return torch.empty(shape, dtype=tensor.dtype)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Equal shape, unit last stride, outer strides no multiple of 16 bytes."""
    buffer = torch.empty((*tensor.shape[:-1], tensor.shape[-1] + 1), dtype=tensor.dtype)
    return buffer[..., :-1]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Equal shape and strides, base address no multiple of 16 bytes."""
    flat = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)
    return flat[1 : 1 + tensor.numel()].view(tensor.shape)


def not_last(tensor: torch.Tensor) -> torch.Tensor:
    """Equal shape, last axis with stride 2."""
    return torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)[..., ::2]


MUTATIONS: dict[str, tuple[Callable[[Call], None], type[Exception], str]] = {
    "expr": (spoil("expr", lambda _: "bmk,bnk->mn"), ValueError, r"expr='bmk,bnk->mn' .* supported: bhr,hdr->bhd"),
    "c": (spoil("c", lambda _: torch.zeros(1)), ValueError, r"c is Tensor; only c=None"),
    "recipe unknown": (spoil("recipe", lambda _: (1, 64, 128)), ValueError, r"recipe=\(1, 64, 128\)"),
    "recipe none": (spoil("recipe", lambda _: None), ValueError, r"recipe=None"),
    "a not e4m3": (spoil("a", lambda x: x.view(torch.uint8)), TypeError, r"a\[0\] \(codes\) has dtype torch.uint8"),
    "b e5m2": (spoil("b", lambda x: x.view(torch.float8_e5m2)), TypeError, r"b\[0\] \(codes\) has dtype"),
    "a rank": (spoil("a", lambda x: x[0]), ValueError, r"a\[0\] \(codes\) has shape .* 3 axes \[T, G, K\]"),
    "b rank": (spoil("b", lambda x: x[0]), ValueError, r"b\[0\] \(codes\) has shape .* \[G, N, K\]"),
    "d rank": (spoil("d", lambda x: x[0]), ValueError, r"d has shape .* \[T, G, N\]"),
    "d dtype": (spoil("d", lambda x: x.to(torch.float16)), TypeError, r"d has dtype torch.float16"),
    "d no tensor": (spoil("d", lambda _: None), TypeError, r"d is NoneType"),
    "a K stride": (spoil("a", not_last), ValueError, r"a\[0\] \(codes\) has strides .* last one must be 1"),
    "b K stride": (spoil("b", not_last), ValueError, r"b\[0\] \(codes\) has strides .* last one must be 1"),
    "d stride": (spoil("d", not_last), ValueError, r"d has strides .* last one must be 1"),
    "a outer stride": (spoil("a", misaligned), ValueError, r"a\[0\] .* multiples of 16 elements"),
    "d outer stride": (spoil("d", misaligned), ValueError, r"d has strides .* multiples of 8 elements"),
    "a address": (spoil("a", shifted), ValueError, r"a\[0\] .* address 0x[0-9a-f]+"),
    "a overlaps itself": (
        spoil("a", lambda x: x[:, :1].expand(x.shape) if x.shape[1] > 1 else x.as_strided(x.shape, (0, 0, 1))),
        ValueError,
        r"a\[0\] .* positive multiples",
    ),
    "K of b": (spoil("b", lambda x: torch.cat([x, x], -1)), ValueError, r"a has K=\d+, b has K=\d+"),
    "G of b": (spoil("b", lambda x: wider(x, 0)), ValueError, r"a has G=\d+, b has G=\d+, d has G=\d+"),
    "G of d, which DeepGEMM leaves unchecked": (
        spoil("d", lambda x: wider(x, 1)),
        ValueError,
        r"d has G=\d+; G must be the same",
    ),
    "T of d": (spoil("d", lambda x: wider(x, 0)), ValueError, r"a has T=\d+, d has T=\d+"),
    "N of d": (spoil("d", lambda x: wider(x, 2)), ValueError, r"b has N=\d+, d has N=\d+"),
    "a scale dtype": (spoil("sa", lambda x: x.to(torch.bfloat16)), TypeError, r"a\[1\] \(scales\) has dtype"),
    "b scale dtype": (spoil("sb", lambda x: x.to(torch.float64)), TypeError, r"b\[1\] \(scales\) has dtype"),
    "a scale rows": (spoil("sa", lambda x: wider(x, 0)), ValueError, r"a\[1\] \(scales\) has shape .* expected"),
    "a scale columns": (spoil("sa", lambda x: wider(x, 2)), ValueError, r"a\[1\] \(scales\) has shape"),
    "b scale rows": (spoil("sb", lambda x: wider(x, 1)), ValueError, r"b\[1\] \(scales\) has shape"),
    "b scale columns": (spoil("sb", lambda x: wider(x, 2)), ValueError, r"b\[1\] \(scales\) has shape"),
    "b scale strides": (spoil("sb", not_last), ValueError, r"b\[1\] \(scales\) (has strides|holds)"),
    "device": (spoil("sb", lambda x: x.to("meta")), ValueError, r"b_scale is on meta but a is on cpu"),
}


@pytest.mark.parametrize("name", MUTATIONS)
@settings(max_examples=30)
@given(st.sampled_from([("sm90", (1, 128, 128)), ("sm100", (1, 1, 128)), ("sm120", (1, 1, 32))]), SIZES)
def test_a_spoiled_call_is_refused_and_the_argument_is_named(name, arch_recipe, sizes):
    change, kind, text = MUTATIONS[name]
    call = valid(*arch_recipe, *sizes)
    change(call)
    with pytest.raises(kind, match=text):
        call.check()


@given(SIZES, st.integers(1, 127))
def test_k_must_be_a_multiple_of_128(sizes, extra):
    call = valid("sm90", (1, 128, 128), *sizes)
    k = call.a.shape[2] + extra // 16 * 16 + 16 * (extra < 16)
    call.a, call.b = empty_values(sizes[0], sizes[1], k, E4M3), torch.empty((sizes[1], sizes[3], k), dtype=E4M3)
    if k % 128:
        with pytest.raises(ValueError, match=rf"a has K={k}; K must be a positive multiple of 128"):
            call.check()


@pytest.mark.parametrize("n", [4, 12, 100])
def test_a_width_that_traps_on_the_device_is_refused(n):
    call = valid("sm90", (1, 128, 128), 3, 2, 128, n)
    call.d = torch.empty((3, 2, 104), dtype=torch.bfloat16)[..., :n]
    with pytest.raises(ValueError, match=rf"b has N={n}; N must be a multiple of 8"):
        call.check()


@pytest.mark.parametrize("arch", BLACKWELL)
@pytest.mark.parametrize("part, label", [("sa", "a"), ("sb", "b")])
@given(sizes=SIZES)
def test_packed_scales_must_have_the_exact_strides(arch, part, label, sizes):
    tokens, groups, k, n = sizes
    call = valid(arch, (1, 1, 128), tokens, groups, k + 512, n)
    scale = getattr(call, part)
    for axis in range(3):
        strides = [4 * stride if i == axis else stride for i, stride in enumerate(scale.stride())]
        setattr(call, part, torch.empty_strided(scale.shape, strides, dtype=torch.int32))
        if scale.shape[axis] == 1 and scale.stride(axis) == 1:
            assert call.check() == (1, 1, 128)  # the stride of a single token means nothing
            continue
        with pytest.raises(ValueError, match=rf"{label}\[1\] \(scales\) has strides .* MN-major"):
            call.check()
    setattr(call, part, torch.empty(scale.shape, dtype=torch.int32))  # K-major, as a plain allocation gives
    with pytest.raises(ValueError, match=rf"{label}\[1\] \(scales\) has strides .* MN-major"):
        call.check()


def test_packed_scales_are_refused_on_sm90_and_fp32_ones_beside_a_packed_recipe():
    call = valid("sm100", (1, 1, 128), 5, 2, 512, 128)
    call.arch = "sm90"
    with pytest.raises(ValueError, match=r"recipe=\(1, 1, 128\) is not supported on sm90"):
        call.check()
    call.recipe = (1, 128, 128)
    with pytest.raises(TypeError, match=r"a\[1\] \(scales\) has dtype torch.int32; .* FP32"):
        call.check()
    call = valid("sm90", (1, 128, 128), 5, 2, 512, 128)
    call.arch, call.recipe = "sm100", (1, 1, 128)
    with pytest.raises(TypeError, match=r"a\[1\] \(scales\) has dtype torch.float32; .* packed UE8M0"):
        call.check()


@given(
    st.sampled_from(BLACKWELL),
    st.one_of(st.floats(width=32), st.sampled_from([0.0, -1.0, float("inf"), float("nan"), 2.0**-127])),
)
def test_fp32_scales_on_blackwell_must_be_powers_of_two(arch, value):
    call = valid(arch, (1, 128, 128), 5, 2, 256, 136)
    call.sb[1, 1, 0] = value
    mantissa, _ = torch.frexp(torch.tensor(value))
    if float(mantissa) == 0.5 and value >= 2.0**-126 and value != float("inf"):
        assert call.check() == (1, 128, 128)
    else:
        with pytest.raises(ValueError, match=r"b\[1\] \(scales\) holds .* at \[1, 1, 0\]; .* powers of two"):
            call.check()


def test_weight_scales_on_sm90_may_be_contiguous_either_way_and_activation_scales_any_way():
    call = valid("sm90", (1, 128, 128), 5, 2, 512, 384)
    call.sb = torch.ones((2, 4, 3)).transpose(1, 2)
    call.sa = torch.ones((5, 2, 8))[..., ::2]
    assert call.check() == (1, 128, 128)
    call.sb = torch.ones((2, 5, 4))[:, :3]
    with pytest.raises(ValueError, match=r"b\[1\] \(scales\) has strides .* contiguous"):
        call.check()


def test_values_may_be_token_major():
    call = valid("sm100", (1, 1, 128), 5, 2, 512, 128)
    call.a = torch.empty((5, 2, 512), dtype=E4M3)
    assert call.check() == (1, 1, 128)


def test_fp32_output_is_for_blackwell_alone():
    call = valid("sm100", (1, 1, 128), 5, 2, 512, 128)
    call.d = call.d.float()
    assert call.check() == (1, 1, 128)
    call = valid("sm90", (1, 128, 128), 5, 2, 512, 128)
    call.d = call.d.float()
    with pytest.raises(TypeError, match=r"d has dtype torch.float32; sm90 writes torch.bfloat16"):
        call.check()


@pytest.mark.parametrize("arch, recipe", [("sm90", (1, 128, 128)), ("sm100", (1, 1, 128)), ("sm100", (1, 128, 128))])
def test_gemm_takes_the_default_recipe_from_the_weight_scales(arch, recipe):
    call = valid_gemm(arch, recipe, 5, 512, 384)
    call.recipe = None
    assert call.check() == recipe


@pytest.mark.parametrize(
    "part, change, kind, text",
    [
        ("a", lambda x: x[None], ValueError, r"a\[0\] \(codes\) has shape .* 2 axes \[M, K\]"),
        ("d", lambda x: wider(x, 0), ValueError, r"a has M=5, d has M=6"),
        ("d", lambda x: wider(x, 1), ValueError, r"b has N=384, d has N=392"),
        ("b", lambda x: torch.cat([x, x], -1), ValueError, r"a has K=512, b has K=1024"),
        ("sa", lambda x: wider(x, 0), ValueError, r"a\[1\] \(scales\) has shape \(6, 4\); expected \(5, 4\)"),
        ("sb", lambda x: wider(x, 0), ValueError, r"b\[1\] \(scales\) has shape \(4, 4\); expected \(3, 4\)"),
        ("sb", not_last, ValueError, r"b\[1\] \(scales\) has strides"),
        ("c", lambda _: torch.zeros(1), ValueError, r"c is Tensor; only c=None"),
    ],
)
def test_a_spoiled_gemm_is_refused(part, change, kind, text):
    call = valid_gemm("sm90", (1, 128, 128), 5, 512, 384)
    setattr(call, part, change(getattr(call, part)))
    with pytest.raises(kind, match=text):
        call.check()


@pytest.mark.parametrize("pair", [None, torch.zeros(3), (torch.zeros(3),), (torch.zeros(3), 1.0)])
def test_an_operand_must_be_a_pair_of_tensors(pair):
    call = valid("sm90", (1, 128, 128), 3, 2, 128, 128)
    with pytest.raises(TypeError, match=r"b(\[1\] \(scales\))? is .*expected a (pair|torch.Tensor)"):
        check_fp8_einsum("sm90", call.expr, (call.a, call.sa), pair, call.d, None, call.recipe)


def test_no_group_is_refused():
    call = valid("sm90", (1, 128, 128), 3, 1, 128, 128)
    call.a, call.sa, call.b, call.sb, call.d = call.a[:, :0], call.sa[:, :0], call.b[:0], call.sb[:0], call.d[:, :0]
    with pytest.raises(ValueError, match="a has G=0 groups"):
        call.check()
