"""`oproj env` works on every machine and says which engine runs where, and why."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from fake_deep_gemm import FakeDeepGemm
from oproj import environment
from oproj.arch import ARCHS, SM90
from oproj.engines import discovery, get_engine


@pytest.fixture(autouse=True)
def _forget_findings():
    discovery.examined.cache_clear()
    yield
    discovery.examined.cache_clear()


def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def with_gpu(monkeypatch, capability):
    """One CUDA device of that capability, as far as torch can tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA H200")
    facts = {"major": capability[0], "minor": capability[1], "name": "NVIDIA H200", "total_memory": 141 * 2**30}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("Properties", (), facts))


def test_it_is_plain_data_and_names_every_row_on_this_machine():
    collected = environment.collect()
    assert json.loads(json.dumps(collected)) == collected
    assert set(collected["engines"]) == set(ARCHS)
    assert collected["torch"] == torch.__version__
    assert collected["packages"]["numpy"] is not None
    text = environment.to_text(collected)
    assert all(arch in text for arch in ARCHS) and "deep_gemm" in text
    assert "[" not in text, "rich reads brackets as markup"


def test_without_a_gpu_and_without_deep_gemm_auto_is_the_software_engine(monkeypatch):
    without_gpu(monkeypatch)
    monkeypatch.setattr(environment, "driver_version", lambda: None)
    for name in ("deep_gemm", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    collected = environment.collect()
    assert collected["gpus"] == [] and collected["driver"] is None
    assert all(row["auto"] == "software" and row["why"] == "no CUDA GPU" for row in collected["engines"].values())
    assert {arch: get_engine("auto", arch).name for arch in ARCHS} == dict.fromkeys(ARCHS, "software")
    text = environment.to_text(collected)
    assert "no NVIDIA driver found" in text and "gpu        none" in text and "not installed" in text


def test_with_a_gpu_whose_deep_gemm_works_auto_takes_it_for_that_row_alone(monkeypatch):
    with_gpu(monkeypatch, (9, 0))
    monkeypatch.setitem(sys.modules, "deep_gemm", FakeDeepGemm(SM90))
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(discovery, "current_gpu", lambda: (torch.device("cpu"), SM90, ""))
    collected = environment.collect()
    assert collected["engines"]["sm90"]["auto"] == "deep_gemm"
    assert "deep_gemm 9.9 works" in collected["engines"]["sm90"]["why"]
    assert collected["engines"]["sm100"] | {"measured": 0} == {
        "auto": "software",
        "why": "the current device is no sm100",
        "measured": 0,
    }
    assert collected["gpus"] == [
        {"index": 0, "name": "NVIDIA H200", "capability": "9.0", "arch": "sm90", "memory_gib": 141}
    ]
    assert "NVIDIA H200, compute capability 9.0, row sm90, 141 GiB" in environment.to_text(collected)


def test_with_a_gpu_and_a_broken_deep_gemm_auto_has_no_engine_and_says_why(monkeypatch):
    with_gpu(monkeypatch, (9, 0))
    error = RuntimeError("Dimension specified as -1 but tensor has no dimensions [0]")
    monkeypatch.setitem(sys.modules, "deep_gemm", FakeDeepGemm(SM90, error=error))
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(discovery, "current_gpu", lambda: (torch.device("cpu"), SM90, ""))
    collected = environment.collect()
    assert collected["engines"]["sm90"]["auto"] is None
    text = environment.to_text(collected)
    assert "sm90   none: the device is sm90 but no DeepGEMM works" in text
    assert "built for another torch" in text and "no dimensions (0)" in text


def test_measured_stages_come_from_the_evidence_records(monkeypatch):
    monkeypatch.setattr(environment, "measured_stages", lambda arch: {"wo_a"} if arch == "sm90" else frozenset())
    collected = environment.collect()
    assert collected["engines"]["sm90"]["measured"] == ["wo_a"]
    assert collected["engines"]["sm120"]["measured"] == []
    assert "confirmed on hardware: nothing" in environment.to_text(collected)


@pytest.mark.parametrize(
    "script, expected", [("echo 580.159.04", "580.159.04"), ("echo broken; exit 9", None), ("true", None)]
)
def test_the_driver_version_is_what_nvidia_smi_says(monkeypatch, tmp_path, script, expected):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(environment.shutil, "which", lambda name: str(tool))
    assert environment.driver_version.__wrapped__() == expected


def test_the_version_of_what_is_not_installed_is_none():
    assert environment.installed_version("no-such-distribution-here") is None
    assert environment.installed_version("numpy") is not None
