"""The fused GPU kernel: inverse RoPE and FP8 block quantisation at the memory limit."""

from oproj.kernels.inv_rope_quant import KernelUnavailable, fused_inv_rope_fp8_quant, unavailable_reason

__all__ = ["KernelUnavailable", "fused_inv_rope_fp8_quant", "unavailable_reason"]
