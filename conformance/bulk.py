"""Bulk proof on a GPU: more than 10^9 outputs of DeepGEMM and codes of the serving quantiser against the model.

Both sides work on the same device tensors and are compared there, so that the model (``SoftwareEngine`` on CUDA) is the
only cost. ``python -m conformance.bulk --out DIR [--vllm DIR]`` writes ``bulk.json`` with evidence records.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from conformance import golden_inputs, vllm_kernel
from conformance.record import FACTS, write_json
from oproj.activation import empty_scales, empty_values, float_to_ue8m0, pack_ue8m0
from oproj.engines import Engine, EngineUnavailable
from oproj.engines.software import SoftwareEngine
from oproj.rope import cos_sin_cache
from oproj.weights import layout_weight_scales

CODE_FAMILIES = golden_inputs.FAMILIES
ROWS = (4096, 1, 63, 64, 65, 127, 128, 129)  # tokens around the tiles; the first is the bulk
WO_A = (16, 1024, 4096)  # groups, columns, K: V4-Pro on one rank
WO_B = ((7168, 16384), (7168, 2048), (4096, 8192))  # hidden, K: V4-Pro at TP 1 and 8, V4-Flash at TP 1
QUANTIZER_TOKENS = 1024
OUTLIER_BITS = (0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x7F7F)  # NaN, Inf, zero, tiny, largest


@dataclass
class Tally:
    """What one stage's comparisons add up to."""

    stage: str
    compared: int = 0
    mismatched: int = 0
    parts: list[str] = field(default_factory=list)
    first: str = ""

    def add(self, label: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """Count BF16, FP8 or integer tensors of one shape bit by bit; any BF16 NaN equals any other."""
        wrong = _bits(left) != _bits(right)
        if left.dtype == torch.bfloat16:
            wrong &= ~(left.isnan() & right.isnan())
        bad = int(wrong.sum())
        self.compared += wrong.numel()
        self.mismatched += bad
        if label not in self.parts:
            self.parts.append(label)
        if bad and not self.first:
            at = tuple(int(i) for i in wrong.nonzero()[0])
            self.first = f"{label} at {at}: {int(_bits(left)[at]):#x} and {int(_bits(right)[at]):#x}"


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


class Draw:
    """Codes and scales drawn on the device from small tables of each family (``golden_inputs``)."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)

    def codes(self, family: str, shape: tuple[int, ...]) -> torch.Tensor:
        table = golden_inputs.codes(family, golden_inputs.generator(f"table/{family}"), (65536,))
        return torch.from_numpy(table).to(self.device)[self.integers(0, 65536, shape)]

    def pair(
        self, family: str, a_shape: tuple[int, ...], b_shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of both operands; ``cancel`` and ``lone_subnormal`` tie them together as ``golden_inputs.pair``."""
        if family == "lone_subnormal":
            a, b = self.integers(0x08, 0x10, a_shape), self.integers(0x08, 0x18, b_shape)
            a[..., ::32] = self.integers(1, 8, a[..., ::32].shape)
            b[..., ::32] = self.integers(0x78, 0x7F, b[..., ::32].shape)
            return a.to(torch.uint8), b.to(torch.uint8)
        a, b = self.codes(family, a_shape), self.codes(family, b_shape)
        if family == "cancel":
            half = a_shape[-1] // 2
            a[..., half:] = a[..., :half]
            moved = b[..., :half] ^ 0x80
            nudge = (self.integers(0, 10, moved.shape) == 0) & ((moved & 0x7F) < 0x7E)
            b[..., half:] = moved + nudge
        return a, b

    def scales(self, choice: str, shape: tuple[int, ...]) -> torch.Tensor:
        """FP32 scales; ``special`` mixes in zero, subnormals, huge values, Inf and NaN."""
        spread = torch.exp2(self.integers(-9, 10, shape).float())
        if choice == "pow2":
            return spread
        general = spread * (1 + self.integers(0, 2**23, shape).float() * 2.0**-23)
        if choice == "general":
            return general
        special = torch.tensor(
            [0.0, 2.0**-149, 2.0**-126, 2.0**127, 3e38, float("inf"), float("nan")], device=self.device
        )
        rare = self.integers(0, 400, shape) == 0
        return torch.where(rare, special[self.integers(0, len(special), shape)], general)


def scale_choices(engine: Engine, family: str) -> tuple[str, ...]:
    """Scale families of a row: any FP32 where it takes FP32, powers of two for UE8M0."""
    if engine.arch.tma_aligned_scales:
        return ("pow2",)
    return ("pow2", "general", "special") if family in ("bits", "normal") else ("pow2", "general")


def activation(engine: Engine, codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[T, G, K]`` and FP32 scales ``[T, G, K/128]`` in the layout of the engine's row."""
    packed = engine.arch.tma_aligned_scales
    tokens, groups, k = codes.shape
    values = empty_values(tokens, groups, k, torch.float8_e4m3fn, codes.device)
    values.copy_(codes.view(torch.float8_e4m3fn))
    source = pack_ue8m0(float_to_ue8m0(scales)) if packed else scales
    return values, empty_scales(tokens, groups, source.shape[2], packed, codes.device).copy_(source)


def prove_wo_a(hardware: Engine, model: Engine, draw: Draw) -> Tally:
    """``fp8_einsum`` over every code family, scale family and row count, all groups of V4-Pro."""
    tally = Tally("wo_a")
    groups, columns, k = WO_A
    for family in CODE_FAMILIES:
        a, b = draw.pair(family, (max(ROWS), groups, k), (groups, columns, k))
        weight = b.view(torch.float8_e4m3fn)
        for choice in scale_choices(hardware, family):
            sa = draw.scales(choice, (max(ROWS), groups, k // 128))
            sb = layout_weight_scales(
                draw.scales(choice, (groups, columns // 128, k // 128)), arch=hardware.arch, rows=columns
            )
            for rows in ROWS:
                x = activation(hardware, a[-rows:], sa[-rows:])
                z = [torch.full((rows, groups, columns), 7.0, dtype=torch.bfloat16, device=a.device) for _ in range(2)]
                for engine, out in zip((hardware, model), z, strict=True):
                    engine.fp8_einsum("bhr,hdr->bhd", x, (weight, sb), out, recipe=hardware.arch.recipe())
                tally.add(f"{family}/{choice}", *z)
    return tally


def prove_wo_b(hardware: Engine, model: Engine, draw: Draw) -> Tally:
    """``fp8_gemm_nt`` at the local shapes of ``wo_b``."""
    tally = Tally("wo_b")
    for hidden, k in WO_B:
        for family in ("normal", "wide", "positive"):
            a, b = draw.pair(family, (max(ROWS), 1, k), (1, hidden, k))
            choice = scale_choices(hardware, family)[-1]
            sa = draw.scales(choice, (max(ROWS), 1, k // 128))
            sb = layout_weight_scales(
                draw.scales(choice, (1, hidden // 128, k // 128)), arch=hardware.arch, rows=hidden
            )
            for rows in ROWS:
                values, scale = activation(hardware, a[-rows:], sa[-rows:])
                y = [torch.full((rows, hidden), 7.0, dtype=torch.bfloat16, device=a.device) for _ in range(2)]
                for engine, out in zip((hardware, model), y, strict=True):
                    engine.fp8_gemm_nt(
                        (values[:, 0], scale[:, 0]), (b[0].view(torch.float8_e4m3fn), sb[0]), out,
                        recipe=hardware.arch.recipe(),
                    )  # fmt: skip
                tally.add(f"{hidden}x{k} {family}/{choice}", *y)
    return tally


def quantizer_inputs(draw: Draw, family: str, heads: int) -> torch.Tensor:
    """BF16 ``[T, heads, 512]``: normal, wide (2**+-60 per 64 dims), ``bits`` (any BF16 pattern that is finite) and
    ``special`` (normal with NaN, Inf, zeros and extreme values sprinkled in)."""
    shape = (QUANTIZER_TOKENS, heads, 512)
    if family == "bits":
        bits = draw.integers(0, 0x7F80, shape) | (draw.integers(0, 2, shape) << 15)
        return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)
    o = torch.randn(shape, device=draw.device, generator=draw.generator)
    if family == "wide":
        o *= torch.exp2(draw.integers(-60, 61, (*shape[:2], 8)).float()).repeat_interleave(64, -1)
    o = o.bfloat16()
    if family == "special":
        patterns = torch.tensor([b - 65536 if b >= 32768 else b for b in OUTLIER_BITS], device=draw.device)
        where = draw.integers(0, 300, shape) == 0
        chosen = patterns.to(torch.int16)[draw.integers(0, len(OUTLIER_BITS), shape)]
        o = torch.where(where, chosen.view(torch.bfloat16), o)
    return o


def prove_quantizer(draw: Draw, vllm: str | None) -> tuple[Tally, str]:
    """The serving engine's kernel against the CPU quantiser: every mode, group size and input family."""
    serve, origin = vllm_kernel.load(vllm)
    software, tally = SoftwareEngine("sm90"), Tally("quantize")
    table = cos_sin_cache("yarn", 1 << 17)
    on_device = table.to(draw.device)
    for heads, family in ((128, "normal"), (128, "wide"), (128, "bits"), (128, "special"), (8, "normal")):
        o = quantizer_inputs(draw, family, heads)
        positions = draw.integers(0, table.shape[0], (QUANTIZER_TOKENS,))
        for block, packed, quantize in (
            (128, False, True), (128, True, True), (64, True, True), (32, True, True), (128, False, False),
        ):  # fmt: skip
            shape: dict[str, Any] = {"n_groups": heads // 8, "heads_per_group": 8, "quant_group_size": block}
            mode: dict[str, Any] = {"tma_aligned_scales": packed, "quantize": quantize}
            theirs = serve(o, positions, on_device, **shape, **mode)
            ours = software.inv_rope_fp8_quant(o.cpu(), positions.cpu(), table, **shape, **mode)
            label = (
                f"{family} {heads} heads block {block} {'packed' if packed else 'fp32'}{'' if quantize else ' bf16'}"
            )
            for mine, other in zip(ours, theirs, strict=True):
                tally.add(label, mine.contiguous(), other.contiguous().cpu())
    return tally, origin


def main(out: Path, vllm: str | None) -> int:
    """Prove on the current GPU and write ``bulk.json``; exit codes of ``oproj``."""
    from oproj.engines.deep_gemm import DeepGemmEngine
    from oproj.engines.discovery import current_gpu

    row = current_gpu()[1]
    try:
        hardware = DeepGemmEngine(row or "sm90")
    except EngineUnavailable as error:
        print(f"nothing proven: {error}", file=sys.stderr)
        return 3
    model = SoftwareEngine(hardware.arch, device=hardware.device)
    described = hardware.describe()
    facts: dict[str, Any] = {"arch": hardware.arch.name, **{key: described.get(key) for key in FACTS}}
    facts |= {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": "python -m conformance.bulk"}
    records, problems = [], 0
    for record in _records(hardware, model, Draw(hardware.device), vllm):
        problems += record.pop("problem")
        records.append({**facts, **record})
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "bulk.json", {"schema": 1, "records": records})
    if not any(record["compared"] for record in records):
        return 4
    return 1 if problems else 0


def _records(hardware: Engine, model: Engine, draw: Draw, vllm: str | None) -> Iterator[dict[str, Any]]:
    """One evidence record a stage; a stage that cannot run is printed and counts as a problem."""
    for prove in (
        lambda: prove_quantizer(draw, vllm),
        lambda: (prove_wo_a(hardware, model, draw), ""),
        lambda: (prove_wo_b(hardware, model, draw), ""),
    ):
        start = time.monotonic()
        try:
            tally, origin = prove()
        except vllm_kernel.VllmUnavailable as error:
            print(f"quantize: {error}", file=sys.stderr)
            continue
        seconds = time.monotonic() - start
        print(
            f"{tally.stage}: {tally.compared} compared, {tally.mismatched} differ, {seconds:.1f} s {tally.first}",
            flush=True,
        )
        rows = "" if tally.stage == "quantize" else f"; rows {', '.join(map(str, sorted(ROWS)))}"
        yield {
            "stage": tally.stage, "compared": tally.compared, "mismatched": tally.mismatched,
            "detail": f"bulk: {'; '.join(tally.parts)}{rows}", "problem": tally.mismatched > 0,
            **({"package": origin.split(" ")[0], "version": origin} if origin else {}),
        }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m conformance.bulk", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="folder of bulk.json")
    parser.add_argument("--vllm", help="folder of an unpacked vLLM wheel")
    arguments = parser.parse_args()
    sys.exit(main(arguments.out, arguments.vllm))
