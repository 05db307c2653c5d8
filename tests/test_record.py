"""A recording keeps exact inputs and results, and no failure in it can look like a success."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from conformance import golden, proof, record, warm_up
from conformance.golden_inputs import codes, fused_differs, generator, promotion, single_blocks
from conformance.golden_special import special
from fake_deep_gemm import FakeDeepGemm, no_gpu
from oproj.arch import ARCHS
from oproj.engines.deep_gemm import DeepGemmEngine
from oproj.engines.software import SoftwareEngine

SMALL = {"models": ("v4-flash",), "tp_sizes": (8,), "wo_a_tokens": (1, 3), "wo_b_tokens": (2,)}


def hardware(arch="sm90", **options):
    return DeepGemmEngine(arch, module=FakeDeepGemm(arch, **options), device="cpu")


def few_sets():
    return [item for item in special() if item.b.shape[1] == 8]


def make(out, engine, sets, prove=False):
    lines: list[str] = []
    code = record.record(out, engine, SoftwareEngine(engine.arch), [("few", sets)], prove=prove, say=lines.append)
    return code, "\n".join(lines)


def test_a_file_gives_back_every_set_bit_for_bit_and_says_where_it_comes_from(tmp_path):
    sets = [item.with_result(golden.run(SoftwareEngine("sm90"), item)) for item in special()]
    golden.save(tmp_path / "x.npz", sets, {"device": "none"})
    metadata, loaded = golden.load(tmp_path / "x.npz")
    assert metadata["device"] == "none" and len(loaded) == len(sets)
    for before, after in zip(sets, loaded, strict=True):
        assert (before.name, before.op, before.claim) == (after.name, after.op, after.claim)
        for part in golden.ARRAYS:
            left, right = getattr(before, part), getattr(after, part)
            assert left.dtype == right.dtype and left.shape == right.shape
            assert left.tobytes() == right.tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"], "no temporary file is left"


def test_arrays_of_equal_bytes_and_unequal_shape_stay_apart(tmp_path):
    zeros = np.zeros(256, np.uint8)
    ones = np.ones((2, 1, 1), np.float32)
    item = golden.GoldenSet("z", golden.EINSUM, "", zeros.reshape(2, 1, 128), ones, zeros.reshape(1, 2, 128), ones[:1])
    golden.save(tmp_path / "x.npz", [item.with_result(np.zeros((2, 1, 2), np.uint16))], {})
    loaded = golden.load(tmp_path / "x.npz")[1][0]
    assert (loaded.a.shape, loaded.b.shape) == ((2, 1, 128), (1, 2, 128))


def test_incomplete_files_and_sets_without_a_result_are_refused(tmp_path):
    item = few_sets()[0]
    with pytest.raises(ValueError, match="has no result"):
        golden.save(tmp_path / "x.npz", [item], {})
    golden.save(tmp_path / "x.npz", [item.with_result(golden.run(SoftwareEngine("sm90"), item))], {})
    with np.load(tmp_path / "x.npz", allow_pickle=False) as file:
        arrays = dict(file)
    np.savez(tmp_path / "short.npz", metadata=arrays["metadata"])
    with pytest.raises(ValueError, match="lacks the arrays"):
        golden.load(tmp_path / "short.npz")
    text = json.dumps(json.loads(arrays["metadata"].tobytes()) | {"schema": 99}).encode()
    np.savez(tmp_path / "new.npz", **arrays | {"metadata": np.frombuffer(text, np.uint8)})
    with pytest.raises(ValueError, match="schema 99"):
        golden.load(tmp_path / "new.npz")


def test_a_good_run_writes_evidence_and_exits_zero(tmp_path):
    code, text = make(tmp_path, hardware(), few_sets())
    assert code == 0 and "golden few" in text
    (entry,) = json.loads((tmp_path / "evidence.json").read_text())["records"]
    assert (entry["arch"], entry["stage"], entry["mismatched"]) == ("sm90", "wo_a", 0)
    assert entry["compared"] == sum(golden.output_shape(item)[0] * 8 for item in few_sets()) > 0
    assert (tmp_path / "golden_sm90_few.npz").is_file()


def test_one_flipped_bit_fails_the_run_and_is_printed_with_both_patterns(tmp_path):
    def flip(d):
        d.view(torch.int16)[2, 0, 1] ^= 1

    code, text = make(tmp_path, hardware(spoil=flip), few_sets()[:1])
    assert code == 1
    assert "1 of 64 differ, special/overflow at (2, 0, 1): hardware 0xff7e, software 0xff7f" in text
    assert json.loads((tmp_path / "evidence.json").read_text())["records"][0]["mismatched"] == 1


def test_a_failing_set_is_reported_and_the_rest_goes_on(tmp_path):
    sets = few_sets()
    sets[1] = replace(sets[1], sa=sets[1].sa[:, :, :1])
    code, text = make(tmp_path, hardware(), sets)
    assert code == 1 and "special/bf16_ties: ValueError" in text
    assert len(golden.load(tmp_path / "golden_sm90_few.npz")[1]) == len(sets) - 1


def test_a_run_that_compared_nothing_is_not_a_success(tmp_path):
    code, _ = make(tmp_path, hardware(error=RuntimeError("lost")), few_sets())
    assert code == 4
    assert json.loads((tmp_path / "evidence.json").read_text())["records"] == []


def test_without_a_gpu_nothing_is_recorded(monkeypatch, tmp_path, capsys):
    no_gpu(monkeypatch)
    assert record.main(tmp_path / "out", prove=True) == 3
    assert "nothing recorded" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.fixture
def _one_family(monkeypatch):
    for families in ("WO_A_FAMILIES", "WO_B_FAMILIES"):
        monkeypatch.setattr(proof, families, (("wide", "general"),))


@pytest.mark.usefixtures("_one_family")
def test_the_proof_counts_every_ranks_outputs():
    cells = proof.prove(hardware(), SoftwareEngine("sm90"), budget=1e9, say=lambda line: None, **SMALL)
    assert all(cell.passed for cell in cells)
    wo_a = [cell for cell in cells if cell.stage == "wo_a"]
    assert [cell.compared for cell in wo_a] == [8 * (1 + 3) * 1024]
    assert {cell.compared for cell in cells if cell.stage == "wo_b"} == {2 * 4096}
    assert sum(row["compared"] for row in proof.totals(cells)) == sum(cell.compared for cell in cells)


@pytest.mark.usefixtures("_one_family")
def test_a_mismatch_an_error_and_a_spent_budget_each_fail_their_cells():
    def spoil(d):
        d[..., -1] = float("inf")

    lines: list[str] = []
    run = {"say": lines.append, **SMALL, "wo_a_tokens": (1,)}
    cells = proof.prove(hardware(spoil=spoil), SoftwareEngine("sm90"), budget=1e9, **run)
    assert all(cell.mismatched > 0 and not cell.passed for cell in cells)
    assert "(t, g, n) at (0, 0, 1023): hardware 0x" in lines[0]
    cells = proof.prove(hardware(), SoftwareEngine("sm90"), budget=-1.0, **run)
    assert all("time budget" in cell.error and not cell.passed for cell in cells)


@pytest.mark.parametrize("wrong, error, code", [(0, "", 0), (1, "", 1), (0, "left out", 1)])
def test_the_exit_code_covers_the_proof(monkeypatch, tmp_path, wrong, error, code):
    cell = proof.Cell("wo_a", "v4-pro", 2, "normal/pow2", (1, 3), compared=10, mismatched=wrong, error=error)
    monkeypatch.setattr(proof, "prove", lambda *args, **options: [cell])
    assert make(tmp_path, hardware(), few_sets()[:1], prove=True)[0] == code
    bulk = json.loads((tmp_path / "evidence.json").read_text())["records"][-1]
    assert (bulk["compared"], bulk["mismatched"]) == (10, wrong) and "v4-pro; tp 2; tokens 1, 3" in bulk["detail"]
    assert json.loads((tmp_path / "proof.json").read_text())["cells"][0]["error"] == error


@pytest.mark.usefixtures("_one_family")
def test_the_proof_calls_the_gpu_for_every_group_once_a_token_count(monkeypatch):
    engine, einsum, seen = hardware(), proof._einsum, []

    def watched(which, data, rows, groups):
        if which is engine:
            seen.append((groups.start, groups.stop, rows.stop - rows.start))
        return einsum(which, data, rows, groups)

    monkeypatch.setattr(proof, "_einsum", watched)
    proof.prove(engine, SoftwareEngine("sm90"), budget=1e9, say=lambda line: None, **SMALL | {"tp_sizes": (4,)})
    assert seen == [(2 * rank, 2 * rank + 2, count) for rank in range(4) for count in (1, 3)]


def test_an_exception_in_one_cell_is_its_error(monkeypatch):
    def broken(*args):
        raise RuntimeError("lost the device")

    monkeypatch.setattr(proof, "_wo_a", broken)
    cells = proof.prove(hardware(), SoftwareEngine("sm90"), budget=1e9, say=lambda line: None, **SMALL)
    assert {cell.error for cell in cells if cell.stage == "wo_a"} == {"RuntimeError: lost the device"}
    assert all(cell.passed for cell in cells if cell.stage == "wo_b")


@pytest.mark.parametrize("arch", [name for name, row in ARCHS.items() if row.tma_aligned_scales])
def test_rows_with_ue8m0_scales_record_the_sets_whose_scales_they_hold(arch, tmp_path):
    sets = [item for item in single_blocks() if golden.fits(arch, item)]
    assert {item.name.split("/")[2] for item in sets} == {"unit", "pow2"}
    finite = {item.name.split("/")[1] for item in special() if golden.fits(arch, item)}
    assert {"base", "nan_codes_a"} <= finite and not finite & {"nan_scales", "inf_scales", "zeros"}
    for scale in (np.inf, 0.0, -1.0, 1.5, 2.0**-127):
        assert not golden.fits(arch, replace(sets[0], sa=np.full_like(sets[0].sa, scale))), scale
    assert make(tmp_path, hardware(arch), sets[:3])[0] == 0


def test_nan_equals_nan_and_the_zeros_differ():
    left = np.array([0x7FC0, 0x7FFF, 0xFFC1, 0x0000, 0x8000, 0x7F80, 0x3F80], np.uint16)
    right = np.array([0x7FFF, 0x7FC0, 0x7FC0, 0x8000, 0x8000, 0x7FC0, 0x3F81], np.uint16)
    assert golden.differing(left, right).tolist() == [False, False, False, True, False, True, True]


def test_the_promotion_set_tells_fused_from_separate_on_most_outputs():
    item = promotion()
    assert fused_differs(item.a[:, 0], item.sa[:, 0], item.b[0], item.sb[0, 0]).mean() > 0.5


def test_random_bits_hold_every_code_but_nan():
    drawn = codes("bits", generator("test"), (100_000,))
    assert set(range(256)) - set(drawn.tolist()) == {0x7F, 0xFF}


def test_warm_up_covers_what_the_recording_and_the_proof_call():
    sets = [*few_sets(), *record.PARTS["shapes"]()]
    calls = warm_up.calls_of(sets)
    assert ("fp8_gemm_nt", 5, 1, 384, 2048) in calls and ("fp8_einsum", 129, 2, 128, 512) in calls
    assert ("fp8_einsum", 1000, 16, 1024, 4096) in record.proof_calls()
    assert ("fp8_gemm_nt", 64, 1, 7168, 2048) in record.proof_calls()
    for call in calls:
        item = warm_up.zeros(call)
        assert warm_up.calls_of([item]) == {call}
        assert golden.run(SoftwareEngine("sm90"), item).shape == golden.output_shape(item)
