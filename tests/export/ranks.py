"""What each rank of ``test_sharded`` does, under torchrun; writes what the test needs to know beside the repository."""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from export import export_collection, export_delta, export_sharded
from export.errors import ExportError
from export.progress import silent
from export.team import Ranks
from tests.modules import configs, hash_zch_module, plain_collection, untrained_collection

ROWS = {"cut": 23, "whole": 9, "wide": 12, "copied": 7}
MAPPED = {"user": 24, "item": 17}
DIM = 8


def weight_of(table: str, rows: int) -> torch.Tensor:
    """Every row of a table, the same on every rank."""
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(sum(table.encode())))


def shard_plain(world: int) -> nn.Module:
    module = plain_collection(ROWS, dim=DIM)
    with torch.no_grad():
        for table, rows in ROWS.items():
            module.embeddings[table].weight.copy_(weight_of(table, rows))
    ways = {
        "cut": row_wise(),
        "whole": table_wise(rank=world - 1),
        "wide": column_wise(ranks=[(world - 1 - at) % world for at in range(2)]),
        "copied": data_parallel(),
    }
    return shard(module, ways, EmbeddingCollectionSharder(), world)


def shard_managed(world: int) -> nn.Module:
    module = untrained_collection(MAPPED, dim=DIM)
    ways = {table: row_wise() for table in MAPPED}
    sharded = shard(module, ways, ManagedCollisionEmbeddingCollectionSharder(), world)
    state = sharded._embedding_module.state_dict()
    for table, rows in MAPPED.items():
        for part in state[f"embeddings.{table}.weight"].local_shards():
            start = part.metadata.shard_offsets[0]
            part.tensor.copy_(weight_of(table, rows)[start : start + part.tensor.shape[0]])
    return sharded


def shard_halves(world: int) -> nn.Module:
    """What ``DMPCollection``, which is for GPUs alone, makes of a module: each half of the ranks has all rows."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    env = ShardingEnv2D(
        sharding_pg=mesh.get_group("shard"),
        replica_pg=mesh.get_group("replicate"),
        global_pg=dist.group.WORLD,
        device_mesh=mesh,
        node_group_size=world // 2,
    )
    module = plain_collection(ROWS, dim=DIM)
    return shard(module, dict.fromkeys(ROWS, row_wise()), EmbeddingCollectionSharder(), world // 2, env)


def shard(module: nn.Module, ways: dict, sharder: object, world: int, env: ShardingEnv | None = None) -> nn.Module:
    plan = construct_module_sharding_plan(
        module, ways, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    return sharder.shard(
        module, plan, env=env or ShardingEnv.from_process_group(dist.group.WORLD), device=torch.device("cpu")
    )


def train(sharded: nn.Module, rank: int) -> None:
    """Stream ids of all kinds through the ranks' maps, more than they hold, over gloo."""
    collection = sharded._managed_collision_collection
    collection.train()
    generator = torch.Generator().manual_seed(rank)
    for step in range(8):
        ids = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
        ids[:12] = torch.arange(12) + 3 * step
        ids[12:16] = torch.tensor([-5, -7, -(2**63), 2**62])
        request = KeyedJaggedTensor(
            keys=list(MAPPED), values=torch.cat([ids, ids.flip(0)]), lengths=torch.tensor([40, 40])
        )
        context = collection.create_context()
        collection.compute(context, collection.input_dist(context, request).wait().wait())
        collection.evict()


def refusal(work) -> str:
    try:
        work()
    except ExportError as exc:
        return str(exc)
    return "nothing was refused"


def held() -> list[int]:
    """How many files and threads this process has."""
    gc.collect()
    return [len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task")]


def linger(step: str, done: int, _total: int) -> None:
    """A rank that is slower than the others."""
    if (step, done) == ("tracing the lookup", 0):
        time.sleep(2)


def end(*_: object) -> None:
    """A rank that dies, unseen by torchrun, which would end the others: they must not wait for it."""
    os._exit(0)


def shard_no_bag(world: int) -> nn.Module:
    tables = configs({"user": 8})
    collisions = {"user": hash_zch_module(8, buckets=world, fallback="no_bag")}
    module = ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=tables), ManagedCollisionCollection(collisions, tables)
    )
    return shard(module, {"user": row_wise()}, ManagedCollisionEmbeddingCollectionSharder(), world)


def export_as_rank(make: Callable[[int], nn.Module], world: int, folder: Path, rank: int, **options: str) -> str:
    """What one rank hears when all of them export a module that they may not; ``make`` shards it, given the world."""
    place = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
    try:
        return refusal(lambda: export_sharded(make(world), folder / "repo", name="c", **options))
    finally:
        gc.collect()
        dist.destroy_process_group()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world, folder = dist.get_rank(), dist.get_world_size(), Path(sys.argv[1])
    repo, notes = folder / "repo", {}
    plain, managed = shard_plain(world), shard_managed(world)
    export_sharded(managed, repo, name="fresh")
    train(managed, rank)
    export_delta(managed, repo, name="fresh")
    export_sharded(plain, repo, name="plain", out_of_range="zero")
    export_sharded(managed, repo, name="managed")
    export_sharded(managed, repo, name="managed", row_dtype="int8")
    dcp.save(managed.state_dict(), checkpoint_id=folder / "checkpoint")
    on_meta = untrained_collection(MAPPED, dim=DIM, device="meta")
    with Ranks() as team:
        options = {"name": "copied", "num_shards": 3, "checkpoint": folder / "checkpoint", "team": team}
        export_collection(on_meta, repo, **options)
    collisions = managed._managed_collision_collection._managed_collision_modules
    torch.save({name: module.state_dict() for name, module in collisions.items()}, folder / f"rank{rank}.pt")

    collisions["user"]._evicted = rank == world - 1
    collisions["user"]._evicted_emb_indices = torch.tensor([collisions["user"]._output_global_offset])
    notes["evicted"] = refusal(lambda: export_sharded(managed, repo, name="failed"))
    collisions["user"]._evicted = False
    notes["int8"] = refusal(lambda: export_sharded(plain, repo, name="failed", row_dtype="int8"))
    notes["unsharded"] = refusal(lambda: export_sharded(plain_collection(), repo, name="failed"))
    notes["plain"] = refusal(lambda: export_sharded(plain, repo, name="failed", evicted="reset"))
    notes["sharded"] = refusal(lambda: export_collection(plain, repo, name="failed"))
    if world > 1:
        notes["halves"] = refusal(lambda: export_sharded(shard_halves(world), repo, name="failed"))
        plain.module_sharding_plan["whole"].ranks = [rank]
        notes["plans"] = refusal(lambda: export_sharded(plain, repo, name="failed"))
        plain.module_sharding_plan["whole"].ranks = [world - 1]
    notes["held"] = [held()]
    for _ in range(3):
        export_sharded(plain, repo, name="hourly")
        notes["held"].append(held())
    _set_pg_timeout(timedelta(seconds=1))  # the trainer's own, which is not for exports
    late = linger if rank == world - 1 else silent
    notes["late"] = refusal(lambda: export_sharded(plain, repo, name="hourly", on_progress=late))
    (folder / f"notes{rank}.json").write_text(json.dumps(notes))
    if world > 1:
        ending = end if rank == world - 1 else silent
        notes["died"] = refusal(lambda: export_sharded(plain, repo, name="failed", on_progress=ending))
        (folder / f"notes{rank}.json").write_text(json.dumps(notes))
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
