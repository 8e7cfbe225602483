"""Owns reading an Open Inference Protocol request into a ``LookupRequest``: tensor names, dtypes, shapes, parameters.

Both edges share it, so that a request means the same over HTTP and gRPC. It must not know how a tensor travelled, nor
hold anything against a manifest: that is ``service.validate``. Shape suffixes as in ``service.types``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidArgument
from service.types import LookupRequest, OnShardFailure, Output, OutputDtype
from service.wire_tensors import WireTensor, decode_floats, decode_integers, decode_keys, shown

KNOWN_INPUTS = ("values", "lengths", "keys", "weights", "stride_per_key", "inverse_indices")

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "priority": (0,),
    "sequence_id": (0, ""),
    "sequence_start": (False,),
    "sequence_end": (False,),
    "triton_enable_empty_final_response": (False,),
    "classification": (0,),
}
"""Standard parameters of things that this server does not have, with the values that ask for nothing."""

_KNOWN_PARAMETERS = ("on_shard_failure", "output_dtype", "timeout_ms", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOutput:
    """An output that a request names, before its name is known to be one."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCall:
    """An inference request as the protocol states it, free of how it was encoded."""

    collection: str
    version: str = ""
    request_id: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    inputs: Sequence[WireTensor]
    outputs: Sequence[WireOutput] = ()


def read_lookup(call: WireCall) -> tuple[LookupRequest, tuple[Output, ...]]:
    """Read a call into a lookup and the outputs that it names, in the order in which the reply must have them.

    Raises:
        InvalidArgument: Something is unknown, missing, there twice, or of the wrong type, shape or size; the message
            names it.
    """
    tensors = _read_inputs(call.inputs)
    named = _read_outputs(call.outputs)
    parameters = _read_parameters(call.parameters)
    keys, weights = tensors.get("keys"), tensors.get("weights")
    strides, inverse = tensors.get("stride_per_key"), tensors.get("inverse_indices")
    request = LookupRequest(
        collection=call.collection,
        version=read_version(call.version),
        request_id=call.request_id,
        keys=None if keys is None else decode_keys(keys),
        values_N=decode_integers(tensors["values"], ranks=(1,), rule="[N]"),
        lengths_FB=decode_integers(tensors["lengths"], ranks=(1, 2), rule="[F*B] or [F, B]"),
        weights_N=None if weights is None else decode_floats(weights, rule="[N]"),
        stride_per_key_F=None if strides is None else decode_integers(strides, ranks=(1,), rule="[F]"),
        inverse_indices_FB=(
            None if inverse is None else decode_integers(inverse, ranks=(1, 2), rule="[F, B] or [F*B]")
        ),
        outputs=frozenset(named) or None,
        **parameters,
    )
    return request, named


def read_version(text: str) -> int | None:
    """Read the protocol's model version; an empty one means the version being served.

    Raises:
        InvalidArgument: It is not a decimal number.
    """
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise InvalidArgument(f"version {shown(text)}: use a decimal number, or leave it out")
    return int(text)


def wire_datatype(array: NDArray[Any]) -> str:
    """The protocol's name of a reply array's dtype."""
    return _DATATYPES[array.dtype.type]


_DATATYPES: Mapping[type, str] = {
    np.float32: "FP32",
    np.float16: "FP16",
    np.int64: "INT64",
    np.int32: "INT32",
    np.bool_: "BOOL",
}


def _read_inputs(inputs: Sequence[WireTensor]) -> dict[str, WireTensor]:
    tensors: dict[str, WireTensor] = {}
    for tensor in inputs:
        if tensor.name not in KNOWN_INPUTS:
            raise InvalidArgument(f"input {shown(tensor.name)}: unknown; the inputs are {', '.join(KNOWN_INPUTS)}")
        if tensor.name in tensors:
            raise InvalidArgument(f"input {tensor.name}: it is there twice; send it once")
        for name in tensor.parameters:
            _refuse_tensor_parameter(f"input {tensor.name}", name)
        tensors[tensor.name] = tensor
    for name in ("values", "lengths"):
        if name not in tensors:
            raise InvalidArgument(f"input {name}: missing; a request needs values and lengths")
    return tensors


def _read_outputs(asked: Sequence[WireOutput]) -> tuple[Output, ...]:
    outputs: list[Output] = []
    for wanted in asked:
        try:
            output = Output(wanted.name)
        except ValueError:
            known = ", ".join(output.value for output in Output)
            raise InvalidArgument(f"output {shown(wanted.name)}: unknown; the outputs are {known}") from None
        if output in outputs:
            raise InvalidArgument(f"output {output.value}: asked for twice; name it once")
        for name, value in wanted.parameters.items():
            if not (name in _NEUTRAL and _is_neutral(name, value)):
                _refuse_tensor_parameter(f"output {output.value}", name)
        outputs.append(output)
    return tuple(outputs)


def _refuse_tensor_parameter(where: str, name: str) -> NoReturn:
    if name.startswith("shared_memory_"):
        raise InvalidArgument(f"{where}: parameter {name}: shared memory with clients is not supported; send the bytes")
    if name == "classification":
        raise InvalidArgument(f"{where}: parameter classification: embeddings have no classes; leave it out")
    raise InvalidArgument(f"{where}: parameter {shown(name)}: unknown here; leave it out")


def _read_parameters(parameters: Mapping[str, object]) -> dict[str, Any]:
    """Request parameters as arguments of ``LookupRequest``."""
    read: dict[str, Any] = {}
    timeouts_s: list[float] = []
    for name, value in parameters.items():
        match name:
            case "on_shard_failure":
                read[name] = _choice(name, value, OnShardFailure)
            case "output_dtype":
                read[name] = _choice(name, value, OutputDtype)
            case "timeout_ms":
                timeouts_s.append(_whole(name, value, least=1, unit="milliseconds") / 1e3)
            case "timeout":
                # Triton's own parameter; its default of 0 asks for no deadline of the client's.
                timeouts_s += (
                    [_whole(name, value, least=0, unit="microseconds") / 1e6]
                    if value != 0 or isinstance(value, bool)
                    else []
                )
            case _ if name in _NEUTRAL:
                if not _is_neutral(name, value):
                    raise InvalidArgument(
                        f"parameter {name}: {shown(value)}; this server has no sequences, priorities or classes: "
                        f"leave it out"
                    )
            case _:
                known = ", ".join(_KNOWN_PARAMETERS)
                raise InvalidArgument(f"parameter {shown(name)}: unknown; the request parameters are {known}")
    if timeouts_s:
        read["timeout_s"] = min(timeouts_s)
    return read


def _is_neutral(name: str, value: object) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL[name])


def _choice(name: str, value: object, kind: type[StrEnum]) -> Any:
    try:
        if isinstance(value, str):
            return kind(value)
    except ValueError:
        pass
    known = ", ".join(kind)
    raise InvalidArgument(f"parameter {name}: {shown(value)}; use a string, one of {known}")


def _whole(name: str, value: object, *, least: int, unit: str) -> int:
    if type(value) is not int or value < least:
        raise InvalidArgument(f"parameter {name}: {shown(value)}; use a whole number of {unit}, {least} or more")
    return value
