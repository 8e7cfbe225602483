"""One call to one shard, over a real socket to a server that answers what it is told to."""

import asyncio
import re
import time
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from service.errors import ErrorCode
from service.shards import GrpcShardClient, ShardFailed, ShardRequest
from service.shards.client import OFFLOAD_BYTES


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, answer):
        self.answer, self.seen, self.cancelled = answer, [], 0

    async def ModelInfer(self, request, context):  # noqa: N802
        self.seen.append(request)
        try:
            return await self.answer(request, context)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@asynccontextmanager
async def shard(answer):
    servicer, server = Server(answer), grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcShardClient(f"127.0.0.1:{port}")
    try:
        yield client, servicer
    finally:
        await client.close(grace_s=0)
        await server.stop(0)


def ask(**changes):
    fields = {
        "model": "clicks_shard_0",
        "base": 3,
        "version": 4,
        "ids_N": np.array([7, -7], dtype=np.int64),
        "table_lengths_T": np.array([2], dtype=np.int64),
        "width": 3,
        "num_rows": 2,
        "want_row_ids": True,
        "want_hits": True,
    }
    return ShardRequest(**(fields | changes))


def reply(rows=2, *, dim=3, leave_out=(), cut=0, datatype=None, contents=3):
    message = service_pb2.ModelInferResponse()
    arrays = {
        "embeddings": np.arange(rows * dim, dtype=np.float32).reshape(rows, dim),
        "row_ids": np.arange(rows, dtype=np.int64),
        "hits": np.ones(rows, dtype=np.bool_),
    }
    for name, array in arrays.items():
        if name not in leave_out:
            kind = {"embeddings": "FP32", "row_ids": "INT64", "hits": "BOOL"}[name]
            message.outputs.add(name=name, datatype=datatype or kind, shape=array.shape)
            content = array.tobytes()
            message.raw_output_contents.append(content[: len(content) - cut])
    del message.raw_output_contents[contents:]
    return message


def always(message):
    async def answer(request, context):
        return message

    return answer


def fails(status, details):
    async def answer(request, context):
        await context.abort(status, details)

    return answer


async def test_a_request_names_model_base_version_and_only_the_wanted_outputs():
    async with shard(always(reply())) as (client, server):
        answer = await client.lookup(ask(want_hits=False), timeout_s=5)
    (seen,) = server.seen
    assert (seen.model_name, seen.model_version) == ("clicks_shard_0", "3")
    assert [output.name for output in seen.outputs] == ["embeddings", "row_ids"]
    sent = {i.name: np.frombuffer(raw, np.int64) for i, raw in zip(seen.inputs, seen.raw_input_contents, strict=True)}
    assert sent["ids"].tolist() == [7, -7]
    assert sent["table_lengths"].tolist() == [2]
    assert sent["version"].tolist() == [4]
    assert answer.hits_N is None
    assert np.array_equal(answer.embeddings_RW, np.arange(6, dtype=np.float32).reshape(2, 3))


async def test_no_ids_are_an_ordinary_request():
    async with shard(always(reply(0))) as (client, _):
        empty = ask(num_rows=0, ids_N=np.empty(0, np.int64), table_lengths_T=np.zeros(1, np.int64))
        assert (await client.lookup(empty, timeout_s=5)).embeddings_RW.shape == (0, 3)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (reply(3), r"\(3, 3\), \(2, 3\) was asked"),
        (reply(dim=1), r"\(2, 1\), \(2, 3\) was asked"),
        (reply(leave_out={"hits"}), "hits"),
        (reply(leave_out={"embeddings"}), "embeddings"),
        (reply(cut=3), "ValueError"),
        (reply(datatype="FP16"), "FP16"),
        (reply(contents=2), "zip"),
    ],
    ids=["too many rows", "another dim", "no hits", "no embeddings", "cut", "another datatype", "a content missing"],
)
async def test_a_reply_that_does_not_fit_the_request_is_a_bug_not_an_answer(message, words):
    async with shard(always(message)) as (client, _):
        with pytest.raises(ShardFailed, match="malformed") as failure:
            await client.lookup(ask(), timeout_s=5)
    assert failure.value.code is ErrorCode.INTERNAL
    assert re.search(words, failure.value.details)


@pytest.mark.parametrize("status", [status for status in grpc.StatusCode if status is not grpc.StatusCode.OK])
async def test_every_status_becomes_a_failure_of_ours(status):
    async with shard(fails(status, "why")) as (client, _):
        with pytest.raises(ShardFailed) as failure:
            await client.lookup(ask(), timeout_s=5)
    expected = {
        grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.OVERLOADED,
    }
    assert failure.value.code is expected.get(status, ErrorCode.UNAVAILABLE)
    assert not failure.value.process_died
    assert "127.0.0.1" not in str(failure.value), "a client learns nothing of addresses"
    assert "why" not in str(failure.value), "nor of what upstream said"
    assert "why" in failure.value.details or status is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_dead_model_process_is_told_from_a_server_that_is_away():
    async with shard(fails(grpc.StatusCode.INTERNAL, "Stub process 'x' is not healthy.")) as (client, _):
        with pytest.raises(ShardFailed) as failure:
            await client.lookup(ask(), timeout_s=5)
    assert failure.value.process_died
    gone = GrpcShardClient("127.0.0.1:1")
    with pytest.raises(ShardFailed) as failure:
        await gone.lookup(ask(), timeout_s=5)
    assert failure.value.code is ErrorCode.UNAVAILABLE
    assert not failure.value.process_died
    await gone.close()


async def never(request, context):
    await asyncio.sleep(3600)


async def test_a_shard_that_does_not_answer_fails_at_the_deadline_and_is_not_cut_off():
    async with shard(never) as (client, server):
        started = time.monotonic()
        with pytest.raises(ShardFailed, match=r"did not answer in 0\.050 s") as failure:
            await client.lookup(ask(), timeout_s=0.05)
        assert failure.value.code is ErrorCode.DEADLINE_EXCEEDED
        assert time.monotonic() - started < 2
        await settled(client, owed=1)
        assert server.cancelled == 0, "Triton 2.51 may abort when a call ends early"


async def test_a_caller_who_leaves_does_not_cut_the_call_off():
    gate = asyncio.Event()

    async def later(request, context):
        await gate.wait()
        return reply()

    async with shard(later) as (client, server):
        task = asyncio.create_task(client.lookup(ask(), timeout_s=60))
        await arrived(server)
        task.cancel()
        await settled(client, owed=1)
        gate.set()
        await settled(client, owed=0)
        assert server.cancelled == 0
        await client.lookup(ask(), timeout_s=5)


async def test_a_shard_that_owes_too_many_answers_is_not_asked_until_it_repays(monkeypatch):
    gate = asyncio.Event()

    async def later(request, context):
        await gate.wait()
        return reply()

    monkeypatch.setattr("service.shards.client.MAX_OWED", 3)
    async with shard(later) as (client, server):
        for _ in range(3):
            with pytest.raises(ShardFailed, match="did not answer"):
                await client.lookup(ask(), timeout_s=0.02)
        with pytest.raises(ShardFailed, match="owes 3 answers"):
            await client.lookup(ask(), timeout_s=5)
        assert len(server.seen) == 3
        gate.set()
        await settled(client, owed=0)
        await client.lookup(ask(), timeout_s=5)


async def test_closing_waits_for_calls_under_way_and_cuts_none_off():
    gate = asyncio.Event()

    async def later(request, context):
        await gate.wait()
        return reply()

    async with shard(later) as (client, server):
        with pytest.raises(ShardFailed, match="did not answer"):
            await client.lookup(ask(), timeout_s=0.02)
        await arrived(server)
        closing = asyncio.create_task(client.close(grace_s=30))
        await asyncio.wait({closing}, timeout=0.05)
        assert not closing.done(), "the call is under way"
        gate.set()
        async with asyncio.timeout(5):
            await closing
        assert server.cancelled == 0, "Triton 2.51 may abort when a call ends early"
        assert client.owed_bytes == 0


async def test_closing_waits_no_longer_than_its_grace():
    async with shard(never) as (client, server):
        with pytest.raises(ShardFailed, match="did not answer"):
            await client.lookup(ask(), timeout_s=0.02)
        await arrived(server)
        async with asyncio.timeout(5):
            await client.close(grace_s=0.05)
            while not server.cancelled:
                await asyncio.sleep(0.002)


async def test_closing_without_calls_waits_for_nothing():
    async with shard(always(reply())) as (client, _):
        await client.lookup(ask(), timeout_s=5)
        async with asyncio.timeout(5):
            await client.close(grace_s=3600)


async def arrived(server):
    async with asyncio.timeout(5):
        while not server.seen:
            await asyncio.sleep(0.002)


async def settled(client, *, owed):
    async with asyncio.timeout(5):
        while len(client._owed) != owed:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(("row_ids", "hits", "per_id"), [(False, False, 8), (True, False, 16), (True, True, 17)])
async def test_what_a_call_takes_is_what_goes_over_the_wire(row_ids, hits, per_id):
    leave_out = {name for name, wanted in (("row_ids", row_ids), ("hits", hits)) if not wanted}
    answer = reply(1000, leave_out=leave_out)
    asked = ask(
        num_rows=1000,
        ids_N=np.arange(1000),
        table_lengths_T=np.array([1000]),
        want_row_ids=row_ids,
        want_hits=hits,
    )
    assert asked.wire_bytes == 1000 * (per_id + 3 * 4) + 8
    async with shard(always(answer)) as (client, server):
        await client.lookup(asked, timeout_s=5)
    (seen,) = server.seen
    assert 0 <= seen.ByteSize() + answer.ByteSize() - asked.wire_bytes < 300


def large():
    ids_N = np.arange(OFFLOAD_BYTES // 4, dtype=np.int64)
    return ask(ids_N=ids_N, table_lengths_T=np.array([ids_N.size]), want_row_ids=False, want_hits=False)


async def test_a_large_request_arrives_whole():
    async with shard(always(reply(leave_out={"row_ids", "hits"}))) as (client, server):
        await client.lookup(large(), timeout_s=5)
    (seen,) = server.seen
    assert seen.raw_input_contents[0] == large().ids_N.tobytes()


async def test_a_large_request_fails_as_any_other_does():
    async with shard(fails(grpc.StatusCode.INTERNAL, "Stub process 'x' is not healthy.")) as (client, _):
        with pytest.raises(ShardFailed) as failure:
            await client.lookup(large(), timeout_s=5)
    assert failure.value.process_died
    gone = GrpcShardClient("127.0.0.1:1")
    for _ in range(3):
        with pytest.raises(ShardFailed, match="cannot be reached"):
            await gone.lookup(large(), timeout_s=5)
    await gone.close()


async def test_a_large_request_to_a_server_without_the_method_fails_before_it_is_sent():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcShardClient(f"127.0.0.1:{port}")
    for _ in range(20):
        with pytest.raises(ShardFailed, match="it cannot serve this version"):
            await client.lookup(large(), timeout_s=5)
    await client.close()
    await server.stop(0)


async def test_a_large_reply_is_read_off_the_event_loop():
    rows = 200_000
    async with shard(always(reply(rows))) as (client, _):
        many = ask(num_rows=rows, ids_N=np.zeros(rows, np.int64), table_lengths_T=np.array([rows]))
        answer = await client.lookup(many, timeout_s=30)
    assert answer.embeddings_RW.shape == (rows, 3)
    assert answer.embeddings_RW[-1, -1] == rows * 3 - 1
