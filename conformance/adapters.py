"""Implementations of other projects, for ``oproj run --implementation``.

``vllm``: vLLM's own fused quantiser, from an installed vLLM or from the folder of an unpacked wheel (``OPROJ_VLLM``).
``flashinfer``: FlashInfer's FP8 block products and its rotary embedding (`conformance.flashinfer_adapter`).
"""

from __future__ import annotations

import torch

from conformance import vllm_kernel
from conformance.case import CaseConfig
from conformance.flashinfer_adapter import FlashInferImplementation
from conformance.implementation import EngineImplementation
from oproj.activation import QuantizedActivation
from oproj.arch import Arch, get_arch
from oproj.engines import EngineUnavailable, get_engine
from oproj.engines.rope_checks import check_inv_rope

__all__ = ["FlashInferImplementation", "VllmImplementation"]


class VllmImplementation(EngineImplementation):
    """vLLM's quantiser before DeepGEMM's products, on the current GPU; ``wo_b`` and the sum are the engine's.

    arch: a row or its name, which must be the GPU's. ``origin`` says where the kernel comes from. Raises
    ``EngineUnavailable`` without such a GPU, without a DeepGEMM that works, or without vLLM's kernel.
    """

    def __init__(self, arch: Arch | str) -> None:
        row = get_arch(arch)
        try:
            engine = get_engine("deep_gemm", row)
            self.serve, self.origin = vllm_kernel.load()
        except EngineUnavailable as error:
            raise EngineUnavailable(f"implementation 'vllm' runs on a GPU alone: {error}") from error
        except (vllm_kernel.VllmUnavailable, ImportError) as error:
            raise EngineUnavailable(f"implementation 'vllm' has no kernel to run: {error}") from error
        super().__init__(engine)
        self.name = "vllm"

    def quantize(
        self, o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, *, config: CaseConfig
    ) -> QuantizedActivation:
        """vLLM's kernel behind the checks that it lacks; it has one rotation arithmetic, whatever the Case asks.

        Raises ``ValueError`` for a head_dim that is no power of two: the kernel's lanes need it, this project's do not.
        """
        block, packed = config.quant_group_size(self.arch), self.arch.tma_aligned_scales
        sizes = (config.n_groups, config.heads_per_group, config.nope_dim, config.rope_dim, block, packed)
        quantize = config.fp8_wo_a(self.arch)
        check_inv_rope(o, positions, cos_sin_cache, *sizes, quantize)
        head_dim = config.nope_dim + config.rope_dim
        if head_dim & (head_dim - 1):
            raise ValueError(f"head_dim={head_dim}; vLLM's kernel needs a power of two")
        data, scale = self.serve(o, positions, cos_sin_cache, *sizes, quantize)
        return QuantizedActivation(data, scale)
