"""The SIMD twin equals the scalar specification, on every row, for every family of codes and scales."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mutants
from oproj.activation import empty_scales, empty_values, float_to_ue8m0, pack_ue8m0, ue8m0_to_float
from oproj.arch import ARCHS, SM90, SM100
from oproj.engines import EngineUnavailable, get_engine
from oproj.engines.software import gemm, spec
from oproj.weights import layout_weight_scales

FAMILIES = ("bits", "finite", "subnormal", "positive", "sparse", "large", "cancelling")


def draw_codes(rng, family, shape):
    """e4m3 codes as uint8."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    finite = np.where(codes & 0x7F == 0x7F, codes & 0x80, codes)
    if family == "bits":
        return codes
    if family == "subnormal":
        return np.where(rng.random(shape) < 0.8, finite & 0x87, finite)
    if family == "positive":
        return finite & 0x7F
    if family == "sparse":
        return np.where(rng.random(shape) < 0.95, finite & 0x80, finite)
    if family == "large":
        return np.where(finite & 0x7F < 0x60, finite | 0x60, finite)
    if family == "cancelling":
        finite[..., 1::2] = finite[..., ::2] ^ 0x80
        finite[..., -1] = rng.integers(0, 0x20)
    return finite


def draw_scales(rng, arch, shape, wild):
    """FP32 scales for rows that promote outside, UE8M0 bytes for the others."""
    if arch.mma.scales_inside:
        return rng.integers(0, 256, shape, dtype=np.uint8) if wild else rng.integers(118, 137, shape, dtype=np.uint8)
    scales = np.ldexp(1 + rng.random(shape), rng.integers(-12, 12, shape)).astype(np.float32)
    if wild:
        special = [np.inf, np.nan, 0.0, 2.0**-149, 2.0**127, -1.5, 2.0**-126, 1e30]
        scales = np.where(rng.random(shape) < 0.3, rng.choice(np.float32(special), shape), scales)
    return scales


def specification(arch, a, sa, b, sb, gran_k):
    """FP32 bits ``[T, N]`` of the scalar chain."""
    rows = [[int(c) for c in row] for row in a]
    columns = [[int(c) for c in column] for column in b]
    return np.array(
        [
            [spec.chain(arch, r, c, s.tolist(), u.tolist(), gran_k) for c, u in zip(columns, sb)]
            for r, s in zip(rows, sa)
        ],
        dtype=np.uint32,
    )


def assert_same_f32(got, expected):
    """Equal FP32 bits; NaN equals NaN."""
    nan = np.isnan(got) & np.isnan(expected.view(np.float32))
    different = np.argwhere((got.view(np.uint32) != expected) & ~nan)
    assert not len(different), f"{len(different)} of {got.size} differ, first at {different[0]}"


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1), wild=st.booleans(), tokens=st.integers(1, 3), columns=st.integers(1, 4))
def test_the_twin_equals_the_specification(arch, family, seed, wild, tokens, columns):
    rng = np.random.default_rng(seed)
    gran_k = 128 if not arch.mma.scales_inside else int(rng.choice([32, 128]))
    a, b = draw_codes(rng, family, (tokens, 256)), draw_codes(rng, family, (columns, 256))
    sa = draw_scales(rng, arch, (tokens, 256 // gran_k), wild)
    sb = draw_scales(rng, arch, (columns, 256 // gran_k), wild)
    out = np.zeros((tokens, columns), np.float32)
    gemm.matmul(arch, a, sa, b, sb, gran_k, out)
    assert_same_f32(out, specification(arch, a, sa, b, sb, gran_k))


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1), frac=st.integers(10, 25), out_frac=st.integers(10, 23))
def test_the_twin_follows_the_row_of_numbers(seed, frac, out_frac):
    """Other numbers in the row change both models alike: nothing about SM90 or SM100 is wired into the kernels."""
    rng = np.random.default_rng(seed)
    for base in (SM90, SM100):
        arch = replace(base, mma=replace(base.mma, frac_bits=frac, out_frac_bits=out_frac))
        a, b = draw_codes(rng, "finite", (2, 128)), draw_codes(rng, "finite", (3, 128))
        sa, sb = draw_scales(rng, arch, (2, 1), False), draw_scales(rng, arch, (3, 1), False)
        out = np.zeros((2, 3), np.float32)
        gemm.matmul(arch, a, sa, b, sb, 128, out)
        assert_same_f32(out, specification(arch, a, sa, b, sb, 128))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), family=st.sampled_from(FAMILIES))
def test_a_third_model_agrees(seed, family):
    """Integers in NumPy, written from the published algorithm alone, at K = 512 and wider shapes."""
    rng = np.random.default_rng(seed)
    a, b = draw_codes(rng, family, (5, 512)), draw_codes(rng, family, (70, 512))
    sa, sb = draw_scales(rng, SM90, (5, 4), False), draw_scales(rng, SM90, (70, 4), False)
    out = np.zeros((5, 70), np.float32)
    gemm.matmul(SM90, a, sa, b, sb, 128, out)
    assert mutants.same_bits(gemm.round_to_bf16_bits(out), mutants.chain(a, sa, b, sb)).all()


def operands(rng, arch, tokens, groups, rank, k, gran_k=128):
    """One einsum's tensors in the layout of ``arch`` with per-block scales that all differ."""
    a = empty_values(tokens, groups, k, torch.float8_e4m3fn)
    a.view(torch.uint8).copy_(torch.from_numpy(draw_codes(rng, "finite", (tokens, groups, k))))
    b = torch.from_numpy(draw_codes(rng, "finite", (groups, rank, k))).view(torch.float8_e4m3fn)
    blocks = k // gran_k
    scales = np.ldexp(np.float32(1), rng.integers(-6, 7, (tokens, groups, blocks))).astype(np.float32)
    weight = torch.from_numpy(np.ldexp(np.float32(1), rng.integers(-6, 7, (groups, -(-rank // 128), blocks))))
    packed = arch.tma_aligned_scales
    sa = empty_scales(tokens, groups, blocks // 4 if packed else blocks, packed)
    sa.copy_(pack_ue8m0(float_to_ue8m0(torch.from_numpy(scales))) if packed else torch.from_numpy(scales))
    sb = layout_weight_scales(weight.float(), arch=arch, rows=rank, block=(128, gran_k))
    return (a, sa), (b, sb), torch.from_numpy(scales), weight.float()


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_einsum_reads_every_scale_where_it_lies(arch, tokens):
    """Groups, tokens, blocks and rows that all differ: a transposed or shifted scale cannot give these bits."""
    rng = np.random.default_rng(tokens)
    (a, sa), (b, sb), scales, weight = operands(rng, arch, tokens, 3, 256, 512)
    z = torch.empty((tokens, 3, 256), dtype=torch.bfloat16)
    recipe = arch.recipe()
    get_engine("software", arch).fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb), z, recipe=recipe)
    for g in range(3):
        per_row = weight[g].repeat_interleave(128, 0).numpy()
        a_codes, b_codes = a[:, g].view(torch.uint8).numpy(), b[g].view(torch.uint8).numpy()
        columns = [0, 1, 127, 128, 255]
        sa_g, sb_g = scales[:, g].numpy(), per_row[columns]
        if arch.mma.scales_inside:
            sa_g, sb_g = (float_to_ue8m0(torch.from_numpy(s.copy())).numpy() for s in (sa_g, sb_g))
        expected = specification(arch, a_codes, sa_g, b_codes[columns], sb_g, 128)
        bits = np.vectorize(spec.bf16_bits, otypes=[np.uint16])(expected)
        assert (z[:, g, columns].contiguous().view(torch.int16).numpy().view(np.uint16) == bits).all()


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_a_row_does_not_depend_on_its_batch_and_a_group_not_on_its_neighbours(arch):
    rng = np.random.default_rng(3)
    (a, sa), (b, sb), _, _ = operands(rng, arch, 9, 2, 128, 512)
    engine = get_engine("software", arch)
    whole = torch.empty((9, 2, 128), dtype=torch.bfloat16)
    engine.fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb), whole, recipe=arch.recipe())
    again = torch.empty_like(whole)
    engine.fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb), again, recipe=arch.recipe())
    assert torch.equal(whole.view(torch.int16), again.view(torch.int16))
    one = torch.empty((1, 1, 128), dtype=torch.bfloat16)
    for t, g in ((0, 0), (8, 1), (5, 0)):
        scale = empty_scales(1, 1, sa.shape[2], arch.tma_aligned_scales)
        scale.copy_(sa[t : t + 1, g : g + 1])
        engine.fp8_einsum(
            "bhr,hdr->bhd", (a[t : t + 1, g : g + 1], scale), (b[g : g + 1], sb[g : g + 1]), one, recipe=arch.recipe()
        )
        assert torch.equal(one[0, 0].view(torch.int16), whole[t, g].view(torch.int16))


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_gemm_is_the_einsum_of_one_group(arch):
    rng = np.random.default_rng(4)
    (a, sa), (b, sb), _, _ = operands(rng, arch, 6, 1, 256, 512)
    engine, z, y = get_engine("software", arch), torch.empty(6, 1, 256).bfloat16(), torch.empty(6, 256).bfloat16()
    engine.fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb), z, recipe=arch.recipe())
    engine.fp8_gemm_nt((a[:, 0], sa[:, 0]), (b[0], sb[0]), y, recipe=arch.recipe())
    assert torch.equal(z[:, 0].contiguous().view(torch.int16), y.view(torch.int16))


def test_fp32_scales_on_sm100_equal_packed_ones_and_fp32_output_rounds_to_bf16():
    rng = np.random.default_rng(5)
    (a, sa), (b, sb), scales, weight = operands(rng, SM100, 5, 2, 256, 512)
    engine, z = get_engine("software", "sm100"), torch.empty((5, 2, 256), dtype=torch.bfloat16)
    engine.fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb), z, recipe=(1, 1, 128))
    wide = torch.empty((5, 2, 256), dtype=torch.float32)
    engine.fp8_einsum("bhr,hdr->bhd", (a, scales), (b, weight), wide, recipe=(1, 128, 128))
    assert torch.equal(wide.bfloat16().view(torch.int16), z.view(torch.int16))
    scales[4, 1, 2] = 1.5
    with pytest.raises(ValueError, match=r"1\.5"):
        engine.fp8_einsum("bhr,hdr->bhd", (a, scales), (b, weight), wide, recipe=(1, 128, 128))


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_scaling_by_powers_of_two_and_negation_are_exact(arch):
    rng = np.random.default_rng(6)
    (a, sa), (b, sb), scales, _ = operands(rng, arch, 4, 1, 128, 512)
    engine = get_engine("software", arch)

    def product(codes, scale_values):
        scale = empty_scales(4, 1, sa.shape[2], arch.tma_aligned_scales)
        scale.copy_(pack_ue8m0(float_to_ue8m0(scale_values)) if arch.tma_aligned_scales else scale_values)
        z = torch.empty((4, 1, 128), dtype=torch.bfloat16)
        engine.fp8_einsum("bhr,hdr->bhd", (codes, scale), (b, sb), z, recipe=arch.recipe())
        return z

    plain = product(a, scales)
    assert torch.equal(product(a, scales * 2.0**9), plain * 2.0**9)
    negated = (a.view(torch.uint8) ^ 0x80).view(torch.float8_e4m3fn)
    assert torch.equal(product(negated, scales), -plain)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_zero_tokens_write_nothing_and_zero_codes_give_positive_zero(arch):
    rng = np.random.default_rng(7)
    (a, sa), (b, sb), _, _ = operands(rng, arch, 0, 2, 128, 512)
    engine = get_engine("software", arch)
    engine.fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb), torch.empty(0, 2, 128).bfloat16(), recipe=arch.recipe())
    (a, sa), (b, sb), _, _ = operands(rng, arch, 3, 2, 128, 512)
    for code in (0x00, 0x80):
        a.view(torch.uint8).fill_(code)
        z = torch.full((3, 2, 128), float("nan"), dtype=torch.bfloat16)
        engine.fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb), z, recipe=arch.recipe())
        assert (z.view(torch.int16) == 0).all()


def test_inputs_are_left_alone_and_strided_outputs_are_written():
    rng = np.random.default_rng(8)
    (a, sa), (b, sb), _, _ = operands(rng, SM90, 5, 2, 128, 256)
    before = [t.view(torch.uint8).clone() for t in (a, b)], [sa.clone(), sb.clone()]
    buffer = torch.full((5, 4, 128), 7.0, dtype=torch.bfloat16)
    get_engine("software", "sm90").fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb), buffer[:, 1:3])
    assert all(torch.equal(x, y.view(torch.uint8)) for x, y in zip(before[0], (a, b)))
    assert torch.equal(before[1][0], sa) and torch.equal(before[1][1], sb)
    assert (buffer[:, 0] == 7).all() and (buffer[:, 3] == 7).all() and not (buffer[:, 1:3] == 7).all()


def test_engines_are_found_by_name():
    assert get_engine("software", "SM90").arch is SM90
    with pytest.raises(ValueError, match="engine='tpu' is unknown"):
        get_engine("tpu", "sm90")
    with pytest.raises(ValueError, match="arch='sm70' is unknown"):
        get_engine("software", "sm70")
    if not torch.cuda.is_available():
        assert get_engine("auto", "sm90").name == "software"
        with pytest.raises(EngineUnavailable):
            get_engine("deep_gemm", "sm90")


def test_scale_bytes_have_their_exact_values():
    values = ue8m0_to_float(torch.arange(256, dtype=torch.uint8))
    assert values[0].item() == 2.0**-127 and values[127].item() == 1.0 and torch.isnan(values[255])


def test_scales_that_carry_gradients_are_taken():
    rng = np.random.default_rng(9)
    (a, sa), (b, sb), _, _ = operands(rng, SM90, 2, 1, 128, 256)
    plain, graded = (torch.empty((2, 1, 128), dtype=torch.bfloat16) for _ in range(2))
    engine = get_engine("software", "sm90")
    engine.fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb), plain)
    graded.requires_grad_()
    engine.fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb.clone().requires_grad_()), graded)
    assert torch.equal(plain.view(torch.int16), graded.view(torch.int16))


@pytest.mark.parametrize("strides", [(256, 64, 1), (64, 256, 1), (128, 128, 1)])
def test_output_that_overlaps_itself_is_refused(strides):
    (a, sa), (b, sb), _, _ = operands(np.random.default_rng(11), SM90, 2, 2, 128, 256)
    d = torch.empty(1024, dtype=torch.bfloat16).as_strided((2, 2, 128), strides)
    with pytest.raises(ValueError, match=r"d has strides .* its elements overlap"):
        get_engine("software", "sm90").fp8_einsum("bhr,hdr->bhd", (a, sa), (b, sb), d)


def test_parallel_work_ends_before_its_error_is_raised():
    done = []

    def task(number):
        if number == 0:
            raise RuntimeError("first")
        done.append(number)

    with pytest.raises(RuntimeError, match="first"):
        gemm.run_parallel([lambda n=n: task(n) for n in range(6)])
    assert sorted(done) == [1, 2, 3, 4, 5]
