"""Hypothesis strategies that draw Cases, and the profiles that a run or a test takes Cases from.

Hypothesis draws the plain values of a Case, never a tensor: what fails shrinks to a small Case that prints as one line.
Every choice is listed simplest first, since that is what shrinking moves toward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.case import PACKED_K, POSITION_FAMILIES, ROPE_KINDS, VARIANTS, WO_A_DTYPES, Case
from conformance.families import FAMILIES
from conformance.grid import ARCHS
from conformance.special import KINDS, Special
from conformance.streams import Stream
from oproj.arch import get_arch
from oproj.config import PRESETS, get_preset

# Each alignment and tile of the kernels (4 scale rows, 8 padded rows, 16, 32, 64 and 128 tokens of a tile) with its
# neighbours, twice it, and every remainder modulo 8.
TOKENS = (1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 11, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
_RANKS = (128, 256, 512, 1024)
_HIDDEN = (128, 256, 384, 512)


@dataclass(frozen=True)
class Profile:
    """How many Cases a run takes by default, how large one may be in MACs of wo_a and wo_b on its rank, and the fields
    that are not drawn."""

    name: str
    count: int
    max_macs: int
    most_tokens: int
    real_widths: bool = False
    fixed: tuple[tuple[str, Any], ...] = ()


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("ci", 500, 24_000_000, 33),
        Profile("nightly", 20_000, 24_000_000, 129),
        # Hardware has the one rotation arithmetic that it was compiled with. Each pair of widths is a kernel that
        # DeepGEMM compiles, so there are few, the real ones among them; the budget is what the model takes on a CPU.
        Profile("gpu", 2_000, 150_000_000, 257, real_widths=True, fixed=(("variant", "fma_cos"),)),
    )
}


@st.composite
def cases(
    draw: st.DrawFn,
    arch: str | None = None,
    *,
    max_macs: int = PROFILES["ci"].max_macs,
    most_tokens: int = PROFILES["ci"].most_tokens,
    real_widths: bool = False,
    **fixed: Any,
) -> Case:
    """Cases of ``arch`` (any, where ``None``) of at most ``max_macs`` MACs; ``fixed`` fields of a Case are not drawn.

    ``real_widths``: o_lora_rank and hidden of the preset are among the choices.
    """
    arch = arch or draw(st.sampled_from(ARCHS))
    row = get_arch(arch)

    def field(name: str, strategy: st.SearchStrategy[Any]) -> Any:
        return fixed[name] if name in fixed else draw(strategy, label=name)

    preset = get_preset(field("preset", st.sampled_from(tuple(PRESETS))))
    tp_size = field("tp_size", st.sampled_from([n for n in (1, 2, 4, 8) if n in preset.tp_sizes()]))
    local = draw(st.sampled_from([n for n in (1, 2, 3, 4) if n * tp_size <= preset.n_groups]), label="local groups")
    groups = fixed.get("n_groups", local * tp_size)
    served = preset.fp8_wo_a(row)
    # FP8 is what most checks are about.
    dtypes = (*WO_A_DTYPES[:1] * 3, *WO_A_DTYPES[1:]) if served else WO_A_DTYPES[1:]
    wo_a_dtype = field("wo_a_dtype", st.sampled_from(dtypes))
    ranks = [n for n in _RANKS if not row.tma_aligned_scales or groups // tp_size * n % PACKED_K == 0]
    rank, hidden, tokens = _sizes(field, preset, groups // tp_size, ranks, max_macs, most_tokens, real_widths)
    heads = groups // tp_size * preset.heads_per_group
    return Case(
        arch=arch,
        preset=preset.name,
        tokens=tokens,
        hidden_size=hidden,
        n_groups=groups,
        o_lora_rank=rank,
        tp_size=tp_size,
        tp_rank=field("tp_rank", st.integers(0, tp_size - 1)),
        wo_a_dtype=wo_a_dtype,
        quant_group_size=field("quant_group_size", st.sampled_from(_group_sizes(preset, row, wo_a_dtype))),
        family=field("family", st.sampled_from(tuple(FAMILIES))),
        seed=field("seed", st.integers(0, 1 << 16)),
        position_family=field("position_family", st.sampled_from(POSITION_FAMILIES)),
        rope_kind=field("rope_kind", st.sampled_from(ROPE_KINDS)),
        padded_heads=field("padded_heads", st.sampled_from((0, heads, heads + 4, max(64, heads), max(128, heads)))),
        padding_slots=field("padding_slots", st.sampled_from((0, 1, 2, 8)) if wo_a_dtype == "fp8" else st.just(0)),
        variant=field("variant", st.sampled_from(VARIANTS)),
    )


@st.composite
def special_values(draw: st.DrawFn, stage: str | None = None) -> Special:
    """A special value of ``stage`` (any, where ``None``), at any place."""
    stage = stage or draw(st.sampled_from(tuple(KINDS)))
    kind = draw(st.sampled_from(KINDS[stage]), label="kind")
    return Special(stage, kind, draw(st.tuples(*[st.integers(0, 1 << 20)] * 3), label="at"))


def _group_sizes(preset: Any, row: Any, wo_a_dtype: str) -> tuple[int, ...]:
    if wo_a_dtype == "bf16":
        return (128, 64, 32)
    return tuple(n for n in ((128, 32) if row.tma_aligned_scales else (128,)) if n <= preset.weight_block[1])


def _sizes(
    field: Any,
    preset: Any,
    local_groups: int,
    ranks: list[int],
    max_macs: int,
    most_tokens: int,
    real_widths: bool,
) -> tuple[int, int, int]:
    """(o_lora_rank, hidden, tokens) within the budget: widths first, then as many tokens as they leave."""

    def fits(rank: int, hidden: int, tokens: int) -> bool:
        return tokens * local_groups * rank * (preset.group_k + hidden) <= max_macs

    widest = (_HIDDEN[0], _HIDDEN[-1], preset.hidden_size) if real_widths else _HIDDEN
    rank = field("o_lora_rank", st.sampled_from([n for n in ranks if n == ranks[0] or fits(n, _HIDDEN[-1], 4)]))
    hidden = field("hidden_size", st.sampled_from([n for n in widest if n == widest[0] or fits(rank, n, 1)]))
    within = [n for n in TOKENS if n <= most_tokens and fits(rank, hidden, n)]
    return rank, hidden, field("tokens", st.sampled_from(within or [1]))


def profile_cases(profile: str, arch: str, count: int | None = None, seed: int = 0) -> list[Case]:
    """``count`` distinct Cases of ``profile`` (by default its own number) on ``arch``.

    The same list on every machine for one version of Hypothesis, and the head of a longer one. First come Cases aimed
    at what chance hardly meets, then those that bring a value of some field not yet seen, so a short run still meets
    every family, preset, tensor-parallel size, remainder of tokens and layout. Raises ``ValueError`` for an unknown
    profile or arch, a ``count`` below 1 or a
    negative seed.
    """
    if profile not in PROFILES:
        raise ValueError(f"profile={profile!r} is unknown; known: {', '.join(PROFILES)}")
    chosen = PROFILES[profile]
    count = chosen.count if count is None else count
    if count < 1 or seed < 0:
        raise ValueError(f"count={count} must be at least 1 and seed={seed} at least 0")
    strategy = cases(
        get_arch(arch).name,
        max_macs=chosen.max_macs,
        most_tokens=chosen.most_tokens,
        real_widths=chosen.real_widths,
        **dict(chosen.fixed),
    )
    found: dict[Case, None] = {}
    rounds = 0
    while len(found) < max(count, _ROUND):
        found |= dict.fromkeys(_drawn(strategy, f"{seed}/{rounds}"))
        rounds += 1
    drawn = list(found)
    directed = [Case(arch=arch, seed=seed, **fields) for fields in _DIRECTED]
    return (directed + _covering_first(drawn[:_ROUND]) + drawn[_ROUND:])[:count]


@dataclass(frozen=True)
class ProfileCases:
    """The Cases of a profile on several architectures, as a run takes them; ``examples`` on each, 0: its own number.

    Raises ``ValueError`` for an unknown profile or arch.
    """

    profile: str
    archs: Sequence[str] = ARCHS
    examples: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for arch in self.archs:
            profile_cases(self.profile, arch, 1, self.seed)

    def cases(self) -> Iterator[Case]:
        """Arch by arch."""
        for arch in self.archs:
            yield from profile_cases(self.profile, arch, self.examples or None, self.seed)

    def __len__(self) -> int:
        return len(self.archs) * (self.examples or PROFILES[self.profile].count)


# What chance hardly meets: rotated block maxima some FP32 ulps above 448 * 2^k, where rules for the scale differ, and
# more tokens than the budget leaves to the widths of packed scales.
_DIRECTED: tuple[dict[str, Any], ...] = (
    {
        "preset": "v4-flash", "tokens": 13, "n_groups": 1, "o_lora_rank": 512, "hidden_size": 128,
        "family": "boundary", "position_family": "start",
    },
    {
        "preset": "v4-flash", "tokens": 17, "n_groups": 1, "o_lora_rank": 512, "hidden_size": 128, "family": "address",
        "position_family": "boundaries",
    },
    {
        "preset": "v4-flash", "tokens": 33, "n_groups": 1, "o_lora_rank": 512, "hidden_size": 128, "family": "wide",
        "position_family": "shuffled",
    },
)  # fmt: skip
_ROUND = 300  # Cases drawn at a time, so that a longer list begins with a shorter one
_WORDS = 64  # of 8 random bytes for the choices of one Case, more than any needs


def _drawn(strategy: st.SearchStrategy[Case], name: str) -> list[Case]:
    """Cases that the bytes of a stream of this name choose.

    A seed would not do: Hypothesis mixes constants of the modules that happen to be loaded into what it generates.
    """
    drawn: list[Case] = []

    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(case: Case) -> None:
        drawn.append(case)

    choose = collect.hypothesis.fuzz_one_input  # type: ignore[attr-defined]
    words = Stream(0, "profile", name).raw("choices", _ROUND * _WORDS)
    for number in range(_ROUND):
        choose(words[number * _WORDS : (number + 1) * _WORDS].astype("<u8").tobytes())
    return drawn


def _features(case: Case) -> set[tuple[str, object]]:
    """What a Case has that another may lack; without tokens it has nothing but that."""
    if case.tokens == 0:
        return {("tokens", 0), ("tokens and dtype", (0, case.wo_a_dtype))}
    fields = (
        "preset",
        "tp_size",
        "wo_a_dtype",
        "quant_group_size",
        "family",
        "position_family",
        "rope_kind",
        "variant",
    )
    tokens, heads = case.tokens, case.config.n_heads
    return {
        *((name, getattr(case, name)) for name in fields),
        ("tokens", tokens),
        ("tokens mod 8", tokens % 8),
        ("family and dtype", (case.family, case.wo_a_dtype)),
        ("family with layout", (case.family, tokens > 4, case.config.n_groups > 1)),
        ("padding heads", case.padded_heads > heads),
        ("padding slots", case.padding_slots),
        ("last rank", case.tp_rank == case.tp_size - 1 and case.tp_size > 1),
        ("groups", case.config.n_groups),
        ("far and padded", (case.position_family, case.padded_heads > heads)),
    }


def _covering_first(found: list[Case]) -> list[Case]:
    """Greedy cover: next comes the Case with most unseen features, the cheapest of those; then the rest as drawn."""
    rest = [(_features(case), case) for case in found]
    seen: set[tuple[str, object]] = set()
    first: list[Case] = []
    while rest:
        best = max(range(len(rest)), key=lambda n: (len(rest[n][0] - seen), -rest[n][1].macs, -n))
        if not rest[best][0] - seen:
            break
        features, case = rest.pop(best)
        seen |= features
        first.append(case)
    return first + [case for _, case in rest]
