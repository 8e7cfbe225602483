"""What is gRPC's own: health, reflection, broken messages, deadlines, cancelled callers, retry metadata, limits."""

import asyncio
import random

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from service.types import Readiness
from tests.service.edge_servers import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest_asyncio.fixture(loop_scope="module")
async def channel(edges):
    async with grpc.aio.insecure_channel(edges.grpc) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture
def health(channel):
    return health_pb2_grpc.HealthStub(channel)


def message(ids=(1, 2, 3)):
    request = pb.ModelInferRequest(model_name="clicks")
    for name, array in (("values", np.array(ids)), ("lengths", np.array([len(ids), 0]))):
        request.inputs.add(name=name, datatype="INT64", shape=[array.size])
        request.raw_input_contents.append(array.astype("<i8").tobytes())
    return request


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_health_follows_readiness(health, plane):
    async def check(service):
        return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

    assert [await check(""), await check("clicks")] == [SERVING, SERVING]
    plane.ready = Readiness(ready=False, reasons=("shard 0",))
    assert [await check(""), await check("clicks")] == [NOT_SERVING, NOT_SERVING]
    error = await failure(health.Check(health_pb2.HealthCheckRequest(service="nobody")))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_watchers_are_told_of_changes_only(health, plane):
    call = health.Watch(health_pb2.HealthCheckRequest(service="clicks"))
    async with asyncio.timeout(5):
        assert (await call.read()).status == SERVING
        plane.ready = Readiness(ready=False)
        assert (await call.read()).status == NOT_SERVING
        plane.ready = Readiness(ready=True)
        assert (await call.read()).status == SERVING
    call.cancel()
    unknown = health.Watch(health_pb2.HealthCheckRequest(service="nobody"))
    async with asyncio.timeout(5):
        assert (await unknown.read()).status == UNKNOWN
    unknown.cancel()


async def test_reflection_lists_the_services(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    async for reply in call:
        names = {service.name for service in reply.list_services_response.service}
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names


async def test_methods_that_make_no_sense_here_are_unimplemented(stub):
    for call in (
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="clicks")),
        stub.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest(name="x")),
        stub.LogSettings(pb.LogSettingsRequest()),
    ):
        assert (await failure(call)).code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "method",
    ["ModelInfer", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelReady", "RepositoryIndex"],
)
async def test_bytes_that_are_no_message_are_the_clients_mistake(channel, stub, edges, method):
    for junk in (b"\xff" * 20, b"\x0a\xff\xff\xff\xff\x0f", random.Random(0).randbytes(2000) + b"\x0a\x7f"):
        error = await failure(channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(junk))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await stub.ModelInfer(message())).model_version == "2"


async def test_bytes_that_are_no_health_request_are_the_clients_mistake(channel):
    error = await failure(channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff" * 9))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = await failure(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff" * 9).read())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_raw_contents_must_match_the_inputs(stub, plane):
    short = message()
    del short.raw_input_contents[1]
    long = message()
    long.raw_input_contents.append(b"")
    for request in (short, long):
        error = await failure(stub.ModelInfer(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "raw_input_contents" in error.details()
    assert plane.lookups == []


async def test_raw_and_typed_contents_together_are_refused(stub, plane):
    request = message()
    request.inputs[1].contents.int64_contents.extend([3, 0])
    error = await failure(stub.ModelInfer(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "lengths" in error.details()
    assert plane.lookups == []


async def test_typed_contents_must_be_of_the_datatype(stub, plane):
    request = message()
    del request.raw_input_contents[:]
    request.inputs[0].contents.int_contents.extend([1, 2, 3])
    request.inputs[1].contents.int64_contents.extend([3, 0])
    error = await failure(stub.ModelInfer(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "int_contents" in error.details()
    request.inputs[0].datatype = "INT32"
    assert (await stub.ModelInfer(request)).outputs[0].shape == [3, 4]


async def test_names_that_are_not_utf8_are_refused(stub, plane):
    request = message()
    request.inputs.add(name="keys", datatype="BYTES", shape=[2])
    request.raw_input_contents.append(b"\x02\x00\x00\x00\xff\xfe\x00\x00\x00\x00")
    error = await failure(stub.ModelInfer(request))
    assert (error.code(), plane.lookups) == (grpc.StatusCode.INVALID_ARGUMENT, [])
    assert "keys[0]" in error.details()


@pytest.mark.parametrize(
    "raw", [b"", b"\x00", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x01\x00\x00\x00a\x05\x00\x00\x00b", bytes(9)]
)
async def test_broken_string_framing_is_refused(stub, plane, raw):
    request = message()
    request.inputs.add(name="keys", datatype="BYTES", shape=[2])
    request.raw_input_contents.append(raw)
    error = await failure(stub.ModelInfer(request))
    assert (error.code(), plane.lookups) == (grpc.StatusCode.INVALID_ARGUMENT, [])
    assert "keys" in error.details()


async def test_an_unset_parameter_is_refused_by_name(stub):
    request = message()
    request.parameters["timeout_ms"].SetInParent()
    error = await failure(stub.ModelInfer(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "timeout_ms" in error.details()


async def test_the_smaller_deadline_is_passed_on(stub, plane):
    await stub.ModelInfer(message(), timeout=3)
    assert 2 < plane.lookups[-1].timeout_s < 3.5
    request = message()
    request.parameters["timeout_ms"].int64_param = 200
    await stub.ModelInfer(request, timeout=3)
    assert plane.lookups[-1].timeout_s == pytest.approx(0.2)
    request.parameters["timeout_ms"].int64_param = 60_000
    await stub.ModelInfer(request, timeout=3)
    assert 2 < plane.lookups[-1].timeout_s < 3.5
    await stub.ModelInfer(message())
    assert plane.lookups[-1].timeout_s is None


async def test_the_request_id_of_the_metadata_is_logged_and_passed_on_but_not_echoed(stub, plane):
    reply = await stub.ModelInfer(message(), metadata=(("x-request-id", "abc-1"),))
    assert (reply.id, plane.lookups[0].request_id) == ("", "abc-1")


async def test_a_cancelled_caller_cancels_the_lookup(stub, edges, plane):
    plane.gate = asyncio.Event()
    call = stub.ModelInfer(message())
    task = asyncio.ensure_future(call)
    await until(lambda: len(plane.lookups) == 1)
    assert plane.admission.inflight_requests == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: plane.cancelled == 1)
    await until(lambda: plane.admission.inflight_requests == 0)
    await until(lambda: edges.count("grpc_infer", "cancelled") == 1)
    plane.gate = None
    assert (await stub.ModelInfer(message())).model_version == "2"


async def test_a_deadline_that_passes_cancels_the_lookup(stub, plane):
    plane.gate = asyncio.Event()
    assert (await failure(stub.ModelInfer(message(), timeout=0.1))).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: plane.cancelled == 1)
    await until(lambda: plane.admission.inflight_requests == 0)


async def test_overload_says_when_to_come_back(stub, plane):
    permits = [plane.admit() for _ in range(64)]
    error = await failure(stub.ModelInfer(message()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = dict(error.trailing_metadata())
    assert (metadata["retry-after"], metadata["grpc-retry-pushback-ms"]) == ("1", "1000")
    for permit in permits:
        permit.release()


async def test_an_overloaded_server_does_not_even_parse(channel, plane):
    permits = [plane.admit() for _ in range(64)]
    error = await failure(channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\xff" * 20))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for permit in permits:
        permit.release()


async def test_a_message_that_unpacks_to_too_much_is_too_large(stub, plane):
    big = message(np.zeros(1 << 18, dtype=np.int64))
    error = await failure(stub.ModelInfer(big, compression=grpc.Compression.Gzip))
    assert (error.code(), plane.lookups) == (grpc.StatusCode.RESOURCE_EXHAUSTED, [])


async def test_a_large_reply_arrives_whole(edges, plane):
    ids = np.arange(1000, 101_000)
    request = message(ids)
    for name in ("embeddings", "hits", "row_ids"):
        request.outputs.add(name=name)
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(edges.grpc, options=options) as channel:
        reply = await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert [output.datatype for output in reply.outputs] == ["FP32", "BOOL", "INT64"]
    assert [len(raw) for raw in reply.raw_output_contents] == [1_600_000, 100_000, 800_000]
    assert np.frombuffer(reply.raw_output_contents[2], dtype="<i8").tolist() == ids.tolist()
    assert reply.parameters["version"].int64_param == 2
    await until(lambda: plane.admission.inflight_requests == 0)


async def test_the_index_leaves_out_what_is_not_ready_on_request(stub, plane):
    plane.ready = Readiness(ready=False, reasons=("shard 0",))
    assert len((await stub.RepositoryIndex(pb.RepositoryIndexRequest())).models) == 3
    assert len((await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models) == 0
    error = await failure(stub.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="x")))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_not_ready_is_an_answer_and_unknown_is_an_error(stub, plane):
    plane.ready = Readiness(ready=False)
    assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="clicks"))).ready
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="x"))).ready


async def test_statistics_cover_one_collection_or_all(stub):
    one = await stub.ModelStatistics(pb.ModelStatisticsRequest(name="clicks"))
    every = await stub.ModelStatistics(pb.ModelStatisticsRequest())
    assert [entry.name for entry in one.model_stats] == ["clicks"]
    assert [entry.name for entry in every.model_stats] == ["clicks", "ads"]
    assert one.model_stats[0].inference_stats.success.ns == 500
