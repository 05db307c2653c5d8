"""Properties that hold bit for bit without any truth: repeated, alone and in a batch, permuted, scaled, poisoned.

They are checked before any tolerance, on every implementation, the software engine included. Each function takes the
bench of one Case and the stage's first result, calls the stage again with changed inputs and returns what it compared,
or ``None`` where it says nothing about this Case. Its docstring names the fault that it exposes.

Bits of a BF16 wo_a are the library's own (its order may depend on the batch), so only those properties apply there
that do not change a shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.compare import Comparison, merge, same_bits
from oproj.activation import QuantizedActivation, unpack_ue8m0
from oproj.engines.software.quantizer_table import VLLM_FUSED

Property = Callable[[Any, Any], "Comparison | None"]
ALL_BELOW = 80_000_000  # MACs of a Case up to which it runs every property; above, those of one or two calls
_SHARED = 1 << 17  # bytes; tables and weights, which the stage's first call was seen not to write into
_CODE_AT_A_LIMIT = (0x76, 0x7E)  # 224 and 448: here a log2 scale rule may treat another octave differently


class CallFailed(Exception):
    """A call of the implementation gave nothing usable; the text says why."""


@contextmanager
def filled_memory() -> Iterator[None]:
    """Memory that PyTorch allocates in here holds NaN or the largest integer, so an element never written shows.

    ``torch.empty`` fills where deterministic algorithms are asked for (PyTorch docs, fill_uninitialized_memory).
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def called(bench: Any, stage: str, **arguments: Any) -> Any:
    """What ``stage`` returns; raises ``CallFailed`` where it raises, writes into an argument or returns nothing."""
    got, problem = bench.call(stage, share_above=_SHARED, **arguments)
    if problem or got is None:
        raise CallFailed(problem or f"{stage} returned nothing")
    return got


def like(values: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
    """``values`` with the strides of ``layout``."""
    return torch.empty_strided(layout.size(), layout.stride(), dtype=values.dtype, device=values.device).copy_(values)


def some_token(bench: Any) -> int:
    """A token that differs from Case to Case."""
    return int(bench.case.seed % bench.case.tokens)


def compare_activations(got: QuantizedActivation, want: QuantizedActivation) -> Comparison:
    """Codes and scales, bit for bit."""
    parts = [same_bits(got.data, want.data, "codes")]
    if want.scale.numel():
        parts.append(same_bits(plain_scales(got.scale), plain_scales(want.scale), "scales"))
    return merge(parts)


def plain_scales(scale: torch.Tensor) -> torch.Tensor:
    """FP32 scales, or the UE8M0 bytes of packed words."""
    return unpack_ue8m0(scale) if scale.dtype == torch.int32 else scale


def quantized(bench: Any, o: torch.Tensor, positions: torch.Tensor | None = None) -> QuantizedActivation:
    """The activation that the implementation makes of ``o``; raises ``CallFailed``."""
    here = bench.on_device
    at = here.positions if positions is None else positions
    got = called(bench, "quantize", o=o, positions=at, cos_sin_cache=here.cos_sin_cache)
    if got.data.shape[:1] != o.shape[:1] or got.data.shape[1:] != (bench.config.n_groups, bench.config.group_k):
        raise CallFailed(f"codes have shape {list(got.data.shape)} for o of {list(o.shape)}")
    return got


def _rows(x: QuantizedActivation, index: Any) -> QuantizedActivation:
    scale = x.scale[index] if x.scale.numel() else x.scale
    return QuantizedActivation(x.data[index], scale)


def quantize_again(bench: Any, x: QuantizedActivation) -> Comparison:
    """The same call after another one with other data and more tokens: stale buffers."""
    o, positions = bench.on_device.o, bench.on_device.positions
    quantized(bench, torch.cat([o, o]).mul(0.5), torch.cat([positions.flip(0), positions]))
    return compare_activations(quantized(bench, o), x)


def quantize_solo(bench: Any, x: QuantizedActivation) -> Comparison:
    """One token alone: arithmetic, tiles or positions that depend on the batch around it."""
    at = some_token(bench)
    here = bench.on_device
    alone = quantized(bench, here.o[at : at + 1], here.positions[at : at + 1])
    return compare_activations(alone, _rows(x, slice(at, at + 1)))


def quantize_reversed(bench: Any, x: QuantizedActivation) -> Comparison | None:
    """Tokens in reverse order: one token's scale or position used for another."""
    if bench.case.tokens < 2:
        return None
    here = bench.on_device
    turned = quantized(bench, here.o.flip(0), here.positions.flip(0))
    return compare_activations(_rows(turned, torch.arange(len(x.data) - 1, -1, -1)), x)


def quantize_groups_rolled(bench: Any, x: QuantizedActivation) -> Comparison | None:
    """Heads of whole groups moved on by one group: a head or scale given to another group."""
    if bench.config.n_groups < 2:
        return None
    moved = quantized(bench, torch.roll(bench.on_device.o, bench.config.heads_per_group, 1))
    scale = torch.roll(x.scale, 1, 1) if x.scale.numel() else x.scale
    return compare_activations(moved, QuantizedActivation(_roll(x.data, 1, 1), scale))


def _roll(values: torch.Tensor, by: int, dim: int) -> torch.Tensor:
    if values.element_size() > 1:
        return torch.roll(values, by, dim)
    return torch.roll(values.view(torch.uint8), by, dim).view(values.dtype)


def quantize_poisoned(bench: Any, x: QuantizedActivation) -> Comparison | None:
    """Other contents (NaN) in the heads of the buffer that o is a slice of: strides ignored, dead heads read."""
    o = bench.on_device.o
    width = o.stride(0) // o.shape[2]
    if width <= o.shape[1]:
        return None
    wide = torch.full((o.shape[0], width, o.shape[2]), float("nan"), dtype=o.dtype, device=o.device)
    wide[:, : o.shape[1]] = o
    return compare_activations(quantized(bench, wide[:, : o.shape[1]]), x)


def quantize_doubled(bench: Any, x: QuantizedActivation) -> Comparison | None:
    """2 * o: the same codes with every scale doubled; a floor, clamp or threshold that is absolute.

    Blocks at the floor, near underflow or with a maximum at 224 or 448 steps (where a log2 rule sees octaves
    differently) are left out.
    """
    if not bench.truth.fp8:
        return None
    got = quantized(bench, bench.on_device.o * 2)
    codes, blocks = x.data.view(torch.uint8), bench.truth.block
    size = (codes & 0x7F).unflatten(-1, (-1, blocks)).amax(-1)
    exponents, doubled = _exponents(x.scale), _exponents(got.scale)
    floor = float(getattr(bench.implementation, "amax_floor", VLLM_FUSED.amax_floor)) or 2.0**-100
    inside = (
        (exponents > math.ceil(math.log2(floor / 448)) + 1)
        & (exponents < 100)
        & (size != _CODE_AT_A_LIMIT[0])
        & (size != _CODE_AT_A_LIMIT[1])
    )
    lanes = inside.repeat_interleave(blocks, -1)
    return merge(
        [
            same_bits(got.data.view(torch.uint8)[lanes], codes[lanes], "codes of 2 * o"),
            same_bits((doubled[inside] - 1).float(), exponents[inside].float(), "exponents of 2 * o"),
        ]
    )


def _exponents(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype == torch.int32:
        return unpack_ue8m0(scale).int() - 127
    return torch.frexp(scale)[1] - 1


def quantize_zeros(bench: Any, x: QuantizedActivation) -> Comparison:
    """o of zeros: zero codes, and one finite positive scale for every block: 0/0, and memory left unwritten."""
    got = quantized(bench, torch.zeros_like(bench.on_device.o))
    codes = got.data.view(torch.uint8) & 0x7F if got.data.element_size() == 1 else got.data.abs()
    parts = [same_bits(codes, torch.zeros_like(codes), "codes of zeros")]
    if got.scale.numel():
        scales = plain_scales(got.scale)
        floor = scales.flatten()[:1].expand_as(scales).contiguous()
        unusable = (floor == 255) if floor.dtype == torch.uint8 else ~(torch.isfinite(floor) & (floor > 0))
        if bool(unusable.any()):
            return Comparison(problem=f"a block of zeros has the scale {scales.flatten()[0].item()}")
        parts.append(same_bits(scales, floor, "scales of zeros"))
    return merge(parts)


def quantize_written(bench: Any, x: QuantizedActivation) -> Comparison:
    """The same call where fresh memory is not zero: elements, and scale rows of the padding, that are never written.

    Padding rows may hold 0 or any power of two (their products are dropped), never NaN or bytes of 0xFF.
    """
    with filled_memory():
        got = quantized(bench, bench.on_device.o)
    comparison = compare_activations(got, x)
    if comparison.problem or not got.scale.numel():
        return comparison
    spoilt = _spoilt_padding(got.scale)
    return Comparison(problem=spoilt) if spoilt else comparison


def _spoilt_padding(scale: torch.Tensor) -> str:
    """What is wrong with the rows behind the last token of MN-major scales, or ''."""
    tokens, groups, columns = scale.shape
    rows = scale.stride(2)
    if not columns or rows <= tokens or scale.stride(0) != 1:
        return ""
    whole = scale.as_strided((rows, groups, columns), scale.stride(), scale.storage_offset())[tokens:]
    if whole.dtype == torch.int32:
        bad = (unpack_ue8m0(whole) == 255).any(-1)
    else:
        bad = ((whole.view(torch.int32) & 0x807FFFFF) != 0).any(-1) | (~torch.isfinite(whole)).any(-1)
    if not bool(bad.any()):
        return ""
    row, group = (int(n) for n in bad.nonzero()[0])
    return f"padding row {tokens + row} of the scales of group {group} is neither 0 nor a power of two"


QUANTIZE: dict[str, Property] = {
    "again": quantize_again,
    "solo": quantize_solo,
    "reversed": quantize_reversed,
    "groups-rolled": quantize_groups_rolled,
    "poisoned": quantize_poisoned,
    "doubled": quantize_doubled,
    "zeros": quantize_zeros,
    "written": quantize_written,
}
