"""Owns a shard's state file: named tensors whose numbers are made as they are written, streamed into safetensors.

Rows go from the module to the file in pieces, so an export needs little memory beside the module itself. Must not
decide what a shard holds (``export.shard_state``).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from export.contract import Placement, Routing, ShardTable, StateFile, Unknown
from export.mapped import SAFETENSORS_DTYPES
from export.overlays import OVERLAY
from export.programs import ProgramKind
from export.progress import Progress
from export.source import TableSource

_ALIGNMENT = 64
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor of a state file; its numbers are made when they are written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[torch.Tensor]]
    """Contiguous CPU tensors whose elements, one after the other, are the tensor."""

    @property
    def nbytes(self) -> int:
        """Size in the file, bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def ready(name: str, tensor: torch.Tensor) -> StateTensor:
    """A tensor whose numbers are there already."""
    return StateTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), chunks=lambda: [tensor])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """What a shard's state file or overlay file holds."""

    entries: tuple[ShardTable, ...]
    errors: Mapping[str, float]
    """By table, what its stored rows differ by at most; complete once the tensors have been written."""
    tensors: tuple[StateTensor, ...]
    """In the order of the file."""

    @property
    def tables(self) -> tuple[ShardTable, ...]:
        """The manifest's entries, with the error bounds of what has been written."""
        return tuple(
            entry.model_copy(update={"max_error": self.errors.get(entry.table, 0.0)}) for entry in self.entries
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState(StoredState):
    """What one shard of a base holds."""

    kind: ProgramKind
    """The program that reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTable:
    """A table with its routing, as the exporter hands it on."""

    source: TableSource
    routing: Routing
    placements: tuple[Placement, ...]
    unknown: Unknown

    def pieces_on(self, shard: int) -> tuple[Placement, ...]:
        """The pieces on one shard, in the order of their numbers there."""
        return tuple(piece for piece in self.placements if piece.shard == shard)


def write_state(path: Path, state: StoredState, on_progress: Progress) -> StateFile:
    """Stream a state into a new safetensors file and onto the disk; the path in the answer is the file's name only."""
    step = f"writing {path.parent.name}"
    header = _header(state)
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as file:
        for part in _serialised(header, state):
            file.write(part)
            digest.update(part)
            size += part.nbytes
            on_progress(step, size, 8 + len(header) + state.nbytes)
        file.flush()
        os.fsync(file.fileno())
    return StateFile(path=path.name, size_bytes=size, sha256=digest.hexdigest())


def _header(state: StoredState) -> bytes:
    offset, before_rows = 0, 0
    entries: dict[str, object] = {}
    for tensor in state.tensors:
        if tensor.name in {"rows", f"{OVERLAY}rows"}:
            before_rows = offset
        span = [offset, offset + tensor.nbytes]
        entries[tensor.name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset += tensor.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    # All before the rows are INT64: padding the header puts the rows on a cache line, and those on 8 bytes.
    return header + b" " * (-(8 + len(header) + before_rows) % _ALIGNMENT)


def _serialised(header: bytes, state: StoredState) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little"))
    yield memoryview(header)
    for tensor in state.tensors:
        size = 0
        for chunk in tensor.chunks():
            if chunk.numel():
                part = memoryview(np.ascontiguousarray(chunk.numpy()).view(np.uint8).data)
                size += part.nbytes
                yield part
        assert size == tensor.nbytes, tensor.name


def materialise(state: StoredState, on_progress: Progress, step: str) -> dict[str, torch.Tensor]:
    """All tensors of a state in memory, by name: for programs that hold their own."""
    tensors: dict[str, torch.Tensor] = {}
    size = 0
    for tensor in state.tensors:
        flat = torch.empty(int(np.prod(tensor.shape, dtype=np.int64)), dtype=tensor.dtype)
        at = 0
        for chunk in tensor.chunks():
            flat[at : at + chunk.numel()] = chunk.reshape(-1)
            at += chunk.numel()
            size += chunk.nbytes
            on_progress(step, size, state.nbytes)
        assert at == flat.numel(), tensor.name
        tensors[tensor.name] = flat.view(tensor.shape)
    return tensors
