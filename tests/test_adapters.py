"""The adapter of vLLM's quantiser: what it calls, what it refuses, and what is said where it cannot run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conformance import adapters, vllm_kernel
from conformance.case import Case
from conformance.cli import app
from conformance.implementation import inherits, load_implementation
from conformance.inputs import build
from oproj.engines import EngineUnavailable
from oproj.engines.software import SoftwareEngine
from oproj.quantize import fused_inv_rope_fp8_quant

SPEC = "conformance.adapters:VllmImplementation"
SMALL: dict[str, Any] = {"n_groups": 1, "o_lora_rank": 512, "hidden_size": 128}


def installed(monkeypatch: pytest.MonkeyPatch, serve: Any = fused_inv_rope_fp8_quant) -> None:
    """A machine with a GPU and vLLM, as far as the adapter can tell."""
    monkeypatch.setattr(adapters, "get_engine", lambda name, arch: SoftwareEngine(arch))
    monkeypatch.setattr(vllm_kernel, "load", lambda: (serve, "vllm (pretended)"))


def test_without_a_gpu_it_is_missing_and_the_command_ends_with_3() -> None:
    with pytest.raises(
        EngineUnavailable, match=r"implementation 'vllm' runs on a GPU alone: .*needs a GPU of row sm90"
    ):
        load_implementation(SPEC, "sm90")
    result = CliRunner().invoke(app, ["run", "--arch", "sm90", "--implementation", SPEC])
    assert result.exit_code == 3
    assert "implementation 'vllm' runs on a GPU alone" in " ".join((result.output + result.stderr).split())


@pytest.mark.parametrize("error", [vllm_kernel.VllmUnavailable("no vllm"), ModuleNotFoundError("no triton")])
def test_without_vllm_or_what_its_kernel_needs_it_is_missing(monkeypatch, error) -> None:
    installed(monkeypatch)

    def load() -> Any:
        raise error

    monkeypatch.setattr(vllm_kernel, "load", load)
    with pytest.raises(EngineUnavailable, match=f"implementation 'vllm' has no kernel to run: {error}"):
        adapters.VllmImplementation("sm90")


def test_vllm_is_looked_for_where_the_user_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(adapters, "get_engine", lambda name, arch: SoftwareEngine(arch))
    monkeypatch.setenv("OPROJ_VLLM", str(tmp_path))
    with pytest.raises(EngineUnavailable, match="must be the folder of an unpacked vLLM wheel"):
        adapters.VllmImplementation("sm90")
    monkeypatch.delenv("OPROJ_VLLM")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineUnavailable, match="vllm cannot be imported"):
        adapters.VllmImplementation("sm90")


@pytest.mark.parametrize("arch, preset", [("sm90", "v4-flash"), ("sm100", "v4.1-flash"), ("sm90", "v4.1-flash")])
def test_the_kernel_gets_the_arguments_as_served(monkeypatch: pytest.MonkeyPatch, arch: str, preset: str) -> None:
    seen: list[Any] = []

    def serve(*args: Any) -> Any:
        seen.append(args[3:])
        return fused_inv_rope_fp8_quant(*args)

    installed(monkeypatch, serve)
    mine = load_implementation(SPEC, arch)
    case = Case(arch, preset, 3, **SMALL)
    inputs = build(case)
    x = mine.quantize(inputs.o, inputs.positions, inputs.cos_sin_cache, config=case.config)
    block, packed = (32, True) if arch == "sm100" else (128, False)
    assert seen == [(1, 8, 448, 64, block, packed, preset == "v4-flash" or arch == "sm100")]
    assert x.data.shape == (3, 1, 4096) and mine.name == "vllm" and not inherits(mine, "quantize")
    assert inherits(mine, "wo_a") and inherits(mine, "wo_b")


def test_what_the_kernel_would_read_out_of_bounds_never_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, lambda *_: pytest.fail("the kernel was called"))
    case = Case("sm90", "v4-flash", 3, **SMALL)
    inputs, mine = build(case), adapters.VllmImplementation("sm90")
    for changes, message in (
        ({"positions": inputs.positions + len(inputs.cos_sin_cache)}, "positions lie in"),
        ({"o": inputs.o.mT.contiguous().mT}, "o has strides"),
    ):
        call = {"o": inputs.o, "positions": inputs.positions, "cos_sin_cache": inputs.cos_sin_cache} | changes
        with pytest.raises(ValueError, match=message):
            mine.quantize(**call, config=case.config)


def test_a_head_dim_that_is_no_power_of_two_never_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, lambda *_: pytest.fail("the kernel was called"))
    case = Case("sm90", "v4-flash", 3, **SMALL)
    inputs, mine = build(case), adapters.VllmImplementation("sm90")
    config = replace(case.config, nope_dim=320)
    with pytest.raises(ValueError, match="head_dim=384; vLLM's kernel needs a power of two"):
        mine.quantize(inputs.o[..., :384], inputs.positions, inputs.cos_sin_cache, config=config)


def test_it_is_published_under_the_name_vllm() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nvllm = "{SPEC}"\n' in text.split('[project.entry-points."oproj.implementations"]')[1].split("\n[")[0]
