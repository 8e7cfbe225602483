"""Training on 1, 2 and 4 ranks over gloo: TorchRec's own sharded collection, its checkpoint, and what it answered.

``python -m tests.parity.ranks FOLDER`` starts four processes once; they form each world in turn, and leave for W ranks::

    FOLDER/repo                 the collection live<W>, which the ranks exported while they held it
    FOLDER/w<W>/checkpoint      what torch.distributed.checkpoint.save wrote
    FOLDER/w<W>/rank<r>.pt      state of rank r's own collision modules, and the rows of each
    FOLDER/w<W>/answers.pt      request (ids of each feature) → the rows that the sharded collection answered with

On CPU the sharded EmbeddingCollection has no forward, so only collisions are trained, and rows are written.
"""

import multiprocessing
import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import ManagedCollisionModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from export import export_sharded
from tests.modules import fill_identities
from tests.parity.tables import INT64_MAX, TableCase, build_managed, managed_tables

WORLDS = (1, 2, 4)
DIMS = {0: 4, 1: 6, 2: 64, 4: 128}
"""Embedding dimension of the collection that so many ranks train; 0: the unsharded module."""
LIVE_ROWS = {2: "fp16", 4: "int8"}
"""How so many ranks store rows when they export themselves."""
STEPS = 10


def training_ids(table: TableCase, step: int, rank: int) -> torch.Tensor:
    """About twice as many distinct ids as the table has rows: small, huge, negative; others in favour each step."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + sum(table.name.encode()))
    ranks = (torch.rand(2 * table.rows, generator=generator) ** 2 * 2 * table.rows).long() + step * table.rows // 4
    small, huge = ranks * 37 - 1, (ranks + 1) * 0x1E3779B97F4A7C15 % (2**62)
    return torch.where(ranks % 2 == 0, small, torch.where(ranks % 3 == 0, -huge, huge))


def zch_ids(table: TableCase) -> list[int]:
    """Ids for an MPZCH table, more than it has rows."""
    top = table.input_hash_size or INT64_MAX
    # A sharded trainer looks outside of its table for negative ids where the number of buckets is no power of two.
    low = 0 if table.input_hash_size or table.buckets & (table.buckets - 1) else -top
    generator = torch.Generator().manual_seed(sum(table.name.encode()))
    return torch.randint(low, top, (table.rows * 5 // 4,), generator=generator).tolist()


@dataclass(frozen=True)
class Worker:
    """One rank of one world."""

    rank: int
    world: int
    folder: Path

    def run(self) -> None:
        tables = managed_tables(self.world)
        dim = DIMS[self.world]
        sharded = self._shard(tables, dim)
        self._train(sharded._managed_collision_collection, tables)
        self._write_rows(sharded, tables, dim)
        dcp.save(sharded.state_dict(), checkpoint_id=self.folder / "checkpoint")
        modules = sharded._managed_collision_collection._managed_collision_modules
        torch.save({name: module.state_dict() for name, module in modules.items()}, self.folder / f"rank{self.rank}.pt")
        self._answer(sharded._managed_collision_collection, tables)
        if self.world in LIVE_ROWS:
            repo = self.folder.parent / "repo"
            export_sharded(sharded, repo, name=live_name(self.world), row_dtype=LIVE_ROWS[self.world])

    def _shard(self, tables: list[TableCase], dim: int) -> nn.Module:
        module = build_managed(tables, dim)
        for table in tables:
            collision = module._managed_collision_collection._managed_collision_modules[table.name]
            if isinstance(collision, HashZchManagedCollisionModule):
                fill_identities(collision, zch_ids(table))
        sharder = ManagedCollisionEmbeddingCollectionSharder()
        plan = construct_module_sharding_plan(
            module,
            {table.name: row_wise(num_buckets=table.buckets if table.fallback else None) for table in tables},
            sharder=sharder,
            local_size=self.world,
            world_size=self.world,
            device_type="cpu",
        )
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        sharded = sharder.shard(module, plan, env=env, device=torch.device("cpu"))
        self._fill(module, sharded)
        return sharded

    def _fill(self, module: nn.Module, sharded: nn.Module) -> None:
        """MPZCH cannot be trained on CPU; each rank takes its part of the table that was filled."""
        filled = module._managed_collision_collection._managed_collision_modules
        for name, mine in sharded._managed_collision_collection._managed_collision_modules.items():
            if isinstance(mine, HashZchManagedCollisionModule):
                start = mine._output_segments[mine._start_bucket]
                with torch.no_grad():
                    mine._hash_zch_identities.copy_(filled[name]._hash_zch_identities[start : start + mine._zch_size])

    def _train(self, collection: nn.Module, tables: list[TableCase]) -> None:
        zch = [module for module in collection.modules() if isinstance(module, HashZchManagedCollisionModule)]
        collection.train()
        for module in zch:
            module.reset_intrainer_bulk_eval_mode()
        for step in range(STEPS):
            ids = {}
            for table in tables:
                drawn = zch_ids(table)[:1] * 3 if table.fallback else training_ids(table, step, self.rank).tolist()
                for at, feature in enumerate(table.features):
                    ids[feature] = drawn[at :: len(table.features)]
            context = collection.create_context()
            collection.compute(context, collection.input_dist(context, request_of(ids)).wait().wait())
            collection.evict()

    def _write_rows(self, sharded: nn.Module, tables: list[TableCase], dim: int) -> None:
        state = sharded._embedding_module.state_dict()
        for table in tables:
            shards = state[f"embeddings.{table.name}.weight"].local_shards()
            for shard in shards:
                start, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
                shard.tensor.copy_(table.weight(dim)[start : start + size])

    def _answer(self, collection: nn.Module, tables: list[TableCase]) -> None:
        """Every rank sends the same request, as a collective call needs; rank 0 writes down the answer."""
        collection.eval()
        known: list[dict[str, list[int]]] = [{} for _ in range(self.world)]
        mine = {name: known_ids(module) for name, module in collection._managed_collision_modules.items()}
        dist.all_gather_object(known, mine)
        ids = {}
        for table in tables:
            held = [id_ for rank in known for id_ in rank[table.name]]
            for at, feature in enumerate(table.features):
                ids[feature] = answerable(table, held)[at:]
        context = collection.create_context()
        remapped = collection.compute(context, collection.input_dist(context, request_of(ids)).wait().wait())
        answer = collection.output_dist(context, remapped).wait()
        if self.rank == 0:
            rows = {feature: answer[feature].values()[: len(each)].tolist() for feature, each in ids.items()}
            torch.save({"ids": ids, "rows": rows}, self.folder / "answers.pt")


def live_name(world: int) -> str:
    """The collection that so many ranks export while they hold it."""
    return f"live{world}"


def request_of(ids: dict[str, list[int]]) -> KeyedJaggedTensor:
    """Samples of one id of each feature: on one rank, MPZCH without fallback knows no other. Short features start again."""
    size = max(map(len, ids.values()))
    values = [each[at % len(each)] for each in ids.values() for at in range(size)]
    return KeyedJaggedTensor(
        keys=list(ids), values=torch.tensor(values), lengths=torch.ones(len(values), dtype=torch.int64)
    )


def known_ids(module: ManagedCollisionModule) -> list[int]:
    """Ids that a collision module holds, −1 left out."""
    name = "_hash_zch_identities" if isinstance(module, HashZchManagedCollisionModule) else "_mch_sorted_raw_ids"
    return [id_ for id_ in getattr(module, name).flatten().tolist() if id_ not in (-1, INT64_MAX)]


def answerable(table: TableCase, known: list[int]) -> list[int]:
    """Ids for which the sharded collection's own answer is well defined: no sentinels, nothing that it drops."""
    if not table.fallback:
        return [id_ for id_ in table.pool(known) if id_ not in (-1, INT64_MAX)]
    if "none" in table.fallback or table.fallback == "no_bag":
        return known
    low = 0 if table.input_hash_size or table.buckets & (table.buckets - 1) else -(2**63)
    return [id_ for id_ in table.pool(known) if low <= id_ < (table.input_hash_size or INT64_MAX) and id_ != -1]


def _work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for world in WORLDS:
        place = folder / f"w{world}"
        if rank < world:
            dist.init_process_group("gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=world)
            Worker(rank, world, place).run()
            dist.barrier()
            dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for world in WORLDS:
        (folder / f"w{world}").mkdir(parents=True)
    # Forked before any thread starts, so that torch and torchrec are imported once.
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_work, args=(rank, folder)) for rank in range(max(WORLDS))]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(running):
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode:
                for process in running.values():
                    process.kill()  # it would wait for the one that failed
                sys.exit(1)


if __name__ == "__main__":
    main()
