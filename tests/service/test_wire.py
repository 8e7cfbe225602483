"""Laws of reading tensors and parameters, whatever the protocol."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidArgument
from service.types import Output
from service.wire import WireCall, WireOutput, read_lookup, read_version, wire_datatype
from service.wire_tensors import MAX_KEYS, WireTensor, decode_floats, decode_integers, decode_keys, shown

INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)


def tensor(content, *, name="values", datatype="INT64", shape=None):
    return WireTensor(name=name, datatype=datatype, shape=[len(content)] if shape is None else shape, content=content)


def decode(made):
    return decode_integers(made, ranks=(1, 2), rule="[N]")


@given(st.lists(INT64))
def test_int64_bytes_and_elements_say_the_same(ids):
    raw = np.array(ids, dtype="<i8").tobytes()
    assert decode(tensor(ids)).tolist() == decode(tensor(raw, shape=[len(ids)])).tolist() == ids


@given(st.lists(INT32))
def test_int32_is_widened_without_loss(ids):
    raw = np.array(ids, dtype="<i4").tobytes()
    from_bytes = decode(tensor(raw, datatype="INT32", shape=[len(ids)]))
    assert from_bytes.dtype == decode(tensor(ids, datatype="INT32")).dtype == np.int64
    assert from_bytes.tolist() == decode(tensor(ids, datatype="INT32")).tolist() == ids


@given(st.lists(INT64, min_size=1), st.data())
def test_one_element_that_is_no_integer_is_refused_with_its_place(ids, data):
    at = data.draw(st.integers(0, len(ids) - 1))
    bad = data.draw(st.sampled_from([True, 1.0, "1", None, [], {}, 2**63, -(2**63) - 1, 2**200]))
    ids[at] = bad
    with pytest.raises(InvalidArgument, match=rf"^input values\[{at}\]: "):
        decode(tensor(ids, shape=[len(ids)]))


@given(st.binary(max_size=64), st.lists(st.integers(-2, 9), max_size=3), st.sampled_from(["INT64", "INT32"]))
def test_bytes_are_read_or_refused_but_never_break(raw, shape, datatype):
    try:
        array = decode(tensor(raw, datatype=datatype, shape=shape))
    except InvalidArgument as exc:
        assert str(exc).startswith("input values")  # noqa: PT017 - both outcomes are checked
    else:
        assert list(array.shape) == shape


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_floats_keep_every_bit(patterns):
    raw = np.array(patterns, dtype="<u4").tobytes()
    array = decode_floats(tensor(raw, name="weights", datatype="FP32", shape=[len(patterns)]), rule="[N]")
    assert array.dtype == np.float32
    assert array.tobytes() == raw


@given(st.lists(st.floats(width=32) | st.integers(-(2**24), 2**24)))
def test_floats_may_be_elements(elements):
    array = decode_floats(tensor(elements, name="weights", datatype="FP32"), rule="[N]")
    assert np.array_equal(array, np.array(elements, dtype=np.float32), equal_nan=True)


@given(st.lists(st.floats(width=32)), st.data())
def test_one_element_that_is_no_float_is_refused_with_its_place(elements, data):
    at = data.draw(st.integers(0, len(elements)))
    elements.insert(at, data.draw(st.sampled_from([True, "1", None, [], 1e39, -1e39, 10**40, 10**400])))
    with pytest.raises(InvalidArgument, match=rf"^input weights\[{at}\]: "):
        decode_floats(tensor(elements, name="weights", datatype="FP32"), rule="[N]")


@given(st.lists(st.text()))
def test_names_survive_the_framing(names):
    raw = b"".join(struct.pack("<I", len(name.encode())) + name.encode() for name in names)
    framed = WireTensor(name="keys", datatype="BYTES", shape=[len(names)], content=memoryview(raw))
    assert decode_keys(framed) == tuple(names)


@given(st.binary(max_size=40), st.integers(0, 5))
def test_framing_is_read_or_refused_but_never_breaks(raw, count):
    try:
        names = decode_keys(WireTensor(name="keys", datatype="BYTES", shape=[count], content=raw))
    except InvalidArgument as exc:
        assert str(exc).startswith("input keys")  # noqa: PT017 - both outcomes are checked
    else:
        assert len(names) == count


def test_the_number_of_names_is_bounded():
    many = MAX_KEYS + 1
    with pytest.raises(InvalidArgument, match="limit"):
        decode_keys(WireTensor(name="keys", datatype="BYTES", shape=[many], content=bytes(4 * many)))


def test_raw_ids_are_not_copied():
    raw = np.arange(5, dtype="<i8")
    array = decode(tensor(memoryview(raw).cast("B"), shape=[5]))
    assert np.shares_memory(array, raw)


def test_unaligned_ids_are_moved_to_where_kernels_may_read_them():
    raw = memoryview(bytearray(3) + np.arange(5, dtype="<i8").tobytes())[3:]
    array = decode(tensor(raw, shape=[5]))
    assert array.flags.aligned
    assert array.tolist() == [0, 1, 2, 3, 4]


def test_the_outputs_keep_their_order_and_default_to_embeddings():
    inputs = [tensor([1]), tensor([1], name="lengths")]
    asked = [WireOutput(name="row_ids"), WireOutput(name="embeddings")]
    request, order = read_lookup(WireCall(collection="c", inputs=inputs, outputs=asked))
    assert order == (Output.ROW_IDS, Output.EMBEDDINGS)
    assert request.outputs == set(order)
    request, order = read_lookup(WireCall(collection="c", inputs=inputs))
    assert (request.outputs, order) == (None, ())


@pytest.mark.parametrize(("text", "version"), [("", None), ("1", 1), ("007", 7), ("9" * 18, 10**18 - 1)])
def test_versions_are_decimal_numbers(text, version):
    assert read_version(text) == version


@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), lambda inner: st.lists(inner, max_size=9)))
def test_a_value_is_shown_short(value):
    assert len(shown(value)) < 1000


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.int32, np.bool_])
def test_every_dtype_of_a_reply_has_a_name(dtype):
    assert wire_datatype(np.zeros(1, dtype=dtype)).endswith(("32", "16", "64", "BOOL"))
