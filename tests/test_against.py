"""Two implementations side by side: the first stage that differs is named, and the small Case is one that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import conformance
from conformance.against import Differences, compare_case, compare_cases, smallest_difference, to_frame
from conformance.against_command import FILE, main, second_target
from conformance.case import Case
from conformance.implementation import METHODS
from conformance.runner import Target
from oproj.activation import QuantizedActivation

LARGE = Case("sm90", "v4-flash", 3, n_groups=4, o_lora_rank=256, hidden_size=256, tp_size=2, family="wide", seed=3)
SMALLEST = Case("sm90", "v4-flash", 1, n_groups=1, o_lora_rank=128, hidden_size=128)
SOFTWARE = Target("software")


def flipped(result: Any) -> Any:
    """One bit of the last element is another; the sign of a zero counts too."""
    data = result.data if isinstance(result, QuantizedActivation) else result
    word = torch.uint8 if data.element_size() == 1 else torch.int16
    last = tuple(n - 1 for n in data.shape)
    data.view(word)[last] ^= 1
    return result


def odd(stage: str) -> conformance.SoftwareImplementation:
    """The software engine with one odd bit in ``stage``, which for a part of the chain `o_proj` has too."""
    implementation = conformance.SoftwareImplementation("sm90")
    right = getattr(implementation, stage)
    setattr(implementation, stage, lambda *args, config: flipped(right(*args, config=config)))
    return implementation


@pytest.mark.parametrize("stage", METHODS)
def test_the_stage_that_differs_is_the_only_one_of_the_chain_that_is_named(stage: str) -> None:
    right = conformance.SoftwareImplementation("sm90")
    for pair in ((odd(stage), right), (right, odd(stage))):
        found = compare_case(LARGE, *pair)
        assert found.first is not None and found.first[0] == stage
        assert found.first[1].mismatched == 1 and found.first[1].first_bad is not None
        wrong = {name for name, one in found.stages if one.mismatched or one.problem}
        assert wrong - {"o_proj"} == {stage} - {"o_proj"}
        assert [name for name, _ in found.stages] == list(METHODS)


def test_the_same_twice_has_the_same_bits_and_all_of_them_are_compared() -> None:
    found = compare_case(LARGE, conformance.SoftwareImplementation("sm90"), conformance.SoftwareImplementation("sm90"))
    counts = {stage: one.compared for stage, one in found.stages}
    y, config = 3 * 256, LARGE.config
    codes = 3 * config.n_groups * config.group_k
    assert found.first is None
    assert counts == {
        "quantize": codes + codes // 128, "wo_a": 3 * config.n_groups * 256, "wo_b": y, "reduce": y, "o_proj": y,
    }  # fmt: skip


def test_what_raises_differs_and_says_which_of_the_two_did() -> None:
    broken = conformance.SoftwareImplementation("sm90")
    broken.wo_b = lambda *args, config: 1 / 0  # type: ignore[method-assign, assignment]
    right = conformance.SoftwareImplementation("sm90")
    for number, pair in (("first", (broken, right)), ("second", (right, broken))):
        stage, comparison = compare_case(SMALLEST, *pair).first or ("", None)
        assert stage == "wo_b" and comparison is not None
        assert comparison.problem.startswith(f"{number}: wo_b raised ZeroDivisionError")


@pytest.fixture
def mine(tmp_path: Path) -> Target:
    """wo_b is off by one element where there are three tokens or more."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import conformance\n"
        "class Mine(conformance.SoftwareImplementation):\n"
        "    def wo_b(self, z, weights, *, config):\n"
        "        y = super().wo_b(z, weights, config=config)\n"
        "        if len(y) > 2: y[2, 5] += 1\n"
        "        return y\n"
    )
    return Target(implementation=f"{path}:Mine")


def test_the_command_names_stage_element_and_smallest_case(
    mine: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: Any = {"folder": tmp_path / "out", "workers": 1, "timeout": 100, "shrink": True, "total": 2}
    assert main([SMALLEST, LARGE], mine, SOFTWARE, **arguments) == 1
    output = capsys.readouterr().out
    assert "first stage that differs: wo_b on sm90: y[2, 5]: first 0x" in output
    line = next(line for line in output.splitlines() if "oproj replay" in line)
    assert f"--implementation {mine.implementation} --against software" in line
    small = Case.from_json(line.split("'")[1])
    assert small.tokens == 3 and small.macs < LARGE.macs and (small.tp_size, small.n_groups) == (1, 1)
    df = pd.read_csv(tmp_path / "out" / FILE, keep_default_na=False)
    assert list(df.loc[df["first"] != "", "stage"]) == ["wo_b", "o_proj"] and set(df["case_id"]) == {
        SMALLEST.id, LARGE.id,
    }  # fmt: skip


def test_the_command_passes_what_is_equal_and_refuses_what_compared_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    arguments: Any = {"folder": None, "workers": 1, "timeout": 100, "shrink": True, "total": 1}
    assert main([SMALLEST], SOFTWARE, SOFTWARE, **arguments) == 0
    assert "same bits in" in capsys.readouterr().out
    assert main([Case("sm90", "v4-flash", 0)], SOFTWARE, SOFTWARE, **arguments) == 4


def test_a_process_that_dies_fails_with_its_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dies.py"
    path.write_text(
        "import conformance, os\n"
        "class Mine(conformance.SoftwareImplementation):\n"
        "    def quantize(self, *args, config):\n"
        "        os._exit(5)\n"
    )
    arguments: Any = {"folder": None, "workers": 1, "timeout": 100, "shrink": True, "total": 1}
    assert main([SMALLEST], Target(implementation=f"{path}:Mine"), SOFTWARE, **arguments) == 1
    assert "exit code 5" in capsys.readouterr().out


def test_where_nothing_differs_there_is_no_smallest_case() -> None:
    known = [Differences(LARGE), Differences(SMALLEST, lost="its process died")]
    assert smallest_difference(known, SOFTWARE, SOFTWARE, timeout=9) is None
    found = list(compare_cases([SMALLEST], SOFTWARE, SOFTWARE))
    assert len(found) == 1 and found[0].first is None and len(to_frame(found)) == 4


def test_engines_and_implementations_are_told_apart() -> None:
    assert second_target("software") == Target("software") and second_target("deep_gemm") == Target("deep_gemm")
    assert second_target("a.py:B") == Target(implementation="a.py:B")
