"""Record the signature of FlashInfer's sparse MLA decode from a wheel's source, without importing the wheel.

    python tests/data/record_flashinfer_signature.py flashinfer_python-0.7.4-py3-none-any.whl

Writes ``flashinfer_signature.json`` beside this file: distribution, version, SHA-256 of the source file, and each
parameter's name, kind and default (as source text; null where there is none).
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

SOURCE = "flashinfer/mla/_core.py"
FUNCTION = "trtllm_batch_decode_sparse_mla_dsv4"
TARGET = Path(__file__).with_name("flashinfer_signature.json")


def parameters(source: str) -> list[dict[str, Any]]:
    """Name, kind and default of each parameter of ``FUNCTION``; ``ValueError`` where the source has none of it."""
    found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == FUNCTION]
    if len(found) != 1:
        raise ValueError(f"{SOURCE} defines {FUNCTION} {len(found)} times; expected once")
    args = found[0].args
    if args.posonlyargs or args.vararg or args.kwarg:
        raise ValueError(f"{FUNCTION} takes positional-only or variable arguments, which this record does not hold")
    defaults: list[ast.expr | None] = [None] * (len(args.args) - len(args.defaults))
    defaults += args.defaults
    rows = [(arg, "POSITIONAL_OR_KEYWORD", default) for arg, default in zip(args.args, defaults, strict=True)]
    rows += [(arg, "KEYWORD_ONLY", default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [
        {"name": arg.arg, "kind": kind, "default": None if default is None else ast.unparse(default)}
        for arg, kind, default in rows
    ]


def record(wheel: Path) -> dict[str, Any]:
    """What the JSON file holds, from ``wheel``."""
    with zipfile.ZipFile(wheel) as archive:
        source = archive.read(SOURCE)
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = dict(line.split(": ", 1) for line in archive.read(metadata).decode().splitlines()[:3])
    return {
        "distribution": headers["Name"],
        "version": headers["Version"],
        "source": SOURCE,
        "sha256": hashlib.sha256(source).hexdigest(),
        "function": f"flashinfer.mla.{FUNCTION}",
        "parameters": parameters(source.decode()),
    }


def main(wheel: str, target: Path = TARGET) -> None:
    """Write ``target`` in one step."""
    part = target.with_suffix(".part")
    part.write_text(json.dumps(record(Path(wheel)), indent=1) + "\n")
    os.replace(part, target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
