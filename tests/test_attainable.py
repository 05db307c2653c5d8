"""Attainable scales and codes: no correct quantiser is refused, and wrong ones are, with and without hidden inputs.

The session ``independent`` sets OPROJ_INDEPENDENT_BLOCKS to a million blocks for either kind of input; this file alone
takes far fewer. Shares of codes with more than one legal value go to the log (``pytest -rP``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conformance import bounds
from conformance.attainable import ceil_exponent, compare_attainable, compare_blocks, intervals, legal_scales
from conformance.attainable import nearest_code as nearest
from conformance.case import Case
from conformance.compare import Comparison
from conformance.families import FAMILIES as INPUT_FAMILIES
from conformance.inputs import build
from conformance.operands import NotApplicable
from conformance.truth import Truth
from oproj.arch import get_arch
from oproj.engines.software.quantizers import inv_rope_fp8_quant, rotate_and_quantize
from oproj.rope import cos_sin_cache
from reference import inverse_rope

BLOCKS = int(os.environ.get("OPROJ_INDEPENDENT_BLOCKS", "8192"))
TOKENS, GROUPS, HEADS, HEAD, ROPE = 64, 2, 2, 512, 320  # blocks of plain, of both and of rotary lanes
PER_DRAW = TOKENS * GROUPS * HEADS * 4  # blocks
SIZES: dict[str, Any] = {"n_groups": GROUPS, "heads_per_group": HEADS, "nope_dim": HEAD - ROPE, "rope_dim": ROPE}
TABLE = cos_sin_cache("yarn", 4096, ROPE)
FAMILIES = ("normal", "wide", "boundary", "ties", "floor", "sparse")


def draw(rng: np.random.Generator, family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 accumulators ``[T, G*H, HEAD]`` and positions, every fourth of them 0."""
    shape = (TOKENS, GROUPS * HEADS, HEAD)
    x = rng.standard_normal(shape)
    if family == "wide":
        x *= np.exp2(rng.integers(-30, 30, (*shape[:2], 1)))
    if family == "boundary":  # the largest lane next to 448 * 2^k
        x[..., 3] = 448 * np.exp2(rng.integers(-20, 20, shape[:2])) * (1 + rng.integers(-3, 4, shape[:2]) * 2.0**-23)
        x[..., 4:] *= np.abs(x[..., 3:4]) / 8
    if family == "ties":
        x = rng.integers(-255, 256, shape) * np.exp2(rng.integers(-6, 2, shape))
    if family == "floor":
        x *= 2.0 ** rng.integers(-40, -32)
    if family == "sparse":
        x[rng.random(shape) < 0.98] = 0
    positions = rng.integers(0, 4096, TOKENS)
    positions[::4] = 0
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(positions)


def truth_of(o: torch.Tensor, positions: torch.Tensor, arch: str = "sm90") -> Any:
    """What `intervals` reads of a Truth."""
    config = SimpleNamespace(rope_dim=ROPE, head_dim=HEAD, heads_per_group=HEADS)
    inputs = SimpleNamespace(o=o, positions=positions, cos_sin_cache=TABLE)
    x = inverse_rope(o, positions, TABLE, rope_dim=ROPE).reshape(TOKENS, GROUPS, -1)
    return SimpleNamespace(inputs=inputs, config=config, x=x, fp8=True, block=128, arch=get_arch(arch))


def judged(data: torch.Tensor, scale: torch.Tensor, truth: Any, known: str, rule: str = "ceil2") -> Comparison:
    declared = SimpleNamespace(o_known=known, scale_rule=rule)
    return compare_attainable(SimpleNamespace(data=data, scale=scale), truth, declared)  # type: ignore[arg-type]


def rotated(x: torch.Tensor, positions: torch.Tensor, direction: float = 1.0) -> np.ndarray:
    """FP32 rotation with three roundings ``[T, G, K]``; -1 turns the wrong way."""
    y, rows = x.double().numpy().copy(), TABLE[positions].double().numpy()[:, None]
    c, s, r = rows[..., : ROPE // 2], direction * rows[..., ROPE // 2 :], np.float32
    x0, x1 = y[..., HEAD - ROPE :: 2].copy(), y[..., HEAD - ROPE + 1 :: 2].copy()
    y[..., HEAD - ROPE :: 2] = r(x0 * c) + r(x1 * s)
    y[..., HEAD - ROPE + 1 :: 2] = r(x1 * c) - r(x0 * s)
    return y.reshape(TOKENS, GROUPS, -1)


def bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().double().numpy()


def to_e4m3(q: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.clip(q, -448, 448).astype(np.float32)).to(torch.float8_e4m3fn)


def away(q: np.ndarray) -> torch.Tensor:
    """Nearest code, ties away from zero."""
    return to_e4m3(q * (1 + 2.0**-20))


def cut(q: np.ndarray) -> torch.Tensor:
    """Truncated toward zero: codes whose value is larger step down."""
    code = to_e4m3(q)
    return torch.where(code.double().abs() > torch.from_numpy(np.abs(q)), _below(code), code.view(torch.uint8)).view(
        torch.float8_e4m3fn
    )


def _below(code: torch.Tensor) -> torch.Tensor:
    return code.view(torch.uint8) - 1


def emitted(
    y: np.ndarray, octave: int = 0, cast: Callable[[np.ndarray], torch.Tensor] = to_e4m3, rule: str = "ceil2"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and FP32 scales of FP32 values, in NumPy."""
    amax = np.maximum(np.abs(y).reshape(TOKENS, GROUPS, -1, 128).max(-1), np.float32(1e-10)).astype(np.float32)
    raw = amax / np.float32(448)
    scale = raw if rule == "fp32" else np.exp2(np.ceil(np.log2(raw.astype(np.float64))) + octave).astype(np.float32)
    quotient = (y.astype(np.float32) / np.repeat(scale, 128, -1)).astype(np.float64)
    return cast(quotient), torch.from_numpy(scale)


def draws(seed: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(seed)
    count = max(len(FAMILIES), -(-BLOCKS // PER_DRAW))
    return ((f, *draw(rng, f)) for f in (FAMILIES[i % len(FAMILIES)] for i in range(count)))  # type: ignore[return-value]


def test_no_right_quantiser_is_refused_on_exact_inputs() -> None:
    shares, blocks = [], 0
    for i, (family, x, positions) in enumerate(draws(1)):
        o = x.bfloat16()
        packed, variant = bool(i % 2), ("fma_cos", "mul_mul_add")[i // len(FAMILIES) % 2]
        pair = inv_rope_fp8_quant(o, positions, TABLE, **SIZES, tma_aligned_scales=packed, variant=variant)
        comparison = judged(*pair, truth_of(o, positions, "sm100" if packed else "sm90"), "exact")
        assert (comparison.mismatched, comparison.compared) == (0, o.numel() + o.numel() // 128), (family, comparison)
        shares.append(comparison.ambiguous)
        blocks += PER_DRAW
    print(f"exact: {blocks} blocks, {np.mean(shares):.2e} of codes ambiguous")
    assert 0 < np.mean(shares) < 1e-4


def test_no_right_quantiser_is_refused_on_hidden_accumulators() -> None:
    shares, blocks = [], 0
    for i, (family, x, positions) in enumerate(draws(2)):
        rotation = ("fma_cos", "fma_sin", "mul_mul_add")[i // len(FAMILIES) % 3]
        data, scale = rotate_and_quantize(x, positions, TABLE, **SIZES, rotation=rotation)
        comparison = judged(data, scale, truth_of(x.bfloat16(), positions, "sm100"), "half-ulp")
        assert comparison.mismatched == 0, (family, comparison)
        shares.append(comparison.ambiguous)
        blocks += PER_DRAW
    print(f"half-ulp: {blocks} blocks, {np.mean(shares):.2e} of codes ambiguous")
    assert 0.01 < np.mean(shares) < 0.3


@pytest.mark.parametrize("known", ["exact", "half-ulp"])
def test_no_right_quantiser_with_fp32_scales_is_refused(known: str) -> None:
    for family, x, positions in draws(3):
        hidden = x if known == "half-ulp" else x.bfloat16().float()
        pair = emitted(rotated(hidden, positions), rule="fp32")
        truth = truth_of(x.bfloat16(), positions)
        assert judged(*pair, truth, known, "fp32").mismatched == 0, family
        if known == "exact" and family == "normal":
            assert judged(*pair, truth, known).mismatched > PER_DRAW // 2  # undeclared: no power of two
            doubled = judged(pair[0], pair[1] * (1 + 2.0**-21), truth, known, "fp32")
            assert doubled.first_bad is not None and doubled.first_bad.tensor == "scales"


FAULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "none": lambda x, p: emitted(rotated(x, p)),
    "direction": lambda x, p: emitted(rotated(x, p, -1.0)),
    "extra rounding": lambda x, p: emitted(bf16(rotated(x, p))),
    "floor exponent": lambda x, p: emitted(rotated(x, p), -1),
    "octave high": lambda x, p: emitted(rotated(x, p), 1),
    "ties away": lambda x, p: emitted(rotated(x, p), cast=away),
    "truncation": lambda x, p: emitted(rotated(x, p), cast=cut),
    "late rounding": lambda x, p: emitted(rotated(x, p), cast=lambda q: to_e4m3(bf16(q))),
}
UNSEEN = {("none", "exact"), ("none", "half-ulp"), ("ties away", "half-ulp")}
CAUGHT = [(fault, known) for fault in FAULTS for known in ("exact", "half-ulp")]


@pytest.mark.parametrize(("fault", "known"), CAUGHT)
def test_wrong_arithmetic_is_caught_where_the_inputs_allow(fault: str, known: str) -> None:
    """Half a BF16 ulp of doubt covers a tie; anything else shows somewhere."""
    x, positions = draw(np.random.default_rng(4), "normal")
    hidden = x if known == "half-ulp" else x.bfloat16().float()
    comparison = judged(*FAULTS[fault](hidden, positions), truth_of(x.bfloat16(), positions), known)
    print(f"{fault}, {known}: {comparison.mismatched / comparison.compared:.2e} of elements")
    if fault == "none":
        assert comparison.mismatched == 0
    elif (fault, known) not in UNSEEN:
        assert comparison.mismatched > 0 and comparison.first_bad is not None


def test_nearest_code_is_the_cast_of_the_library_on_fp32_numbers() -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(200_000) * np.exp2(rng.integers(-14, 11, 200_000))).astype(np.float32)
    x = np.concatenate([x, np.arange(-2048, 2049, dtype=np.float32) * 2.0**-11, np.float32([0.0, -0.0, 448, 464, 1e9])])
    codes = to_e4m3(x.astype(np.float64)).view(torch.uint8).numpy().astype(np.int64)
    want = np.where(codes & 0x80, -(codes & 0x7F), codes)
    assert np.array_equal(nearest(x.astype(np.float64)), want)
    just = np.nextafter(17.0, 18.0)  # above a tie by what FP32 does not hold
    assert nearest(np.array([17.0, just])).tolist() == [0x58, 0x59]


def test_ceil_exponent_changes_just_above_448() -> None:
    edges = 448 * np.exp2(np.arange(-42.0, 30.0))
    assert np.array_equal(ceil_exponent(edges), np.arange(-42, 30))
    assert np.array_equal(ceil_exponent(np.nextafter(edges, np.inf)), np.arange(-41, 31))


@pytest.mark.parametrize("k, ulps", [(-5, 2), (-9, 4), (20, 9), (2, 0), (3, 0), (4, 2)])
def test_an_octave_less_is_legal_inside_the_band_of_log2_alone(k: int, ulps: int) -> None:
    for extra, legal in ((ulps, True), (ulps + 1, False)):
        y = np.zeros((1, 128))
        y[0, 7] = 448 * 2.0**k + extra * 2.0 ** (k - 15)
        spread = SimpleNamespace(lo=y, hi=y)
        code, scale = to_e4m3(y / 2.0**k), torch.full((1, 1), 2.0**k)
        comparison = compare_blocks(code, scale, spread, legal_scales(spread, 128))  # type: ignore[arg-type]
        assert (comparison.mismatched == 0) == legal
        if legal:
            limit = bounds.quantize_bound(y, scale)
            assert float(np.abs(code.double().numpy() * 2.0**k - y).max()) <= float(limit[0, 7])
        else:
            with pytest.raises(NotApplicable, match="it clamps"):
                bounds.quantize_bound(y, scale)


@pytest.mark.parametrize("family", sorted(INPUT_FAMILIES))
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_the_software_engine_is_attainable_in_every_family(arch: str, family: str) -> None:
    case = Case(arch, "v4-flash", 2, tp_size=4, family=family, seed=7)
    truth = Truth(build(case))
    comparison = compare_attainable(truth.model_x, truth)
    assert comparison.mismatched == 0 and comparison.compared == truth.x.numel() + truth.x.numel() // 128


def test_first_bad_element_is_named_with_what_is_legal() -> None:
    truth = Truth(build(Case("sm100", "v4-flash", 2, tp_size=4, seed=7)))
    x = truth.model_x
    codes = x.data.clone().view(torch.uint8)
    codes[1, 1, 700] = 0x7F
    bad = compare_attainable(replace(x, data=codes.view(torch.float8_e4m3fn)), truth)
    good = int(x.data.view(torch.uint8)[1, 1, 700])
    assert bad.mismatched == 1 and bad.first_bad is not None
    assert (bad.first_bad.tensor, bad.first_bad.at, bad.first_bad.got) == ("codes", (1, 1, 700), "0x7f")
    assert f"0x{good:02x}" in bad.first_bad.want
    words = x.scale.clone()
    words[0, 1, 2] |= 0xFF
    bad = compare_attainable(replace(x, scale=words), truth)
    assert bad.first_bad is not None and bad.mismatched == 129  # no code of that block is legal either
    assert (bad.first_bad.tensor, bad.first_bad.at, bad.first_bad.got) == ("scales", (0, 1, 8), "0xff")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"o_known": "roughly"}, "o_known='roughly'"),
        ({"scale_rule": "log2"}, "scale_rule='log2'"),
        ({"scale_rule": "fp32"}, "sm100 packs powers of two"),
        ({"amax_floor": -1.0}, "amax_floor=-1.0"),
    ],
)
def test_unknown_declarations_are_refused(declared: dict[str, Any], message: str) -> None:
    truth = Truth(build(Case("sm100", "v4-flash", 1, tp_size=4)))
    with pytest.raises(ValueError, match=message):
        compare_attainable(truth.model_x, truth, SimpleNamespace(**declared))


def test_a_declared_floor_moves_the_scale_of_an_empty_block() -> None:
    y = np.zeros((1, 128))
    for floor, exponent in ((1e-10, -42), (1e-12, -48), (1e-4, -22)):
        legal = legal_scales(SimpleNamespace(lo=y, hi=y), 128, floor=float(np.float32(floor)))  # type: ignore[arg-type]
        assert legal.lo.item() == legal.hi.item() == 2.0**exponent


def test_bf16_wo_a_has_no_codes() -> None:
    truth = Truth(build(Case("sm90", "v4-flash", 1, tp_size=4, wo_a_dtype="bf16")))
    with pytest.raises(NotApplicable, match="BF16 wo_a has no codes"):
        compare_attainable(truth.model_x, truth)


def test_hidden_inputs_widen_every_lane() -> None:
    x, positions = draw(np.random.default_rng(6), "normal")
    truth = truth_of(x.bfloat16(), positions)
    exact, hidden = intervals(truth), intervals(truth, "half-ulp")
    assert bool(((hidden.lo < exact.lo) & (hidden.hi > exact.hi)).all())
    y = rotated(x, positions)
    assert bool(((hidden.lo <= y) & (y <= hidden.hi)).all())
    half = bounds.half_ulp_bf16(x.bfloat16())[..., : HEAD - ROPE].numpy()
    plain = (hidden.hi - hidden.lo).reshape(TOKENS, GROUPS * HEADS, HEAD)[..., : HEAD - ROPE]
    assert np.abs(plain / (2 * half) - 1).max() < 2.0**-30
