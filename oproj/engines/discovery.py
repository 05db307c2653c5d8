"""Find a DeepGEMM that really works, and say of every other one why it does not.

All distributions (sgl-deep-gemm, tokenspeed-deepgemm, deep-gemm, a source build) install the same import
name, and a build for another torch imports well and fails at its first call. So a candidate is located by its
attribute ``fp8_einsum`` and proven by one tiny product against an exact sum. Which release fails how was seen
on an H200 with torch 2.11 (``SYMPTOMS``).

The first product of a process may compile for some seconds. Compiled kernels go to DeepGEMM's own cache
(``DG_JIT_CACHE_DIR``, default ``~/.deep_gemm``); that variable is the user's and is not touched here.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.machinery import PathFinder
from types import ModuleType

import torch

from oproj.activation import empty_scales, empty_values
from oproj.arch import Arch, arch_of_capability

CANDIDATES = ("deep_gemm", "vllm.third_party.deep_gemm")

# (pattern in the error text, what it means). The first match is reported, the error's own text behind it.
SYMPTOMS: tuple[tuple[str, str], ...] = (
    (r"Dimension specified as -?\d+ but tensor has no dimensions", "built for another torch"),
    (r"undefined symbol: \S*(3tvm|TVMFFI)", "built for another apache-tvm-ffi"),
    (r"undefined symbol: \S*(3c10|2at|5torch|THP|aoti_torch)", "built for another torch"),
    (r"(lib(torch|c10)\S*\.so\S*): cannot open shared object", "built for another torch"),
    (r"No module named '?tvm_ffi|import of tvm_ffi halted", "its dependency apache-tvm-ffi is not installed"),
    (r"lib(cudart|nvrtc|cublas)\S*: cannot open shared object", "built for another CUDA"),
    (r"no kernel image|Unsupported arch|Unknown (recipe|SF transformation)", "no kernel for this GPU"),
)

Probe = Callable[[ModuleType, Arch, torch.device], None]


class ProbeFailed(RuntimeError):
    """The probe ran and its result is wrong."""


@dataclass(frozen=True)
class Finding:
    """What is known of one candidate. ``why_not`` is empty exactly when it works."""

    module: str
    installed: bool
    distribution: str | None  # several names where several distributions overwrote each other
    version: str | None
    file: str | None
    works: bool
    why_not: str

    def line(self) -> str:
        """One plain line for people."""
        if not self.installed:
            return f"{self.module}: {self.why_not}"
        source = f"{self.distribution or 'no distribution (source tree)'} {self.version or '(no version)'}"
        return f"{self.module} from {source}, {self.file}: {'works' if self.works else self.why_not}"


def examine(
    name: str, *, device: torch.device | None = None, arch: Arch | None = None, probe: Probe | None = None
) -> Finding:
    """Import candidate ``name`` and prove it on ``device`` (default: the current GPU) for row ``arch``.

    ``probe`` replaces ``probe_einsum``; it raises where the product fails or is wrong. A broken candidate
    never raises here: what went wrong is the finding. ``examined`` is the same, cached for the process.
    """
    if device is not None and arch is None:
        raise ValueError(f"arch is None; say which row device={device} is of")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return Finding(name, False, None, None, None, False, "not installed")
        return _finding(name, None, explain(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a foreign extension may raise anything while it loads, or exit; it is reported
        return _finding(name, None, explain(error))
    if not callable(getattr(module, "fp8_einsum", None)):
        return _finding(name, module, "has no fp8_einsum: another API (deep-gemm 1.0.0 is one of early 2025)")
    problem = ""
    if device is None:
        device, arch, problem = current_gpu()
    if device is None or arch is None:
        return _finding(name, module, problem)
    try:
        (probe or probe_einsum)(module, arch, device)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as above: the reason goes into the finding
        return _finding(name, module, explain(error))
    return _finding(name, module, "")


def explain(error: BaseException, environ: Mapping[str, str] | None = None) -> str:
    """Plain words for a failure of a DeepGEMM, with the last line of the error's own text."""
    text = f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    detail = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    detail = detail if len(detail) <= 300 else detail[:297] + "..."
    meaning = next((words for pattern, words in SYMPTOMS if re.search(pattern, text)), "fails")
    if meaning == "fails" and not isinstance(error, ProbeFailed):
        compiler = cuda_compiler(environ)
        if compiler is None:
            meaning = "fails, and no CUDA compiler is found (set CUDA_HOME or put nvcc on PATH)"
        elif re.search("(?i)nvcc|nvrtc", text):
            meaning = f"its kernels do not compile with {compiler}"
    return f"{meaning} ({detail})"


def cuda_compiler(environ: Mapping[str, str] | None = None) -> str | None:
    """What compiles DeepGEMM's kernels here: nvcc's path, ``"NVRTC"`` when the user chose it, or ``None``."""
    env = os.environ if environ is None else environ
    if env.get("DG_JIT_USE_NVRTC", "0") not in ("", "0"):
        return "NVRTC"
    homes = [env.get("CUDA_HOME"), env.get("CUDA_PATH")]
    for home in [home for home in homes if home]:
        if os.access(os.path.join(home, "bin", "nvcc"), os.X_OK):
            return os.path.join(home, "bin", "nvcc")
    found = shutil.which("nvcc", path=env.get("PATH", ""))
    default = "/usr/local/cuda/bin/nvcc"
    return found or (default if os.access(default, os.X_OK) else None)


def current_gpu() -> tuple[torch.device | None, Arch | None, str]:
    """The current CUDA device and its row; where one is missing, the text says why."""
    if not torch.cuda.is_available():
        no_cuda = torch.version.cuda is None
        why = f"torch {torch.__version__} is built without CUDA" if no_cuda else "torch sees none"
        return None, None, f"no CUDA GPU: {why}"
    index = torch.cuda.current_device()
    capability = torch.cuda.get_device_capability(index)
    arch = arch_of_capability(*capability)
    name = torch.cuda.get_device_name(index)
    problem = "" if arch else f"no kernel for {name} (compute capability {capability[0]}.{capability[1]})"
    return torch.device("cuda", index), arch, problem


def probe_einsum(module: ModuleType, arch: Arch, device: torch.device) -> None:
    """One product of T=8, G=2, N=128, K=256 with unit scales; every output must equal the exact sum.

    Codes are integers in -2..2, so that every partial sum is exact in each row's arithmetic and one BF16
    rounding remains. Raises ``ProbeFailed`` for a wrong output, and whatever the candidate raises.
    """
    tokens, groups, n, k = 8, 2, 128, 256
    a = _small_integers((tokens, groups, k), 40503)
    b = _small_integers((groups, n, k), 30011)
    expected = torch.einsum("bhr,hdr->bhd", a, b).to(torch.bfloat16)
    codes = empty_values(tokens, groups, k, torch.float8_e4m3fn, device)
    codes.copy_(a.to(torch.float8_e4m3fn))
    weight = b.to(torch.float8_e4m3fn).to(device)
    scale_a, scale_b = _unit_scales(arch, tokens, groups, n, k, device)
    out = torch.full((tokens, groups, n), float("nan"), dtype=torch.bfloat16, device=device)
    module.fp8_einsum("bhr,hdr->bhd", (codes, scale_a), (weight, scale_b), out, recipe=arch.recipe())
    wrong = out.cpu().view(torch.int16) != expected.view(torch.int16)
    if bool(wrong.any()):
        index = tuple(int(i) for i in wrong.nonzero()[0])
        raise ProbeFailed(
            f"{int(wrong.sum())} of {wrong.numel()} probe outputs are wrong; first at {index}: "
            f"{float(out[index])} instead of {float(expected[index])}"
        )


def _small_integers(shape: tuple[int, ...], step: int) -> torch.Tensor:
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return ((index * step * 65537 >> 13) % 5 - 2).to(torch.float64).view(shape)


def _unit_scales(
    arch: Arch, tokens: int, groups: int, n: int, k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    packed = arch.tma_aligned_scales
    columns = k // 512 + (k % 512 > 0) if packed else k // 128
    scale_a = empty_scales(tokens, groups, columns, packed, device)
    if packed:
        scale_a.fill_(0x7F7F7F7F)  # four UE8M0 bytes 127: 2**0
        word = torch.full((groups, columns, n), 0x7F7F7F7F, dtype=torch.int32, device=device)
        return scale_a, word.transpose(1, 2)
    scale_a.fill_(1.0)
    return scale_a, torch.ones((groups, n // 128, columns), dtype=torch.float32, device=device)


def _finding(name: str, module: ModuleType | None, why_not: str) -> Finding:
    distribution, version = _distribution_of(name.split(".")[0])
    if module is not None:
        version = version or getattr(module, "__version__", None)
    file = getattr(module, "__file__", None)
    if module is None:  # it did not load; say at least where it lies
        spec = PathFinder.find_spec(name.split(".")[0])
        file = spec.origin if spec is not None else None
    return Finding(name, True, distribution, version, file, why_not == "", why_not)


def _distribution_of(package: str) -> tuple[str | None, str | None]:
    names = sorted(set(metadata.packages_distributions().get(package, ())))
    if not names:
        return None, None
    return " + ".join(names), " + ".join(metadata.version(name) for name in names)


@cache
def examined(name: str) -> Finding:
    """``examine`` on the current GPU, once a process."""
    return examine(name)


def discover(candidates: tuple[str, ...] = CANDIDATES) -> tuple[Finding, ...]:
    """Findings for all candidates (cached for the process)."""
    return tuple(examined(name) for name in candidates)


def first_working(candidates: tuple[str, ...] = CANDIDATES) -> Finding | None:
    """The first candidate that works; later ones are then not even imported."""
    return next((finding for finding in map(examined, candidates) if finding.works), None)
