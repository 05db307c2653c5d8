"""Weight scales from block form to the layout that each architecture's kernel reads.

Sources: vLLM 0.33.0 ``quantization/utils/fp8_utils`` and DeepGEMM 54e2261 ``csrc/utils/layout.hpp``.
"""

from __future__ import annotations

import torch

from oproj.activation import float_to_ue8m0, pack_ue8m0, tma_aligned_size
from oproj.arch import Arch, get_arch


def layout_weight_scales(
    scale: torch.Tensor, *, arch: Arch | str, rows: int, block: tuple[int, int] = (128, 128)
) -> torch.Tensor:
    """FP32 block scales ``[..., ceil(rows/block[0]), K/block[1]]`` in the layout of ``arch``.

    FP32 rows (SM90) keep them contiguous. Packed rows repeat each scale for its rows and pack four K blocks a word:
    int32 ``[..., rows, K/(4*block[1])]``, row index with stride 1 and columns of ``4*ceil(rows/4)`` words. Leading
    dims (groups) are kept. Raises ``TypeError`` for another dtype, ``ValueError`` where the block rows do not cover
    ``rows`` or a scale is not a power of two on a packed row.
    """
    if scale.dtype != torch.float32:
        raise TypeError(f"scale has dtype {scale.dtype}; expected float32")
    if scale.dim() < 2 or scale.shape[-2] != -(-rows // block[0]):
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}; {rows} rows in blocks of {block[0]} need {-(-rows // block[0])} "
            "scale rows"
        )
    if not get_arch(arch).tma_aligned_scales:
        return scale.contiguous()
    per_row = float_to_ue8m0(scale).repeat_interleave(block[0], dim=-2)[..., :rows, :]
    words = pack_ue8m0(per_row)
    *batch, _, columns = words.shape
    buffer = torch.zeros((*batch, columns, tma_aligned_size(rows, 4)), dtype=torch.int32, device=scale.device)
    buffer[..., :rows] = words.transpose(-1, -2)
    return buffer.transpose(-1, -2)[..., :rows, :]
