"""LoRA on the grouped projection: the delta of group g is ``(x_g A^T) B_g^T``.

A is shared by the groups and B holds one block of rows a group, so an ordinary column-parallel LoRA on the flat input
would add G x G cross terms (sglang #36579): the input of group h times the rows of group g.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Adapter:
    """One adapter on one rank: ``a`` FP32 ``[r, K]``, ``b`` FP32 ``[G, R, r]`` of the rank's groups, and its factor."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class GroupedLora:
    """The adapters of one rank: ``local`` groups from ``first`` on, of ``n_groups``; K inputs and R outputs a group."""

    def __init__(self, k: int, o_lora_rank: int, n_groups: int, first: int, local: int) -> None:
        self.k, self.o_lora_rank, self.n_groups = k, o_lora_rank, n_groups
        self.mine = slice(first, first + local)
        self.adapters: dict[str, Adapter] = {}

    @property
    def active(self) -> bool:
        """Whether any adapter has a factor other than 0."""
        return any(adapter.scale != 0.0 for adapter in self.adapters.values())

    def add(self, name: str, a: torch.Tensor, b: torch.Tensor, *, scale: float = 1.0, device: Any = None) -> None:
        """Add a ``[r, K]`` and b ``[n_groups*R, r]`` of all ranks (this rank's rows of b are kept), any r >= 1.

        BF16, FP16 or FP32, copied as FP32 (exact). Raises ``ValueError``/``TypeError`` that names the tensor, and
        ``ValueError`` for a name that is taken or a factor that is not finite.
        """
        if name in self.adapters:
            raise ValueError(f"adapter {name!r} is there already; remove it first")
        for label, tensor in (("a", a), ("b", b)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"adapter {name!r}: {label} is {type(tensor).__name__}; expected a torch.Tensor")
        rank = a.shape[0] if a.dim() else 0
        for label, tensor, shape in (("a", a, (rank, self.k)), ("b", b, (self.n_groups * self.o_lora_rank, rank))):
            if tensor.dtype not in DTYPES:
                raise TypeError(f"adapter {name!r}: {label} has dtype {tensor.dtype}; expected BF16, FP16 or FP32")
            if tuple(tensor.shape) != shape or rank < 1:
                raise ValueError(f"adapter {name!r}: {label} has shape {tuple(tensor.shape)}; expected {shape}, r >= 1")
        rows = b.detach().unflatten(0, (self.n_groups, self.o_lora_rank))[self.mine]
        kept_a, kept_b = (t.to(device=device, dtype=torch.float32, copy=True) for t in (a.detach(), rows))
        self.adapters[name] = Adapter(kept_a, kept_b, _finite(name, scale))

    def remove(self, name: str) -> None:
        """Forget an adapter; ``KeyError`` lists those that are there."""
        self._known(name)
        del self.adapters[name]

    def rescale(self, name: str, scale: float) -> None:
        """Give an adapter another factor (0 switches it off)."""
        self.adapters[name] = replace(self._known(name), scale=_finite(name, scale))

    def _known(self, name: str) -> Adapter:
        if name not in self.adapters:
            raise KeyError(f"adapter {name!r} is not there; there are: {', '.join(self.adapters) or 'none'}")
        return self.adapters[name]

    @torch.no_grad()
    def delta(self, x: torch.Tensor) -> torch.Tensor:
        """FP32 ``[T, G, R]``, contiguous: the sum over adapters, in the order they were added. x: ``[T, G, K]``.

        ``x_g a^T`` is rounded to FP32, then times ``b_g^T`` to FP32, then times the factor and added in FP32. A GPU
        sums the products in FP32 (no TF32 unless torch is told so); a CPU in float64 with one rounding to FP32.
        """
        local = self.mine.stop - self.mine.start
        if x.dim() != 3 or tuple(x.shape[1:]) != (local, self.k):
            raise ValueError(f"x has shape {tuple(x.shape)}; expected [T, {local}, {self.k}]")
        total = torch.zeros((x.shape[0], local, self.o_lora_rank), dtype=torch.float32, device=x.device)
        wide = torch.float32 if x.device.type == "cuda" else torch.float64
        groups = x.to(wide).transpose(0, 1)
        for adapter in self.adapters.values():
            if adapter.scale == 0.0:
                continue
            a, b = adapter.a.to(x.device, wide), adapter.b.to(x.device, wide)
            low = torch.matmul(groups, a.T).to(torch.float32)  # [G, T, r]
            total += adapter.scale * torch.bmm(low.to(wide), b.mT).to(torch.float32).transpose(0, 1)
        return total


def _finite(name: str, scale: float) -> float:
    if not math.isfinite(scale):
        raise ValueError(f"adapter {name!r}: scale={scale!r} must be finite")
    return float(scale)
