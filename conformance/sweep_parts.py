"""Parts that workers of a sweep leave where the driver sees them: a shared folder, or whatever fsspec has a URL for.

A task leaves its part under a temporary name that only it knows, and the driver gives the final name to one part of
each shard. So a task that runs twice, because its worker was taken for dead or its answer was lost, doubles no row.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from oproj.engines import EngineUnavailable
from reports.store import missing_parts


def publish(source: Path, url: str, name: str) -> str:
    """Leave the file ``source`` under ``url`` for the part ``name``; the temporary name that it has there."""
    files, folder = fsspec.core.url_to_fs(url)
    files.makedirs(folder, exist_ok=True)
    temporary = f".{name}.{secrets.token_hex(8)}.tmp"
    files.put_file(str(source), f"{folder}/{temporary}")
    return temporary


@dataclass(frozen=True)
class Parts:
    """Where parts go: ``url`` as all machines see it, '' for ``folder`` itself, which is that of the run."""

    folder: Path
    url: str = ""

    @property
    def shared(self) -> str:
        """Where workers leave their parts: a URL or an absolute path."""
        url = self.url or str(self.folder)
        return url if "://" in url or "::" in url else str(Path(url).resolve())

    def start(self, *, resumed: bool) -> None:
        """Make the folders, remove unfinished parts, and those of earlier runs under the URL unless ``resumed``.

        Raises ``EngineUnavailable`` where fsspec needs another package for the URL, ``ValueError`` for an unknown one.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        files, there = self._files()
        files.makedirs(there, exist_ok=True)
        for path in files.glob(f"{there}/.rows-*.parquet.*.tmp"):
            files.rm_file(path)
        if not resumed and self.url:
            for name in self._names():
                files.rm_file(f"{there}/{name}")

    def fetch(self) -> None:
        """Every part under the URL that is not in the folder: those of a run whose driver was killed or is new."""
        if self.url:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in missing_parts(self.folder, self._names()):
                self._fetch(name)

    def accept(self, left: str, name: str) -> None:
        """Make what a worker has ``left`` the part ``name``. Raises ``ValueError`` where it is not seen from here."""
        files, there = self._files()
        try:
            files.mv(f"{there}/{left}", f"{there}/{name}")
        except FileNotFoundError as error:
            raise ValueError(
                f"a worker wrote a part to {self.shared}, and it is not there for this machine. Not all of them see "
                "one folder: name one that they do with --out, or a URL with --parts"
            ) from error
        if self.url:
            self._fetch(name)

    def _fetch(self, name: str) -> None:
        files, there = self._files()
        temporary = self.folder / f".{name}.{secrets.token_hex(8)}.tmp"
        files.get_file(f"{there}/{name}", str(temporary))
        os.replace(temporary, self.folder / name)

    def _names(self) -> list[str]:
        files, there = self._files()
        return sorted(path.rpartition("/")[2] for path in files.glob(f"{there}/rows-*.parquet"))

    def _files(self) -> tuple[Any, str]:
        try:
            return fsspec.core.url_to_fs(self.shared)
        except ImportError as error:
            raise EngineUnavailable(f"--parts {self.url}: {error}") from error
        except ValueError as error:
            raise ValueError(f"--parts {self.url!r} is no URL that fsspec knows: {error}") from error
