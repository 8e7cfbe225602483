"""The gate of a shard: opened and closed by real lookups, repaired when its process died."""

import asyncio
from contextlib import asynccontextmanager

from export.contract import Routing
from service.errors import ErrorCode
from service.health import ShardHealth
from service.shards import ShardFailed
from tests.manifests import RuleShard, make_table, make_version

LATE = ShardFailed("it did not answer in 1.000 s", code=ErrorCode.DEADLINE_EXCEEDED)
DEAD = ShardFailed("Stub process is not healthy", process_died=True)
REFUSED = ShardFailed("connection refused")


@asynccontextmanager
async def monitored(*, repair=None, failure=None, interval_s=60.0):
    manifest, version = make_version([make_table("t", ["f"], routing=Routing.HASH, num_shards=1)], 1)
    shard = RuleShard(manifest, 0, failure=failure)
    health = ShardHealth(version, 0, shard, interval_s=interval_s, timeout_s=1, repair=repair and repair(shard))
    task = asyncio.create_task(health.run())
    try:
        yield health, shard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_shard_is_not_ready_before_its_first_probe():
    _, version = make_version([make_table("t", ["f"], routing=Routing.HASH, num_shards=1)], 1)
    assert ShardHealth(version, 0, None, interval_s=1, timeout_s=1).reason == "not probed yet"


async def test_a_probe_that_is_answered_opens_the_gate():
    async with monitored() as (health, _):
        await until(lambda: health.reason is None)


async def test_a_dead_process_closes_the_gate_at_once_and_is_repaired():
    repaired = []

    def repair(shard):
        async def bring_back(model):
            repaired.append(model)
            shard.failure = None

        return bring_back

    async with monitored(repair=repair) as (health, shard):
        await until(lambda: health.reason is None)
        shard.failure = DEAD
        health.report(DEAD)
        assert "Stub process" in health.reason
        await until(lambda: health.reason is None)
        assert repaired == ["clicks_shard_0"]


async def test_a_call_that_failed_otherwise_is_judged_by_the_next_probe_not_at_once():
    async with monitored() as (health, shard):
        await until(lambda: health.reason is None)
        health.report(REFUSED)
        assert health.reason is None
        shard.failure = REFUSED
        health.report(REFUSED)
        await until(lambda: health.reason == "connection refused")


async def test_a_repair_that_fails_is_tried_again():
    attempts = []

    def repair(shard):
        async def bring_back(model):
            attempts.append(model)
            if len(attempts) < 3:
                raise RuntimeError("not yet")
            shard.failure = None

        return bring_back

    async with monitored(repair=repair, failure=DEAD, interval_s=0.01) as (health, _):
        await until(lambda: health.reason is None)
        assert len(attempts) == 3


async def test_a_shard_that_nobody_repairs_opens_again_when_it_answers():
    async with monitored(failure=REFUSED, interval_s=0.01) as (health, shard):
        await until(lambda: health.reason == "connection refused")
        shard.failure = None
        await until(lambda: health.reason is None)


async def test_a_late_probe_says_nothing_against_a_shard_that_answers_lookups_meanwhile():
    async with monitored() as (health, shard):
        await until(lambda: health.reason is None)
        shard.failure = LATE
        shard.on_probe = health.answered
        assert await health.probe() is None
        assert health.reason is None
        shard.on_probe = None
        assert await health.probe() is LATE
        assert "did not answer" in health.reason


async def test_a_repair_that_changes_nothing_is_not_tried_without_pause():
    repairs = []

    def repair(shard):
        async def bring_back(model):
            repairs.append(model)

        return bring_back

    async with monitored(repair=repair, failure=DEAD, interval_s=60.0) as (health, _):
        await until(lambda: repairs)
        await asyncio.sleep(0.1)
        assert len(repairs) == 1
        health.report(DEAD)
        await until(lambda: len(repairs) == 2)


async def test_whatever_a_probe_raises_the_loop_goes_on():
    async with monitored(interval_s=0.01) as (health, shard):
        await until(lambda: health.reason is None)
        shard.failure = KeyError("embeddings")
        await until(lambda: health.reason == "its state is not known")
        shard.failure = None
        await until(lambda: health.reason is None)
