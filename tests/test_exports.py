"""The FlashInfer-Bench export: valid against that package's own models, and references that give the engine's bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from typer.testing import CliRunner

from conformance import exports
from conformance.case import Case
from conformance.compare import compare_values
from conformance.export_reference import ceil_exponents, fused_multiply_add, log2_exponents
from conformance.inputs import build
from conformance.truth import Truth
from oproj.engines.software.quant_lanes import scale_exponent
from oproj.engines.software.spec import fma_f32
from oproj.rope_quant import software_rope_quant
from reference import unpack_ue8m0

FAMILIES = ("wide", "boundary")
ADDRESS = Case("sm90", "v4-pro", 2, family="address", tp_size=8, o_lora_rank=128, hidden_size=256)


@pytest.fixture(scope="module")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export")
    counts = exports.export(out, [*exports.cases(families=FAMILIES), ADDRESS])
    assert counts["dsv4_rope_quant_epilogue_h128_g16"] == 5 and len(counts) == 6
    return out


def lines(data_set: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(data_set.rglob("*.jsonl")) for line in path.read_text().splitlines()]


def runnable(data_set: Path, name: str) -> Any:
    """`run` of a definition's source, in a namespace of its own."""
    (path,) = data_set.rglob(f"{name}.json")
    namespace: dict[str, Any] = {}
    exec(compile(json.loads(path.read_text())["reference"], str(path), "exec"), namespace)
    return namespace["run"]


def test_every_definition_and_workload_is_valid_for_the_package_that_reads_them(data_set: Path) -> None:
    data = pytest.importorskip("flashinfer_bench.data", reason="session `exports` installs flashinfer-bench")
    utils = pytest.importorskip("flashinfer_bench.bench.utils")
    held = data.TraceSet.from_path(str(data_set))
    assert len(held.definitions) == 6 and set(held.workloads) == set(held.definitions)
    for name, definition in held.definitions.items():
        for trace in held.workloads[name]:
            tensors = utils.load_safetensors(definition, trace.workload, held.root)
            inputs = utils.gen_inputs(definition, trace.workload, "cpu", tensors)
            assert definition.get_axes_values_from_inputs(inputs) == trace.workload.axes
            result = runnable(data_set, name)(*inputs)
            axes = {**definition.const_axes, **trace.workload.axes}
            assert all(eval(constraint, {}, axes) for constraint in definition.constraints)
            assert list(result) == list(definition.outputs)
            shapes = definition.get_output_shapes(trace.workload.axes)
            for value, shape, dtype in zip(result.values(), shapes, definition.torch_output_dtypes):
                assert (list(value.shape), value.dtype) == (list(shape), dtype)


def test_the_references_give_the_bits_of_the_quantisers_and_sums_within_the_bounds(data_set: Path) -> None:
    seen = set()
    for line in lines(data_set):
        name, inputs = line["definition"], line["workload"]["inputs"]
        (path,) = {entry["path"] for entry in inputs.values()}
        tensors = load_file(data_set / path)
        assert list(inputs) == [entry["tensor_key"] for entry in inputs.values()] and set(tensors) == set(inputs)
        result = runnable(data_set, name)(*(tensors[key] for key in inputs))
        if "inv_rope" in name or "rope_quant" in name:
            check_quantised(data_set, path, tensors, result)
        else:
            check_product(data_set, path, tensors, result)
        seen.add(name)
    assert len(seen) == 6


def case_of(data_set: Path, path: str) -> Case:
    from safetensors import safe_open

    with safe_open(data_set / path, "pt") as file:
        return Case.from_json(file.metadata()["case"])


def check_quantised(data_set: Path, path: str, tensors: dict[str, torch.Tensor], result: Any) -> None:
    if tensors["o"].dtype == torch.float32:
        want = software_rope_quant(tensors["o"], tensors["positions"], tensors["cos_sin_cache"])
        scales = unpack_ue8m0(want.scale).int() - 127
        assert not torch.equal(tensors["o"], tensors["o"].bfloat16().float())
    else:
        want = Truth(build(case_of(data_set, path))).model_x
        scales = torch.log2(want.scale).int()
    assert torch.equal(result["x_steps"], (want.data.float() * 512).int())
    assert torch.equal(result["x_exponents"], scales)


def check_product(data_set: Path, path: str, tensors: dict[str, torch.Tensor], result: Any) -> None:
    truth = Truth(build(case_of(data_set, path)))
    x = truth.model_x
    if "z" in result:
        assert torch.equal(tensors["x"].view(torch.uint8), x.data.contiguous().view(torch.uint8))
        got, want, bound = result["z"], truth.z_consumed(x), truth.z_bound(x, result["z"])
    else:
        z = truth.model_z(x)
        codes = truth.consumed_by_wo_b(z)
        got, want, bound = result["y"], truth.y_consumed(codes), truth.y_bound(codes, result["y"])
    comparison = compare_values(got, want, bound, "export")
    assert comparison.compared > 0 and comparison.mismatched == 0


@pytest.mark.parametrize(("exponents", "log2_rule"), [(log2_exponents, True), (ceil_exponents, False)])
def test_the_exponents_are_the_engines_around_every_power_of_two(exponents: Any, log2_rule: bool) -> None:
    lowest = np.float32(1e-10).view(np.int32)
    edges = [np.float32(448 * 2.0**k).view(np.int32) for k in range(-42, 118)]
    bits = np.array([edge + ulps for edge in edges for ulps in range(-3, 42)], dtype=np.int32)
    bits = bits[bits >= lowest]
    want = [int(scale_exponent(np.int32(b), log2_rule)) - 127 for b in bits]
    assert exponents(torch.from_numpy(bits).view(torch.float32)).tolist() == want


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**40), max_value=2.0**40)


@given(FLOATS, FLOATS, FLOATS)
@settings(max_examples=300)
def test_the_fused_product_is_rounded_once(x: float, y: float, z: float) -> None:
    got = fused_multiply_add(*(torch.tensor([v], dtype=torch.float32) for v in (x, y, z)))
    assert got.item() == fma_f32(x, y, z)


def test_one_step_of_a_code_or_an_exponent_exceeds_the_benchmarks_tolerances() -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * 512
    step, exponents = codes.diff(), torch.arange(-99, 100)
    assert bool((step > 1e-2).all()) and bool((step / codes[1:] > 1e-2).all())
    assert bool((1 / exponents.abs().clamp(min=1) > 1e-2).all())


def test_an_export_replaces_its_own_and_refuses_a_folder_of_someone_elses(tmp_path: Path) -> None:
    (tmp_path / "a" / "definitions").mkdir(parents=True)
    (tmp_path / "a" / "definitions" / "old.json").write_text("{}")
    first = exports.export(tmp_path / "a", [ADDRESS])
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*.*")}
    assert exports.export(tmp_path / "a", [ADDRESS]) == first
    assert {path: path.read_bytes() for path in (tmp_path / "a").rglob("*.*")} == before
    assert not (tmp_path / "a" / "definitions" / "old.json").exists()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt, which is no part of an export|has a, which is no part"):
        exports.export(tmp_path, [ADDRESS])
    with pytest.raises(ValueError, match="must have an FP8 wo_a with 128 x 128 blocks"):
        exports.export(tmp_path / "b", [Case("sm90", "v4-pro", 1, wo_a_dtype="bf16")])


def test_the_command_names_a_family_that_does_not_exist(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(exports.main)
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--family", "x"])
    assert result.exit_code == 2 and "family" in result.output + result.stderr
    made = CliRunner().invoke(app, ["--out", str(tmp_path), "--preset", "v4-pro", "--family", "exact", "--tokens", "1"])
    assert made.exit_code == 0 and "4 definitions in" in made.output
