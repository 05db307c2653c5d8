"""Special values: what one NaN or Inf among ordinary numbers must do to a stage, and what it must leave alone.

Each answer is stated, none is compared with a library's:

========  ==========  =====================================================================================
stage     kind        answer
========  ==========  =====================================================================================
quantize  nan         all as with a zero in its place, but the lane's own code is 448 or -448 (the served
                      quantiser ignores a NaN for the maximum, its clamp makes the code); an implementation
                      that declares ``nan_policy = "kept"`` gives a NaN code, and may spoil the block
          inf         no other block changes
wo_a      nan code    z of its token and group is NaN, no other element changes
          nan scale   the same
          nan weight  z of its column is NaN in every token, no other element changes
wo_b      nan         no other token changes (its own quantiser may ignore the NaN)
          nan weight  y of its column is NaN in every token, no other element changes
reduce    nan, inf    y is NaN, or that Inf, at its place; no other element changes
          inf - inf   y is NaN at their place; no other element changes
o_proj    nan         no other token changes
========  ==========  =====================================================================================

Where wo_a is BF16 the codes are BF16 numbers, a NaN lane stays NaN and there is no scale. Sources: numerics of vLLM
0.33.0's fused kernel and of DeepGEMM on an H200, the rest is IEEE 754 arithmetic: no sum with a NaN term is a number.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from conformance.compare import Comparison, merge, same_bits
from conformance.implementation import inherits
from conformance.inputs import LinearWeight
from conformance.properties import Property, called, like, plain_scales, quantized
from conformance.properties_products import as_scales, partials_of
from conformance.streams import Stream
from oproj.activation import QuantizedActivation

KINDS: dict[str, tuple[str, ...]] = {
    "quantize": ("nan", "inf"),
    "wo_a": ("nan code", "nan scale", "nan weight"),
    "wo_b": ("nan", "nan weight"),
    "reduce": ("nan", "inf", "inf - inf"),
    "o_proj": ("nan",),
}
NAN_POLICIES = ("laundered", "kept")
_NAN_CODE, _LARGEST = 0x7F, 0x7E
_PLACES = 1 << 31


@dataclass(frozen=True)
class Special:
    """One special value: which, and where, as numbers that each axis takes its remainder of."""

    stage: str
    kind: str
    at: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        if self.kind not in KINDS.get(self.stage, ()):
            known = "; ".join(f"{stage}: {', '.join(kinds)}" for stage, kinds in KINDS.items())
            raise ValueError(f"stage={self.stage!r} has no special kind={self.kind!r}; known: {known}")

    def place(self, *sizes: int) -> tuple[int, ...]:
        """Its index in a tensor of this shape."""
        return tuple(number % size for number, size in zip(self.at, sizes))


def special_of(bench: Any, stage: str) -> Special:
    """The special value of a Case: another kind and place in every Case."""
    stream = Stream(bench.case.seed, "special", stage)
    kinds = KINDS[stage] if bench.truth.fp8 else tuple(kind for kind in KINDS[stage] if kind != "nan scale")
    kind = kinds[int(stream.below("kind", len(kinds), (1,))[0])]
    first, second, third = (int(n) for n in stream.below("at", _PLACES - 1, (3,)))
    return Special(stage, kind, (first, second, third))


def special_quantize(bench: Any, x: QuantizedActivation, special: Special | None = None) -> Comparison:
    """A NaN or Inf that spreads into another block, or becomes an ordinary code."""
    special = special or special_of(bench, "quantize")
    config, o = bench.config, bench.on_device.o
    token, head, lane = special.place(len(o), config.n_heads, config.nope_dim)
    group, k = divmod(head * config.head_dim + lane, config.group_k)
    value = math.nan if special.kind == "nan" else math.inf
    got = quantized(bench, _with(o, (token, head, lane), value))
    want, own = x, torch.zeros(x.data.shape, dtype=torch.bool)
    kept = _nan_policy(bench.implementation) == "kept" or special.kind == "inf"
    own[token, group, k] = True
    if not bench.truth.fp8:
        return merge([_outside(got.data, want.data, own, "values"), _is(got.data[own], value, "the lane's value")])
    block = bench.truth.block
    if kept:
        own[token, group, k // block * block : (k // block + 1) * block] = True
    else:
        want = quantized(bench, _with(o, (token, head, lane), 0.0))
    codes = _outside(got.data.view(torch.uint8), want.data.view(torch.uint8), own, "codes")
    parts = [codes, _scales_outside(got.scale, want.scale, own.unflatten(-1, (-1, block)).all(-1))]
    if special.kind == "nan":
        code = got.data.view(torch.uint8)[token, group, k : k + 1] & 0x7F
        parts.append(same_bits(code, torch.full_like(code, _NAN_CODE if kept else _LARGEST), "the NaN's code"))
    return merge(parts)


def _nan_policy(implementation: Any) -> str:
    engine = getattr(implementation, "engine", None) if inherits(implementation, "quantize") else None
    policy = getattr(implementation, "nan_policy", getattr(engine, "nan_policy", NAN_POLICIES[0]))
    if policy not in NAN_POLICIES:
        raise ValueError(f"nan_policy={policy!r} must be one of {NAN_POLICIES}")
    return policy


def special_wo_a(
    bench: Any, given: tuple[QuantizedActivation, torch.Tensor], special: Special | None = None
) -> Comparison:
    """A NaN that is lost in the product, or reaches a token, group or column that is not its own."""
    special = special or special_of(bench, "wo_a")
    x, z = given
    weights, want = bench.on_device.weights, z.clone()
    if special.kind == "nan weight":
        group, row, k = special.place(*z.shape[1:], x.data.shape[2])
        want[:, group, row] = math.nan
        flat = weights.wo_a.weight.dim() == 2
        place = (group * z.shape[2] + row, k) if flat else (group, row, k)
        weights = dataclasses.replace(weights, wo_a=_spoilt(weights.wo_a, place))
    else:
        token, group, k = special.place(*x.data.shape)
        want[token, group] = math.nan
        x = _spoilt_scale(x, token, group, k) if special.kind == "nan scale" else _spoilt_code(x, token, group, k)
    return same_bits(called(bench, "wo_a", x=bench.with_slots(x), weights=weights), want, f"z with a {special.kind}")


def special_wo_b(bench: Any, given: tuple[torch.Tensor, torch.Tensor], special: Special | None = None) -> Comparison:
    """A NaN that reaches a token or a column that is not its own, or is lost from the weight."""
    special = special or special_of(bench, "wo_b")
    z, y = given
    weights, want = bench.on_device.weights, y.clone()
    if special.kind == "nan weight":
        row, k = special.place(*weights.wo_b.weight.shape)
        want[:, row] = math.nan
        weights = dataclasses.replace(weights, wo_b=_spoilt(weights.wo_b, (row, k)))
        return same_bits(called(bench, "wo_b", z=z.to(bench.device), weights=weights), want, "y with a NaN weight")
    at = special.place(*z.shape)
    got = called(bench, "wo_b", z=_with(z, at, math.nan).to(bench.device), weights=weights)
    return _other_tokens(got, y, at[0])


def special_reduce(bench: Any, y: torch.Tensor, special: Special | None = None) -> Comparison:
    """A NaN or Inf of one rank that is lost, or reaches another element."""
    special = special or special_of(bench, "reduce")
    partials, want = partials_of(bench.case), y.clone()
    token, column = special.place(*y.shape)
    rank = special.at[2] % len(partials)
    partials[rank][token, column] = math.nan if special.kind == "nan" else math.inf
    if special.kind == "inf - inf":
        partials[(rank + 1) % len(partials)][token, column] = -math.inf
    want[token, column] = math.inf if special.kind == "inf" else math.nan
    got = called(bench, "reduce", partials=[partial.to(bench.device) for partial in partials])
    return same_bits(got, want, f"y with {special.kind}")


def special_o_proj(bench: Any, y: torch.Tensor, special: Special | None = None) -> Comparison:
    """A NaN that reaches another token."""
    special = special or special_of(bench, "o_proj")
    here = bench.on_device
    at = special.place(*here.o.shape)
    got = called(
        bench,
        "o_proj",
        o=_with(here.o, at, math.nan),
        positions=here.positions,
        cos_sin_cache=here.cos_sin_cache,
        weights=here.weights,
    )
    return _other_tokens(got, y, at[0])


def _with(values: torch.Tensor, at: tuple[int, ...], value: float) -> torch.Tensor:
    changed = values.clone()
    changed[at] = value
    return changed


def _spoilt_code(x: QuantizedActivation, token: int, group: int, k: int) -> QuantizedActivation:
    if x.data.element_size() > 1:
        return QuantizedActivation(like(_with(x.data, (token, group, k), math.nan), x.data), x.scale)
    codes = x.data.view(torch.uint8).clone()
    codes[token, group, k] = _NAN_CODE
    return QuantizedActivation(like(codes, x.data).view(x.data.dtype), x.scale)


def _spoilt_scale(x: QuantizedActivation, token: int, group: int, k: int) -> QuantizedActivation:
    scale = as_scales(x.scale)
    if scale.dtype != torch.int32:
        scale[token, group, k * scale.shape[2] // x.data.shape[2]] = math.nan
        return QuantizedActivation(x.data, scale)
    column, byte = divmod(k * scale.shape[2] * 4 // x.data.shape[2], 4)
    scale[token, group, column] |= torch.tensor(0xFF << 8 * byte, dtype=torch.int64).to(torch.int32)
    return QuantizedActivation(x.data, scale)


def _spoilt(weight: LinearWeight, place: tuple[int, ...]) -> LinearWeight:
    """The weight with a NaN at ``place``."""
    values = weight.weight
    if values.element_size() > 1:
        return dataclasses.replace(weight, weight=like(_with(values, place, math.nan), values))
    codes = values.view(torch.uint8).clone()
    codes[place] = _NAN_CODE
    return dataclasses.replace(weight, weight=like(codes, values.view(torch.uint8)).view(values.dtype))


def _outside(got: torch.Tensor, want: torch.Tensor, own: torch.Tensor, name: str) -> Comparison:
    """What differs where ``own`` does not hold."""
    return same_bits(torch.where(own, want, got), want, name)


def _scales_outside(got: torch.Tensor, want: torch.Tensor, own: torch.Tensor) -> Comparison:
    return _outside(plain_scales(got), plain_scales(want), own, "scales")


def _is(got: torch.Tensor, value: float, name: str) -> Comparison:
    return same_bits(got, torch.full_like(got, value), name)


def _other_tokens(got: torch.Tensor, want: torch.Tensor, token: int) -> Comparison:
    own = torch.zeros(want.shape, dtype=torch.bool)
    own[token] = True
    return _outside(got, want, own, "y of other tokens")


SPECIAL: dict[str, Property] = {
    "quantize": special_quantize,
    "wo_a": special_wo_a,
    "wo_b": special_wo_b,
    "reduce": special_reduce,
    "o_proj": special_o_proj,
}
