"""The composition root: its listener, its settings, its ways to say no."""

import asyncio
import socket
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from typer.testing import CliRunner

from export.contract import Routing, Runtime, UserError, version_dir
from export.contract.layout import MANIFEST_FILE
from service.cli import build_app
from service.listeners import listen
from service.server import _unless, read_settings, start
from service.settings import Settings
from service.versions.connector import OWED_DIVISOR
from tests.manifests import make_manifest, make_table


def test_accepted_connections_never_wait_for_a_delayed_acknowledgement():
    with listen("http", "127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_busy_port_is_named_with_the_option_that_changes_it():
    with listen("http", "127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}.*--http-port"), listen("http", "127.0.0.1", port):
            pass


def test_settings_come_from_the_environment_unless_overridden(monkeypatch):
    monkeypatch.setenv("KJTSERVE_HTTP_PORT", "1234")
    monkeypatch.setenv("KJTSERVE_MAX_IDS", "5")
    settings = read_settings(http_port=4321, grpc_port=None)
    assert (settings.http_port, settings.grpc_port, settings.max_ids) == (4321, 8081, 5)


def test_a_bad_setting_is_named_with_its_value_and_rule(monkeypatch):
    monkeypatch.setenv("KJTSERVE_MAX_BATCH_IDS", "-3")
    with pytest.raises(UserError, match=r"KJTSERVE_MAX_BATCH_IDS='-3'.*greater than 0"):
        read_settings()


def test_serve_lists_every_setting_with_its_default_and_meaning():
    listed = CliRunner().invoke(build_app(), ["serve", "--settings"])
    assert listed.exit_code == 0, listed.output
    lines = listed.output.splitlines()
    named = [line.partition("=")[0] for line in lines if not line.startswith(" ")]
    assert named == [f"KJTSERVE_{name.upper()}" for name in Settings.model_fields]
    assert lines[:2] == [
        "KJTSERVE_HOST=127.0.0.1",
        "    Address that both listeners bind; a container sets 0.0.0.0.",
    ]
    assert "KJTSERVE_LOG_JSON=true" in lines
    assert all(field.description for field in Settings.model_fields.values())


async def test_work_that_is_overtaken_by_the_stop_signal_is_cancelled():
    stop, cancelled = asyncio.Event(), []

    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    asyncio.get_running_loop().call_soon(stop.set)
    assert await _unless(stop, work()) is None
    assert cancelled == [True]


async def test_work_that_fails_before_the_stop_signal_says_why():
    async def work():
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        await _unless(asyncio.Event(), work())


NUM_SHARDS = 2


def write_repo(repo, *, collection="clicks", num_shards=NUM_SHARDS, runtime=Runtime.PYTHON):
    """A repository as the front tier reads it: manifests only."""
    tables = [make_table("user", ["user"], routing=Routing.ROWS, num_shards=num_shards)]
    manifest = make_manifest(tables, num_shards, collection=collection).model_copy(update={"runtime": runtime})
    directory = version_dir(repo, manifest.collection, manifest.version)
    directory.mkdir(parents=True)
    (directory / MANIFEST_FILE).write_text(manifest.model_dump_json())
    return repo


class HeldShard(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Keeps every call until it is let go."""

    def __init__(self):
        self.gate, self.held, self.cancelled = asyncio.Event(), 0, 0

    async def holds(self, calls):
        async with asyncio.timeout(10):
            while self.held < calls:
                await asyncio.sleep(0.002)

    async def ModelInfer(self, request, context):  # noqa: N802
        self.held += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        message = service_pb2.ModelInferResponse()
        message.outputs.add(name="embeddings", datatype="FP32", shape=(0, 3))
        message.raw_output_contents.append(np.empty(0, dtype=np.float32).tobytes())
        return message


@asynccontextmanager
async def held_shard():
    shard, server = HeldShard(), grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(shard, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield shard, f"127.0.0.1:{port}"
    finally:
        shard.gate.set()
        await server.stop(0)


def quick(**changes):
    return Settings(http_port=0, grpc_port=0, probe_timeout_s=0.05, probe_interval_s=60, **changes)


async def test_stopping_lets_calls_to_shards_end_within_the_grace(tmp_path):
    async with held_shard() as (shard, address):
        context = start(write_repo(tmp_path), quick(drain_grace_s=30), shards=[address])
        await context.__aenter__()
        await shard.holds(NUM_SHARDS)  # probes that nobody waits for any more
        stopping = asyncio.create_task(context.__aexit__(None, None, None))
        await asyncio.wait({stopping}, timeout=0.3)
        assert not stopping.done()
        shard.gate.set()
        async with asyncio.timeout(10):
            await stopping
        assert shard.cancelled == 0


async def test_stopping_takes_one_grace_however_many_shards_hang(tmp_path):
    num_shards, grace_s = 16, 0.5
    repo, loop = write_repo(tmp_path, num_shards=num_shards), asyncio.get_running_loop()
    async with held_shard() as (shard, address):
        async with asyncio.timeout(30), start(repo, quick(drain_grace_s=grace_s), shards=[address]):
            await shard.holds(num_shards)
            stopped_at = loop.time()
        assert grace_s * 0.9 < loop.time() - stopped_at < grace_s * num_shards / 2


async def test_every_shard_may_owe_an_equal_share_of_what_requests_may_hold(tmp_path, monkeypatch):
    given = []

    class Recorded:
        def __init__(self, address, *, max_owed_bytes):
            given.append(max_owed_bytes)

        async def lookup(self, request, *, timeout_s):
            raise AssertionError

        async def close(self, *, grace_s):
            pass

    async def no_probe(self):
        pass

    monkeypatch.setattr("service.versions.connector.GrpcShardClient", Recorded)
    monkeypatch.setattr("service.health.ShardHealth.probe", no_probe)
    write_repo(tmp_path, collection="ads")
    async with start(write_repo(tmp_path), quick(max_inflight_bytes=1 << 20), shards=["127.0.0.1:1"]):
        pass
    assert given == [(1 << 20) // OWED_DIVISOR // (2 * NUM_SHARDS)] * (2 * NUM_SHARDS)


async def test_no_triton_is_started_for_a_collection_that_it_has_no_backend_for(tmp_path, monkeypatch):
    def started(*args, **options):
        raise AssertionError("a Triton is made")

    monkeypatch.setattr("service.server.TritonServer", started)
    write_repo(tmp_path, collection="ads", runtime=Runtime.PYTORCH)
    said = (
        r"^collection ads: .*--runtime pytorch.* no LibTorch backend; .*--shards HOST:PORT.* --runtime python [^\n]*$"
    )
    with pytest.raises(UserError, match=said):
        async with start(write_repo(tmp_path), quick()):
            pass


async def test_servers_that_are_named_may_have_any_backend(tmp_path):
    repo = write_repo(tmp_path, runtime=Runtime.PYTORCH)
    async with start(repo, quick(), shards=["127.0.0.1:1"]) as running:
        assert [info.name for info in running.plane.collections()] == ["clicks"]
