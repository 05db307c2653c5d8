"""Input families that are aimed at one kind of fault each: few live lanes, tiny blocks, ties, cancelling products."""

from __future__ import annotations

import math

import numpy as np

from conformance.streams import (
    BLOCK,
    WEIGHT_EXPONENT,
    Exponents,
    Floats,
    Lanes,
    Stream,
    Tile,
    Weights,
    per_block,
)

_BF16_DIGITS = 8


def one_hot(stream: Stream, lanes: Lanes) -> Floats:
    """One live lane in each token of a group, every second time a rotated one: what it becomes tells who read it."""
    heads = lanes.width // lanes.head_dim
    head = stream.below("head", heads, (lanes.tokens,))
    plain = stream.below("lane", lanes.head_dim, (lanes.tokens,))
    turned = lanes.head_dim - 1 - stream.below("rotated lane", lanes.rope_dim, (lanes.tokens,))
    lane = head * lanes.head_dim + np.where(stream.below("which", 2, (lanes.tokens,)) == 0, plain, turned)
    value = _signed(stream, (lanes.tokens,)) * (1 + stream.below("digits", 128, (lanes.tokens,)) / np.float32(128))
    value = np.ldexp(value, stream.below("octave", 14, (lanes.tokens,)).astype(np.int32) - 7)
    out = np.zeros(lanes.shape, dtype=np.float32)
    out[np.arange(lanes.tokens), lane] = value
    return out


def two_lanes(stream: Stream, lanes: Lanes) -> Floats:
    """1024 and 1 in each head, in two rotated pairs or one of them plain: what leaks lands where nothing should be."""
    heads = lanes.width // lanes.head_dim
    shape = (lanes.tokens, heads)
    pairs = lanes.rope_dim // 2
    large = stream.below("large pair", pairs, shape)
    other = (large + 1 + stream.below("other pair", pairs - 1, shape)) % pairs
    first = lanes.head_dim - lanes.rope_dim
    plain = stream.below("plain lane", first, shape)
    side = stream.below("side", 4, shape)
    at_large = first + 2 * large + (side & 1)
    at_small = np.where(stream.below("which", 2, shape) == 0, first + 2 * other + (side >> 1), plain)
    out = np.zeros((*shape, lanes.head_dim), dtype=np.float32)
    token, head = np.indices(shape)
    out[token, head, at_large] = 1024 * _signed(stream, shape)
    out[token, head, at_small] = 1
    return out.reshape(lanes.shape)


def _signed(stream: Stream, shape: tuple[int, ...]) -> Floats:
    return np.where(stream.below("sign", 2, shape) == 0, np.float32(1), np.float32(-1))


def _near(value: float) -> tuple[float, float, float]:
    """The BF16 numbers around ``value``: the nearest, and its two neighbours."""
    fraction, exponent = math.frexp(value)
    digits = round(math.ldexp(fraction, _BF16_DIGITS))
    below, nearest, above = (math.ldexp(n, exponent - _BF16_DIGITS) for n in (digits - 1, digits, digits + 1))
    return below, nearest, above


# 0, the smallest BF16 subnormal and normal number, one without a block's floor, those around the floors of the
# quantisers (1e-10, 1e-4) and a small one beside them.
TINY = np.array(
    [0.0, 2.0**-133, 2.0**-126, _near(1e-12)[1], *_near(1e-10), _near(1e-8)[1], *_near(1e-4), 1.0], dtype=np.float32
)


def tiny(stream: Stream, lanes: Lanes) -> Floats:
    """Block maxima at zero, at the least numbers and around the floors, in turn with a few ordinary blocks."""
    peak = TINY[stream.below("peak", len(TINY), lanes.block_shape)] * _signed(stream, lanes.block_shape)
    where = stream.below("where", BLOCK, lanes.block_shape)
    rest = np.ldexp(stream.bell("lanes", lanes.shape), -2) * np.abs(per_block(peak, lanes.width))
    lane = np.arange(lanes.width) % BLOCK
    return np.where(lane == per_block(where, lanes.width), per_block(peak, lanes.width), rest).astype(np.float32)


def half_way(stream: Stream, lanes: Lanes) -> Floats:
    """Lanes exactly between two neighbouring codes, of both parities and subnormal too, beside a lane of 448: the
    block's scale is then a power of two, and no rounding but the last one enters. Rotated lanes are zero."""
    low = stream.below("code", 0x7E, lanes.shape)  # 0 .. 0x7D: between this code and the next
    exponent, fraction = low >> 3, low & 7
    digits = np.where(exponent == 0, 2 * fraction + 1, 2 * (8 + fraction) + 1).astype(np.float32)
    middle = np.ldexp(digits, (np.maximum(exponent, 1) - 11).astype(np.int32)) * _signed(stream, lanes.shape)
    full = np.arange(lanes.width) % BLOCK == per_block(stream.below("full", BLOCK // 2, lanes.block_shape), lanes.width)
    octave = per_block(stream.below("octave", 17, lanes.block_shape) - 15, lanes.width).astype(np.int32)
    values = np.where(full, np.float32(448), middle)
    return np.ldexp(np.where(lanes.rotated, np.float32(0), values), octave).astype(np.float32)


def cancelling(stream: Stream, lanes: Lanes) -> Floats:
    """Neighbouring lanes are equal, so that weights of opposite sign leave little: guard bits, order, alignment."""
    values = stream.bell("lanes", lanes.shape)
    values[:, 1::2] = values[:, 0::2]
    exponents = stream.below("spread", 10, lanes.block_shape) - 5
    return np.ldexp(values, per_block(exponents, lanes.width).astype(np.int32))


def cancelling_weights(stream: Stream, tile: Tile) -> Weights:
    """The weight of every odd lane is minus that of the lane before it; one pair in 16 is one code step off."""
    codes = stream.bell_codes("codes", tile.shape)
    even = codes[:, 0::2]
    size = even & 0x7F
    odd_one = stream.below("remainder", 16, even.shape) == 0
    size = np.where(odd_one & (size < 0x7E), size + 1, size).astype(np.uint8)
    codes[:, 1::2] = size | (~even & 0x80)
    return codes, _flat(tile)


def large(stream: Stream, lanes: Lanes) -> Floats:
    """Block maxima from 2^-20 to 2^95: scales far from one, sums that hide or absorb whole blocks."""
    exponents = stream.below("spread", 116, lanes.block_shape) - 20
    return np.ldexp(stream.bell("lanes", lanes.shape), per_block(exponents, lanes.width).astype(np.int32))


def _flat(tile: Tile) -> Exponents:
    return np.full(tile.block_shape, WEIGHT_EXPONENT, dtype=np.int64)
