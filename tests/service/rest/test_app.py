"""Paths, errors, ids, metrics and the schema of the HTTP application."""

import asyncio
import time

import httpx
import orjson
import pytest
import pytest_asyncio

from service.description import model_config
from service.rest.reply import choose_coding
from service.types import Readiness

JSON_BODY = orjson.dumps(
    {
        "inputs": [
            {"name": "values", "shape": [600], "datatype": "INT64", "data": [7] * 600},
            {"name": "lengths", "shape": [2], "datatype": "INT64", "data": [600, 0]},
        ]
    }
)


@pytest_asyncio.fixture(loop_scope="module")
async def client(edges):
    async with httpx.AsyncClient(base_url=f"http://{edges.http}") as client:
        yield client


@pytest.mark.parametrize(
    "path",
    ["/", "/v2/", "/v2/nothing", "/v2/models", "/v2/models/clicks/", "/v2/models/clicks/infer/x", "/v1/collections/x"],
)
async def test_an_unknown_path_is_a_json_404(client, edges, path):
    reply = await client.get(path)
    assert reply.status_code == 404
    assert path in reply.json()["error"]
    assert edges.count("other", "not_found") == 1


@pytest.mark.parametrize(("method", "path"), [("GET", "/v2/models/clicks/infer"), ("POST", "/v2"), ("PUT", "/metrics")])
async def test_a_wrong_method_is_a_json_405(client, edges, method, path):
    reply = await client.request(method, path)
    assert reply.status_code == 405
    assert method in reply.json()["error"]
    assert reply.headers["allow"]
    assert edges.count("other", "invalid_argument") == 1


@pytest.mark.parametrize("what", ["", "/ready", "/config", "/stats", "/versions/1", "/versions/1/ready"])
async def test_unknown_collections_and_versions_are_404(client, what):
    assert (await client.get(f"/v2/models/nobody{what}")).status_code == 404
    assert (await client.get(f"/v2/models/clicks{what}")).status_code == 200
    if "versions" in what:
        assert (await client.get(f"/v2/models/clicks{what.replace('1', '9')}")).status_code == 404
        assert (await client.get(f"/v2/models/clicks{what.replace('1', 'x')}")).status_code == 400


async def test_statistics_cover_one_collection_or_all(client):
    one = (await client.get("/v2/models/clicks/versions/1/stats")).json()["model_stats"]
    every = (await client.get("/v2/models/stats")).json()["model_stats"]
    assert [entry["name"] for entry in one] == ["clicks"]
    assert [entry["name"] for entry in every] == ["clicks", "ads"]


async def test_the_config_is_the_one_that_perf_analyzer_asks_for(client, plane):
    for path in ("/v2/models/clicks/config", "/v2/models/clicks/versions/2/config"):
        assert (await client.get(path)).json() == model_config(plane.collection("clicks"))


async def test_readiness_names_what_stands_in_the_way(client, plane):
    assert (await client.get("/v2/health/ready")).status_code == 200
    plane.ready = Readiness(ready=False, reasons=("shard clicks_shard_1: connection refused",))
    for path in ("/v2/health/ready", "/v2/models/clicks/ready"):
        reply = await client.get(path)
        assert reply.status_code == 503
        assert "clicks_shard_1" in reply.json()["error"]
    assert (await client.get("/v2/health/live")).status_code == 200
    index = (await client.post("/v2/repository/index")).json()
    assert {entry["state"] for entry in index} == {"UNAVAILABLE"}
    assert "clicks_shard_1" in index[0]["reason"]
    assert (await client.post("/v2/repository/index", content=b'{"ready": true}')).json() == []


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"[]", 400), (b'{"ready": 1}', 400), (b'{"x": 1}', 400), (b'{"repository_name": "y"}', 404)],
)
async def test_a_malformed_index_request_is_refused(client, body, status):
    assert (await client.post("/v2/repository/index", content=body)).status_code == status


async def test_a_thousand_made_up_names_make_no_new_series(client, edges):
    def series():
        text = edges.metrics.render().decode()
        return {line.rpartition(" ")[0] for line in text.splitlines() if line.startswith("kjtserve_requests_total{")}

    before = series()
    for at in range(200):
        for path in (f"/v2/models/m{at}", f"/x{at}", f"/v2/models/m{at}/ready"):
            await client.get(path)
        for path in (f"/v2/models/m{at}/infer", f"/v1/collections/m{at}:lookup"):
            await client.post(path, content=b"{}")
    assert len(series() - before) <= 5


async def test_metrics_are_served_with_the_request_already_counted(client):
    await client.post("/v2/models/clicks/infer", content=JSON_BODY)
    reply = await client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'kjtserve_requests_total{code="ok",route="rest_infer"}' in reply.text
    assert 'kjtserve_request_seconds_bucket{le="0.0005",route="rest_infer"}' in reply.text


async def test_the_request_id_is_the_clients_where_it_is_plain(client, plane):
    reply = await client.post("/v2/models/clicks/infer", content=JSON_BODY, headers={"X-Request-Id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    assert "id" not in reply.json()
    assert plane.lookups[0].request_id == "abc-1"
    reply = await client.get("/v2", headers={"X-Request-Id": "a b\tc"})
    assert len(reply.headers["x-request-id"]) == 32


async def test_retry_after_comes_with_overload(client, plane):
    permits = [plane.admit() for _ in range(64)]
    reply = await client.post("/v2/models/clicks/infer", content=JSON_BODY)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    for permit in permits:
        permit.release()


@pytest.mark.parametrize(
    ("accepted", "is_binary", "coding"),
    [
        (None, False, None),
        ("gzip", True, "gzip"),
        ("deflate", True, "deflate"),
        ("gzip, deflate", True, None),
        ("deflate, gzip", False, "gzip"),
        ("gzip;q=0, deflate;q=0.5", False, "deflate"),
        ("gzip; q=0", False, None),
        ("br", False, None),
        ("identity", True, None),
        (",,;", False, None),
    ],
)
def test_a_reply_is_compressed_when_the_client_asks(accepted, is_binary, coding):
    assert choose_coding(accepted, is_binary=is_binary) == coding


async def test_a_json_reply_is_compressed_for_a_client_that_takes_it(client):
    reply = await client.post("/v2/models/clicks/infer", content=JSON_BODY, headers={"Accept-Encoding": "gzip, br"})
    assert reply.headers["content-encoding"] == "gzip"
    assert len(reply.json()["outputs"][0]["data"]) == 2400


async def test_the_schema_teaches_the_lookup(client):
    schema = (await client.get("/openapi.json")).json()
    lookup = schema["paths"]["/v1/collections/{name}:lookup"]["post"]
    assert lookup["requestBody"]["content"]["application/json"]["schema"]["properties"]["features"]
    assert lookup["responses"]["200"]["content"]["application/json"]["schema"]
    assert {"400", "404", "413", "429", "503", "504"} <= set(lookup["responses"])
    assert "422" not in lookup["responses"]
    assert "/v2/models/{name}/infer" in schema["paths"]
    assert (await client.get("/docs")).status_code == 200


async def test_liveness_is_quick_beside_large_requests(client, edges, plane):
    ids = [2**40] * 60_000
    body = orjson.dumps({"features": {"user": [ids], "item": [[]]}})
    async with httpx.AsyncClient(base_url=f"http://{edges.http}", timeout=60) as other:
        work = [asyncio.create_task(other.post("/v1/collections/clicks:lookup", content=body)) for _ in range(6)]
        waits = []
        while not all(task.done() for task in work):
            started = time.perf_counter()
            assert (await client.get("/v2/health/live")).status_code == 200
            waits.append(time.perf_counter() - started)
            await asyncio.sleep(0.01)
        assert {task.result().status_code for task in work} == {200}
    waits.sort()
    assert waits[len(waits) // 2] < 0.2
