"""Owns the order of an export and of a verification; each step lives in a module of its own.

Public: ``export_collection``, ``export_delta``, ``export_sharded`` and ``verify_version``.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torchrec.distributed.types import ParameterSharding

from export.assembly import VersionOrder
from export.building import build_version
from export.check import check_version
from export.contract import Manifest, OutOfRange, RowDtype, Runtime, Unknown, check_collection_name, version_dir
from export.delta import find_base, order_delta
from export.errors import ExportError
from export.input_hash import trace_input_hashes
from export.options import Evicted
from export.placement import choose_plan, place_tables
from export.plans import Plan
from export.progress import Progress, silent
from export.published import check_files, find_version
from export.reading import read_collection
from export.restoring import restore_collection
from export.row_units import check_units
from export.sharded import is_sharded, ranks_of, read_sharded, sharding_plan_of
from export.sharding_plan import check_same_cuts, describe_cuts, read_sharding_plan
from export.skew import warn_of_skew
from export.source import CollectionSource
from export.state import PlacedTable
from export.team import Alone, Ranks, Team

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
    max_error: float
    """Bound on the error of any number, as the manifest states it; 0: all were compared bit by bit."""


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
    evicted: str = Evicted.REFUSE,
    checkpoint: str | Path | Mapping[str, Any] | None = None,
    team: Team | None = None,
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
        evicted: What to do when a live module's ids were evicted and ``evict()`` was not called: ``refuse``, or ``reset``,
            which serves the rows that it would name as zeros.
        checkpoint: A ``torch.distributed.checkpoint`` directory, or a state dict, that holds the numbers; the module then
            gives the configs only, and may be on the meta device. What W ranks trained is served as they answered. It does
            not say what was evicted: save it after ``evict()`` and the reset of the rows that it names.
        team: From ``with export.team.Ranks() as team`` when every rank of the default process group calls this: each
            writes a share of the shards, into a repository on a file system that they share. None: this process does
            it all.
        on_progress: Told (step, done, of how many).

    Returns:
        The manifest of the new version.

    Raises:
        ExportError: The module, the plan or an option cannot be served, the version exists, another export runs, the
            disk is full, or the artifacts do not answer as the module does. Nothing is published.
    """
    workers: Team = Alone() if team is None else team
    order = workers.each(
        lambda: _order(
            _read(module, checkpoint, evicted),
            lambda source: choose_plan(source, num_shards=num_shards, plan=plan, device=device),
            name=name,
            unknown=unknown,
            out_of_range=out_of_range,
            row_dtype=row_dtype,
            runtime=runtime,
        )
    )
    shards = range(workers.rank, order.num_shards, workers.size)
    return build_version(Path(repo), order, version, team=workers, shards=shards, on_progress=on_progress)


def export_delta(
    module: nn.Module,
    repo: str | Path,
    *,
    name: str,
    base: int | None = None,
    version: int | None = None,
    evicted: str = Evicted.REFUSE,
    checkpoint: str | Path | Mapping[str, Any] | None = None,
    on_progress: Progress = silent,
) -> Manifest:
    """Write what a module answers otherwise than a published base: changed rows, new ids, and evicted ones.

    Every row is compared with the base's; placement, row dtype and rules are the base's. The module is left as it was
    found. A delta holds everything that differs from its base, whatever other deltas there are.

    Args:
        module: See ``export_collection``; or, sharded, ``export_sharded``: then every rank calls this.
        repo: The model repository.
        name: The collection.
        base: A base's version number; None: the newest base.
        version: A number that is not taken; None: the newest plus one.
        evicted: See ``export_collection``.
        checkpoint: See ``export_collection``.
        on_progress: Told (step, done, of how many).

    Returns:
        The manifest of the new version.

    Raises:
        ExportError: There is no such base, the module is of other tables, another export runs, the disk is full, or the
            overlay does not answer as the module does. Nothing is published.
    """
    root = Path(repo)
    checked_name = _check_name(name)
    sharded = is_sharded(module)
    team: Team
    with Ranks() if sharded else nullcontext(Alone()) as team:
        found = team.each(lambda: find_base(root, checked_name, base))
        if sharded:
            _check_sharding(team, module)
            if team.size != found.manifest.num_shards:
                raise ExportError(
                    f"{team.size} ranks, and base {found.manifest.version} has {found.manifest.num_shards} shards: each rank "
                    "writes the shard of its own number; export a new base with export_sharded, or a delta from a checkpoint"
                )
        stored = found.manifest.tables[0].row_dtype
        order = team.each(
            lambda: order_delta(
                _read_sharded(module, evicted, stored) if sharded else _read(module, checkpoint, evicted), found
            )
        )
        shards = [team.rank] if sharded else range(order.num_shards)
        return build_version(root, order, version, team=team, shards=shards, on_progress=on_progress)


def export_sharded(
    module: nn.Module,
    repo: str | Path,
    *,
    name: str,
    version: int | None = None,
    unknown: str = Unknown.TRAINING,
    out_of_range: str = OutOfRange.REJECT,
    row_dtype: str = RowDtype.FP32,
    runtime: str = Runtime.PYTHON,
    device: str | None = None,
    evicted: str = Evicted.REFUSE,
    on_progress: Progress = silent,
) -> Manifest:
    """Write a live sharded collection as a version: called by every rank, each writes the shard of its own number.

    No row leaves its rank. Tables are served as they are sharded: table-wise, row-wise, column-wise, data-parallel, and
    managed collision by training's own routing. The version appears after all ranks are done, or not at all.

    Args:
        module: A ``ShardedEmbeddingCollection`` or ``ShardedManagedCollisionEmbeddingCollection``, alone or wrapped in
            ``DistributedModelParallel``.
        repo: The model repository, on a file system that all ranks share.
        name: See ``export_collection``, also for the options that follow.
        version: As there.
        unknown: As there.
        out_of_range: As there.
        row_dtype: As there; ``int8`` needs whole rows, so not with column-wise tables.
        runtime: As there.
        device: As there; None: the device that each rank's tables are on.
        evicted: As there.
        on_progress: Told of this rank's steps.

    Returns:
        The manifest of the new version, on every rank.

    Raises:
        ExportError: Something failed on a rank; it is named on all of them. Nothing is published.
    """
    with Ranks() as team:
        _check_sharding(team, module)
        order = team.each(
            lambda: _order(
                _read_sharded(module, evicted, row_dtype),
                lambda source: read_sharding_plan(source, sharding_plan_of(module), device=device, shards=team.size),
                name=name,
                unknown=unknown,
                out_of_range=out_of_range,
                row_dtype=row_dtype,
                runtime=runtime,
            )
        )
        return build_version(Path(repo), order, version, team=team, shards=[team.rank], on_progress=on_progress)


def _check_sharding(team: Team, module: nn.Module) -> None:
    """Every rank writes the shard of its number, so each must be one of as many, by one plan."""
    spread = team.together(lambda: (ranks_of(module), describe_cuts(sharding_plan_of(module))))
    for rank, (ranks, _) in enumerate(spread):
        if ranks != team.size:
            raise ExportError(
                f"rank {rank}: its tables are sharded over {ranks} of the {team.size} ranks, as with DMPCollection, which is "
                "not served live; export a checkpoint"
            )
    check_same_cuts([cuts for _, cuts in spread])


def _read(module: nn.Module, checkpoint: str | Path | Mapping[str, Any] | None, evicted: str) -> CollectionSource:
    rule = _choice(Evicted, "evicted", evicted)
    if checkpoint is None:
        return _check_evicted(read_collection(module, evicted=rule), rule)
    if rule is not Evicted.REFUSE:
        raise ExportError(
            f"evicted {str(rule)!r}: a checkpoint does not say which rows evict() would name; leave evicted out, and save "
            "the checkpoint after those rows were reset"
        )
    return restore_collection(module, checkpoint)


def _read_sharded(module: nn.Module, evicted: str, row_dtype: str) -> CollectionSource:
    rule = _choice(Evicted, "evicted", evicted)
    return _check_evicted(read_sharded(module, evicted=rule, row_dtype=row_dtype), rule)


def _check_evicted(source: CollectionSource, rule: Evicted) -> CollectionSource:
    """The collection, unless its ids are never evicted, so that the option would do nothing."""
    if not source.managed and rule is not Evicted.REFUSE:
        raise ExportError(
            f"evicted {str(rule)!r}: is for managed-collision tables; this module's ids are rows, which nothing evicts; "
            "leave evicted out"
        )
    return source


def _order(
    source: CollectionSource,
    choose: Callable[[CollectionSource], Plan],
    *,
    name: str,
    unknown: str,
    out_of_range: str,
    row_dtype: str,
    runtime: str,
) -> VersionOrder:
    checked_name = _check_name(name)
    cut = choose(source)
    tables = _place(source, cut, _choice(Unknown, "unknown", unknown))
    range_rule = _choice(OutOfRange, "out_of_range", out_of_range)
    _check_options(source, tables, range_rule)
    stored_as = _choice(RowDtype, "row_dtype", row_dtype)
    check_units(tables, stored_as)
    warn_of_skew(tables, cut.shards)
    return VersionOrder(
        collection=checked_name,
        num_shards=cut.shards,
        source=source,
        tables=tables,
        input_hashes=trace_input_hashes(source),
        out_of_range=range_rule,
        row_dtype=stored_as,
        runtime=_choice(Runtime, "runtime", runtime),
        devices=cut.devices,
    )


def verify_version(
    repo: str | Path,
    name: str,
    module: nn.Module,
    version: int | None = None,
    *,
    checkpoint: str | Path | Mapping[str, Any] | None = None,
    evicted: str = Evicted.REFUSE,
    on_progress: Progress = silent,
) -> VerifyReport:
    """Hold a published version against a module: checksums of every file, links, then every answer.

    Args:
        repo: The model repository.
        name: The collection.
        module: What the version was exported from; left as it was found.
        version: None: the newest.
        checkpoint: What it was exported with, see ``export_collection``.
        evicted: As there.
        on_progress: Told (step, done, of how many).

    Raises:
        ExportError: The version is not there, a file is damaged, or an answer differs; names which.
    """
    root = Path(repo)
    source = _read(module, checkpoint, evicted)
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
        max_error=max(entry.max_error for shard in manifest.shards for entry in shard.tables),
    )


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
