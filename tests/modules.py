"""Small TorchRec modules, really trained: evictions have happened, and no two rows are alike. Seeds are fixed.

MPZCH is the exception: its CPU kernel is read-only, so ``fill_identities`` puts ids into its table as training does.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from export.rows import TableRows, piece_at

POLICIES: dict[str, Callable[[], MCHEvictionPolicy]] = {
    "lfu": LFU_EvictionPolicy,
    "lru": LRU_EvictionPolicy,
    "distance_lfu": DistanceLFU_EvictionPolicy,
}

FALLBACKS = {
    "slot": {},
    "none": {"disable_fallback": True},
    "no_bag": {"disable_fallback": True, "no_bag": True},
    "reserved": {"opt_in_prob": 50, "percent_reserved_slots": 25},
    "reserved_none": {"opt_in_prob": 50, "percent_reserved_slots": 25, "disable_fallback": True},
}
"""What an MPZCH module answers to an id that it does not hold: options of ``HashZchManagedCollisionModule``."""

InputHash = Callable[[torch.Tensor, int], torch.Tensor]


def modulo_hash(ids: torch.Tensor, size: int) -> torch.Tensor:
    """An input_hash_func that folds many raw ids into one."""
    return torch.remainder(ids * 2_654_435_761, size)


def configs(
    rows: dict[str, int], features: dict[str, list[str]] | None = None, *, dim: int = 4, fp16: Sequence[str] = ()
) -> list[EmbeddingConfig]:
    """One config for each table; its feature is named as the table, unless ``features`` says otherwise."""
    return [
        EmbeddingConfig(
            name=name,
            num_embeddings=num_rows,
            embedding_dim=dim,
            feature_names=list((features or {}).get(name, [name])),
            data_type=DataType.FP16 if name in fp16 else DataType.FP32,
        )
        for name, num_rows in rows.items()
    ]


def spread_rows(collection: EmbeddingCollection, seed: int = 0) -> None:
    """Give every row numbers of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for embedding in collection.embeddings.values():
            embedding.weight.copy_(torch.randn(embedding.weight.shape, generator=generator))


def whole_table(table: str, weight_RD: torch.Tensor, *, zeroed: torch.Tensor | None = None) -> TableRows:
    """The rows of a table that one tensor [R, D] holds."""
    rows, dim = weight_RD.shape
    return TableRows(table=table, rows=rows, dim=dim, pieces=[piece_at((0, 0), weight_RD)], zeroed=zeroed)


def plain_collection(
    rows: dict[str, int] | None = None,
    features: dict[str, list[str]] | None = None,
    *,
    dim: int = 4,
    fp16: Sequence[str] = (),
    seed: int = 0,
) -> EmbeddingCollection:
    """An EmbeddingCollection; by default tables user (10 rows), item (23) and one (1)."""
    collection = EmbeddingCollection(
        tables=configs(rows or {"user": 10, "item": 23, "one": 1}, features, dim=dim, fp16=fp16)
    )
    spread_rows(collection, seed)
    return collection


def untrained_collection(
    rows: dict[str, int] | None = None,
    features: dict[str, list[str]] | None = None,
    *,
    policy: str = "lfu",
    input_hash: InputHash | None = None,
    input_hash_size: int = 1009,
    dim: int = 4,
    fp16: Sequence[str] = (),
    reverse_modules: bool = False,
    eviction_interval: int = 2,
    seed: int = 0,
    device: str = "cpu",
) -> ManagedCollisionEmbeddingCollection:
    """A ManagedCollisionEmbeddingCollection that has seen no batch; by default tables user (12 rows) and item (20).

    ``input_hash_size`` counts only with an ``input_hash``. ``reverse_modules`` puts the module dict in another order than
    the configs.
    """
    tables = configs(rows or {"user": 12, "item": 20}, features, dim=dim, fp16=fp16)
    collection = EmbeddingCollection(tables=tables, device=torch.device(device))
    if device != "meta":
        spread_rows(collection, seed)
    modules = {
        table.name: MCHManagedCollisionModule(
            zch_size=table.num_embeddings,
            device=torch.device(device),
            eviction_policy=POLICIES[policy](),
            eviction_interval=eviction_interval,
            input_hash_func=input_hash,
            input_hash_size=(2**63) - 1 if input_hash is None else input_hash_size,
        )
        for table in (reversed(tables) if reverse_modules else tables)
    }
    return ManagedCollisionEmbeddingCollection(collection, ManagedCollisionCollection(modules, tables))


def train(module: ManagedCollisionEmbeddingCollection, *, steps: int = 12, seed: int = 0, first_step: int = 0) -> None:
    """Stream skewed 64-bit ids through each table's module; evicted rows are reset, as TorchRec's trainer does.

    Each step brings ids of its own: training that goes on goes on at ``first_step``.
    """
    generator = torch.Generator().manual_seed(seed)
    module.train()
    collisions = module._managed_collision_collection._managed_collision_modules
    for step in range(first_step, first_step + steps):
        for config in module._embedding_module.embedding_configs():
            collision = collisions[config.name]
            ids = _skewed_ids(config.num_embeddings, step, generator)
            kjt = KeyedJaggedTensor(keys=["ids"], values=ids, lengths=torch.tensor([ids.numel()]))
            rows = collision({"ids": kjt["ids"]})["ids"].values()
            evicted = collision.evict()
            with torch.no_grad():
                weight = module._embedding_module.embeddings[config.name].weight
                weight[rows.unique()] += 0.25 * (step + 1)
                if evicted is not None:
                    weight[evicted] = torch.randn(evicted.numel(), weight.shape[1], generator=generator).to(
                        weight.dtype
                    )


def managed_collection(
    rows: dict[str, int] | None = None,
    features: dict[str, list[str]] | None = None,
    *,
    policy: str = "lfu",
    input_hash: InputHash | None = None,
    steps: int = 12,
    seed: int = 0,
    **options: object,
) -> ManagedCollisionEmbeddingCollection:
    """``untrained_collection`` after ``steps`` batches; ids were evicted from every table of 2 rows or more."""
    module = untrained_collection(rows, features, policy=policy, input_hash=input_hash, seed=seed, **options)
    train(module, steps=steps, seed=seed)
    return module


def map_of(module: nn.Module, table: str) -> dict[int, int]:
    """The learned id → row map of a table, read from the module's buffers."""
    collision = module._managed_collision_collection._managed_collision_modules[table]
    if isinstance(collision, HashZchManagedCollisionModule):
        slots = enumerate(collision._hash_zch_identities.flatten().tolist())
        return {id_: row for row, id_ in slots if id_ != -1}
    pairs = zip(collision._mch_sorted_raw_ids.tolist(), collision._mch_remapped_ids_mapping.tolist(), strict=True)
    return {id_: row for id_, row in pairs if id_ != 2**63 - 1}


def hash_zch_module(
    rows: int,
    *,
    name: str = "user",
    buckets: int = 1,
    fallback: str = "slot",
    input_hash_size: int = 0,
    max_probe: int = 4,
    eviction: str | None = None,
) -> HashZchManagedCollisionModule:
    """An MPZCH module that holds no id; ``fallback`` is one of FALLBACKS, ``eviction`` a HashZchEvictionPolicyName."""
    policy = None if eviction is None else HashZchEvictionPolicyName(eviction)
    return HashZchManagedCollisionModule(
        zch_size=rows,
        device=torch.device("cpu"),
        total_num_buckets=buckets,
        max_probe=max_probe,
        input_hash_size=input_hash_size,
        name=name,
        eviction_policy_name=policy,
        eviction_config=policy and HashZchEvictionConfig(features=[name], single_ttl=24),
        **FALLBACKS[fallback],
    )


def probed_rows(module: HashZchManagedCollisionModule, ids: Iterable[int]) -> dict[int, list[int]]:
    """The rows that are probed for each id but −1, in order.

    The CPU kernel only reads, but on an empty table it says where an id hashes to.
    """
    ids_N = torch.tensor(sorted(set(ids) - {-1}), dtype=torch.int64)
    _, sizes_N, offsets_N = module.input_mapper(ids_N)
    sizes_N = sizes_N - max(module.get_reserved_slots_per_bucket(), 0)
    homes_N, _ = torch.ops.fbgemm.zero_collision_hash(
        input=ids_N,
        identities=torch.full_like(module._hash_zch_identities, -1),
        max_probe=1,
        circular_probe=True,
        exp_hours=-1,
        readonly=True,
        local_sizes=sizes_N,
        offsets=offsets_N,
    )
    return {
        id_: [offset + (home - offset + step) % size for step in range(min(module.max_probe, size))]
        for id_, home, size, offset in zip(
            ids_N.tolist(), homes_N.tolist(), sizes_N.tolist(), offsets_N.tolist(), strict=True
        )
    }


def fill_identities(module: HashZchManagedCollisionModule, ids: Iterable[int]) -> dict[int, int]:
    """Put ids where training would: the first free slot of at most ``max_probe`` from where the id hashes to.

    Returns:
        The row of each id that found a slot; the others stay unknown, as the ones that training crowds out do.
    """
    slots: dict[int, int] = {}
    rows: dict[int, int] = {}
    for id_, probed in probed_rows(module, ids).items():
        row = next((row for row in probed if row not in slots), None)
        if row is not None:
            slots[row], rows[id_] = id_, row
    with torch.no_grad():
        module._hash_zch_identities.fill_(-1)
        for row, id_ in slots.items():
            module._hash_zch_identities[row] = id_
    return rows


def hash_zch_collection(
    rows: dict[str, int] | None = None,
    features: dict[str, list[str]] | None = None,
    *,
    dim: int = 4,
    seed: int = 0,
    **options: object,
) -> ManagedCollisionEmbeddingCollection:
    """A collection of MPZCH tables, each about three quarters full; by default user (24 rows) and item (36).

    ``options`` are those of ``hash_zch_module``.
    """
    tables = configs(rows or {"user": 24, "item": 36}, features, dim=dim)
    collection = EmbeddingCollection(tables=tables)
    spread_rows(collection, seed)
    generator = torch.Generator().manual_seed(seed)
    modules = {}
    for table in tables:
        module = modules[table.name] = hash_zch_module(table.num_embeddings, name=table.name, **options)
        top = module.input_size() or 2**62
        ids = torch.randint(-top if not module.input_size() else 0, top, (table.num_embeddings,), generator=generator)
        fill_identities(module, ids.tolist())
    return ManagedCollisionEmbeddingCollection(collection, ManagedCollisionCollection(modules, tables))


def _skewed_ids(rows: int, step: int, generator: torch.Generator) -> torch.Tensor:
    """About twice as many distinct ids as the table has rows, positive and negative, other ones in favour each step."""
    ranks = (torch.rand(4 * rows + 8, generator=generator) ** 2 * 2 * (rows + 1)).long() + step * rows // 4
    return (ranks + 1) * 0x1E3779B97F4A7C15 % (2**62) * torch.where(ranks % 3 == 0, -1, 1)
