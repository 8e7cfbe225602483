"""What calls hold that nobody waits for: a shard in another process is slow, and this one's memory is measured."""

import asyncio
import sys
import tracemalloc
from contextlib import asynccontextmanager

import numpy as np
import psutil
import pytest

from service.shards import GrpcShardClient, ShardFailed, ShardRequest
from tests.service.shards.held_shard import WIDTH

MIB = 1 << 20


@asynccontextmanager
async def held_shard(*, rows, max_owed_bytes):
    """A client, and what makes its shard hold calls and answer them in turns."""
    command = (sys.executable, "-m", "tests.service.shards.held_shard", str(rows))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)

    async def turn():
        process.stdin.write(b"turn\n")
        assert await process.stdout.readline() == b"turn\n"

    try:
        port = int(await process.stdout.readline())
        client = GrpcShardClient(f"127.0.0.1:{port}", max_owed_bytes=max_owed_bytes)
        yield client, turn
        await client.close()
    finally:
        process.kill()
        await process.wait()


def rows_request(rows, *, ids=None):
    ids_N = np.arange(ids or rows, dtype=np.int64)
    return ShardRequest(
        model="clicks_shard_0",
        base=1,
        version=1,
        ids_N=ids_N,
        table_lengths_T=np.array([ids_N.size]),
        width=WIDTH,
        num_rows=rows,
    )


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def rss():
    return psutil.Process().memory_info().rss


async def test_memory_of_calls_without_callers_is_bounded_until_and_while_their_answers_land():
    rows, calls, limit = 40_000, 60, 40 * MIB
    request = rows_request(rows)
    assert request.wire_bytes * calls > 10 * limit
    async with held_shard(rows=rows, max_owed_bytes=limit) as (client, turn):
        await client.lookup(request, timeout_s=30)  # what the first call takes for good
        await turn()
        before, peak, refused = rss(), 0, 0
        for _ in range(calls):
            with pytest.raises(ShardFailed) as failure:
                await client.lookup(request, timeout_s=0.01)
            refused += "over the limit of" in str(failure.value)
            assert client.owed_bytes <= limit
            peak = max(peak, rss())
        assert refused == calls - limit // request.wire_bytes
        await turn()

        def repaid():
            nonlocal peak
            peak = max(peak, rss())
            return not client.owed_bytes

        await until(repaid)
        print(f"\nowed at most {limit / MIB:.0f} MiB, held {(peak - before) / MIB:.0f} MiB more than before")
        assert peak - before < 3 * limit
        assert (await client.lookup(request, timeout_s=30)).embeddings_RW.shape == (rows, WIDTH)


async def test_a_call_holds_neither_its_request_once_sent_nor_a_reply_that_nobody_waits_for():
    rows, calls = 20_000, 6
    request = rows_request(rows, ids=1_000_000)
    async with held_shard(rows=rows, max_owed_bytes=1 << 40) as (client, turn):
        await turn()
        tracemalloc.start()
        try:
            failures = []
            for _ in range(calls):
                with pytest.raises(ShardFailed, match="did not answer") as failure:
                    await client.lookup(request, timeout_s=0.02)
                failures.append(failure.value)  # with their tracebacks, as a log may keep them
            await until(lambda: tracemalloc.get_traced_memory()[0] < request.ids_N.nbytes / 2)
            assert len(client._owed) == calls, "sent, and not answered yet"
            await turn()
            await until(lambda: not client.owed_bytes)
            assert tracemalloc.get_traced_memory()[0] < rows * WIDTH * 4
        finally:
            tracemalloc.stop()


async def test_a_call_over_the_limit_is_made_when_nothing_is_owed():
    rows = 2000
    async with held_shard(rows=rows, max_owed_bytes=1000) as (client, turn):
        request = rows_request(rows)
        assert (await client.lookup(request, timeout_s=30)).embeddings_RW.shape == (rows, WIDTH)
        await turn()
        with pytest.raises(ShardFailed, match="did not answer"):
            await client.lookup(request, timeout_s=0.02)
        said = rf"owes {request.wire_bytes} bytes .* call of {request.wire_bytes} bytes .* limit of 1000; try again"
        with pytest.raises(ShardFailed, match=said):
            await client.lookup(request, timeout_s=30)
        await turn()
        await until(lambda: not client.owed_bytes)
        await client.lookup(request, timeout_s=30)
