"""The tables of the parity suite: every combination of what TorchRec offers, what it refuses left out, then covered.

A collection holds tables of every kind at once, so that few servers answer for many combinations. Which shard holds what
is not decided here: see ``plans``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule, MCHManagedCollisionModule

from tests.modules import FALLBACKS, POLICIES, hash_zch_module, modulo_hash
from tests.parity.pairs import Choice, cover

INT64_MAX = 2**63 - 1
MCH_ROWS = 14
"""Over 4 ranks: 4, 4, 4 and 2."""
ZCH_ROWS = 24
"""Divided by every number of buckets."""
FEATURES = {"one": "{t}", "several": "{t} {t}_b {t}_c", "readonly": "{t} {t}_readonly"}
SHARED_FEATURE = "shared"


@dataclass(frozen=True, kw_only=True)
class TableCase:
    """One table of a collection."""

    name: str
    rows: int
    features: tuple[str, ...]
    half: bool = False
    """Trained in half precision."""
    policy: str | None = None
    """MCH: the eviction policy."""
    input_hash: bool = False
    """MCH: ``modulo_hash`` as input_hash_func."""
    input_hash_size: int = 0
    buckets: int = 1
    fallback: str | None = None
    """MPZCH: one of FALLBACKS."""
    eviction: str | None = None
    """MPZCH: the eviction policy."""

    @property
    def managed(self) -> bool:
        return self.policy is not None or self.fallback is not None

    def config(self, dim: int) -> EmbeddingConfig:
        return EmbeddingConfig(
            name=self.name,
            num_embeddings=self.rows,
            embedding_dim=dim,
            feature_names=list(self.features),
            data_type=DataType.FP16 if self.half else DataType.FP32,
        )

    def collision(self, device: str = "cpu") -> ManagedCollisionModule:
        """TorchRec's module of a managed table, empty."""
        if self.fallback is not None:
            return hash_zch_module(
                self.rows,
                name=self.name,
                buckets=self.buckets,
                fallback=self.fallback,
                input_hash_size=self.input_hash_size,
                eviction=self.eviction,
            )
        return MCHManagedCollisionModule(
            zch_size=self.rows,
            device=torch.device(device),
            eviction_policy=POLICIES[self.policy](),
            eviction_interval=2,
            input_hash_size=self.input_hash_size,
            input_hash_func=modulo_hash if self.input_hash else None,
        )

    def weight(self, dim: int) -> torch.Tensor:
        """Rows of its own, FP32 or FP16 [rows, dim]: a row of zeros, a constant one and one with an outlier among them."""
        generator = torch.Generator().manual_seed(sum(self.name.encode()))
        rows_RD = torch.randn(self.rows, dim, generator=generator)
        rows_RD[0], rows_RD[self.rows // 2], rows_RD[self.rows - 2, 0] = 0.0, 0.7, 900.0
        return rows_RD.half() if self.half else rows_RD

    def pool(self, known: list[int]) -> list[int]:
        """Ids of every kind for a managed table: ``known`` and whatever else a client may send."""
        block = -(-self.input_hash_size // max(self.buckets, 4))
        edges = [edge * block + step for edge in range(1, 5) for step in (-1, 0, 1)]
        edges = [edge for edge in edges if edge <= INT64_MAX]
        other = [-1, INT64_MAX, -(2**63), -(2**63) + 1, -2, -5, -6, 0, 1, 3, 2**62, 2**32, 2**31 - 1, 1008, 1009, 1010]
        return [*known, *edges, *other]


MCH_DIMENSIONS = {
    "policy": tuple(POLICIES),
    "input_hash": (False, True),
    "input_hash_size": (INT64_MAX, 1009, 0),
    "features": ("one", "several"),
    "half": (False, True),
}
ZCH_DIMENSIONS = {
    "buckets": (1, 2, 4, 6),
    "fallback": tuple(FALLBACKS),
    "input_hash_size": (0, 1009),
    "eviction": (None, "SINGLE_TTL_EVICTION", "LRU_EVICTION"),
    "features": tuple(FEATURES),
    "half": (False, True),
}
PLAIN_DIMENSIONS = {"features": ("one", "several", "shared"), "half": (False, True)}


def refuse_mch(choice: Choice) -> str | None:
    if choice["input_hash"] and not choice["input_hash_size"]:
        return "an input hash of this kind takes its modulo, and that is 0"
    return None


def refuse_zch(choice: Choice, ranks: int) -> str | None:
    if choice["buckets"] % ranks:
        return "row-wise sharding cuts an MPZCH table between buckets only"
    if choice["fallback"] == "no_bag" and ranks > 1:
        return "each rank answers a miss with its own first row; the exporter refuses it"
    return None


def managed_tables(ranks: int) -> list[TableCase]:
    """Tables of one managed collection that so many ranks train, MCH and MPZCH; 0: the unsharded module."""
    choices = [
        *({**choice, "rows": MCH_ROWS} for choice in cover(MCH_DIMENSIONS, refuse_mch)),
        *(
            {**choice, "rows": ZCH_ROWS}
            for choice in cover(ZCH_DIMENSIONS, lambda choice: refuse_zch(choice, max(ranks, 1)))
        ),
    ]
    return [_table(f"m{at:02}", choice) for at, choice in enumerate(choices)]


def plain_tables(routings: int) -> list[TableCase]:
    """Tables of one plain collection: each combination of what they are with so many routings."""
    choices = [choice for choice in cover(PLAIN_DIMENSIONS, lambda _: None) for _ in range(routings)]
    return [_table(f"p{at:02}", {**choice, "rows": 10 + at % 4}) for at, choice in enumerate(choices)]


def _table(name: str, choice: Choice) -> TableCase:
    if choice["features"] == "shared":
        return TableCase(name=name, **{**choice, "features": (name, SHARED_FEATURE)})
    return TableCase(name=name, **{**choice, "features": tuple(FEATURES[choice["features"]].format(t=name).split())})


def build_managed(
    tables: list[TableCase], dim: int, *, need_indices: bool = False
) -> ManagedCollisionEmbeddingCollection:
    """The untrained collection; its modules are in another order than its configs."""
    configs = [table.config(dim) for table in tables]
    modules = {table.name: table.collision() for table in reversed(tables)}
    return ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=configs, need_indices=need_indices),
        ManagedCollisionCollection(modules, configs),
        return_remapped_features=True,
    )


def write_rows(embeddings: EmbeddingCollection, tables: Sequence[TableCase], dim: int) -> None:
    with torch.no_grad():
        for table in tables:
            embeddings.embeddings[table.name].weight.copy_(table.weight(dim))
