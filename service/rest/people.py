"""Owns the lookup call for people: feature names to lists of ids in, embedding names to lists of rows out, as JSON.

Ids are exact 64-bit integers. A number that JSON has no word for (NaN, infinity) is ``null`` in a row.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.errors import InvalidArgument
from service.rest.converters import field_path
from service.rest.json_arrays import write_array
from service.types import LookupReply, LookupRequest, OnShardFailure, Output
from service.wire_tensors import shown

Id = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63, description="A raw id: any signed 64-bit integer, exact.")]

EXAMPLE: dict[str, Any] = {"features": {"user": [[1, 2], [3]], "item": [[10], []]}, "row_ids": True, "hits": True}
EXAMPLE_REPLY: dict[str, Any] = {
    "version": 1,
    "embeddings": {"user": [[[0.1, 0.2], [0.3, 0.4]], [[0.5, 0.6]]], "item": [[[0.7, 0.8]], []]},
    "row_ids": {"user": [[17, 4], [99]], "item": [[3], []]},
    "hits": {"user": [[True, True], [False]], "item": [[True], []]},
}


class Lookup(BaseModel):
    """Ids to look up: for each feature, one list of ids for each sample."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, json_schema_extra={"examples": [EXAMPLE]})

    features: dict[str, list[list[Id]]] = Field(
        description="For each feature of the collection, one list of ids per sample; all have the same number of "
        "samples, and a sample may be empty."
    )
    row_ids: bool = Field(default=False, description="Also answer the row of the table that each id was remapped to.")
    hits: bool = Field(default=False, description="Also answer whether each id is known.")
    indices: bool = Field(
        default=False,
        description="Also answer the looked-up indices, as TorchRec does; only for collections made with `need_indices`.",
    )
    version: Annotated[int, Field(ge=1, le=1 << 53)] | None = Field(
        default=None, description="A served version to answer from; the default is the newest."
    )
    on_shard_failure: Literal["fail", "zero"] = Field(
        default="fail",
        description="When a shard is down: `fail` with 503, or `zero` in its rows, marked in `missing`.",
    )
    timeout_ms: Annotated[int, Field(ge=1, lt=1 << 53)] | None = Field(
        default=None, description="Deadline in milliseconds; the server has a default and a maximum."
    )


class LookupAnswer(BaseModel):
    """What each id was answered with, keyed by embedding name: the feature, or `feature@table` for shared features."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE_REPLY]})

    version: int = Field(description="The version that answered, the same for every row.")
    embeddings: dict[str, list[list[list[float | None]]]] = Field(
        description="One row of numbers for each id. NaN and infinity are `null`."
    )
    row_ids: dict[str, list[list[int]]] | None = Field(default=None, description="Global row numbers; -1 for no row.")
    hits: dict[str, list[list[bool]]] | None = None
    indices: dict[str, list[list[int]]] | None = Field(
        default=None, description="The id in a plain table, the row after the remap in a managed one."
    )
    missing: dict[str, list[list[bool]]] | None = Field(
        default=None, description="With `on_shard_failure` `zero`: true where zeros stand in for a shard's rows."
    )


class Problem(BaseModel):
    """Every error's body."""

    error: str = Field(description="The field, its value, and the rule that it breaks.")


def read_lookup_json(collection: str, body: memoryview, request_id: str) -> LookupRequest:
    """Read the body.

    Raises:
        InvalidArgument: It is not JSON, or breaks the schema; the message names the field.
    """
    try:
        lookup = Lookup.model_validate_json(bytes(body))
    except ValidationError as exc:
        raise InvalidArgument(describe_validation(exc)) from None
    samples = {feature: len(lists) for feature, lists in lookup.features.items()}
    if len(set(samples.values())) > 1:
        raise InvalidArgument(f"features: {shown(samples)} samples; every feature needs the same number of lists")
    lists = list(chain.from_iterable(lookup.features.values()))
    outputs = {Output.EMBEDDINGS}
    outputs |= {Output.ROW_IDS} if lookup.row_ids else set()
    outputs |= {Output.HITS} if lookup.hits else set()
    outputs |= {Output.INDICES} if lookup.indices else set()
    outputs |= {Output.MISSING} if lookup.on_shard_failure == "zero" else set()
    return LookupRequest(
        collection=collection,
        version=lookup.version,
        request_id=request_id,
        keys=tuple(lookup.features),
        values_N=np.fromiter(chain.from_iterable(lists), dtype=np.int64),
        lengths_FB=np.fromiter(map(len, lists), dtype=np.int64, count=len(lists)),
        outputs=frozenset(outputs),
        on_shard_failure=OnShardFailure(lookup.on_shard_failure),
        timeout_s=None if lookup.timeout_ms is None else lookup.timeout_ms / 1e3,
    )


def write_lookup_json(reply: LookupReply) -> bytes:
    """Write the answer, nested as the request was."""
    return b"".join(_write_answer(reply))


def _write_answer(reply: LookupReply) -> Iterator[bytes]:
    yield b'{"version":%d' % reply.version
    for output in (Output.EMBEDDINGS, Output.ROW_IDS, Output.HITS, Output.INDICES, Output.MISSING):
        if output in reply.outputs:
            yield b',"%s":{' % output.value.encode()
            yield from _write_blocks(reply, reply.outputs[output])
            yield b"}"
    yield b"}"


def _write_blocks(reply: LookupReply, rows_M: NDArray[Any]) -> Iterator[bytes]:
    start = 0
    for e, (name, lengths_B) in enumerate(zip(reply.embedding_names_E, reply.lengths_E, strict=True)):
        yield (b"," if e else b"") + orjson.dumps(name) + b":["
        for b, length in enumerate(lengths_B.tolist()):
            if b:
                yield b","
            yield from write_array(rows_M[start : start + length])
            start += length
        yield b"]"


def describe_validation(error: ValidationError) -> str:
    """Pydantic's first complaint as ``field: rule (got value)``."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f"body: {first['msg']}"
    got = "" if first["type"] == "missing" else f" (got {shown(first['input'])})"
    return f"{field_path(first['loc'])}: {first['msg']}{got}"
