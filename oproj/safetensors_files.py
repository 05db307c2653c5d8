"""Tensors by name over one or many safetensors files; a tensor is read when it is sliced, not before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class CheckpointError(ValueError):
    """A checkpoint that is not what the configuration says; the text names file or tensor, found and expected."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of an open file: shape and dtype from the header, values on slicing."""

    file: Path
    name: str
    handle: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> torch.dtype | str:
        """A torch dtype, or safetensors' own name for one that torch has not."""
        found = self.handle.get_slice(self.name).get_dtype()
        return DTYPES.get(found, found)

    def __getitem__(self, index: Any) -> torch.Tensor:
        try:
            return self.handle.get_slice(self.name)[index]
        except SafetensorError as error:
            raise CheckpointError(f"{self.file}: {self.name} cannot be read: {error}") from error


class StoredTensors(Mapping[str, StoredTensor]):
    """All tensors of some files, by name. ``index`` says which file holds a tensor; without it headers do."""

    def __init__(self, files: list[Path], index: Mapping[str, Path] | None = None) -> None:
        self._handles: dict[Path, Any] = {}
        self._index: dict[str, Path] = dict(index or {})
        if index is None:
            for file in files:
                for name in self._open(file).keys():  # noqa: SIM118  (not a mapping)
                    if name in self._index:
                        raise CheckpointError(f"{name} is in both {self._index[name]} and {file}")
                    self._index[name] = file

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt", device="cpu")
            except SafetensorError as error:
                raise CheckpointError(f"{file} is no whole safetensors file: {error}") from error
            except FileNotFoundError as error:
                raise CheckpointError(f"{file} is missing; the index names it") from error
            except OSError as error:
                raise CheckpointError(f"{file} cannot be opened: {error}") from error
        return self._handles[file]

    def __getitem__(self, name: str) -> StoredTensor:
        file = self._index[name]
        handle = self._open(file)
        if name not in handle.keys():  # noqa: SIM118
            raise CheckpointError(f"{file} holds no {name}; the index says it does")
        return StoredTensor(file, name, handle)

    def __contains__(self, name: object) -> bool:
        return name in self._index  # without opening the file

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def open_checkpoint(path: Path) -> StoredTensors:
    """The tensors under ``path``: a ``.safetensors`` file, an index ``.json``, or a folder with an index or files.

    Raises ``FileNotFoundError`` where nothing is, ``CheckpointError`` for a damaged file or index.
    """
    if path.is_dir():
        if (path / INDEX).is_file():
            return _indexed(path / INDEX)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{path} holds neither {INDEX} nor a .safetensors file")
        return StoredTensors(files)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is neither a file nor a folder")
    return _indexed(path) if path.suffix == ".json" else StoredTensors([path])


def _indexed(index: Path) -> StoredTensors:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is no JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to file names")
    for name, file in weight_map.items():
        if Path(file).name != file or file in ("", ".."):  # an index must not lead out of its folder
            raise CheckpointError(f"{index} puts {name} into {file!r}; expected a file name without a folder")
    return StoredTensors([], {name: index.parent / file for name, file in weight_map.items()})
