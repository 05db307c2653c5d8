"""A DeepGEMM that does not work is never taken for one that does, and its finding says what is wrong."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from fake_deep_gemm import CPU, FakeDeepGemm, install, no_gpu, pretend_gpu
from oproj.arch import ARCHS, SM90, SM100
from oproj.engines import discovery
from oproj.engines.discovery import Finding, ProbeFailed, cuda_compiler, discover, examine, explain, first_working

NVRTC = {"DG_JIT_USE_NVRTC": "1"}


@pytest.fixture(autouse=True)
def _forget_findings():
    discovery.examined.cache_clear()
    yield
    discovery.examined.cache_clear()


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_a_working_candidate_is_proven_in_the_recipe_of_the_row(monkeypatch, arch):
    fake = install(monkeypatch, FakeDeepGemm(arch))
    finding = examine("deep_gemm", device=CPU, arch=arch)
    assert finding.works and finding.why_not == ""
    assert (finding.version, finding.file) == ("9.9", fake.__file__)
    assert fake.calls == [("fp8_einsum", arch.recipe())]


@pytest.mark.parametrize(
    "spoil, text",
    [
        (lambda d: d[3, 1, 77].add_(1.0), r"1 of 2048 probe outputs are wrong; first at \(3, 1, 77\)"),
        (lambda d: d[:, 1].fill_(float("nan")), r"1024 of 2048 probe outputs are wrong; first at \(0, 1, 0\): nan"),
        (lambda d: d.copy_(d.flip(0)), "probe outputs are wrong"),
        (lambda d: d.zero_(), "probe outputs are wrong"),
    ],
)
def test_a_wrong_result_is_no_working_candidate(monkeypatch, spoil, text):
    install(monkeypatch, FakeDeepGemm(SM90, spoil=spoil))
    finding = examine("deep_gemm", device=CPU, arch=SM90)
    assert not finding.works
    assert re.search(text, finding.why_not)


def test_a_candidate_that_writes_nothing_is_no_working_one(monkeypatch):
    fake = install(monkeypatch, FakeDeepGemm(SM90))
    fake.fp8_einsum = lambda *args, **kwargs: None
    assert "2048 of 2048 probe outputs are wrong" in examine("deep_gemm", device=CPU, arch=SM90).why_not


@pytest.mark.parametrize(
    "error, words",
    [
        (RuntimeError("Dimension specified as -1 but tensor has no dimensions"), "built for another torch"),
        (ImportError("/x/_C.so: undefined symbol: _ZN3c106detail14torchCheckFailE"), "built for another torch"),
        (OSError("libc10_cuda.so: cannot open shared object file"), "built for another torch"),
        (ImportError("_C.so: undefined symbol: TVMFFIErrorCreate"), "built for another apache-tvm-ffi"),
        (ModuleNotFoundError("No module named 'tvm_ffi'", name="tvm_ffi"), "apache-tvm-ffi is not installed"),
        (OSError("libcudart.so.13: cannot open shared object file"), "built for another CUDA"),
        (RuntimeError("CUDA error: no kernel image is available for execution"), "no kernel for this GPU"),
        (RuntimeError("Assertion error (layout.hpp:79): Unknown SF transformation"), "no kernel for this GPU"),
    ],
)
def test_each_known_symptom_has_plain_words(monkeypatch, error, words):
    install(monkeypatch, FakeDeepGemm(SM90, error=error))
    finding = examine("deep_gemm", device=CPU, arch=SM90)
    assert not finding.works and words in finding.why_not
    assert str(error) in finding.why_not, "the error's own text stays readable"


def test_a_failure_of_the_compiler_and_a_missing_one_are_told_apart(monkeypatch):
    monkeypatch.setattr(discovery.os, "access", lambda path, mode: False)
    missing, failed = {"PATH": "/nonexistent"}, RuntimeError("NVCC compilation failed")
    for error in (AssertionError(), RuntimeError("boom"), failed):
        assert explain(error, missing).startswith("fails, and no CUDA compiler is found")
    assert explain(failed, NVRTC).startswith("its kernels do not compile with NVRTC")
    assert explain(RuntimeError("first\nmiddle\nlast"), NVRTC) == "fails (RuntimeError: first ... last)"
    assert explain(ProbeFailed("1 of 2 wrong"), missing) == "fails (ProbeFailed: 1 of 2 wrong)"
    assert len(explain(RuntimeError("x" * 5000), NVRTC)) < 400


def test_the_compiler_is_the_users_choice_then_cuda_home_then_path(tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    assert cuda_compiler({"CUDA_HOME": str(tmp_path), "DG_JIT_USE_NVRTC": "1"}) == "NVRTC"
    assert cuda_compiler({"CUDA_HOME": str(tmp_path), "DG_JIT_USE_NVRTC": "0"}) == str(nvcc)
    assert cuda_compiler({"CUDA_PATH": str(tmp_path)}) == str(nvcc)
    assert cuda_compiler({"PATH": str(nvcc.parent)}) == str(nvcc)


def test_another_api_under_the_same_name_is_told_apart(monkeypatch):
    fake = FakeDeepGemm(SM90)
    fake.fp8_einsum = None
    install(monkeypatch, fake)
    assert "has no fp8_einsum" in examine("deep_gemm", device=CPU, arch=SM90).why_not


def test_a_package_that_does_not_load_is_reported_with_its_file(monkeypatch, tmp_path):
    package = tmp_path / "deep_gemm"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('_C.so: undefined symbol: _ZN2at4_ops5emptyE')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    finding = examine("deep_gemm", device=CPU, arch=SM90)
    assert finding.installed and not finding.works
    assert finding.file == str(package / "__init__.py")
    assert "built for another torch" in finding.why_not and "built for another torch" in finding.line()


def test_a_package_that_ends_the_program_is_reported(monkeypatch, tmp_path):
    (tmp_path / "deep_gemm.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    finding = examine("deep_gemm", device=CPU, arch=SM90)
    assert not finding.works and "SystemExit: 0" in finding.why_not


def test_a_missing_dependency_is_not_taken_for_a_missing_package(monkeypatch, tmp_path):
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").write_text("import tvm_ffi\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    finding = examine("deep_gemm", device=CPU, arch=SM90)
    assert finding.installed and not finding.works
    assert "its dependency apache-tvm-ffi is not installed" in finding.why_not


def test_an_absent_package_and_an_absent_part_of_one_are_not_installed(monkeypatch, tmp_path):
    (tmp_path / "holder_of_none").mkdir()
    (tmp_path / "holder_of_none" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("absent_deep_gemm", "holder_of_none.third_party.deep_gemm"):
        finding = examine(name, device=CPU, arch=SM90)
        assert (finding.installed, finding.works, finding.why_not) == (False, False, "not installed")


def test_without_a_gpu_an_installed_package_does_not_count_as_working(monkeypatch):
    fake = install(monkeypatch, FakeDeepGemm(SM90))
    no_gpu(monkeypatch)
    finding = examine("deep_gemm")
    assert not finding.works and "no CUDA GPU" in finding.why_not
    assert fake.calls == []


def test_a_gpu_of_no_row_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA A100")
    install(monkeypatch, FakeDeepGemm(SM90))
    assert examine("deep_gemm").why_not == "no kernel for NVIDIA A100 (compute capability 8.0)"


def test_the_probe_can_be_replaced_and_a_device_needs_its_row(monkeypatch):
    install(monkeypatch, FakeDeepGemm(SM90))
    seen = []
    finding = examine("deep_gemm", device=CPU, arch=SM100, probe=lambda *args: seen.append(args[1:]))
    assert finding.works and seen == [(SM100, CPU)]
    with pytest.raises(ValueError, match="arch is None"):
        examine("deep_gemm", device=CPU)


def test_the_first_working_candidate_ends_the_search_and_findings_are_kept(monkeypatch):
    pretend_gpu(monkeypatch, SM90)
    broken = install(monkeypatch, FakeDeepGemm(SM90, error=RuntimeError("boom")), "first_dg")
    good = install(monkeypatch, FakeDeepGemm(SM90), "second_dg")
    names = ("first_dg", "second_dg", "never_imported_dg")
    assert first_working(names).module == "second_dg"
    assert [finding.works for finding in discover(names)] == [False, True, False]
    assert len(broken.calls) == len(good.calls) == 1


def test_a_finding_reads_as_one_line():
    assert Finding("m", True, "sgl-deep-gemm", "1", "f", True, "").line() == "m from sgl-deep-gemm 1, f: works"
    assert Finding("m", True, None, None, "f", False, "why").line() == (
        "m from no distribution (source tree) (no version), f: why"
    )
    assert Finding("m", False, None, None, None, False, "not installed").line() == "m: not installed"
