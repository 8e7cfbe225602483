"""Whatever bytes come, an edge reads them or refuses them; nothing else escapes."""

import asyncio

import orjson
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from service.errors import InvalidArgument
from service.grpc.tensors import read_infer as read_grpc
from service.rest.people import read_lookup_json
from service.rest.tensors import read_infer as read_http
from service.types import LookupRequest

SCALAR = st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.floats() | st.text(max_size=4)
ANYTHING = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
NAMES = st.sampled_from(["values", "lengths", "keys", "embeddings", "hits", "weights"]) | ANYTHING
SHAPES = st.lists(st.integers(-1, 4) | SCALAR, max_size=3) | ANYTHING
PARAMETERS = (
    st.dictionaries(
        st.sampled_from(["binary_data_size", "binary_data", "binary_data_output", "timeout_ms", "timeout", "priority"]),
        SCALAR,
    )
    | ANYTHING
)
INPUT = st.fixed_dictionaries(
    {},
    optional={
        "name": NAMES,
        "datatype": st.sampled_from(["INT64", "INT32", "BYTES", "FP32"]) | ANYTHING,
        "shape": SHAPES,
        "data": st.lists(st.integers(-3, 3), max_size=4) | ANYTHING,
        "parameters": PARAMETERS,
    },
)
OUTPUT = st.fixed_dictionaries({}, optional={"name": NAMES, "parameters": PARAMETERS})
DOCUMENT = st.fixed_dictionaries(
    {},
    optional={
        "id": st.text(max_size=3) | ANYTHING,
        "inputs": st.lists(INPUT | ANYTHING, max_size=4) | ANYTHING,
        "outputs": st.lists(OUTPUT | ANYTHING, max_size=3) | ANYTHING,
        "parameters": PARAMETERS,
    },
)


def dumps(document):
    try:
        return orjson.dumps(document)
    except TypeError:  # an integer beyond 64 bits, a lone surrogate
        return b"{}"


@settings(max_examples=500, deadline=None)
@given(DOCUMENT.map(dumps) | st.binary(max_size=50), st.binary(max_size=40), st.none() | st.integers(-2, 2))
def test_http_bodies_are_read_or_refused(head, tail, off):
    length = None if off is None else max(0, len(head) + off)
    try:
        call = read_http("clicks", "", memoryview(head + tail), length)
    except InvalidArgument as exc:
        assert 0 < len(str(exc)) < 2000  # noqa: PT017 - both outcomes are checked
    else:
        assert isinstance(call.request, LookupRequest)


@settings(max_examples=300, deadline=None)
@given(ANYTHING.map(dumps) | st.dictionaries(st.sampled_from(["features", "hits", "version"]), ANYTHING).map(dumps))
def test_lookup_bodies_are_read_or_refused(body):
    try:
        request = read_lookup_json("clicks", memoryview(body), "")
    except InvalidArgument as exc:
        assert 0 < len(str(exc)) < 2000  # noqa: PT017 - both outcomes are checked
    else:
        assert isinstance(request, LookupRequest)


VALID = pb.ModelInferRequest(model_name="clicks")
for _name in ("values", "lengths"):
    VALID.inputs.add(name=_name, datatype="INT64", shape=[1]).contents.int64_contents.append(1)
VALID_BYTES = VALID.SerializeToString()


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60), st.integers(0, len(VALID_BYTES)), st.integers(0, 4))
@example(b"", len(VALID_BYTES), 0)
def test_grpc_messages_are_read_or_refused(junk, at, skip):
    try:
        message = pb.ModelInferRequest.FromString(VALID_BYTES[:at] + junk + VALID_BYTES[at + skip :])
    except DecodeError:
        return
    try:
        call = read_grpc(message)
    except InvalidArgument as exc:
        assert 0 < len(str(exc)) < 2000  # noqa: PT017 - both outcomes are checked
    else:
        assert isinstance(call.request, LookupRequest)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /v2/models/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v2/models/%ff%00%2f HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v2/models/%ed%a0%80/config HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v2/models/" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: \xff\r\nX-Request-Id: \xff\r\nAccept-Encoding: \xff\r\n\r\n",
        b"GET //v2/../..//etc HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /docs HTTP/1.1\r\nHost: <script>\r\n\r\n",
        b"GET /docs HTTP/1.1\r\nHost: [::\r\n\r\n",
        b"POST /v2/models/clicks/infer HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST /v2/models/clicks/infer HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v2/models/clicks/infer HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v2/models/clicks/infer HTTP/1.1\r\nHost: x\r\nContent-Encoding: \xff\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n[]",
        b"BREW /v2 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
    ],
)
async def test_no_request_line_or_header_is_our_fault(edges, request_bytes):
    reader, writer = await asyncio.open_connection("127.0.0.1", edges.http_port)
    writer.write(request_bytes)
    async with asyncio.timeout(5):
        line = await reader.readline()
    writer.close()
    assert 200 <= int(line.split()[1]) < 500
    assert not [route for route, code in edges.counts() if code == "internal" and edges.count(route, code)]
