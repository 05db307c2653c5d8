"""One frozen row per architecture: every per-architecture difference of the path is a column here.

``MMA`` rows are the numbers of one tensor-core instruction (the T-FDPA model of MMA-Sim, arXiv 2511.10909, and of
Khattak & Mikaitis, arXiv 2512.07004): products and the accumulator enter one sum of ``frac_bits`` fraction bits,
aligned to the largest exponent by truncation toward zero, and the sum is truncated once to ``out_frac_bits``.
Rows that no ``Arch`` names are instructions only: nothing is known about the order in which a library issues them.
``Arch`` rows say how DeepGEMM chains that instruction and how scales are laid out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oproj.evidence import Evidence, measured_stages

ScaleFormat = Literal["fp32", "ue8m0_packed"]
OperandFormat = Literal["e4m3", "bf16"]


@dataclass(frozen=True)
class MMA:
    """One tensor-core instruction as numbers (field meanings: numerics of T-FDPA, see the module text)."""

    name: str
    operand: OperandFormat  # of A and B; C and D are FP32 words
    k: int  # products in one fused sum
    frac_bits: int  # fraction bits kept while aligning ("F")
    out_frac_bits: int  # fraction bits of the FP32 result
    zero_exponent: int  # exponent that a zero term takes part with ("E_ZERO")
    scales_inside: bool  # UE8M0 exponents are added to each product before alignment
    evidence: Evidence
    source: str


WGMMA_E4M3 = MMA(
    "wgmma.m64nNk32.f32.e4m3.e4m3",
    "e4m3",
    32,
    13,
    13,
    -133,
    False,
    "measured",
    "MMA-Sim (arXiv 2511.10909); H100/H200 vectors of MATLAB-tensor-core",
)
TCGEN05_F8F6F4 = MMA(
    "tcgen05.mma.kind::f8f6f4",
    "e4m3",
    32,
    25,
    23,
    -133,
    False,
    "published",
    "MMA-Sim; MATLAB-tensor-core B200TC.m",
)
TCGEN05_MXF8F6F4 = MMA(
    "tcgen05.mma.kind::mxf8f6f4.block_scale",
    "e4m3",
    32,
    25,
    23,
    -133,
    True,
    "published",
    "MMA-Sim; MATLAB-tensor-core B200TC.m",
)
MMA_SYNC_F8F6F4 = MMA(
    "mma.sync.m16n8k32.kind::f8f6f4",
    "e4m3",
    32,
    25,
    23,
    -133,
    False,
    "published",
    "MMA-Sim on RTX PRO 6000",
)
MMA_SYNC_MXF8F6F4 = MMA(
    "mma.sync.m16n8k32.kind::mxf8f6f4.block_scale",
    "e4m3",
    32,
    25,
    23,
    -133,
    True,
    "published",
    "MMA-Sim on RTX PRO 6000; qqq-tao/Blackwell-TensorCore-Numerical-Model on RTX 5090",
)
# BF16 instructions. The order along K and the split of K inside a library's BF16 product are unknown, so no engine is
# built on these rows: a BF16 wo_a is judged by a bound (conformance), not bit by bit.
WGMMA_BF16 = MMA(
    "wgmma.m64nNk16.f32.bf16.bf16",
    "bf16",
    16,
    25,
    23,
    -133,
    False,
    "published",
    "MMA-Sim (arXiv 2511.10909)",
)
TCGEN05_BF16 = MMA(
    "tcgen05.mma.kind::f16.f32.bf16.bf16",
    "bf16",
    16,
    25,
    23,
    -133,
    False,
    "published",
    "MMA-Sim (arXiv 2511.10909)",
)


@dataclass(frozen=True)
class Arch:
    """How the FP8 output projection runs on one GPU architecture."""

    name: str
    capability: tuple[int, int]
    mma: MMA
    promotion_k: int | None  # K elements per fresh accumulator; None: one accumulator over all of K
    scale_format: ScaleFormat
    einsum_expressions: tuple[str, ...]  # of DeepGEMM's ``fp8_einsum`` (``oproj.engines.expressions``)
    mxfp8_wo_a: bool  # 32-wide activation blocks are served in FP8 (else such a wo_a is dequantised to BF16)
    composition_evidence: Evidence  # of the chain around the instruction
    source: str

    @property
    def tma_aligned_scales(self) -> bool:
        """Scales are packed UE8M0 words in a TMA-aligned buffer (the flag of the serving engine's quantiser)."""
        return self.scale_format == "ue8m0_packed"

    def recipe(self, block_size: int = 128) -> tuple[int, int, int]:
        """``(gran_m, gran_n, gran_k)`` that the serving engine asks DeepGEMM for (vLLM ``o_proj.py``)."""
        return (1, 1, block_size) if self.tma_aligned_scales else (1, 128, 128)

    def evidence(self, stage: str) -> Evidence:
        """What backs the software model of ``stage`` on this row: ``measured``, ``published`` or ``assumed``.

        ``measured`` needs a recorded hardware comparison without a differing bit (``oproj/data/evidence.json``).
        """
        if stage in measured_stages(self.name):
            return "measured"
        return "published" if self.composition_evidence == "measured" else self.composition_evidence


WO_A_ALONE = ("bhr,hdr->bhd",)
ALL_EXPRESSIONS = ("bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr")

SM90 = Arch(
    "sm90",
    (9, 0),
    WGMMA_E4M3,
    128,
    "fp32",
    WO_A_ALONE,
    False,
    "measured",
    "DeepGEMM 54e2261 impls/sm90_fp8_gemm_1d2d.cuh",
)
SM100 = Arch(
    "sm100",
    (10, 0),
    TCGEN05_MXF8F6F4,
    None,
    "ue8m0_packed",
    ALL_EXPRESSIONS,
    True,
    "published",
    "DeepGEMM 54e2261 impls/sm100_fp8_fp4_gemm_1d1d.cuh",
)
SM103 = Arch(
    "sm103",
    (10, 3),
    TCGEN05_MXF8F6F4,
    None,
    "ue8m0_packed",
    ALL_EXPRESSIONS,
    True,
    "assumed",
    "taken to equal SM100",
)
SM120 = Arch(
    "sm120",
    (12, 0),
    MMA_SYNC_MXF8F6F4,
    None,
    "ue8m0_packed",
    WO_A_ALONE,
    False,
    "assumed",
    "instruction published; the chain is taken to equal SM100's",
)

ARCHS: dict[str, Arch] = {arch.name: arch for arch in (SM90, SM100, SM103, SM120)}


def get_arch(arch: Arch | str) -> Arch:
    """Look an architecture up by name (``"sm90"``); a row is returned as it is.

    Raises ``ValueError`` that lists the known rows.
    """
    if isinstance(arch, Arch):
        return arch
    try:
        return ARCHS[str(arch).lower()]
    except KeyError:
        raise ValueError(f"arch={arch!r} is unknown; known rows: {', '.join(ARCHS)}") from None


def arch_of_capability(major: int, minor: int) -> Arch | None:
    """The row that describes a CUDA device of this compute capability, or ``None``."""
    exact = [arch for arch in ARCHS.values() if arch.capability == (major, minor)]
    family = [arch for arch in ARCHS.values() if arch.capability[0] == major]
    return next(iter(exact + family), None)
