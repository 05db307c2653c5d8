"""Which Cases a run has: everything is reached, K is kept, and a combination is the same in every run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.case import POSITION_FAMILIES, ROPE_KINDS
from conformance.families import FAMILIES
from conformance.grid import Grid


def test_default_grid_reaches_everything_and_keeps_k() -> None:
    grid = Grid(many_tokens=64)
    cases = list(grid.cases())
    assert len(cases) == len(grid) == len({c.id for c in cases})
    assert {c.family for c in cases} == set(FAMILIES)
    assert {c.position_family for c in cases} == set(POSITION_FAMILIES)
    assert {c.rope_kind for c in cases} == set(ROPE_KINDS)
    assert {c.tokens for c in cases} == {1, 5, 64}
    assert {c.tp_rank for c in cases if c.tp_size == 8} == set(range(8))
    assert {c.padding_slots for c in cases} > {0, 1} and any(c.padded_heads for c in cases)
    assert {c.config.group_k for c in cases} == {4096}
    assert all(c.config.wo_b_k % 512 == 0 and c.macs < 2.0e8 for c in cases)
    every = {(f, a, p) for f in FAMILIES for a in grid.archs for p in grid.presets}
    assert {(c.family, c.arch, c.preset) for c in cases} == every
    assert {(c.family, c.rope_kind, c.arch) for c in cases} == {
        (f, r, a) for f in FAMILIES for r in ROPE_KINDS for a in grid.archs
    }
    assert len(cases) == 3 * 168


def test_full_grid_has_the_real_widths() -> None:
    (only,) = Grid(
        archs=["sm90"], presets=["v4-pro"], tp_sizes=[4], tokens=[3], families=["wide"], examples=1, full=True
    ).cases()
    assert (only.n_groups, only.o_lora_rank, only.hidden_size) == (16, 1024, 7168)


def test_a_combination_has_the_same_cases_whatever_runs_beside_it() -> None:
    def plain(grid: Grid, arch: str) -> list[str]:
        chosen = [c for c in grid.cases() if (c.preset, c.tp_size, c.tokens, c.arch) == ("v4-pro", 4, 5, arch)]
        return [c.to_json().replace(arch, "") for c in chosen]

    alone = Grid(archs=["sm120"], presets=["v4-pro"], tp_sizes=[4], tokens=[5])
    assert plain(alone, "sm120") == plain(Grid(many_tokens=64), "sm120") == plain(Grid(), "sm100") != []


@settings(max_examples=20)
@given(st.data())
def test_grid_says_its_length_and_repeats_itself(data: st.DataObject) -> None:
    some = {
        "archs": data.draw(st.lists(st.sampled_from(["sm90", "sm103"]), min_size=1, unique=True)),
        "presets": data.draw(st.lists(st.sampled_from(["v4-pro", "v4-flash"]), min_size=1, unique=True)),
        "tp_sizes": data.draw(st.lists(st.sampled_from([1, 2, 8]), min_size=1, unique=True)),
        "tokens": data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=2, unique=True)),
        "examples": data.draw(st.integers(0, 3)), "seed": data.draw(st.integers(0, 9)),
    }  # fmt: skip
    grid = Grid(**some)  # type: ignore[arg-type]
    assert [c.id for c in grid.cases()] == [c.id for c in grid.cases()]
    assert len(list(grid.cases())) == len(grid) > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"archs": ["sm80"]}, "sm80"), ({"presets": ["v5"]}, "v5"), ({"families": ["odd"]}, "odd"),
        ({"tp_sizes": [3]}, "tp=3 is impossible for .*; possible: 1, 2, 4, 8, 16"),
        ({"tp_sizes": [16], "presets": ["v4-flash"]}, "tp=16 is impossible"),
        ({"tokens": [-1]}, "must not be negative"), ({"tokens": []}, "tokens is empty"),
    ],
)  # fmt: skip
def test_impossible_grid_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(**fields)
