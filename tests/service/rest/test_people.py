"""The JSON lookup for people, and its schema."""

import httpx
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidArgument
from service.rest.people import EXAMPLE, EXAMPLE_REPLY, Lookup, LookupAnswer, read_lookup_json, write_lookup_json
from service.types import Output
from tests.service.fakes import FakePlane, answer, rows_of

PATH = "/v1/collections/clicks:lookup"
FEATURES = {"item": [[10, 11], []], "user": [[2**53 + 1], [2**63 - 1]]}


async def ask(edges, document, path=PATH):
    content = document if isinstance(document, bytes) else orjson.dumps(document)
    async with httpx.AsyncClient(base_url=f"http://{edges.http}") as client:
        return await client.post(path, content=content)


async def test_the_answer_is_nested_as_the_question(edges, plane):
    reply = await ask(edges, {"features": FEATURES, "row_ids": True, "hits": True})
    assert reply.status_code == 200
    document = reply.json()
    assert document["version"] == 2
    assert document["row_ids"] == FEATURES
    assert document["hits"] == {"item": [[True, True], []], "user": [[True], [True]]}
    assert document["embeddings"] == {
        name: [rows_of(np.array(ids, dtype=np.int64)).tolist() for ids in lists] for name, lists in FEATURES.items()
    }
    assert "missing" not in document
    assert plane.lookups[0].keys == ("item", "user")
    LookupAnswer.model_validate(document)


async def test_indices_are_answered_where_they_are_asked_for(edges, plane):
    reply = await ask(edges, {"features": FEATURES, "indices": True})
    assert reply.json()["indices"] == FEATURES
    assert plane.lookups[0].outputs == {Output.EMBEDDINGS, Output.INDICES}
    LookupAnswer.model_validate(reply.json())


async def test_only_what_is_asked_for_is_answered(edges, plane):
    reply = await ask(edges, {"features": FEATURES, "version": 1, "timeout_ms": 50})
    assert sorted(reply.json()) == ["embeddings", "version"]
    assert reply.json()["version"] == 1
    assert plane.lookups[0].timeout_s == pytest.approx(0.05)


async def test_zero_on_failure_marks_what_is_missing(edges):
    reply = await ask(edges, {"features": FEATURES, "on_shard_failure": "zero"})
    assert reply.json()["missing"] == {"item": [[False, False], []], "user": [[False], [False]]}


async def test_nan_is_null(edges):
    reply = await ask(edges, {"features": {"user": [[666]], "item": [[]]}})
    assert reply.json()["embeddings"]["user"] == [[[None] * 4]]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"\xff", "body"),
        (b"{}", "features: "),
        (b'{"features": [1]}', "features: "),
        (b'{"features": {"user": 3}}', "features.user: "),
        (b'{"features": {"user": [3]}}', "features.user[0]: "),
        (b'{"features": {"user": [[1, 1.5]]}}', "features.user[0][1]: "),
        (b'{"features": {"user": [[1e3]]}}', "features.user[0][0]: "),
        (b'{"features": {"user": [[true]]}}', "features.user[0][0]: "),
        (b'{"features": {"user": [["1"]]}}', "features.user[0][0]: "),
        (b'{"features": {"user": [[null]]}}', "features.user[0][0]: "),
        (b'{"features": {"user": [[9223372036854775808]]}}', "features.user[0][0]: "),
        (b'{"features": {"user": [[-9223372036854775809]]}}', "features.user[0][0]: "),
        (b'{"features": {"user": [[' + b"9" * 5000 + b"]]}}", ""),
        (b'{"features": {"user": [[1]], "item": []}}', "features: "),
        (b'{"features": {}, "colour": 1}', "colour: "),
        (b'{"features": {}, "hits": 1}', "hits: "),
        (b'{"features": {}, "version": "1"}', "version: "),
        (b'{"features": {}, "version": 0}', "version: "),
        (b'{"features": {}, "on_shard_failure": "maybe"}', "on_shard_failure: "),
        (b'{"features": {}, "timeout_ms": 0}', "timeout_ms: "),
        (b'{"features": {"\\ud800": []}}', "body"),
        (b"[" * 100_000, "body"),
    ],
)
async def test_a_malformed_lookup_is_refused_by_field(edges, plane, body, says):
    reply = await ask(edges, body)
    assert (reply.status_code, plane.lookups) == (400, [])
    assert reply.json()["error"].startswith(says)
    assert len(reply.json()["error"]) < 500
    assert (await ask(edges, {"features": FEATURES})).status_code == 200
    assert edges.count("rest_lookup", "invalid_argument") == 1


@pytest.mark.parametrize("path", ["/v1/collections/nobody:lookup", PATH])
async def test_an_unknown_collection_or_version_is_not_found(edges, path):
    assert (await ask(edges, {"features": FEATURES, "version": 9}, path)).status_code == 404


@given(
    st.dictionaries(st.text(), st.lists(st.lists(st.integers(-(2**63), 2**63 - 1)), min_size=2, max_size=2), min_size=1)
)
def test_any_features_come_back_as_they_went_in(features):
    body = orjson.dumps({"features": features, "row_ids": True})
    request = read_lookup_json("clicks", memoryview(body), "")
    document = orjson.loads(write_lookup_json(answer(request, FakePlane().infos["clicks"], 1)))
    assert document["row_ids"] == features
    assert {name: [len(rows) for rows in lists] for name, lists in document["embeddings"].items()} == {
        name: [len(ids) for ids in lists] for name, lists in features.items()
    }


def test_the_examples_fit_the_schema():
    Lookup.model_validate_json(orjson.dumps(EXAMPLE))
    LookupAnswer.model_validate(EXAMPLE_REPLY)
    with pytest.raises(InvalidArgument):
        read_lookup_json("clicks", memoryview(b"nonsense"), "")
