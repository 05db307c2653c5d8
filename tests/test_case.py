"""A Case: complete, refusing, and the same after a round trip through its line of JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.case import POSITION_FAMILIES, ROPE_KINDS, VARIANTS, Case
from conformance.families import FAMILIES
from oproj.arch import ARCHS, get_arch
from oproj.config import PRESETS


@st.composite
def cases(draw: st.DrawFn) -> Case:
    preset = draw(st.sampled_from(list(PRESETS.values())))
    arch = draw(st.sampled_from(list(ARCHS)))
    tp = draw(st.sampled_from(preset.tp_sizes()))
    groups = tp * draw(st.integers(1, preset.n_groups // tp))
    heads = groups // tp * preset.heads_per_group
    packed = get_arch(arch).tma_aligned_scales
    fp8_blocks = [n for n in ([32, 128] if packed else [128]) if n <= preset.weight_block[1]]
    dtype = draw(st.sampled_from(["fp8", "bf16"] if fp8_blocks else ["bf16"]))
    blocks = fp8_blocks if dtype == "fp8" else [32, 64, 128]
    return Case(
        arch,
        preset.name,
        draw(st.integers(0, 2**40)),
        hidden_size=128 * draw(st.integers(1, 60)),
        n_groups=groups,
        o_lora_rank=draw(st.integers(1, 2)) * 512 if packed else 128 * draw(st.integers(1, 8)),
        tp_size=tp,
        tp_rank=draw(st.integers(0, tp - 1)),
        wo_a_dtype=dtype,
        quant_group_size=draw(st.sampled_from(blocks)),
        family=draw(st.sampled_from(list(FAMILIES))),
        seed=draw(st.integers(0, 2**63 - 1)),
        position_family=draw(st.sampled_from(POSITION_FAMILIES)),
        rope_kind=draw(st.sampled_from(ROPE_KINDS)),
        padded_heads=draw(st.sampled_from([0, heads, heads + 3])),
        padding_slots=draw(st.integers(0, 9)),
        variant=draw(st.sampled_from(VARIANTS)),
    )


@given(cases())
def test_json_round_trip_keeps_every_field_and_the_id(case: Case) -> None:
    line = case.to_json()
    assert "\n" not in line
    assert list(json.loads(line)) == sorted(field.name for field in dataclasses.fields(Case))
    again = Case.from_json(line)
    assert again == case
    assert again.id == case.id
    assert len(case.id) == 12


@given(cases(), st.data())
def test_any_other_field_gives_another_id(case: Case, data: st.DataObject) -> None:
    other = data.draw(cases())
    assert (other.id == case.id) == (other == case)


def test_id_and_line_of_a_case_are_those_of_every_machine() -> None:
    case = Case("sm90", "v4-pro", 5, tp_size=4)
    assert case.to_json() == (
        '{"arch":"sm90","family":"normal","hidden_size":7168,"n_groups":16,"n_heads":128,"o_lora_rank":1024,'
        '"padded_heads":0,"padding_slots":0,"position_family":"start","preset":"v4-pro","quant_group_size":128,'
        '"rope_kind":"plain","seed":0,"tokens":5,"tp_rank":0,"tp_size":4,"variant":"fma_cos","wo_a_dtype":"fp8"}'
    )
    assert case.id == "1a8a5d5f5470"


def test_unsaid_sizes_are_those_the_model_is_served_with() -> None:
    on_hopper, on_blackwell = Case("sm90", "v4.1-flash", 1), Case("sm100", "v4.1-flash", 1)
    assert (on_hopper.wo_a_dtype, on_hopper.quant_group_size) == ("bf16", 128)
    assert (on_blackwell.wo_a_dtype, on_blackwell.quant_group_size) == ("fp8", 32)
    assert (on_hopper.n_heads, on_hopper.hidden_size) == (64, 5120)
    cut = Case("sm90", "v4-pro", 3, n_groups=4, tp_size=2, tp_rank=1, o_lora_rank=256, hidden_size=384)
    assert (cut.n_heads, cut.config.n_heads, cut.config.n_groups, cut.config.group_k) == (32, 16, 2, 4096)
    assert cut.macs == 3 * 512 * (4096 + 384)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"arch": "sm80"}, ValueError, "sm80.*sm90"),
    ({"preset": "v5"}, ValueError, "v5.*v4-pro"),
    ({"tokens": -1}, ValueError, "tokens=-1"),
    ({"tokens": 1.0}, TypeError, "tokens=1.0"),
    ({"tokens": True}, TypeError, "tokens=True"),
    ({"seed": 2**63}, ValueError, "seed"),
    ({"tp_size": 3}, ValueError, "tp_size=3 does not divide"),
    ({"tp_size": 32}, ValueError, "tp_size=32 does not divide"),
    ({"tp_size": 0}, ValueError, "tp_size=0"),
    ({"tp_size": 4, "tp_rank": 4}, ValueError, "tp_rank=4"),
    ({"n_heads": 64}, ValueError, "n_heads=64.*128 for n_groups=16"),
    ({"o_lora_rank": 100}, ValueError, "o_lora_rank=100"),
    ({"hidden_size": 100}, ValueError, "hidden_size=100"),
    ({"family": "uniform"}, ValueError, "uniform.*normal"),
    ({"position_family": "late"}, ValueError, "late.*far"),
    ({"rope_kind": "linear"}, ValueError, "linear.*yarn"),
    ({"variant": "fma"}, ValueError, "fma.*fma_cos"),
    ({"wo_a_dtype": "fp4"}, ValueError, "fp4"),
    ({"quant_group_size": 32}, ValueError, "quant_group_size=32 .* one of 128"),
    ({"arch": "sm100", "quant_group_size": 64}, ValueError, "one of 32, 128"),
    ({"preset": "v4.1-flash", "wo_a_dtype": "fp8"}, ValueError, "weight blocks are too small"),
    ({"padded_heads": 100}, ValueError, "padded_heads=100.*128"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_field_is_refused_by_name(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Case(**{"arch": "sm90", "preset": "v4-pro", "tokens": 5, **change})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda fields: fields | {"tokenz": 1}, "unknown case field.*tokenz"),
        (lambda fields: {k: v for k, v in fields.items() if k != "seed"}, "missing case field.*seed"),
        (lambda fields: fields | {"seed": "0"}, "seed='0' has type str"),
        (lambda fields: [fields], "must be a JSON object"),
    ],
)
def test_foreign_json_is_refused_by_name(edit: Any, message: str) -> None:
    fields = json.loads(Case("sm90", "v4-pro", 5).to_json())
    with pytest.raises((TypeError, ValueError), match=message):
        Case.from_json(json.dumps(edit(fields)))
    with pytest.raises(ValueError, match="not JSON"):
        Case.from_json(json.dumps(fields)[:-1])


def test_a_k_of_wo_b_that_does_not_fill_packed_words_is_refused() -> None:
    with pytest.raises(ValueError, match=r"o_lora_rank=128 with 2 local groups gives wo_b a K of 256; .* sm100 .* 512"):
        Case("sm100", "v4-flash", 1, n_groups=4, tp_size=2, o_lora_rank=128)
    assert Case("sm90", "v4-flash", 1, n_groups=4, tp_size=2, o_lora_rank=128).macs
