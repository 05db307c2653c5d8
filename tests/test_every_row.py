"""Every architecture, preset, activation block and tensor-parallel size, from attention output to the sum over ranks.

One head a group (K = 512) and 64 hidden columns stand for the model's own numbers, so that all rows take seconds;
ranks, groups, block sizes and layouts are the model's. ``o_lora_rank`` is 512: a packed word holds four blocks of 128.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conformance.bounds import bf16_gemm_bound, gemm_bound, tp_reduction_bound
from o_proj_arguments import same_bits
from oproj.activation import ue8m0_to_float, unpack_ue8m0
from oproj.arch import ARCHS
from oproj.config import PRESETS, OProjConfig
from oproj.engines.software import SoftwareEngine
from oproj.o_proj import compute_fp8_einsum_recipe, deep_gemm_fp8_o_proj
from oproj.weights import layout_weight_scales, requantize_to_ue8m0
from oproj.wo_b import SUM_KINDS, BlockLinear, RowParallelWoB, quantize_z, reduce_partials

TOKENS, HIDDEN, RANK, HEAD = 3, 64, 512, 512


@dataclass(frozen=True)
class Row:
    """One architecture, preset and activation block of ``wo_a``."""

    arch: str
    config: OProjConfig
    block: int

    def __str__(self) -> str:
        return f"{self.arch}-{self.config.name}-{self.block}"

    @property
    def packed(self) -> bool:
        return ARCHS[self.arch].tma_aligned_scales


def rows() -> list[Row]:
    """All that is served, and V4's 128x128 weights with activation blocks of 32 where the kernels take them."""
    found = []
    for arch in ARCHS:
        for preset in PRESETS.values():
            small = replace(preset, hidden_size=HIDDEN, n_heads=preset.n_groups, o_lora_rank=RANK)
            takes_32 = ARCHS[arch].tma_aligned_scales and preset.fp8_wo_a(arch) and preset.checkpoint_scale == "e8m0"
            finer = [32] if takes_32 else []
            found += [Row(arch, small, block) for block in sorted({preset.quant_group_size(arch), *finer})]
    return found


ROWS = rows()


@dataclass(frozen=True)
class Model:
    """The whole model before it is split: attention output and both weights as codes with block scales."""

    o: torch.Tensor  # BF16 [T, G, 512]
    positions: torch.Tensor
    table: torch.Tensor
    wo_a: tuple[torch.Tensor, torch.Tensor]  # e4m3 [G, R, 512], FP32 [G, R/b, 512/b]
    wo_b: tuple[torch.Tensor, torch.Tensor]  # e4m3 [hidden, G*R], FP32 [hidden/b, G*R/b]


@cache
def random_model(groups: int, b: int, significands: bool, requantized: bool) -> Model:
    """Magnitudes that differ by token, group and block; scales with a mantissa, kept or requantised, where said so."""
    rng = np.random.default_rng(7)
    o = rng.standard_normal((TOKENS, groups, HEAD)) * 2.0 ** rng.integers(-5, 5, (TOKENS, groups, 4)).repeat(128, 2)
    angles = rng.uniform(-4, 4, (9, 32))

    def weight(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = rng.integers(0, 0x70, shape).astype(np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
        grid = (*shape[:-2], -(-shape[-2] // b), shape[-1] // b)
        scale = 2.0 ** rng.integers(-9, -3, grid) * (rng.uniform(1, 2, grid) if significands else 1)
        made = torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scale.astype(np.float32))
        if not requantized:
            return made
        new = requantize_to_ue8m0(*made)
        return new.codes, new.scale

    return _model(o, angles, rng, weight(groups, RANK, HEAD), weight(HIDDEN, groups * RANK))


@cache
def exact_model(groups: int, b: int) -> Model:
    """One lane of +-2^t a head, weights of -1, 0, 1 as scale 2^s times code 2^-s: nothing is rounded anywhere."""
    rng = np.random.default_rng(8)
    o = np.zeros((TOKENS, groups, HEAD))
    lanes = rng.integers(0, HEAD, (TOKENS, groups))
    sizes = rng.choice([-1.0, 1.0], lanes.shape) * 2.0 ** np.arange(TOKENS)[:, None]
    np.put_along_axis(o, lanes[..., None], sizes[..., None], axis=2)
    angles = rng.integers(0, 4, (9, 32)) * np.pi / 2

    def weight(shares: list[float], *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale = 2.0 ** rng.integers(-4, 5, (*shape[:-2], -(-shape[-2] // b), shape[-1] // b))
        spread = scale.repeat(b, -1).repeat(b, -2)[..., : shape[-2], :]
        values = torch.from_numpy(rng.choice([-1.0, 0.0, 1.0], shape, p=shares) / spread)
        return values.to(torch.float8_e4m3fn), torch.from_numpy(scale.astype(np.float32))

    wo_b = weight([0.05, 0.9, 0.05], HIDDEN, groups * RANK)
    return _model(o, angles, rng, weight([0.3, 0.4, 0.3], groups, RANK, HEAD), wo_b)


def _model(o: np.ndarray, angles: np.ndarray, rng: np.random.Generator, wo_a: Any, wo_b: Any) -> Model:
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    table[np.abs(table) < 1e-6] = 0
    positions = torch.from_numpy(rng.permutation(9)[:TOKENS])
    return Model(torch.from_numpy(o).bfloat16(), positions, torch.from_numpy(table), wo_a, wo_b)


def spread(scale: torch.Tensor, block: int, rows: int) -> torch.Tensor:
    return scale.repeat_interleave(block, -2)[..., :rows, :].repeat_interleave(block, -1)


def wo_a_of(row: Row, codes: torch.Tensor, scale: torch.Tensor) -> Any:
    """One rank's ``wo_a`` as loaded: FP8 in the layout of the row, or BF16 with the groups stacked."""
    b = row.config.weight_block[0]
    if not row.config.fp8_wo_a(row.arch):
        return SimpleNamespace(weight=(codes.float() * spread(scale, b, RANK)).bfloat16().flatten(0, 1))
    finer = scale.repeat_interleave(b // row.block, -1)
    laid_out = layout_weight_scales(finer, arch=row.arch, rows=RANK, block=(b, row.block))
    return SimpleNamespace(weight=codes, weight_scale_inv=laid_out)


@dataclass(frozen=True)
class Shares:
    """What all ranks of one tensor-parallel size gave."""

    z: torch.Tensor  # BF16 [T, G*R], the ranks' shares side by side
    partials: list[torch.Tensor]
    linears: list[BlockLinear]

    def bounds(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 ``[ranks, T, hidden]`` of each partial before its rounding, and ``[T, G*R]`` that wo_b multiplied."""
        zs = self.z.chunk(len(self.linears), 1)
        pairs = [partial_bound(row, linear, z) for linear, z in zip(self.linears, zs, strict=True)]
        return torch.stack([bound for bound, _ in pairs]), torch.cat([values for _, values in pairs], 1)


def run(row: Row, model: Model, tp_size: int, engine: SoftwareEngine) -> Shares:
    block = row.config.weight_block
    zs, partials, linears = [], [], []
    for rank in range(tp_size):
        local = row.config.shard(tp_size, rank)
        groups = slice(rank * local.n_groups, (rank + 1) * local.n_groups)
        columns = slice(rank * local.wo_b_k, (rank + 1) * local.wo_b_k)
        scale_columns = slice(columns.start // block[1], columns.stop // block[1])
        codes, scale = model.wo_b[0][:, columns].contiguous(), model.wo_b[1][:, scale_columns].contiguous()
        linear = BlockLinear.from_checkpoint(codes, scale, arch=row.arch, block=block, engine=engine)
        wo_b, seen = RowParallelWoB(linear), []
        recipe, packed = compute_fp8_einsum_recipe(row.block, arch=row.arch)
        y = deep_gemm_fp8_o_proj(
            model.o[:, groups],
            model.positions,
            model.table,
            wo_a_of(row, model.wo_a[0][groups], model.wo_a[1][groups]),
            lambda z, seen=seen, wo_b=wo_b: (seen.append(z), wo_b(z))[1],
            n_groups=local.n_groups,
            heads_per_group=1,
            nope_dim=local.nope_dim,
            rope_dim=local.rope_dim,
            o_lora_rank=RANK,
            einsum_recipe=recipe,
            tma_aligned_scales=packed,
            engine=engine,
        )
        zs.append(seen[0])
        partials.append(y)
        linears.append(linear)
    return Shares(torch.cat(zs, 1), partials, linears)


def partial_bound(row: Row, linear: BlockLinear, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bound of one rank's sums, and the values of z that they took."""
    if linear.weight_scale is None:
        return bf16_gemm_bound(z, linear.weight), z.double()
    x = quantize_z(z, row.arch, group_size=linear.group_size)
    gran = {"gran_k": linear.group_size} if row.packed else {}
    bound = gemm_bound(row.arch, x.data, x.scale, linear.weight, linear.weight_scale, output="fp32", **gran)
    scale = ue8m0_to_float(unpack_ue8m0(x.scale)) if row.packed else x.scale
    return bound, x.data.double() * scale.double().repeat_interleave(linear.group_size, 1)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_z_is_the_same_for_every_tp_size_and_y_within_the_bound_of_the_sum(row: Row) -> None:
    b, engine = row.config.weight_block[0], SoftwareEngine(row.arch)
    fp32 = row.config.checkpoint_scale == "fp32"
    model = random_model(row.config.n_groups, b, fp32, fp32 and row.packed)
    weight = model.wo_b[0].double() * spread(model.wo_b[1].double(), b, HIDDEN)
    z, exact = None, None
    for tp_size in row.config.tp_sizes():
        found = run(row, model, tp_size, engine)
        bounds, consumed = found.bounds(row)
        if z is None:
            z, exact = found.z, consumed @ weight.T
        assert same_bits(found.z, z), tp_size
        partials = torch.stack(found.partials)
        assert partials.shape == (tp_size, TOKENS, HIDDEN) and (partials != 0).any(2).all()
        for kind in SUM_KINDS:
            error = (reduce_partials(found.partials, kind).double() - exact).abs()
            bound = tp_reduction_bound(partials, kind, partial_bounds=bounds)
            assert not (~(error <= bound)).any(), (tp_size, kind, float((error / bound).max()))


@pytest.mark.parametrize("row", [row for row in ROWS if row.config.checkpoint_scale == "e8m0"], ids=str)
def test_y_is_exact_where_nothing_is_rounded(row: Row) -> None:
    model, engine = exact_model(row.config.n_groups, row.config.weight_block[0]), SoftwareEngine(row.arch)
    z, y = exact_truth(row.config.n_groups, row.config.weight_block[0])
    assert torch.equal(y.bfloat16().double(), y) and (y != 0).double().mean() > 0.5
    for tp_size in row.config.tp_sizes():
        found = run(row, model, tp_size, engine)
        assert torch.equal(found.z.double(), z), tp_size
        for kind in SUM_KINDS:
            assert torch.equal(reduce_partials(found.partials, kind).double(), y), (tp_size, kind)


@cache
def exact_truth(groups: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """z ``[T, G*R]`` and y ``[T, hidden]`` of ``exact_model`` in float64."""
    model = exact_model(groups, b)
    wo_a = model.wo_a[0].double() * spread(model.wo_a[1].double(), b, RANK)
    z = torch.bmm(inverse_turned(model).transpose(0, 1), wo_a.transpose(1, 2)).transpose(0, 1).flatten(1)
    return z, z @ (model.wo_b[0].double() * spread(model.wo_b[1].double(), b, HIDDEN)).T


def inverse_turned(model: Model) -> torch.Tensor:
    """o float64 ``[T, G, 512]`` with neighbours of the last 64 lanes multiplied by the conjugate of cos + i sin."""
    cos, sin = model.table[model.positions].double().chunk(2, 1)
    nope, rope = model.o.double().split([448, 64], 2)
    pairs = torch.view_as_complex(rope.unflatten(2, (32, 2)).contiguous()) * torch.complex(cos, -sin)[:, None]
    return torch.cat([nope, torch.view_as_real(pairs).flatten(2)], 2)


def test_all_served_rows_are_there() -> None:
    found = {(row.arch, row.config.name, row.block) for row in ROWS}
    assert {
        (arch, preset, config.quant_group_size(arch)) for arch in ARCHS for preset, config in PRESETS.items()
    } <= found
    assert {row.block for row in ROWS if row.arch == "sm120"} == {32, 128}
    assert {size for row in ROWS for size in row.config.tp_sizes()} == {1, 2, 4, 8, 16}
