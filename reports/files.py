"""Writing a file so that a reader never meets half of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], object]) -> Path:
    """Let `write(temporary)` fill a file in the folder of `path`, then rename it to `path`.

    The rename stays inside one file system, so a killed process leaves either the whole new file
    or what was there before. A failed write removes its temporary file and raises on.

    Raises: OSError where the folder cannot be made or written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` as UTF-8 with the line ends it has, atomically."""
    return write_atomically(path, lambda temporary: temporary.write_bytes(text.encode("utf-8")))


def _umask() -> int:
    # The process umask can only be read by setting it; mkstemp makes files that only the owner reads.
    mask = os.umask(0)
    os.umask(mask)
    return mask
