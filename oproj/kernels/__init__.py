"""The GPU kernels: inverse RoPE with FP8 block quantisation at the memory limit, and the quantiser of z."""

from oproj.kernels.inv_rope_quant import KernelUnavailable, fused_inv_rope_fp8_quant, unavailable_reason
from oproj.kernels.row_quantizer import allocate_rows, quantize_rows

__all__ = ["KernelUnavailable", "allocate_rows", "fused_inv_rope_fp8_quant", "quantize_rows", "unavailable_reason"]
