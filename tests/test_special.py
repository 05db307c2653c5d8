"""Special values: the software engine gives every stated answer, and an implementation that does not is caught."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.case import Case
from conformance.implementation import SoftwareImplementation
from conformance.special import KINDS, SPECIAL, Special, special_of
from conformance.stages import Bench
from conformance.strategies import cases, special_values
from oproj.activation import QuantizedActivation
from planted import case as small

Change = Callable[..., Any]
EVERY = [(stage, kind) for stage, kinds in KINDS.items() for kind in kinds]


def given_of(bench: Bench, stage: str) -> Any:
    """What the properties of ``stage`` take."""
    here, truth = bench.on_device, bench.truth
    x = bench.implementation.quantize(here.o, here.positions, here.cos_sin_cache, config=bench.config)
    z = bench.implementation.wo_a(bench.with_slots(x), here.weights, config=bench.config)
    y = bench.implementation.wo_b(z, here.weights, config=bench.config)
    if stage == "reduce":
        from conformance.properties_products import partials_of

        return bench.implementation.reduce(partials_of(bench.case), config=bench.config)
    assert truth is not None
    return {"quantize": x, "wo_a": (x, z), "wo_b": (z, y), "o_proj": y}[stage]


def judged(case: Case, special: Special, change: Change | None = None) -> Any:
    """What the check says of the software engine with ``change(right, *arguments, config)`` in place of the stage."""
    bench = Bench(case, SoftwareImplementation(case.arch))
    first = given_of(bench, special.stage)
    if change is not None:
        right = getattr(bench.implementation, special.stage)
        setattr(
            bench.implementation, special.stage, lambda *given, config: change(right(*given, config=config), *given)
        )
    return SPECIAL[special.stage](bench, first, special)  # type: ignore[call-arg]


@settings(max_examples=40, deadline=None)
@given(case=cases(max_macs=6_000_000, most_tokens=5), data=st.data())
def test_the_software_engine_gives_every_stated_answer(case: Case, data: st.DataObject) -> None:
    special = data.draw(special_values())
    if case.tokens == 0 or (special.stage == "reduce" and case.tp_size == 1):
        return
    if special.kind == "nan scale" and case.wo_a_dtype == "bf16":
        return
    found = judged(case, special)
    assert found.problem == "" and found.mismatched == 0 and found.compared > 0, found


def no_nan(result: Any, *given: Any) -> Any:
    """NaN and Inf become numbers."""
    if isinstance(result, QuantizedActivation):
        codes = result.data.view(torch.uint8)
        codes[(codes & 0x7F) >= 0x7E] = 0x30
        return result
    return torch.nan_to_num(result)


def _dirty(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        numbers = value.float() if value.dtype != torch.int32 else (value >> 24 & 0xFF == 0xFF).float() * math.nan
        return not bool(torch.isfinite(numbers).all())
    if isinstance(value, QuantizedActivation):
        return _dirty(value.data) or _dirty(value.scale)
    return isinstance(value, list) and any(map(_dirty, value))


def spreads(result: Any, *given: Any) -> Any:
    """A special value anywhere in the first argument, or a NaN in the result, changes everything."""
    data = result.data if isinstance(result, QuantizedActivation) else result
    if _dirty(given[0]) or (data.element_size() > 1 and bool(torch.isnan(data).any())):
        word = data.view(torch.uint8) if data.element_size() == 1 else data.view(torch.int16)
        word ^= 1
    return result


@pytest.mark.parametrize(("stage", "kind"), EVERY)
def test_a_special_value_that_spreads_is_caught(stage: str, kind: str) -> None:
    found = judged(small(hidden_size=256), Special(stage, kind, (1, 1, 300)), spreads)
    assert found.mismatched > 0 and found.first_bad is not None


@pytest.mark.parametrize(("stage", "kind"), [pair for pair in EVERY if pair[0] in ("wo_a", "reduce")])
def test_a_special_value_that_is_lost_is_caught(stage: str, kind: str) -> None:
    assert judged(small(), Special(stage, kind, (1, 1, 300)), no_nan).mismatched > 0


@pytest.mark.parametrize(("stage", "kind"), [("quantize", "nan"), ("wo_b", "nan weight")])
def test_a_nan_that_becomes_an_ordinary_number_is_caught(stage: str, kind: str) -> None:
    assert judged(small(), Special(stage, kind, (1, 1, 300)), no_nan).mismatched > 0


def test_a_quantiser_that_keeps_nan_says_so_and_must_then_keep_it() -> None:
    case, special = small(), Special("quantize", "nan", (1, 1, 300))

    def keeps(result: QuantizedActivation, o: torch.Tensor, *rest: Any) -> QuantizedActivation:
        result.data.view(torch.uint8)[torch.isnan(o).reshape(result.data.shape)] = 0x7F
        return result

    assert judged(case, special, keeps).mismatched == 1
    bench = Bench(case, SoftwareImplementation(case.arch))
    first, right = given_of(bench, "quantize"), bench.implementation.quantize
    bench.implementation.nan_policy = "kept"  # type: ignore[attr-defined]
    assert SPECIAL["quantize"](bench, first, special).mismatched == 1  # type: ignore[call-arg]
    bench.implementation.quantize = lambda *given, config: keeps(right(*given, config=config), *given)  # type: ignore[method-assign]
    found = SPECIAL["quantize"](bench, first, special)  # type: ignore[call-arg]
    assert found.mismatched == 0 and found.compared > 0
    bench.implementation.nan_policy = "odd"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="nan_policy='odd'"):
        SPECIAL["quantize"](bench, first, special)  # type: ignore[call-arg]


def test_the_policy_of_an_engine_counts_where_its_quantiser_is_used() -> None:
    case, special = small(), Special("quantize", "nan", (1, 1, 300))
    bench = Bench(case, SoftwareImplementation(case.arch))
    first = given_of(bench, "quantize")
    bench.implementation.engine.nan_policy = "kept"  # type: ignore[attr-defined]
    assert SPECIAL["quantize"](bench, first, special).mismatched == 1  # type: ignore[call-arg]
    right = bench.implementation.quantize
    bench.implementation.quantize = lambda *given, config: right(*given, config=config)  # type: ignore[method-assign]
    assert SPECIAL["quantize"](bench, first, special).mismatched == 0  # type: ignore[call-arg]


def test_cases_take_every_kind_in_turn_and_other_places() -> None:
    benches = [Bench(small(seed=seed), SoftwareImplementation("sm90")) for seed in range(30)]
    for stage, kinds in KINDS.items():
        drawn = [special_of(bench, stage) for bench in benches]
        assert {special.kind for special in drawn} == set(kinds) and len({special.at for special in drawn}) == 30


def test_unknown_kinds_are_refused_and_places_stay_inside() -> None:
    with pytest.raises(ValueError, match="stage='wo_a' has no special kind='inf'"):
        Special("wo_a", "inf")
    assert Special("wo_b", "nan", (7, 9, 11)).place(2, 5) == (1, 4)
