"""Forms of a stored weight, and what becomes of each on an architecture.

Forms: e4m3 with one scale (E8M0 byte or FP32) a 128 x 128 block (V4), e4m3 with E8M0 scales a 32 x 32 block (V4.1),
BF16. Where they go, as vLLM 0.33.0 ``quantization/utils/fp8_utils`` leaves them:

- E8M0 scales are not touched: they become FP32 powers of two (SM90) or packed words (SM100, SM120).
- FP32 scales with a mantissa cannot be packed. ``requantize=True`` makes them powers of two, which is lossy; without
  it packed rows refuse them, and SM90 keeps them (the serving engine requantises there too unless told otherwise).
- 32 x 32 blocks where a row does not serve them (SM90, SM120) are dequantised to BF16.
- E8M0 byte 255 is NaN in the OCP MX standard and +Inf in the serving engine, which shifts the byte into the FP32
  exponent; byte 0 is 2^-127 there and 0.0 here. The two readings differ, so both bytes are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from oproj.arch import Arch
from oproj.config import CheckpointScale
from oproj.safetensors_files import CheckpointError
from oproj.weights import layout_weight_scales, requantize_to_ue8m0

SCALE_DTYPES = {"e8m0": torch.float8_e8m0fnu, "fp32": torch.float32}


class Tensorlike(Protocol):
    """A tensor, or a stored one of which only the asked-for slice is read."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class WeightReport:
    """What became of one weight between checkpoint and kernel. ``lossy``: the served numbers are not the stored ones.

    The two distances compare dequantised weights: ``max |new - old| / |old|`` and ``||new - old||_F / ||old||_F``.
    """

    tensor: str
    stored: str  # e4m3+e8m0, e4m3+fp32 or bf16
    action: str  # kept, requantized or dequantized
    max_relative_change: float = 0.0
    relative_frobenius: float = 0.0

    @property
    def lossy(self) -> bool:
        return self.max_relative_change != 0.0


@dataclass(frozen=True)
class ArchWeight:
    """One projection as a kernel reads it: ``weight`` and the scales under the name that the serving engine uses."""

    weight: torch.Tensor  # e4m3 or BF16: [G, R, K] for wo_a, [hidden, K] for wo_b
    scale: torch.Tensor | None
    scale_name: str
    report: WeightReport

    def state_dict(self) -> dict[str, torch.Tensor]:
        """``{"weight": ...}`` and, for FP8, ``weight_scale_inv`` (128 x 128) or ``weight_scale`` (32 x 32)."""
        return {"weight": self.weight} | ({} if self.scale is None else {self.scale_name: self.scale})


def e8m0_to_float(scale: torch.Tensor, name: str = "scale") -> torch.Tensor:
    """FP32 ``2^(byte - 127)`` of E8M0 scales. ``CheckpointError`` names the first byte 0 or 255 (see module text)."""
    if scale.dtype != torch.float8_e8m0fnu:
        raise TypeError(f"{name} has dtype {scale.dtype}; expected float8_e8m0fnu")
    stored = scale.contiguous().view(torch.uint8)
    bad = (stored == 0) | (stored == 255)
    if bad.any():
        at = [int(i) for i in bad.nonzero()[0]]
        byte = int(stored[tuple(at)])
        meaning = "NaN in OCP MX, +Inf as served" if byte else "2^-127 in OCP MX, 0.0 as served on FP32 scales"
        raise CheckpointError(f"{name}{at} is E8M0 byte {byte}: {meaning}; no weight scale of a sound checkpoint")
    return (stored.to(torch.int32) << 23).view(torch.float32)


def check_stored(
    weight: Tensorlike | None,
    scale: Tensorlike | None,
    shape: tuple[int, int],
    block: tuple[int, int],
    checkpoint_scale: CheckpointScale,
    names: tuple[str, str],
) -> None:
    """``CheckpointError`` unless weight (e4m3 or BF16, ``shape``) and scale (FP8 only, one a block) are as expected."""
    if weight is None:
        raise CheckpointError(f"{names[0]} is missing; expected e4m3 or BF16 {shape}")
    if weight.dtype not in (torch.float8_e4m3fn, torch.bfloat16):
        raise CheckpointError(f"{names[0]} has dtype {weight.dtype}; expected float8_e4m3fn or bfloat16")
    if tuple(weight.shape) != shape:
        raise CheckpointError(f"{names[0]} has shape {tuple(weight.shape)}; expected {shape}")
    if weight.dtype == torch.bfloat16:
        if scale is not None:
            raise CheckpointError(f"{names[1]} is there although {names[0]} is bfloat16; expected no scale")
        return
    dtype, blocks = SCALE_DTYPES[checkpoint_scale], (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if scale is None:
        raise CheckpointError(f"{names[1]} is missing; expected {dtype} {blocks} for the FP8 {names[0]}")
    if scale.dtype != dtype:
        raise CheckpointError(
            f"{names[1]} has dtype {scale.dtype}; expected {dtype} (checkpoint_scale={checkpoint_scale!r})"
        )
    if tuple(scale.shape) != blocks:
        raise CheckpointError(
            f"{names[1]} has shape {tuple(scale.shape)}; expected {blocks}, "
            f"one a {block[0]}x{block[1]} block of {shape}"
        )


def stays_fp8(arch: Arch, block: tuple[int, int]) -> bool:
    return block != (32, 32) or arch.mxfp8_wo_a


def to_arch(
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    arch: Arch,
    block: tuple[int, int],
    requantize: bool,
    names: tuple[str, str],
) -> ArchWeight:
    """Codes ``[..., N, K]`` and block scales of one rank in the layout of ``arch``."""
    # A copy: a slice of a mapped file may start at any address, and kernels need 16-byte alignment.
    codes = codes.clone(memory_format=torch.contiguous_format)
    if scale is None:
        return ArchWeight(codes, None, "", WeightReport(names[0], "bf16", "kept"))
    _refuse_nan(codes, names[0])
    e8m0 = scale.dtype == torch.float8_e8m0fnu
    values = e8m0_to_float(scale, names[1]) if e8m0 else _positive(scale, names[1])
    stored = "e4m3+e8m0" if e8m0 else "e4m3+fp32"
    if not stays_fp8(arch, block):
        return _dequantized(codes, values, block, stored, names[0])
    report = WeightReport(names[0], stored, "kept")
    if not e8m0 and requantize:
        new = requantize_to_ue8m0(codes, values, block)
        codes, values = new.codes, new.scale
        report = WeightReport(names[0], stored, "requantized", new.max_relative_change, new.relative_frobenius)
    elif not e8m0 and arch.tma_aligned_scales and bool((values.frexp().mantissa != 0.5).any()):
        raise CheckpointError(
            f"{names[1]} has FP32 scales that are no powers of two and {arch.name} packs UE8M0; the weight must be "
            "requantised, which is lossy: pass requantize=True to do so and read the report"
        )
    laid_out = layout_weight_scales(values, arch=arch, rows=codes.shape[-2], block=block)
    return ArchWeight(codes, laid_out, "weight_scale" if block == (32, 32) else "weight_scale_inv", report)


def _dequantized(
    codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], stored: str, name: str
) -> ArchWeight:
    """BF16 ``code * scale``: exact for powers of two unless BF16 under- or overflows; the report says what it cost."""
    per_row = scale.repeat_interleave(block[0], dim=-2)[..., : codes.shape[-2], :]
    exact = codes.double() * per_row.repeat_interleave(block[1], dim=-1)[..., : codes.shape[-1]].double()
    weight = exact.to(torch.float32).to(torch.bfloat16)
    if not bool(weight.isfinite().all()):
        raise CheckpointError(f"{name} dequantised exceeds the range of bfloat16")
    change = (weight.double() - exact).abs()
    largest = float((change / exact.abs()).nan_to_num(nan=0.0).max())
    frobenius = float(change.norm() / exact.norm()) if exact.any() else 0.0
    return ArchWeight(weight, None, "", WeightReport(name, stored, "dequantized", largest, frobenius))


def _positive(scale: torch.Tensor, name: str) -> torch.Tensor:
    bad = ~((scale > 0) & (scale < torch.inf))
    if bad.any():
        at = [int(i) for i in bad.nonzero()[0]]
        raise CheckpointError(f"{name}{at} = {float(scale[tuple(at)])!r}; expected a positive finite number")
    return scale.clone(memory_format=torch.contiguous_format)


def _refuse_nan(codes: torch.Tensor, name: str) -> None:
    nan = (codes.view(torch.uint8) & 0x7F) == 0x7F
    if nan.any():
        raise CheckpointError(f"{name}{[int(i) for i in nan.nonzero()[0]]} (of this rank) is an e4m3 NaN")
