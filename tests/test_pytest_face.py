"""The pytest face, from a user's own folder: what it collects, how a Case fails, and what it leaves alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.case import Case
from conformance.judge import FAIL, NOT_APPLICABLE, PASS
from conformance.pytest_cases import problem_of
from oproj.pytest_entry import _names_the_suite
from reports_rows import row

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytest_plugins = "pytester"
ROOT = Path(__file__).resolve().parents[1]
SUITE = ("-p", "conformance.pytest_plugin", "-p", "no:cacheprovider", "--pyargs", "conformance")
ONE_FAMILY = ("--arch", "sm90", "--preset", "v4-flash", "--tp", "8", "--family", "normal", "--examples", "1")
MINE = """
import ctypes, conformance
class Mine(conformance.SoftwareImplementation):
    def wo_a(self, x, weights, *, config):
        z = super().wo_a(x, weights, config=config)
        if len(z) == 2: ctypes.string_at(0)
        if len(z) == 3: z[2, 0, 7] += 4.0
        return z
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has this package installed, entry points and all."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    info = tmp_path / "site" / "oproj-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oproj\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[pytest11]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))
    path = os.pathsep.join([str(ROOT), str(info.parent)])
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "100"}


def run(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_wrong_element_a_crash_and_no_tokens_are_three_outcomes(tmp_path: Path, installed: dict[str, str]) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    # The properties call a stage with other numbers of tokens too; for 6 tokens none of them is 2 or 3.
    more = ("--implementation", "mine.py:Mine", "--tokens", "6,2,3,0", "-v", "-rs", "--oproj-seed", "1")
    done = run(tmp_path, installed, "--pyargs", "conformance", *ONE_FAMILY, *more)
    outcomes = re.findall(r"::test_case\[(sm90-[0-9a-f]{12})\] (\w+)", done.stdout)
    assert [outcome for _, outcome in outcomes[:4]] == ["PASSED", "FAILED", "FAILED", "SKIPPED"], done.stdout
    assert done.returncode == 1 and "3 failed" not in done.stdout and "Traceback" not in done.stdout
    assert "no tokens: shapes and dtypes agree" in done.stdout
    crashed, wrong = re.findall(r"^_+ test_case\[.*?(?=^_+ test_case|^=+)", done.stdout, re.MULTILINE | re.DOTALL)
    assert "first wrong stage: wo_a\n  wo_a bits: its process died in wo_a: SIGSEGV\n" in crashed
    assert re.search(r"wo_a bits: 1 of \d+ .* first z\[2, 0, 7\]: got 0x[0-9a-f]{4} \(.*want 0x[0-9a-f]{4} ", wrong)
    assert re.search(r"wo_a bound: 1 of \d+ .*, bound \d\S*, margin \d\S*\n", wrong)
    for text, (name, _) in zip((crashed, wrong), outcomes[1:3], strict=True):
        (line,) = re.findall(r"^oproj replay '(.*)' --implementation mine.py:Mine$", text, re.MULTILINE)
        assert f"sm90-{Case.from_json(line).id}" == name in text


def test_a_session_that_is_not_the_suites_gets_nothing_of_it(tmp_path: Path, installed: dict[str, str]) -> None:
    (tmp_path / "test_x.py").write_text(
        "import sys\n"
        "def test_x(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.hasplugin('oproj')\n"
        "    assert not pytestconfig.pluginmanager.hasplugin('conformance.pytest_plugin')\n"
        "    assert not {'torch', 'numpy', 'conformance', 'reports'} & set(sys.modules)\n"
    )
    done = run(tmp_path, installed, "-p", "no:hypothesispytest")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    assert "--oproj-arch" not in run(tmp_path, installed, "--help").stdout


@pytest.mark.parametrize(
    ("argument", "is_module", "ours"),
    [
        ("conformance", True, True),
        ("conformance.pytest_cases", True, True),
        ("conformance.pytest_cases::test_case[sm90-0123456789ab]", True, True),
        (str(ROOT / "conformance" / "pytest_cases.py"), False, True),
        (str(ROOT / "conformance") + "/", False, True),
        ("conformance", False, False),
        ("conformances", True, False),
        ("tests/test_conformance.py", False, False),
        (str(ROOT), False, False),
        ("x" * 10_000, False, False),
        ("a\0b", False, False),
    ],
)
def test_which_arguments_name_the_suite(
    argument: str, is_module: bool, ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _names_the_suite(argument, is_module) is ours


def test_options_of_the_project_win_and_the_long_names_stay(tmp_path: Path, installed: dict[str, str]) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--seed', type=int)\n"
        "    parser.addoption('--arch', action='store_true')\n"
    )
    text = run(tmp_path, installed, "--pyargs", "conformance", "--help").stdout
    assert "--oproj-seed=SEED" in text and "--oproj-tokens=TOKENS, --tokens=TOKENS" in text
    assert "--oproj-seed=SEED, --seed" not in text and "--oproj-arch=ARCH, --arch" not in text


def collected(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    result = pytester.runpytest_inprocess(*SUITE, "--collect-only", "-q", *arguments)
    assert result.ret == 0
    return re.findall(r"::test_case\[(\S+)\]$", "\n".join(result.outlines), re.MULTILINE)


def test_the_choice_of_cases(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\npython_files = check_*.py\npython_functions = check_*\n")
    drawn = collected(pytester, "--examples", "2")
    assert [name.partition("-")[0] for name in drawn] == ["sm90"] * 2 + ["sm100"] * 2 + ["sm120"] * 2
    assert len(collected(pytester, "--arch", "sm100")) == 60
    assert collected(pytester, "--arch", "sm90", "--examples", "2", "-k", drawn[1]) == [drawn[1]]
    grid = collected(pytester, *ONE_FAMILY, "--tokens", "1", "--tokens", "2,3")
    assert len(grid) == 3
    assert set(grid) != set(collected(pytester, *ONE_FAMILY, "--tokens", "1,2,3", "--seed", "5"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "sm90", "--engine", "deep_gemm"), "missing: engine 'deep_gemm' needs a GPU of row sm90"),
        (("--arch", "sm91"), "arch='sm91' is unknown; known rows: sm90"),
        (("--arch", "sm90", "--implementation", "nowhere.py:Mine"), "'nowhere.py' does not exist"),
        (("--engine", "software", "--implementation", "x"), "exclude each other"),
        (("--profile", "daily"), "profile='daily' is unknown"),
        (("--profile", "ci", "--tokens", "1"), "--profile ci draws presets, sizes and families itself"),
        (("--examples", "0"), "--examples 0 must be at least 1"),
        (("--case-timeout", "0"), "--case-timeout 0 must be a positive number"),
    ],
)
def test_what_cannot_be_run_is_one_usage_error(pytester: pytest.Pytester, arguments: tuple, message: str) -> None:
    result = pytester.runpytest_inprocess(*SUITE, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*ERROR: *{message.replace('[', '[[]')}*"])
    assert "test_case" not in result.stdout.str()


def test_the_engine_passes_in_this_process_and_cases_without_tokens_alone_are_no_success(
    pytester: pytest.Pytester,
) -> None:
    result = pytester.runpytest_inprocess(*SUITE, *ONE_FAMILY, "--engine", "software", "--tokens", "1,0")
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == pytest.ExitCode.OK
    result = pytester.runpytest_inprocess(*SUITE, *ONE_FAMILY, "--engine", "software", "--tokens", "0")
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_case_in_which_nothing_was_compared_fails() -> None:
    case = Case("sm90", "v4-flash", 3)
    rows = [row(stage=stage, verdict=NOT_APPLICABLE, reason="not promised") for stage in ("quantize", "wo_a")]
    text = problem_of(case, rows)
    assert text.startswith(
        "nothing compared\n  quantize bound: not promised\n  wo_a bound: not promised\noproj replay "
    )
    assert problem_of(case, []) == f"nothing compared\noproj replay '{case.to_json()}'"
    assert problem_of(case, [*rows, row(stage="wo_b", verdict=PASS)]) == ""
    assert problem_of(Case("sm90", "v4-flash", 0), rows) == ""
    failed = [row(stage="wo_b", verdict=FAIL, reason="why"), *rows]
    assert "first wrong stage: wo_b\n  wo_b bound: why\noproj" in problem_of(Case("sm90", "v4-flash", 0), failed)


def test_cases_run_on_the_processes_of_xdist(tmp_path: Path, installed: dict[str, str]) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is the user's own choice")
    more = ("--engine", "software", "--tokens", "1,2", "-n", "2", "-v")
    done = run(tmp_path, installed, "--pyargs", "conformance", *ONE_FAMILY, *more)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    assert re.findall(r"\[gw\d\] .*PASSED .*::test_case\[sm90-", done.stdout)
