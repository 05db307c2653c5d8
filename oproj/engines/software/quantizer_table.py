"""Every block quantiser of the path as one row of numbers over one bit model, ``quant_lanes``.

    amax  = max(floor, |y| over the block)
    scale = smallest 2^e with 448 * 2^e >= amax   "ceil"
            2^ceil(log2(amax * fl(1/448)))        "log2": in FP32, up to 38 ulps above 448 * 2^e an octave lower
            amax / 448                            "divide": FP32, one rounding
            amax * fl(1/448)                      "multiply": FP32, one rounding
    code  = e4m3 nearest even of y / scale, clamped to +-448

Power-of-two scales leave no rounding but the last one, so only FP32 scales tell a quotient ``y / scale`` from
``y * fl(1/scale)``. Where a source does not say what becomes of a NaN or an Inf, the row has no answer and the caller
gets an error, not a guess. ``BOUND_ONLY`` names quantisers whose arithmetic no source states to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oproj.engines.software.quant_lanes import Rule

BLOCKS = (32, 64, 128)
SCALE_RULES = ("ceil", "log2", "divide", "multiply")


@dataclass(frozen=True)
class Quantizer:
    """A block quantiser as numbers."""

    name: str
    source: str  # project, version or commit, file
    evidence: str  # measured | published | assumed
    amax_floor: float
    scale_rule: str  # one of SCALE_RULES
    nan_code: int | None  # of a NaN and of Inf/Inf; None: not established, NaN is refused
    inf_stated: bool = True  # False: a block with an Inf is refused
    nan_spreads: bool = False  # a NaN is the block's maximum instead of being ignored by it
    min_field: int = 0  # bounds of a power-of-two scale's exponent field
    max_field: int = 255
    divides_codes: bool = True  # y / scale; False: y * fl(1/scale)
    shape: str = "rows"  # blocks are 1 x b ("rows"), b x b ("tiles") or b x 1 ("channels") of [M, K]
    blocks: tuple[int, ...] = BLOCKS
    pads: bool = False  # a last block may be short
    inputs: tuple[str, ...] = ("bfloat16", "float32")
    formats: tuple[str, ...] = ("fp32",)  # of scales: "fp32", "packed"
    mn_major: bool = False  # scales [M, blocks] with strides (1, 4*ceil(M/4)) instead of contiguous
    rotations: tuple[str, ...] = ()  # where inverse RoPE is part of it: how its products are fused

    @property
    def fp32_scale(self) -> bool:
        """Whether scales have a mantissa."""
        return self.scale_rule in ("divide", "multiply")

    def rule(self) -> Rule:
        """What the kernels of ``quant_lanes`` take. A NaN that is refused spreads, so that its scale tells of it."""
        return Rule(
            floor_bits=np.float32(self.amax_floor).view(np.int32),
            log2_rule=self.scale_rule == "log2",
            min_field=self.min_field,
            max_field=self.max_field,
            fp32_scale=self.fp32_scale,
            divides=self.scale_rule == "divide",
            divides_codes=self.divides_codes,
            nan_spreads=self.nan_spreads or self.nan_code is None,
            nan_code=0x7F if self.nan_code is None else self.nan_code,
        )


_DEEP_GEMM = (
    "DeepGEMM 54e2261 deep_gemm/utils/math.py {}; NaN and Inf as with torch 2.13 on a CPU, whose cast saturates"
)
_GROUP = "vLLM 0.33.0 csrc per_token_group_quant.cu{}"
_TRITON = "vLLM 0.33.0 quantization/utils/fp8_utils, Triton kernel for strided inputs{}; NaN and Inf as vllm-fused"


def _deep_gemm(name: str, function: str, **changes: object) -> tuple[Quantizer, Quantizer]:
    """A caster with UE8M0 scales (exponent field clamped to 1..254) and its twin with FP32 scales."""
    common: dict = {"amax_floor": 1e-4, "nan_code": 0x7F, "nan_spreads": True, "divides_codes": False}
    source = _DEEP_GEMM.format(function)
    ue8m0 = Quantizer(name, source, "published", scale_rule="ceil", min_field=1, max_field=254, **{**common, **changes})
    fp32 = Quantizer(
        f"{name}-fp32", source, "published", scale_rule="divide", **{**common, **changes, "formats": ("fp32",)}
    )
    return ue8m0, fp32


_ROWS = (
    Quantizer(
        "vllm-fused",
        "vLLM 0.33.0 deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py, as Triton 3.9 compiles it (fma_cos)",
        "measured",
        amax_floor=1e-10,
        scale_rule="log2",
        nan_code=0x7E,
        formats=("fp32", "packed"),
        mn_major=True,
        rotations=("fma_cos", "mul_mul_add"),
    ),
    Quantizer(
        "rope-quant",
        "FlashInfer 0.7.4 fmhaReduction.cu, open sibling of the closed kernel: which product is fused is not stated, "
        "an Inf overflows the exponent (undefined)",
        "assumed",
        amax_floor=1e-10,
        scale_rule="ceil",
        nan_code=0xFE,
        inf_stated=False,
        blocks=(128,),
        inputs=("float32",),
        formats=("packed",),
        mn_major=True,
        rotations=("fma_cos", "fma_sin", "mul_mul_add"),
    ),
    *_deep_gemm("deep-gemm-token", "per_token_cast_to_fp8", pads=True, formats=("fp32", "packed")),
    *_deep_gemm("deep-gemm-block", "per_block_cast_to_fp8", pads=True, shape="tiles"),
    *_deep_gemm("deep-gemm-channel", "per_channel_cast_to_fp8", shape="channels"),
    Quantizer(
        "act-quant",
        "DeepSeek-V4 inference/model.py act_quant before wo_b; NaN and Inf not established",
        "published",
        amax_floor=1e-4,
        scale_rule="ceil",
        nan_code=None,
        inf_stated=False,
    ),
    Quantizer(
        "vllm-group-packed",
        _GROUP.format(", packed: the scale has a floor of 1e-10 too"),
        "published",
        amax_floor=1e-10,
        scale_rule="ceil",
        nan_code=0xFE,
        min_field=94,  # 2^-33, the power of two above 1e-10
        formats=("packed",),
        mn_major=True,
    ),
    Quantizer(
        "vllm-group-unpacked",
        _GROUP.format(", FP32 powers of two: bits or ceil(log2f), which agree for BF16 alone"),
        "published",
        amax_floor=1e-10,
        scale_rule="ceil",
        nan_code=0xFE,
        min_field=94,
        inputs=("bfloat16",),
        mn_major=True,
    ),
    Quantizer(
        "vllm-group-fp32",
        _GROUP.format(", FP32 scales: no floor of the scale"),
        "published",
        amax_floor=1e-10,
        scale_rule="divide",
        nan_code=0xFE,
        mn_major=True,
    ),
    Quantizer(
        "vllm-triton-group",
        _TRITON.format(", power-of-two scales"),
        "assumed",
        amax_floor=1e-10,
        scale_rule="log2",
        nan_code=0x7E,
    ),
    Quantizer(
        "vllm-triton-group-fp32",
        _TRITON.format(", FP32 scales (a compiled quotient within 2 ulps may pass a tie that this one does not)"),
        "assumed",
        amax_floor=1e-10,
        scale_rule="multiply",
        nan_code=0x7E,
    ),
    Quantizer(
        "vllm-v41-wo-a",
        "vLLM 0.33.0 V4.1 fused wo_a on SM100, hardware round-up to UE8M0; zero block from the floor, NaN and Inf "
        "not established",
        "assumed",
        amax_floor=1e-10,
        scale_rule="ceil",
        nan_code=None,
        inf_stated=False,
        blocks=(32,),
        formats=("packed",),
        mn_major=True,
        rotations=("fma_cos",),
    ),
    Quantizer(
        "vllm-requantize",
        "vLLM 0.33.0 quantization/utils/fp8_utils, weights at load; its FP32 log2 may return an octave less within "
        "some ulps above 448 * 2^k (undecided there: the exact ceiling is taken)",
        "assumed",
        amax_floor=1e-4,
        scale_rule="ceil",
        nan_code=None,
        inf_stated=False,
        shape="tiles",
        pads=True,
        inputs=("float32",),
    ),
)

QUANTIZERS: dict[str, Quantizer] = {row.name: row for row in _ROWS}

BOUND_ONLY = {
    "fp32-epilogue": "FP32-scale epilogues (TensorRT-LLM #14947 and #16036, FlashInfer #5078): floor 1e-12 and an "
    "approximate reciprocal, so codes have a bound but no bit model",
}


def get_quantizer(quantizer: Quantizer | str) -> Quantizer:
    """The row of that name (a row is returned as it is).

    Raises ``ValueError`` for an unknown name and for one of ``BOUND_ONLY``.
    """
    if isinstance(quantizer, Quantizer):
        return quantizer
    if quantizer in BOUND_ONLY:
        raise ValueError(f"quantizer={quantizer!r} is bound only: {BOUND_ONLY[quantizer]}")
    if quantizer not in QUANTIZERS:
        raise ValueError(f"quantizer={quantizer!r} is unknown; known: {', '.join(QUANTIZERS)}")
    return QUANTIZERS[quantizer]


VLLM_FUSED = QUANTIZERS["vllm-fused"]
