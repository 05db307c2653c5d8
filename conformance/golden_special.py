"""Golden vectors of special values: NaN, Inf, signed zeros, overflow, subnormals and ties of the last rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from conformance.golden import EINSUM, GoldenSet
from conformance.golden_inputs import MINUS_ONE, MINUS_ZERO, ONE, generator, make, pair

Changes = dict[tuple[int, ...], float]

TOKENS, COLUMNS, K = 8, 136, 256  # 136 columns reach into a second weight-scale row


def special() -> Iterator[GoldenSet]:
    """All special sets; apart from ``probes`` they change a few elements of one base set."""
    a, b = pair("normal", generator("special"), (TOKENS, 1, K), (1, COLUMNS, K))
    base = make("special/base", EINSUM, "the unchanged set", a, b, "pow2", 4)
    yield base
    claim = "a NaN code of either sign spoils its token alone"
    yield _changed(base, "nan_codes_a", claim, a={(1, 0, 5): 0x7F, (3, 0, 200): 0xFF})
    claim = "a NaN code of either sign spoils its column alone"
    yield _changed(base, "nan_codes_b", claim, b={(0, 3, 7): 0x7F, (0, 130, 130): 0xFF})
    claim = "a NaN scale spoils its token or its block of columns"
    yield _changed(base, "nan_scales", claim, sa={(2, 0, 1): np.nan}, sb={(0, 1, 0): np.nan})
    yield _infinite(base)
    yield _zeros(base)
    yield from probes()


def _changed(base: GoldenSet, name: str, claim: str, **changes: Changes) -> GoldenSet:
    """``base`` with single elements of its arrays replaced."""
    arrays = {}
    for part, elements in changes.items():
        arrays[part] = getattr(base, part).copy()
        for index, value in elements.items():
            arrays[part][index] = value
    return replace(base, name=f"special/{name}", claim=claim, **arrays)


def _infinite(base: GoldenSet) -> GoldenSet:
    """Inf in one block, in both blocks (Inf - Inf where the signs differ), beside a zero sum (Inf * 0), negative."""
    a = base.a.copy()
    a[3, 0, :128] = 0
    inf = np.inf
    at_a: Changes = {(1, 0, 0): inf, (2, 0, 0): inf, (2, 0, 1): inf, (3, 0, 0): inf, (4, 0, 1): -inf}
    claim = "Inf scale: IEEE multiply-add, Inf - Inf and Inf * 0 are NaN"
    return _changed(replace(base, a=a), "inf_scales", claim, sa=at_a, sb={(0, 1, 1): inf})


def _zeros(base: GoldenSet) -> GoldenSet:
    """Rows of -0, of +0, mixed, with a negative scale, and one smallest negative product among zeros."""
    a, sa = base.a.copy(), base.sa.copy()
    a[0], a[1], a[2] = MINUS_ZERO, 0, 0
    a[2, 0, ::2] = MINUS_ZERO
    a[3], sa[3] = MINUS_ZERO, -1.0
    a[4] = MINUS_ZERO
    a[4, 0, 17] = 0x81  # -2**-9
    b = base.b.copy()
    b[0, 40] = 0
    b[0, 41] = MINUS_ZERO
    return GoldenSet("special/zeros", EINSUM, "sign of a zero sum, of -0 codes everywhere", a, sa, b, base.sb)


def probes() -> Iterator[GoldenSet]:
    """One product a token: the output is the promotion and the BF16 rounding of a chosen scale product."""
    up, u = 2.0**64, 2.0**-23
    over = [2 - 2.0**-7, 2 - 2.0**-8, 2 - 2.0**-8 - u, 2 - u, 2 - 2.0**-9, 1.0, 4.0, 2.0**-7]
    claim = "BF16 rounding reaches Inf from the tie on; FP32 itself overflows to Inf"
    yield _probe("overflow", claim, [value * up / 2 for value in over], up)
    ties = [
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
        1 + 2.0**-8 + u,
        1 + 2.0**-8 - u,
        1 + 2.0**-7,
        1 + 5 * 2.0**-8,
        1.0,
        1 + 2.0**-9,
    ]
    yield _probe("bf16_ties", "the last rounding is to nearest, ties to even", ties, 1.0)
    down = [2.0 ** (power + 64) for power in (-126, -127, -133, -134, -149, -150, -140, -151)]
    claim = "subnormal scale products and results are kept, not flushed"
    yield _probe("subnormal", claim, down, 1 / up)
    odd = [value * 2.0**-75 for value in (5.5, 4.5, 1.5, 0.5, 0.75, 2.49, 3.25, 100.5)]
    claim = "a scale product below 2**-126 is rounded to a multiple of 2**-149, to nearest even"
    yield _probe("subnormal_rounding", claim, odd, 2.0**-74, code=0x7E, live=128)


def _probe(name: str, claim: str, activation: list[float], weight: float, code: int = ONE, live: int = 1) -> GoldenSet:
    """Token t has ``code`` at k < ``live`` and the scale product ``activation[t] * weight``.

    Columns: +1, -1, 448, -448, 2**-9, -2**-9, 0, and 1 in the second block alone (where token t holds a zero).
    """
    a = np.zeros((len(activation), 1, K), np.uint8)
    a[:, 0, :live] = code
    b = np.zeros((1, 8, K), np.uint8)
    b[0, :7, :live] = np.array((ONE, MINUS_ONE, 0x7E, 0xFE, 0x01, 0x81, 0x00), np.uint8)[:, None]
    b[0, 7, 128] = ONE
    sa = np.ones((len(activation), 1, 2), np.float32)
    sa[:, 0, 0] = activation
    sb = np.ones((1, 1, 2), np.float32)
    sb[0, 0, 0] = weight
    return GoldenSet(f"special/{name}", EINSUM, claim, a, sa, b, sb)
