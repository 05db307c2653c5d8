"""From a Case to tensors: attention output, positions, cos/sin table and both weights, the same bits on every machine.

Every tensor is built group by group from streams that carry the group's number in the whole model, so a rank of a
tensor-parallel Case holds exactly its slice of the unsharded tensors, and fewer tokens are the head of more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from conformance.case import Case, CaseConfig
from conformance.families import get_family
from conformance.streams import Exponents, Lanes, Stream, Tile
from oproj.arch import Arch, get_arch
from oproj.config import get_preset
from oproj.rope import cos_sin_rows
from oproj.weights import layout_weight_scales

_BOUNDARIES = (0, 1, 255, 256, 257, 4095, 4096, 4097, 65535, 65536, 65537)
_POISON = 2.0**100  # a dead head or slot that is read cannot go unseen
_SMALLEST_TABLE = 4096
WO_B_BLOCK = (128, 128)


@dataclass(frozen=True)
class LinearWeight:
    """One projection as the serving engine holds it after loading.

    weight: e4m3 ``[G, R, K]`` (wo_a) or ``[hidden, G*R]`` (wo_b) with ``weight_scale_inv`` in the layout of the arch
    (FP32 per block, or packed UE8M0 int32 per row), or BF16 with no scale. ``block``: rows x K of one scale in
    ``weight_scale_inv`` (1 row where packed).
    """

    weight: torch.Tensor
    weight_scale_inv: torch.Tensor | None
    block: tuple[int, int]

    def to(self, device: torch.device) -> LinearWeight:
        """The same weight on ``device``, strides kept."""
        scale = None if self.weight_scale_inv is None else move(self.weight_scale_inv, device)
        return replace(self, weight=move(self.weight, device), weight_scale_inv=scale)


@dataclass(frozen=True)
class Weights:
    """Both projections of one rank."""

    wo_a: LinearWeight
    wo_b: LinearWeight


@dataclass(frozen=True)
class Inputs:
    """All tensors of a Case. o BF16 ``[T, H, 512]`` (a slice where the Case has padded heads), positions int64 ``[T]``,
    cos_sin_cache FP32 ``[rows, 64]``."""

    case: Case
    o: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    weights: Weights

    @cached_property
    def config(self) -> CaseConfig:
        """The rank's dimensions."""
        return self.case.config

    def to(self, device: torch.device) -> Inputs:
        """The same tensors on ``device``, strides and padding heads kept."""
        if device.type == "cpu":
            return self
        weights = Weights(self.weights.wo_a.to(device), self.weights.wo_b.to(device))
        return replace(
            self,
            o=move(self.o, device),
            positions=self.positions.to(device),
            cos_sin_cache=self.cos_sin_cache.to(device),
            weights=weights,
        )


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device`` with its strides and with all of its storage, the padding behind a view included.

    ``Tensor.to`` would repack a view with gaps and lose both.
    """
    return tensor if tensor.device == device else duplicate(tensor, device)


def duplicate(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As `move`, always with storage of its own."""
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return storage.to(device, copy=True).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def build(case: Case) -> Inputs:
    """Build the tensors of ``case`` on the CPU."""
    positions = build_positions(case)
    weights = Weights(build_wo_a(case), build_wo_b(case))
    return Inputs(case, build_o(case), torch.from_numpy(positions), build_table(case, positions), weights)


def build_table(case: Case, positions: NDArray[np.int64]) -> torch.Tensor:
    """cos/sin table FP32 ``[rows, 64]``, rows a power of two. Rows that no token asks for stay zero: they cost no time,
    and an implementation that reads one of them cannot go unseen, however slowly the angles change."""
    rows = max(_SMALLEST_TABLE, 1 << int(positions.max(initial=0)).bit_length())
    table = np.zeros((rows, case.config.rope_dim), dtype=np.float32)
    used = np.unique(positions)
    table[used] = cos_sin_rows(case.rope_kind, used, case.config.rope_dim)
    return torch.from_numpy(table)


def build_positions(case: Case) -> NDArray[np.int64]:
    """Positions int64 ``[T]`` of the Case's position family."""
    stream, tokens = Stream(case.seed, "positions"), case.tokens
    last = get_preset(case.preset).max_position - 1
    if case.position_family == "start":
        return np.arange(tokens, dtype=np.int64)
    if case.position_family == "small":
        return stream.below("small", 4096, (tokens,))
    if case.position_family == "boundaries":
        # The seed turns the list: Cases of one token must not all sit at position 0, where every rotation is right.
        return np.resize(np.roll(np.array(_BOUNDARIES, dtype=np.int64), -(case.seed % len(_BOUNDARIES))), tokens)
    if case.position_family == "far":
        far = last - stream.below("far", 1 << 16, (tokens,))
        far[:1] = last
        return far
    pool = stream.below("pool", 1 << 16, (tokens // 2 + 1,))  # fewer than tokens, so some repeat
    return pool[stream.below("pick", len(pool), (tokens,))]


def build_o(case: Case) -> torch.Tensor:
    """Attention output BF16 ``[T, H, head_dim]``; the first heads of a poisoned wider buffer where the Case says so."""
    config, family = case.config, get_family(case.family)
    buffer = torch.full((case.tokens, case.padded_heads or config.n_heads, config.head_dim), _POISON).bfloat16()
    o = buffer[:, : config.n_heads]
    for local, group in enumerate(_groups(config)):
        lanes = Lanes(case.tokens, group, config.group_k, config.head_dim, config.rope_dim)
        values = torch.from_numpy(family.activations(Stream(case.seed, "o", group), lanes))
        heads = slice(local * config.heads_per_group, (local + 1) * config.heads_per_group)
        o[:, heads] = values.bfloat16().unflatten(1, (config.heads_per_group, config.head_dim))
    return o


def build_wo_a(case: Case) -> LinearWeight:
    """wo_a of this rank: e4m3 ``[G, R, K]``, or BF16 ``[G*R, K]`` dequantised exactly where the Case says BF16."""
    config, (rows, width) = case.config, case.config.weight_block
    codes, scales = _weights(case, "wo_a", config.o_lora_rank, config.group_k, (rows, width))
    if case.wo_a_dtype == "bf16":
        return LinearWeight(_dequantised(codes, scales, (rows, width)).flatten(0, 1), None, (0, 0))
    # The kernels take one granularity along K for both operands, so finer activations repeat the weight's scales.
    finer = scales.repeat_interleave(width // case.quant_group_size, -1)
    return _linear(get_arch(case.arch), codes, finer, (rows, case.quant_group_size))


def build_wo_b(case: Case) -> LinearWeight:
    """wo_b of this rank, always FP8 with 128x128 blocks: e4m3 ``[hidden, G*R]``, columns group-major."""
    config = case.config
    codes, scales = _weights(case, "wo_b", config.hidden_size, config.o_lora_rank, WO_B_BLOCK)
    # [G, hidden, R] -> [hidden, G*R]
    columns = codes.view(torch.uint8).transpose(0, 1).flatten(1).view(torch.float8_e4m3fn)
    return _linear(get_arch(case.arch), columns, scales.transpose(0, 1).flatten(1), WO_B_BLOCK)


def _groups(config: CaseConfig) -> range:
    """Numbers, in the whole model, of this rank's groups."""
    first = config.tp_rank * config.n_groups
    return range(first, first + config.n_groups)


def _weights(case: Case, name: str, rows: int, k: int, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes e4m3 ``[G, rows, K]`` and FP32 block scales ``[G, rows/block, K/block]`` of one projection."""
    family, groups = get_family(case.family), _groups(case.config)
    codes = np.empty((len(groups), rows, k), dtype=np.uint8)
    scales = []
    for local, group in enumerate(groups):
        stream = Stream(case.seed, name, group)
        codes[local], exponents = family.weights(stream, Tile(group, rows, k, block))
        scales.append(_scale_values(case, stream, exponents))
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(np.stack(scales))


def _scale_values(case: Case, stream: Stream, exponents: Exponents) -> NDArray[np.float32]:
    """2**exponent; with a random significand where an FP32-scale checkpoint is kept as it is (SM90 only)."""
    significand = np.ones(exponents.shape, dtype=np.float32)
    kept = get_preset(case.preset).checkpoint_scale == "fp32" and get_arch(case.arch).scale_format == "fp32"
    if kept and case.family != "exact":
        significand += np.ldexp(stream.below("significand", 1 << 23, exponents.shape).astype(np.float32), -23)
    return np.ldexp(significand, exponents.astype(np.int32))


def _linear(row: Arch, codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> LinearWeight:
    layout = layout_weight_scales(scales.contiguous(), arch=row, rows=codes.shape[-2], block=block)
    return LinearWeight(codes, layout, (1, block[1]) if row.tma_aligned_scales else block)


def _dequantised(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """BF16 code * scale, exact: four significand bits times a power of two."""
    spread = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return (codes.float() * spread[..., : codes.shape[-2], : codes.shape[-1]]).bfloat16()
