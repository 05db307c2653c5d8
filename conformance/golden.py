"""Golden vectors: inputs and the bits that real hardware made of them, in npz files that need nothing else.

A file holds sets. Each set is one call: e4m3 codes as uint8, scales as FP32 in logical order, BF16 results as uint16.
Equal arrays are stored once; the JSON under ``metadata`` (uint8) says which array plays which part, and on what
device, driver, CUDA, torch and DeepGEMM, when, and by which command the results were recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oproj.activation import empty_scales, empty_values, float_to_ue8m0, pack_ue8m0, scale_columns
from oproj.arch import Arch, get_arch
from oproj.engines import Engine
from reports.files import write_atomically

SCHEMA = 1
EINSUM, GEMM = "fp8_einsum", "fp8_gemm_nt"
ARRAYS = ("a", "sa", "b", "sb", "d")
BLOCK = 128


@dataclass(frozen=True)
class GoldenSet:
    """One call. ``fp8_einsum``: a ``[T, G, K]``, sa ``[T, G, K/128]``, b ``[G, N, K]``, sb ``[G, ceil(N/128),
    K/128]``, d ``[T, G, N]``; ``fp8_gemm_nt``: the same without G. ``claim`` says what the set decides."""

    name: str
    op: str
    claim: str
    a: np.ndarray
    sa: np.ndarray
    b: np.ndarray
    sb: np.ndarray
    d: np.ndarray | None = None

    def with_result(self, bits: np.ndarray) -> GoldenSet:
        """The same set with result ``bits`` (uint16)."""
        return replace(self, d=bits)


def save(path: Path, sets: Iterable[GoldenSet], metadata: dict[str, Any]) -> None:
    """Write one npz atomically. Raises ``ValueError`` for a set without a result."""
    arrays: dict[str, np.ndarray] = {}
    entries = []
    for item in sets:
        if item.d is None:
            raise ValueError(f"set {item.name!r} has no result; run it before it is saved")
        entry: dict[str, Any] = {"name": item.name, "op": item.op, "claim": item.claim}
        for part in ARRAYS:
            array = np.ascontiguousarray(getattr(item, part))
            key = hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]
            arrays[key] = array
            entry[part] = key
        entries.append(entry)
    write_npz(path, arrays, {"schema": SCHEMA, **metadata, "sets": entries})


def write_npz(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    """Write arrays and ``metadata`` (JSON as uint8 under that key) as one npz, atomically."""
    text = json.dumps(metadata, indent=1, sort_keys=True)
    arrays = {**arrays, "metadata": np.frombuffer(text.encode("utf-8"), dtype=np.uint8)}

    def save_arrays(temporary: Path) -> None:
        with temporary.open("wb") as file:  # a file, since a name without .npz would get it appended
            np.savez_compressed(file, allow_pickle=False, **arrays)

    write_atomically(path, save_arrays)


def load(path: Path | str) -> tuple[dict[str, Any], tuple[GoldenSet, ...]]:
    """``(metadata, sets)`` of a file. Raises ``ValueError`` for an unknown schema or an incomplete file."""
    with np.load(path, allow_pickle=False) as file:
        metadata = json.loads(file["metadata"].tobytes().decode("utf-8"))
        if metadata.get("schema") != SCHEMA:
            raise ValueError(f"{path} has schema {metadata.get('schema')!r}; this version reads schema {SCHEMA}")
        missing = {entry[part] for entry in metadata["sets"] for part in ARRAYS} - set(file.files)
        if missing:
            raise ValueError(f"{path} lacks the arrays {sorted(missing)}")
        held = {key: file[key] for key in file.files if key != "metadata"}
    sets = tuple(
        GoldenSet(entry["name"], entry["op"], entry["claim"], **{part: held[entry[part]] for part in ARRAYS})
        for entry in metadata["sets"]
    )
    return metadata, sets


def run(engine: Engine, item: GoldenSet) -> np.ndarray:
    """BF16 bits (uint16) that ``engine`` computes for ``item``, in the scale layout of the engine's row.

    Raises ``ValueError`` where the row takes UE8M0 scales and the set's are not powers of two.
    """
    arch, device = get_arch(engine.arch), engine.device
    weight = codes_tensor(item.b).to(device)
    recipe = arch.recipe()
    out = torch.full(output_shape(item), float("nan"), dtype=torch.bfloat16, device=device)
    if item.op == EINSUM:
        tokens, groups, k = item.a.shape
        codes = empty_values(tokens, groups, k, torch.float8_e4m3fn, device).copy_(codes_tensor(item.a))
        a = (codes, activation_scales(arch, item.sa, device))
        b = (weight, weight_scales(arch, item.sb, item.b.shape[1], device))
        engine.fp8_einsum("bhr,hdr->bhd", a, b, out, recipe=recipe)
    else:
        a = (codes_tensor(item.a).to(device), activation_scales(arch, item.sa[:, None], device)[:, 0])
        b = (weight, weight_scales(arch, item.sb[None], item.b.shape[0], device)[0])
        engine.fp8_gemm_nt(a, b, out, recipe=recipe)
    return out.cpu().view(torch.int16).numpy().view(np.uint16)


def fits(arch: Arch | str, item: GoldenSet) -> bool:
    """Whether the row's scale format holds the set's scales: any FP32, or normal powers of two for UE8M0."""
    if not get_arch(arch).tma_aligned_scales:
        return True
    joined = np.concatenate([item.sa.ravel(), item.sb.ravel()]).view(np.uint32)
    return bool((((joined & 0x807FFFFF) == 0) & (joined > 0) & (joined < 0x7F800000)).all())


def output_shape(item: GoldenSet) -> tuple[int, ...]:
    """Shape of the result."""
    return (*item.a.shape[:-1], item.b.shape[-2])


def codes_tensor(codes: np.ndarray) -> torch.Tensor:
    """uint8 codes as a float8_e4m3fn tensor on the CPU."""
    return torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn)


def activation_scales(arch: Arch, scales: np.ndarray, device: torch.device) -> torch.Tensor:
    """FP32 ``[T, G, blocks]`` in the layout of ``arch``: FP32, or packed UE8M0, MN-major and TMA-aligned."""
    tokens, groups, blocks = scales.shape
    packed = arch.tma_aligned_scales
    columns = scale_columns(blocks * BLOCK, BLOCK, packed)
    source = torch.from_numpy(np.ascontiguousarray(scales))
    return empty_scales(tokens, groups, columns, packed, device).copy_(_words(source) if packed else source)


def weight_scales(arch: Arch, scales: np.ndarray, rows: int, device: torch.device) -> torch.Tensor:
    """FP32 ``[G, ceil(rows/128), blocks]`` in the layout of ``arch``: as it is, or repeated, packed, MN-major."""
    source = torch.from_numpy(np.ascontiguousarray(scales))
    if not arch.tma_aligned_scales:
        return source.to(device)
    words = _words(source).repeat_interleave(BLOCK, dim=1)[:, :rows]
    groups, _, columns = words.shape
    aligned = -(-rows // 4) * 4
    buffer = torch.zeros((groups, columns, aligned), dtype=torch.int32, device=device)
    view = buffer.as_strided((groups, rows, columns), (columns * aligned, 1, aligned))
    return view.copy_(words)


def _words(scales: torch.Tensor) -> torch.Tensor:
    exponents = float_to_ue8m0(scales)
    return pack_ue8m0(torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4)))


def differing(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Mask of BF16 results (uint16 bits) that differ; any NaN equals any NaN, +0 and -0 differ."""
    nan_left, nan_right = (left & 0x7FFF) > 0x7F80, (right & 0x7FFF) > 0x7F80
    return (left != right) & ~(nan_left & nan_right)
