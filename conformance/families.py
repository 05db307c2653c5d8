"""Input families: what the numbers of a Case look like, and which fault each look exposes.

Activations of one group are FP32 [T, heads_per_group * head_dim], later rounded to BF16 once. Weights of one group are
e4m3 codes [rows, K] with one power-of-two scale exponent per block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conformance import families_aimed as aimed
from conformance.streams import (
    BLOCK,
    WEIGHT_EXPONENT,
    Exponents,
    Floats,
    Lanes,
    Stream,
    Tile,
    Weights,
    blocks,
    per_block,
)

# Activations: (stream, lanes) -> FP32 [T, width]


def _normal(stream: Stream, lanes: Lanes) -> Floats:
    return stream.bell("lanes", lanes.shape)


def _scaled(values: Floats, exponents: NDArray, lanes: Lanes) -> Floats:
    return np.ldexp(values, per_block(exponents, lanes.width).astype(np.int32))


def _wide(stream: Stream, lanes: Lanes) -> Floats:
    exponents = stream.below("spread", 14, lanes.block_shape) - 7
    return _scaled(_normal(stream, lanes), exponents, lanes)


def _outlier(stream: Stream, lanes: Lanes) -> Floats:
    where = stream.below("where", 2 * BLOCK, lanes.block_shape)  # every second block has one
    hit = (np.arange(lanes.width) % BLOCK) == per_block(where, lanes.width)
    peak = np.where(stream.below("sign", 2, lanes.block_shape) == 0, np.float32(7168), np.float32(-7168))  # 448 * 16
    return np.where(hit, per_block(peak, lanes.width), np.ldexp(_normal(stream, lanes), -4))


def _positive(stream: Stream, lanes: Lanes) -> Floats:
    return np.abs(_normal(stream, lanes))


def _sparse(stream: Stream, lanes: Lanes) -> Floats:
    live_lane = stream.below("live lanes", 8, lanes.shape) == 0
    live_block = stream.below("live blocks", 2, lanes.block_shape) == 0
    return np.where(live_lane & per_block(live_block, lanes.width), _normal(stream, lanes), np.float32(0))


_ULPS = np.array([-2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 19, 20])


def _boundary(stream: Stream, lanes: Lanes) -> Floats:
    """One lane a block is 448 * 2^j * (1 + n BF16 ulp) or 1.75 * 2^j; the others stay below an eighth of it.

    In half of the blocks with rotated lanes it is 448 * 2^j in the slowest pair, beside a partner of n * 2^-11 of it:
    at position p the rotation (angle 1.3e-4 * p) then adds about n * p FP32 ulps, where rules for the scale differ.
    """
    shape, per_head = lanes.block_shape, lanes.head_dim // BLOCK
    aimed = (np.arange(shape[1]) % per_head == per_head - 1) & (stream.below("aim", 2, shape) == 0)
    ulps = _ULPS[stream.below("ulps", len(_ULPS), shape)]
    significand = np.where(aimed | (stream.below("kind", 4, shape) == 0), 224, 224 + ulps)  # 448 = 1.75 * 2^8 = 224 * 2
    peak = np.ldexp(significand.astype(np.float32), (stream.below("octave", 17, shape) - 15).astype(np.int32))
    peak = np.where(stream.below("sign", 2, shape) == 0, peak, -peak)
    where = np.where(aimed, BLOCK - 2, stream.below("where", BLOCK, shape))
    lane, width = np.arange(lanes.width) % BLOCK, lanes.width
    partner = np.ldexp(peak * (1 + stream.below("partner", 8, shape)).astype(np.float32), -11)
    rest = np.ldexp(_normal(stream, lanes), -4) * np.abs(per_block(peak, width))
    rest = np.where(per_block(aimed, width) & (lane == BLOCK - 1), per_block(partner, width), rest)
    return np.where(lane == per_block(where, width), per_block(peak, width), rest).astype(np.float32)


def _exact(stream: Stream, lanes: Lanes) -> Floats:
    """One lane in 32 is +-1 or +-2 times a power of two per token; rotated lanes are 0, so no rounding enters."""
    shape = lanes.shape
    hit = (
        np.arange(lanes.width) % 32
        == np.repeat(stream.below("where", 32, (shape[0], -(-shape[1] // 32))), 32, 1)[:, : shape[1]]
    )
    digits = np.array([1, -1, 2, -2], dtype=np.float32)[stream.below("digits", 4, shape)]
    token = (np.arange(lanes.tokens, dtype=np.int32) % 5 - 2)[:, None]
    return np.ldexp(np.where(hit & ~lanes.rotated, digits, np.float32(0)), token)


def _address(stream: Stream, lanes: Lanes) -> Floats:
    """Block (t, g, k) has an exponent of its own along every axis, so no transposed or shifted scale is equal."""
    t, k = np.arange(lanes.tokens)[:, None], np.arange(blocks(lanes.width))[None, :]
    return _scaled(_normal(stream, lanes), (7 * t + 5 * lanes.group + 3 * k) % 29 - 14, lanes)


# Weights: (stream, group, shape, block) -> codes uint8 [rows, K], scale exponents [rows / block, K / block]


def _flat(tile: Tile) -> Exponents:
    return np.full(tile.block_shape, WEIGHT_EXPONENT, dtype=np.int64)


def _normal_weights(stream: Stream, tile: Tile) -> Weights:
    return stream.bell_codes("codes", tile.shape), _flat(tile)


def _wide_weights(stream: Stream, tile: Tile) -> Weights:
    codes = stream.bell_codes("codes", tile.shape)
    return codes, stream.below("spread", 9, tile.block_shape) - 4 + WEIGHT_EXPONENT


def _positive_weights(stream: Stream, tile: Tile) -> Weights:
    return stream.bell_codes("codes", tile.shape) & np.uint8(0x7F), _flat(tile)


def _exact_weights(stream: Stream, tile: Tile) -> Weights:
    """Every weight is -1, 0 or 1; the block scale 2^s is undone by codes +-2^-s, so a misplaced scale shows."""
    shift = stream.below("spread", 9, tile.block_shape) - 4
    one = np.repeat(np.repeat((7 - shift) << 3, tile.block[0], 0), tile.block[1], 1)[: tile.rows, : tile.k]
    digit = stream.below("digits", 3, tile.shape)
    return np.select([digit == 0, digit == 1], [0, one], one | 0x80).astype(np.uint8), shift


def _address_weights(stream: Stream, tile: Tile) -> Weights:
    codes = stream.bell_codes("codes", tile.shape)
    n, k = np.arange(tile.block_shape[0])[:, None], np.arange(tile.block_shape[1])[None, :]
    return codes, (3 * n + 4 * tile.group + 2 * k) % 11 - 5 + WEIGHT_EXPONENT


@dataclass(frozen=True)
class Family:
    """One row of the table of families."""

    name: str
    about: str
    exposes: str
    activations: Callable[[Stream, Lanes], Floats]
    weights: Callable[[Stream, Tile], Weights]


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("normal", "bell-shaped lanes and weights", "arithmetic on ordinary data", _normal, _normal_weights),
        Family("wide", "a random 2^k per block, weights too", "layout faults", _wide, _wide_weights),
        Family("outlier", "7168 among lanes near 0.04", "scales one octave too high", _outlier, _normal_weights),
        Family("positive", "no negative lane or weight", "missing promotion, bias", _positive, _positive_weights),
        Family("sparse", "zero lanes and all-zero blocks", "amax floors, 0/0", _sparse, _normal_weights),
        Family("boundary", "block maxima at 448*2^j and 1.75*2^j", "rounding of the scale", _boundary, _normal_weights),
        Family("exact", "small integers, sums that BF16 holds", "dropped or misplaced terms", _exact, _exact_weights),
        Family("address", "exponents that name their block", "permuted or shifted scales", _address, _address_weights),
        Family("one-hot", "one live lane a token and group", "pairing, wrong heads", aimed.one_hot, _wide_weights),
        Family("two-lanes", "1024 and 1 in each head", "lanes that leak", aimed.two_lanes, _wide_weights),
        Family("tiny", "block maxima at 0 and the floors", "floors, 0/0", aimed.tiny, _normal_weights),
        Family("half-way", "lanes between two codes", "rounding of the cast", aimed.half_way, _normal_weights),
        Family("cancelling", "pairs that cancel", "guard bits, order of K", aimed.cancelling, aimed.cancelling_weights),
        Family("large", "block maxima up to 2^95", "overflow, absorbed terms", aimed.large, _normal_weights),
    )
}


def get_family(name: str) -> Family:
    """A family by name; ``ValueError`` lists the known ones."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise ValueError(f"family={name!r} is unknown; known families: {', '.join(FAMILIES)}") from None
