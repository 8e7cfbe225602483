"""The dataplane with its batcher and fan-out over shards that answer by a rule: what its tests ask."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import numpy as np
from prometheus_client import CollectorRegistry

from export.contract import Routing, hash_shard
from service.batcher import Batcher
from service.dataplane import DataPlane, Served
from service.fanout import Fanout, Shard
from service.health import ShardHealth
from service.metrics import Metrics
from service.settings import Settings
from service.types import LookupRequest
from tests.manifests import RuleShard, make_table, make_version

NUM_SHARDS = 3


def ids_on(shard: int, count: int, num_shards: int = NUM_SHARDS) -> list[int]:
    ids = np.arange(1, 10_000, dtype=np.int64)
    return ids[hash_shard(ids.view(np.uint64), num_shards) == shard][:count].tolist()


def managed(num_shards=NUM_SHARDS):
    return [make_table("user", ["user"], routing=Routing.HASH, num_shards=num_shards)]


class Stack:
    def __init__(self, plane, shards, healths, registry):
        self.plane, self.shards, self.healths, self.registry = plane, shards, healths, registry

    async def ask(self, ids, *, collection="clicks", **options):
        request = LookupRequest(
            collection=collection,
            values_N=np.array(ids, dtype=np.int64),
            lengths_FB=np.array([len(ids)], dtype=np.int64),
            **options,
        )
        return await self.send(request)

    async def send(self, request):
        with self.plane.admit(request.values_N.nbytes) as permit:
            return await self.plane.lookup(request, permit)

    def sample(self, name, **labels):
        return self.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def stack(
    tables=None,
    num_shards=NUM_SHARDS,
    *,
    offload_ids=2048,
    hashes=None,
    slot_s=0.01,
    need_indices=False,
    **settings,
):
    manifest, version = make_version(
        tables or managed(num_shards), num_shards, hashes=hashes, need_indices=need_indices
    )
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    plane = DataPlane(Settings(**settings), metrics)
    shards = [RuleShard(manifest, index) for index in range(num_shards)]
    with ThreadPoolExecutor(2) as executor:
        healths = [ShardHealth(version, s, shards[s], interval_s=5, timeout_s=1) for s in range(num_shards)]
        await asyncio.gather(*(health.probe() for health in healths))
        fanout = Fanout(
            version,
            [Shard(client=shard, health=health) for shard, health in zip(shards, healths, strict=True)],
            metrics=metrics,
            executor=executor,
            offload_ids=offload_ids,
        )
        batcher = Batcher(fanout.run, max_weight=1000, slot_s=slot_s)
        plane.serve(Served(version=version, health=tuple(healths), batcher=batcher))
        before = asyncio.all_tasks()
        yield Stack(plane, shards, healths, registry)
        await batcher.close()
        assert not {task for task in asyncio.all_tasks() - before if not task.done()}, "a task lives on"
    assert plane.inflight_requests == 0


async def until(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.002)
