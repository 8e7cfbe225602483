"""Arrays written in pieces read back whole."""

import numpy as np
import orjson
import pytest

from service.rest import json_arrays
from service.rest.json_arrays import write_array


@pytest.mark.parametrize("piece", [1, 3, 1 << 15])
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (0, 4), (1, 4), (5, 4), (3, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.int32, np.bool_])
def test_an_array_reads_back_as_it_was(monkeypatch, piece, shape, dtype):
    monkeypatch.setattr(json_arrays, "PIECE_NUMBERS", piece)
    array = (np.arange(np.prod(shape)) * 0.37).reshape(shape).astype(dtype)
    read = orjson.loads(b"".join(write_array(array)))
    assert np.array_equal(np.array(read, dtype=dtype).reshape(shape), array)
    assert len(read) == shape[0]


def test_large_arrays_are_written_in_small_pieces():
    array = np.zeros((100_000, 16), dtype=np.float32)
    assert max(map(len, write_array(array))) < 10 * json_arrays.PIECE_NUMBERS


def test_what_json_has_no_word_for_is_null():
    array = np.array([1.5, np.nan, np.inf, -np.inf], dtype=np.float32)
    assert orjson.loads(b"".join(write_array(array))) == [1.5, None, None, None]
