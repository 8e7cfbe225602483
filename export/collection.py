"""Owns the order of an export and of a verification; each step lives in a module of its own.

Public: ``export_collection`` and ``verify_version``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar, get_args

from torch import nn
from torchrec.distributed.types import ParameterSharding

from export.assembly import VersionOrder, describe_version, write_version
from export.check import check_version
from export.contract import (
    Manifest,
    OutOfRange,
    RowDtype,
    Runtime,
    Shard,
    StateFile,
    Unknown,
    check_collection_name,
    version_dir,
)
from export.errors import ExportError
from export.input_hash import trace_input_hashes
from export.maps import Evicted
from export.placement import choose_plan, place_tables
from export.plans import Plan
from export.progress import Progress, silent
from export.publish import choose_version, lock_collection, publish, stage
from export.published import check_files, check_runtime, find_version
from export.reading import read_collection
from export.skew import warn_of_skew
from export.source import CollectionSource
from export.state import PlacedTable
from export.triton_config import render_config

_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification looked at; it raises when anything is wrong."""

    collection: str
    version: int
    files: int
    bytes: int
    ids: int
    """Ids whose answers were compared."""


def export_collection(
    module: nn.Module,
    repo: str | Path,
    *,
    name: str,
    num_shards: int | None = None,
    plan: str | Path | Plan | Mapping[str, ParameterSharding] | None = None,
    version: int | None = None,
    unknown: str = Unknown.TRAINING,
    out_of_range: str = OutOfRange.REJECT,
    row_dtype: str = RowDtype.FP32,
    runtime: str = Runtime.PYTHON,
    device: str | None = None,
    evicted: Evicted = "refuse",
    on_progress: Progress = silent,
) -> Manifest:
    """Write a TorchRec collection as a version of a Triton model repository, checked against the module first.

    The module is left as it was found. The version appears at once or not at all.

    Args:
        module: An unsharded ``EmbeddingCollection``, or a ``ManagedCollisionEmbeddingCollection`` whose collision
            modules are ``MCHManagedCollisionModule`` or ``HashZchManagedCollisionModule``.
        repo: The model repository; made if it is not there.
        name: The collection's name, which clients ask for.
        num_shards: Over how many shards to spread every table; 1 if there is no plan either.
        plan: Path of a plan.yaml, a ``Plan``, or TorchRec's ``EmbeddingModuleShardingPlan``, instead of ``num_shards``.
        version: A number that is not taken; None: the newest plus one.
        unknown: What an id that a managed-collision map does not hold gets: ``training`` (the row that the module
            gives in eval mode) or ``zero``.
        out_of_range: What an id outside a plain table gets: ``reject`` or ``zero``.
        row_dtype: How shards store rows: ``fp32`` (the trainer's own numbers), ``fp16`` or ``int8`` (row-wise); the
            manifest states what each shard's numbers differ by at most.
        runtime: ``python`` (Triton's Python backend) or ``pytorch`` (``pytorch_libtorch``).
        device: Where every shard's state lies, ``cpu`` or ``cuda:N``; None: as the plan says, else the CPU.
        evicted: What to do when ids were evicted and ``evict()`` was not called: ``refuse``, or ``reset``, which serves
            the rows that it would name as zeros.
        on_progress: Told (step, done, of how many).

    Returns:
        The manifest of the new version.

    Raises:
        ExportError: The module, the plan or an option cannot be served, the version exists, another export runs, the
            disk is full, or the artifacts do not answer as the module does. Nothing is published.
    """
    root = Path(repo)
    if evicted not in get_args(Evicted):
        raise ExportError(f"evicted {evicted!r}: use one of {', '.join(get_args(Evicted))}")
    source = read_collection(module, evicted=evicted)
    cut = choose_plan(source, num_shards=num_shards, plan=plan, device=device)
    checked_name = _check_name(name)
    tables = _place(source, cut, _choice(Unknown, "unknown", unknown))
    range_rule = _choice(OutOfRange, "out_of_range", out_of_range)
    served_by = _choice(Runtime, "runtime", runtime)
    _check_options(source, tables, range_rule)
    warn_of_skew(tables, cut.shards)
    hashes = trace_input_hashes(source)
    try:
        with lock_collection(root, checked_name):
            check_runtime(root, checked_name, served_by)
            order = VersionOrder(
                collection=checked_name,
                version=choose_version(root, checked_name, version),
                num_shards=cut.shards,
                source=source,
                tables=tables,
                input_hashes=hashes,
                out_of_range=range_rule,
                row_dtype=_choice(RowDtype, "row_dtype", row_dtype),
                runtime=served_by,
                devices=cut.devices,
            )
            return _export(root, order, on_progress)
    except OSError as exc:
        raise ExportError(f"{exc.filename or root}: {exc.strerror or exc}; nothing was published") from exc


def verify_version(
    repo: str | Path,
    name: str,
    module: nn.Module,
    version: int | None = None,
    *,
    on_progress: Progress = silent,
) -> VerifyReport:
    """Hold a published version against a module: checksums of every file, links, then every answer.

    Args:
        repo: The model repository.
        name: The collection.
        module: What the version was exported from; left as it was found.
        version: None: the newest.
        on_progress: Told (step, done, of how many).

    Raises:
        ExportError: The version is not there, a file is damaged, or an answer differs; names which.
    """
    root = Path(repo)
    source = read_collection(module)
    manifest = find_version(root, name, version)
    try:
        check_files(root, manifest, on_progress)
        directory = version_dir(root, manifest.collection, manifest.version)
        ids = check_version(directory, manifest, source, on_progress)
    except OSError as exc:
        raise ExportError(f"{exc.filename or root}: {exc.strerror or exc}") from exc
    return VerifyReport(
        collection=manifest.collection,
        version=manifest.version,
        files=len(manifest.files),
        bytes=sum(file.size_bytes for file in manifest.files),
        ids=ids,
    )


def _export(root: Path, order: VersionOrder, on_progress: Progress) -> Manifest:
    files: list[StateFile] = []
    shards: list[Shard] = []
    with stage(root, order.collection, order.version) as directory:
        for written in write_version(directory, order, on_progress):
            if isinstance(written, Shard):
                shards.append(written)
            else:
                files.append(written)
        manifest = describe_version(order, tuple(files), tuple(shards))
        check_version(directory, manifest, order.source, on_progress)
        publish(root, directory, manifest, [render_config(shard, manifest.runtime) for shard in shards])
    return manifest


def _place(source: CollectionSource, plan: Plan, unknown: Unknown) -> tuple[PlacedTable, ...]:
    places = place_tables(source, plan)
    return tuple(
        PlacedTable(source=table, routing=places[table.name][0], placements=places[table.name][1], unknown=unknown)
        for table in source.tables
    )


def _check_name(name: str) -> str:
    try:
        return check_collection_name(name)
    except ValueError as exc:
        raise ExportError(str(exc)) from exc


def _choice(kind: type[_Choice], field: str, value: str) -> _Choice:
    try:
        return kind(value)
    except ValueError as exc:
        raise ExportError(f"{field} {value!r}: use one of {', '.join(kind)}") from exc


def _check_options(source: CollectionSource, tables: tuple[PlacedTable, ...], out_of_range: OutOfRange) -> None:
    """An option for the other kind of table would do nothing, so it is a mistake."""
    if source.managed and out_of_range is not OutOfRange.REJECT:
        raise ExportError("out_of_range is for plain tables; this module's ids are remapped, so use unknown")
    if not source.managed and any(table.unknown is not Unknown.TRAINING for table in tables):
        raise ExportError("unknown is for managed-collision tables; this module's ids are rows, so use out_of_range")
