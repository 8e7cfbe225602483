"""Owns the inference call over HTTP: JSON with tensors in it or behind it (the binary tensor extension), both ways.

Meaning is read by ``service.wire``; here are only the form of the JSON and the cutting of the bytes behind it.

A number that JSON has no word for (NaN, infinity) is ``null`` in a JSON reply. Binary replies carry it as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from numpy.typing import NDArray

from service.errors import InvalidArgument
from service.log import current_request_id
from service.rest.json_arrays import write_array
from service.rest.reply import array_bytes
from service.types import LookupReply, LookupRequest, Output
from service.wire import WireCall, WireOutput, read_lookup, wire_datatype
from service.wire_tensors import WireTensor, shown

LENGTH_HEADER = "Inference-Header-Content-Length"

_CALL_FIELDS = frozenset({"id", "parameters", "inputs", "outputs"})
_INPUT_FIELDS = frozenset({"name", "shape", "datatype", "parameters", "data"})
_OUTPUT_FIELDS = frozenset({"name", "parameters"})


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    """An inference request read off HTTP, and how its reply must look."""

    request: LookupRequest
    request_id: str
    """As the client sent it; empty when it sent none."""
    named: Mapping[Output, bool]
    """The outputs that the request names, in its order; whether each goes behind the JSON as bytes."""
    binary_default: bool
    """The same for outputs that are sent without being named."""

    def outputs(self, reply: LookupReply) -> Mapping[Output, bool]:
        """The outputs in the order in which they are sent; whether each goes behind the JSON as bytes."""
        return self.named or dict.fromkeys(reply.outputs, self.binary_default)


def read_header_length(text: str | None) -> int | None:
    """Read ``Inference-Header-Content-Length``; None: the whole body is JSON.

    Raises:
        InvalidArgument: It is no number of bytes.
    """
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise InvalidArgument(f"{LENGTH_HEADER}: {text[:80]!r}; use the number of bytes of the JSON")
    return int(text)


def read_infer(collection: str, version: str, body: memoryview, header_length: int | None) -> InferCall:
    """Read an inference request.

    Args:
        collection: Name of the model in the path.
        version: Version in the path; empty: the one being served.
        body: The whole body, unpacked.
        header_length: Bytes of JSON at its start; None: all of them.

    Raises:
        InvalidArgument: Anything that a rule of the protocol or of the collection's inputs forbids.
    """
    if header_length is not None and header_length > len(body):
        raise InvalidArgument(f"{LENGTH_HEADER}: {header_length}, but the body has {len(body)} bytes")
    head, tail = body[:header_length], body[header_length:] if header_length is not None else body[:0]
    try:
        document = orjson.loads(head)
    except orjson.JSONDecodeError as exc:
        hint = (
            f"; {LENGTH_HEADER} says that its first {header_length} bytes are JSON" if header_length is not None else ""
        )
        raise InvalidArgument(f"body: not JSON: {exc}{hint}") from None
    document = _object("body", document, _CALL_FIELDS)
    parameters = dict(_object("parameters", document.get("parameters", {})))
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise InvalidArgument(f"id: {shown(request_id)}; use a string")
    binary_default = _flag("parameters.binary_data_output", parameters.pop("binary_data_output", False))
    inputs = _read_inputs(document, tail)
    outputs, binary = _read_outputs(document, binary_default)
    call = WireCall(
        collection=collection,
        version=version,
        request_id=request_id or current_request_id(),
        parameters=parameters,
        inputs=inputs,
        outputs=outputs,
    )
    request, named = read_lookup(call)
    return InferCall(
        request=request,
        request_id=request_id,
        named={output: binary[output.value] for output in named},
        binary_default=binary_default,
    )


def write_infer(call: InferCall, reply: LookupReply) -> tuple[list[bytes | memoryview], int | None]:
    """Write the reply.

    Returns:
        The body in pieces, and the length of its JSON when bytes follow it.
    """
    document: dict[str, Any] = {"model_name": reply.collection, "model_version": str(reply.version)}
    if call.request_id:
        document["id"] = call.request_id
    document["parameters"] = {"version": reply.version}
    head = [orjson.dumps(document)[:-1], b',"outputs":[']
    tail: list[bytes | memoryview] = []
    for at, (output, is_binary) in enumerate(call.outputs(reply).items()):
        array: NDArray[Any] = reply.outputs[output]
        entry: dict[str, Any] = {"name": output.value, "datatype": wire_datatype(array), "shape": list(array.shape)}
        if is_binary:
            tail.append(array_bytes(array))
            entry["parameters"] = {"binary_data_size": array.nbytes}
        head += [b"," if at else b"", orjson.dumps(entry)[:-1]]
        head += [] if is_binary else [b',"data":', *write_array(array.reshape(-1))]
        head.append(b"}")
    head.append(b"]}")
    return [*head, *tail], sum(map(len, head)) if tail else None


def _read_inputs(document: dict[str, Any], tail: memoryview) -> list[WireTensor]:
    tensors: list[WireTensor] = []
    offset = 0
    for at, entry in enumerate(_array("inputs", document.get("inputs"))):
        where = f"inputs[{at}]"
        entry = _object(where, entry, _INPUT_FIELDS)  # noqa: PLW2901 - the same thing, now known to be an object
        name = _text(f"{where}.name", entry.get("name"))
        parameters = dict(_object(f"{where}.parameters", entry.get("parameters", {})))
        content: Any = entry.get("data")
        if "binary_data_size" in parameters:
            size = parameters.pop("binary_data_size")
            if content is not None:
                raise InvalidArgument(f"input {shown(name)}: it has both data and binary_data_size; send one of them")
            if type(size) is not int or not 0 <= size <= len(tail) - offset:
                raise InvalidArgument(
                    f"input {shown(name)}: binary_data_size {shown(size)}, but {len(tail) - offset} bytes are left "
                    f"after the JSON; {LENGTH_HEADER} says where that ends"
                )
            content = tail[offset : offset + size]
            offset += size
        elif content is None:
            if not any(key.startswith("shared_memory_") for key in parameters):
                raise InvalidArgument(f"input {shown(name)}: no data; send data, or binary_data_size and the bytes")
            content = []  # the parameter is refused by its name, in service.wire
        tensors.append(
            WireTensor(
                name=name,
                datatype=_text(f"{where}.datatype", entry.get("datatype")),
                shape=_array(f"{where}.shape", entry.get("shape")),
                content=content if isinstance(content, memoryview) else _array(f"{where}.data", content),
                parameters=parameters,
            )
        )
    if offset != len(tail):
        raise InvalidArgument(f"body: {len(tail) - offset} bytes after the JSON belong to no input's binary_data_size")
    return tensors


def _read_outputs(document: dict[str, Any], binary_default: bool) -> tuple[list[WireOutput], dict[str, bool]]:
    outputs: list[WireOutput] = []
    binary: dict[str, bool] = {}
    for at, entry in enumerate(_array("outputs", document.get("outputs", []))):
        where = f"outputs[{at}]"
        entry = _object(where, entry, _OUTPUT_FIELDS)  # noqa: PLW2901 - as in _read_inputs
        name = _text(f"{where}.name", entry.get("name"))
        parameters = dict(_object(f"{where}.parameters", entry.get("parameters", {})))
        binary[name] = _flag(f"{where}.parameters.binary_data", parameters.pop("binary_data", binary_default))
        outputs.append(WireOutput(name=name, parameters=parameters))
    return outputs, binary


def _object(where: str, value: object, known: frozenset[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"{where}: {shown(value)} is not a JSON object")
    if known is not None:
        for name in value:
            if name not in known:
                raise InvalidArgument(
                    f"{where}.{shown(name)}: unknown field; the fields are {', '.join(sorted(known))}"
                )
    return value


def _array(where: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidArgument(
            f"{where}: {shown(value)} is not a JSON array" if value is not None else f"{where}: missing"
        )
    return value


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{where}: {shown(value)} is not a string" if value is not None else f"{where}: missing")
    return value


def _flag(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{where}: {shown(value)}; use true or false")
    return value
