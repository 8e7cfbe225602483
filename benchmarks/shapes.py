"""Owns the modules that workloads are measured on: as large as asked, quick to build. Must not measure or export.

Shape suffixes: R rows of the table, K ids in its map, D embedding dimension.
"""

import torch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

TABLE = "t"
FEATURE = "f"
SEED = 7

_ROW_BLOCK = 4096


def build_full_map(num_ids: int, *, dim: int) -> ManagedCollisionEmbeddingCollection:
    """Build an MC-EC in eval mode whose map is full: ``num_ids`` ids of uniformly random bits, rows in random order.

    The map's last slot holds int64 max and the table's last row is the default row, as TorchRec keeps both. No two rows
    are alike, nor two columns.

    Args:
        num_ids: Ids in the map; the table has one row more.
        dim: Embedding dimension.
    """
    rows = num_ids + 1
    generator = torch.Generator().manual_seed(SEED)
    config = EmbeddingConfig(name=TABLE, num_embeddings=rows, embedding_dim=dim, feature_names=[FEATURE])
    # on meta first: TorchRec draws a random number for every element of a real table, twice
    collection = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    collection.embeddings[TABLE].weight = torch.nn.Parameter(_numbered_rows(rows, dim))
    collision = MCHManagedCollisionModule(
        zch_size=rows, device=torch.device("cpu"), eviction_policy=LFU_EvictionPolicy(), eviction_interval=1
    )
    # a few more are drawn than needed, since torch.unique may drop some
    drawn = torch.randint(-(2**63), 2**63 - 1, (num_ids + 64,), generator=generator)
    collision._mch_sorted_raw_ids[:-1] = torch.unique(drawn)[:num_ids]
    collision._mch_remapped_ids_mapping[:-1] = torch.randperm(num_ids, generator=generator)
    return ManagedCollisionEmbeddingCollection(
        collection, ManagedCollisionCollection({TABLE: collision}, [config])
    ).eval()


def map_of(module: ManagedCollisionEmbeddingCollection) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of a full map, ascending, and the row of each: INT64 [K], INT64 [K]."""
    collision = module._managed_collision_collection._managed_collision_modules[TABLE]
    return collision._mch_sorted_raw_ids[:-1], collision._mch_remapped_ids_mapping[:-1]


def weight_of(module: ManagedCollisionEmbeddingCollection) -> torch.Tensor:
    """The rows, FP32 [R, D]; the parameter's data, not a copy."""
    weight: torch.Tensor = module._embedding_module.embeddings[TABLE].weight
    return weight.detach()


def _numbered_rows(rows: int, dim: int) -> torch.Tensor:
    """FP32 [R, D]: a row's number in base 4096, one digit in each half of it, plus the column's number."""
    weight_RD = torch.empty(rows, dim)
    number_R = torch.arange(rows)
    column_D = torch.arange(dim, dtype=torch.float32)
    half = (dim + 1) // 2
    for columns, digit_R in (
        (slice(0, half), number_R % _ROW_BLOCK),
        (slice(half, dim), number_R // _ROW_BLOCK),
    ):
        torch.add(digit_R.float()[:, None], column_D[columns] / 1024, out=weight_RD[:, columns])
    return weight_RD
