"""Faults that only one check can see: each is right in the call that is compared with the truth, or right by all but
one oracle, and wrong in exactly the situation that its check makes.

They show that no check is idle: without it, its fault lives. `o_proj` stays the software engine's own unless the fault
is in it, as of a kernel that is tried alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.faults.base import Faulty
from conformance.faults.layout import padding_rows
from conformance.faults.quantize import EveryScaleAnOctaveHigh
from conformance.implementation import METHODS, SoftwareImplementation
from oproj.activation import QuantizedActivation

Memory = dict[Any, Any]
Wrong = Callable[[Any, Memory, tuple[Any, ...], Any], Any]  # (right, memory, arguments, config) -> result
Condition = Callable[[Memory, tuple[Any, ...], Any], bool]
_LOUD_FP32, _LOUD_WORD = 2.0**80, 0x7B7B7B7B


class Quirk(Faulty):
    """Every stage right, but for one that goes through ``wrong``."""

    reduction = "fp32"

    def __init__(self, arch: Any, stage: str, wrong: Wrong, promised: bool) -> None:
        super().__init__(arch)
        alone, memory = SoftwareImplementation(arch), {}  # type: ignore[var-annotated]
        right = getattr(alone if stage == "o_proj" else self, stage)
        self.o_proj = alone.o_proj  # type: ignore[method-assign]
        setattr(self, stage, lambda *given, config: wrong(right, memory, given, config))
        if not promised:
            self.bitwise = tuple(name for name in METHODS if name != stage)


def quirk(stage: str, wrong: Wrong, *, promised: bool = True) -> Callable[[Any], Quirk]:
    """Builds the implementation of a fault; ``promised``: whether the stage's bits are said to be the model's."""
    return lambda arch: Quirk(arch, stage, wrong, promised)


def values_of(thing: Any) -> torch.Tensor:
    """The values of a result or argument: its data, itself, or the first of a list."""
    if isinstance(thing, QuantizedActivation):
        return thing.data
    return thing[0] if isinstance(thing, list) else thing


def spoilt(result: Any) -> Any:
    """Every element has another lowest bit."""
    bits = values_of(result)
    bits.view(torch.uint8 if bits.element_size() == 1 else torch.int16).bitwise_xor_(1)
    return result


def when(condition: Condition) -> Wrong:
    """Wrong in every element of a call for which ``condition(memory, arguments, config)`` holds."""

    def wrong(right: Any, memory: Memory, given: tuple[Any, ...], config: Any) -> Any:
        hit = condition(memory, given, config)
        result = right(*given, config=config)
        return spoilt(result) if hit else result

    return wrong


# Calls that depend on an earlier one


def after_twice_as_many(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """The last call had twice the tokens: buffers, or a schedule, left over from it."""
    tokens, before = len(values_of(given[0])), memory.get("tokens")
    memory["tokens"] = tokens
    return tokens > 2 and before == 2 * tokens


def one_after_many(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """One token, where the first call had more: another kernel for few tokens."""
    tokens = len(values_of(given[0]))
    first = memory.setdefault("first", tokens)
    return tokens == 1 < first


def falling_positions(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """The first position is above the last: a table row found by counting upward."""
    positions = given[1]
    return len(positions) > 1 and bool(positions[0] > positions[-1])


def after_the_reverse(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """The last call had these positions in reverse order, and there is something to compute."""
    positions, before = given[1], memory.get("positions")
    memory["positions"] = positions.clone()
    if before is None or torch.equal(before, positions) or not bool(given[0].any()):
        return False
    return torch.equal(before.flip(0), positions)


def after_twice_the_negative(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """The last call had -2 times these partials: a sum that goes on."""
    first, before = given[0][0], memory.get("partial")
    memory["partial"] = first.clone()
    return before is not None and bool(first.any()) and torch.equal(before, -2 * first)


def more_groups(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """More groups than in the first call: the layer of another number of ranks."""
    return bool(config.n_groups > memory.setdefault("groups", config.n_groups))


# Results kept under a key that is too coarse


def kept_by(key: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Wrong:
    """The first result of each ``key(arguments)``."""

    def wrong(right: Any, memory: Memory, given: tuple[Any, ...], config: Any) -> Any:
        name = (key(given), config.n_groups)
        if name not in memory:
            memory[name] = right(*given, config=config)
        return memory[name]

    return wrong


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Bits as int64, without the sign of wider numbers."""
    if values.element_size() == 1:
        return values.view(torch.uint8).long()
    return values.contiguous().view(torch.int16 if values.element_size() == 2 else torch.int32).long() & 0x7FFFFFFF


def _sum(values: torch.Tensor) -> tuple[int, ...]:
    return (*values.shape, int(_bits(values).sum()))


def _token_sums(values: torch.Tensor) -> tuple[int, ...]:
    return tuple(_bits(values).flatten(1).sum(1).tolist())


def _places(values: torch.Tensor) -> int:
    """A sum that tells places apart."""
    bits = _bits(values).flatten()
    return int((bits * (torch.arange(len(bits)) % 1021 + 1)).sum())


def _live(x: QuantizedActivation, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.data[:, :groups], x.scale[:, :groups]


def by_sum_of_o(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positions, and a sum of o in each token: heads that changed places look the same."""
    return (*_token_sums(given[0]), *given[1].tolist())


def by_sum_of_x(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sums of codes and scales over all tokens: tokens that changed places look the same."""
    x, weights = given
    codes, scales = _live(x, len(weights.wo_a.weight))
    return (*_sum(codes), *_sum(scales), _places(weights.wo_a.weight))


def by_sum_of_tokens(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sums of codes and scales in each token, and one of the weight: groups that changed places look the same."""
    x, weights = given
    codes, scales = _live(x, len(weights.wo_a.weight))
    return (*_token_sums(codes), *_token_sums(scales), *_sum(weights.wo_a.weight))


def by_sum_of_z(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """A sum of z over all tokens."""
    return (*_sum(given[0]), _places(given[1].wo_b.weight))


def by_sum_of_rows(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """z token by token, and one sum of the weight: rows that changed places look the same."""
    return (*_token_sums(given[0]), _places(given[0]), *_sum(given[1].wo_b.weight))


# Numbers


def all_zero(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """Nothing but zeros, but for dead slots."""
    values = values_of(given[0])
    live = values[:, : config.n_groups] if isinstance(given[0], QuantizedActivation) else values
    return not bool(_bits(live).any()) and live.numel() > 0


def doubled_o(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """The largest number is twice that of the first call: a threshold that is absolute."""
    size = float(given[0].float().abs().max())
    return size == 2 * memory.setdefault("size", size) > 0


def doubled_scales(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """Every live scale is twice that of the first call."""
    scale = given[0].scale[:, : config.n_groups].clone()
    first = memory.setdefault("scale", scale)
    twice = first + 0x01010101 if first.dtype == torch.int32 else first * 2
    return scale.shape == first.shape and torch.equal(scale, twice)


def negated_codes(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """Every live code has the other sign than in the first call."""
    codes = given[0].data.view(torch.uint8)[:, : config.n_groups].clone()
    first = memory.setdefault("codes", codes)
    return codes.shape == first.shape and torch.equal(codes, first ^ 0x80)


def not_finite(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """A NaN or Inf is among the first argument's values."""
    return not bool(torch.isfinite(given[0].float()).all())


def without_nan(right: Any, memory: Memory, given: tuple[Any, ...], config: Any) -> Any:
    """A NaN of the result becomes zero, an Inf the largest number."""
    return torch.nan_to_num(right(*given, config=config))


def spread_by_nan(right: Any, memory: Memory, given: tuple[Any, ...], config: Any) -> Any:
    """A NaN of the argument reaches every element, one of the weight is lost."""
    result = without_nan(right, memory, given, config)
    return spoilt(result) if not_finite(memory, given, config) else result


# Memory


def nan_behind_o(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """A NaN in the buffer that o is a slice of."""
    o = given[0]
    whole = torch.empty(0, dtype=o.dtype).set_(o.untyped_storage())
    return bool(torch.isnan(whole).any()) and bool(torch.isfinite(o.float()).all())


def loud_padding(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """A loud scale behind the last token."""
    padding = padding_rows(given[0].scale)
    loud = padding == _LOUD_WORD if padding.dtype == torch.int32 else padding > _LOUD_FP32
    return loud.dim() == 3 and bool(loud[:, : config.n_groups].any())


def fresh_memory_is_nan(memory: Memory, given: tuple[Any, ...], config: Any) -> bool:
    """Fresh memory is not zero: what is never written shows."""
    return bool(torch.isnan(torch.empty(64)).all())  # by chance a word of it may be NaN at any time


# Right by all but one oracle


def zeros_signed(right: Any, memory: Memory, given: tuple[Any, ...], config: Any) -> Any:
    """Zeros have the other sign, where all but the bits allow it."""
    result = right(*given, config=config)
    values = values_of(result)
    bits = values.view(torch.uint8 if values.element_size() == 1 else torch.int16)
    bits[values.float() == 0] ^= -0x80 if values.element_size() == 1 else -0x8000
    return result


def steps_up(count: int) -> Wrong:
    """Every finite number but zero is ``count`` steps larger in size."""

    def wrong(right: Any, memory: Memory, given: tuple[Any, ...], config: Any) -> Any:
        result = right(*given, config=config)
        values = values_of(result)
        live = torch.isfinite(values.float()) & (values != 0)
        values.view(torch.int16)[live] += count
        return result

    return wrong


def octave_high(right: Any, memory: Memory, given: tuple[Any, ...], config: Any) -> Any:
    """Every scale twice too large, and codes made with it."""
    return EveryScaleAnOctaveHigh(right.__self__.arch).quantize(*given, config=config)


def steps_up_sums(right: Any, memory: Memory, given: tuple[Any, ...], config: Any) -> Any:
    """Two steps up where more than one rank has something to add."""
    result = right(*given, config=config)
    summed = (torch.stack(list(given[0])) != 0).sum(0) > 1
    result.view(torch.int16)[summed & torch.isfinite(result.float()) & (result != 0)] += 2
    return result


def far_too_large(right: Any, memory: Memory, given: tuple[Any, ...], config: Any) -> Any:
    """2^40 times the right numbers."""
    return right(*given, config=config) * 2.0**40
