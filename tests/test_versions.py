"""The table of tested combinations is well formed and says the right thing of what is installed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from oproj import environment, versions

FIELDS = {"torch", "deep_gemm", "deep_gemm_version", *versions.BESIDE, "result", "symptom", "source", "where"}


def test_every_combination_is_whole() -> None:
    rows = versions.combinations()
    assert {row["result"] for row in rows} == set(versions.RESULTS)
    for row in rows:
        assert set(row) == FIELDS and row["source"] in versions.SOURCES and row["where"]
        assert row["deep_gemm"] in (*versions.DEEP_GEMMS, "vllm") and row["deep_gemm_version"]
        assert row["result"] != "fails" or row["symptom"], "a failure without its symptom helps nobody"
        assert row["result"] != "works" or row["source"] == "measured", "only a run shows that it works"
    keys = [tuple(row[name] for name in ("torch", "deep_gemm", "deep_gemm_version", *versions.BESIDE)) for row in rows]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "of_torch, packages, result, text",
    [
        ("2.11.0+cu130", {"sgl-deep-gemm": "0.1.1", "apache-tvm-ffi": "0.1.9"}, "works", "this combination has run"),
        ("2.11.1", {"sgl-deep-gemm": "0.1.7"}, "fails", "built for another torch"),
        ("2.11.0", {"sgl-deep-gemm": "0.2.5"}, "fails", "undefined c10 symbol"),
        ("2.11.0", {"deep-gemm": "1.0.0"}, "fails", "without fp8_einsum"),
        ("2.11.0", {"tokenspeed-deepgemm": "2.5.0.post20260604"}, "works", "Python 3.12 only"),
        ("2.11.0", {"sgl-deep-gemm": "0.1.4.post1", "apache-tvm-ffi": "0.1.11"}, "untested", "not recorded"),
        (
            "2.11.0",
            {"sgl-deep-gemm": "0.1.1", "apache-tvm-ffi": "0.1.10"},
            "untested",
            "torch 2.11, sgl-deep-gemm 0.1.1",
        ),
        ("2.110.0", {"sgl-deep-gemm": "0.1.1", "apache-tvm-ffi": "0.1.9"}, "untested", "nobody has recorded"),
        ("2.1", {"sgl-deep-gemm": "0.1.1", "apache-tvm-ffi": "0.1.9"}, "untested", "nobody has recorded"),
        ("2.13.0", {"sgl-deep-gemm": "9.9"}, "untested", "sgl-deep-gemm 9.9"),
        ("2.11.0", {"sgl-deep-gemm": "0.1.1", "apache-tvm-ffi": "0.1.9", "deep-gemm": "1.0.0"}, "untested", "nobody"),
        (
            "2.11.0",
            {"sgl-deep-gemm": "0.1.1", "apache-tvm-ffi": "0.1.9", "flashinfer-python": "0.7.4"},
            "fails",
            "does not install together",
        ),
        ("2.13.0+cpu", {}, "nothing", "no DeepGEMM is installed"),
        ("2.14.0", {"vllm": "0.33.0", "flashinfer-python": "0.7.2.post1"}, "untested", "third_party"),
    ],
)
def test_what_is_said_of_an_installation(of_torch: str, packages: dict[str, Any], result: str, text: str) -> None:
    found = versions.tested(of_torch, packages)
    assert found["result"] == result
    assert text in "\n".join(versions.lines(found))


def test_env_says_whether_the_installed_combination_is_a_tested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend = {"sgl-deep-gemm": "0.1.1", "apache-tvm-ffi": "0.1.9"}
    monkeypatch.setattr(environment, "installed_version", pretend.get)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    collected = environment.collect()
    assert collected["tested"]["result"] == "works" and json.loads(json.dumps(collected)) == collected
    assert "works: this combination has run (torch 2.11.0, sgl-deep-gemm 0.1.1" in environment.to_text(collected)
