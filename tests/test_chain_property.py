"""Hypothesis drives the whole chain: configurations, architectures, dtypes, strides, slots and ranks, every oracle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.case import POSITION_FAMILIES, ROPE_KINDS, Case
from conformance.families import FAMILIES
from conformance.implementation import SoftwareImplementation
from conformance.judge import FAIL
from conformance.stages import run_stages
from oproj.arch import ARCHS
from oproj.config import PRESETS, get_preset


@st.composite
def cases(draw):
    """Cases with at most two local groups and narrow outputs; K of a group is the real one."""
    arch = draw(st.sampled_from(sorted(ARCHS)))
    preset = draw(st.sampled_from(sorted(PRESETS)))
    tp = draw(st.sampled_from(get_preset(preset).tp_sizes()))
    local = draw(st.integers(1, 2))
    heads = local * get_preset(preset).heads_per_group
    fp8 = get_preset(preset).fp8_wo_a(arch)
    return Case(
        arch=arch,
        preset=preset,
        tokens=draw(st.integers(0, 9)),
        hidden_size=draw(st.sampled_from([128, 256])),
        n_groups=local * tp,
        o_lora_rank=512,
        tp_size=tp,
        tp_rank=draw(st.integers(0, tp - 1)),
        family=draw(st.sampled_from(sorted(FAMILIES))),
        seed=draw(st.integers(0, 2**31)),
        position_family=draw(st.sampled_from(POSITION_FAMILIES)),
        rope_kind=draw(st.sampled_from(ROPE_KINDS)),
        padded_heads=draw(st.sampled_from([0, heads + 8, 2 * heads])),
        padding_slots=draw(st.integers(0, 2)) if fp8 else 0,
    )


@settings(max_examples=25)
@given(cases())
def test_the_chain_passes_every_oracle_on_every_case(case):
    results = run_stages(case, SoftwareImplementation(case.arch))
    assert results
    failed = [(r.stage, r.oracle, r.verdict.reason) for r in results if r.verdict.status == FAIL]
    compared = sum(r.comparison.compared for r in results)
    if case.tokens == 0:  # nothing to compare, and said so; the sum over ranks has no rows either
        assert compared == 0
    else:
        assert not failed, f"{failed}\n{case.to_json()}"
        assert compared > 0
