"""Every known fault of the block as one row: name, stage, exact change, public source, where it is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from conformance.case import Case
from conformance.faults import einsum, layout, quantize, ranks, rope
from oproj.arch import get_arch

ALL = ("sm90", "sm100", "sm120")
PACKED = ("sm100", "sm120")


def always(case: Case) -> bool:
    """A change that any Case with tokens can show."""
    return case.tokens > 0


def fp8(case: Case) -> bool:
    """Codes and scales exist."""
    return always(case) and case.wo_a_dtype == "fp8"


def many_groups(case: Case) -> bool:
    """More than one group on this rank."""
    return fp8(case) and case.config.n_groups > 1


def slots(case: Case) -> bool:
    """Dead slots exist."""
    return fp8(case) and case.padding_slots > 0


def padded(case: Case) -> bool:
    """o is a slice of a wider buffer, with a token behind the first."""
    return case.tokens > 1 and case.padded_heads > case.config.n_heads


def many_ranks(case: Case) -> bool:
    """There is a sum over ranks."""
    return always(case) and case.tp_size > 1


@dataclass(frozen=True)
class Fault:
    """One mutation of a correct implementation.

    stage: the first one whose output differs. source: public reports, 'project#number'. build: of an arch row, a
    fresh implementation. fits: whether a Case can show it at all (elsewhere the change has nothing to change).
    """

    name: str
    stage: str
    change: str
    source: str
    build: Callable[[Any], Any]
    archs: tuple[str, ...] = ALL
    fits: Callable[[Case], bool] = always

    def implementation(self, arch: str) -> Any:
        """A fresh implementation with this fault; ``ValueError`` where it is not possible on ``arch``."""
        if arch not in self.archs:
            raise ValueError(f"fault {self.name} is not possible on {arch}; possible: {', '.join(self.archs)}")
        return self.build(get_arch(arch))


_Q, _L, _R, _E = "quantize", "layout", "rope", "einsum"

FAULTS: tuple[Fault, ...] = (
    Fault("scale-rounded-late", _Q, "codes use amax/448, the stored scale is rounded up to 2^k",
          "sgl-project/sglang#28418", quantize.ScaleRoundedLate, fits=fp8),
    Fault("ue8m0-floor", _Q, "scale rounded down to 2^k, the cast saturates",
          "jax-ml/ml_dtypes#298", quantize.ScaleRoundedDown, fits=fp8),
    Fault("scale-trunc", _Q, "the consumer keeps the exponent of a scale that is no 2^k",
          "sgl-project/sglang#39193", quantize.ScaleTruncated, fits=fp8),
    Fault("one-block-octave", _Q, "one stored exponent + 1, codes unchanged",
          "1CatAI/1Cat-vLLM#162", quantize.OneBlockAnOctaveHigh, fits=fp8),
    Fault("octave-high-consistent", _Q, "every scale twice too large, codes made with it",
          "pytorch/pytorch#156929", quantize.EveryScaleAnOctaveHigh, fits=fp8),
    Fault("log2-boundary", _Q, "exact ceiling where a rounded log2 is promised",
          "sgl-project/sglang#29954", quantize.ExactCeiling, fits=fp8),
    Fault("eps-large", _Q, "floor of the block maximum 1e-4 instead of 1e-10",
          "ROCm/TransformerEngine#737", quantize.LargeFloor, fits=fp8),
    Fault("eps-zero", _Q, "no floor: a zero block has scale 0 and codes 0/0",
          "NVIDIA/TransformerEngine#786", quantize.NoFloor, fits=fp8),
    Fault("cast-no-saturate", _Q, "no clamp before the cast of a too small scale: NaN above 464",
          "jax-ml/ml_dtypes#400", quantize.CastOverflows, fits=fp8),
    Fault("cast-truncate", _Q, "codes rounded toward zero",
          "tile-ai/tilelang-mlir-ascend#49", quantize.CastTruncates, fits=fp8),
    Fault("cast-ties-away", _Q, "half-way values rounded away from zero",
          "tenstorrent/tt-metal#51971", quantize.CastTiesAway, fits=fp8),
    Fault("bf16-skip", _Q, "a BF16 rounding between rotation and quantisation, undeclared",
          "NVIDIA/TensorRT-LLM#14464", quantize.RoundedToBf16, fits=fp8),
    Fault("one-code-step", _Q, "one code is its lower neighbour",
          "vllm-project/vllm#46944", quantize.OneCodeStep, fits=fp8),
    Fault("TG-flatten", _L, "scale rows written at t*G+g, read as [G][T]",
          "sgl-project/sglang#29038", layout.ScalesFlattened, fits=lambda c: many_groups(c) and c.tokens > 1),
    Fault("pad-mismatch", _L, "producer's K stride align(T,8), consumer's align(T,4)",
          "NVIDIA/TensorRT-LLM#14254", layout.PaddingMismatch, fits=lambda c: fp8(c) and 1 <= c.tokens % 8 <= 4),
    Fault("pad-uninit", _L, "scale rows T..align4(T) never written, and loaded",
          "vllm-project/vllm#49783", layout.PaddingUnwritten,
          fits=lambda c: fp8(c) and c.tokens % 4 > 0 and not c.padding_slots),
    Fault("or-pack", _L, "FP32 scales ORed into a word without masking mantissas",
          "sgl-project/sglang#25733", layout.WordsOred, PACKED, fp8),
    Fault("stale-pdl", _L, "the last token sees the scales of the previous call",
          "NVIDIA/TensorRT-LLM#14668", layout.StaleScales, fits=fp8),
    Fault("int32-wrap", _L, "address product taken modulo a short word (2^13 elements stand for 2^32)",
          "vllm-project/vllm#43166", layout.AddressWraps,
          fits=lambda c: c.tokens * (c.padded_heads or c.config.n_heads) * 512 > layout.WRAP),
    Fault("scales-contiguous", _L, "right scales in row-major order",
          "NVIDIA/TensorRT-LLM#14446", layout.ScalesRepacked, fits=lambda c: fp8(c) and c.tokens > 1),
    Fault("stride-ignored", _R, "o is a slice of padded heads, read as contiguous",
          "sgl-project/sglang#34912", layout.StridesIgnored, fits=padded),
    Fault("cossin-bf16", _R, "cos/sin table rounded to BF16",
          "PrimeIntellect-ai/prime-rl#3584", rope.TableInBf16),
    Fault("wrong-theta-layer", _R, "table of the other layer kind",
          "Avarok-Cybersecurity/atlas#276", rope.OtherLayersTable),
    Fault("mscale", _R, "cosines and sines times 1.2772589",
          "Avarok-Cybersecurity/atlas#342", rope.Amplified),
    Fault("forward-sign", _R, "sign of the sines flipped", "AMD-AGI/Primus#928", rope.ForwardSign),
    Fault("rope-omitted", _R, "rotation left out", "Avarok-Cybersecurity/atlas#186", rope.NoRotation),
    Fault("neox-pair", _R, "partner of lane i is i+32 instead of i^1",
          "NVIDIA-NeMo/Automodel#2039", rope.HalfSplitPairs),
    Fault("rope-dims-first", _R, "the first 64 lanes are rotated",
          "raullenchai/Rapid-MLX#1225", rope.FirstLanes),
    Fault("rope-dims-early", _R, "lanes 447..510 are rotated", "raullenchai/Rapid-MLX#1225", rope.OneLaneEarly),
    Fault("rope-dims-width", _R, "frequencies with the head's width as denominator",
          "pie-project/pie#603", rope.HeadWidthFrequencies),
    Fault("pos-off-by-one", _R, "position + 1", "flashinfer-ai/flashinfer#568", rope.NextPosition),
    Fault("pos-token-before", _R, "position of token t-1",
          "flashinfer-ai/flashinfer#568", rope.PositionOfTokenBefore, fits=lambda c: c.tokens > 1),
    Fault("pos-first-plus-t", _R, "first position + t",
          "flashinfer-ai/flashinfer#568", rope.FirstPlusToken, fits=lambda c: c.tokens > 1),
    Fault("table-short", _R, "position clipped to a table of 4096 rows",
          "pegainfer-project/pegainfer#220", rope.ShortTable),
    Fault("graph-stale-pos", _R, "replay uses the positions of the capture",
          "vllm-project/vllm#57156", rope.PositionsOfTheCapture),
    Fault("slot-slice-end", "slice", "groups taken from the wrong end of the slots",
          "sgl-project/sglang#39235", layout.LastSlots, fits=slots),
    Fault("slot-slice-scales", "slice", "values sliced and scales not",
          "sgl-project/sglang#39235", layout.ScalesOfOtherSlots, fits=slots),
    Fault("head-group-map", _E, "head h goes to group h mod G",
          "exo-explore/exo#1996", einsum.HeadsDealtOut, fits=many_groups),
    Fault("wscale-transpose", _E, "axes [R/128, K/128] of the weight scales swapped",
          "PaddlePaddle/PaddleFleet#1474", einsum.WeightScalesTransposed, fits=fp8),
    Fault("wscale-next-group", _E, "weight scales of group g+1",
          "vllm-project/vllm#48334", einsum.NextGroupsScales, fits=many_groups),
    Fault("wscale-ceil-no-requant", _E, "weight scale rounded up to 2^k, codes unchanged",
          "huggingface/transformers#47030", einsum.WeightScalesRoundedUp, ("sm90",),
          lambda c: fp8(c) and c.preset == "v4-flash-base"),
    Fault("k-tail-drop", _E, "the last 128 of K skipped", "tile-ai/tilelang#2381", einsum.TailDropped, fits=fp8),
    Fault("k-tail-32", _E, "the last 32 of K skipped", "tile-ai/tilelang#2381", einsum.TailOf32Dropped, fits=fp8),
    Fault("k-tail-one-row", _E, "the last 32 of K skipped in one token",
          "tile-ai/tilelang#2381", einsum.TailOfOneRowDropped, fits=fp8),
    Fault("no-promotion", _E, "one accumulator of 13 fraction bits for all of K",
          "deepseek-ai/DeepGEMM#37", einsum.NeverPromoted, fits=fp8),
    Fault("late-promotion", _E, "an accumulator of 13 fraction bits for 512 of K",
          "deepseek-ai/DeepGEMM#50", einsum.PromotedTooLate, fits=fp8),
    Fault("d-groups-more", _E, "z has G+1 groups and nothing refuses it",
          "deepseek-ai/DeepGEMM csrc/apis/einsum.hpp:151", einsum.OneGroupTooMany),
    Fault("d-groups-less", _E, "z has G-1 groups and nothing refuses it",
          "deepseek-ai/DeepGEMM csrc/apis/einsum.hpp:151", einsum.OneGroupTooFew),
    Fault("swapAB-by-M", _E, "another order of K below 32 tokens",
          "vllm-project/vllm#29213", einsum.OtherOrderForFewTokens, ("sm90",), fp8),
    Fault("swapAB-one-token", _E, "another order of K for one token alone, no bits promised",
          "vllm-project/vllm#37718", einsum.OtherOrderForOneToken, ("sm90",), lambda c: fp8(c) and c.tokens > 1),
    Fault("y-last-bit", "wo_b", "one y one BF16 step off", "vllm-project/vllm#29213", einsum.LastBitOfY),
    Fault("y-column-lost", "wo_b", "one column of y never written, no bits promised",
          "tile-ai/tilelang#2381", einsum.ColumnDroppedWithoutPromise),
    Fault("chain-without-rope", "o_proj", "right stages, and a chain that forgets the rotation",
          "AMD-AGI/Primus#930", einsum.WholeChainOnly, fits=fp8),
    Fault("tp-dup", "reduce", "one partial counted twice, one skipped",
          "sgl-project/sglang#31699", ranks.RankTwice, fits=many_ranks),
    Fault("tp-miss", "reduce", "one partial skipped", "sgl-project/sglang#31700", ranks.RankMissing, fits=many_ranks),
    Fault("tp-replicated", "reduce", "a replicated tensor summed over ranks",
          "sgl-project/sglang#29644", ranks.ReplicatedSummed, fits=many_ranks),
    Fault("bf16-ring", "reduce", "FP32 accumulation declared, BF16 words added rank after rank",
          "known family, no single report", ranks.RingInBf16, fits=lambda c: many_ranks(c) and c.tp_size > 2),
)  # fmt: skip


def get_faults(names: Iterable[str] = ()) -> list[Fault]:
    """The faults of these names in the order of the registry, or all; ``ValueError`` lists the known ones."""
    wanted, known = set(names), [fault.name for fault in FAULTS]
    unknown = sorted(wanted - set(known))
    if unknown:
        raise ValueError(f"fault(s) unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return [fault for fault in FAULTS if not wanted or fault.name in wanted]
