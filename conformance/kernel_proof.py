"""The GPU kernels against the software quantisers: every mode, every input family, more than 10^9 codes.

``python -m conformance.kernel_proof --out DIR [--quick]`` writes ``kernel.json``. Under ``compute-sanitizer`` take
``--quick``: every mode once, on a few tokens.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from conformance import bulk
from conformance.bulk import Draw, Tally
from conformance.record import write_json
from oproj import kernels
from oproj.engines.software import SoftwareEngine
from oproj.engines.software.quantizers import quantize_groups
from oproj.environment import driver_version
from oproj.rope import cos_sin_cache

MODES = [(block, packed, True) for block in (128, 64, 32) for packed in (False, True)] + [(128, False, False)]
VARIANTS = ("fma_cos", "mul_mul_add")
PADDING_HEADS = 8  # o is the first heads of a wider buffer whose other heads are loud


def calls(quick: bool) -> Iterator[tuple[int, int, str]]:
    """(tokens, heads, family): every launch shape, also with --quick."""
    if quick:
        yield from ((5, 16, "special"), (1, 8, "normal"), (130, 128, "wide"), (769, 128, "normal"))
        return
    for family in ("normal", "wide", "bits", "special"):
        yield 1003, 128, family
    yield from ((4097, 16, "wide"), (65537, 8, "normal"), (1, 128, "special"), (2, 64, "bits"), (3, 24, "wide"))
    yield from ((17, 128, "normal"), (99, 128, "special"))


def run(draw: Draw, quick: bool) -> tuple[Tally, Tally]:
    """(serving bits, NaN policy): the kernel with the serving engine's NaN rule equals the software quantiser; by its
    own rule it differs from that in NaN codes alone, exactly where the serving rule launders."""
    serving, own = Tally("fused kernel"), Tally("fused kernel, NaN kept")
    table = cos_sin_cache("yarn", 1 << 17)
    software, on_device = SoftwareEngine("sm90"), table.to(draw.device)
    for tokens, heads, family in calls(quick):
        bulk.QUANTIZER_TOKENS = tokens
        wide = bulk.quantizer_inputs(draw, family, heads + PADDING_HEADS)
        wide[:, heads:] = 3e38
        o, positions = wide[:, :heads], draw.integers(0, table.shape[0], (tokens,))
        on_cpu = (o.cpu(), positions.cpu(), table)
        for (block, packed, quantize), variant in itertools.product(MODES, VARIANTS):
            mode: dict[str, Any] = {
                "n_groups": heads // 8, "heads_per_group": 8, "quant_group_size": block,
                "tma_aligned_scales": packed, "quantize": quantize, "variant": variant,
            }  # fmt: skip
            form = f"block {block} {'packed' if packed else 'fp32'}" if quantize else "bf16"
            label = f"{family} {tokens}x{heads} {form} {variant}"
            expected = software.inv_rope_fp8_quant(*on_cpu, **mode)
            for early in (False, True):
                got = kernels.fused_inv_rope_fp8_quant(
                    o, positions, on_device, **mode, serving_nan=True, early_positions=early
                )
                for mine, other in zip(got, expected, strict=True):
                    serving.add(label, mine.contiguous().cpu(), other.contiguous())
            if quantize and family == "special":
                kept, _ = kernels.fused_inv_rope_fp8_quant(o, positions, on_device, **mode)
                codes, laundered = (x.contiguous().view(torch.uint8) for x in (kept, got[0]))
                nan = (codes & 0x7F) == 0x7F
                own.add(label, torch.where(nan, 0x7E, codes), laundered)
                own.mismatched += int(not nan.any())
    return serving, own


def run_rows(draw: Draw, quick: bool) -> Tally:
    """The quantiser of z against the software rows, z a slice of a wider buffer."""
    tally = Tally("quantiser of z")
    shapes = ((1, 512), (5, 1024)) if quick else ((1, 1024), (5, 2048), (1003, 16384), (4096, 8192))
    for (rows, k), family in itertools.product(shapes, ("normal", "wide", "bits", "special")):
        bulk.QUANTIZER_TOKENS = rows
        z = bulk.quantizer_inputs(draw, family, k // 512 + 1).flatten(1)[:, :k]
        for group_size, packed in ((128, False), (128, True), (32, True)):
            expected = quantize_groups(z.cpu(), group_size=group_size, packed=packed)
            got = kernels.quantize_rows(z, group_size=group_size, packed=packed)
            for mine, other in zip(got, expected, strict=True):
                tally.add(f"{family} {rows}x{k} {group_size} {packed}", mine.contiguous().cpu(), other.contiguous())
    return tally


def main(out: Path, quick: bool) -> int:
    """Prove on the current GPU; exit codes of ``oproj``."""
    reason = kernels.unavailable_reason()
    if reason:
        print(f"nothing proven: the fused kernel cannot run: {reason}", file=sys.stderr)
        return 3
    draw = Draw(torch.device("cuda"))
    tallies = (*run(draw, quick), run_rows(draw, quick))
    facts = {
        "device": torch.cuda.get_device_name(), "driver": driver_version(), "cuda": torch.version.cuda,
        "torch": torch.__version__, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m conformance.kernel_proof",
    }  # fmt: skip
    records = []
    for tally in tallies:
        print(f"{tally.stage}: {tally.compared} compared, {tally.mismatched} differ {tally.first}", flush=True)
        records.append({**facts, "stage": tally.stage, "compared": tally.compared, "mismatched": tally.mismatched})
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "kernel.json", {"schema": 1, "records": records})
    if not all(tally.compared for tally in tallies):
        return 4
    return int(any(tally.mismatched for tally in tallies))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m conformance.kernel_proof", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="folder of kernel.json")
    parser.add_argument("--quick", action="store_true", help="every mode once, on a few tokens")
    arguments = parser.parse_args()
    sys.exit(main(arguments.out, arguments.quick))
