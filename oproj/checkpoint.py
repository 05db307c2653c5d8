"""Weights of the output projection from a checkpoint to what each architecture's kernels read, for one rank.

What happens to each stored form is in ``checkpoint_forms``.

Names. Published DeepSeek-V4 files: ``layers.N.attn.wo_a.{weight,scale}`` (listing of DeepSeek-V4-Pro: F8_E4M3
``[16384, 4096]``, F8_E8M0 ``[128, 32]``; ``mtp.0.attn...`` for the extra layer). Transformers' ``deepseek_v4``:
``model.layers.N.self_attn.o_a_proj.{weight,weight_scale_inv}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oproj.arch import Arch, get_arch
from oproj.checkpoint_forms import (
    ArchWeight,
    Tensorlike,
    WeightReport,
    check_stored,
    e8m0_to_float,
    stays_fp8,
    to_arch,
)
from oproj.config import CheckpointScale, OProjConfig
from oproj.safetensors_files import CheckpointError, open_checkpoint

__all__ = ["ArchWeight", "CheckpointError", "OProjWeights", "WeightReport", "e8m0_to_float", "load_o_proj"]
__all__ += ["local_groups", "tensor_names", "wo_a_for_arch", "wo_b_for_arch"]

NAMINGS = {
    "deepseek": ("{layer}.attn.wo_{which}", "scale"),
    "transformers": ("model.{layer}.self_attn.o_{which}_proj", "weight_scale_inv"),
}


@dataclass(frozen=True)
class OProjWeights:
    """Both projections of one layer for one rank."""

    wo_a: ArchWeight
    wo_b: ArchWeight

    @property
    def reports(self) -> tuple[WeightReport, WeightReport]:
        return self.wo_a.report, self.wo_b.report


def wo_a_for_arch(
    weight: Tensorlike,
    scale: Tensorlike | None,
    *,
    arch: Arch | str,
    n_groups: int,
    o_lora_rank: int,
    k: int,
    block: tuple[int, int] = (128, 128),
    checkpoint_scale: CheckpointScale = "e8m0",
    tp_size: int = 1,
    tp_rank: int = 0,
    requantize: bool = False,
    names: tuple[str, str] = ("wo_a.weight", "wo_a.scale"),
) -> ArchWeight:
    """Rank ``tp_rank``'s groups of the whole ``wo_a`` (``n_groups`` of all ranks) in the layout of ``arch``.

    weight e4m3 or BF16 ``[n_groups*R, K]``; scale ``[n_groups*R/b, K/b]``, ``None`` for BF16. Result: weight
    ``[n_groups/tp_size, R, K]``, scale FP32 ``[G, R/b, K/b]`` or int32 ``[G, R, K/(4b)]``. Raises ``CheckpointError``
    that names tensor, found and expected shape, dtype or value; ``ValueError`` where ``tp_size`` does not divide.
    """
    groups = local_groups(n_groups, tp_size, tp_rank)
    check_stored(weight, scale, (n_groups * o_lora_rank, k), block, checkpoint_scale, names)
    fp8 = weight.dtype == torch.float8_e4m3fn
    if fp8 and o_lora_rank % block[0]:
        raise CheckpointError(f"{names[0]}: o_lora_rank={o_lora_rank} is not a multiple of the {block[0]}-row blocks")
    first = tp_rank * groups * o_lora_rank
    rows = slice(first, first + groups * o_lora_rank)
    mine = weight[rows].reshape(groups, o_lora_rank, k)
    blocks = None
    if scale is not None:
        scale_rows = slice(rows.start // block[0], rows.stop // block[0])
        blocks = scale[scale_rows].reshape(groups, o_lora_rank // block[0], -(-k // block[1]))
    return to_arch(mine, blocks, get_arch(arch), block, requantize, names)


def wo_b_for_arch(
    weight: Tensorlike,
    scale: Tensorlike | None,
    *,
    arch: Arch | str,
    hidden_size: int,
    k: int,
    block: tuple[int, int] = (128, 128),
    checkpoint_scale: CheckpointScale = "e8m0",
    tp_size: int = 1,
    tp_rank: int = 0,
    requantize: bool = False,
    names: tuple[str, str] = ("wo_b.weight", "wo_b.scale"),
) -> ArchWeight:
    """Rank ``tp_rank``'s columns of the whole ``wo_b`` (``k`` of all ranks, n_groups*R) in the layout of ``arch``.

    weight e4m3 or BF16 ``[hidden, k]``; scale ``[ceil(hidden/b), k/b]``. Result: weight ``[hidden, k/tp_size]``,
    scale FP32 ``[ceil(hidden/b), K/b]`` or int32 ``[hidden, K/(4b)]`` as DeepGEMM reads it. Raises as
    ``wo_a_for_arch``, and ``CheckpointError`` where a rank's columns split a block or a packed word.
    """
    _check_rank(tp_size, tp_rank)
    if k % tp_size:
        raise ValueError(f"tp_size={tp_size} does not divide K={k} of wo_b")
    check_stored(weight, scale, (hidden_size, k), block, checkpoint_scale, names)
    row, local = get_arch(arch), k // tp_size
    columns = slice(tp_rank * local, (tp_rank + 1) * local)
    mine, blocks = weight[:, columns], None
    if scale is not None:
        step = block[1] * (4 if row.tma_aligned_scales and stays_fp8(row, block) else 1)
        if local % step:
            raise CheckpointError(f"{names[0]}: a rank's K={local} (tp_size={tp_size}) is not a multiple of {step}")
        blocks = scale[:, columns.start // block[1] : columns.stop // block[1]]
    return to_arch(mine, blocks, row, block, requantize, names)


def load_o_proj(
    path: str | Path | Mapping[str, torch.Tensor],
    layer: int | str,
    config: OProjConfig,
    arch: Arch | str,
    *,
    requantize: bool = False,
) -> OProjWeights:
    """``wo_a`` and ``wo_b`` of one layer from safetensors, of which only this rank's slice is read.

    path: a ``.safetensors`` file, an index ``.json``, a folder with either, or tensors by name. layer: a number, or
    a prefix such as ``"mtp.0"``. config: the rank's own (``config.shard(tp_size, rank)``) or a whole one. Raises
    ``CheckpointError`` that names file, tensor, found and expected; ``FileNotFoundError`` for a path that is not there.
    """
    stored = path if isinstance(path, Mapping) else open_checkpoint(Path(path))
    names = tensor_names(stored, layer)
    shared: dict[str, Any] = {
        "arch": get_arch(arch),
        "block": config.weight_block,
        "checkpoint_scale": config.checkpoint_scale,
        "tp_size": config.tp_size,
        "tp_rank": config.tp_rank,
        "requantize": requantize,
    }
    groups = config.n_groups * config.tp_size
    a: Any
    b: Any
    a, b = (tuple(stored.get(name) for name in names[which]) for which in "ab")
    wo_a = wo_a_for_arch(
        *a, n_groups=groups, o_lora_rank=config.o_lora_rank, k=config.group_k, names=names["a"], **shared
    )
    wo_b = wo_b_for_arch(*b, hidden_size=config.hidden_size, k=groups * config.o_lora_rank, names=names["b"], **shared)
    return OProjWeights(wo_a, wo_b)


def tensor_names(stored: Mapping[str, Any], layer: int | str) -> dict[str, tuple[str, str]]:
    """``{"a": (weight, scale), "b": ...}`` in the naming that ``stored`` uses; ``CheckpointError`` if none or both."""
    prefix = f"layers.{layer}" if isinstance(layer, int) else layer
    found, looked_for = [], []
    for stem, scale in NAMINGS.values():
        bases = {which: stem.format(layer=prefix, which=which) for which in "ab"}
        names = {which: (f"{base}.weight", f"{base}.{scale}") for which, base in bases.items()}
        looked_for.append(names["a"][0])
        if any(name in stored for pair in names.values() for name in pair):
            found.append(names)
    if len(found) != 1:
        problem = f"holds both {' and '.join(looked_for)}" if found else f"has neither {' nor '.join(looked_for)}"
        raise CheckpointError(f"the checkpoint {problem} (layer={layer!r}, {len(stored)} tensors)")
    return found[0]


def local_groups(n_groups: int, tp_size: int, tp_rank: int = 0) -> int:
    """Groups of one rank; ``ValueError`` where ``tp_size`` does not divide ``n_groups`` or the rank is out of range."""
    _check_rank(tp_size, tp_rank)
    if n_groups < 1 or n_groups % tp_size:
        raise ValueError(f"tp_size={tp_size} does not divide n_groups={n_groups}; every rank needs whole groups")
    return n_groups // tp_size


def _check_rank(tp_size: int, tp_rank: int) -> None:
    if tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank={tp_rank} must lie in 0..tp_size-1, tp_size={tp_size} must be at least 1")
