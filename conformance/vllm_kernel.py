"""vLLM's own fused quantiser, from an installed vLLM or from the one file of an unpacked wheel.

vLLM pins one torch, so on another torch the package cannot be installed next to the DeepGEMM under test. The kernel
itself needs five names of vLLM; small stand-ins of ours satisfy them. Unpack the wheel (a zip) into an ignored folder
and name it: ``--vllm DIR`` or the environment variable ``OPROJ_VLLM``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from oproj.activation import tma_aligned_size

MODULE = "vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant"
FILE = Path(*MODULE.split(".")).with_suffix(".py")
FP8_MAX = 448.0
DEPENDENT_LAUNCH = True  # programmatic dependent launch, as vLLM asks for from compute capability 9 on
Quantizer = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class VllmUnavailable(RuntimeError):
    """No vLLM kernel here; the text says what was looked for."""


def load(folder: str | Path | None = None) -> tuple[Quantizer, str]:
    """``(fused_inv_rope_fp8_quant, where it comes from)``.

    ``folder``: of an unpacked vLLM wheel (default: ``OPROJ_VLLM``; without it the installed package is imported). The
    function takes vLLM's arguments (``oproj.quantize.fused_inv_rope_fp8_quant`` without ``engine``) on CUDA tensors.
    Raises ``VllmUnavailable``.
    """
    folder = folder or os.environ.get("OPROJ_VLLM")
    if not folder:
        try:
            return importlib.import_module(MODULE).fused_inv_rope_fp8_quant, "vllm (installed)"
        except ImportError as error:
            raise VllmUnavailable(
                f"vllm cannot be imported ({error}); install it, or unpack its wheel and pass the folder as OPROJ_VLLM"
            ) from error
    path = Path(folder) / FILE
    if not path.is_file():
        raise VllmUnavailable(f"{path} is not there; {folder} must be the folder of an unpacked vLLM wheel")
    return _from_file(path), f"vllm (unpacked wheel {_version(Path(folder))})"


def _version(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("vllm-*.dist-info"))
    return found[0].removeprefix("vllm-").removesuffix(".dist-info") if found else "of unknown version"


def _from_file(path: Path) -> Quantizer:
    operators: dict[str, Callable[..., Any]] = {}
    spec = importlib.util.spec_from_file_location("oproj_vllm_fused_inv_rope", path)
    if spec is None or spec.loader is None:
        raise VllmUnavailable(f"{path} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    with _stand_ins(operators):
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    if set(operators) != {"fused_inv_rope_fp8_quant_kernel"}:
        raise VllmUnavailable(f"{path} registers {sorted(operators)}; this version of vLLM is not known to the suite")
    kernel = operators["fused_inv_rope_fp8_quant_kernel"]

    def fused_inv_rope_fp8_quant(
        o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, n_groups: int, heads_per_group: int,
        nope_dim: int = 448, rope_dim: int = 64, quant_group_size: int = 128, tma_aligned_scales: bool = False,
        quantize: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        tokens, _, head_dim = o.shape
        k = heads_per_group * head_dim
        blocks = k // quant_group_size
        columns = (blocks // 4 if tma_aligned_scales else blocks) if quantize else 0
        rows = tma_aligned_size(tokens, 4) if quantize else tokens
        values, scales = kernel(
            o, positions, cos_sin_cache, heads_per_group, quant_group_size, head_dim // quant_group_size, nope_dim,
            rope_dim // 2, tma_aligned_scales, FP8_MAX, rows, tokens, n_groups, k, columns, quantize,
        )  # fmt: skip
        return values.transpose(0, 1), scales.transpose(0, 1) if quantize else scales

    return fused_inv_rope_fp8_quant


def _launcher(describe: Callable[..., Any]) -> Callable[..., None]:
    """Launch what the kernel class describes: a grid and arguments by name, tensors as ``<name>_ptr``."""
    signature = inspect.signature(describe)

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        grid, named = describe(self, *args, **kwargs)
        kernel = type(self).kernel
        bound = signature.bind(self, *args, **kwargs).arguments
        for name, value in bound.items():
            for target in (name, f"{name}_ptr"):
                if target in kernel.arg_names and target not in named:
                    named[target] = value
        kernel[grid](**named)

    return launch


class _KernelBase:
    def __class_getitem__(cls, key: Any) -> type:
        return cls


class _Platform:
    @staticmethod
    def is_arch_support_pdl() -> bool:
        """Programmatic dependent launch exists from compute capability 9 on."""
        return DEPENDENT_LAUNCH and torch.cuda.get_device_capability()[0] >= 9


@contextmanager
def _stand_ins(operators: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """The names that the file imports, for the time of its import only."""
    import triton
    import triton.language as tl

    def register(op_name: str, op_func: Callable[..., Any], **_: Any) -> None:
        operators[op_name] = op_func

    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.warmup": {},
        "vllm.model_executor.warmup.jit_warmup": {"kernel_launcher": _launcher},
        "vllm.model_executor.warmup.jit_warmup_triton_helper": {
            "LaunchSpec": tuple, "TritonWarmupTensor": object, "VllmTritonJitKernel": _KernelBase,
        },
        "vllm.platforms": {"current_platform": _Platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"direct_register_custom_op": register},
    }  # fmt: skip
    before = {name: sys.modules.get(name) for name in contents}
    try:
        for name, attributes in contents.items():
            module = ModuleType(name)
            module.__dict__.update(attributes, __path__=[])
            sys.modules[name] = module
        yield
    finally:
        for name, earlier in before.items():
            if earlier is None:
                del sys.modules[name]
            else:
                sys.modules[name] = earlier
