"""Trained collections of the suite: what is exported, and the oracle of each table."""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import ManagedCollisionModule

from tests.modules import fill_identities
from tests.oracle import TableOracle
from tests.parity.ranks import DIMS, STEPS, known_ids, request_of, training_ids, zch_ids
from tests.parity.tables import TableCase, build_managed, managed_tables, write_rows

PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained collection."""

    module: nn.Module
    """Unsharded; without state where ``checkpoint`` holds it."""
    tables: tuple[TableCase, ...]
    dim: int
    pieces: dict[str, list[ManagedCollisionModule]]
    """The collision modules of the ranks that trained each managed table."""
    checkpoint: Path | None = None
    live: Path | None = None
    """The repository into which the ranks exported the collection themselves."""
    need_indices: bool = False

    def oracle(self, table: TableCase, *, zero: bool) -> TableOracle:
        return TableOracle(weight_RD=table.weight(self.dim), pieces=self.pieces.get(table.name, ()), zero=zero)

    def pool(self, table: TableCase) -> list[int]:
        """Ids of every kind: in the map, seen in training and evicted or never let in, and all that a client may send."""
        if not table.managed:
            return list(range(table.rows))
        seen = [*zch_ids(table)] if table.fallback else training_ids(table, 2, 0).tolist()
        return [*seen, *table.pool([id_ for piece in self.pieces[table.name] for id_ in known_ids(piece)])]


def train_on_ranks(folder: Path) -> dict[int, Trained]:
    """Collections that 1, 2 and 4 ranks trained over gloo, by number of ranks; in a process tree of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.ranks", str(folder)],
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {world: read_trained(folder / f"w{world}", world) for world in DIMS if world}


def read_trained(folder: Path, world: int) -> Trained:
    tables = managed_tables(world)
    module = build_managed(tables, DIMS[world])
    states = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world)]
    return Trained(
        module=module,
        tables=tuple(tables),
        dim=DIMS[world],
        pieces={table.name: rebuild_pieces(module, table, [state[table.name] for state in states]) for table in tables},
        checkpoint=folder / "checkpoint",
        live=folder.parent / "repo",
    )


def rebuild_pieces(module: nn.Module, table: TableCase, states: Sequence[dict]) -> list[ManagedCollisionModule]:
    """Each rank's own module, as TorchRec's sharding makes it: row-wise, uneven where the rows do not divide."""
    whole = module._managed_collision_collection._managed_collision_modules[table.name]
    block = -(-table.rows // len(states))
    edges = [min(rank * block, table.rows) for rank in range(len(states) + 1)]
    pieces = []
    for state, (start, stop) in zip(states, itertools.pairwise(edges), strict=True):
        piece = whole.rebuild_with_output_id_range((start, stop), edges)
        piece.load_state_dict(state)
        pieces.append(piece)
    return pieces


def train_alone() -> Trained:
    """The same tables in an unsharded module: one map each."""
    tables, dim = managed_tables(0), DIMS[0]
    module = build_managed(tables, dim, need_indices=True)
    modules = module._managed_collision_collection._managed_collision_modules
    module.train()
    for table in tables:
        collision = modules[table.name]
        if isinstance(collision, HashZchManagedCollisionModule):
            fill_identities(collision, zch_ids(table))
            continue
        for step in range(STEPS):
            collision(request_of({"ids": training_ids(table, step, 0).tolist()}).to_dict())
            collision.evict()
    write_rows(module._embedding_module, tables, dim)
    return Trained(
        module=module,
        tables=tuple(tables),
        dim=dim,
        pieces={table.name: [modules[table.name]] for table in tables},
        need_indices=True,
    )


def plain(tables: Sequence[TableCase], dim: int, *, need_indices: bool = False) -> Trained:
    """A plain collection."""
    module = EmbeddingCollection(tables=[table.config(dim) for table in tables], need_indices=need_indices)
    write_rows(module, tables, dim)
    return Trained(module=module, tables=tuple(tables), dim=dim, pieces={}, need_indices=need_indices)
