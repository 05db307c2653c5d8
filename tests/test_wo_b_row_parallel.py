"""``wo_b`` of one rank as each architecture serves it, and the sum over ranks: in order, in place, over processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from conformance.bounds import tp_reduction_bound
from oproj.arch import ARCHS
from oproj.engines.software import SoftwareEngine
from oproj.wo_b import (
    COLLECTIVES,
    SUM_KINDS,
    BlockLinear,
    RowParallelWoB,
    bf16_wo_b,
    fp8_wo_b,
    padded_rows,
    reduce_partials,
    scatter_partials,
)
from quantizer_calls import bits_of

HIDDEN, K = 64, 512
BLOCKS = (32, 128)


def checkpoint(block: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [HIDDEN, K] of +-1, +-2 and scales 1 or 2 that differ by block: with small z every sum is exact."""
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.choice([-2.0, -1.0, 1.0, 2.0], (HIDDEN, K))).to(torch.float8_e4m3fn)
    scale = 2.0 ** rng.integers(0, 2, (-(-HIDDEN // block), K // block))
    return codes, torch.from_numpy(scale).float()


def dense(codes: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    return codes.double() * scale.double().repeat_interleave(block, 0)[:HIDDEN].repeat_interleave(block, 1)


def signs(rows: int, seed: int = 1) -> torch.Tensor:
    """z [rows, K] of -1, 0, 1, mostly 0: sums stay below 2^8, so no rounding anywhere."""
    values = np.random.default_rng(seed).choice([-1.0, 0.0, 1.0], (rows, K), p=[0.05, 0.9, 0.05])
    return torch.from_numpy(values).bfloat16()


def random_partials(n: int, rows: int, seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, rows, 24)) * 2.0 ** rng.integers(-6, 6, (n, rows, 24))
    return list(torch.from_numpy(values).bfloat16())


# One rank's linear --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_each_architecture_serves_the_weight_in_its_own_form(arch: str, block: int, rows: int) -> None:
    codes, scale = checkpoint(block)
    local = BlockLinear.from_checkpoint(codes, scale, arch=arch, block=(block, block), engine=SoftwareEngine(arch))
    mxfp8 = block == 32 and arch in ("sm100", "sm103")
    if block == 32 and not mxfp8:
        assert local.weight.dtype == torch.bfloat16 and local.weight_scale is None
        assert torch.equal(local.weight.double(), dense(codes, scale, block))
    else:
        assert local.weight.dtype == torch.float8_e4m3fn and local.weight_scale is not None
        packed = (torch.int32, (HIDDEN, K // (4 * block)), (1, HIDDEN))
        found = (local.weight_scale.dtype, tuple(local.weight_scale.shape), local.weight_scale.stride())
        assert found == (packed if arch != "sm90" else (torch.float32, (1, K // 128), (K // 128, 1)))
        assert local.group_size == block
    z, out = signs(rows), torch.empty(rows, HIDDEN, dtype=torch.bfloat16)
    assert local(z, out=out) is out
    assert torch.equal(out.double(), z.double() @ dense(codes, scale, block).T)
    assert torch.equal(local(z), out)


@pytest.mark.parametrize("group", BLOCKS)
def test_blocks_of_32_have_scales_of_their_own(group: int) -> None:
    """448 * 2^-20 beside 448 * 2^-3 is lost with a scale in common."""
    z = torch.zeros(1, 512, dtype=torch.bfloat16)
    z[0, 0], z[0, 32] = 448 * 2.0**-3, 448 * 2.0**-20
    one_hot = torch.zeros(16, 512)
    one_hot[0, 32] = 1
    weight, scale, engine = one_hot.to(torch.float8_e4m3fn), torch.ones(1, 512 // group), SoftwareEngine("sm100")
    local = BlockLinear.from_checkpoint(weight, scale, arch="sm100", block=(group, group), engine=engine)
    assert (float(local(z)[0, 0]) == 448 * 2.0**-20) == (group == 32)


def test_bf16_product_is_rounded_once() -> None:
    z, weight = random_partials(2, 6, seed=3)
    out = torch.empty(6, 6, dtype=torch.bfloat16)
    assert bf16_wo_b(z, weight, out=out) is out
    assert torch.equal(out, (z.double() @ weight.double().T).float().bfloat16())


CODES, SCALE = checkpoint(128)


@pytest.mark.parametrize(
    "problem, message",
    [
        (lambda: BlockLinear(CODES.float()), "weight has dtype torch.float32"),
        (lambda: BlockLinear(CODES, SCALE), "engine=None"),
        (lambda: BlockLinear(CODES, engine=SoftwareEngine("sm90")), "weight_scale is missing"),
        (lambda: BlockLinear(CODES.bfloat16(), SCALE), "weight_scale is given"),
        (lambda: BlockLinear(CODES.bfloat16()[0]), r"weight has shape \(512,\)"),
        (lambda: BlockLinear.from_checkpoint(CODES, SCALE, arch="sm90", block=(64, 64)), r"block=\(64, 64\)"),
        (lambda: BlockLinear.from_checkpoint(CODES, SCALE.T, arch="sm90"), r"scale has shape \(4, 1\)"),
        (lambda: BlockLinear.from_checkpoint(CODES.float(), SCALE, arch="sm90"), "codes has dtype torch.float32"),
        (lambda: bf16_wo_b(signs(2), CODES), "weight has dtype torch.float8_e4m3fn"),
        (lambda: bf16_wo_b(signs(2)[:, 1:], CODES.bfloat16()), r"z has shape \(2, 511\)"),
        (lambda: bf16_wo_b(signs(2), CODES.bfloat16(), out=torch.empty(2, 64)), "out has dtype torch.float32"),
        (lambda: bf16_wo_b(signs(2), CODES.bfloat16(), out=signs(2)), r"out has shape \(2, 512\)"),
        (lambda: reduce_partials([]), "partials is empty"),
        (lambda: reduce_partials([signs(2)], "fp16"), "kind='fp16'"),  # type: ignore[arg-type]
        (lambda: reduce_partials([signs(2), signs(3)]), r"partials\[1\] has shape \(3, 512\)"),
        (lambda: reduce_partials([signs(2), signs(2).float()]), r"partials\[1\] has dtype torch.float32"),
        (lambda: reduce_partials([signs(2)[0]]), r"partials\[0\] has shape \(512,\)"),
        (lambda: reduce_partials([None]), r"partials\[0\] is NoneType"),  # type: ignore[list-item]
        (lambda: scatter_partials([signs(2)] * 2, 2), r"rank=2 must lie in 0..1"),
        (lambda: padded_rows(signs(2), 0), "tp_size=0"),
        (lambda: RowParallelWoB(lambda z: z, collective="gather"), "collective='gather'"),
        (lambda: RowParallelWoB(lambda z: z, kind="fp8"), "kind='fp8'"),  # type: ignore[arg-type]
        (lambda: RowParallelWoB(3), "local is int"),  # type: ignore[arg-type]
        (lambda: RowParallelWoB(lambda z: z[1:])(signs(2)), "the result of local has 1 rows; z has 2"),
        (lambda: RowParallelWoB(lambda z: z.float())(signs(2)), "the result of local has dtype torch.float32"),
    ],
)
def test_bad_arguments_are_named(problem, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        problem()


# The sum over ranks -------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 16), rows=st.integers(0, 3), kind=st.sampled_from(SUM_KINDS), seed=st.integers(0, 999))
def test_partials_are_added_in_the_order_of_the_ranks(n: int, rows: int, kind, seed: int) -> None:
    partials = random_partials(n, rows, seed)
    before = [partial.clone() for partial in partials]
    total = partials[0].float().numpy().copy()
    for partial in partials[1:]:
        total = total + partial.float().numpy()
        if kind == "bf16":
            total = torch.from_numpy(total).bfloat16().float().numpy().copy()
    out = torch.empty(rows, 24, dtype=torch.bfloat16)
    assert reduce_partials(partials, kind, out=out) is out
    assert np.array_equal(bits_of(out), bits_of(torch.from_numpy(total).bfloat16()))
    assert all(map(torch.equal, partials, before))
    if rows:
        exact = torch.stack(partials).double().sum(0)
        assert not ((out.double() - exact).abs() > tp_reduction_bound(torch.stack(partials), kind)).any()


def test_the_two_kinds_differ_where_small_partials_vanish_one_by_one() -> None:
    partials = [torch.full((1, 1), value).bfloat16() for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    assert [float(reduce_partials(partials, kind)) for kind in ("bf16", "fp32")] == [256.0, 260.0]
    assert float(reduce_partials(partials[::-1], "bf16")) == 260.0  # the order counts


@given(n=st.integers(1, 5), rows=st.integers(0, 11), kind=st.sampled_from(SUM_KINDS))
def test_each_rank_keeps_its_rows_and_rows_past_the_end_are_zero(n: int, rows: int, kind) -> None:
    partials = random_partials(n, rows)
    shards = [scatter_partials(partials, rank, kind) for rank in range(n)]
    assert {tuple(shard.shape) for shard in shards} == {(-(-rows // n), 24)}
    whole = torch.cat(shards)
    assert torch.equal(whole[:rows], reduce_partials(partials, kind))
    assert not bits_of(whole[rows:]).any() and len(whole) - rows < n


def test_without_a_group_the_partial_is_the_result() -> None:
    local = BlockLinear.from_checkpoint(CODES, SCALE, arch="sm90", engine=SoftwareEngine("sm90"))
    z, out = signs(3), torch.empty(3, HIDDEN, dtype=torch.bfloat16)
    expected = fp8_wo_b(z, CODES, SCALE, engine=SoftwareEngine("sm90"))
    seen: list[object] = []

    def spy(z: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(out)
        return local(z, out=out)

    assert RowParallelWoB(spy)(z, out=out) is out and seen == [out]
    assert torch.equal(out, expected)
    for any_callable in (lambda z: local(z), torch.nn.Linear(K, HIDDEN, bias=False).bfloat16()):
        out.zero_()
        assert RowParallelWoB(any_callable)(z, out=out) is out
        assert torch.equal(out, any_callable(z))


def _rank_main(rank: int, folder: str) -> None:
    """One of two processes: every kind and collective on partials that both can build."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    found: dict[str, np.ndarray] = {}
    for rows in (0, 1, 4, 5):
        mine = random_partials(2, rows, seed=rows)[rank]
        for collective in COLLECTIVES:
            for kind in SUM_KINDS:
                module = RowParallelWoB(lambda z, y=mine: y, group=group, kind=kind, collective=collective)
                z = torch.zeros(rows, 1)
                result = module(z)
                out = torch.full_like(result, 7.0)
                assert module(z, out=out) is out and torch.equal(out, result)
                found[f"{rows}/{collective}/{kind}"] = bits_of(result)
        assert torch.equal(mine, random_partials(2, rows, seed=rows)[rank]), "the partial was written to"
    np.savez(Path(folder) / f"rank{rank}.npz", **found)
    dist.destroy_process_group()


def test_two_processes_have_the_bits_of_the_list_of_partials(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank_main, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        found = np.load(tmp_path / f"rank{rank}.npz", allow_pickle=False)
        assert len(found) == 4 * len(COLLECTIVES) * len(SUM_KINDS)
        for name, bits in found.items():
            rows, collective, kind = name.split("/")
            partials = random_partials(2, int(rows), seed=int(rows))
            scattered = collective == "reduce_scatter"
            expected = scatter_partials(partials, rank, kind) if scattered else reduce_partials(partials, kind)
            assert np.array_equal(bits, bits_of(expected)), name


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_words_that_travel_are_of_the_kind(monkeypatch: pytest.MonkeyPatch, collective: str) -> None:
    """Two more ranks of 1 each beside 256: lost one by one in BF16, kept in FP32. Two real ranks cannot tell."""

    def add_two_ranks(total: torch.Tensor, *source: torch.Tensor, group: object) -> None:
        total.copy_(source[0][: len(total)] if source else total).add_(1).add_(1)

    monkeypatch.setattr(dist, "all_reduce", add_two_ranks)
    monkeypatch.setattr(dist, "reduce_scatter_tensor", add_two_ranks)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    found = []
    for kind in SUM_KINDS:
        module = RowParallelWoB(
            lambda z: torch.full((4, 2), 256.0).bfloat16(), group=object(), kind=kind, collective=collective
        )
        found.append(module(torch.zeros(4, 1)))
    assert [len(y) for y in found] == [4 if collective == "all_reduce" else 2] * 2
    assert [set(y.flatten().tolist()) for y in found] == [{256.0}, {258.0}]
