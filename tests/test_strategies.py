"""Strategies draw buildable Cases within their budget; a profile is one list, and its head meets everything."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from hypothesis import find, given, settings

from conformance import strategies
from conformance.case import POSITION_FAMILIES, Case
from conformance.families import FAMILIES
from conformance.grid import ARCHS
from conformance.strategies import PROFILES, cases, profile_cases
from oproj.config import PRESETS


@settings(max_examples=60, deadline=None)
@given(cases(max_macs=10_000_000, most_tokens=9))
def test_drawn_cases_keep_their_budget_and_print_as_one_line(case):
    assert case.macs <= 10_000_000 or case.tokens <= 1
    assert case.tokens <= 9
    assert Case.from_json(case.to_json()) == case


@given(cases("sm100", preset="v4-pro", tp_size=4, tokens=3))
@settings(max_examples=20, deadline=None)
def test_fixed_fields_are_not_drawn(case):
    assert (case.arch, case.preset, case.tp_size, case.tokens) == ("sm100", "v4-pro", 4, 3)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_first_60_cases_of_ci_meet_every_choice(arch):
    listed = profile_cases("ci", arch)
    assert len(listed) == len(set(listed)) == PROFILES["ci"].count >= 500
    head = listed[:60]
    assert {c.family for c in head} == set(FAMILIES)
    assert {c.preset for c in head} == set(PRESETS)
    assert {c.position_family for c in head} == set(POSITION_FAMILIES)
    assert {c.tp_size for c in head} == {1, 2, 4, 8}
    assert {c.tokens % 8 for c in head} == set(range(8)) and min(c.tokens for c in head) == 0
    assert {c.wo_a_dtype for c in head} == {"fp8", "bf16"}
    assert {c.quant_group_size for c in head} == {32, 64, 128}
    assert any(c.padding_slots for c in head) and any(c.padded_heads > c.config.n_heads for c in head)


def test_a_profile_is_the_same_list_every_time_and_a_longer_one_begins_with_it():
    first = profile_cases("ci", "sm90", 40)
    assert first == profile_cases("ci", "sm90", 40)
    assert profile_cases("ci", "sm90", 350)[:40] == first
    assert profile_cases("ci", "sm90", 40, seed=1) != first


def test_the_gpu_profile_has_real_widths_and_keeps_its_budget():
    listed = profile_cases("gpu", "sm90", 120)
    assert any(c.hidden_size == PRESETS[c.preset].hidden_size for c in listed)
    assert max(c.macs for c in listed) <= PROFILES["gpu"].max_macs
    assert max(c.macs for c in listed) > PROFILES["ci"].max_macs


def test_shrinking_ends_at_the_simplest_case():
    """The least that has two tokens: everything else is the first choice of its field."""
    case = find(cases("sm90"), lambda c: c.tokens >= 2, settings=settings(max_examples=200, database=None))
    assert (case.tokens, case.tp_size, case.n_groups, case.o_lora_rank, case.hidden_size) == (2, 1, 1, 128, 128)
    assert (case.family, case.seed, case.padded_heads, case.padding_slots) == ("normal", 0, 0, 0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("daily", "sm90"), "profile='daily' is unknown; known: ci, nightly, gpu"),
        (("ci", "sm91"), "sm91"),
        (("ci", "sm90", 0), "count=0 must be at least 1"),
        (("ci", "sm90", 5, -1), "seed=-1 at least 0"),
    ],
)
def test_what_is_no_profile_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        strategies.profile_cases(*arguments)


def test_the_list_is_the_same_whatever_is_loaded() -> None:
    """Hypothesis mixes constants of loaded modules into what it generates; no Case may hang on them."""
    show = "import hashlib; from conformance.strategies import profile_cases as p; "
    show += "print(hashlib.sha256(''.join(c.to_json() for c in p('ci', 'sm90', 320, 3)).encode()).hexdigest())"
    other = "import sys; sys.path.insert(0, 'tests'); import conformance.cli, planted, bound_problems; "
    found = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for code in (show, other + show)
    }
    here = hashlib.sha256("".join(c.to_json() for c in profile_cases("ci", "sm90", 320, 3)).encode()).hexdigest()
    assert found == {here + "\n"}


def test_a_short_run_has_few_cases_without_tokens() -> None:
    assert 1 <= sum(case.tokens == 0 for case in profile_cases("ci", "sm90", 60)) <= 4
