"""The nox sessions: each hands its arguments on, and is red where hardware, package or input is missing."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SESSIONS = {
    "conformance", "tests", "lint", "typecheck", "sm90", "sm100", "sm120",
    "report", "gate", "rebaseline", "record", "bench", "independent", "faults", "exports",
}  # fmt: skip


def sessions(source: str) -> dict[str, str | None]:
    """name -> docstring of each function under @nox.session."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    marked = [f for f in functions if any(ast.unparse(d).startswith("nox.session") for d in f.decorator_list)]
    return {f.name: ast.get_docstring(f) for f in marked}


def test_every_session_exists_with_one_line_of_explanation() -> None:
    found = sessions((ROOT / "noxfile.py").read_text())
    assert found.keys() == SESSIONS
    for name, docstring in found.items():
        assert docstring, name
        assert "\n" not in docstring, name


class Workshop:
    """The noxfile alone in a folder, with stand-ins for python and nvidia-smi that note their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        (folder / "bin").mkdir()
        shutil.copy(ROOT / "noxfile.py", folder)
        self.gpu("echo 'no devices were found'; exit 6")
        self.python("exit 0")

    def gpu(self, script: str) -> None:
        self._program("nvidia-smi", script)

    def python(self, script: str) -> None:
        self._program("python", f'echo "$@" >> {self.calls}\n{script}')

    def _program(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def nox(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of `nox --no-venv -s ...` there."""
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        command = [
            sys.executable,
            "-m",
            "nox",
            "--no-venv",
            "-f",
            str(self.folder / "noxfile.py"),
            "-s",
            *arguments,
        ]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return answer.returncode, answer.stdout + answer.stderr

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.mark.parametrize("name", ["sm90", "sm100", "sm120", "record"])
def test_hardware_session_fails_where_no_gpu_is(workshop: Workshop, name: str) -> None:
    code, output = workshop.nox(name)
    assert code != 0
    assert "needs an NVIDIA GPU" in output
    assert workshop.called() == []


@pytest.mark.parametrize(("capability", "serves"), [("9.0", "sm90"), ("10.3", "sm100"), ("12.0", "sm120"), ("8.9", "")])
def test_hardware_session_wants_the_gpu_of_its_own_architecture(
    workshop: Workshop, capability: str, serves: str
) -> None:
    workshop.gpu(f"echo {capability}")
    for name in ("sm90", "sm100", "sm120"):
        code, output = workshop.nox(name)
        assert (code == 0) is (name == serves), output
        assert name == serves or f"found: {capability}" in output
    assert workshop.called() == [
        f"-m conformance run --arch {name} --engine deep_gemm --out out/{name}" for name in [serves] if name
    ]


def test_hardware_session_is_red_where_the_package_is_missing(workshop: Workshop) -> None:
    workshop.gpu("echo 9.0")
    workshop.python("exit 3")
    assert workshop.nox("sm90")[0] != 0
    assert len(workshop.called()) == 1


def test_conformance_runs_all_architectures_then_the_gpu_that_is_here(workshop: Workshop) -> None:
    workshop.gpu("echo 9.0")
    code, output = workshop.nox("conformance")
    assert code == 0, output
    software, deep_gemm = workshop.called()
    assert software.endswith("run --arch sm90,sm100,sm120 --engine software --out out/conformance")
    assert deep_gemm.endswith("run --arch sm90 --engine deep_gemm --out out/sm90")


def test_conformance_passes_arguments_on_and_is_red_where_the_run_is(workshop: Workshop) -> None:
    workshop.python("exit 1")
    code, _ = workshop.nox("conformance", "--", "--arch=sm90", "--out", "out/mine", "--tokens", "7")
    assert code != 0
    (run,) = workshop.called()
    assert run.endswith("run --engine software --arch=sm90 --out out/mine --tokens 7")


@pytest.mark.parametrize("name", ["report", "gate", "rebaseline"])
def test_session_without_results_fails_and_says_how_to_get_them(workshop: Workshop, name: str) -> None:
    code, output = workshop.nox(name)
    assert code != 0
    assert "nox -s conformance" in output
    assert workshop.called() == []


def test_gate_and_rebaseline_pass_folder_and_arguments_on(workshop: Workshop) -> None:
    (workshop.folder / "out" / "conformance").mkdir(parents=True)
    (workshop.folder / "other").mkdir()
    assert workshop.nox("gate")[0] == 0
    assert workshop.nox("gate", "--", "other", "--baseline", "b.csv")[0] == 0
    assert workshop.nox("rebaseline", "--", "--reason", "new model")[0] == 0
    code, output = workshop.nox("rebaseline")
    assert code != 0
    assert "needs a reason" in output
    assert workshop.called() == [
        "-m conformance gate out/conformance",
        "-m conformance gate other --baseline b.csv",
        "-m conformance rebaseline out/conformance --reason new model",
    ]


def test_bench_fails_where_there_is_no_benchmark(workshop: Workshop) -> None:
    code, output = workshop.nox("bench")
    assert code != 0
    assert "benchmarks/__main__.py is missing" in output


def test_readme_names_every_session() -> None:
    text = (ROOT / "README.md").read_text()
    assert {name for name in SESSIONS if f"`{name}`" in text or f"nox -s {name}" in text} == SESSIONS
