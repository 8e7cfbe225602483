"""Bodies as hostile or broken clients send them: raw sockets, lying lengths, cut compression, clients that vanish."""

import asyncio
import gzip
import zlib

import httpx
import orjson
import pytest

from service.errors import DeadlineExceeded
from service.rest.body import unpack
from service.settings import Settings
from tests.service.edge_servers import serve_edges, until
from tests.service.fakes import FakePlane

VALUES = (1).to_bytes(8, "little") * 3
LENGTHS = (3).to_bytes(8, "little") + bytes(8)
HEAD = orjson.dumps(
    {
        "inputs": [
            {"name": "values", "shape": [3], "datatype": "INT64", "parameters": {"binary_data_size": 24}},
            {"name": "lengths", "shape": [2], "datatype": "INT64", "parameters": {"binary_data_size": 16}},
        ]
    }
)
BODY = HEAD + VALUES + LENGTHS
JSON_BODY = orjson.dumps(
    {
        "inputs": [
            {"name": "values", "shape": [3], "datatype": "INT64", "data": [1, 1, 1]},
            {"name": "lengths", "shape": [2], "datatype": "INT64", "data": [3, 0]},
        ]
    }
)
PATH = "/v2/models/clicks/infer"
LENGTH = "Inference-Header-Content-Length"


class Wire:
    """A connection on which every byte is ours."""

    def __init__(self, edges):
        self.port = edges.http_port

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *exc):
        self.writer.close()

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def start(self, path=PATH, **headers):
        lines = [f"POST {path} HTTP/1.1", "Host: x", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
        await self.send("\r\n".join([*lines, "", ""]).encode())

    async def reply(self):
        async with asyncio.timeout(5):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            size = next(int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:"))
            return int(head.split()[1]), await self.reader.readexactly(size)


async def post(edges, content=BODY, path=PATH, **headers):
    async with httpx.AsyncClient(base_url=f"http://{edges.http}") as client:
        return await client.post(path, content=content, headers={k.replace("_", "-"): v for k, v in headers.items()})


async def works(edges):
    return (await post(edges, **{LENGTH: str(len(HEAD))})).status_code == 200


@pytest.mark.parametrize(
    "length",
    [
        "-1",
        "abc",
        "",
        "1e12",
        "1000000000000",
        "9" * 40,
        "0",
        "\u0663".encode(),
        str(len(HEAD) - 1),
        str(len(HEAD) + 1),
    ],
)
async def test_a_lying_json_length_is_refused_by_name(edges, plane, length):
    reply = await post(edges, **{LENGTH: length})
    assert (reply.status_code, plane.lookups) == (400, [])
    assert "Inference-Header-Content-Length" in reply.json()["error"]
    assert await works(edges)


async def test_an_absent_json_length_is_refused(edges, plane):
    reply = await post(edges)
    assert (reply.status_code, plane.lookups) == (400, [])
    assert await works(edges)


async def test_binary_sizes_must_use_up_the_body(edges, plane):
    for body in (BODY + b"x", BODY[:-1], BODY[: len(HEAD)], HEAD.replace(b"24", b"-4") + VALUES + LENGTHS):
        reply = await post(edges, body, **{LENGTH: str(len(HEAD))})
        assert (reply.status_code, plane.lookups) == (400, []), reply.text
        assert "binary_data_size" in reply.json()["error"]
    assert await works(edges)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"inputs": {}}',
        b'{"inputs": [3]}',
        b'{"inputs": [{"name": 3}]}',
        b'{"inputs": [], "id": 7}',
        b'{"inputs": [], "parameters": []}',
        b'{"inputs": [], "outputs": "embeddings"}',
        b'{"inputs": [], "output": []}',
        b'{"inputs": [{"name": "values", "shape": "3", "datatype": "INT64", "data": [1]}]}',
        b'{"inputs": [{"name": "values", "shape": [true], "datatype": "INT64", "data": [1]}]}',
        b'{"inputs": [{"name": "values", "shape": [1.0], "datatype": "INT64", "data": [1]}]}',
        b'{"inputs": [{"name": "values", "shape": [1], "datatype": "INT64", "data": 1}]}',
        b'{"inputs": [{"name": "values", "shape": [0], "datatype": "INT64", "data": 0}]}',
        b'{"inputs": [{"name": "values", "shape": [1], "datatype": "INT64"}]}',
        b'{"inputs": [{"name": "values", "shape": [1], "datatype": "INT64", "data": [1], "dims": []}]}',
        b'{"inputs": [], "parameters": {"binary_data_output": "yes"}}',
        b'{"id": "\\ud800", "inputs": []}',
    ],
)
async def test_a_body_that_is_no_request_is_refused(edges, plane, body):
    reply = await post(edges, body)
    assert (reply.status_code, plane.lookups) == (400, [])
    assert list(reply.json()) == ["error"]
    assert await works(edges)


@pytest.mark.parametrize(
    ("element", "shown"), [("9223372036854775808", "9223372036854775808"), ("1e3", "1000.0"), ("true", "True")]
)
async def test_what_is_no_64_bit_integer_is_refused_with_its_place(edges, plane, element, shown):
    for data in (f"[1, {element}, 1]", "[[1, 1], [1]]", f'["1", {element}, 2]'):
        reply = await post(edges, JSON_BODY.replace(b"[1,1,1]", data.encode()))
        assert (reply.status_code, plane.lookups) == (400, [])
        assert "values" in reply.json()["error"]
    reply = await post(edges, JSON_BODY.replace(b"[1,1,1]", f"[1, {element}, 1]".encode()))
    assert f"values[1]: {shown}" in reply.json()["error"]


async def test_json_ids_are_exact(edges, plane):
    ids = [2**53 + 1, 2**63 - 1, -(2**63)]
    body = JSON_BODY.replace(b"[1,1,1]", orjson.dumps(ids)).replace(b"]}]}", b']}],"outputs":[{"name":"row_ids"}]}')
    reply = await post(edges, body)
    assert plane.lookups[0].values_N.tolist() == ids
    assert reply.json()["outputs"][0]["data"] == ids


async def test_nested_json_data_is_read_like_flat(edges, plane):
    body = JSON_BODY.replace(b'"shape":[2]', b'"shape":[2,1]').replace(b"[3,0]", b"[[3],[0]]")
    assert (await post(edges, body)).status_code == 200
    assert plane.lookups[0].lengths_FB.tolist() == [[3], [0]]
    for ragged in (b"[[3],0]", b"[[3],[0,1]]", b"[[3]]", b"[[[3]],[[0]]]", b"[3,[0]]"):
        assert (await post(edges, body.replace(b"[[3],[0]]", ragged))).status_code == 400


async def test_nan_is_null_in_json_and_itself_in_binary(edges):
    body = JSON_BODY.replace(b"[1,1,1]", b"[1,666,1]")
    assert (await post(edges, body)).json()["outputs"][0]["data"][4:8] == [None] * 4
    binary = body.replace(b'{"inputs"', b'{"parameters":{"binary_data_output":true},"inputs"')
    reply = await post(edges, binary)
    head = int(reply.headers["Inference-Header-Content-Length"])
    assert orjson.loads(reply.content[:head])["outputs"][0]["parameters"] == {"binary_data_size": 48}
    assert len(reply.content) == head + 48


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_compressed_bodies_that_do_not_unpack_are_refused(edges, plane, coding):
    packed = gzip.compress(JSON_BODY) if coding == "gzip" else zlib.compress(JSON_BODY)
    assert (await post(edges, packed, Content_Encoding=coding)).status_code == 200
    plane.lookups.clear()
    for broken in (packed[:-1], packed[:-9], packed[:5], b"", packed + b"x", b"x" + packed, JSON_BODY):
        reply = await post(edges, broken, Content_Encoding=coding)
        assert (reply.status_code, plane.lookups) == (400, [])
        assert "Content-Encoding" in reply.json()["error"]
    assert await works(edges)


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "zstd", "x" * 5000])
async def test_an_unknown_content_coding_is_refused_by_name(edges, plane, coding):
    reply = await post(edges, JSON_BODY, Content_Encoding=coding)
    assert reply.status_code == 400
    assert "Content-Encoding" in reply.json()["error"]


async def test_a_body_that_unpacks_to_too_much_is_too_large(edges, plane):
    reply = await post(edges, gzip.compress(bytes(1 << 24)), Content_Encoding="gzip")
    assert (reply.status_code, plane.lookups) == (413, [])
    assert await works(edges)


def test_unpacking_stops_at_the_limit():
    assert unpack(memoryview(gzip.compress(b"a" * 100)), "gzip", 100) == b"a" * 100
    with pytest.raises(Exception, match="limit of 99"):
        unpack(memoryview(gzip.compress(b"a" * 100)), "gzip", 99)


async def test_a_declared_body_over_the_limit_is_answered_before_it_is_sent(edges, plane):
    async with Wire(edges) as wire:
        await wire.start(Content_Length=10**12)
        status, body = await wire.reply()
    assert status == 413
    assert b"Content-Length" in body
    assert plane.admission.inflight_requests == 0


async def test_a_streamed_body_is_answered_as_soon_as_it_is_too_large(edges, plane):
    async with Wire(edges) as wire:
        await wire.start(Transfer_Encoding="chunked")
        chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        for _ in range(17):
            await wire.send(chunk)
        assert (await wire.reply())[0] == 413
    await until(lambda: plane.admission.inflight_requests == 0)
    assert plane.lookups == []
    assert await works(edges)


async def test_a_streamed_body_works(edges, plane):
    async def pieces():
        for at in range(0, len(BODY), 7):
            yield BODY[at : at + 7]

    assert (await post(edges, pieces(), **{LENGTH: str(len(HEAD))})).status_code == 200
    assert plane.lookups[0].values_N.tolist() == [1, 1, 1]


async def test_an_overloaded_server_answers_before_the_body_is_sent(edges, plane):
    permits = [plane.admit() for _ in range(64)]
    for permit in permits:
        permit.work()
    async with Wire(edges) as wire:
        await wire.start(Content_Length=1000)
        status, body = await wire.reply()
    assert (status, plane.lookups) == (429, [])
    assert b"in flight" in body
    for permit in permits:
        permit.release()
    assert await works(edges)


async def test_the_declared_bytes_are_reserved_while_the_body_comes(edges, plane):
    async with Wire(edges) as wire:
        await wire.start(Content_Length=5000)
        await wire.send(b"x" * 10)
        await until(lambda: plane.admission.inflight_bytes == 5000)
    await until(lambda: plane.admission.inflight_requests == 0)
    assert edges.count("rest_infer", "cancelled") == 1


async def test_a_client_that_vanishes_cancels_its_lookup(edges, plane):
    plane.gate = asyncio.Event()
    async with Wire(edges) as wire:
        await wire.start(Content_Length=len(JSON_BODY))
        await wire.send(JSON_BODY)
        await until(lambda: len(plane.lookups) == 1)
        assert plane.admission.inflight_requests == 1
    await until(lambda: plane.cancelled == 1)
    await until(lambda: plane.admission.inflight_requests == 0)
    assert edges.count("rest_infer", "cancelled") == 1
    plane.gate = None
    assert await works(edges)


async def test_the_permit_is_held_until_a_slow_client_has_its_reply(edges, plane):
    ids = [1] * 400_000
    body = orjson.dumps(
        {
            "parameters": {"binary_data_output": True},
            "inputs": [
                {"name": "values", "shape": [len(ids)], "datatype": "INT64", "data": ids},
                {"name": "lengths", "shape": [2], "datatype": "INT64", "data": [len(ids), 0]},
            ],
        }
    )
    async with Wire(edges) as wire:
        await wire.start(Content_Length=len(body))
        await wire.send(body)
        await wire.reader.readuntil(b"\r\n\r\n")
        assert plane.admission.inflight_requests == 1
        size = 0
        while size < 16 * len(ids):
            size += len(await wire.reader.read(1 << 20))
        await until(lambda: plane.admission.inflight_requests == 0)


async def test_a_client_that_vanishes_amid_its_reply_gives_its_permit_back(edges, plane):
    ids = [1] * 400_000
    body = orjson.dumps(
        {
            "inputs": [
                {"name": "values", "shape": [len(ids)], "datatype": "INT64", "data": ids},
                {"name": "lengths", "shape": [2], "datatype": "INT64", "data": [len(ids), 0]},
            ],
        }
    )
    async with Wire(edges) as wire:
        await wire.start(Content_Length=len(body))
        await wire.send(body)
        await wire.reader.readuntil(b"\r\n\r\n")
        wire.writer.transport.abort()
    await until(lambda: plane.admission.inflight_requests == 0)
    assert await works(edges)


async def test_a_body_that_comes_too_slowly_is_given_up():
    plane = FakePlane()
    async with serve_edges(plane, Settings(max_timeout_s=0.05)) as edges, Wire(edges) as wire:
        await wire.start(Content_Length=1000)
        await wire.send(b"x")
        status, body = await wire.reply()
        assert (status, plane.lookups) == (504, [])
        assert b"body" in body
        await until(lambda: plane.admission.inflight_requests == 0)
        assert edges.count("rest_infer", DeadlineExceeded.code) == 1


async def test_a_client_that_never_reads_its_reply_is_given_up():
    plane = FakePlane()
    count = 800_000
    head = HEAD.replace(b"24", str(8 * count).encode()).replace(b"[3]", b"[%d]" % count)
    head = head.replace(b'{"inputs"', b'{"parameters":{"binary_data_output":true},"inputs"')
    body = head + bytes(8 * count) + LENGTHS
    async with serve_edges(plane, Settings(max_timeout_s=0.3)) as edges, Wire(edges) as wire:
        await wire.start(Content_Length=len(body), Inference_Header_Content_Length=len(head))
        await wire.send(body)
        await until(lambda: edges.count("rest_infer", "ok") == 1)
        assert plane.admission.inflight_requests == 1
        await until(lambda: plane.admission.inflight_requests == 0)


async def test_tensors_are_aligned_and_used_where_they_lie(edges, plane):
    for extra in range(8):
        head = HEAD + b" " * extra
        await post(edges, head + VALUES + LENGTHS, **{LENGTH: str(len(head))})
        values = plane.lookups[-1].values_N
        assert values.flags.aligned
        assert not values.flags.owndata
        assert values.tolist() == [1, 1, 1]


async def test_json_over_its_own_limit_is_refused_with_the_way_out():
    plane = FakePlane()
    async with serve_edges(plane, Settings(max_json_bytes=1000)) as edges:
        big = b'{"inputs": [' + b" " * 1000 + b"]}"
        for headers in ({}, {LENGTH: str(len(big))}):
            reply = await post(edges, big, **headers)
            assert (reply.status_code, plane.lookups) == (413, [])
            assert "binary" in reply.json()["error"]
        assert await works(edges)
