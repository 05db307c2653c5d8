"""Each exact property catches an implementation that breaks it and nothing else; the right one passes all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from conformance.case import Case
from conformance.exact import PROPERTIES
from conformance.faults.layout import padding_rows
from conformance.implementation import SoftwareImplementation
from conformance.properties import filled_memory
from conformance.stages import StageResult, run_stages
from conformance.strategies import cases
from oproj.activation import QuantizedActivation
from planted import case as small

Change = Callable[..., Any]


def wrapped(arch: str, stage: str, change: Change) -> SoftwareImplementation:
    """The software engine with ``change(right, memory, *arguments, config)`` in place of one stage."""
    mine = SoftwareImplementation(arch)
    right, memory = getattr(mine, stage), {}  # type: ignore[var-annotated]
    setattr(mine, stage, lambda *arguments, config: change(right, memory, *arguments, config=config))
    return mine


def row(case: Case, stage: str, change: Change) -> StageResult:
    """The exact row of the stage."""
    results = run_stages(case, wrapped(case.arch, stage, change))
    return next(r for r in results if (r.stage, r.oracle) == (stage, "exact"))


def bump(values: torch.Tensor, at: Any = (0,)) -> torch.Tensor:
    """One bit more in one element."""
    bits = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()])
    bits[tuple(at) + (0,) * (bits.dim() - len(at))] ^= 1
    return values


def out(result: Any) -> torch.Tensor:
    """The tensor of a result that a fault changes."""
    return result.data if isinstance(result, QuantizedActivation) else result


def on_second_call(right: Any, memory: dict[str, int], *arguments: Any, config: Any) -> Any:
    """The first call is right, later ones are not."""
    result = right(*arguments, config=config)
    memory["calls"] = memory.get("calls", 0) + 1
    if memory["calls"] > 1 and len(out(result)):
        bump(out(result))
    return result


def when(condition: Callable[..., bool]) -> Change:
    """A bit is wrong where ``condition(first argument, config)`` holds."""

    def change(right: Any, memory: dict[str, Any], *arguments: Any, config: Any) -> Any:
        result = right(*arguments, config=config)
        if condition(arguments[0], config):
            bump(out(result))
        return result

    return change


def last_token_differs(right: Any, memory: dict[str, Any], *arguments: Any, config: Any) -> Any:
    """What stands in the last place is computed otherwise."""
    result = right(*arguments, config=config)
    if len(out(result)) > 1:
        bump(out(result), (-1,))
    return result


def last_group_differs(right: Any, memory: dict[str, Any], *arguments: Any, config: Any) -> Any:
    """The last group is computed otherwise."""
    result = right(*arguments, config=config)
    bump(out(result), (0, -1))
    return result


def last_column_differs(right: Any, memory: dict[str, Any], *arguments: Any, config: Any) -> Any:
    """The last output is computed otherwise."""
    result = right(*arguments, config=config)
    bump(out(result), (0, -1))
    return result


def whole_layer_differs(right: Any, memory: dict[str, Any], *arguments: Any, config: Any) -> Any:
    """The unsharded layer is computed otherwise."""
    result = right(*arguments, config=config)
    if config.tp_size == 1:
        bump(out(result), (0, -1))
    return result


def one_unwritten(right: Any, memory: dict[str, Any], *arguments: Any, config: Any) -> Any:
    """One element is what the allocator had there."""
    result = right(*arguments, config=config)
    fresh = torch.empty(1, dtype=torch.float32)
    if torch.isnan(fresh).any():
        bump(out(result))
    return result


def padding_unwritten(right: Any, memory: dict[str, Any], *arguments: Any, config: Any) -> Any:
    """Scale rows behind the last token hold a NaN."""
    result = right(*arguments, config=config)
    padding_rows(result.scale).view(torch.int32).fill_(-1)
    return result


def padding_read(right: Any, memory: dict[str, Any], x: QuantizedActivation, *rest: Any, config: Any) -> Any:
    """A loud scale behind the last token changes z."""
    result = right(x, *rest, config=config)
    padding = padding_rows(x.scale)
    if padding.numel() and padding.dtype == torch.float32 and bool((padding > 1e9).any()):
        bump(result)
    return result


def larger(measure: Callable[[Any], torch.Tensor]) -> Change:
    """A bit is wrong in the last place where the arguments are larger than those of the first call."""

    def change(right: Any, memory: dict[str, float], *arguments: Any, config: Any) -> Any:
        result = right(*arguments, config=config)
        size = float(measure(arguments[0]))
        if size > memory.setdefault("size", size):
            bump(out(result), (0, config.n_groups - 1))
        return result

    return change


def has(values: Any, test: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    return bool(test(values.float()).any())


def whole_buffer(o: torch.Tensor) -> torch.Tensor:
    return o.as_strided((o.shape[0], o.stride(0)), (o.stride(0), 1))


def first_call_kept(right: Any, memory: dict[int, Any], *arguments: Any, config: Any) -> Any:
    """The result of the first call with as many tokens."""
    tokens = len(out(arguments[0][0] if isinstance(arguments[0], list) else arguments[0]))
    if tokens not in memory:
        memory[tokens] = right(*arguments, config=config)
    return memory[tokens].clone()


def first_positions_kept(right: Any, memory: dict[int, Any], o: Any, positions: Any, *rest: Any, config: Any) -> Any:
    """The positions of the first call with as many tokens, as a replayed graph has them."""
    return right(o, memory.setdefault(len(positions), positions.clone()), *rest, config=config)


ANY = when(lambda value, config: True)
ONE_TOKEN = when(lambda value, config: len(out(value)) == 1)


def not_finite(values: torch.Tensor) -> bool:
    """Whether a special value is among the first argument's."""
    return not bool(torch.isfinite(values).all())


BREAKS: list[tuple[str, str, Change]] = [
    ("quantize", "again", on_second_call),
    ("quantize", "solo", ONE_TOKEN),
    ("quantize", "reversed", last_token_differs),
    ("quantize", "groups-rolled", last_group_differs),
    ("quantize", "poisoned", when(lambda o, config: has(whole_buffer(o), torch.isnan))),
    ("quantize", "doubled", larger(lambda o: o.float().abs().max())),
    ("quantize", "zeros", when(lambda o, config: not o.any())),
    ("quantize", "written", one_unwritten),
    ("quantize", "written", padding_unwritten),
    ("wo_a", "again", on_second_call),
    ("wo_a", "solo", ONE_TOKEN),
    ("wo_a", "reversed", last_token_differs),
    ("wo_a", "groups-rolled", last_group_differs),
    ("wo_a", "poisoned", padding_read),
    ("wo_a", "doubled", larger(lambda x: x.scale[:, :2].max())),
    ("wo_a", "negated", when(lambda x, config: bool((x.data.view(torch.uint8)[0, 0, 0] & 0x80) != 0))),
    ("wo_a", "zeros", when(lambda x, config: not x.data.view(torch.uint8)[:, : config.n_groups].any())),
    ("wo_a", "written", one_unwritten),
    ("wo_a", "any-tp", whole_layer_differs),
    ("wo_b", "again", on_second_call),
    ("wo_b", "solo", ONE_TOKEN),
    ("wo_b", "reversed", last_token_differs),
    ("wo_b", "rows-rolled", last_column_differs),
    ("wo_b", "zeros", when(lambda z, config: not z.any())),
    ("wo_b", "written", one_unwritten),
    ("reduce", "again", on_second_call),
    ("reduce", "one", when(lambda partials, config: not partials[0].any())),
    ("reduce", "one", first_call_kept),
    ("reduce", "written", one_unwritten),
    ("o_proj", "again", on_second_call),
    ("o_proj", "solo", ONE_TOKEN),
    ("o_proj", "reversed", first_positions_kept),
    ("o_proj", "zeros", first_call_kept),
    ("o_proj", "written", one_unwritten),
    ("quantize", "special", when(lambda o, config: not_finite(o))),
    ("wo_a", "special", lambda right, memory, *given, config: torch.nan_to_num(right(*given, config=config))),
    ("wo_b", "special", lambda right, memory, *given, config: torch.nan_to_num(right(*given, config=config))),
    ("wo_b", "special", when(lambda z, config: not_finite(z))),
    ("reduce", "special", lambda right, memory, *given, config: torch.nan_to_num(right(*given, config=config))),
    ("o_proj", "special", when(lambda o, config: not_finite(o))),
]


@pytest.mark.parametrize(
    ("stage", "name", "change"), BREAKS, ids=[f"{s}-{n}-{i}" for i, (s, n, _) in enumerate(BREAKS)]
)
def test_a_property_that_does_not_hold_is_named(stage: str, name: str, change: Change) -> None:
    seeds = range(4 if name == "special" else 1)  # each has another special value at another place
    results = (row(small(padded_heads=20, hidden_size=256, seed=seed), stage, change) for seed in seeds)
    result = next((result for result in results if result.verdict.status == "fail"), None)
    assert result is not None
    assert name in result.verdict.checks
    assert result.verdict.reason.startswith(f"{result.verdict.checks[0]}: ")


def test_every_property_is_broken_by_one_of_these() -> None:
    assert {(stage, name) for stage, name, _ in BREAKS} == {(s, n) for s, names in PROPERTIES.items() for n in names}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(cases(max_macs=6_000_000, most_tokens=9))
def test_the_software_engine_has_every_property(case: Case) -> None:
    results = run_stages(case, SoftwareImplementation(case.arch))
    assert [(r.stage, r.verdict.reason) for r in results if r.verdict.status == "fail"] == []
    assert case.tokens == 0 or all(r.comparison.compared for r in results if r.oracle == "exact")


def test_filled_memory_shows_and_ends() -> None:
    with filled_memory():
        assert torch.isnan(torch.empty(3)).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_call_that_raises_fails_the_property_with_its_reason() -> None:
    def change(right: Any, memory: dict[str, int], *arguments: Any, config: Any) -> Any:
        if len(out(arguments[0])) == 1:
            raise RuntimeError("no kernel for one token")
        return right(*arguments, config=config)

    result = row(small(padded_heads=20, hidden_size=256), "wo_b", change)
    assert result.verdict.checks == ("solo",)
    assert (
        "solo: wo_b raised RuntimeError" in result.verdict.reason and "no kernel for one token" in result.verdict.reason
    )
