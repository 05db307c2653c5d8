"""Quantised activations and their exact memory layouts.

Values: e4m3 ``[T, G, D]`` stored group-major (``[G, T, D]``), strides ``(D, T*D, 1)``. Scales: MN-major, the token
index has stride 1 and a column of ``Ta = 4*ceil(T/4)`` words is one 16-byte-aligned TMA row. Sources: vLLM 0.33.0
``deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py`` and DeepGEMM 54e2261 ``csrc/utils/layout.hpp``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

UE8M0_BIAS = 127
UE8M0_NAN = 255


@dataclass
class QuantizedActivation:
    """Codes with their scales, as one kernel hands them to the next (vLLM ``fusion/quant_activation.py``).

    data: ``[T, slots, K]`` float8_e4m3fn. scale: FP32 ``[T, slots, K/block]`` or packed UE8M0 int32
    ``[T, slots, K/(4*block)]``. Layout and padding are the producer's; consumers slice ``[:, :n_groups]``.
    """

    data: torch.Tensor
    scale: torch.Tensor
    orig_dtype: torch.dtype = torch.bfloat16
    orig_shape: torch.Size | None = None
    quant_key: Any = None

    def sliced(self, n_groups: int) -> QuantizedActivation:
        """The first ``n_groups`` slots of data and scale (views).

        Raises ``ValueError`` when fewer slots are there or data and scale disagree on their number.
        """
        if n_groups < 1:
            raise ValueError(f"n_groups={n_groups} must be at least 1")
        if self.data.dim() != 3 or self.scale.dim() != 3 or self.data.shape[:2] != self.scale.shape[:2]:
            raise ValueError(
                f"data {tuple(self.data.shape)} and scale {tuple(self.scale.shape)} must be [T, slots, *] with equal "
                "T and slots"
            )
        if self.data.shape[1] < n_groups:
            raise ValueError(f"n_groups={n_groups} but the activation has {self.data.shape[1]} group slots")
        return replace(self, data=self.data[:, :n_groups], scale=self.scale[:, :n_groups])

    def weak_ref(self) -> QuantizedActivation:
        """A copy whose tensors alias the storage without autograd history (for CUDA-graph replay)."""
        return replace(self, data=self.data.detach(), scale=self.scale.detach())


def tma_aligned_size(n: int, element_size: int) -> int:
    """``n`` rounded up so that ``n * element_size`` is a multiple of 16 bytes (DeepGEMM ``get_tma_aligned_size``).

    Raises ``ValueError`` when ``element_size`` does not divide 16.
    """
    if element_size <= 0 or 16 % element_size:
        raise ValueError(f"element_size={element_size} must divide 16")
    step = 16 // element_size
    return -(-n // step) * step


def scale_columns(k: int, block: int, packed: bool) -> int:
    """Columns of a scale tensor over ``k`` elements: one FP32 a block, or one int32 word for four blocks."""
    blocks = -(-k // block)
    return -(-blocks // 4) if packed else blocks


def empty_values(tokens: int, groups: int, k: int, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """Uninitialised values ``[T, G, K]`` with strides ``(K, T*K, 1)``."""
    return torch.empty((groups, tokens, k), dtype=dtype, device=device).transpose(0, 1)


def empty_scales(
    tokens: int, groups: int, columns: int, packed: bool, device: Any = None, *, zero_padding: bool = True
) -> torch.Tensor:
    """Scales ``[T, G, columns]`` with strides ``(1, columns*Ta, Ta)``; rows ``T..Ta-1`` behind the view are zero.

    ``zero_padding=False`` leaves them to a kernel that writes them itself.
    """
    dtype = torch.int32 if packed else torch.float32
    aligned = tma_aligned_size(tokens, 4)
    buffer = torch.empty((groups, columns, aligned), dtype=dtype, device=device)
    if zero_padding:
        buffer[:, :, tokens:].zero_()
    # as_strided keeps the K-block stride at Ta for T = 1 and G = 1 too, which DeepGEMM checks exactly.
    return buffer.as_strided((tokens, groups, columns), (1, columns * aligned, aligned))


def pack_ue8m0(exponent_bytes: torch.Tensor) -> torch.Tensor:
    """Pack UE8M0 bytes ``[..., blocks]`` (uint8) into int32 words ``[..., blocks/4]``, block 4j in the lowest byte.

    Raises ``TypeError`` for another dtype, ``ValueError`` when the block count is not a multiple of 4.
    """
    if exponent_bytes.dtype != torch.uint8:
        raise TypeError(f"exponent_bytes has dtype {exponent_bytes.dtype}; UE8M0 bytes are uint8")
    if exponent_bytes.shape[-1] % 4:
        raise ValueError(f"{exponent_bytes.shape[-1]} blocks do not fill int32 words; need a multiple of 4")
    quads = exponent_bytes.unflatten(-1, (exponent_bytes.shape[-1] // 4, 4)).to(torch.int64)
    shifts = torch.tensor([0, 8, 16, 24], device=exponent_bytes.device)
    words = (quads << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_ue8m0(words: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes ``[..., 4*words]`` (uint8) of packed int32 words ``[..., words]``, any strides."""
    if words.dtype != torch.int32:
        raise TypeError(f"words has dtype {words.dtype}; packed UE8M0 scales are int32")
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8).flatten(-2)


def ue8m0_to_float(exponent_bytes: torch.Tensor) -> torch.Tensor:
    """FP32 values ``2**(byte - 127)`` of UE8M0 bytes; byte 0 is ``2**-127`` (subnormal), byte 255 is NaN.

    Raises ``TypeError`` for another dtype than uint8: packed words must be unpacked first.
    """
    if exponent_bytes.dtype != torch.uint8:
        raise TypeError(f"exponent_bytes has dtype {exponent_bytes.dtype}; UE8M0 bytes are uint8")
    bits = exponent_bytes.to(torch.int32)
    patterns = torch.where(bits == 0, torch.full_like(bits, 0x00400000), bits << 23)
    patterns = torch.where(bits == UE8M0_NAN, torch.full_like(bits, 0x7FC00000), patterns)
    return patterns.view(torch.float32)


def float_to_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes of FP32 powers of two.

    Raises ``ValueError`` naming the first scale that is not a positive power of two in ``2**-127 .. 2**127``: the
    kernels that pack by exponent bits would shrink such a scale in silence (sglang #39193).
    """
    if scale.dtype != torch.float32:
        raise TypeError(f"scale has dtype {scale.dtype}; expected float32")
    bits = scale.contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    exact = (bits > 0) & ((bits & 0x7FFFFF) == 0) & (exponent < 255) | (bits == 0x00400000)
    if not bool(exact.all()):
        index = tuple(int(i) for i in (~exact).nonzero()[0])
        raise ValueError(
            f"scale{list(index)} = {float(scale[index])!r} is not a power of two in 2**-127..2**127; UE8M0 holds no "
            "mantissa"
        )
    return exponent.to(torch.uint8)
