"""Owns turning one tensor of the protocol, raw bytes or single elements, into an array; must not know what it is for.

Every refusal names the tensor and the rule; nothing is copied that need not be.
"""

import math
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidArgument

Buffer: TypeAlias = bytes | bytearray | memoryview
Number = TypeVar("Number", np.int64, np.float32)

INTEGER_DTYPES: Mapping[str, np.dtype[Any]] = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4")}

_FP32 = np.dtype("<f4")

MAX_KEYS = 65_536
"""Most feature names in one request; a bound on the work of reading them one by one."""

MAX_SIZE = 1 << 40
"""Largest size of one dimension; a tensor without elements could name any size, and arithmetic must not overflow."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_REPR.maxlist = _REPR.maxdict = _REPR.maxtuple = 4
_REPR.maxlevel = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTensor:
    """An input tensor as the protocol states it."""

    name: str
    datatype: str
    shape: Sequence[object]
    content: Buffer | Sequence[Any]
    """Raw little-endian bytes, or the elements: row-major and flat, or nested like the shape."""
    parameters: Mapping[str, object] = field(default_factory=dict)


def shown(value: object) -> str:
    """A client's value for a message: quoted, and short whatever its size."""
    if isinstance(value, bytes | bytearray | memoryview):
        return repr(bytes(value[:40])) + ("..." if len(value) > 40 else "")
    return _REPR.repr(value)


def decode_integers(tensor: WireTensor, *, ranks: tuple[int, ...], rule: str) -> NDArray[np.int64]:
    """Read an INT64 or INT32 tensor, widened to INT64; the array may be a read-only view of the content.

    Args:
        tensor: The tensor.
        ranks: Numbers of dimensions that it may have.
        rule: The shapes that it may have, for the message.

    Raises:
        InvalidArgument: Wrong dtype, shape, number of bytes or elements; an element is no integer or does not fit.
    """
    if tensor.datatype not in INTEGER_DTYPES:
        raise InvalidArgument(f"input {tensor.name}: datatype {shown(tensor.datatype)}; use INT64 or INT32")
    shape = _check_shape(tensor, ranks, rule)
    if isinstance(tensor.content, bytes | bytearray | memoryview):
        flat = _numbers_from_bytes(tensor, tensor.content, shape, INTEGER_DTYPES[tensor.datatype], np.int64)
    else:
        flat = _integers_from_elements(tensor, _flatten(tensor, tensor.content, shape))
    return flat.reshape(shape)


def decode_floats(tensor: WireTensor, *, rule: str) -> NDArray[np.float32]:
    """Read an FP32 tensor of one dimension, bit for bit; the array may be a read-only view of the content.

    Args:
        tensor: The tensor.
        rule: The shape that it may have, for the message.

    Raises:
        InvalidArgument: Wrong dtype, shape, number of bytes or elements; an element is no number or does not fit.
    """
    if tensor.datatype != "FP32":
        raise InvalidArgument(f"input {tensor.name}: datatype {shown(tensor.datatype)}; use FP32")
    shape = _check_shape(tensor, (1,), rule)
    if isinstance(tensor.content, bytes | bytearray | memoryview):
        return _numbers_from_bytes(tensor, tensor.content, shape, _FP32, np.float32)
    return _floats_from_elements(tensor, _flatten(tensor, tensor.content, shape))


def decode_keys(tensor: WireTensor) -> tuple[str, ...]:
    """Read the BYTES tensor of feature names.

    Raises:
        InvalidArgument: Wrong dtype, shape or framing; a name is not UTF-8.
    """
    if tensor.datatype != "BYTES":
        raise InvalidArgument(f"input {tensor.name}: datatype {shown(tensor.datatype)}; use BYTES")
    shape = _check_shape(tensor, (1,), "[F]")
    if shape[0] > MAX_KEYS:
        raise InvalidArgument(f"input {tensor.name}: {shape[0]} names, the limit is {MAX_KEYS}")
    if isinstance(tensor.content, bytes | bytearray | memoryview):
        elements: Sequence[Any] = _split_strings(tensor, tensor.content, shape[0])
    else:
        elements = _flatten(tensor, tensor.content, shape)
    return tuple(_read_name(tensor, at, element) for at, element in enumerate(elements))


def _check_shape(tensor: WireTensor, ranks: tuple[int, ...], rule: str) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if len(shape) not in ranks or any(type(size) is not int or not 0 <= size <= MAX_SIZE for size in shape):
        raise InvalidArgument(f"input {tensor.name}: shape {shown(list(shape))}; use {rule} with sizes of 0 to 2^40")
    return shape  # type: ignore[return-value]


def _numbers_from_bytes(
    tensor: WireTensor, content: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any], kind: type[Number]
) -> NDArray[Number]:
    needed = math.prod(shape) * dtype.itemsize
    if needed != len(content):
        raise InvalidArgument(
            f"input {tensor.name}: shape {list(shape)} of {tensor.datatype} takes {needed} bytes, "
            f"the request has {len(content)}"
        )
    array = np.frombuffer(content, dtype=dtype)
    if dtype != kind or not array.flags.aligned:
        return array.astype(kind)  # a copy is aligned; kernels behind may count on that
    return array


def _flatten(tensor: WireTensor, elements: Sequence[Any], shape: tuple[int, ...]) -> Sequence[Any]:
    """The elements in one flat sequence of the size that the shape states."""
    if len(shape) == 2 and len(elements) and isinstance(elements[0], list):
        if len(elements) != shape[0] or not all(isinstance(row, list) and len(row) == shape[1] for row in elements):
            raise InvalidArgument(f"input {tensor.name}: data is not nested like its shape {list(shape)}")
        elements = list(chain.from_iterable(elements))
    if len(elements) != math.prod(shape):
        raise InvalidArgument(
            f"input {tensor.name}: shape {list(shape)} holds {math.prod(shape)} elements, the request has "
            f"{len(elements)}"
        )
    return elements


def _integers_from_elements(tensor: WireTensor, elements: Sequence[Any]) -> NDArray[np.int64]:
    if not set(map(type, elements)) <= {int}:  # bool and float would convert in silence
        at = next(at for at, element in enumerate(elements) if type(element) is not int)
        raise InvalidArgument(
            f"input {tensor.name}[{at}]: {shown(elements[at])} is not an integer that fits {tensor.datatype}"
        )
    limits = np.iinfo(INTEGER_DTYPES[tensor.datatype])
    try:
        array = np.fromiter(elements, dtype=np.int64, count=len(elements))
        fits = not array.size or (array.min() >= limits.min and array.max() <= limits.max)
    except OverflowError:
        fits = False
    if not fits:
        at = next(at for at, element in enumerate(elements) if not limits.min <= element <= limits.max)
        raise InvalidArgument(f"input {tensor.name}[{at}]: {shown(elements[at])} does not fit {tensor.datatype}")
    return array


def _floats_from_elements(tensor: WireTensor, elements: Sequence[Any]) -> NDArray[np.float32]:
    if not set(map(type, elements)) <= {int, float}:  # a bool would convert in silence
        at = next(at for at, element in enumerate(elements) if type(element) not in {int, float})
        raise InvalidArgument(f"input {tensor.name}[{at}]: {shown(elements[at])} is not a number")
    try:
        wide = np.fromiter(elements, dtype=np.float64, count=len(elements))
        with np.errstate(over="ignore"):
            array = wide.astype(np.float32)
        lost = np.isinf(array) & np.isfinite(wide)
        if not lost.any():
            return array
        at = int(lost.argmax())
    except OverflowError:  # an integer past the largest FP64
        most = np.finfo(np.float32).max
        at = next(at for at, element in enumerate(elements) if type(element) is int and abs(element) > most)
    raise InvalidArgument(f"input {tensor.name}[{at}]: {shown(elements[at])} does not fit FP32")


def _split_strings(tensor: WireTensor, content: Buffer, count: int) -> list[bytes]:
    """Cut the protocol's BYTES framing: each string after its length, 4 bytes, little-endian."""
    strings: list[bytes] = []
    view, offset = memoryview(content), 0
    for at in range(count):
        if len(view) - offset < 4:
            raise InvalidArgument(f"input {tensor.name}[{at}]: the data ends before the string's 4-byte length")
        (size,) = struct.unpack_from("<I", view, offset)
        offset += 4
        if size > len(view) - offset:
            raise InvalidArgument(
                f"input {tensor.name}[{at}]: length {size}, but only {len(view) - offset} bytes are left"
            )
        strings.append(bytes(view[offset : offset + size]))
        offset += size
    if offset != len(view):
        raise InvalidArgument(
            f"input {tensor.name}: {len(view) - offset} bytes are left over after the {count} strings of its shape"
        )
    return strings


def _read_name(tensor: WireTensor, at: int, element: object) -> str:
    if isinstance(element, str):
        return element
    if not isinstance(element, bytes):
        raise InvalidArgument(f"input {tensor.name}[{at}]: {shown(element)} is not a string")
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"input {tensor.name}[{at}]: {shown(element)} is not UTF-8, as names are") from None
