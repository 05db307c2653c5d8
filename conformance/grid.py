"""The Cases of a run: every arch x preset x tensor-parallel size x tokens, with families and the rest taken in turn.

Big shapes are cut to a budget: fewer groups, fewer columns of wo_a and wo_b, never a shorter K of a group, since what
goes wrong in a long sum does not show in a short one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conformance.case import POSITION_FAMILIES, ROPE_KINDS, Case
from conformance.families import FAMILIES, get_family
from oproj.arch import get_arch
from oproj.config import PRESETS as PRESET_ROWS
from oproj.config import OProjConfig, get_preset

ARCHS = ("sm90", "sm100", "sm120")
PRESETS = ("v4-flash", "v4-pro", "v4.1-flash")
TP_SIZES = (1, 2, 4, 8)
TOKENS = (1, 5)
MANY_TOKENS = 64
_MANY_TOKENS_FAMILIES = 2
_FAMILIES_IN_TURN = 8  # of all families, in one combination; the next combination goes on with others
_COLUMNS = 512  # columns of z over all groups; every fourth Case of few tokens has twice as many
_FEW_TOKENS = 16
_HIDDEN = (256, 384, 512)
_PADDED = (64, 128)


@dataclass(frozen=True)
class Grid:
    """What to run. ``examples`` Cases for each combination; 0: one per family that was named (of all of them eight in
    turn), half as many of one token where other numbers of tokens run too. ``full`` keeps real widths.

    ``many_tokens`` adds a few Cases of that many tokens to each combination (0: none).
    Raises ``ValueError`` that lists the known names, or names the combination that is impossible.
    """

    archs: Sequence[str] = ARCHS
    presets: Sequence[str] = PRESETS
    tp_sizes: Sequence[int] = TP_SIZES
    tokens: Sequence[int] = TOKENS
    many_tokens: int = 0
    families: Sequence[str] = tuple(FAMILIES)
    examples: int = 0
    seed: int = 0
    full: bool = False

    def __post_init__(self) -> None:
        for name in ("archs", "presets", "tp_sizes", "tokens", "families"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; name at least one")
        for arch in self.archs:
            get_arch(arch)
        for family in self.families:
            get_family(family)
        possible = {tp for preset in self.presets for tp in get_preset(preset).tp_sizes()}
        for tp in self.tp_sizes:
            if tp not in possible:
                names = ", ".join(self.presets)
                raise ValueError(
                    f"tp={tp} is impossible for {names}; possible: {', '.join(map(str, sorted(possible)))}"
                )
        if min(self.tokens) < 0 or self.examples < 0 or self.many_tokens < 0:
            raise ValueError(f"tokens={list(self.tokens)} and examples={self.examples} must not be negative")
        if not 0 <= self.seed < 2**62 or max(self.tokens) >= 2**31:
            raise ValueError(f"seed={self.seed} must lie in 0 .. 2**62 - 1 and tokens={list(self.tokens)} below 2**31")

    def cases(self) -> Iterator[Case]:
        """The Cases in order: the same for each arch, and for a combination whatever else is run beside it.

        A tensor-parallel size that one of several presets cannot have is left out there.
        """
        for arch in self.archs:
            for preset in map(get_preset, self.presets):
                for tp in (size for size in self.tp_sizes if size in preset.tp_sizes()):
                    for tokens, count in self._counts():
                        first = 997 * list(PRESET_ROWS).index(preset.name) + 89 * tp + 11 * tokens
                        for number in range(first, first + count):
                            yield self._case(arch, preset, tp, tokens, number)

    def __len__(self) -> int:
        pairs = sum(tp in get_preset(preset).tp_sizes() for preset in self.presets for tp in self.tp_sizes)
        return len(self.archs) * pairs * sum(count for _, count in self._counts())

    def _counts(self) -> list[tuple[int, int]]:
        """(tokens, Cases) of each combination."""
        # One token costs as many weights as many tokens and compares less, so it takes every second family in turn.
        each = len(self.families) if set(self.families) != set(FAMILIES) else _FAMILIES_IN_TURN
        half = -(-each // 2)
        counts = [
            (tokens, self.examples or (half if tokens == 1 and len(self.tokens) > 1 else each))
            for tokens in self.tokens
        ]
        if self.many_tokens:
            counts.append((self.many_tokens, min(_MANY_TOKENS_FAMILIES, len(self.families))))
        return counts

    def _case(self, arch: str, preset: OProjConfig, tp: int, tokens: int, number: int) -> Case:
        """Case ``number``. ``mixed`` moves on by one with every round of the families, so that no family is always met
        with the same rank, table or shape."""
        mixed = number + number // len(self.families)
        groups, rank, hidden = self._sizes(preset, tp, tokens, mixed)
        heads = groups // tp * preset.heads_per_group
        padded = next((size for size in _PADDED if size > heads), 2 * heads)
        return Case(
            arch=arch,
            preset=preset.name,
            tokens=tokens,
            hidden_size=hidden,
            n_groups=groups,
            o_lora_rank=rank,
            tp_size=tp,
            tp_rank=mixed % tp,
            family=self.families[number % len(self.families)],
            seed=self.seed + number,
            position_family=POSITION_FAMILIES[(number * 2 + 1) % len(POSITION_FAMILIES)],
            rope_kind=ROPE_KINDS[mixed % len(ROPE_KINDS)],
            padded_heads=padded if number % 3 else 0,
            padding_slots=(0, 2, 0, 1)[(number // 5) % 4] if _fp8(preset, arch) else 0,
        )

    def _sizes(self, preset: OProjConfig, tp: int, tokens: int, mixed: int) -> tuple[int, int, int]:
        """(groups of the whole model, o_lora_rank, hidden): real ones, or cut to the budget in two alternating shapes,
        many narrow groups and few wide ones."""
        if self.full:
            return preset.n_groups, preset.o_lora_rank, preset.hidden_size
        columns, local = _COLUMNS, preset.n_groups // tp
        if mixed % 4 == 3 and tokens <= _FEW_TOKENS:
            columns *= 2
        groups = min(local, 4 if mixed % 2 else 2)
        rank = min(columns // groups, preset.o_lora_rank)
        return groups * tp, rank, _HIDDEN[mixed % len(_HIDDEN)]


def _fp8(preset: OProjConfig, arch: str) -> bool:
    return preset.fp8_wo_a(get_arch(arch))
