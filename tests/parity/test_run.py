"""A wrong answer does not pass."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from export.contract import RowDtype
from tests.parity.answers import Collection, answer_pool
from tests.parity.requests import draw_requests
from tests.parity.run import compare
from tests.parity.tables import plain_tables
from tests.parity.trained import plain

OUTPUTS = ("embeddings", "row_ids", "hits", "output_lengths", "weights", "unique_embeddings", "inverse")


@pytest.fixture(scope="module")
def collection():
    trained = plain(plain_tables(1), 6)
    manifest = SimpleNamespace(need_indices=False, table=lambda _: SimpleNamespace(row_dtype=RowDtype.FP32))
    tables = {t.name: answer_pool(trained, manifest, t, zero=False, seed=1) for t in trained.tables}
    return Collection(name="plain", trained=trained, manifest=manifest, tables=tables)


def flip_the_last_bit(array):
    array.reshape(-1).view(np.uint8)[0] ^= 1
    return array


def drop_a_row(array):
    return array[1:]


@pytest.mark.parametrize("spoil", [flip_the_last_bit, drop_a_row])
@pytest.mark.parametrize("output", OUTPUTS[:5])
def test_one_bit_or_one_row_in_any_output_is_seen(collection, output, spoil):
    features = list(dict.fromkeys(f for answers in collection.tables.values() for f in answers.table.features))
    requests = draw_requests(features, *collection.pools(), seed=3)
    drawn = next(request for request in requests if request.weights_N is not None and request.values_N.size)
    request = replace(drawn, outputs=OUTPUTS, half=False)
    expected = collection.expected(request)
    answer = {name: expected[name] for name in OUTPUTS[:5]}
    rows = np.arange(len(answer["embeddings"]))
    answer |= {"unique_embeddings": answer["embeddings"], "inverse": rows}
    compare(collection, request, dict(answer))
    with pytest.raises(AssertionError, match="plain: ids="):
        compare(collection, request, answer | {output: spoil(answer[output].copy())})
