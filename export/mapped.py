"""Owns files that are mapped into memory: tensors as views of them, and giving their pages back; must not know formats.

The mapping is private, and nobody writes to it: all processes that map a file share the page cache.
"""

import json
import math
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch

from export.errors import ExportError


class MappedFile:
    """A file in memory; its pages count as this process's until they are given back.

    Args:
        path: The file; it must not change while it is mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __len__(self) -> int:
        return len(self._map)

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous tensor that starts at a byte of the file; a view, not a copy.

        Raises:
            ExportError: The file ends before it does.
        """
        count = math.prod(shape)
        if offset + count * dtype.itemsize > len(self._map):
            raise ExportError(
                f"{self.path}: ends at byte {len(self._map)}, inside a tensor of {list(shape)}; it was cut off"
            )
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def release(self) -> None:
        """Give the pages back; they are read again when somebody looks."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def __getitem__(self, span: slice) -> bytes:
        return self._map[span]


SAFETENSORS_DTYPES = {"I64": torch.int64, "F32": torch.float32, "F16": torch.float16, "U8": torch.uint8}
"""The dtypes of a state file, by their names in its header."""


def map_safetensors(file: MappedFile, names: Iterable[str]) -> list[torch.Tensor]:
    """Tensors of a safetensors file in the given order; safetensors' own reader cannot give pages back.

    Raises:
        ExportError: The header is damaged, or a tensor is not there or cut off; names it.
    """
    length = int.from_bytes(file[:8], "little")
    try:
        header = json.loads(file[8 : 8 + length])
        found = {name: header[name] for name in names}
        return [
            file.tensor(
                8 + length + entry["data_offsets"][0], SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"])
            )
            for entry in found.values()
        ]
    except (ValueError, KeyError, TypeError) as exc:
        raise ExportError(f"{file.path}: not a state file that holds {list(names)}: {exc!r}") from exc
