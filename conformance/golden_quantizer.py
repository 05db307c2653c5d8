"""Golden vectors of the quantiser: what the serving engine's kernel and the fused kernel wrote on a GPU.

``python -m conformance.golden_quantizer --out DIR --vllm DIR`` records ``golden_quantizer.npz`` on a GPU, and refuses
where the two kernels differ. Inputs and results lie in the file, so a replay needs nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conformance import vllm_kernel
from conformance.bulk import OUTLIER_BITS
from conformance.golden import write_npz
from conformance.golden_inputs import generator
from oproj import kernels
from oproj.engines.software import SoftwareEngine
from oproj.environment import driver_version
from oproj.rope import cos_sin_rows

SHAPE = (6, 16, 512)  # tokens (two padding rows), heads (two groups), head_dim
MODES = {
    "fp32-128": (128, False, True), "packed-128": (128, True, True), "packed-64": (64, True, True),
    "packed-32": (32, True, True), "bf16": (128, False, False),
}  # fmt: skip


def inputs() -> dict[str, np.ndarray]:
    """``o`` (BF16 bits: wide values; NaN, Inf, zeros and extremes in the last two tokens), positions and table."""
    rng = generator("golden/quantizer")
    tokens = SHAPE[0]
    spread = np.exp2(rng.integers(-40, 40, (*SHAPE[:2], 16))).repeat(32, axis=-1)
    values = torch.from_numpy((rng.normal(0, 1, SHAPE) * spread).astype(np.float32)).bfloat16()
    bits = values.view(torch.int16).numpy().view(np.uint16).copy()
    special = rng.choice(np.array(OUTLIER_BITS, np.uint16), SHAPE)
    bits[4:] = np.where(rng.random((2, *SHAPE[1:])) < 0.01, special[4:], bits[4:])
    bits[0, 3] = 0  # a head of zeros
    places = np.array([0, 1, 255, 4096, 65_537, 1_048_575])
    return {"o": bits, "positions": np.arange(tokens), "table": cos_sin_rows("yarn", places)}


def tensors(arrays: dict[str, np.ndarray], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o BF16, positions int64 and table FP32 on a device."""
    o = torch.from_numpy(arrays["o"].view(np.int16)).view(torch.bfloat16)
    return tuple(t.to(device) for t in (o, torch.from_numpy(arrays["positions"]), torch.from_numpy(arrays["table"])))  # type: ignore[return-value]


def arguments(name: str) -> dict[str, Any]:
    """Keyword arguments of a mode."""
    block, packed, quantize = MODES[name]
    groups = {"n_groups": 2, "heads_per_group": 8, "quant_group_size": block}
    return {**groups, "tma_aligned_scales": packed, "quantize": quantize}


def as_arrays(name: str, result: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """(key, bits) of values and scales in logical order, NaN of BF16 values as 0x7FFF."""
    values, scales = (tensor.contiguous().cpu() for tensor in result)
    if values.dtype == torch.bfloat16:
        nan = values.isnan().numpy()
        yield f"{name}/values", np.where(nan, np.uint16(0x7FFF), values.view(torch.int16).numpy().view(np.uint16))
    else:
        yield f"{name}/values", values.view(torch.uint8).numpy()
    yield f"{name}/scales", scales.view(torch.int32).numpy()


def replay(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The software quantiser's bits for a mode, under the keys of the file."""
    o, positions, table = tensors(arrays, "cpu")
    return dict(as_arrays(name, SoftwareEngine("sm90").inv_rope_fp8_quant(o, positions, table, **arguments(name))))


def load(path: Path | str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """``(metadata, arrays)`` of a recorded file."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    return json.loads(arrays.pop("metadata").tobytes().decode("utf-8")), arrays


def main(out: Path, vllm: str | None) -> int:
    """Record on the current GPU; exit codes of ``oproj``."""
    reason = kernels.unavailable_reason()
    try:
        serve, origin = vllm_kernel.load(vllm)
    except vllm_kernel.VllmUnavailable as error:
        reason = reason or str(error)
    if reason:
        print(f"nothing recorded: {reason}", file=sys.stderr)
        return 3
    arrays = inputs()
    on_gpu = tensors(arrays, "cuda")
    for name in MODES:
        theirs = dict(as_arrays(name, serve(*on_gpu, **arguments(name))))
        ours = dict(as_arrays(name, kernels.fused_inv_rope_fp8_quant(*on_gpu, **arguments(name), serving_nan=True)))
        for key, bits in theirs.items():
            if not np.array_equal(bits, ours[key]):
                print(f"nothing recorded: the two kernels differ in {key}", file=sys.stderr)
                return 1
        arrays |= theirs
    metadata = {
        "device": torch.cuda.get_device_name(), "driver": driver_version(), "cuda": torch.version.cuda,
        "torch": torch.__version__, "kernels": f"{origin} and oproj.kernels, equal bits",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m conformance.golden_quantizer",
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_npz(out / "golden_quantizer.npz", arrays, metadata)
    print(f"recorded {len(arrays)} arrays in {out / 'golden_quantizer.npz'}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m conformance.golden_quantizer", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="folder of golden_quantizer.npz")
    parser.add_argument("--vllm", help="folder of an unpacked vLLM wheel")
    given = parser.parse_args()
    sys.exit(main(given.out, given.vllm))
