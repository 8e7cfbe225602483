"""Two bases side by side: the next one loads without touching the one being served."""

import numpy as np
import psutil
import pytest

from export import export_collection
from service.shards import GrpcShardClient, ShardFailed, ShardRequest
from service.triton import TritonServer
from service.triton_control import TritonCallError
from tests.e2e.serving import command_of
from tests.modules import plain_collection

pytestmark = pytest.mark.e2e


def request(version: int) -> ShardRequest:
    return ShardRequest(
        model="small_shard_0",
        base=version,
        version=version,
        ids_N=np.array([3, 1, 3], dtype=np.int64),
        table_lengths_T=np.array([3], dtype=np.int64),
        width=4,
        num_rows=3,
    )


def processes() -> dict[str, int]:
    """Process id of each version's model process."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        command = command_of(child)
        if command and "triton_python_backend_stub" in command[0]:
            found[command[1].split("/")[-2]] = child.pid
    return found


async def test_loading_a_new_base_leaves_the_process_of_the_old_one_alone(tmp_path):
    old, new = plain_collection({"t": 10}, seed=1), plain_collection({"t": 10}, seed=2)
    export_collection(old, tmp_path, name="small", num_shards=1)
    triton = TritonServer(tmp_path, {"small_shard_0": [1]})
    await triton.start()
    client = GrpcShardClient(triton.grpc_address)
    try:
        before = await client.lookup(request(1), timeout_s=10)
        first = processes()
        with pytest.raises(ShardFailed):
            await client.lookup(request(2), timeout_s=10)
        export_collection(new, tmp_path, name="small", num_shards=1)
        await triton.hold("small_shard_0", [1, 2])
        assert (await client.lookup(request(1), timeout_s=10)).embeddings_RW.tobytes() == before.embeddings_RW.tobytes()
        weight = new.embeddings["t"].weight.detach().numpy()
        assert (await client.lookup(request(2), timeout_s=10)).embeddings_RW.tobytes() == weight[[3, 1, 3]].tobytes()
        assert processes()["1"] == first["1"], "the served base was reloaded"
    finally:
        await client.close()
        await triton.stop()


async def test_a_broken_new_base_leaves_the_old_one_serving(tmp_path):
    export_collection(plain_collection({"t": 10}), tmp_path, name="small", num_shards=1)
    triton = TritonServer(tmp_path, {"small_shard_0": [1]})
    await triton.start()
    client = GrpcShardClient(triton.grpc_address)
    try:
        export_collection(plain_collection({"t": 10}), tmp_path, name="small", num_shards=1)
        state = tmp_path / "small/2/shard_0/state.safetensors"
        state.write_bytes(state.read_bytes()[:-4])
        with pytest.raises(TritonCallError, match=r"state\.safetensors"):
            await triton.hold("small_shard_0", [1, 2])
        assert (await client.lookup(request(1), timeout_s=10)).embeddings_RW.shape == (3, 4)
    finally:
        await client.close()
        await triton.stop()


async def test_a_killed_base_comes_back_though_two_newer_ones_were_exported(tmp_path):
    export_collection(plain_collection({"t": 10}, seed=1), tmp_path, name="small", num_shards=1)
    triton = TritonServer(tmp_path, {"small_shard_0": [1]})
    await triton.start()
    client = GrpcShardClient(triton.grpc_address)
    try:
        before = await client.lookup(request(1), timeout_s=10)
        for seed in (2, 3):
            export_collection(plain_collection({"t": 10}, seed=seed), tmp_path, name="small", num_shards=1)
        psutil.Process(processes()["1"]).kill()
        with pytest.raises(ShardFailed) as failure:
            await client.lookup(request(1), timeout_s=10)
        assert failure.value.process_died
        await triton.repair("small_shard_0")
        assert (await client.lookup(request(1), timeout_s=10)).embeddings_RW.tobytes() == before.embeddings_RW.tobytes()
        assert set(processes()) == {"1"}
    finally:
        await client.close()
        await triton.stop()
