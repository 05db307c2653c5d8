"""The fused quantiser as a call: layouts, strided inputs, padding, token counts, and each bad argument by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oproj.arch import SM90
from oproj.engines import EngineUnavailable
from oproj.engines.software import SoftwareEngine
from oproj.quantize import engine_for, fused_inv_rope_fp8_quant
from quantizer_calls import Call, bf16, bits_of, codes_of, exponent_bytes, model, random_call

MODES = [(False, True), (True, True), (False, False), (True, False)]  # tma_aligned_scales, quantize


@pytest.fixture
def dirty_memory() -> Iterator[None]:
    """New tensors come filled with NaN, or the largest integer, instead of what the allocator had left there."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan() and torch.empty(1, dtype=torch.int32) != 0
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(args: Call, packed: bool = False, quantize: bool = True) -> list[np.ndarray]:
    """Values and scales of one call as bits."""
    values, scale = fused_inv_rope_fp8_quant(**args, tma_aligned_scales=packed, quantize=quantize)
    return [codes_of(values) if quantize else bits_of(values), scale.contiguous().view(torch.int32).numpy()]


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.usefixtures("dirty_memory")
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("block, columns, words", [(128, 8, 2), (64, 16, 4), (32, 32, 8)])
def test_layout_of_values_and_scales(tokens: int, groups: int, block: int, columns: int, words: int) -> None:
    args = random_call(tokens, groups, quant_group_size=block)
    aligned = -(-tokens // 4) * 4
    for packed, width, dtype in ((False, columns, torch.float32), (True, words, torch.int32)):
        values, scale = fused_inv_rope_fp8_quant(**args, tma_aligned_scales=packed)
        assert values.shape == (tokens, groups, 1024) and values.dtype == torch.float8_e4m3fn
        assert scale.shape == (tokens, groups, width) and scale.dtype == dtype
        assert scale.stride() == (1, width * aligned, aligned) and scale.data_ptr() % 16 == 0
        assert scale.untyped_storage().nbytes() == 4 * groups * width * aligned
        padding = scale.as_strided((groups, width, aligned), (width * aligned, aligned, 1))[..., tokens:]
        assert not padding.contiguous().view(torch.int32).any()
        if tokens:
            assert values.stride() == (1024, tokens * 1024, 1)
            assert values.untyped_storage().nbytes() == tokens * groups * 1024


@pytest.mark.parametrize("packed, dtype", [(False, torch.float32), (True, torch.int32)])
def test_layout_of_bf16_mode(packed: bool, dtype: torch.dtype) -> None:
    for tokens in (0, 1, 5):
        values, scale = fused_inv_rope_fp8_quant(**random_call(tokens), tma_aligned_scales=packed, quantize=False)
        assert values.shape == (tokens, 2, 1024) and values.dtype == torch.bfloat16
        assert scale.shape == (0,) and scale.dtype == dtype
        assert tokens == 0 or values.stride() == (1024, tokens * 1024, 1)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5])
def test_every_token_count_has_the_bits_of_the_scalar_model(tokens: int) -> None:
    args = random_call(tokens, groups=1, seed=tokens, quant_group_size=64)
    _, codes, scale_bytes = model(args)
    for packed in (False, True):
        values, scale = fused_inv_rope_fp8_quant(**args, tma_aligned_scales=packed)
        assert np.array_equal(codes_of(values), codes)
        assert np.array_equal(exponent_bytes(scale), scale_bytes)


@pytest.mark.parametrize("packed, quantize", MODES)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_another_order(packed: bool, quantize: bool) -> None:
    """37 tokens are split over threads; one token is not."""
    args = random_call(37)
    batch = run(args, packed, quantize)
    order = torch.from_numpy(np.random.default_rng(5).permutation(37))
    moved = run(args | {"o": args["o"][order], "positions": args["positions"][order]}, packed, quantize)
    assert same([x[order.numpy()] if x.size else x for x in batch], moved)
    for t in (0, 17, 36):
        alone = run(args | {"o": args["o"][t : t + 1], "positions": args["positions"][t : t + 1]}, packed, quantize)
        assert same([x[t : t + 1] if x.size else x for x in batch], alone)


@pytest.mark.parametrize("packed, quantize", MODES)
@pytest.mark.parametrize("slots", [5, 64])
def test_padding_heads_are_not_read(slots: int, packed: bool, quantize: bool) -> None:
    """The first 4 heads of a buffer of ``slots``, with two poisons in the rest: the bits of the contiguous input."""
    args = random_call(5)
    expected = run(args, packed, quantize)
    for poison in (0x7F7F, 0x7FC0):
        buffer = bf16(np.full((5, slots, 512), poison))
        buffer[:, :4] = args["o"]
        view = buffer[:, :4]
        assert view.stride() == (slots * 512, 512, 1)
        assert same(run(args | {"o": view}, packed, quantize), expected)


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 5),
    gap=st.integers(0, 9),
    token_gap=st.integers(0, 700),
    offset=st.integers(0, 9),
    heads_first=st.booleans(),
    mode=st.sampled_from(MODES),
)
def test_any_strides_and_offset_of_o(tokens, gap, token_gap, offset, heads_first, mode) -> None:
    args = random_call(tokens, groups=1)
    inner, outer = 512 + gap, (512 + gap) * (tokens if heads_first else 2) + token_gap
    strides = (inner, outer, 1) if heads_first else (outer, inner, 1)
    buffer = bf16(np.full(offset + 2 * outer + 5 * outer, 0x7FC0))
    strided = buffer.as_strided((tokens, 2, 512), strides, offset)
    strided.copy_(args["o"])
    assert same(run(args | {"o": strided}, *mode), run(args, *mode))


def test_a_token_stride_of_zero_repeats_a_row() -> None:
    args = random_call(3)
    row = args["o"][:1].expand(3, 4, 512)
    assert same(run(args | {"o": row}), run(args | {"o": row.contiguous()}))


def test_addresses_past_32_bits(tmp_path: Path) -> None:
    """Token 1 starts behind element 2^31 of a sparse file: address arithmetic in 32 bits would read elsewhere."""
    args = random_call(2, groups=1)
    file = tmp_path / "o"
    buffer = torch.from_file(str(file), shared=True, size=2**31 + 4096, dtype=torch.bfloat16)
    file.unlink()  # the mapping keeps it
    far = buffer.as_strided((2, 2, 512), (2**31 + 512, 512, 1))
    far.copy_(args["o"])
    assert same(run(args | {"o": far}), run(args))


def test_strided_positions_and_tables() -> None:
    args = random_call(5)
    positions = torch.stack([args["positions"], torch.full((5,), -9)], dim=1)[:, 0]
    table = torch.full((8, 100), torch.nan)
    table[:, 7:71] = args["cos_sin_cache"]
    strided = args | {"positions": positions, "cos_sin_cache": table[:, 7:71]}
    assert same(run(strided), run(args))


@pytest.mark.parametrize("packed, quantize", MODES)
def test_inputs_are_left_as_they_were(packed: bool, quantize: bool) -> None:
    args = random_call(5)
    before = {name: args[name].clone() for name in ("o", "positions", "cos_sin_cache")}
    run(args, packed, quantize)
    for name, copy in before.items():
        assert torch.equal(args[name].view(torch.int16), copy.view(torch.int16)), name


def test_gradients_are_not_in_the_way() -> None:
    args = random_call(2)
    tracked = args | {"o": args["o"].clone().requires_grad_(), "cos_sin_cache": args["cos_sin_cache"].requires_grad_()}
    assert same(run(tracked), run(random_call(2)))


def test_the_first_and_the_last_row_of_the_table_are_taken() -> None:
    args = random_call(3)
    last = len(args["cos_sin_cache"]) - 1
    edges = args | {"positions": torch.tensor([0, last, 0])}
    assert np.array_equal(codes_of(fused_inv_rope_fp8_quant(**edges)[0]), model(edges)[1])


# Refusals -----------------------------------------------------------------------------------------------------------

Change = Callable[[Call], object]
BAD: list[tuple[str, Change, type[Exception], str]] = [
    ("o", lambda a: a["o"].float(), TypeError, r"o has dtype torch\.float32; expected torch\.bfloat16"),
    ("o", lambda a: a["o"].half(), TypeError, r"o has dtype torch\.float16"),
    ("o", lambda a: a["o"].tolist(), TypeError, "o is list"),
    ("o", lambda a: a["o"].flatten(1), ValueError, r"o has shape \(3, 2048\)"),
    ("o", lambda a: a["o"][:, :3], ValueError, r"o has 3 heads; n_groups \* heads_per_group = 4"),
    ("o", lambda a: a["o"].repeat(1, 2, 1), ValueError, "o has 8 heads.*slice off padding heads"),
    ("o", lambda a: a["o"][..., :448], ValueError, r"o has head_dim 448; nope_dim \+ rope_dim = 512"),
    ("o", lambda a: a["o"].mT.contiguous().mT, ValueError, r"o has strides \(2048, 1, 4\); the last one must be 1"),
    ("o", lambda a: a["o"].repeat(1, 1, 2)[..., ::2], ValueError, r"o has strides \(4096, 1024, 2\)"),
    ("o", lambda a: a["o"].to("meta"), ValueError, "positions is on cpu but o is on meta"),
    (
        "positions",
        lambda a: a["positions"].int(),
        TypeError,
        r"positions has dtype torch\.int32; expected torch\.int64",
    ),
    ("positions", lambda a: a["positions"].tolist(), TypeError, "positions is list"),
    ("positions", lambda a: a["positions"][None], ValueError, r"positions has shape \(1, 3\)"),
    ("positions", lambda a: a["positions"][:2], ValueError, "positions has 2 entries; o has 3 tokens"),
    ("positions", lambda a: torch.tensor([0, 6, 1]), ValueError, r"positions lie in 0\.\.6; .* rows 0\.\.5"),
    ("positions", lambda a: torch.tensor([0, -1, 1]), ValueError, r"positions lie in -1\.\.1"),
    ("positions", lambda a: torch.tensor([0, 2**40, 1]), ValueError, "positions lie in 0"),
    ("positions", lambda a: a["positions"].to("meta"), ValueError, "positions is on meta but o is on cpu"),
    ("cos_sin_cache", lambda a: a["cos_sin_cache"].bfloat16(), TypeError, r"cos_sin_cache has dtype torch\.bfloat16"),
    ("cos_sin_cache", lambda a: a["cos_sin_cache"].double(), TypeError, r"cos_sin_cache has dtype torch\.float64"),
    ("cos_sin_cache", lambda a: a["cos_sin_cache"][0], ValueError, r"cos_sin_cache has shape \(64,\)"),
    (
        "cos_sin_cache",
        lambda a: a["cos_sin_cache"][:, :62],
        ValueError,
        "cos_sin_cache has rows of 62; expected rope_dim=64",
    ),
    ("cos_sin_cache", lambda a: a["cos_sin_cache"].T.contiguous().T, ValueError, r"cos_sin_cache has strides \(1, 6\)"),
    ("cos_sin_cache", lambda a: a["cos_sin_cache"][:0], ValueError, "positions lie in .* cos_sin_cache"),
    ("cos_sin_cache", lambda a: a["cos_sin_cache"].to("meta"), ValueError, "cos_sin_cache is on meta"),
    ("n_groups", lambda a: 3, ValueError, r"o has 4 heads; n_groups \* heads_per_group = 6"),
    ("n_groups", lambda a: 0, ValueError, "n_groups=0 must be at least 1"),
    ("n_groups", lambda a: "2", TypeError, "n_groups='2' is str; expected int"),
    ("n_groups", lambda a: True, TypeError, "n_groups=True is bool; expected int"),
    ("nope_dim", lambda a: 448.0, TypeError, "nope_dim=448.0 is float; expected int"),
    ("quant_group_size", lambda a: 128.0, TypeError, "quant_group_size=128.0 is float; expected int"),
    ("heads_per_group", lambda a: 8, ValueError, r"n_groups \* heads_per_group = 16"),
    ("heads_per_group", lambda a: -2, ValueError, "heads_per_group=-2 must be at least 1"),
    ("nope_dim", lambda a: 440, ValueError, r"nope_dim \+ rope_dim = 504"),
    ("nope_dim", lambda a: -64, ValueError, "nope_dim=-64"),
    ("nope_dim", lambda a: 447, ValueError, "nope_dim=447 .* must be even"),
    ("rope_dim", lambda a: 63, ValueError, "rope_dim=63 must be even"),
    ("rope_dim", lambda a: 0, ValueError, "rope_dim=0 must be at least 1"),
    ("quant_group_size", lambda a: 48, ValueError, r"quant_group_size=48 is not supported; supported: \(32, 64, 128\)"),
    ("quant_group_size", lambda a: 256, ValueError, "quant_group_size=256 is not supported"),
    ("quant_group_size", lambda a: 0, ValueError, "quant_group_size=0 is not supported"),
]


@pytest.mark.parametrize("name, change, error, message", BAD)
@pytest.mark.parametrize("quantize", [False, True])
def test_a_bad_argument_is_named(
    name: str, change: Change, error: type[Exception], message: str, quantize: bool
) -> None:
    args = random_call(3)
    run(args, quantize=quantize)  # it is the change that is refused
    with pytest.raises(error, match=message):
        fused_inv_rope_fp8_quant(**args | {name: change(args)}, quantize=quantize)


def test_blocks_that_do_not_divide_a_head_are_refused() -> None:
    args = random_call(3)
    shorter = args | {"o": args["o"][..., :480].contiguous(), "nope_dim": 416}
    run(shorter | {"quant_group_size": 32})
    with pytest.raises(ValueError, match="quant_group_size=64 does not divide head_dim=480"):
        run(shorter | {"quant_group_size": 64})


def test_packed_words_must_be_full_within_a_head() -> None:
    args = random_call(3)
    shorter = args | {"o": args["o"][..., :384].contiguous(), "nope_dim": 320}
    run(shorter)
    run(shorter, packed=True, quantize=False)  # no scales, no words
    with pytest.raises(
        ValueError, match="head_dim=384 has 3 blocks of quant_group_size=128; packed scales need a multiple of 4"
    ):
        run(shorter, packed=True)


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="variant='fma_sin' is unknown; known: fma_cos, mul_mul_add"):
        SoftwareEngine(SM90).inv_rope_fp8_quant(**random_call(1), variant="fma_sin")


def test_all_tensors_on_another_device_are_refused() -> None:
    args = random_call(1)
    away = {name: args[name].to("meta") for name in ("o", "positions", "cos_sin_cache")}
    with pytest.raises(ValueError, match="o is on meta; the software engine works on CPU tensors"):
        fused_inv_rope_fp8_quant(**args | away)


def test_the_tensor_and_the_scale_format_choose_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    assert [(e.name, e.arch.name) for e in (engine_for(x, False), engine_for(x, True))] == [
        ("software", "sm90"),
        ("software", "sm100"),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    on_gpu = type("Tensor", (), {"device": torch.device("cuda", 0)})()
    with pytest.raises(
        EngineUnavailable, match=r"cuda:0 has compute capability \(7, 5\); no architecture row covers it"
    ):
        engine_for(on_gpu, False)
