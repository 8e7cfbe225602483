"""Calls that are sent and let go of: the real Triton reads them as it reads any other."""

import asyncio

import numpy as np
import psutil
import pytest

from export import export_collection
from service.shards import GrpcShardClient, ShardFailed, ShardRequest
from service.shards.client import OFFLOAD_BYTES
from service.triton import TritonServer
from tests.e2e.serving import command_of
from tests.modules import plain_collection

pytestmark = pytest.mark.e2e

SIZES = (1, OFFLOAD_BYTES // 8 - 100, OFFLOAD_BYTES // 8, 1_000_000)


def request(size: int) -> ShardRequest:
    return ShardRequest(
        model="small_shard_0",
        base=1,
        version=1,
        ids_N=np.arange(size, dtype=np.int64) % 10,
        table_lengths_T=np.array([size], dtype=np.int64),
        width=4,
        num_rows=size,
    )


async def test_requests_of_any_size_are_answered_and_fail_alike(tmp_path):
    module = plain_collection({"t": 10})
    weight = module.embeddings["t"].weight.detach().numpy()
    export_collection(module, tmp_path, name="small", num_shards=1)
    triton = TritonServer(tmp_path, {"small_shard_0": [1]})
    await triton.start()
    client = GrpcShardClient(triton.grpc_address)
    try:

        async def check(size: int) -> None:
            asked = request(size)
            reply = await client.lookup(asked, timeout_s=60)
            assert reply.embeddings_RW.tobytes() == weight[asked.ids_N].tobytes()

        await asyncio.gather(*(check(size) for size in SIZES * 4))
        for child in psutil.Process().children(recursive=True):
            if "triton_python_backend_stub" in " ".join(command_of(child)):
                child.kill()
        for size in SIZES:
            with pytest.raises(ShardFailed) as failure:
                await client.lookup(request(size), timeout_s=60)
            assert failure.value.process_died
        await triton.repair("small_shard_0")
        await asyncio.gather(*(check(size) for size in SIZES))
        assert triton.running
    finally:
        await client.close()
        await triton.stop()
