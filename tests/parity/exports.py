"""The suite's collections: who trained them, on how many shards they are served, how rows are stored. Few by default,
so that one server holds them all; ``resharded`` is the whole matrix."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from export import export_collection
from export.contract import Manifest, Unknown, read_manifest
from tests.parity.answers import Collection, answer_pool
from tests.parity.plans import PLAIN_ROUTINGS, managed_plan, plain_plan, torchrec_plan
from tests.parity.ranks import live_name
from tests.parity.tables import plain_tables
from tests.parity.trained import Trained, plain

SHARDS = range(1, 9)


@dataclass(frozen=True, kw_only=True)
class Export:
    """One collection of the suite."""

    shards: int
    world: int | None
    """Ranks that trained it; 0: an unsharded managed module; None: a plain collection."""
    row_dtype: str = "fp32"
    zero: bool = False
    """``unknown=zero``, or ``out_of_range=zero``."""
    need_indices: bool = False
    dim: int = 0
    """Plain collections."""
    torchrec_plan: bool = False
    """Plain collections: placed by TorchRec's own plan."""
    tables: int | None = None
    """Plain collections: so many tables; None: all."""

    live: bool = False
    """Managed collections: the ranks exported it, each the shard of its own number; else it is a checkpoint's."""

    @property
    def name(self) -> str:
        if self.live:
            return live_name(self.shards)
        return f"plain_n{self.shards}" if self.world is None else f"w{self.world}_n{self.shards}"


PLAIN = (
    Export(shards=1, world=None, dim=20, row_dtype="int8", tables=1),
    Export(shards=2, world=None, dim=6, row_dtype="fp16", torchrec_plan=True),
    Export(shards=4, world=None, dim=3, zero=True, need_indices=True),
)
MANAGED = (
    Export(shards=1, world=4, zero=True),
    Export(shards=2, world=2, live=True),
    Export(shards=3, world=1),
    Export(shards=4, world=4, live=True),
    Export(shards=5, world=0, need_indices=True),
    Export(shards=6, world=2),
    Export(shards=7, world=1, row_dtype="fp16", zero=True),
    Export(shards=8, world=4),
)


def resharded(world: int) -> list[Export]:
    """Trained on so many ranks, served on every number of shards."""
    return [Export(shards=shards, world=world) for shards in SHARDS]


def export_all(repo: Path, exports: Iterable[Export], trained: dict[int, Trained]) -> dict[str, Collection]:
    """Export each collection; ``trained`` by number of ranks, 0 for the unsharded module."""
    return {export.name: export_one(repo, export, trained) for export in exports}


def export_one(repo: Path, export: Export, trained: dict[int, Trained]) -> Collection:
    if export.live:
        source = trained[export.world]
        for entry in source.live.glob(f"{export.name}*"):
            shutil.copytree(entry, repo / entry.name, symlinks=True)
        return describe(read_manifest(repo, export.name, 1), source, export)
    if export.world is None:
        source = plain(plain_tables(len(PLAIN_ROUTINGS))[: export.tables], export.dim, need_indices=export.need_indices)
        plan = plain_plan(source.tables, export.shards, export.dim)
        if export.torchrec_plan:
            plan = torchrec_plan(source.module, source.tables, export.shards, export.dim)
        options = {"out_of_range": "zero"} if export.zero else {}
    else:
        source = trained[export.world]
        plan = managed_plan(source.tables, export.shards)
        options = {"unknown": Unknown.ZERO} if export.zero else {}
        if source.checkpoint is not None:
            options["checkpoint"] = source.checkpoint
    manifest = export_collection(
        source.module, repo, name=export.name, plan=plan, row_dtype=export.row_dtype, **options
    )
    return describe(manifest, source, export)


def describe(manifest: Manifest, source: Trained, export: Export) -> Collection:
    tables = {
        table.name: answer_pool(source, manifest, table, zero=export.zero, seed=export.shards)
        for table in source.tables
    }
    return Collection(name=export.name, trained=source, manifest=manifest, tables=tables)
