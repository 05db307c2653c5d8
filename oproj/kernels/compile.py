"""CUDA C++ to a loaded kernel: NVRTC through ``cuda.core``, so that no CUDA toolkit is needed; cached on disk.

Both come from PyPI (extra ``gpu``). The cache is ``cuda.core``'s own, keyed by source, options and compiler version.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import torch

SOURCE = "inv_rope_quant.cu"
NAME = "inv_rope_quant"


def source() -> str:
    """The kernel's CUDA C++ source."""
    return resources.files("oproj.kernels").joinpath(SOURCE).read_text(encoding="utf-8")


class LaunchShape(NamedTuple):
    """How a call is cut: ``tokens`` a warp, ``warps`` a block, at least ``blocks`` blocks a multiprocessor.

    ``stream_stores``: codes leave the L2 first. ``keep_writes``: loads do not displace written lines in the L2, which
    then reach the memory in longer runs.
    """

    tokens: int
    warps: int
    blocks: int
    stream_stores: bool
    keep_writes: bool


def defines(config: str, shape: LaunchShape, early_positions: bool) -> dict[str, str]:
    """The macros of one compiled form; ``config`` are the template arguments of ``quantize_heads``."""
    return {
        "CONFIG": config,
        "WARPS": str(shape.warps),
        "MIN_BLOCKS": str(shape.blocks),
        "STREAM_STORES": str(int(shape.stream_stores)),
        "KEEP_WRITES": str(int(shape.keep_writes)),
        "EARLY_POSITIONS": str(int(early_positions)),
    }


def program(macros: dict[str, str], arch: str) -> Any:
    """A ``cuda.core`` program for ``arch`` ("sm_90a"); compiling needs no GPU. Raises ``ImportError``."""
    from cuda.core import Program, ProgramOptions

    text = "".join(f"#define {name} {value}\n" for name, value in macros.items()) + source()
    return Program(text, code_type="c++", options=ProgramOptions(std="c++17", arch=arch))


@cache
def kernel(device_index: int, macros: tuple[tuple[str, str], ...], name: str = NAME) -> Any:
    """The loaded kernel ``name`` for a device, compiled once a process and found in the disk cache by later ones."""
    from cuda.core import Device
    from cuda.core.utils import FileStreamProgramCache

    device = Device(device_index)
    device.set_current()
    with FileStreamProgramCache() as disk:
        return program(dict(macros), f"sm_{device.arch}").compile("cubin", cache=disk).get_kernel(name)


class TorchStream:
    """PyTorch's current stream as ``cuda.core`` takes foreign streams."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.current_stream(device).cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)
