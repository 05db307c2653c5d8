"""What is installed on this machine, which engine works for which architecture, and why another does not.

Plain data, so that a report can keep it and ``oproj env`` can print it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from typing import Any

import torch

from oproj.arch import ARCHS, Arch, arch_of_capability
from oproj.engines.discovery import Finding, cuda_compiler, discover
from oproj.evidence import measured_stages
from oproj.versions import PACKAGES as TESTED_PACKAGES
from oproj.versions import lines as tested_lines
from oproj.versions import tested

PACKAGES = (
    "oproj",
    "numpy",
    "numba",
    "pandas",
    "pyarrow",
    "hypothesis",
    "apache-tvm-ffi",
    "triton",
    "flashinfer-python",
    "vllm",
    "sglang",
)
STAGES = ("quantize", "wo_a", "wo_b")


def collect() -> dict[str, Any]:
    """Everything as JSON-able data. Needs no GPU and none of the optional packages.

    Keys: python, platform, cpus, torch, cuda, driver, nvcc, jit_cache, gpus, packages, deep_gemm, tested, engines.
    """
    findings = discover()
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "nvcc": cuda_compiler(),
        "jit_cache": os.environ.get("DG_JIT_CACHE_DIR"),
        "gpus": gpus(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "deep_gemm": [vars(finding) for finding in findings],
        "tested": tested(torch.__version__, {name: installed_version(name) for name in TESTED_PACKAGES}),
        "engines": {arch.name: _engine_of(arch, findings) for arch in ARCHS.values()},
    }


def to_text(environment: dict[str, Any]) -> str:
    """``collect()``'s data as plain lines without brackets (rich would read those as markup)."""
    env = environment
    lines = [
        f"python     {env['python']} on {env['platform']}, {env['cpus']} CPUs",
        f"torch      {env['torch']}, CUDA {env['cuda'] or 'none'}",
        f"driver     {env['driver'] or 'no NVIDIA driver found'}",
        f"nvcc       {env['nvcc'] or 'not found'}",
        f"jit cache  {env['jit_cache'] or 'default of DeepGEMM (DG_JIT_CACHE_DIR is not set)'}",
    ]
    lines += [
        f"gpu {gpu['index']}      {gpu['name']}, compute capability {gpu['capability']}, "
        f"row {gpu['arch'] or 'none'}, {gpu['memory_gib']} GiB"
        for gpu in env["gpus"]
    ] or ["gpu        none"]
    lines += ["", "packages"]
    lines += [f"  {name:<18} {version or 'not installed'}" for name, version in env["packages"].items()]
    lines += ["", "DeepGEMM"]
    lines += ["  " + Finding(**finding).line() for finding in env["deep_gemm"]]
    lines += ["", "tested combinations", *("  " + line for line in tested_lines(env["tested"]))]
    lines += ["", "engine that 'auto' takes"]
    for arch, row in env["engines"].items():
        lines.append(f"  {arch:<6} {row['auto'] or 'none'}: {row['why']}")
        lines.append(f"         confirmed on hardware: {', '.join(row['measured']) or 'nothing'}")
    return "\n".join(line.replace("[", "(").replace("]", ")") for line in lines)


def gpus() -> list[dict[str, Any]]:
    """Index, name, compute capability, architecture row and memory of every visible CUDA device."""
    rows = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        arch = arch_of_capability(properties.major, properties.minor)
        rows.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "arch": arch.name if arch else None,
                "memory_gib": round(properties.total_memory / 2**30),
            }
        )
    return rows


@cache
def driver_version() -> str | None:
    """NVIDIA driver version from ``nvidia-smi``; ``None`` where that tool is missing or finds no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else None


def installed_version(distribution: str) -> str | None:
    """Version of a distribution, or ``None`` when it is not installed; imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _engine_of(arch: Arch, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """What ``get_engine("auto", arch)`` gives: the GPU engine where the current device is of that row."""
    here = torch.cuda.is_available() and arch_of_capability(*torch.cuda.get_device_capability()) is arch
    working = next((finding for finding in findings if finding.works), None)
    auto: str | None
    if not torch.cuda.is_available():
        auto, why = "software", "no CUDA GPU"
    elif not here:
        auto, why = "software", f"the current device is no {arch.name}"
    elif working is not None:
        auto, why = "deep_gemm", f"{working.module} {working.version or ''} works on the current device"
    else:
        auto = None
        why = f"the device is {arch.name} but no DeepGEMM works; ask for engine 'software' by name"
    stages = measured_stages(arch.name)
    return {"auto": auto, "why": why, "measured": [stage for stage in STAGES if stage in stages]}
