"""Owns the HTTP routes that look ids up: the protocol's infer and the people's lookup; convert, await, convert."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.log import rename_request
from service.offload import Offload
from service.plane import Plane
from service.rest.body import BodyReader, unless_gone
from service.rest.exchange import Exchange, begin
from service.rest.people import Lookup, LookupAnswer, Problem, read_lookup_json, write_lookup_json
from service.rest.reply import MIN_COMPRESSED_BYTES, PiecesResponse, choose_coding, pack
from service.rest.tensors import LENGTH_HEADER, read_header_length, read_infer, write_infer
from service.types import LookupReply, LookupRequest, Output
from service.wire import KNOWN_INPUTS, read_version

JSON_COST = 4
"""A number of a JSON reply takes about so many times the work of its bytes in memory."""

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The request breaks a rule; the message names the field."},
    404: {"model": Problem, "description": "Unknown collection, version or feature."},
    413: {"model": Problem, "description": "The request, or the reply it asks for, is too large."},
    429: {"model": Problem, "description": "Overloaded; Retry-After says when to come back."},
    503: {"model": Problem, "description": "A shard is down; the message names it."},
    504: {"model": Problem, "description": "Not answered within the deadline."},
}

_INFER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": {
            "type": "object",
            "properties": {
                "on_shard_failure": {"enum": ["fail", "zero"]},
                "output_dtype": {"enum": ["FP32", "FP16"]},
                "timeout_ms": {"type": "integer", "minimum": 1},
                "timeout": {"type": "integer", "minimum": 0, "description": "microseconds, as Triton's"},
                "binary_data_output": {"type": "boolean"},
            },
        },
        "inputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "shape", "datatype"],
                "properties": {
                    "name": {"enum": list(KNOWN_INPUTS)},
                    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    "datatype": {"enum": ["INT64", "INT32", "BYTES", "FP32"]},
                    "data": {"type": "array", "items": {}},
                    "parameters": {"type": "object", "properties": {"binary_data_size": {"type": "integer"}}},
                },
            },
        },
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"enum": [output.value for output in Output]},
                    "parameters": {"type": "object", "properties": {"binary_data": {"type": "boolean"}}},
                },
            },
        },
    },
}

_INFER_EXAMPLE = {
    "inputs": [
        {"name": "values", "shape": [4], "datatype": "INT64", "data": [1, 2, 3, 10]},
        {"name": "lengths", "shape": [2, 2], "datatype": "INT64", "data": [2, 1, 1, 0]},
        {"name": "keys", "shape": [2], "datatype": "BYTES", "data": ["user", "item"]},
    ],
    "outputs": [{"name": "embeddings"}, {"name": "row_ids"}],
}


def lookup_routes(
    plane: Plane, bodies: BodyReader, offload: Offload, packing: Offload, *, max_stall_s: float
) -> APIRouter:
    """Routes that answer lookups over ``plane``.

    Bodies are read here and not by FastAPI: a permit is taken before the first byte, and ids must be exact.
    """
    router = APIRouter(responses=_ERRORS)
    lookups = _Lookups(plane, bodies, offload, packing, max_stall_s)

    @router.post(
        "/v1/collections/{name}:lookup",
        summary="Look ids up, in JSON",
        tags=["lookup"],
        response_model=LookupAnswer,
        openapi_extra=_json_body(Lookup.model_json_schema()),
    )
    async def lookup(request: Request, name: str) -> Response:
        """Answers one row for each id, nested as the ids were, keyed by embedding name."""
        return await lookups.people(request, name)

    body = _json_body(_INFER_SCHEMA, example=_INFER_EXAMPLE)
    at = "/v2/models/{name}"

    @router.post(f"{at}/infer", summary="Open Inference Protocol", tags=["protocol"], openapi_extra=body)
    @router.post(f"{at}/versions/{{version}}/infer", summary="Pinned", tags=["protocol"], openapi_extra=body)
    async def infer(request: Request, name: str, version: str = "") -> Response:
        """Looks a KeyedJaggedTensor up.

        `Inference-Header-Content-Length` says where the JSON ends and binary tensors begin; bodies may be gzip or
        deflate. NaN and infinity are `null` in JSON outputs, and themselves in binary ones.
        """
        return await lookups.protocol(request, name, version)

    return router


class _Lookups:
    """Convert, await, convert."""

    def __init__(
        self, plane: Plane, bodies: BodyReader, offload: Offload, packing: Offload, max_stall_s: float
    ) -> None:
        self._plane = plane
        self._bodies = bodies
        self._offload = offload
        self._packing = packing
        self._max_stall_s = max_stall_s

    async def people(self, request: Request, name: str) -> Response:
        exchange = begin(request, "rest_lookup")
        self._plane.collection(name)
        body = await self._bodies.read(request, exchange)
        lookup = await self._offload.run(len(body), read_lookup_json, name, body, exchange.request_id)
        reply = await self._answer(request, exchange, lookup)
        text = await self._offload.run(_json_work(reply), write_lookup_json, reply)
        return await self._respond(request, [text], {})

    async def protocol(self, request: Request, name: str, version: str) -> Response:
        exchange = begin(request, "rest_infer")
        self._plane.collection(name, read_version(version))
        length = read_header_length(request.headers.get(LENGTH_HEADER))
        body = await self._bodies.read(request, exchange, header_bytes=length or 0)
        call = await self._offload.run(len(body), read_infer, name, version, body, length)
        rename_request(call.request_id)
        reply = await self._answer(request, exchange, call.request)
        work = 0 if all(call.outputs(reply).values()) else _json_work(reply)
        pieces, json_length = await self._offload.run(work, write_infer, call, reply)
        return await self._respond(request, pieces, {} if json_length is None else {LENGTH_HEADER: str(json_length)})

    async def _answer(self, request: Request, exchange: Exchange, lookup: LookupRequest) -> LookupReply:
        assert exchange.permit is not None
        return await unless_gone(request, self._plane.lookup(lookup, exchange.permit))

    async def _respond(
        self, request: Request, pieces: list[bytes | memoryview], headers: dict[str, str]
    ) -> PiecesResponse:
        nbytes = sum(map(len, pieces))
        coding = choose_coding(request.headers.get("accept-encoding"), is_binary=LENGTH_HEADER in headers)
        if coding is not None and nbytes >= MIN_COMPRESSED_BYTES:
            pieces = await self._packing.run(nbytes, pack, pieces, coding)
            headers |= {"Content-Encoding": coding, "Vary": "Accept-Encoding"}
        media_type = "application/octet-stream" if LENGTH_HEADER in headers else "application/json"
        return PiecesResponse(pieces, headers=headers, media_type=media_type, max_stall_s=self._max_stall_s)


def _json_work(reply: LookupReply) -> int:
    return JSON_COST * sum(array.nbytes for array in reply.outputs.values())


def _json_body(schema: dict[str, Any], *, example: dict[str, Any] | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": schema}
    if example is not None:
        content["example"] = example
    return {"requestBody": {"required": True, "content": {"application/json": content}}}
