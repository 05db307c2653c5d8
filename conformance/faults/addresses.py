"""Address products of the path in Python integers: from which number of tokens on a signed 32-bit product wraps.

No tensor of that size is needed: what a kernel computes in 64 bits is compared with the same formula modulo 2^32.
Formulas: strides of ``oproj.activation`` and of a padded attention buffer; reports in the registry row `int32-wrap`.
"""

from __future__ import annotations

from dataclasses import dataclass

WORD = 32


@dataclass(frozen=True)
class Buffer:
    """One buffer of the path, elements addressed as outer * outer_stride(T) + token * token_stride."""

    name: str
    token_stride: int
    outer: int = 0  # index along the dim outside of tokens, the last one
    per_token: int = 0  # its stride per token of the batch

    def products(self, tokens: int) -> tuple[int, int]:
        """The two products of the last row's address: outer index times its stride, token times its own."""
        return self.outer * self.per_token * tokens, (tokens - 1) * self.token_stride


BUFFERS: tuple[Buffer, ...] = (
    Buffer("o, 128 heads", 128 * 512),
    Buffer("o, 64 heads", 64 * 512),
    Buffer("codes, 16 groups", 4096, outer=15, per_token=4096),
    Buffer("codes, 8 groups", 4096, outer=7, per_token=4096),
    Buffer("z, 16 groups", 16 * 1024),
)


def wrapped(offset: int, bits: int = WORD) -> int:
    """``offset`` as a signed product of ``bits`` bits keeps it."""
    half = 1 << (bits - 1)
    return (offset + half) % (1 << bits) - half


def wraps(buffer: Buffer, tokens: int, bits: int = WORD) -> bool:
    """Whether a product of the last row of a batch of ``tokens`` is another number in ``bits`` bits."""
    return any(wrapped(product, bits) != product for product in buffer.products(tokens))


def first_wrap(buffer: Buffer, bits: int = WORD) -> int:
    """The smallest number of tokens at which some product wraps."""
    low, high = 1, 1 << bits
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wraps(buffer, middle, bits) else (middle + 1, high)
    return low
