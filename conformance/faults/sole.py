"""For each check of the suite a fault that it alone sees: take the check away, and the fault lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.case import Case
from conformance.faults import behaviour as b
from conformance.faults.behaviour import quirk, when
from conformance.faults.fault import Fault, always, fp8, many_groups, many_ranks, padded

_ORDINARY = ("normal", "wide", "positive")
_STALE, _FEW, _LAYOUT = "NVIDIA/TensorRT-LLM#14668", "vllm-project/vllm#29213", "sgl-project/sglang#29038"
_NAN, _ZERO, _UNWRITTEN = "jax-ml/ml_dtypes#400", "NVIDIA/TransformerEngine#786", "vllm-project/vllm#49783"
_POSITIONS, _PADDING = "vllm-project/vllm#57156", "sgl-project/sglang#39235"
Fits = Callable[[Case], bool]


def several(case: Case) -> bool:
    """Three tokens or more of ordinary numbers."""
    return case.tokens > 2 and case.family in _ORDINARY


def several_fp8(case: Case) -> bool:
    """The same, with codes."""
    return several(case) and fp8(case)


def rising(case: Case) -> bool:
    """Codes, and tokens at positions 0, 1, 2 and so on."""
    return fp8(case) and case.tokens > 1 and case.position_family == "start"


def bf16(case: Case) -> bool:
    """Ordinary numbers without codes."""
    return always(case) and case.family in _ORDINARY and case.wo_a_dtype == "bf16"


def _whole_layer(case: Case) -> bool:
    """Small enough for the unsharded layer, see `properties_products.wo_a_any_tp`."""
    return fp8(case) and case.tp_size > 1 and case.n_groups * case.o_lora_rank <= 1024


def _fault(check: str, change: str, source: str, build: Callable[[Any], Any], fits: Fits) -> Fault:
    stage, _, name = check.partition("/")
    return Fault(f"{stage}-{name}-only", stage, change, source, build, fits=fits, sole=check)


def _in_turn(stage: str, fits: Fits) -> list[Fault]:
    """Faults that every stage with tokens can have, for the checks that all of them have."""
    again, solo = when(b.after_twice_as_many), when(b.one_after_many)
    return [
        _fault(f"{stage}/again", "wrong after a call of twice as many tokens", _STALE, quirk(stage, again), fits),
        _fault(f"{stage}/solo", "wrong for one token after many", _FEW, quirk(stage, solo), fits),
        _fault(f"{stage}/zeros", "wrong for zeros", _ZERO, quirk(stage, when(b.all_zero)), fits),
        _unwritten(stage, fits),
    ]


def _unwritten(stage: str, fits: Fits) -> Fault:
    wrong = when(b.fresh_memory_is_nan)
    return _fault(f"{stage}/written", "wrong where fresh memory is not zero", _UNWRITTEN, quirk(stage, wrong), fits)


_QUANTIZE = [
    *_in_turn("quantize", several_fp8),
    _fault("quantize/bits", "zeros have the other sign, bits promised", "flashinfer-ai/flashinfer#4918",
           quirk("quantize", b.zeros_signed), lambda c: fp8(c) and c.family in ("sparse", "one-hot", "two-lanes")),
    _fault("quantize/attainable", "every scale twice too large, no bits promised", "pytorch/pytorch#156929",
           quirk("quantize", b.octave_high, promised=False), several_fp8),
    _fault("quantize/bound", "BF16 values two steps too large, no bits promised", "NVIDIA/TensorRT-LLM#14464",
           quirk("quantize", b.steps_up(2), promised=False), bf16),
    _fault("quantize/reversed", "wrong where positions fall", _POSITIONS,
           quirk("quantize", when(b.falling_positions)), rising),
    _fault("quantize/groups-rolled", "results kept under a sum of o in each token", "exo-explore/exo#1996",
           quirk("quantize", b.kept_by(b.by_sum_of_o)), many_groups),
    _fault("quantize/poisoned", "wrong where a NaN lies in the buffer behind o", _PADDING,
           quirk("quantize", when(b.nan_behind_o)), lambda c: several(c) and padded(c)),
    _fault("quantize/doubled", "wrong for numbers twice as large", "ROCm/TransformerEngine#737",
           quirk("quantize", when(b.doubled_o)), several_fp8),
    _fault("quantize/special", "a NaN or Inf spoils every block", _NAN,
           quirk("quantize", when(b.not_finite)), several_fp8),
]  # fmt: skip
_WO_A = [
    *_in_turn("wo_a", several_fp8),
    _fault("wo_a/bits", "zeros have the other sign, bits promised", "microsoft/MMA-Sim",
           quirk("wo_a", b.zeros_signed), lambda c: fp8(c) and c.family == "exact"),
    _fault("wo_a/bound", "z two BF16 steps too large, no bits promised", "deepseek-ai/DeepGEMM#37",
           quirk("wo_a", b.steps_up(2), promised=False), several_fp8),
    _fault("wo_a/reversed", "results kept under sums over all tokens", _LAYOUT,
           quirk("wo_a", b.kept_by(b.by_sum_of_x)), several_fp8),
    _fault("wo_a/groups-rolled", "results kept under sums over all groups", "exo-explore/exo#1996",
           quirk("wo_a", b.kept_by(b.by_sum_of_tokens)), many_groups),
    _fault("wo_a/poisoned", "wrong where a loud scale lies behind the last token", _PADDING,
           quirk("wo_a", when(b.loud_padding)), lambda c: several_fp8(c) and c.tokens % 4 > 0),
    _fault("wo_a/doubled", "wrong for scales twice as large", "sgl-project/sglang#39193",
           quirk("wo_a", when(b.doubled_scales)), several_fp8),
    _fault("wo_a/negated", "wrong for codes of the other sign", "microsoft/MMA-Sim",
           quirk("wo_a", when(b.negated_codes)), several_fp8),
    _fault("wo_a/any-tp", "wrong for more groups than one rank has", "modelscope/mcore-bridge#133",
           quirk("wo_a", when(b.more_groups)), _whole_layer),
    _fault("wo_a/special", "a NaN becomes a number", _NAN, quirk("wo_a", b.without_nan), several_fp8),
]  # fmt: skip
_WO_B = [
    *_in_turn("wo_b", several),
    _fault("wo_b/bits", "zeros have the other sign, bits promised", "microsoft/MMA-Sim",
           quirk("wo_b", b.zeros_signed), lambda c: c.family == "exact" and c.tokens > 0),
    _fault("wo_b/bound", "y two BF16 steps too large, no bits promised", "deepseek-ai/DeepGEMM#37",
           quirk("wo_b", b.steps_up(2), promised=False), several),
    _fault("wo_b/reversed", "results kept under a sum over all tokens", _LAYOUT,
           quirk("wo_b", b.kept_by(b.by_sum_of_z)), several),
    _fault("wo_b/rows-rolled", "results kept under a sum of the weight", "PaddlePaddle/PaddleFleet#1474",
           quirk("wo_b", b.kept_by(b.by_sum_of_rows)), lambda c: several(c) and c.hidden_size >= 256),
    _fault("wo_b/special", "a NaN reaches every token, or is lost", _NAN, quirk("wo_b", b.spread_by_nan), several),
]  # fmt: skip
_REDUCE = [
    _fault("reduce/bound", "y two BF16 steps too large", "sgl-project/sglang#31699",
           quirk("reduce", b.steps_up_sums), many_ranks),
    _fault("reduce/again", "wrong after other partials", _STALE,
           quirk("reduce", when(b.after_twice_the_negative)), many_ranks),
    _fault("reduce/one", "wrong where the first rank has nothing to add", "sgl-project/sglang#31700",
           quirk("reduce", when(b.all_zero)), many_ranks),
    _unwritten("reduce", many_ranks),
    _fault("reduce/special", "NaN and Inf become numbers", _NAN, quirk("reduce", b.without_nan), many_ranks),
]  # fmt: skip
_O_PROJ = [
    *(fault for fault in _in_turn("o_proj", several_fp8) if fault.sole != "o_proj/again"),
    _fault("o_proj/again", "wrong after a call with the positions in reverse", _STALE,
           quirk("o_proj", when(b.after_the_reverse)), rising),
    _fault("o_proj/bits", "y a BF16 step too large, bits promised", _FEW,
           quirk("o_proj", b.steps_up(1)), several_fp8),
    _fault("o_proj/format", "y 2^40 times too large, no bits promised", "anthony-chaudhary/fak#4267",
           quirk("o_proj", b.far_too_large, promised=False), several_fp8),
    _fault("o_proj/reversed", "wrong where positions fall", _POSITIONS,
           quirk("o_proj", when(b.falling_positions)), rising),
    _fault("o_proj/special", "a NaN reaches every token", _NAN, quirk("o_proj", when(b.not_finite)), several_fp8),
]  # fmt: skip

SOLE: tuple[Fault, ...] = (*_QUANTIZE, *_WO_A, *_WO_B, *_REDUCE, *_O_PROJ)
