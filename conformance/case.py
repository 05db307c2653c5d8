"""A Case: one frozen record of plain values from which every tensor of a comparison is rebuilt exactly."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any

from conformance.families import get_family
from oproj.arch import get_arch
from oproj.config import OProjConfig, get_preset

POSITION_FAMILIES = ("start", "small", "boundaries", "far", "shuffled")
ROPE_KINDS = ("plain", "yarn")
VARIANTS = ("fma_cos", "mul_mul_add")
WO_A_DTYPES = ("fp8", "bf16")
_ID_LENGTH = 12
PACKED_K = 512  # K of wo_b that four packed scales of 128 cover
_COLUMN_STEP = 128  # rows of one FP8 weight block; columns shrink by whole blocks


@dataclass(frozen=True)
class CaseConfig(OProjConfig):
    """The local dimensions of a Case, with its own activation block and wo_a dtype in place of the served ones."""

    case_quant_group_size: int = 128
    case_wo_a_dtype: str = "fp8"
    variant: str = "fma_cos"

    def quant_group_size(self, arch: Any) -> int:
        """K elements per activation scale."""
        return self.case_quant_group_size

    def fp8_wo_a(self, arch: Any) -> bool:
        """Whether wo_a takes FP8 codes (else BF16 values)."""
        return self.case_wo_a_dtype == "fp8"


@dataclass(frozen=True)
class Case:
    """What to build and where to run it.

    ``hidden_size``, ``n_heads``, ``n_groups`` and ``o_lora_rank`` are those of the whole model before sharding; 0 takes
    the preset's own (as do ``wo_a_dtype=""`` and ``quant_group_size=0`` with what the arch serves) and is replaced at
    construction, so a printed Case is complete. Columns and groups may be shrunk to save time, K of a group may not.
    ``padded_heads``: heads of the buffer that ``o`` is a slice of (0: contiguous). ``padding_slots``: dead group slots
    behind the live ones in wo_a's input.

    Raises ``TypeError`` or ``ValueError`` that names the field, its value and what would be right.
    """

    arch: str
    preset: str
    tokens: int
    hidden_size: int = 0
    n_heads: int = 0
    n_groups: int = 0
    o_lora_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    wo_a_dtype: str = ""
    quant_group_size: int = 0
    family: str = "normal"
    seed: int = 0
    position_family: str = "start"
    rope_kind: str = "plain"
    padded_heads: int = 0
    padding_slots: int = 0
    variant: str = "fma_cos"

    def __post_init__(self) -> None:
        _check_types(self)
        preset = get_preset(self.preset)
        row = get_arch(self.arch)
        groups = self.n_groups or preset.n_groups
        self._fill("arch", row.name)
        self._fill("n_groups", groups)
        self._fill("n_heads", self.n_heads or groups * preset.heads_per_group)
        self._fill("hidden_size", self.hidden_size or preset.hidden_size)
        self._fill("o_lora_rank", self.o_lora_rank or preset.o_lora_rank)
        self._fill("wo_a_dtype", self.wo_a_dtype or ("fp8" if preset.fp8_wo_a(row) else "bf16"))
        self._fill("quant_group_size", self.quant_group_size or preset.quant_group_size(row))
        _check_words(self)
        _check_sizes(self)

    def _fill(self, name: str, value: int | str) -> None:
        object.__setattr__(self, name, value)  # the record is frozen once construction is over

    @property
    def whole(self) -> OProjConfig:
        """The configuration before sharding, with the Case's own sizes."""
        return dataclasses.replace(
            get_preset(self.preset),
            hidden_size=self.hidden_size,
            n_heads=self.n_heads,
            n_groups=self.n_groups,
            o_lora_rank=self.o_lora_rank,
        )

    @property
    def config(self) -> CaseConfig:
        """The local configuration of this rank."""
        local = self.whole.shard(self.tp_size, self.tp_rank)
        values = {field.name: getattr(local, field.name) for field in fields(OProjConfig)}
        return CaseConfig(
            **values, case_quant_group_size=self.quant_group_size, case_wo_a_dtype=self.wo_a_dtype, variant=self.variant
        )

    @property
    def macs(self) -> int:
        """Multiply-accumulates of wo_a and wo_b on this rank."""
        config = self.config
        return self.tokens * config.wo_b_k * (config.group_k + config.hidden_size)

    @property
    def id(self) -> str:
        """The first 12 hex digits of the SHA-256 of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:_ID_LENGTH]

    def to_json(self) -> str:
        """One line of JSON: every field, sorted by name."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """The Case of a line that `to_json` printed.

        Raises ``ValueError`` for text that is no JSON object and for unknown or missing fields, ``TypeError`` for a
        field of another type; each names the field.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"case is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"case must be a JSON object, got {type(values).__name__}")
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise ValueError(f"unknown case field(s): {', '.join(unknown)}; known: {', '.join(names)}")
        missing = [name for name in names if name not in values]
        if missing:
            raise ValueError(f"missing case field(s): {', '.join(missing)}")
        return cls(**values)


def _check_types(case: Case) -> None:
    for field in fields(case):
        value, kind = getattr(case, field.name), {"int": int, "str": str}[str(field.type)]
        if type(value) is not kind:
            raise TypeError(f"{field.name}={value!r} has type {type(value).__name__}; expected {kind.__name__}")
        if isinstance(value, int) and not 0 <= value < 2**63:
            raise ValueError(f"{field.name}={value} must lie in 0 .. 2**63 - 1")


def _check_words(case: Case) -> None:
    get_family(case.family)
    for name, words in (
        ("position_family", POSITION_FAMILIES),
        ("rope_kind", ROPE_KINDS),
        ("variant", VARIANTS),
        ("wo_a_dtype", WO_A_DTYPES),
    ):
        if getattr(case, name) not in words:
            raise ValueError(f"{name}={getattr(case, name)!r} is unknown; known: {', '.join(words)}")


def _check_sizes(case: Case) -> None:
    for name in ("hidden_size", "o_lora_rank"):
        if getattr(case, name) % _COLUMN_STEP:
            raise ValueError(f"{name}={getattr(case, name)} must be a multiple of {_COLUMN_STEP} (one weight block)")
    preset = get_preset(case.preset)
    if case.n_heads != case.n_groups * preset.heads_per_group:
        raise ValueError(
            f"n_heads={case.n_heads} must be {preset.heads_per_group} per group, that is "
            f"{case.n_groups * preset.heads_per_group} for n_groups={case.n_groups}; K of a group is never shrunk"
        )
    config = case.config  # raises where tp_size does not divide, or tp_rank is outside
    if get_arch(case.arch).tma_aligned_scales and config.wo_b_k % PACKED_K:
        raise ValueError(
            f"o_lora_rank={case.o_lora_rank} with {config.n_groups} local groups gives wo_b a K of {config.wo_b_k}; "
            f"packed scales of {case.arch} need a multiple of {PACKED_K}"
        )
    if case.padded_heads and case.padded_heads < config.n_heads:
        raise ValueError(f"padded_heads={case.padded_heads} must be 0 or at least the {config.n_heads} local heads")
    _check_quant_group_size(case, preset)


def _check_quant_group_size(case: Case, preset: OProjConfig) -> None:
    """What the kernels take: 128 with FP32 scales; 32 or 128 packed, and no coarser than the weight's own scales."""
    packed = get_arch(case.arch).tma_aligned_scales
    allowed: tuple[int, ...] = (32, 64, 128)
    if case.wo_a_dtype == "fp8":
        allowed = tuple(n for n in ((32, 128) if packed else (128,)) if n <= preset.weight_block[1])
    if case.quant_group_size not in allowed:
        known = ", ".join(map(str, allowed)) or "nothing: its weight blocks are too small, use wo_a_dtype='bf16'"
        where = f"{case.wo_a_dtype} wo_a of {case.preset} on {case.arch}"
        raise ValueError(f"quant_group_size={case.quant_group_size} with {where} must be one of {known}")
