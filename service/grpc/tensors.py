"""Owns the inference call over gRPC: raw or typed tensor contents in, raw contents out.

Meaning is read by ``service.wire``; here is only the form of the messages. A reply is put together on the wire level, so
that each output is copied once: protobuf's own way copies it into the message and again into the frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb

from service.errors import InvalidArgument
from service.log import current_request_id
from service.types import LookupReply, LookupRequest, Output
from service.wire import WireCall, WireOutput, read_lookup, wire_datatype
from service.wire_tensors import WireTensor, shown

_CONTENTS = {"INT32": "int_contents", "INT64": "int64_contents", "BYTES": "bytes_contents", "FP32": "fp32_contents"}

_LENGTH_DELIMITED = 2
_RAW_OUTPUT_TAG = bytes([pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    """An inference request read off gRPC, and how its reply must look."""

    request: LookupRequest
    request_id: str
    named: tuple[Output, ...]
    """The outputs that the request names, in its order; none: those that the reply has."""


def read_infer(message: Any) -> InferCall:
    """Read a ``ModelInferRequest``.

    Raises:
        InvalidArgument: Anything that a rule of the protocol or of the collection's inputs forbids.
    """
    call = WireCall(
        collection=message.model_name,
        version=message.model_version,
        request_id=message.id or current_request_id(),
        parameters=_parameters(message.parameters),
        inputs=_read_inputs(message),
        outputs=[WireOutput(name=entry.name, parameters=_parameters(entry.parameters)) for entry in message.outputs],
    )
    request, named = read_lookup(call)
    return InferCall(request=request, request_id=message.id, named=named)


def write_infer(call: InferCall, reply: LookupReply) -> bytes:
    """Write a serialised ``ModelInferResponse``."""
    outputs = call.named or tuple(reply.outputs)
    arrays = [reply.outputs[output] for output in outputs]
    head = pb.ModelInferResponse(
        model_name=reply.collection,
        model_version=str(reply.version),
        id=call.request_id,
        outputs=[
            pb.ModelInferResponse.InferOutputTensor(
                name=output.value, datatype=wire_datatype(array), shape=list(array.shape)
            )
            for output, array in zip(outputs, arrays, strict=True)
        ],
    )
    head.parameters["version"].int64_param = reply.version
    pieces: list[bytes | memoryview] = [head.SerializeToString()]
    for array in arrays:
        pieces += [_RAW_OUTPUT_TAG, _varint(array.nbytes), _array_bytes(array)]
    return b"".join(pieces)


def _read_inputs(message: Any) -> list[WireTensor]:
    raw: Sequence[bytes] = message.raw_input_contents
    inputs = message.inputs
    if raw and len(raw) != len(inputs):
        raise InvalidArgument(
            f"raw_input_contents: {len(raw)} entries for {len(inputs)} inputs; send one for each, in their order"
        )
    tensors: list[WireTensor] = []
    for at, entry in enumerate(inputs):
        typed = [descriptor.name for descriptor, _ in entry.contents.ListFields()]
        if raw and typed:
            raise InvalidArgument(
                f"input {shown(entry.name)}: it has both contents.{typed[0]} and raw_input_contents; send one of them"
            )
        tensors.append(
            WireTensor(
                name=entry.name,
                datatype=entry.datatype,
                shape=list(entry.shape),
                content=raw[at] if raw else _typed_contents(entry, typed),
                parameters=_parameters(entry.parameters),
            )
        )
    return tensors


def _typed_contents(entry: Any, typed: list[str]) -> Sequence[Any]:
    wanted = _CONTENTS.get(entry.datatype)
    for name in typed:
        if wanted is not None and name != wanted:
            raise InvalidArgument(
                f"input {shown(entry.name)}: contents.{name} does not go with datatype {entry.datatype}; use {wanted}"
            )
    return () if wanted is None else getattr(entry.contents, wanted)


def _parameters(parameters: Any) -> dict[str, object]:
    read: dict[str, object] = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        read[name] = None if choice is None else getattr(parameter, choice)
    return read


def _array_bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _varint(number: int) -> bytes:
    """Protobuf's base-128 number."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
