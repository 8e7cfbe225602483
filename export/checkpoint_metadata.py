"""Owns the reading of a checkpoint's ``.metadata``: a pickle, read into inert records and then checked, type by type.

Must not open a checkpoint's other files. No class of DCP, torch or pathlib is made, whatever the pickle asks for.
"""

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from export.contract import INT64_MAX
from export.errors import ExportError, first_sentence

T = TypeVar("T")

METADATA_FILE = ".metadata"

_ADMITTED: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}),
    "collections": frozenset({"OrderedDict"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpan:
    """Where an item lies."""

    file: str
    """Relative to the checkpoint."""
    offset: int
    length: int
    transforms: tuple[str, ...]
    """What DCP did to the bytes, by name; none as a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A rectangle that a rank wrote, as the metadata has it: of any number of dimensions, and anywhere."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: FileSpan | None
    """None where no file holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    size: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


class _Record:
    """Stands in for a class that the pickle names: keeps the fields that it is given, and does nothing."""

    fields: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.fields = state


_STAND_INS: Mapping[str, type] = {
    **{name: type(name, (_Record,), {}) for names in _ADMITTED.values() for name in names},
    "OrderedDict": type("OrderedDict", (_Record, dict), {}),
    "Size": tuple,
}


class _Unpickler(pickle._Unpickler):
    """The Python one: a damaged index makes the one in C allot a memo of up to 64 GB."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return _Record
        if name in _ADMITTED.get(module, ()):
            return _STAND_INS[name]
        named = f"{module}.{name}"
        named = named if named.isprintable() else repr(named)
        raise ExportError(f"names {named}, which no checkpoint of tensors needs: refused")


def read_metadata(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a ``.metadata`` file describes, by fully qualified name.

    Raises:
        ExportError: There is no such file, or it holds what it should not; names the field.
    """
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except OSError as exc:
        raise ExportError(
            f"{path}: {exc.strerror}; a checkpoint is the directory that torch.distributed.checkpoint.save wrote"
        ) from exc
    except ExportError as exc:
        raise ExportError(f"{path}: {exc}") from exc
    except Exception as exc:  # a damaged pickle raises many things
        raise ExportError(f"{path}: cannot be read ({first_sentence(exc)}); copy the checkpoint again") from exc
    if not _is(metadata, "Metadata") or not isinstance(metadata.fields.get("storage_data"), dict):
        raise ExportError(f"{path}: holds no metadata of a checkpoint on a file system")
    return _tensors(metadata, str(path))


def _tensors(metadata: _Record, path: str) -> dict[str, StoredTensor]:
    spans: dict[tuple[str, tuple[int, ...]], FileSpan] = {}
    for index, info in metadata.fields["storage_data"].items():
        name = _field(_expect(index, "MetadataIndex", f"{path}: storage_data"), "fqn", str, f"{path}: storage_data")
        where = f"{path}: storage_data of {name!r}"
        offsets = () if index.fields.get("offset") is None else _sizes(index, "offset", where)
        spans[name, offsets] = _span(_expect(info, "_StorageInfo", where), where)
    tensors = {}
    for name, entry in _field(metadata, "state_dict_metadata", dict, path).items():
        where = f"{path}: state_dict_metadata of {name!r}"
        if not isinstance(name, str):
            raise _damaged(f"{path}: state_dict_metadata: a name", name, "str")
        if _is(entry, "TensorStorageMetadata"):
            tensors[name] = _tensor(name, entry, spans, where)
        else:
            _expect(entry, "BytesStorageMetadata", where)
    return tensors


def _tensor(
    name: str, entry: _Record, spans: Mapping[tuple[str, tuple[int, ...]], FileSpan], where: str
) -> StoredTensor:
    chunks = []
    for chunk in _field(entry, "chunks", list, where):
        _expect(chunk, "ChunkStorageMetadata", f"{where}: chunks")
        offsets, sizes = _sizes(chunk, "offsets", where), _sizes(chunk, "sizes", where)
        chunks.append(StoredChunk(offsets=offsets, sizes=sizes, span=spans.get((name, offsets))))
    return StoredTensor(size=_sizes(entry, "size", where), chunks=tuple(chunks))


def _span(info: _Record, where: str) -> FileSpan:
    file = _field(info, "relative_path", str, where)
    if not file.isprintable():
        raise ExportError(f"{where}: relative_path {file!r} is no name of a file; copy the checkpoint again")
    offset, length = _field(info, "offset", int, where), _field(info, "length", int, where)
    _check_integers((offset, length), f"{where}: offset and length")
    transforms = info.fields.get("transform_descriptors") or ()
    if not isinstance(transforms, (list, tuple)) or not all(isinstance(item, str) for item in transforms):
        raise ExportError(f"{where}: transform_descriptors are not all names; copy the checkpoint again")
    return FileSpan(file=file, offset=offset, length=length, transforms=tuple(transforms))


def _sizes(record: _Record, name: str, where: str) -> tuple[int, ...]:
    sizes = _field(record, name, tuple, where)
    _check_integers(sizes, f"{where}: {name}")
    return sizes


def _check_integers(values: tuple[object, ...], where: str) -> None:
    if not all(isinstance(value, int) and 0 <= value <= INT64_MAX for value in values):
        raise ExportError(f"{where} are not all integers from 0 to 2^63 - 1; copy the checkpoint again")


def _field(record: _Record, name: str, kind: type[T], where: str) -> T:
    value = record.fields.get(name)
    if not isinstance(value, kind):
        raise _damaged(f"{where}: {name}", value, kind.__name__)
    return value


def _expect(value: object, name: str, where: str) -> _Record:
    if not isinstance(value, _Record) or not _is(value, name):
        raise _damaged(where, value, name)
    return value


def _is(value: object, name: str) -> bool:
    return isinstance(value, _STAND_INS[name])


def _damaged(where: str, value: object, expected: str) -> ExportError:
    return ExportError(f"{where} holds {type(value).__name__}, not {expected}; copy the checkpoint again")
