"""The real stack, once a session: EC and MC-EC collections at 1, 2, 3 and 5 shards in one repository."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from export import export_collection
from export.contract import SENTINEL_IDS, Manifest, Unknown
from export.oracle import eval_mode, hash_ids, look_up
from export.source import read_collection
from tests.e2e.serving import Serving, serve
from tests.modules import managed_collection, map_of, modulo_hash, plain_collection

SHARD_COUNTS = (1, 2, 3, 5)


@dataclass(frozen=True)
class Case:
    """One exported collection and the module it came from."""

    name: str
    module: nn.Module
    manifest: Manifest
    evicted: dict[str, list[int]]

    def expected(self, keys, ids_by_key):
        """(embeddings, row_ids, hits) by the oracle, in the reply's order."""
        tables = {table.name: table for table in read_collection(self.module).tables}
        parts = []
        with eval_mode(self.module):
            for key in keys:
                for table in self.manifest.tables:
                    if key in table.features:
                        source = tables[table.name]
                        ids = torch.tensor(ids_by_key[key], dtype=torch.int64)
                        parts.append(look_up(source, hash_ids(source, ids), Unknown.TRAINING))
        return (
            torch.cat([part.embeddings_ND for part in parts]).numpy(),
            torch.cat([part.row_ids_N for part in parts]).numpy(),
            torch.cat([part.hits_N for part in parts]).numpy(),
        )

    def draw(self, rng: np.random.Generator, key: str, size: int) -> list[int]:
        """Ids of every kind for one feature: known, unknown, evicted, negative, sentinels, duplicates."""
        tables = [table for table in self.manifest.tables if key in table.features]
        table = tables[0]
        if table.zch is None:
            return rng.integers(0, min(table.rows for table in tables), size).tolist()
        pool = [
            *list(map_of(self.module, table.name))[:200],
            *self.evicted.get(table.name, []),
            *SENTINEL_IDS,
            -(2**63),
            -5,
            0,
            2**62,
            *rng.integers(-(2**63), 2**63 - 1, 50).tolist(),
        ]
        return [pool[i] for i in rng.integers(0, len(pool), size)]


@pytest.fixture(scope="session")
def cases(tmp_path_factory) -> tuple[Path, dict[str, Case]]:
    repo = tmp_path_factory.mktemp("stack") / "repo"
    rows = {"user": 120, "item": 90, "cat": 7}
    shared = {"user": ["user", "both"], "item": ["item", "both"], "cat": ["cat"]}
    # Upstream's managed collection cannot run a feature of two tables, so there it is two features of one table.
    several = {"user": ["user", "friend"], "item": ["item"], "cat": ["cat"]}
    plain = plain_collection(rows, shared, dim=8)
    hashed, _ = trained_with_evictions(rows, several, input_hash=modulo_hash)
    found = {}
    for n, policy in zip(SHARD_COUNTS, ("lfu", "lru", "distance_lfu", "lfu"), strict=True):
        managed, evicted = trained_with_evictions(rows, several, policy=policy)
        found[f"ec{n}"] = Case(f"ec{n}", plain, export_collection(plain, repo, name=f"ec{n}", num_shards=n), {})
        found[f"mc{n}"] = Case(
            f"mc{n}", managed, export_collection(managed, repo, name=f"mc{n}", num_shards=n), evicted
        )
    found["hashed2"] = Case("hashed2", hashed, export_collection(hashed, repo, name="hashed2", num_shards=2), {})
    plan = repo.parent / "plan.yaml"
    plan.write_text(
        "shards: 3\ntables:\n  user: {routing: table, shard: 2}\n  item: {routing: rows, rows: [0, 85, 5]}\n"
    )
    found["plan3"] = Case("plan3", plain, export_collection(plain, repo, name="plan3", plan=plan), {})
    return repo, found


def trained_with_evictions(rows, features, **options) -> tuple[nn.Module, dict[str, list[int]]]:
    """A managed collection, and for each table ids that were in its map halfway and are not any more."""
    module = managed_collection(rows, features, **options)
    halfway = managed_collection(rows, features, steps=6, **options)
    evicted = {
        table.name: sorted(set(map_of(halfway, table.name)) - set(map_of(module, table.name)))
        for table in read_collection(module).tables
    }
    assert evicted["user"], f"no user was evicted: {evicted}"
    assert evicted["item"], f"no item was evicted: {evicted}"
    return module, evicted


@pytest.fixture(scope="session")
def stack(cases, tmp_path_factory) -> Serving:
    repo, _ = cases
    with serve(repo, tmp_path_factory.mktemp("log") / "serve.log") as serving:
        yield serving


@pytest.fixture(scope="session")
def clicks(tmp_path_factory) -> tuple[Serving, Case]:
    """A small stack for tests that count, kill or refuse: ``clicks`` and ``ratings``, two shards each."""
    folder = tmp_path_factory.mktemp("clicks")
    module, evicted = trained_with_evictions({"user": 60, "item": 40}, {"user": ["user"], "item": ["item"]})
    manifest = export_collection(module, folder / "repo", name="clicks", num_shards=2)
    export_collection(module, folder / "repo", name="ratings", num_shards=2)
    with serve(folder / "repo", folder / "serve.log") as serving:
        yield serving, Case("clicks", module, manifest, evicted)
