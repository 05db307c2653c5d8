"""The other two FP8 expressions of DeepGEMM: right axes, right scales, right start, and only where a row has them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_deep_gemm import FakeDeepGemm, install, pretend_gpu
from oproj.activation import float_to_ue8m0, pack_ue8m0, tma_aligned_size
from oproj.arch import ARCHS, SM100
from oproj.engines import discovery, get_engine
from oproj.engines.expressions import EINSUMS, GEMM_NT
from oproj.engines.software import spec

BY_TOKEN, BY_CHANNEL = "bhd,hdr->bhr", "bhd,bhr->hdr"
WITH_ALL = [name for name, row in ARCHS.items() if len(row.einsum_expressions) == 3]
FORMS = [
    (BY_TOKEN, (1, 128, 128), False), (BY_TOKEN, (1, 1, 128), True), (BY_TOKEN, (1, 1, 32), True),
    (BY_CHANNEL, (1, 1, 128), False), (BY_CHANNEL, (1, 1, 128), True), (BY_CHANNEL, (1, 128, 128), False),
]  # fmt: skip
GROUPS, ROWS, COLUMNS, K = 3, 32, 144, 512
E4M3 = torch.float8_e4m3fn


@dataclass
class Call:
    """Logical operands ``[G, rows, K]``, ``[G, columns, K]`` beside the tensors of one expression."""

    expr: str
    recipe: tuple[int, int, int]
    codes: tuple[np.ndarray, np.ndarray]
    exponents: tuple[np.ndarray, np.ndarray]  # UE8M0 bytes per row (or column) and K block
    a: tuple[torch.Tensor, torch.Tensor]
    b: tuple[torch.Tensor, torch.Tensor]

    def output(self, dtype: torch.dtype) -> torch.Tensor:
        sizes = {"G": GROUPS, EINSUMS[self.expr].rows: ROWS, "N": COLUMNS}
        return torch.full([sizes[axis] for axis in EINSUMS[self.expr].d], float("nan"), dtype=dtype)

    def accumulator(self, group: int, row: int, column: int) -> int:
        """FP32 bits of one output from the scalar chain."""
        a, b = self.codes[0][group, row].tolist(), self.codes[1][group, column].tolist()
        scales = self.exponents[0][group, row].tolist(), self.exponents[1][group, column].tolist()
        return spec.chain(SM100, a, b, *scales, self.recipe[2])


def laid_out(axes: str, tensor: torch.Tensor) -> torch.Tensor:
    """A ``[G, rows, K]`` tensor, contiguous in the order of ``axes``."""
    middle = next(axis for axis in axes if axis not in "GK")
    return tensor.permute([("G", middle, "K").index(axis) for axis in axes]).contiguous()


def packed(axes: str, exponents: torch.Tensor) -> torch.Tensor:
    """UE8M0 words of bytes ``[G, rows, blocks]``, rows next to one another, a TMA-aligned column for each word."""
    words = pack_ue8m0(exponents)
    groups, rows, count = words.shape
    column = tma_aligned_size(rows, 4)
    held = torch.empty_strided((groups, rows, count), (column * count, 1, column), dtype=torch.int32).copy_(words)
    middle = next(axis for axis in axes if axis not in "GK")
    return held.permute([("G", middle, "K").index(axis) for axis in axes])


def drawn(expr: str, recipe: tuple[int, int, int], pack: bool, seed: int = 0) -> Call:
    """A valid call; neighbouring scales all differ, and no two axes have the same size."""
    rng, product, operands, logical = np.random.default_rng(seed), EINSUMS[expr], [], []
    for axes, rows, gran in ((product.a, ROWS, recipe[0]), (product.b, COLUMNS, recipe[1])):
        codes = rng.integers(0, 255, (GROUPS, rows, K)).astype(np.uint8)
        codes = np.where(codes & 0x7F == 0x7F, 0x3A, codes).astype(np.uint8)
        shape = (GROUPS, -(-rows // gran), K // recipe[2])
        exponents = (rng.permutation(int(np.prod(shape))) % 41 + 107).reshape(shape).astype(np.uint8)
        bytes_ = torch.from_numpy(exponents)
        values = torch.ldexp(torch.ones(shape), bytes_.to(torch.int32) - 127)
        scale = packed(axes, bytes_) if pack else laid_out(axes, values)
        operands.append((laid_out(axes, torch.from_numpy(codes)).view(E4M3), scale))
        logical.append((codes, np.repeat(exponents, gran, axis=1)[:, :rows]))
    (codes_a, scales_a), (codes_b, scales_b) = logical
    return Call(expr, recipe, (codes_a, codes_b), (scales_a, scales_b), operands[0], operands[1])


def samples(seed: int, count: int) -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    corners = [(0, 0, 0), (GROUPS - 1, ROWS - 1, COLUMNS - 1), (1, 2, 127), (1, 2, 128)]
    return corners + [tuple(int(rng.integers(0, n)) for n in (GROUPS, ROWS, COLUMNS)) for _ in range(count)]


def bits(tensor: torch.Tensor) -> np.ndarray:
    kind, unsigned = (torch.int32, np.uint32) if tensor.dtype == torch.float32 else (torch.int16, np.uint16)
    return tensor.contiguous().view(kind).numpy().view(unsigned)


@pytest.mark.parametrize("arch", WITH_ALL)
@pytest.mark.parametrize("expr, recipe, pack", FORMS)
def test_every_output_is_the_scalar_chain_on_its_own_codes_and_scales(arch, expr, recipe, pack):
    call = drawn(expr, recipe, pack)
    engine, product = get_engine("software", arch), EINSUMS[expr]
    short, wide = call.output(torch.bfloat16), call.output(torch.float32)
    for d in (short, wide):
        engine.fp8_einsum(expr, call.a, call.b, d, recipe=recipe)
    short, wide = product.by_group(product.d, short), product.by_group(product.d, wide)
    for index in samples(1, 40):
        expected = call.accumulator(*index)
        assert bits(wide)[index] == expected
        assert bits(short)[index] == spec.bf16_bits(expected)


@pytest.mark.parametrize("expr, recipe, pack", FORMS)
def test_the_three_expressions_are_one_product(expr, recipe, pack):
    """The same logical operands through "bhr,hdr->bhd": every output of the tensor, not a sample."""
    call, engine = drawn(expr, recipe, pack, seed=3), get_engine("software", "sm100")
    d = call.output(torch.bfloat16)
    engine.fp8_einsum(expr, call.a, call.b, d, recipe=recipe)
    first = EINSUMS["bhr,hdr->bhd"]
    pairs = []
    for axes, codes, exponents in zip((first.a, first.b), call.codes, call.exponents, strict=True):
        scale = packed(axes, torch.from_numpy(np.ascontiguousarray(exponents)))
        pairs.append((laid_out(axes, torch.from_numpy(codes)).view(E4M3), scale))
    z = torch.empty((ROWS, GROUPS, COLUMNS), dtype=torch.bfloat16)
    engine.fp8_einsum(first.name, *pairs, z, recipe=(1, 1, recipe[2]))
    product = EINSUMS[expr]
    assert (bits(product.by_group(product.d, d)) == bits(first.by_group(first.d, z))).all()


@pytest.mark.parametrize("inplace", [True, False])
def test_a_sum_onto_c_is_one_rounded_addition_without_subnormals(inplace):
    """As DeepGEMM's own test calls it: c is d. The start is drawn next to the product, so that both count."""
    call, engine = drawn(BY_CHANNEL, (1, 1, 128), False, seed=5), get_engine("software", "sm100")
    call.a[0].view(torch.uint8)[:, 0, 1] = 0  # row 1 of group 0: a product of zeros, so that a subnormal start shows
    call.codes[0][0, 1] = 0
    product = call.output(torch.float32)
    engine.fp8_einsum(BY_CHANNEL, call.a, call.b, product, recipe=call.recipe)
    noise = torch.from_numpy(np.random.default_rng(6).standard_normal(tuple(product.shape)).astype(np.float32))
    start = product * noise
    start[0, 0, :4] = torch.tensor([1e-40, float("inf"), float("nan"), 0.0])
    start[0, 1, :3] = torch.tensor([1e-40, -1e-40, -0.0])
    start[1, 1] = -product[1, 1]
    before, d = start.clone(), start if inplace else torch.empty_like(start)
    engine.fp8_einsum(BY_CHANNEL, call.a, call.b, d, start, recipe=call.recipe)
    assert inplace or torch.equal(start.view(torch.int32), before.view(torch.int32))
    assert (d[1, 1] == 0).all()
    for index in [*samples(7, 60), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 0), (0, 1, 1), (0, 1, 2), (1, 1, 5)]:
        expected = spec.reduce_add(int(bits(before)[index]), call.accumulator(*index))
        assert spec.is_nan(expected, spec.F32) == bool(d[index].isnan())
        assert d[index].isnan() or bits(d)[index] == expected


@given(*[st.integers(0, 2**32 - 1)] * 2, st.booleans())
def test_the_store_engine_adds_like_fp32_but_without_subnormals(x, y, tiny):
    """Against torch's float64, which holds the sum of two FP32 numbers of near exponents exactly."""
    if tiny:
        x, y = x & 0x81FFFFFF, y & 0x81FFFFFF
    total = spec.reduce_add(x, y)
    field = total >> 23 & 255
    assert not (field == 0 and total & 0x7FFFFF)
    operands = [torch.tensor([v], dtype=torch.int64).to(torch.uint32).view(torch.float32) for v in (x, y)]
    flushed = [torch.where(v.abs() < 2.0**-126, v * 0.0, v) for v in operands]
    plain = flushed[0] + flushed[1]
    expected = torch.where(plain.abs() < 2.0**-126, plain * 0.0, plain)
    if bool(expected.isnan()):
        assert total == spec.NAN_BITS
    else:
        assert total == expected.view(torch.int32).item() & 0xFFFFFFFF


@pytest.mark.parametrize("arch", [name for name in ARCHS if name not in WITH_ALL])
@pytest.mark.parametrize("expr", [BY_TOKEN, BY_CHANNEL])
def test_rows_without_them_refuse_them_by_name(arch, expr):
    call = drawn(expr, (1, 1, 128), True)
    text = f"expr={expr!r} is not supported on {arch}; supported: bhr,hdr->bhd"
    with pytest.raises(ValueError, match=re.escape(text) + "$"):
        get_engine("software", arch).fp8_einsum(expr, call.a, call.b, call.output(torch.bfloat16), recipe=call.recipe)


def test_which_rows_have_which_expressions():
    assert WITH_ALL == ["sm100", "sm103"]
    for row in ARCHS.values():
        assert row.einsum_expressions[0] == "bhr,hdr->bhd" and set(row.einsum_expressions) <= EINSUMS.keys()
    assert SM100.einsum_expressions == tuple(EINSUMS)
    assert not GEMM_NT.grouped and GEMM_NT.rows == "M"


def transposed(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0], pair[1].transpose(0, 2).contiguous()


REFUSED = {
    "codes of the other expression": (
        BY_TOKEN, lambda call: setattr(call, "b", (call.b[0].view(torch.uint8).transpose(1, 2).contiguous().view(E4M3),
        call.b[1])), ValueError, r"a has K=512, b has K=144",
    ),
    "scales not turned with the codes": (
        BY_TOKEN, lambda call: setattr(call, "b", (call.b[0], call.b[1].transpose(1, 2).contiguous())),
        ValueError, r"b\[1\] \(scales\) has shape \(3, 2, 4\); expected \(3, 4, 2\)",
    ),
    "scales by token where they go by channel": (
        BY_CHANNEL, lambda call: setattr(call, "a", transposed(call.a)),
        ValueError, r"a\[1\] \(scales\) has shape \(32, 3, 4\); expected \(4, 3, 32\)",
    ),
    "no power of two": (
        BY_CHANNEL, lambda call: call.b[1].__setitem__((1, 2, 3), 0.75), ValueError, r"holds 0\.75 at \[1, 2, 3\]",
    ),
    "K-major codes": (
        BY_CHANNEL, lambda call: setattr(call, "a", (call.a[0].view(torch.uint8).permute(1, 2, 0).contiguous()
        .permute(2, 0, 1).view(E4M3), call.a[1])), ValueError, r"a\[0\] \(codes\) has strides .* last one must be 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_call_is_refused_and_the_argument_is_named(name):
    expr, spoil, kind, text = REFUSED[name]
    call = drawn(expr, (1, 1, 128) if expr == BY_CHANNEL else (1, 128, 128), False)
    spoil(call)
    with pytest.raises(kind, match=text):
        get_engine("software", "sm100").fp8_einsum(
            expr, call.a, call.b, call.output(torch.bfloat16), recipe=call.recipe
        )


@pytest.mark.parametrize(
    "d_type, change, kind, text",
    [
        (torch.bfloat16, lambda c: c, TypeError, r"c has dtype torch.float32 and d torch.bfloat16; .* torch.float32"),
        (torch.float32, lambda c: c.bfloat16(), TypeError, r"c has dtype torch.bfloat16"),
        (torch.float32, lambda c: c[..., :-8], ValueError, r"c has shape \(3, 32, 136\)"),
        (torch.float32, lambda c: 0.0, TypeError, r"c is float; expected a torch.Tensor"),
        (torch.float32, lambda c: c.transpose(1, 2).contiguous().transpose(1, 2), ValueError, r"c has strides"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(d_type, change, kind, text):
    call = drawn(BY_CHANNEL, (1, 1, 128), False)
    c = change(torch.zeros((GROUPS, ROWS, COLUMNS)))
    with pytest.raises(kind, match=text):
        get_engine("software", "sm100").fp8_einsum(
            BY_CHANNEL, call.a, call.b, call.output(d_type), c, recipe=call.recipe
        )


def test_the_gpu_engine_hands_the_start_on(monkeypatch):
    pretend_gpu(monkeypatch, SM100)
    install(monkeypatch, FakeDeepGemm(SM100))
    discovery.examined.cache_clear()
    try:
        engine, call = get_engine("deep_gemm", "sm100"), drawn(BY_CHANNEL, (1, 1, 128), False)
        plain, onto = call.output(torch.float32), torch.ones((GROUPS, ROWS, COLUMNS))
        engine.fp8_einsum(BY_CHANNEL, call.a, call.b, plain, recipe=call.recipe)
        engine.fp8_einsum(BY_CHANNEL, call.a, call.b, onto, onto, recipe=call.recipe)
        assert torch.equal(onto, plain + 1.0) and not torch.equal(onto, plain)
    finally:
        discovery.examined.cache_clear()


def test_packed_words_hold_the_bytes_of_the_fp32_scales():
    """The two scale formats of the helper above are the same numbers."""
    words, values = (drawn(BY_CHANNEL, (1, 1, 128), pack).a[1] for pack in (True, False))
    held = float_to_ue8m0(values.permute(1, 2, 0).contiguous())
    assert torch.equal(pack_ue8m0(held), words.permute(1, 2, 0).contiguous())
