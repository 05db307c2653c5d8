"""Float64 reference of the attention output projection: textbook mathematics, torch only, to be read whole.

    o [T, H, D] --inverse_rope--> x [T, G, K] --grouped_wo_a--> z [T, G, R] --wo_b--> y [T, hidden]

T tokens, H heads of D values, G groups of H/G heads, K = H/G * D, R = o_lora_rank.
`formats` turns FP8 codes and their scales into float64, exactly. Nothing here rounds to a narrow format.
"""

from __future__ import annotations

from reference.formats import dequantize, e4m3_to_float64, ue8m0_to_float64, unpack_ue8m0
from reference.o_proj import grouped_wo_a, o_proj, wo_b
from reference.rope import Yarn, cos_sin, inverse_rope

__all__ = ["Yarn", "cos_sin", "dequantize", "e4m3_to_float64", "grouped_wo_a", "inverse_rope"]
__all__ += ["o_proj", "ue8m0_to_float64", "unpack_ue8m0", "wo_b"]
