"""``tritonclient`` unchanged, sync and asyncio, over both protocols."""

import asyncio

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio

# tritonclient.http.aio leaves the body of a refusal unread, and aiohttp warns of it when the connection is collected.
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:Unclosed connection:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

APIS = {
    "http": (triton_http, "http"),
    "grpc": (triton_grpc, "grpc"),
    "http_aio": (triton_http_aio, "http"),
    "grpc_aio": (triton_grpc_aio, "grpc"),
}


class Client:
    """One face over the sync and the asyncio clients: every call is awaited."""

    def __init__(self, name, address):
        self.api, self.protocol = APIS[name]
        self.plain = triton_http if self.protocol == "http" else triton_grpc
        self._client = self.api.InferenceServerClient(address)

    async def call(self, method, *args, **options):
        result = getattr(self._client, method)(*args, **options)
        return await result if asyncio.iscoroutine(result) else result

    async def infer(self, case, ids, *, outputs=("embeddings",), **options):
        keys = list(case.manifest.features)
        values = np.array([i for key in keys for i in ids[key]], dtype=np.int64)
        lengths = np.array([[len(ids[key])] for key in keys], dtype=np.int64)
        tensors = [self.plain.InferInput("values", list(values.shape), "INT64")]
        tensors[0].set_data_from_numpy(values)
        tensors.append(self.plain.InferInput("lengths", list(lengths.shape), "INT64"))
        tensors[1].set_data_from_numpy(lengths)
        wanted = [self.plain.InferRequestedOutput(name) for name in outputs]
        return await self.call("infer", case.name, tensors, outputs=wanted or None, **options)


@pytest.fixture(params=sorted(APIS))
async def client(request, clicks):
    serving, _ = clicks
    it = Client(request.param, serving.http if APIS[request.param][1] == "http" else serving.grpc)
    yield it
    await it.call("close")


@pytest.fixture
def case(clicks):
    return clicks[1]


@pytest.fixture
def ids(case):
    return {key: case.draw(np.random.default_rng(1), key, 4) for key in case.manifest.features}


async def test_the_server_says_live_ready_and_who_it_is(client):
    assert await client.call("is_server_live")
    assert await client.call("is_server_ready")
    metadata = await client.call("get_server_metadata")
    name = metadata["name"] if isinstance(metadata, dict) else metadata.name
    assert name == "kjtserve"


async def test_a_collection_says_ready_and_a_strange_one_does_not(client):
    assert await client.call("is_model_ready", "clicks")
    assert await client.call("is_model_ready", "clicks", "1")
    assert not await client.call("is_model_ready", "clicks", "99")
    assert not await client.call("is_model_ready", "nobody")


async def test_metadata_lists_the_tensors(client):
    metadata = await client.call("get_model_metadata", "clicks")
    if isinstance(metadata, dict):
        inputs, outputs = ({t["name"] for t in metadata[kind]} for kind in ("inputs", "outputs"))
    else:
        inputs, outputs = {t.name for t in metadata.inputs}, {t.name for t in metadata.outputs}
    assert {"values", "lengths", "keys"} <= inputs
    assert {"embeddings", "output_lengths", "row_ids", "hits", "unique_embeddings", "inverse", "missing"} <= outputs


async def test_config_and_statistics_are_there(client, case, ids):
    config = await client.call("get_model_config", "clicks")
    name = config["name"] if isinstance(config, dict) else config.config.name
    assert name == "clicks"
    await client.infer(case, ids)
    statistics = await client.call("get_inference_statistics", "clicks")
    if isinstance(statistics, dict):
        count = statistics["model_stats"][0]["inference_stats"]["success"]["count"]
    else:
        count = statistics.model_stats[0].inference_stats.success.count
    assert int(count) >= 1


async def test_only_the_chosen_outputs_come_back(client, case, ids):
    result = await client.infer(case, ids, outputs=("hits", "row_ids"))
    assert result.as_numpy("embeddings") is None
    assert np.array_equal(result.as_numpy("row_ids"), case.expected(case.manifest.features, ids)[1])


async def test_no_outputs_named_means_the_embeddings(client, case, ids):
    result = await client.infer(case, ids, outputs=())
    assert np.array_equal(result.as_numpy("embeddings"), case.expected(case.manifest.features, ids)[0])
    assert result.as_numpy("row_ids") is None


async def test_the_reply_names_its_version_and_echoes_the_request_id(client, case, ids):
    result = await client.infer(case, ids, request_id="r-17", model_version="1")
    response = result.get_response()
    if isinstance(response, dict):
        seen = response["model_version"], response["id"], response["parameters"]["version"]
    else:
        seen = response.model_version, response.id, response.parameters["version"].int64_param
    assert seen == ("1", "r-17", 1)


@pytest.mark.parametrize("name", ["http_aio", "grpc_aio"])
async def test_requests_of_many_clients_at_once_get_their_own_answers(name, clicks):
    serving, case = clicks
    client = Client(name, serving.http if APIS[name][1] == "http" else serving.grpc)
    rng = np.random.default_rng(2)
    wanted = [{key: case.draw(rng, key, 1 + n % 7) for key in case.manifest.features} for n in range(60)]
    results = await asyncio.gather(*(client.infer(case, ids) for ids in wanted))
    for ids, result in zip(wanted, results, strict=True):
        assert np.array_equal(result.as_numpy("embeddings"), case.expected(case.manifest.features, ids)[0])
    await client.call("close")
