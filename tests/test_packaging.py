"""What a user installs and reads first: the project file, the constraints, the wheel, the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("oproj", "reference", "conformance", "reports")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def floors(requirements: list[str]) -> dict[str, SpecifierSet]:
    return {r.name: r.specifier for r in map(Requirement, requirements)}


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize(
    ("version", "supported"),
    [("3.9", False), ("3.10", True), ("3.11", True), ("3.12", True), ("3.13.2", True), ("3.14", False)],
)
def test_python_3_10_to_3_13_is_supported(version: str, supported: bool) -> None:
    assert (version in SpecifierSet(PROJECT["project"]["requires-python"])) is supported


@pytest.mark.parametrize(
    ("name", "oldest", "too_old"),
    [("torch", "2.11.0", "2.10.1"), ("pandas", "2.2.0", "2.1.4"), ("pandas", "3.1.1", "2.1.4")],
)
def test_dependency_floors(name: str, oldest: str, too_old: str) -> None:
    allowed = floors(PROJECT["project"]["dependencies"])[name]
    assert oldest in allowed
    assert too_old not in allowed


def test_dependencies_and_extras_are_declared() -> None:
    needed = {"torch", "numpy", "pandas", "pyarrow", "hypothesis", "pytest"}
    assert needed <= floors(PROJECT["project"]["dependencies"]).keys()
    assert {"gpu", "flashinfer", "vllm", "dev"} <= PROJECT["project"]["optional-dependencies"].keys()
    assert PROJECT["project"]["name"] == "oproj"
    assert PROJECT["project"]["scripts"] == {"oproj": "conformance.cli:main"}


def pins() -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [Requirement(line) for line in lines if line]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_constraints_pin_every_dependency_once_per_python_within_its_range(python: str) -> None:
    environment = {"python_version": python, "python_full_version": python + ".0"}
    applying = [p for p in pins() if p.marker is None or p.marker.evaluate(environment)]
    names = [p.name for p in applying]
    assert len(names) == len(set(names))
    pinned = {p.name: str(p.specifier).removeprefix("==") for p in applying}
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert pinned[requirement.name] in requirement.specifier, requirement


def test_constraints_are_plain_versions() -> None:
    for pin in pins():
        assert pin.url is None
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)), f"{pin}: one public version, no local build"


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "content")
    return folder / "content"


def test_wheel_holds_every_tracked_file_of_the_packages_and_nothing_else(unpacked_wheel: Path) -> None:
    shipped = {p.relative_to(unpacked_wheel) for p in unpacked_wheel.rglob("*") if p.is_file()}
    tops = {p.parts[0] for p in shipped if not p.parts[0].endswith(".dist-info")}
    assert tops == set(PACKAGES)
    tracked = {p.relative_to(ROOT) for p in tracked_files()}
    assert {p for p in tracked if p.parts[0] in PACKAGES} <= shipped


def test_wheel_runs_without_the_checkout(unpacked_wheel: Path, tmp_path: Path) -> None:
    code = "import conformance, conformance.cli, oproj, reference, reports; print(conformance.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(unpacked_wheel)}
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert Path(answer.stdout.strip()).is_relative_to(unpacked_wheel)


def test_readme_starts_with_the_two_commands() -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [block.strip() for block in blocks[:2]] == [
        "pip install nox && nox -s conformance",
        "pip install nox && nox -s tests",
    ]


# Written with a break, so that this line is not a finding of its own.
MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:work|tmp|root|opt|mnt|home/[a-z]+|Users/[A-Za-z]+)(?=/\w)")


def test_no_tracked_text_names_a_path_of_one_machine() -> None:
    found = []
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" not in data:
            lines = data.decode("utf-8").splitlines()
            found += [f"{path.relative_to(ROOT)}:{n}: {x}" for n, x in enumerate(lines, 1) if MACHINE_PATH.search(x)]
    assert found == []


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("see /" + "work/main/x.py", True),
        ("cd /" + "tmp/venv", True),
        ("HOME=/" + "home/me/x", True),
        ("attention/o_proj/work/list", False),
        ("margin = error / bound", False),
        ("#!/usr/bin/env bash", False),
    ],
)
def test_a_planted_machine_path_is_seen(line: str, is_one: bool) -> None:
    assert bool(MACHINE_PATH.search(line)) is is_one
