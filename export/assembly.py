"""Owns the writing of a version's files, and the manifest that describes them; must not make them visible.

Collects what the other modules make: traced programs, states, input hashes, the runtime.
"""

import importlib.metadata
import importlib.resources
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fbgemm_gpu
import torch

from export.changes import Touched, build_overlay
from export.contract import (
    Kind,
    Manifest,
    OutOfRange,
    Remap,
    RowDtype,
    Runtime,
    Shard,
    StateFile,
    Table,
    Toolchain,
    Zch,
    shard_dir,
    shard_model_name,
)
from export.contract.layout import (
    BYTECODE_GUARD,
    OVERLAY_FILE,
    PROGRAM_FILE,
    RUNTIME_FILE,
    STATE_FILE,
    TORCHSCRIPT_FILE,
)
from export.contract.publishing import write_file
from export.embedded import write_embedded
from export.input_hash import InputHashFiles
from export.oracle import eval_mode
from export.programs import ShardModule
from export.progress import Progress
from export.shard_state import build_state
from export.source import CollectionSource
from export.state import PlacedTable, ShardState, write_state
from export.stored import StoredShard
from export.trace import trace_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a delta is laid over."""

    manifest: Manifest
    directory: Path
    sha256: str
    """Of its manifest file."""
    touched: Touched | None = None
    """Where rows may have other numbers than in the base; None: anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionOrder:
    """Everything that decides what a version holds."""

    collection: str
    version: int = 0
    """Chosen once the collection is locked."""
    num_shards: int
    source: CollectionSource
    tables: tuple[PlacedTable, ...]
    """In config order."""
    input_hashes: InputHashFiles
    out_of_range: OutOfRange
    row_dtype: RowDtype = RowDtype.FP32
    runtime: Runtime = Runtime.PYTHON
    devices: tuple[str, ...] = ()
    """Of each shard; none: the CPU for all."""
    base: Base | None = None
    """Of a delta; None: the version is a base."""


def write_version(
    directory: Path, order: VersionOrder, shards: Iterable[int], on_progress: Progress, *, hashes: bool = True
) -> Iterator[StateFile | Shard]:
    """Write the files of shards, and the input hashes if so asked, into a directory that has none of them.

    Yields:
        Each file with its path relative to the directory, and each shard after its files.
    """
    for name, content in order.input_hashes.contents.items() if hashes else ():
        yield write_file(directory / name, content)
    for index in shards:
        place = shard_dir(directory, index)
        place.mkdir()
        if order.base is None:
            parts = _write_base(place, index, order, on_progress)
        else:
            parts = _write_delta(place, index, order, order.base, on_progress)
        for part in parts:
            if isinstance(part, StateFile):
                yield part.model_copy(update={"path": f"{place.name}/{part.path}"})
            else:
                yield part


def describe_version(
    order: VersionOrder, files: tuple[StateFile, ...], shards: tuple[Shard, ...], *, created_s: float
) -> Manifest:
    """The manifest of a version that has been written."""
    return Manifest(
        collection=order.collection,
        version=order.version,
        kind=Kind.BASE if order.base is None else Kind.DELTA,
        base=order.version if order.base is None else order.base.manifest.version,
        base_sha256=None if order.base is None else order.base.sha256,
        created_s=created_s,
        runtime=order.runtime,
        need_indices=order.source.need_indices,
        num_shards=order.num_shards,
        dim=order.source.dim,
        tables=tuple(_describe_table(order, table, shards) for table in order.tables),
        shards=shards,
        files=files,
        toolchain=Toolchain(
            kjtserve=importlib.metadata.version("kjtserve"),
            torch=torch.__version__,
            fbgemm_gpu=fbgemm_gpu.__version__,
            torchrec=importlib.metadata.version("torchrec"),
        ),
    )


def _write_base(place: Path, index: int, order: VersionOrder, on_progress: Progress) -> Iterator[StateFile | Shard]:
    state = build_state(index, order.num_shards, order.tables, dim=order.source.dim, row_dtype=order.row_dtype)
    yield from _write_shard(place, state, order.runtime, on_progress)
    yield Shard(
        index=index,
        model=shard_model_name(order.collection, index),
        tables=state.tables,
        width=state.kind.width,
        device=order.devices[index] if order.devices else "cpu",
        state=ShardModule(state.kind).state_names,
        state_bytes=state.nbytes,
    )


def _write_delta(
    place: Path, index: int, order: VersionOrder, base: Base, on_progress: Progress
) -> Iterator[StateFile | Shard]:
    stored = StoredShard(base.directory, base.manifest, index)
    on_progress("finding what changed", index, order.num_shards)
    with eval_mode(order.source.module):
        state = build_overlay(stored, base.manifest, order.tables, row_dtype=order.row_dtype, touched=base.touched)
        yield write_state(place / OVERLAY_FILE, state, on_progress)
    yield base.manifest.shards[index].model_copy(
        update={
            "tables": state.tables,
            "overlay": tuple(tensor.name for tensor in state.tensors),
            "overlay_bytes": state.nbytes,
        }
    )


def _write_shard(place: Path, state: ShardState, runtime: Runtime, on_progress: Progress) -> Iterator[StateFile]:
    if runtime is Runtime.PYTORCH:
        yield write_embedded(place / TORCHSCRIPT_FILE, state, on_progress)
        return
    on_progress("tracing the lookup", 0, 1)
    program = trace_shard(state.kind)
    on_progress("tracing the lookup", 1, 1)
    yield write_file(place / PROGRAM_FILE, program.exported)
    yield write_file(place / TORCHSCRIPT_FILE, program.torchscript)
    yield write_state(place / STATE_FILE, state, on_progress)
    model = importlib.resources.files("model_repo") / RUNTIME_FILE
    yield write_file(place / RUNTIME_FILE, model.read_bytes())
    yield write_file(place / BYTECODE_GUARD, b"")


def _describe_table(order: VersionOrder, table: PlacedTable, shards: tuple[Shard, ...]) -> Table:
    source = table.source
    zch = None
    if source.map is not None:
        held = [entry for shard in shards for entry in shard.tables if entry.table == source.name]
        zch = Zch(
            policy=source.map.policy,
            size=source.rows,
            occupied=sum(entry.zch_rows for entry in held),
            open_slots=sum(entry.zch_open_slots for entry in held),
        )
    return Table(
        name=source.name,
        rows=source.rows,
        dim=source.dim,
        row_dtype=order.row_dtype,
        features=source.features,
        embedding_names=source.embedding_names,
        remap=Remap.NONE if source.map is None else source.map.remap,
        unknown=table.unknown,
        out_of_range=order.out_of_range,
        routing=table.routing,
        placements=table.placements,
        training=None if source.map is None else source.map.training,
        mpzch=None if source.map is None else source.map.mpzch,
        input_hash=order.input_hashes.file_of.get(source.name),
        zch=zch,
    )
