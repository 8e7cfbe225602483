"""One table of requests, good and malformed, run through HTTP (JSON and binary tensors) and gRPC (typed and raw).

Each refusal has its code, names what is wrong, calls no plane, gives its permit back, and harms no later request.
"""

import struct
from dataclasses import dataclass, field
from typing import Any, ClassVar

import grpc.aio
import httpx
import numpy as np
import orjson
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from service.errors import (
    DeadlineExceeded,
    ErrorCode,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    TooLarge,
    Unavailable,
)
from service.grpc.converters import STATUS as GRPC_STATUS
from service.rest.converters import STATUS as HTTP_STATUS
from service.types import Readiness
from tests.service.edge_servers import until


@dataclass(kw_only=True)
class Tensor:
    name: str
    datatype: str = "INT64"
    shape: list[int]
    data: list[Any]
    parameters: dict[str, Any] = field(default_factory=dict)

    def raw(self) -> bytes:
        if self.datatype == "BYTES":
            encoded = [item if isinstance(item, bytes) else item.encode() for item in self.data]
            return b"".join(struct.pack("<I", len(item)) + item for item in encoded)
        dtype = {"INT32": "<i4", "FP32": "<f4", "BOOL": "?", "FP64": "<f8", "UINT64": "<u8"}.get(self.datatype, "<i8")
        return np.array(self.data, dtype=dtype).tobytes()


@dataclass(kw_only=True)
class Call:
    collection: str = "clicks"
    version: str = ""
    inputs: list[Tensor]
    outputs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)


def values(**changes):
    return Tensor(**({"name": "values", "shape": [3], "data": [1, 2, 3]} | changes))


def lengths(**changes):
    return Tensor(**({"name": "lengths", "shape": [4], "data": [1, 0, 1, 1]} | changes))


def keys(**changes):
    return Tensor(**({"name": "keys", "datatype": "BYTES", "shape": [2], "data": ["item", "user"]} | changes))


def weights(**changes):
    return Tensor(**({"name": "weights", "datatype": "FP32", "shape": [3], "data": [0.5, -1.0, 2.0]} | changes))


def strides(**changes):
    return Tensor(**({"name": "stride_per_key", "datatype": "INT32", "shape": [2], "data": [3, 1]} | changes))


def inverse(**changes):
    return Tensor(**({"name": "inverse_indices", "shape": [2, 2], "data": [0, 2, 0, 0]} | changes))


def call(*inputs, **changes):
    return Call(inputs=list(inputs or (values(), lengths())), **changes)


def refused(name, made, says, code=ErrorCode.INVALID_ARGUMENT):
    return pytest.param((made, code, says), id=name)


WIDE = 2**62

MALFORMED = [
    refused("no input", Call(inputs=[]), "values"),
    refused("no values", call(lengths()), "values"),
    refused("no lengths", call(values()), "lengths"),
    refused("values twice", call(values(), values(), lengths()), "values"),
    refused("keys twice", call(values(), lengths(), keys(), keys()), "keys"),
    refused("an unknown input", call(values(), lengths(), values(name="ids")), "ids"),
    refused("an input without a name", call(values(), lengths(), values(name="")), "''"),
    refused("weights of INT64", call(values(), lengths(), values(name="weights")), "weights"),
    refused("weights twice", call(values(), lengths(), weights(), weights()), "weights"),
    refused("weights of two dimensions", call(values(), lengths(), weights(shape=[3, 1])), "weights"),
    refused("weights one short of their shape", call(values(), lengths(), weights(shape=[4])), "weights"),
    refused("strides of FP32", call(values(), lengths(), strides(datatype="FP32")), "stride_per_key"),
    refused("strides of two dimensions", call(values(), lengths(), strides(shape=[2, 1])), "stride_per_key"),
    refused(
        "inverse indices of BOOL", call(values(), lengths(), strides(), inverse(datatype="BOOL")), "inverse_indices"
    ),
    refused(
        "inverse indices of shape [-1, 2]", call(values(), lengths(), strides(), inverse(shape=[-1, 2])), "inverse"
    ),
    refused("values of FP32", call(values(datatype="FP32"), lengths()), "values"),
    refused("values of BOOL", call(values(datatype="BOOL"), lengths()), "values"),
    refused("values of UINT64", call(values(datatype="UINT64"), lengths()), "values"),
    refused("values of no datatype", call(values(datatype=""), lengths()), "values"),
    refused("values of a made-up datatype", call(values(datatype="INT65"), lengths()), "INT65"),
    refused("lengths of FP64", call(values(), lengths(datatype="FP64")), "lengths"),
    refused("keys of INT64", call(values(), lengths(), keys(datatype="INT64", data=[1, 2])), "keys"),
    refused("values of shape [-1]", call(values(shape=[-1]), lengths()), "values"),
    refused("values of a huge shape", call(values(shape=[WIDE]), lengths()), "values"),
    refused("values of shape []", call(values(shape=[]), lengths()), "values"),
    refused("values of two dimensions", call(values(shape=[3, 1]), lengths()), "values"),
    refused("values one short", call(values(shape=[4]), lengths()), "values"),
    refused("values one long", call(values(shape=[2]), lengths()), "values"),
    refused("lengths of shape [-2, -2]", call(values(), lengths(shape=[-2, -2])), "lengths"),
    refused("lengths of three dimensions", call(values(), lengths(shape=[2, 2, 1])), "lengths"),
    refused("lengths whose shape overflows", call(values(), lengths(shape=[WIDE, 4])), "lengths"),
    refused("empty lengths of a huge shape", call(values(), lengths(shape=[0, 2**63 - 1], data=[])), "lengths"),
    refused("keys one short", call(values(), lengths(), keys(shape=[3])), "keys"),
    refused("keys one long", call(values(), lengths(), keys(shape=[1])), "keys"),
    refused("keys of a huge shape", call(values(), lengths(), keys(shape=[WIDE])), "keys"),
    refused("keys of two dimensions", call(values(), lengths(), keys(shape=[2, 1])), "keys"),
    refused("an unknown output", call(outputs=[("embedding", {})]), "embedding"),
    refused("an output twice", call(outputs=[("hits", {}), ("hits", {})]), "hits"),
    refused("classification", call(outputs=[("embeddings", {"classification": 3})]), "classification"),
    refused("an unknown output parameter", call(outputs=[("embeddings", {"colour": "red"})]), "colour"),
    refused(
        "output in shared memory",
        call(outputs=[("embeddings", {"shared_memory_region": "x", "shared_memory_byte_size": 8})]),
        "shared_memory_",
    ),
    refused(
        "input in shared memory",
        call(values(data=[], parameters={"shared_memory_region": "x", "shared_memory_byte_size": 8}), lengths()),
        "shared_memory_",
    ),
    refused("an unknown input parameter", call(values(parameters={"scale": 2}), lengths()), "scale"),
    refused("an unknown request parameter", call(parameters={"colour": "red"}), "colour"),
    refused("on_shard_failure of a wrong value", call(parameters={"on_shard_failure": "ignore"}), "on_shard_failure"),
    refused("on_shard_failure of a wrong type", call(parameters={"on_shard_failure": True}), "on_shard_failure"),
    refused("output_dtype BF16", call(parameters={"output_dtype": "BF16"}), "output_dtype"),
    refused("timeout_ms 0", call(parameters={"timeout_ms": 0}), "timeout_ms"),
    refused("timeout_ms negative", call(parameters={"timeout_ms": -5}), "timeout_ms"),
    refused("timeout_ms a string", call(parameters={"timeout_ms": "100"}), "timeout_ms"),
    refused("timeout_ms a float", call(parameters={"timeout_ms": 1.5}), "timeout_ms"),
    refused("timeout_ms a bool", call(parameters={"timeout_ms": True}), "timeout_ms"),
    refused("timeout negative", call(parameters={"timeout": -1}), "timeout"),
    refused("timeout a string", call(parameters={"timeout": "soon"}), "timeout"),
    refused("a priority", call(parameters={"priority": 3}), "priority"),
    refused("a sequence", call(parameters={"sequence_id": 9}), "sequence_id"),
    refused("a sequence by name", call(parameters={"sequence_id": "nine"}), "sequence_id"),
    refused("a sequence start", call(parameters={"sequence_start": True}), "sequence_start"),
    refused("a version that is no number", call(version="latest"), "latest"),
    refused("a negative version", call(version="-1"), "-1"),
    refused("a version of many digits", call(version="9" * 5000), "version"),
    refused("a version in other digits", call(version="\u0662"), "version"),
    refused("an unknown version", call(version="99"), "99", ErrorCode.NOT_FOUND),
    refused("an unknown collection", call(collection="nobody"), "nobody", ErrorCode.NOT_FOUND),
]

HARMLESS = [
    pytest.param({"priority": 0}, id="priority 0"),
    pytest.param({"sequence_id": 0, "sequence_start": False, "sequence_end": False}, id="no sequence"),
    pytest.param({"sequence_id": ""}, id="no sequence by name"),
    pytest.param({"timeout": 0}, id="no timeout"),
    pytest.param({"timeout": 5_000_000}, id="timeout"),
    pytest.param({"timeout_ms": 10}, id="timeout_ms"),
    pytest.param({"output_dtype": "FP16", "on_shard_failure": "fail"}, id="choices"),
]


class Http:
    statuses: ClassVar = {status: code for code, status in HTTP_STATUS.items()}
    route = "rest_infer"

    def __init__(self, edges, *, binary):
        self.base = f"http://{edges.http}"
        self.binary = binary

    def body(self, made):
        tail = b""
        inputs = []
        for tensor in made.inputs:
            entry = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
            parameters = dict(tensor.parameters)
            if "shared_memory_region" in parameters:
                pass
            elif self.binary:
                parameters["binary_data_size"] = len(tensor.raw())
                tail += tensor.raw()
            else:
                entry["data"] = tensor.data
            inputs.append(entry | ({"parameters": parameters} if parameters else {}))
        document = {"id": "mine", "inputs": inputs}
        if made.parameters:
            document["parameters"] = made.parameters
        if made.outputs:
            document["outputs"] = [{"name": name, "parameters": options} for name, options in made.outputs]
        head = orjson.dumps(document)
        headers = {"Inference-Header-Content-Length": str(len(head))} if self.binary else {}
        return head + tail, headers

    async def __call__(self, made):
        """Returns the code ("ok" for none) and the error's text or the number of rows."""
        body, headers = self.body(made)
        version = f"/versions/{made.version}" if made.version else ""
        async with httpx.AsyncClient() as client:
            reply = await client.post(
                f"{self.base}/v2/models/{made.collection}{version}/infer", content=body, headers=headers
            )
        if reply.status_code == 200:
            assert reply.json()["id"] == "mine"
            return "ok", reply.json()["outputs"][0]["shape"][0]
        assert set(reply.json()) == {"error"}
        return self.statuses[reply.status_code], reply.json()["error"]


class Grpc:
    statuses: ClassVar = {status: code for code, status in GRPC_STATUS.items()}
    route = "grpc_infer"

    def __init__(self, edges, *, raw):
        self.target = edges.grpc
        self.raw = raw

    def message(self, made):
        message = pb.ModelInferRequest(model_name=made.collection, model_version=made.version, id="mine")
        for tensor in made.inputs:
            entry = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            self.set_parameters(entry.parameters, tensor.parameters)
            if self.raw:
                message.raw_input_contents.append(tensor.raw())
            elif tensor.datatype == "BYTES":
                entry.contents.bytes_contents.extend(item.encode() for item in tensor.data)
            else:
                contents = {"INT32": "int_contents", "FP32": "fp32_contents", "BOOL": "bool_contents"}
                getattr(entry.contents, contents.get(tensor.datatype, "int64_contents")).extend(tensor.data)
        for name, options in made.outputs:
            self.set_parameters(message.outputs.add(name=name).parameters, options)
        self.set_parameters(message.parameters, made.parameters)
        return message

    @staticmethod
    def set_parameters(target, parameters):
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
        for name, value in parameters.items():
            setattr(target[name], kinds[type(value)], value)

    async def __call__(self, made):
        async with grpc.aio.insecure_channel(self.target) as channel:
            try:
                reply = await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(self.message(made))
            except grpc.aio.AioRpcError as exc:
                return self.statuses[exc.code()], exc.details()
        assert reply.id == "mine"
        return "ok", reply.outputs[0].shape[0]


@pytest.fixture(params=["http json", "http binary", "grpc typed", "grpc raw"])
def edge(request, edges):
    protocol, style = request.param.split()
    return Http(edges, binary=style == "binary") if protocol == "http" else Grpc(edges, raw=style == "raw")


@pytest.mark.parametrize("case", MALFORMED)
async def test_a_malformed_request_is_refused_by_name_and_harms_nobody(edge, edges, plane, case):
    made, code, says = case
    got, text = await edge(made)
    assert (got, plane.lookups) == (code, [])
    assert says in text
    assert edges.count(edge.route, code.value) == 1
    assert await edge(call()) == ("ok", 3)
    await until(lambda: plane.admission.inflight_requests == 0)
    assert plane.admission.inflight_bytes == 0


@pytest.mark.parametrize("parameters", HARMLESS)
async def test_standard_parameters_that_ask_for_nothing_special_are_accepted(edge, parameters):
    assert await edge(call(parameters=parameters)) == ("ok", 3)


async def test_int32_elements_must_fit(edge, plane):
    if not isinstance(edge, Http) or edge.binary:
        return  # protobuf and raw bytes cannot state a number that does not fit
    code, text = await edge(call(values(datatype="INT32", data=[1, 2**31, 3]), lengths()))
    assert (code, plane.lookups) == (ErrorCode.INVALID_ARGUMENT, [])
    assert "values[1]" in text


async def test_keys_survive_as_they_are(edge, plane):
    names = ["", "user\x00\x00"]
    assert await edge(call(values(), lengths(), keys(data=names))) == ("ok", 3)
    assert plane.lookups[0].keys == tuple(names)


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
async def test_weights_strides_and_inverse_indices_arrive_as_they_were_sent(edge, plane, datatype):
    made = call(values(), lengths(), weights(), strides(datatype=datatype), inverse(datatype=datatype))
    assert await edge(made) == ("ok", 3)
    (request,) = plane.lookups
    assert (request.weights_N.dtype, request.weights_N.tolist()) == (np.float32, [0.5, -1.0, 2.0])
    assert (request.stride_per_key_F.dtype, request.stride_per_key_F.tolist()) == (np.int64, [3, 1])
    assert (request.inverse_indices_FB.dtype, request.inverse_indices_FB.tolist()) == (np.int64, [[0, 2], [0, 0]])
    assert request.outputs is None


FAILURES = [
    InvalidArgument("lengths: they add up to 4"),
    NotFound("keys: ['x'] are no features"),
    TooLarge("values: too many"),
    Overloaded("too much in flight", retry_after_s=2.5),
    DeadlineExceeded("not answered within 1 s"),
    Unavailable("shard clicks_shard_1 is down"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.code.value)
async def test_a_failure_of_the_plane_has_its_code_and_text(edge, edges, plane, failure):
    plane.failure = failure
    code, text = await edge(call())
    same_status = {failure.code, ErrorCode.OVERLOADED} if failure.code is ErrorCode.TOO_LARGE else {failure.code}
    assert code in same_status
    assert text == str(failure)
    assert edges.count(edge.route, failure.code.value) == 1
    plane.failure = None
    assert await edge(call()) == ("ok", 3)


@pytest.mark.parametrize("failure", [Internal("secret"), RuntimeError("secret"), KeyError("secret")], ids=repr)
async def test_a_bug_of_ours_tells_the_client_nothing(edge, edges, plane, failure):
    plane.failure = failure
    code, text = await edge(call())
    assert code is ErrorCode.INTERNAL
    assert "secret" not in text
    assert edges.count(edge.route, "internal") == 1
    await until(lambda: plane.admission.inflight_requests == 0)


async def test_a_refused_admission_calls_nobody(edge, edges, plane):
    permits = [plane.admit() for _ in range(64)]
    code, _ = await edge(call())
    assert (code, plane.lookups) == (ErrorCode.OVERLOADED, [])
    for permit in permits:
        permit.release()
    assert await edge(call()) == ("ok", 3)
    assert edges.count(edge.route, "overloaded") == 1


async def test_a_huge_error_text_is_cut(edge, plane):
    plane.failure = InvalidArgument("\U0001f600" * 100_000)
    code, text = await edge(call())
    assert code is ErrorCode.INVALID_ARGUMENT
    assert 0 < len(text) <= 2000


async def test_a_body_over_the_limit_is_too_large(edge, plane):
    many = 1 << 18
    code, _ = await edge(call(values(shape=[many], data=[1 << 40] * many), lengths()))
    assert code in {ErrorCode.TOO_LARGE, ErrorCode.OVERLOADED}  # gRPC has one status for both
    assert plane.lookups == []
    assert await edge(call()) == ("ok", 3)


async def test_readiness_does_not_stop_the_edges(edge, plane):
    plane.ready = Readiness(ready=False, reasons=("shard clicks_shard_0: gone",))
    assert await edge(call()) == ("ok", 3)


@pytest.mark.parametrize("table", [HTTP_STATUS, GRPC_STATUS], ids=["http", "grpc"])
def test_every_error_code_has_a_status(table):
    assert set(table) == set(ErrorCode)
