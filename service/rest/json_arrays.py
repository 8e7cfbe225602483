"""Owns writing arrays as JSON without stopping the rest of the process: in pieces, between which others may run.

One call to the encoder holds Python's lock until it is through, a second for a hundred megabytes, and the liveness probe
would wait as long.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

PIECE_NUMBERS = 1 << 15
"""Numbers written at a time: about a millisecond of work."""


def write_array(array: NDArray[Any]) -> Iterator[bytes]:
    """Write an array, nested like its shape; NaN and infinity, for which JSON has no word, are ``null``.

    Args:
        array: C-contiguous; FP32, FP16, INT64, INT32 or BOOL; one or two dimensions.
    """
    rows = max(1, PIECE_NUMBERS // max(1, array.size // max(1, len(array))))
    yield b"["
    for start in range(0, len(array), rows):
        piece = np.ascontiguousarray(array[start : start + rows])
        if start:
            yield b","
        yield orjson.dumps(piece, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    yield b"]"
