"""The real stack: the parity suite's server, and a small one for tests that count, kill or refuse."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from export import export_collection
from export.contract import SENTINEL_IDS, Manifest
from tests.e2e.serving import Serving, serve
from tests.modules import managed_collection, map_of
from tests.oracle import TableOracle
from tests.parity.answers import Collection
from tests.parity.exports import MANAGED, PLAIN, export_all
from tests.parity.run import Run
from tests.parity.trained import Trained, train_alone, train_on_ranks
from tests.parity.wire import Clients


@dataclass(frozen=True)
class Case:
    """One exported collection and the module it came from."""

    name: str
    module: nn.Module
    manifest: Manifest
    evicted: dict[str, list[int]]

    def expected(self, keys, ids_by_key):
        """(embeddings, row_ids, hits) by the oracle, in the reply's order."""
        modules = self.module._managed_collision_collection._managed_collision_modules
        parts = []
        for key in keys:
            for table in self.manifest.tables:
                if key in table.features:
                    weight_RD = self.module._embedding_module.embeddings[table.name].weight.detach()
                    oracle = TableOracle(weight_RD=weight_RD, pieces=[modules[table.name]])
                    parts.append(oracle.look_up(torch.tensor(ids_by_key[key], dtype=torch.int64)))
        return (
            torch.cat([part.embeddings_ND for part in parts]).numpy(),
            torch.cat([part.row_ids_N for part in parts]).numpy(),
            torch.cat([part.hits_N for part in parts]).numpy(),
        )

    def draw(self, rng: np.random.Generator, key: str, size: int) -> list[int]:
        """Ids of every kind for one feature: known, unknown, evicted, negative, sentinels, duplicates."""
        tables = [table for table in self.manifest.tables if key in table.features]
        table = tables[0]
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


def trained_with_evictions(rows, features, **options) -> tuple[nn.Module, dict[str, list[int]]]:
    """A managed collection, and for each table ids that were in its map halfway and are not any more."""
    module = managed_collection(rows, features, **options)
    halfway = managed_collection(rows, features, steps=6, **options)
    evicted = {table: sorted(set(map_of(halfway, table)) - set(map_of(module, table))) for table in rows}
    assert evicted["user"], f"no user was evicted: {evicted}"
    assert evicted["item"], f"no item was evicted: {evicted}"
    return module, evicted


@dataclass
class Tally:
    """What the parity suite has sent."""

    cases: int = 0
    tables: dict[str, set[object]] = field(default_factory=dict)

    def count(self, collection: Collection, cases: int) -> None:
        self.cases += cases
        self.tables[collection.name] = set(collection.tables)

    def __str__(self) -> str:
        tables = sum(map(len, self.tables.values()))
        return f"parity: {self.cases} cases through the real server, over {len(self.tables)} collections of {tables} tables"


TALLY = pytest.StashKey[Tally]()


@pytest.fixture(scope="session")
def tally(request) -> Tally:
    return request.config.stash.setdefault(TALLY, Tally())


def pytest_terminal_summary(terminalreporter, config):
    if (tally := config.stash.get(TALLY, None)) is not None:
        terminalreporter.write_line(str(tally))


@pytest.fixture(scope="session")
def trained_on_ranks(tmp_path_factory) -> dict[int, Trained]:
    return train_on_ranks(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="session")
def parity(trained_on_ranks, tmp_path_factory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("parity")
    collections = export_all(folder / "repo", (*PLAIN, *MANAGED), {**trained_on_ranks, 0: train_alone()})
    with serve(folder / "repo", folder / "serve.log") as serving:
        yield Run(collections, Clients(http=serving.http, grpc=serving.grpc))


@pytest.fixture(scope="session")
def clicks(tmp_path_factory) -> tuple[Serving, Case]:
    """A small stack for tests that count, kill or refuse: ``clicks`` and ``ratings``, two shards each."""
    folder = tmp_path_factory.mktemp("clicks")
    module, evicted = trained_with_evictions({"user": 60, "item": 40}, {"user": ["user"], "item": ["item"]})
    manifest = export_collection(module, folder / "repo", name="clicks", num_shards=2)
    export_collection(module, folder / "repo", name="ratings", num_shards=2)
    with serve(folder / "repo", folder / "serve.log") as serving:
        yield serving, Case("clicks", module, manifest, evicted)
