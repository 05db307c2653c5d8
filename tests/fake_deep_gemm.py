"""Stand-ins for an installed DeepGEMM: same call shape, CPU tensors, and the ways in which real ones fail."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from oproj.arch import Arch, get_arch
from oproj.engines import deep_gemm, discovery
from oproj.engines.software import SoftwareEngine

CPU = torch.device("cpu")


class FakeDeepGemm(ModuleType):
    """Computes with the software engine. ``calls`` lists what was asked for; ``error`` is raised instead of an
    answer; ``spoil`` changes the result after it was computed."""

    __version__ = "9.9"
    __file__ = "/somewhere/deep_gemm/__init__.py"

    def __init__(self, arch: Arch | str, error: Exception | None = None, spoil: Any = None, name: str = "deep_gemm"):
        super().__init__(name)
        self.engine = SoftwareEngine(get_arch(arch))
        self.error, self.spoil = error, spoil
        self.calls: list[tuple[str, Any]] = []

    # The two signatures are those of sgl-deep-gemm 0.1.4.post1 (see SIGNATURES).
    def fp8_einsum(self, expr, a, b, d, c=None, recipe=(1, 128, 128)):
        self._answer("fp8_einsum", recipe, d, lambda: self.engine.fp8_einsum(expr, a, b, d, c, recipe=recipe))

    def fp8_gemm_nt(
        self, a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="", disable_ue8m0_cast=False
    ):
        self._answer("fp8_gemm_nt", recipe, d, lambda: self.engine.fp8_gemm_nt(a, b, d, c, recipe=recipe))

    def _answer(self, name: str, recipe: Any, d: torch.Tensor, compute: Any) -> None:
        self.calls.append((name, recipe))
        if self.error is not None:
            raise self.error
        compute()
        if self.spoil is not None:
            self.spoil(d)


SIGNATURES = {
    "fp8_einsum": "(expr, a, b, d, c=None, recipe=(1, 128, 128))",
    "fp8_gemm_nt": "(a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='', "
    "disable_ue8m0_cast=False)",
}


def install(monkeypatch, module, name="deep_gemm"):
    """Put ``module`` where an import of ``name`` finds it."""
    monkeypatch.setitem(sys.modules, name, module)
    return module


def pretend_gpu(monkeypatch, arch):
    """The current device is of row ``arch``; its tensors live on the CPU."""
    for place in (discovery, deep_gemm):
        monkeypatch.setattr(place, "current_gpu", lambda: (CPU, arch, ""))


def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
