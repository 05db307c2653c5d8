"""Faults of the inverse rotation: which lanes, which angle, which token's position."""

from __future__ import annotations

from typing import Any

import torch

from conformance.case import CaseConfig
from conformance.faults.base import Faulty, Quantizing
from oproj.activation import QuantizedActivation
from oproj.rope import cos_sin_rows

YARN_MSCALE = 1.2772589
TABLE_ROWS = 4096


class TableInBf16(Quantizing):
    """The cos/sin table rounded to BF16."""

    def table_rows(self, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Through BF16."""
        return table[positions].bfloat16().float()


class OtherLayersTable(Quantizing):
    """The compressed layers' table on a sliding-window layer, or the reverse."""

    def table_rows(self, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of the other layer kind."""
        rows = table[positions]
        plain, yarn = (
            torch.from_numpy(cos_sin_rows(kind, positions.numpy(), rows.shape[1])) for kind in ("plain", "yarn")
        )
        return yarn if torch.equal(rows, plain) else plain


class Amplified(Quantizing):
    """YaRN's amplitude on cosines and sines, which an inverse rotation does not cancel."""

    def table_rows(self, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Too long."""
        return table[positions] * YARN_MSCALE


class ForwardSign(Quantizing):
    """The sign of the sines flipped: rotated on instead of back."""

    def table_rows(self, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Negative sines."""
        rows = table[positions].clone()
        rows[:, rows.shape[1] // 2 :].neg_()
        return rows


class NoRotation(Quantizing):
    """The step is left out."""

    def rotate(self, o: torch.Tensor, rows: torch.Tensor, config: CaseConfig) -> torch.Tensor:
        """As it is."""
        return o.float()


class HalfSplitPairs(Quantizing):
    """The partner of lane i is i + 32 instead of its neighbour."""

    def rotate(self, o: torch.Tensor, rows: torch.Tensor, config: CaseConfig) -> torch.Tensor:
        """Rotated in the order of halves."""
        half = config.rope_dim // 2
        halves = torch.arange(config.rope_dim).view(2, half).T.flatten() + config.nope_dim  # 0, 32, 1, 33, ...
        order = torch.cat([torch.arange(config.nope_dim), halves])
        turned = super().rotate(o[..., order], rows, config)
        return turned[..., order.argsort()]


class FirstLanes(Quantizing):
    """The first 64 lanes of a head are rotated instead of the last."""

    shift: int | None = None  # how many lanes too early; None: the head begins with them

    def rotate(self, o: torch.Tensor, rows: torch.Tensor, config: CaseConfig) -> torch.Tensor:
        """Other lanes moved under the rotation and back."""
        shift = config.nope_dim if self.shift is None else self.shift
        return super().rotate(o.roll(shift, -1), rows, config).roll(-shift, -1)


class OneLaneEarly(FirstLanes):
    """Lanes 447..510 are rotated."""

    shift = 1


class HeadWidthFrequencies(Quantizing):
    """Frequencies with the head's width as denominator instead of the rotated width."""

    def table_rows(self, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """theta^(-2j/512)."""
        half = table.shape[1] // 2
        frequency = 10_000.0 ** (-torch.arange(half).double() * 2 / 512)
        angle = positions.double()[:, None] * frequency
        return torch.cat([angle.cos(), angle.sin()], 1).float()


class NextPosition(Faulty):
    """Position + 1."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Every token one further."""
        return super().quantize(o, (positions + 1) % len(cos_sin_cache), cos_sin_cache, config=config)


class PositionOfTokenBefore(Faulty):
    """The position of token t - 1."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Positions moved by one token."""
        return super().quantize(o, positions.roll(1), cos_sin_cache, config=config)


class FirstPlusToken(Faulty):
    """The first position plus the token's number, as if a request were one gapless run."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Consecutive positions."""
        run = (positions[:1] + torch.arange(len(positions))) % len(cos_sin_cache)
        return super().quantize(o, run, cos_sin_cache, config=config)


class ShortTable(Faulty):
    """A table of its own length: positions behind its end are clipped to the last row."""

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Clipped."""
        return super().quantize(o, positions.clamp(max=TABLE_ROWS - 1), cos_sin_cache, config=config)


class PositionsOfTheCapture(Faulty):
    """A replayed graph keeps the positions of its capture, the first call with this many tokens."""

    def __init__(self, arch: Any) -> None:
        super().__init__(arch)
        self._captured: dict[int, torch.Tensor] = {}

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Right on the first call."""
        captured = self._captured.setdefault(len(positions), positions.clone())
        return super().quantize(o, captured.clamp(max=len(cos_sin_cache) - 1), cos_sin_cache, config=config)
