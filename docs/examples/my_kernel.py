"""A quantiser of one's own, in plain PyTorch, with a fault that a cosine or a relative norm does not see."""

from __future__ import annotations

import torch

import conformance
from oproj.activation import QuantizedActivation, empty_scales, empty_values, float_to_ue8m0, pack_ue8m0


class MyKernel(conformance.SoftwareImplementation):
    # Three roundings in the rotation where the served kernel fuses one away: right, and not the same bits.
    bitwise = ("wo_a", "wo_b", "reduce")
    nan_policy = "kept"  # a NaN gives a NaN code, where the served kernel gives 448

    def quantize(self, o, positions, cos_sin_cache, *, config):
        if not config.fp8_wo_a(self.arch):  # wo_a in BF16 takes rotated values; that path is not ours
            return super().quantize(o, positions, cos_sin_cache, config=config)
        nope, block = config.nope_dim, config.quant_group_size(self.arch)
        cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)  # [T, 1, 32] each
        even, odd = o[..., nope::2].float(), o[..., nope + 1 :: 2].float()
        turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1).flatten(-2)
        turned = turned.bfloat16().float()  # the fault: one rounding more
        x = torch.cat((o[..., :nope].float(), turned), dim=-1).view(len(o), config.n_groups, -1, block)
        amax = x.abs().nan_to_num().amax(-1).clamp(min=1e-10)
        scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))  # [T, G, blocks], powers of two
        codes = (x / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(2)

        packed = self.arch.tma_aligned_scales  # SM100, SM120: four UE8M0 bytes in an int32
        words = pack_ue8m0(float_to_ue8m0(scale)) if packed else scale
        data = empty_values(*codes.shape, codes.dtype, o.device).copy_(codes)
        return QuantizedActivation(data, empty_scales(*words.shape, packed, o.device).copy_(words))
