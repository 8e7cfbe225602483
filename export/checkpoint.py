"""Owns the reading of ``torch.distributed.checkpoint`` directories and state dicts: chunks by name, mapped, not loaded.

Must not know a TorchRec module, nor what ``.metadata`` looks like (``export.checkpoint_metadata``). No tensor is unpickled.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from export.checkpoint_metadata import METADATA_FILE, StoredChunk, read_metadata
from export.errors import ExportError, first_sentence
from export.mapped import MappedFile
from export.shards import local_shards

DENSE = "dense tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A rectangle of a tensor."""

    offsets: tuple[int, ...]
    numbers: torch.Tensor
    release: Callable[[], None] | None = None
    """Gives back the pages of a mapped one."""


class State(Protocol):
    """Tensors by fully qualified name."""

    @property
    def place(self) -> str:
        """What to call it in a message."""
        ...

    def names(self) -> Sequence[str]:
        """All tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        ...

    def chunks(self, name: str) -> list[Chunk]:
        """Its chunks that this process can read."""
        ...


class StateDict:
    """A state dict of plain tensors, ``ShardedTensor`` and ``DTensor``.

    Args:
        tensors: By fully qualified name.

    Raises:
        ExportError: A name is not a string.
    """

    place = "state dict"

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        for name in tensors:
            if not isinstance(name, str):
                raise ExportError(f"{self.place}: name {name!r} is no string; pass module.state_dict()")
        self._tensors = {name: value for name, value in tensors.items() if _is_array(value)}

    def names(self) -> Sequence[str]:
        """See ``State``."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``State``."""
        return tuple(self._tensor(name).size())

    def chunks(self, name: str) -> list[Chunk]:
        """See ``State``."""
        return [Chunk(offsets=offsets, numbers=numbers) for offsets, numbers in local_shards(self._tensor(name))]

    def _tensor(self, name: str) -> Any:
        """The tensor of a name, if it is a dense one; else raises ExportError."""
        value = self._tensors[name]
        if _is_sharded(value):
            return value
        if not isinstance(value, torch.Tensor):
            raise ExportError(f"{self.place}: {name}: is a {type(value).__name__}, not a tensor; pass a torch.Tensor")
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            kind = "nested" if value.is_nested else "quantised" if value.is_quantized else value.layout
            raise ExportError(f"{self.place}: {name}: is a {kind} tensor; pass a dense one of plain numbers")
        return value


def _is_array(value: object) -> bool:
    return _is_sharded(value) or isinstance(value, torch.Tensor) or hasattr(value, "shape")


def _is_sharded(value: object) -> bool:
    return hasattr(value, "local_shards")


class Checkpoint:
    """A checkpoint directory that any number of ranks wrote.

    Args:
        directory: Holds ``.metadata`` and the ranks' files.

    Raises:
        ExportError: It is no checkpoint, or its metadata holds what it should not.
    """

    def __init__(self, directory: Path) -> None:
        self.place = str(directory)
        self._directory = directory
        self._tensors = read_metadata(directory / METADATA_FILE)
        self._files: dict[str, MappedFile] = {}

    def names(self) -> Sequence[str]:
        """See ``State``."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``State``."""
        return self._tensors[name].size

    def chunks(self, name: str) -> list[Chunk]:
        """See ``State``; numbers are views of the mapped file.

        Raises:
            ExportError: A file is missing or cut off, or holds something else.
        """
        # An empty one has the place of its neighbour, and DCP's own index cannot tell them apart.
        return [self._chunk(name, chunk) for chunk in self._tensors[name].chunks if math.prod(chunk.sizes)]

    def _chunk(self, name: str, chunk: StoredChunk) -> Chunk:
        _check_place(chunk, self.shape(name), f"{self.place}: {name}")
        span = chunk.span
        if span is None:
            raise ExportError(
                f"{self.place}: {name}: no file holds its chunk at {chunk.offsets}; write the checkpoint again"
            )
        if span.transforms:
            raise ExportError(f"{self.place}: {name}: stored through {list(span.transforms)}; save it without")
        file = self._file(span.file)
        layout, start = _layout(file, span.offset, span.length, name)
        if tuple(layout.shape) != chunk.sizes:
            raise ExportError(f"{file.path}: {name}: holds {tuple(layout.shape)}, {METADATA_FILE} says {chunk.sizes}")
        stored = file.tensor(span.offset + start, layout.dtype, (layout.untyped_storage().nbytes() // layout.itemsize,))
        numbers = torch.as_strided(stored, chunk.sizes, layout.stride(), layout.storage_offset())
        return Chunk(offsets=chunk.offsets, numbers=numbers, release=file.release)

    def _file(self, relative: str) -> MappedFile:
        if relative not in self._files:
            path = self._directory / relative
            if self._directory.resolve() not in path.resolve().parents:
                raise ExportError(
                    f"{self.place}: the file {relative!r}, which {METADATA_FILE} names, lies outside of it at "
                    f"{path.resolve()}; copy the checkpoint with its links followed"
                )
            try:
                self._files[relative] = MappedFile(path)
            except (OSError, ValueError) as exc:
                raise ExportError(f"{path}: {exc}; copy the whole checkpoint directory") from exc
        return self._files[relative]


def _check_place(chunk: StoredChunk, size: tuple[int, ...], where: str) -> None:
    fits = len(chunk.offsets) == len(chunk.sizes) == len(size) and all(
        offset + length <= whole for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )
    if not fits:
        raise ExportError(
            f"{where}: {METADATA_FILE} puts a chunk of {chunk.sizes} at {chunk.offsets}, which is not in {size}; copy the "
            "checkpoint again"
        )


def _layout(file: MappedFile, offset: int, length: int, name: str) -> tuple[torch.Tensor, int]:
    """Shape, strides and dtype of a stored tensor, and where in its item the numbers begin; the numbers are not read."""
    try:
        with FakeTensorMode():
            layout = torch.load(cast("IO[bytes]", _View(file, offset, length)), weights_only=True)
        kind = _kind(layout)
        start = layout.untyped_storage()._checkpoint_offset if kind == DENSE else None
    except Exception as exc:  # whatever torch.load makes of a damaged item
        raise ExportError(
            f"{file.path}: {name}: cannot be read ({first_sentence(exc)}); copy the checkpoint again"
        ) from exc
    if not isinstance(start, int):
        raise ExportError(f"{file.path}: {name}: holds a {kind}, not a {DENSE} as torch.save stores one")
    return layout, start


def _kind(item: object) -> str:
    """What a stored item is; ``DENSE`` where its bytes are its numbers."""
    if not isinstance(item, torch.Tensor):
        return type(item).__name__
    if item.layout is not torch.strided:
        return f"{item.layout} tensor"
    return "negated or conjugated view" if item.is_neg() or item.is_conj() else DENSE


class _View(io.RawIOBase):
    """A span of a mapped file, as a file of its own."""

    def __init__(self, file: MappedFile, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._file[self._start + self._at : self._start + min(self._at + len(buffer), self._length)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_state(checkpoint: object) -> State:
    """A checkpoint directory by its path, or a state dict.

    Raises:
        ExportError: It is neither.
    """
    if isinstance(checkpoint, Mapping):
        return cast("State", StateDict(checkpoint))
    if isinstance(checkpoint, (str, Path)):
        return cast("State", Checkpoint(Path(checkpoint)))
    raise ExportError(
        f"checkpoint {checkpoint!r}: use the path of a torch.distributed.checkpoint directory, or a state dict"
    )


def find_name(state: State, suffix: str) -> str | None:
    """The one name that is ``suffix``, alone or behind a path of modules; None if there is none.

    Raises:
        ExportError: Several are.
    """
    found = [name for name in state.names() if name == suffix or name.endswith("." + suffix)]
    if len(found) > 1:
        raise ExportError(
            f"{state.place}: {found} all end in {suffix}; pass a state with the collection's tensors only"
        )
    return found[0] if found else None


def read_whole(state: State, name: str) -> torch.Tensor:
    """A whole tensor, copied.

    Raises:
        ExportError: A part of it is not here, or its chunks do not make one tensor.
    """
    shape, chunks = state.shape(name), state.chunks(name)
    held = sum(chunk.numbers.numel() for chunk in chunks)
    if not chunks or held != math.prod(shape):
        raise ExportError(f"{state.place}: {name}: {held} of its numbers are in this process, not all of {shape}")
    dtype = chunks[0].numbers.dtype
    if any(chunk.numbers.is_meta for chunk in chunks):
        raise ExportError(f"{state.place}: {name}: is on the meta device, without numbers; pass the trained state")
    if any(chunk.numbers.dtype != dtype for chunk in chunks):
        raise ExportError(f"{state.place}: {name}: its chunks differ in dtype; copy the checkpoint again")
    whole, seen = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
    for chunk in chunks:
        spans = tuple(slice(a, a + size) for a, size in zip(chunk.offsets, chunk.numbers.shape, strict=True))
        whole[spans] = chunk.numbers.cpu()
        seen[spans] = True
        if chunk.release is not None:
            chunk.release()
    if not bool(seen.all()):
        raise ExportError(f"{state.place}: {name}: its chunks overlap and leave a gap; copy the checkpoint again")
    return whole
