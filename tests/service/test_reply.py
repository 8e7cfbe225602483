"""Weights and indices come back beside the rows they belong to, and what would be dropped is refused."""

import numpy as np
import pytest

from export.contract import OutOfRange, Routing
from service.errors import InvalidArgument
from service.shards import ShardFailed
from service.types import LookupRequest, OnShardFailure, Output
from tests.manifests import make_table, row_id_of, row_of
from tests.service.stack import managed, stack

DIM = 3


def shared():
    """Feature both lies in two plain tables; item in the second."""
    rows = {"routing": Routing.ROWS, "num_shards": 2, "shared": ["both"], "out_of_range": OutOfRange.ZERO}
    return [make_table("a", ["both"], **rows), make_table("b", ["both", "item"], **rows)]


def request_of(**options):
    return LookupRequest(
        collection="clicks",
        keys=("item", "both"),
        values_N=np.array([7, 3, 4, 3]),
        lengths_FB=np.array([1, 3]),
        weights_N=np.array([0.5, np.nan, -0.0, 2.0], dtype=np.float32),
        **options,
    )


async def test_weights_come_back_once_for_each_row_bit_for_bit():
    async with stack(shared(), 2) as it:
        reply = await it.send(request_of())
        assert list(reply.outputs) == [Output.EMBEDDINGS, Output.WEIGHTS]
        assert reply.embedding_names_E == ("item", "both@a", "both@b")
        wanted = np.array([0.5, np.nan, -0.0, 2.0, np.nan, -0.0, 2.0], dtype=np.float32)
        assert reply.outputs[Output.WEIGHTS].tobytes() == wanted.tobytes()


async def test_a_variable_batch_is_answered_as_the_request_written_out():
    async with stack(shared(), 2) as it:
        options = {"collection": "clicks", "keys": ("both", "item"), "outputs": frozenset(Output) - {Output.INDICES}}
        variable = await it.send(
            LookupRequest(
                values_N=np.array([3, 4, 9, 7]),
                weights_N=np.array([1, 2, 3, 4], dtype=np.float32),
                lengths_FB=np.array([2, 1, 1]),
                stride_per_key_F=np.array([2, 1]),
                inverse_indices_FB=np.array([[1, 0, 1], [0, 0, 0]]),
                **options,
            )
        )
        written = await it.send(
            LookupRequest(
                values_N=np.array([9, 3, 4, 9, 7, 7, 7]),
                weights_N=np.array([3, 1, 2, 3, 4, 4, 4], dtype=np.float32),
                lengths_FB=np.array([[1, 2, 1], [1, 1, 1]]),
                **options,
            )
        )
        assert list(variable.outputs) == list(written.outputs)
        for output, array in variable.outputs.items():
            assert array.tobytes() == written.outputs[output].tobytes()
        assert [lengths.tolist() for lengths in variable.lengths_E] == [[1, 2, 1], [1, 2, 1], [1, 1, 1]]


async def test_without_inverse_indices_each_block_keeps_its_own_samples():
    async with stack(shared(), 2) as it:
        reply = await it.send(
            LookupRequest(
                collection="clicks",
                keys=("both", "item"),
                values_N=np.array([3, 4, 9, 7]),
                lengths_FB=np.array([2, 1, 1]),
                stride_per_key_F=np.array([2, 1]),
                outputs=frozenset({Output.EMBEDDINGS, Output.OUTPUT_LENGTHS}),
            )
        )
        assert reply.outputs[Output.OUTPUT_LENGTHS].tolist() == [2, 1, 2, 1, 1]
        ids = np.array([3, 4, 9])
        wanted = [row_of("a", ids, DIM), row_of("b", ids, DIM), row_of("b", np.array([7]), DIM)]
        assert np.array_equal(reply.outputs[Output.EMBEDDINGS], np.concatenate(wanted))


async def test_indices_are_ids_of_plain_tables_and_rows_of_managed_ones():
    async with stack(shared(), 2, need_indices=True) as it:
        reply = await it.send(request_of())
        assert list(reply.outputs) == [Output.EMBEDDINGS, Output.WEIGHTS, Output.INDICES]
        assert reply.outputs[Output.INDICES].tolist() == [7, 3, 4, 3, 3, 4, 3]
    async with stack(managed(), need_indices=True) as it:
        ids = [5, 6, 5]
        reply = await it.ask(ids)
        assert np.array_equal(reply.outputs[Output.INDICES], row_id_of(np.array(ids)))
        it.shards[0].failure = it.shards[1].failure = it.shards[2].failure = ShardFailed("gone")
        reply = await it.ask(ids, on_shard_failure=OnShardFailure.ZERO)
        assert reply.outputs[Output.INDICES].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": frozenset({Output.EMBEDDINGS})}, "weights: they would be dropped"),
        ({"outputs": frozenset({Output.INDICES, Output.WEIGHTS})}, "output indices: .* need_indices; ask for row_ids"),
    ],
)
async def test_what_would_be_dropped_or_is_not_there_is_refused(options, message):
    async with stack(shared(), 2) as it:
        with pytest.raises(InvalidArgument, match=message):
            await it.send(request_of(**options))


async def test_the_output_weights_needs_the_input():
    async with stack() as it:
        with pytest.raises(InvalidArgument, match="output weights: the request has no input weights"):
            await it.ask([1], outputs=frozenset({Output.WEIGHTS}))
