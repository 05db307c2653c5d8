"""The checks that need a GPU: their arithmetic and verdicts on a CPU, and what is said without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance import gpu_checks
from conformance.bulk import Draw, Tally
from conformance.gpu_checks import Bench, Result
from conformance.gpu_layer import Layer
from oproj.arch import get_arch
from oproj.config import OProjConfig
from oproj.engines import EngineUnavailable
from oproj.engines.software import SoftwareEngine
from oproj.rope import cos_sin_cache

TINY = OProjConfig("tiny", hidden_size=128, n_heads=4, n_groups=2, o_lora_rank=512)


class Flips(SoftwareEngine):
    """A GPU whose product is wrong in one bit."""

    def fp8_einsum(self, expr: str, a: Any, b: Any, d: torch.Tensor, c: Any = None, **how: Any) -> None:
        super().fp8_einsum(expr, a, b, d, c, **how)
        if d.numel():
            d[0, 0, 0] = -d[0, 0, 0]


def bench_of(arch: str, hardware: type[SoftwareEngine] = SoftwareEngine) -> Any:
    draw, table = Draw(torch.device("cpu")), cos_sin_cache("yarn", 64)
    engine: Any = hardware(arch)
    engine.quantizer = "software"
    return Bench(engine, SoftwareEngine(arch), draw, table, Layer(get_arch(arch), TINY, draw, table))


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "get_preset", lambda name: TINY)
    monkeypatch.setattr(gpu_checks, "PRESETS", ("tiny",))
    monkeypatch.setattr(gpu_checks, "TP_SIZES", (1, 2))
    monkeypatch.setattr(gpu_checks, "TOKENS", (1, 3))


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_the_chain_compares_every_stage_of_every_shape(arch: str) -> None:
    results = list(gpu_checks.chain(bench_of(arch)))
    assert [(r.check, r.result, r.mismatched) for r in results] == [
        ("chain tiny tp 1", "pass", 0),
        ("chain tiny tp 2", "pass", 0),
    ]
    scales = 8 if arch == "sm90" else 2
    assert [r.compared for r in results] == [4 * g * (1024 + scales + 512) + 4 * 128 for g in (2, 1)]


@pytest.mark.usefixtures("_tiny")
def test_a_wrong_bit_of_the_gpu_is_a_failure() -> None:
    results = list(gpu_checks.chain(bench_of("sm90", Flips)))
    assert all(r.result == "fail" and r.mismatched >= 2 and "z at (0, 0)" in r.detail for r in results)
    assert gpu_checks.exit_code(results) == 1


@pytest.mark.usefixtures("_tiny")
def test_compile_and_no_tokens_are_checked() -> None:
    bench = bench_of("sm90")
    (one,) = gpu_checks.compiled(bench)
    (empty,) = gpu_checks.no_tokens(bench)
    assert (one.result, one.mismatched, one.compared) == ("pass", 0, 4 * 1024)
    assert empty == Result("no tokens", "pass", detail="y (0, 128)")


def test_a_capture_that_cannot_work_fails_by_name_rather_than_hiding() -> None:
    (found,) = gpu_checks.replay(bench_of("sm90"))
    assert found.result == "fail" and "quantiser is 'software'" in found.detail


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("stale", [False, True])
def test_a_replay_must_read_the_new_inputs(monkeypatch: pytest.MonkeyPatch, arch: str, stale: bool) -> None:
    """A graph stood for by a function; a stale one gives the result of its capture again."""

    def captured(call: Callable[[], torch.Tensor]) -> Any:
        result = call()
        return SimpleNamespace(replay=lambda: None if stale else result.copy_(call())), result

    monkeypatch.setattr(gpu_checks, "captured", captured)
    monkeypatch.setattr(gpu_checks, "no_sync", nullcontext)
    bench = bench_of(arch)
    bench.hardware.quantizer = "kernel"
    twice, once = 2 * 64 * 1024, 64 * 128
    for check, outputs in (
        (gpu_checks.replay, twice),
        (gpu_checks.replay_quantised, twice),
        (gpu_checks.replay_wo_b, once),
    ):
        (found,) = check(bench)
        assert found.compared == outputs
        assert found.result == ("fail" if stale else "pass")


def test_a_check_that_raises_fails_and_the_others_still_run() -> None:
    def breaks(_: Any) -> Iterator[Result]:
        raise RuntimeError("called a synchronizing CUDA operation")
        yield

    def works(_: Any) -> Iterator[Result]:
        yield Result("works", "pass", 3)

    bench = SimpleNamespace(hardware=SimpleNamespace(quantizer="software"))
    results = gpu_checks.run_checks(bench, {"quiet": breaks, "works": works})
    assert [r.result for r in results] == ["fail", "pass"]
    assert "RuntimeError: called a synchronizing CUDA operation; the engine's quantiser" in results[0].detail
    assert "quiet" in gpu_checks.table(results) and gpu_checks.exit_code(results) == 1


def test_nothing_compared_is_no_pass() -> None:
    assert gpu_checks.of_tally("empty", Tally("empty")).result == "fail"
    assert gpu_checks.exit_code([]) == 4 == gpu_checks.exit_code([Result("no tokens", "pass")])
    assert gpu_checks.exit_code([Result("chain", "pass", 1)]) == 0


def test_without_a_gpu_nothing_is_checked(tmp_path, capsys, monkeypatch) -> None:
    def missing(*_: Any) -> Any:
        raise EngineUnavailable("engine 'deep_gemm' needs a GPU")

    monkeypatch.setattr(gpu_checks, "DeepGemmEngine", missing)
    assert gpu_checks.main(tmp_path / "out") == 3
    assert "nothing checked: engine 'deep_gemm' needs a GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
