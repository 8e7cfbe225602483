"""Every malformed request against the real stack: its code, its field, no shard called, and the next one works."""

import urllib.request

import pytest

from service.errors import ErrorCode
from tests.e2e.test_metrics import scrape, total
from tests.service.edges.test_behaviour import (
    MALFORMED,
    Grpc,
    Http,
    call,
    inverse,
    keys,
    lengths,
    refused,
    strides,
    values,
    weights,
)

pytestmark = pytest.mark.e2e

AGAINST_THE_MANIFEST = [
    refused("an unknown key", call(values(), lengths(), keys(data=["item", "shop"])), "shop", ErrorCode.NOT_FOUND),
    refused("a key that is not UTF-8's", call(values(), lengths(), keys(data=["item", ""])), "''", ErrorCode.NOT_FOUND),
    refused("a key twice", call(values(), lengths(), keys(data=["item", "item"])), "more than once"),
    refused("a key missing", call(values(), lengths(), keys(shape=[1], data=["item"])), "'user'"),
    refused("no keys", call(values(), lengths(), keys(shape=[0], data=[])), "missing"),
    refused("lengths of an odd size", call(values(), lengths(shape=[3], data=[1, 1, 1])), "lengths"),
    refused("lengths of another [F, B]", call(values(), lengths(shape=[4, 1])), "lengths"),
    refused("a negative length", call(values(), lengths(data=[1, -1, 2, 1])), "-1"),
    refused("lengths that promise too much", call(values(), lengths(data=[1, 1, 1, 1])), "add up to 4"),
    refused("lengths that promise too little", call(values(), lengths(data=[1, 1, 0, 0])), "add up to 2"),
    refused("weights one short", call(values(), lengths(), weights(shape=[2], data=[1.0, 2.0])), "weights: 2 numbers"),
    refused("weights that would be dropped", call(values(), lengths(), weights(), outputs=[("hits", {})]), "dropped"),
    refused("output weights without weights", call(outputs=[("weights", {})]), "output weights"),
    refused("output indices", call(outputs=[("indices", {})]), "need_indices"),
    refused("strides one short", call(values(), lengths(), strides(shape=[1], data=[4])), "stride_per_key"),
    refused("a negative stride", call(values(), lengths(), strides(data=[-1, 5])), "stride_per_key: -1"),
    refused("strides that do not add up", call(values(), lengths(), strides(data=[3, 2])), "stride_per_key"),
    refused("inverse indices without strides", call(values(), lengths(), inverse()), "inverse_indices"),
    refused(
        "an inverse index too large", call(values(), lengths(), strides(), inverse(data=[0, 3, 0, 0])), "3 for key"
    ),
    refused(
        "a negative inverse index", call(values(), lengths(), strides(), inverse(data=[0, 0, 0, -1])), "-1 for key"
    ),
    refused(
        "inverse indices of an odd size",
        call(values(), lengths(), strides(), inverse(shape=[3], data=[0, 0, 0])),
        "inverse",
    ),
    refused(
        "lengths in two dimensions beside other strides",
        call(values(), lengths(shape=[2, 2]), strides()),
        "send them flat",
    ),
    refused("lengths whose sum overflows", call(values(), lengths(data=[2**62, 2**62, 2**62, 2**62 + 3])), "lengths"),
]


@pytest.fixture(params=["http json", "http binary", "grpc typed", "grpc raw"])
def edge(request, clicks):
    protocol, style = request.param.split()
    return Http(clicks[0], binary=style == "binary") if protocol == "http" else Grpc(clicks[0], raw=style == "raw")


@pytest.fixture(scope="module")
def shard_calls(clicks):
    """Calls that reached a shard, probes left out: those carry no ids."""
    return lambda: total(scrape(f"{clicks[0].http_url}/metrics"), "kjtserve_shard_request_seconds_count")


@pytest.mark.parametrize("case", [*MALFORMED, *AGAINST_THE_MANIFEST])
async def test_a_malformed_request_gets_its_code_and_the_next_one_works(case, edge, shard_calls):
    made, code, says = case
    before = shard_calls()
    got, text = await edge(made)
    assert got == code, text
    assert says in text
    assert shard_calls() == before
    assert await edge(call()) == ("ok", 3)


def test_nothing_that_was_sent_was_taken_for_a_bug_of_ours(clicks):
    serving, _ = clicks
    with urllib.request.urlopen(f"{serving.http_url}/metrics", timeout=10) as response:
        assert 'code="internal"' not in response.read().decode()
