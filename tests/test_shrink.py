"""Shrinking: what comes out still fails in the same way, is no larger, and is smallest where the search had time."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.case import Case
from conformance.judge import FAIL
from conformance.runner import Row, Run, Target, run_cases
from conformance.shrink import MOST_FAILURES, as_text, kind, shrink, shrink_failures
from conformance.strategies import TOKENS, cases

SMALLEST = Case("sm90", "v4-flash", 1, n_groups=1, o_lora_rank=128, hidden_size=128)


@settings(max_examples=40, deadline=None)
@given(case=cases("sm90"))
def test_what_always_fails_becomes_the_smallest_case(case: Case) -> None:
    smallest, _ = shrink(case, lambda _: True)
    # The dtype and the block that goes with it are part of what failed.
    left = {"wo_a_dtype": case.wo_a_dtype, "quant_group_size": case.quant_group_size}
    assert smallest.tokens == min(case.tokens, 1) and smallest.tp_size == 1 and smallest.n_groups == 1
    assert (smallest.o_lora_rank, smallest.hidden_size, smallest.seed) == (128, 128, 0)
    assert (smallest.family, smallest.rope_kind, smallest.variant) == ("normal", "plain", "fma_cos")
    assert {name: getattr(smallest, name) for name in left} == left


@settings(max_examples=60, deadline=None)
@given(case=cases(), data=st.data())
def test_a_smaller_case_still_fails_and_is_as_small_as_the_failure_allows(case: Case, data: st.DataObject) -> None:
    least = data.draw(st.integers(0, case.tokens))
    word = data.draw(st.sampled_from((case.family, "")))

    def fails(candidate: Case) -> bool:
        return candidate.tokens >= least and (not word or candidate.family == word) and candidate.arch == case.arch

    smallest, tried = shrink(case, fails)
    assert fails(smallest) and smallest.macs <= case.macs and tried >= 0
    assert smallest.family == (word or "normal")
    enough = [n for n in sorted(TOKENS) if max(least, 1) <= n < case.tokens]
    assert smallest.tokens == min(enough, default=case.tokens)


def test_without_time_the_case_stays_as_it_is() -> None:
    case = Case("sm90", "v4-pro", 8)
    assert shrink(case, lambda _: True, seconds=-1) == (case, 0)


def test_no_case_is_asked_about_twice() -> None:
    asked: list[Case] = []
    shrink(Case("sm100", "v4-pro", 33, tp_size=4, seed=5), lambda case: bool(asked.append(case)) or case.tokens >= 3)
    assert len(asked) == len(set(asked)) > 5


def _planted(folder: Path, body: str) -> Target:
    path = folder / "mine.py"
    path.write_text(
        "import conformance, os\n"
        "class Mine(conformance.SoftwareImplementation):\n"
        "    def wo_a(self, x, weights, *, config):\n"
        f"        {body}\n"
        "        z = super().wo_a(x, weights, config=config)\n"
        "        if len(z) > 2: z[2, 0, 7] += 1\n"
        "        return z\n"
    )
    return Target(implementation=f"{path}:Mine")


def _failed(target: Target, cases: list[Case]) -> list[Row]:
    return [row for rows in run_cases(cases, target, Run.now()) for row in rows if row["verdict"] == FAIL]


def test_a_planted_fault_ends_in_its_smallest_case_with_a_line_to_paste(tmp_path: Path) -> None:
    target = _planted(tmp_path, "pass")
    large = Case("sm90", "v4-flash", 8, n_groups=2, o_lora_rank=256, hidden_size=256, tp_size=2, seed=9, family="wide")
    failed = _failed(target, [large])
    found = list(shrink_failures(failed, target, Run.now(), seconds=60))
    assert len(found) == 1 and found[0].origin == large.id
    small = Case.from_json(found[0].row["case"])
    assert small.tokens == 3 and (small.tp_size, small.n_groups, small.family, small.seed) == (1, 1, "normal", 0)
    assert kind(found[0].row) == kind(failed[0]) == ("sm90", "wo_a", "bits", "")
    text = as_text(found[0])
    assert "z[2, 0, 7]: got 0x" in text and f"--implementation {target.implementation}" in text
    assert f"oproj replay '{small.to_json()}'" in text


def test_a_process_that_died_is_not_asked_to_die_again(tmp_path: Path) -> None:
    target = _planted(tmp_path, "os._exit(3)")
    failed = _failed(target, [SMALLEST])
    assert len(failed) == 1 and list(shrink_failures(failed, target, Run.now())) == []


def test_a_failure_that_does_not_come_again_is_said() -> None:
    row = {"arch": "sm90", "stage": "wo_a", "oracle": "bits", "reason": "z", "verdict": FAIL, "case_id": SMALLEST.id}
    found = list(shrink_failures([row | {"case": SMALLEST.to_json()}], Target("software"), Run.now()))
    assert "did not fail again" in as_text(found[0])


def test_at_most_three_kinds_of_failure_are_looked_into() -> None:
    stages = ("quantize", "wo_a", "wo_b", "o_proj")
    rows = [
        {
            "arch": "sm90", "stage": stage, "oracle": "bits", "reason": "", "verdict": FAIL,
            "case_id": str(n), "case": SMALLEST.to_json(),
        }
        for n, stage in enumerate(stages)
    ]  # fmt: skip
    assert len(list(shrink_failures(rows, Target("software"), Run.now()))) == MOST_FAILURES
