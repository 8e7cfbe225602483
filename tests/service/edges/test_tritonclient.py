"""tritonclient, unchanged, over real sockets: http and grpc, blocking and aio."""

import asyncio

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio

from tests.service.fakes import rows_of

IDS = np.array([1, 2, (1 << 53) + 1, (1 << 63) - 1, -5], dtype=np.int64)
LENGTHS = np.array([2, 1, 0, 2], dtype=np.int64)


class Client:
    """One of the four clients behind awaitable calls; a blocking one is called in a thread."""

    def __init__(self, kind, edges):
        self.module = {
            "http": tritonclient.http,
            "http.aio": tritonclient.http.aio,
            "grpc": tritonclient.grpc,
            "grpc.aio": tritonclient.grpc.aio,
        }[kind]
        self.is_http = kind.startswith("http")
        self.is_aio = kind.endswith("aio")
        self.url = edges.http if self.is_http else edges.grpc

    async def run(self, script):
        """Call ``script(call)``, where ``call(name, ...)`` awaits the client's method of that name."""
        if self.is_aio:
            async with self.module.InferenceServerClient(self.url) as client:
                return await script(lambda name, *args, **kwargs: getattr(client, name)(*args, **kwargs))

        def blocking():
            client = self.module.InferenceServerClient(self.url)

            async def call(name, *args, **kwargs):
                return getattr(client, name)(*args, **kwargs)

            try:
                return asyncio.run(script(call))
            finally:
                client.close()

        return await asyncio.to_thread(blocking)

    def inputs(self, ids=IDS, lengths=LENGTHS, keys=None):
        tensors = [self.tensor("values", ids), self.tensor("lengths", lengths)]
        if keys is not None:
            tensors.append(self.tensor("keys", np.array(keys, dtype=np.object_)))
        return tensors

    def tensor(self, name, array, **kwargs):
        datatype = {"int64": "INT64", "int32": "INT32", "object": "BYTES", "float32": "FP32"}[str(array.dtype)]
        tensor = self.module.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array, **kwargs)
        return tensor

    def outputs(self, *names, **kwargs):
        return [self.module.InferRequestedOutput(name, **kwargs) for name in names]


@pytest.fixture(params=["http", "http.aio", "grpc", "grpc.aio"])
def client(request, edges):
    return Client(request.param, edges)


def as_dict(message):
    from google.protobuf.json_format import MessageToDict

    return message if isinstance(message, dict | list) else MessageToDict(message, preserving_proto_field_name=True)


async def test_health_says_live_and_ready(client, plane):
    async def script(call):
        return [
            await call("is_server_live"),
            await call("is_server_ready"),
            await call("is_model_ready", "clicks"),
            await call("is_model_ready", "clicks", "1"),
        ]

    assert await client.run(script) == [True, True, True, True]


async def test_metadata_config_statistics_and_index_describe_the_collection(client):
    async def script(call):
        return [
            as_dict(await call("get_server_metadata")),
            as_dict(await call("get_model_metadata", "clicks")),
            as_dict(await call("get_model_config", "clicks")),
            as_dict(await call("get_inference_statistics", "clicks")),
            as_dict(await call("get_model_repository_index")),
        ]

    server, model, config, statistics, index = await client.run(script)
    assert server["name"] == "kjtserve"
    assert "binary_tensor_data" in server["extensions"]
    assert model["platform"] == "kjtserve"
    assert model["versions"] == ["1", "2"]
    names = ["values", "lengths", "keys", "weights", "stride_per_key", "inverse_indices"]
    assert [tensor["name"] for tensor in model["inputs"]] == names
    assert len(model["outputs"]) == 7
    config = config.get("config", config)
    assert [tensor["name"] for tensor in config["input"]] == names
    assert [int(size) for size in config["output"][0]["dims"]] == [-1, 4]
    (entry,) = statistics["model_stats"]
    assert int(entry["inference_stats"]["success"]["count"]) == 5
    models = index if isinstance(index, list) else index["models"]
    assert [(entry["name"], entry["version"], entry["state"]) for entry in models] == [
        ("clicks", "1", "READY"),
        ("clicks", "2", "READY"),
        ("ads", "7", "READY"),
    ]


@pytest.mark.parametrize("ids_dtype", [np.int64, np.int32])
@pytest.mark.parametrize("lengths_dtype", [np.int64, np.int32])
async def test_infer_takes_every_mix_of_integer_dtypes(client, plane, ids_dtype, lengths_dtype):
    ids = np.array([3, -1, 2**31 - 1], dtype=ids_dtype)
    lengths = np.array([1, 2], dtype=lengths_dtype)

    async def script(call):
        result = await call("infer", "clicks", client.inputs(ids, lengths))
        return result.as_numpy("embeddings")

    assert np.array_equal(await client.run(script), rows_of(ids.astype(np.int64)))
    (request,) = plane.lookups
    assert request.keys is None
    assert request.values_N.dtype == request.lengths_FB.dtype == np.int64
    assert np.array_equal(request.values_N, ids)


async def test_weights_come_back_bit_for_bit_without_being_named(client):
    weights = np.array([0.5, -0.0, np.nan, np.inf, 1e-45], dtype=np.float32)
    weights.view(np.uint32)[2] = 0x7FC0_1234  # a NaN with something in it

    async def script(call):
        result = await call("infer", "clicks", [*client.inputs(), client.tensor("weights", weights)])
        return result.as_numpy("embeddings"), result.as_numpy("weights")

    embeddings, back = await client.run(script)
    assert np.array_equal(embeddings, rows_of(IDS))
    assert back.tobytes() == weights.tobytes()


async def test_infer_answers_the_outputs_asked_for_in_order(client, plane):
    async def script(call):
        result = await call(
            "infer",
            "clicks",
            client.inputs(keys=[b"item", b"user"], lengths=LENGTHS.reshape(2, 2)),
            model_version="1",
            outputs=client.outputs("hits", "embeddings", "output_lengths", "row_ids", "unique_embeddings", "inverse"),
            request_id="a request",
        )
        response = as_dict(result.get_response())
        arrays = {name: result.as_numpy(name) for name in ("hits", "embeddings", "output_lengths", "row_ids")}
        return response, arrays, result.as_numpy("unique_embeddings")[result.as_numpy("inverse")]

    response, arrays, rebuilt = await client.run(script)
    assert [output["name"] for output in response["outputs"]][:3] == ["hits", "embeddings", "output_lengths"]
    assert response["id"] == "a request"
    assert (response["model_name"], response["model_version"]) == ("clicks", "1")
    version = response["parameters"]["version"]
    assert int(version["int64_param"] if isinstance(version, dict) else version) == 1
    assert np.array_equal(arrays["embeddings"], rows_of(IDS))
    assert np.array_equal(rebuilt, rows_of(IDS))
    assert arrays["row_ids"].tolist() == IDS.tolist()
    assert arrays["hits"].tolist() == (IDS >= 0).tolist()
    assert arrays["output_lengths"].dtype == np.int32
    assert arrays["output_lengths"].tolist() == [2, 1, 0, 2]
    assert plane.lookups[0].keys == ("item", "user")
    assert plane.lookups[0].lengths_FB.shape == (2, 2)


async def test_parameters_reach_the_plane(client, plane):
    async def script(call):
        result = await call(
            "infer",
            "clicks",
            client.inputs(),
            parameters={"output_dtype": "FP16", "on_shard_failure": "zero", "timeout_ms": 250},
            timeout=400_000,
        )
        return result.as_numpy("embeddings")

    rows = await client.run(script)
    assert rows.dtype == np.float16
    assert np.array_equal(rows, rows_of(IDS, np.float16))
    assert plane.lookups[0].on_shard_failure == "zero"
    assert plane.lookups[0].timeout_s == pytest.approx(0.25)


async def test_triton_timeout_is_microseconds(client, plane):
    async def script(call):
        await call("infer", "clicks", client.inputs(), timeout=400_000)

    await client.run(script)
    assert plane.lookups[0].timeout_s == pytest.approx(0.4)


async def test_an_empty_request_is_an_ordinary_one(client, plane):
    async def script(call):
        inputs = client.inputs(np.zeros(0, np.int64), np.zeros((2, 0), np.int64))
        result = await call("infer", "clicks", inputs, outputs=client.outputs("embeddings", "row_ids", "hits"))
        return [result.as_numpy(name).shape for name in ("embeddings", "row_ids", "hits")]

    assert await client.run(script) == [(0, 4), (0,), (0,)]
    assert plane.lookups[0].lengths_FB.shape == (2, 0)


async def test_an_error_is_told_as_the_client_expects_it(client, plane):
    async def script(call):
        with pytest.raises(tritonclient.http.InferenceServerException) as caught:
            await call("infer", "nobody", client.inputs())
        return caught.value.status(), caught.value.message()

    status, message = await client.run(script)
    assert status in {"404", "StatusCode.NOT_FOUND"}
    assert "nobody" in message
    assert plane.lookups == []


@pytest.mark.parametrize("client", ["http", "http.aio"], indirect=True)
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_http_compression_both_ways(client, plane, coding):
    ids = np.arange(1000, 3000)

    async def script(call):
        result = await call(
            "infer",
            "clicks",
            client.inputs(ids, np.array([1500, 500])),
            request_compression_algorithm=coding,
            response_compression_algorithm=coding,
        )
        return result.as_numpy("embeddings")

    assert np.array_equal(await client.run(script), rows_of(ids))


@pytest.mark.parametrize("client", ["http", "http.aio"], indirect=True)
async def test_http_json_tensors_both_ways(client, plane):
    async def script(call):
        tensors = [
            client.tensor("values", IDS, binary_data=False),
            client.tensor("lengths", LENGTHS.reshape(2, 2), binary_data=False),
            client.tensor("keys", np.array([b"user", b"item"], dtype=np.object_), binary_data=False),
        ]
        outputs = client.outputs("embeddings", "row_ids", binary_data=False) + client.outputs("hits", binary_data=True)
        result = await call("infer", "clicks", tensors, outputs=outputs)
        return [result.as_numpy(name) for name in ("embeddings", "row_ids", "hits")]

    embeddings, row_ids, hits = await client.run(script)
    assert np.array_equal(embeddings, rows_of(IDS))
    assert row_ids.tolist() == IDS.tolist()
    assert hits.tolist() == (IDS >= 0).tolist()


@pytest.mark.parametrize("client", ["grpc", "grpc.aio"], indirect=True)
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_grpc_compression(client, coding):
    async def script(call):
        result = await call("infer", "clicks", client.inputs(), compression_algorithm=coding)
        return result.as_numpy("embeddings")

    assert np.array_equal(await client.run(script), rows_of(IDS))
