"""Exact properties of the products, the sum over ranks and the whole chain; see `conformance.properties`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conformance.case import Case
from conformance.compare import Comparison, same_bits
from conformance.inputs import LinearWeight, Weights, build_wo_a, move
from conformance.properties import Property, called, filled_memory, like, some_token
from conformance.streams import Stream
from oproj.activation import QuantizedActivation, empty_scales, empty_values

_WHOLE_ROWS = 1024  # rows of wo_a over all groups up to which the unsharded layer is built too
_SMALLEST_SCALED = 2.0**-60  # below, a product or sum on the way may be subnormal


def _x(values: QuantizedActivation, index: Any) -> QuantizedActivation:
    """Tokens ``index`` of an activation, in the layout that the kernels address."""
    data = values.data.view(torch.uint8) if values.data.element_size() == 1 else values.data
    picked = data[index]
    fresh = empty_values(len(picked), picked.shape[1], picked.shape[2], values.data.dtype, picked.device)
    (fresh.view(torch.uint8) if fresh.element_size() == 1 else fresh).copy_(picked)
    if not values.scale.numel():
        return QuantizedActivation(fresh, values.scale)
    rows = values.scale[index]
    scale = empty_scales(len(rows), rows.shape[1], rows.shape[2], rows.dtype == torch.int32, rows.device)
    scale.copy_(rows)
    return QuantizedActivation(fresh, scale)


def _wo_a(bench: Any, x: QuantizedActivation, weights: Weights | None = None) -> torch.Tensor:
    here = bench.on_device.weights if weights is None else weights
    return called(bench, "wo_a", x=bench.with_slots(x), weights=here)


def wo_a_again(bench: Any, given: tuple[QuantizedActivation, torch.Tensor]) -> Comparison:
    """The same call after another one with other and more tokens: stale operands."""
    x, z = given
    order = torch.arange(2 * len(z)) % len(z)
    _wo_a(bench, _x(x, order.flip(0)))
    return same_bits(_wo_a(bench, x), z, "z")


def wo_a_solo(bench: Any, given: tuple[QuantizedActivation, torch.Tensor]) -> Comparison | None:
    """One token alone: another K order, tile or kernel for few tokens."""
    x, z = given
    if not bench.truth.fp8:
        return None
    at = some_token(bench)
    return same_bits(_wo_a(bench, _x(x, slice(at, at + 1))), z[at : at + 1], "z")


def wo_a_reversed(bench: Any, given: tuple[QuantizedActivation, torch.Tensor]) -> Comparison | None:
    """Tokens in reverse order: one token's scales used for another."""
    x, z = given
    if not bench.truth.fp8 or len(z) < 2:
        return None
    backwards = torch.arange(len(z) - 1, -1, -1)
    return same_bits(_wo_a(bench, _x(x, backwards))[backwards], z, "z")


def wo_a_groups_rolled(bench: Any, given: tuple[QuantizedActivation, torch.Tensor]) -> Comparison | None:
    """Groups moved on by one with their weights: operands of another group."""
    x, z = given
    groups = bench.config.n_groups
    if not bench.truth.fp8 or groups < 2:
        return None
    order = torch.arange(-1, groups - 1) % groups
    data = like(x.data.view(torch.uint8)[:, order], x.data).view(x.data.dtype)
    moved = QuantizedActivation(data, as_scales(x.scale[:, order]))
    weights = bench.on_device.weights
    got = _wo_a(bench, moved, dataclasses.replace(weights, wo_a=_picked(weights.wo_a, order)))
    return same_bits(got[:, (torch.arange(groups) + 1) % groups], z, "z")


def as_scales(values: torch.Tensor) -> torch.Tensor:
    """Scales ``[T, G, columns]`` in the layout that consumers read, zeros behind the last token."""
    tokens, groups, columns = values.shape
    return empty_scales(tokens, groups, columns, values.dtype == torch.int32, values.device).copy_(values)


def _picked(weight: LinearWeight, order: torch.Tensor) -> LinearWeight:
    """A weight whose first axis (groups, or rows) is taken in another order, strides kept."""
    scale = weight.weight_scale_inv
    order = order.to(weight.weight.device)
    codes = like(weight.weight.view(torch.uint8)[order], weight.weight).view(weight.weight.dtype)
    if scale is None:
        return dataclasses.replace(weight, weight=codes)
    rows = order
    if len(scale) != len(order):  # one row of scales for a block of rows, which move together
        rows = order[:: weight.block[0]] // weight.block[0]
    return dataclasses.replace(weight, weight=codes, weight_scale_inv=like(scale[rows], scale))


def wo_a_poisoned(bench: Any, given: tuple[QuantizedActivation, torch.Tensor]) -> Comparison | None:
    """Other contents in the padding rows of the scales: rows behind the last token that are read."""
    x, z = given
    rows = x.scale.stride(2) if x.scale.numel() else 0
    if not bench.truth.fp8 or rows <= len(z):
        return None
    loud = bench.with_slots(QuantizedActivation(x.data, as_scales(x.scale)))
    whole = loud.scale.as_strided((rows, *loud.scale.shape[1:]), loud.scale.stride())
    whole[len(z) :] = 0x7B7B7B7B if loud.scale.dtype == torch.int32 else 2.0**90
    return same_bits(called(bench, "wo_a", x=loud, weights=bench.on_device.weights), z, "z")


def wo_a_doubled(bench: Any, given: tuple[QuantizedActivation, torch.Tensor]) -> Comparison | None:
    """Every scale of x doubled: z doubled, away from under- and overflow; a scale cut to another format."""
    x, z = given
    if not bench.truth.fp8:
        return None
    step = 0x01010101 if x.scale.dtype == torch.int32 else None
    scale = as_scales(x.scale + step if step else x.scale * 2)
    got = _wo_a(bench, QuantizedActivation(x.data, scale))
    size = z.float().abs()
    inside = (size > _SMALLEST_SCALED) & (size < 2.0**100)
    return same_bits(got[inside], (z * 2)[inside], "z of doubled scales")


def wo_a_negated(bench: Any, given: tuple[QuantizedActivation, torch.Tensor]) -> Comparison | None:
    """-x gives -z: rounding that depends on the sign. The sign of a zero is free."""
    x, z = given
    if not bench.truth.fp8:
        return None
    codes = like(x.data.view(torch.uint8) ^ 0x80, x.data).view(x.data.dtype)
    got = _wo_a(bench, QuantizedActivation(codes, x.scale))
    live = z != 0
    return same_bits(torch.where(live, got, got.abs()), torch.where(live, -z, z.abs()), "z of -x")


def wo_a_zeros(bench: Any, given: tuple[QuantizedActivation, torch.Tensor]) -> Comparison:
    """Zero codes give zero: leaks from padding, dead slots or an accumulator that is not cleared."""
    x, z = given
    tokens, groups, k = x.data.shape
    nothing = empty_values(tokens, groups, k, x.data.dtype)
    nothing.view(torch.uint8).zero_()
    got = _wo_a(bench, QuantizedActivation(nothing, x.scale))
    return same_bits(got.abs(), torch.zeros_like(z), "z of zeros")


def wo_a_written(bench: Any, given: tuple[QuantizedActivation, torch.Tensor]) -> Comparison:
    """The same call where fresh memory is not zero: elements of z that are never written."""
    x, z = given
    with filled_memory():
        got = _wo_a(bench, x)
    return same_bits(got, z, "z")


def wo_a_any_tp(bench: Any, given: tuple[QuantizedActivation, torch.Tensor]) -> Comparison | None:
    """The unsharded layer on the same tokens: z of this rank's groups does not depend on the number of ranks."""
    x, z = given
    case, config = bench.case, bench.config
    if case.tp_size == 1 or case.n_groups * case.o_lora_rank > _WHOLE_ROWS or not bench.truth.fp8:
        return None
    whole = dataclasses.replace(case, tp_size=1, tp_rank=0, padded_heads=0, padding_slots=0)
    mine = slice(case.tp_rank * config.n_groups, (case.tp_rank + 1) * config.n_groups)
    tokens, _, k = x.data.shape
    data = empty_values(tokens, case.n_groups, k, x.data.dtype)
    scale = empty_scales(tokens, case.n_groups, x.scale.shape[2], x.scale.dtype == torch.int32)
    data.view(torch.uint8).zero_()
    scale.fill_(0x7F7F7F7F if scale.dtype == torch.int32 else 1.0)
    data[:, mine], scale[:, mine] = x.data, x.scale
    weights = dataclasses.replace(bench.on_device.weights, wo_a=build_wo_a(whole).to(bench.device))
    on_device = QuantizedActivation(move(data, bench.device), move(scale, bench.device))
    got = called(bench, "wo_a", config=whole.config, x=on_device, weights=weights)
    return same_bits(got[:, mine], z, "z of the unsharded layer")


def _wo_b(bench: Any, z: torch.Tensor, weights: Weights | None = None) -> torch.Tensor:
    here = bench.on_device.weights if weights is None else weights
    return called(bench, "wo_b", z=move(z.contiguous(), bench.device), weights=here)


def wo_b_again(bench: Any, given: tuple[torch.Tensor, torch.Tensor]) -> Comparison:
    """The same call after another one with other and more tokens: stale operands."""
    z, y = given
    _wo_b(bench, torch.cat([z.flip(0), z * 2]))
    return same_bits(_wo_b(bench, z), y, "y")


def wo_b_solo(bench: Any, given: tuple[torch.Tensor, torch.Tensor]) -> Comparison:
    """One token alone: another K order, tile or kernel for few tokens."""
    z, y = given
    at = some_token(bench)
    return same_bits(_wo_b(bench, z[at : at + 1]), y[at : at + 1], "y")


def wo_b_reversed(bench: Any, given: tuple[torch.Tensor, torch.Tensor]) -> Comparison | None:
    """Tokens in reverse order: one token's scales used for another."""
    z, y = given
    return same_bits(_wo_b(bench, z.flip(0)).flip(0), y, "y") if len(z) > 1 else None


def wo_b_rows_rolled(bench: Any, given: tuple[torch.Tensor, torch.Tensor]) -> Comparison | None:
    """Blocks of 128 output rows moved on by one with their scales: scales of another block of rows."""
    z, y = given
    hidden = y.shape[1]
    if hidden < 256:
        return None
    order = torch.arange(-128, hidden - 128) % hidden
    weights = bench.on_device.weights
    got = _wo_b(bench, z, dataclasses.replace(weights, wo_b=_picked(weights.wo_b, order)))
    return same_bits(got.roll(-128, 1), y, "y")


def wo_b_zeros(bench: Any, given: tuple[torch.Tensor, torch.Tensor]) -> Comparison:
    """z of zeros gives zeros: 0/0 in the quantiser, an accumulator that is not cleared."""
    z, y = given
    return same_bits(_wo_b(bench, torch.zeros_like(z)).abs(), torch.zeros_like(y), "y of zeros")


def wo_b_written(bench: Any, given: tuple[torch.Tensor, torch.Tensor]) -> Comparison:
    """The same call where fresh memory is not zero: elements of y that are never written."""
    z, y = given
    with filled_memory():
        got = _wo_b(bench, z)
    return same_bits(got, y, "y")


def partials_of(case: Case) -> list[torch.Tensor]:
    """One BF16 y ``[T, hidden]`` per rank that no stage had a hand in."""
    shape = (case.tokens, case.hidden_size)
    return [
        torch.from_numpy(Stream(case.seed, "partials", rank).bell("y", shape)).bfloat16()
        for rank in range(case.tp_size)
    ]


def _reduce(bench: Any, partials: list[torch.Tensor]) -> torch.Tensor:
    return called(bench, "reduce", partials=[move(partial, bench.device) for partial in partials])


def reduce_again(bench: Any, y: torch.Tensor) -> Comparison:
    """The same call after one on other partials: a sum that is not cleared."""
    partials = partials_of(bench.case)
    _reduce(bench, [-2 * partial for partial in partials])
    return same_bits(_reduce(bench, partials), y, "y")


def reduce_one(bench: Any, y: torch.Tensor) -> Comparison:
    """Partials of zeros but for the last rank's: that one comes out as it is; a rank left out or taken twice."""
    partials = [torch.zeros_like(y) for _ in range(bench.case.tp_size)]
    partials[-1] = torch.where(y == 0, torch.ones_like(y), -y)  # not y, which a stale sum would give back
    return same_bits(_reduce(bench, partials), partials[-1], "the one partial")


def reduce_written(bench: Any, y: torch.Tensor) -> Comparison:
    """The same call where fresh memory is not zero: elements of y that are never written."""
    with filled_memory():
        got = _reduce(bench, partials_of(bench.case))
    return same_bits(got, y, "y")


def _chain(bench: Any, index: Any = slice(None), o: torch.Tensor | None = None) -> torch.Tensor:
    """y of the tokens ``index``; ``o``: other data in place of the Case's."""
    here = bench.on_device
    return called(
        bench,
        "o_proj",
        o=(here.o if o is None else o)[index],
        positions=here.positions[index],
        cos_sin_cache=here.cos_sin_cache,
        weights=here.weights,
    )


def _backwards(bench: Any) -> torch.Tensor:
    return torch.arange(bench.case.tokens - 1, -1, -1, device=bench.device)


def o_proj_again(bench: Any, y: torch.Tensor) -> Comparison:
    """The same call after one with other positions and data: state kept between calls."""
    _chain(bench, _backwards(bench))
    return same_bits(_chain(bench), y, "y")


def o_proj_reversed(bench: Any, y: torch.Tensor) -> Comparison | None:
    """Tokens in reverse order, as many as before: a replayed graph that keeps the positions or data of its capture."""
    if not bench.truth.fp8 or len(y) < 2:
        return None
    return same_bits(_chain(bench, _backwards(bench)).flip(0), y, "y")


def o_proj_zeros(bench: Any, y: torch.Tensor) -> Comparison:
    """o of zeros gives zeros: a result that is kept from an earlier call, also of a single token."""
    return same_bits(_chain(bench, o=torch.zeros_like(bench.on_device.o)).abs(), torch.zeros_like(y), "y of zeros")


def o_proj_solo(bench: Any, y: torch.Tensor) -> Comparison | None:
    """One token alone: a chain that takes another path for few tokens."""
    if not bench.truth.fp8:
        return None
    at = some_token(bench)
    return same_bits(_chain(bench, slice(at, at + 1)), y[at : at + 1], "y")


def o_proj_written(bench: Any, y: torch.Tensor) -> Comparison:
    """The same call where fresh memory is not zero: elements of y, or of a buffer on the way, never written."""
    with filled_memory():
        got = _chain(bench)
    return same_bits(got, y, "y")


WO_A: dict[str, Property] = {
    "again": wo_a_again,
    "solo": wo_a_solo,
    "reversed": wo_a_reversed,
    "groups-rolled": wo_a_groups_rolled,
    "poisoned": wo_a_poisoned,
    "doubled": wo_a_doubled,
    "negated": wo_a_negated,
    "zeros": wo_a_zeros,
    "written": wo_a_written,
    "any-tp": wo_a_any_tp,
}
WO_B: dict[str, Property] = {
    "again": wo_b_again,
    "solo": wo_b_solo,
    "reversed": wo_b_reversed,
    "rows-rolled": wo_b_rows_rolled,
    "zeros": wo_b_zeros,
    "written": wo_b_written,
}
REDUCE: dict[str, Property] = {"again": reduce_again, "one": reduce_one, "written": reduce_written}
O_PROJ: dict[str, Property] = {
    "again": o_proj_again,
    "solo": o_proj_solo,
    "reversed": o_proj_reversed,
    "zeros": o_proj_zeros,
    "written": o_proj_written,
}
