"""The inputs of the golden vectors: few, small, each chosen for a fact of the model that it decides.

Random bits come from NumPy's Philox, keyed by the set's name, so that a recording on another machine uses the same
inputs; the files hold them explicitly all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

from conformance.golden import BLOCK, EINSUM, GEMM, GoldenSet
from oproj.arch import SM90

FAMILIES = ("normal", "wide", "subnormal", "cancel", "positive", "bits", "lone_subnormal")
SCALES = ("unit", "pow2", "general")
Draw = Callable[[str, np.random.Generator, tuple[int, ...]], np.ndarray]
ONE, MINUS_ONE, MINUS_ZERO = 0x38, 0xB8, 0x80


def generator(name: str) -> np.random.Generator:
    """A Philox stream of its own for ``name``."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def encode(values: np.ndarray) -> np.ndarray:
    """e4m3 codes (uint8) of float values, clamped to +-448, round to nearest even."""
    clamped = torch.from_numpy(np.clip(values, -448.0, 448.0).astype(np.float32))
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def codes(family: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """e4m3 codes of one input family. ``cancel`` gives plain normal codes: the pairing needs both operands."""
    if family == "bits":
        drawn = rng.integers(0, 254, shape, dtype=np.uint8)
        return drawn + (drawn >= 0x7F)  # leaves out 0x7F; 0xFF is never reached
    if family == "subnormal":
        small = rng.integers(0, 8, shape, dtype=np.uint8) | (rng.integers(0, 2, shape, dtype=np.uint8) << 7)
        return np.where(rng.random(shape) < 0.02, encode(rng.normal(0, 0.2, shape)), small)
    values = rng.normal(0.0, 110.0, shape)
    if family == "wide":
        values = rng.normal(0.0, 1.0, shape) * np.exp2(rng.integers(-9, 9, shape))
    return encode(np.abs(values) if family == "positive" else values)


def bulk_codes(family: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """``codes`` for hundreds of millions of elements: drawn from a table of 65536 codes of the family."""
    table = codes(family, generator(f"table/{family}"), (65536,))
    return table[rng.integers(0, 65536, shape, dtype=np.uint16)]


def pair(
    family: str,
    rng: np.random.Generator,
    a_shape: tuple[int, ...],
    b_shape: tuple[int, ...],
    draw: Draw = codes,
) -> tuple[np.ndarray, np.ndarray]:
    """Codes of both operands. ``cancel``: the second half of K repeats the first with the sign turned, a tenth
    of the weights one code off, so that little remains of large sums. ``lone_subnormal``: see there."""
    if family == "lone_subnormal":
        return lone_subnormal(rng, a_shape), lone_subnormal(rng, b_shape, large=True)
    a, b = draw(family, rng, a_shape), draw(family, rng, b_shape)
    if family == "cancel":
        half = a_shape[-1] // 2
        a[..., half:] = a[..., :half]
        moved = b[..., :half] ^ 0x80
        nudge = (rng.random(moved.shape) < 0.1) & ((moved & 0x7F) < 0x7E)
        b[..., half:] = moved + nudge.astype(np.uint8)
    return a, b


def lone_subnormal(rng: np.random.Generator, shape: tuple[int, ...], *, large: bool = False) -> np.ndarray:
    """One subnormal code against a large one (``large``: the large side) leads every 32 products; the others are
    small normals that only an alignment to the normalised product would keep."""
    drawn = rng.integers(0x08, 0x18 if large else 0x10, shape, dtype=np.uint8)
    lead = rng.integers(0x78, 0x7F, shape, dtype=np.uint8) if large else rng.integers(1, 8, shape, dtype=np.uint8)
    drawn[..., ::32] = lead[..., ::32]
    return drawn


def scales(choice: str, rng: np.random.Generator, shape: tuple[int, ...], spread: int = 9) -> np.ndarray:
    """FP32 scales: ones, powers of two in ``2**+-spread``, or any mantissa over the same range."""
    if choice == "unit":
        return np.ones(shape, np.float32)
    if choice == "pow2":
        return np.exp2(rng.integers(-spread, spread + 1, shape)).astype(np.float32)
    return np.exp2(rng.uniform(-spread, spread, shape)).astype(np.float32)


def make(name: str, op: str, claim: str, a: np.ndarray, b: np.ndarray, choice: str, spread: int = 9) -> GoldenSet:
    """A set around given codes, with scales of ``choice``."""
    rng = generator(name + "/scales")
    blocks = a.shape[-1] // BLOCK
    sa = scales(choice, rng, (*a.shape[:-1], blocks), spread)
    sb = scales(choice, rng, (*b.shape[:-2], -(-b.shape[-2] // BLOCK), blocks), spread)
    return GoldenSet(name, op, claim, a, sa, b, sb)


def single_blocks() -> Iterator[GoldenSet]:
    """One 128-wide block of K, one group: four chained instructions and nothing else."""
    for family in FAMILIES:
        a, b = pair(family, generator(f"block/{family}"), (64, 1, 128), (1, 128, 128))
        for choice in SCALES:
            claim = "alignment bits, truncation, products not renormalised, output bits of one block"
            yield make(f"block/{family}/{choice}", EINSUM, claim, a, b, choice)


def full_k() -> Iterator[GoldenSet]:
    """K = 4096: 32 blocks in ascending order, promoted in FP32."""
    rng = generator("full")
    a, b = pair("normal", rng, (16, 1, 4096), (1, 128, 4096))
    yield make("full/general", EINSUM, "promotion with any FP32 scale", a, b, "general", 3)
    wide = codes("wide", rng, (16, 1, 4096))
    yield make("full/pow2_wide", EINSUM, "power-of-two scales as served, 18 octaves apart", wide, b, "pow2", 9)
    a, b = pair("cancel", generator("full/cancel"), (16, 1, 4096), (1, 32, 4096))
    yield make("full/cancel", EINSUM, "order of the blocks: large sums cancel", a, b, "pow2", 2)
    yield promotion()


def promotion() -> GoldenSet:
    """Blocks 16..31 undo blocks 0..15 exactly, with general scales: what is left is the rounding of the
    promotion itself, so nearly every output tells a fused multiply-add from two roundings. Of 128 columns the 32
    where most tokens do are kept."""
    rng = generator("full/promotion")
    a, b = codes("normal", rng, (16, 1, 4096)), codes("normal", rng, (1, 128, 4096))
    a[..., 2048:], b[..., 2048:] = a[..., :2048], b[..., :2048] ^ 0x80
    sa, sb = scales("general", rng, (16, 1, 32), 2), scales("general", rng, (1, 1, 32), 2)
    sa[..., 16:], sb[..., 16:] = sa[..., :16], sb[..., :16]
    differ = fused_differs(a[:, 0], sa[:, 0], b[0], sb[0, 0])
    best = np.sort(np.argsort(-differ.sum(0), kind="stable")[:32])
    claim = "fused multiply-add in the promotion, not a product and a sum with two roundings"
    return GoldenSet("full/promotion", EINSUM, claim, a, sa, np.ascontiguousarray(b[:, best]), sb)


def fused_differs(a: np.ndarray, sa: np.ndarray, b: np.ndarray, sb: np.ndarray) -> np.ndarray:
    """Mask ``[T, N]``: the BF16 result of the SM90 chain changes when the promotion rounds twice.

    Selection only: the float64 sum stands in for the exact one before its rounding to FP32.
    """
    from oproj.engines.software import gemm

    fused = np.zeros((a.shape[0], b.shape[0]), np.float32)
    split = fused.copy()
    ones_a, ones_b = np.ones((a.shape[0], 1), np.float32), np.ones((b.shape[0], 1), np.float32)
    for block in range(a.shape[1] // BLOCK):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        acc = np.zeros_like(fused)
        gemm.matmul(SM90, a[:, part], ones_a, np.ascontiguousarray(b[:, part]), ones_b, BLOCK, acc)
        scale = (sa[:, block] * sb[block])[:, None]
        fused = (scale.astype(np.float64) * acc + fused).astype(np.float32)
        split = scale * acc + split
    return gemm.round_to_bf16_bits(fused) != gemm.round_to_bf16_bits(split)


def shapes() -> Iterator[GoldenSet]:
    """The GEMM form, and token counts around the tile and the TMA alignment of the scales."""
    a, b = pair("normal", generator("gemm"), (5, 2048), (384, 2048))
    yield make("gemm/general", GEMM, "wo_b form: 5 x 2048 by 384 columns", a, b, "general", 3)
    a, b = pair("normal", generator("tokens"), (129, 2, 512), (2, 128, 512))
    whole = make("tokens/129", EINSUM, "a token has the same bits in every batch", a, b, "general", 3)
    for tokens in (1, 3, 64, 129):
        rows = slice(0, tokens)
        yield GoldenSet(f"tokens/{tokens}", EINSUM, whole.claim, a[rows], whole.sa[rows], b, whole.sb)
