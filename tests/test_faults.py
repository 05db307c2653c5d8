"""The zoo: every fault is killed wherever it is possible, no right variant is flagged, and no empty output passes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from conformance.case import Case
from conformance.exact import PROPERTIES
from conformance.faults import FAULTS, VARIANTS, get_faults
from conformance.faults.addresses import BUFFERS, first_wrap, wraps
from conformance.faults.anti_vacuity import VACUOUS, vacuous
from conformance.faults.base import Faulty
from conformance.faults.behaviour import far_too_large, octave_high, quirk
from conformance.faults.cases import EXAMPLES, ci_cases
from conformance.faults.command import write_json
from conformance.faults.fault import ALL
from conformance.faults.matrix import Alarm, Kill, alarms, failed_checks, kill, run_matrix, usefulness
from conformance.faults.page import to_markdown
from conformance.faults.reports import SUITE_FAULTS, self_test_fails
from conformance.faults.sole import SOLE, several_fp8
from conformance.implementation import METHODS
from conformance.stages import FIGURES, run_stages
from oproj.arch import get_arch

PAGE = Path(__file__).parents[1] / "docs" / "faults.md"


@pytest.fixture(scope="module")
def results() -> list[Kill | Alarm]:
    return list(run_matrix(ALL, [fault.name for fault in FAULTS], thorough=False, workers=2))


@pytest.fixture(scope="module")
def kills(results: list[Kill | Alarm]) -> list[Kill]:
    return [result for result in results if isinstance(result, Kill)]


def test_every_fault_is_killed_wherever_it_is_possible(kills: list[Kill]) -> None:
    expected = {(f.name, arch) for f in FAULTS for arch in f.archs}
    assert {(one.fault, one.arch) for one in kills} == expected
    assert [f"{one.fault} on {one.arch} after {one.cases_run} Cases" for one in kills if not one.killed] == []
    assert max(one.case_number for one in kills) <= EXAMPLES


@pytest.mark.parametrize("number", range(len(SOLE)), ids=[fault.sole for fault in SOLE])
def test_without_its_one_check_a_fault_lives(number: int) -> None:
    """No check is idle: the faults that are there for a check are seen by it and by no other."""
    fault, arch = SOLE[number], ALL[number % len(ALL)]
    found = [case for case in ci_cases(arch) if fault.fits(case)][:1]
    assert [failed_checks(case, fault.implementation(arch)) for case in found] == [(fault.sole,)]


def test_every_check_has_a_fault_that_it_alone_sees() -> None:
    names = {(stage, name) for stage, properties in PROPERTIES.items() for name in properties}
    stages = {"quantize": ("bits", "attainable", "bound"), "wo_a": ("bits", "bound"), "wo_b": ("bits", "bound")}
    oracles = {(stage, name) for stage, tiers in stages.items() for name in tiers}
    oracles |= {("reduce", "bound"), ("o_proj", "bits"), ("o_proj", "format")}
    assert {tuple(fault.sole.split("/")) for fault in SOLE} == names | oracles


@pytest.mark.parametrize("arch", ALL)
def test_nothing_else_decides(arch: str) -> None:
    """The judged tiers are those above: another one would need a fault of its own."""
    judged = set()
    for case in ci_cases(arch)[3:12]:
        judged |= {(r.stage, r.oracle) for r in run_stages(case, Faulty(arch)) if r.verdict.status != "not applicable"}
    tiers = {tuple(fault.sole.split("/")) for fault in SOLE}
    assert {(stage, oracle) for stage, oracle in judged if oracle != "exact"} - set(FIGURES) == {
        (stage, oracle) for stage, oracle in tiers if oracle in ("bits", "attainable", "bound", "format")
    }


@pytest.mark.parametrize("arch", ALL)
def test_figures_never_fail(arch: str) -> None:
    """Not of a fault of their stage, which its bound sees, nor of one before it."""
    case = next(case for case in ci_cases(arch) if several_fp8(case))
    for stage in ("quantize", "wo_a", "wo_b"):
        wrong = octave_high if stage == "quantize" else far_too_large
        rows = run_stages(case, quirk(stage, wrong, promised=False)(get_arch(arch)))
        assert any(row.verdict.status == "fail" and row.stage == stage for row in rows)
        assert {row.verdict.status for row in rows if (row.stage, row.oracle) in FIGURES} <= {"pass", "not applicable"}


def test_a_fault_of_one_stage_is_seen_in_that_stage(kills: list[Kill]) -> None:
    """A fault in or before the quantiser is seen there, and does not hide in the chain alone."""
    before = {"quantize": "quantize", "rope": "quantize", "wo_b": "wo_b", "reduce": "reduce", "einsum": "wo_a"}
    for one in kills:
        if one.stage in before:
            assert any(check.startswith(before[one.stage]) for check in one.checks), one


@pytest.mark.parametrize("arch", ALL)
def test_the_suites_own_faults_are_noticed(arch: str) -> None:
    for fault in SUITE_FAULTS:
        case = next(c for c in ci_cases(arch) if fault.fits(c))
        case = dataclasses.replace(case, tokens=33, family="normal")
        assert self_test_fails(fault, case), fault.name
        assert not self_test_fails(fault, case, broken=False), fault.name


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS])
def test_a_right_variant_is_not_flagged(name: str, arch: str) -> None:
    variant = next(v for v in VARIANTS if v.name == name)
    if arch not in variant.archs:
        with pytest.raises(ValueError, match=f"variant {name} does not exist on {arch}; it does on sm90"):
            variant.implementation(arch)
        return
    result = alarms(name, arch, ci_cases(arch)[11:], 3)
    assert result.alarms == () and result.cases_run == 3


@pytest.mark.parametrize("name", VACUOUS)
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_an_output_without_work_fails_every_check_of_its_stage(name: str, arch: str) -> None:
    # End to end the format bound is rigorous and loose: it tells data apart where they differ in size.
    sizes = {"n_groups": 2, "tp_size": 2, "tp_rank": 1, "o_lora_rank": 512, "hidden_size": 128, "padded_heads": 20}
    case = Case(arch, "v4-flash", tokens=3, family="wide" if name == "stale" else "positive", seed=3, **sizes)
    for stage in METHODS:
        of_stage = [r for r in run_stages(case, vacuous(name, stage, case)) if r.stage == stage]
        judged = [r for r in of_stage if not (r.stage == "reduce" and r.oracle == "bits")]  # has no order to promise
        judged = [r for r in judged if (stage, r.oracle) not in FIGURES]
        fit = [r for r in judged if r.oracle != "exact"]  # a constant is as deterministic as it can be
        assert fit and {(r.oracle, r.verdict.status) for r in fit if r.verdict.status != "fail"} == set(), stage


def test_page_lists_the_registry() -> None:
    assert PAGE.read_text() == to_markdown(), "write it anew: python -m conformance.faults.page docs/faults.md"


def test_names_and_sources() -> None:
    names = [fault.name for fault in FAULTS] + [fault.name for fault in SUITE_FAULTS]
    assert len(set(names)) == len(names) >= 55
    assert all(fault.source for fault in FAULTS)
    right = [variant.name for variant in VARIANTS]
    assert len(set(right)) == len(right) >= 16
    assert [fault.name for fault in get_faults(["mscale", "eps-zero"])] == ["eps-zero", "mscale"]
    with pytest.raises(ValueError, match=r"fault\(s\) unknown: nobody; known: scale-rounded-late"):
        get_faults(["nobody"])
    with pytest.raises(ValueError, match="fault or-pack is not possible on sm90; possible: sm100, sm120"):
        get_faults(["or-pack"])[0].implementation("sm90")


def test_nothing_is_killed_in_a_right_implementation() -> None:
    """The matrix itself: a 'fault' that changes nothing survives, and is told as such."""
    none = dataclasses.replace(get_faults(["mscale"])[0], name="none", build=Faulty)
    survivor = kill(none, "sm100", [case for case in ci_cases("sm100") if none.fits(case)][:3])
    assert (survivor.killed, survivor.case_number, survivor.cases_run) == (False, 0, 3)


def test_usefulness_names_what_only_one_check_sees() -> None:
    one = Kill("a", "quantize", "sm90", "x#1", ("quantize/bits",), case_number=1, only="quantize/bits")
    two = Kill("b", "quantize", "sm90", "x#2", ("quantize/bits", "quantize/bound"), case_number=1)
    assert usefulness([one, two]) == {"quantize/bits": (2, ["a on sm90"]), "quantize/bound": (1, [])}


def test_json_of_the_matrix(tmp_path: Path) -> None:
    case = ci_cases("sm90")[0]
    dead = Kill("a", "rope", "sm90", "x#1", ("quantize/bits",), case.to_json(), 3, 2, case.macs, 0.5)
    alive = Kill("b", "rope", "sm90", "x#2", cases_run=60)
    write_json(tmp_path / "deep" / "kills.json", [dead, alive], [Alarm("v", "sm90", 4, 1.0, ("wo_a/bits: {}",))])
    written = json.loads((tmp_path / "deep" / "kills.json").read_text())
    assert written["version"] == 1
    first, second = written["faults"]
    assert first["killed"] and first["case"] == json.loads(case.to_json()) and first["case_number"] == 3
    assert not second["killed"] and second["case"] is None and second["checks"] == []
    assert written["variants"][0]["alarms"] == ["wo_a/bits: {}"]


def test_32_bit_addresses_wrap_where_reports_say() -> None:
    first = {buffer.name: first_wrap(buffer) for buffer in BUFFERS}
    assert first == {
        "o, 128 heads": 32_769, "o, 64 heads": 65_537, "codes, 16 groups": 34_953,
        "codes, 8 groups": 74_899, "z, 16 groups": 131_073,
    }  # fmt: skip
    for buffer in BUFFERS:
        assert wraps(buffer, first[buffer.name]) and not wraps(buffer, first[buffer.name] - 1)
        assert not wraps(buffer, first[buffer.name], bits=64)


def test_variants_of_the_replayed_case_are_the_cases_own() -> None:
    """A kill replays from its Case alone: a fresh implementation on the same Case fails the same checks."""
    fault, case = get_faults(["cast-ties-away"])[0], None
    found = kill(fault, "sm90", ci_cases("sm90"), thorough=False)
    case = type(ci_cases("sm90")[0]).from_json(found.case)
    assert failed_checks(case, fault.implementation("sm90")) == found.checks
