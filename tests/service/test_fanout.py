"""Fan-out over tables that lie on several shards at once: in columns, in copies, and mixed with all others."""

import asyncio
import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.contract import Placement, Routing
from service.batch import PreparedBatch
from service.errors import Unavailable
from service.shards import ShardFailed
from service.types import LookupRequest, OnShardFailure, Output
from service.validate import ValidRequest
from tests.manifests import make_table, row_id_of, row_of
from tests.service.routed import OUTPUTS, cases
from tests.service.stack import stack

DIM = 6
DEAD = ShardFailed("its process died", process_died=True)


def in_columns():
    """A table in columns on shards 2, 0 and 2 again, beside one that is whole on shard 1."""
    edges = [(2, 0, 1), (0, 1, 4), (2, 4, 6)]
    pieces = [Placement(shard=s, row_start=0, row_stop=100, col_start=a, col_stop=b) for s, a, b in edges]
    return [
        make_table("wide", ["wide"], routing=Routing.COLUMNS, num_shards=3, dim=DIM, placements=pieces),
        make_table("whole", ["whole"], routing=Routing.TABLE, num_shards=3, dim=DIM, home=1),
    ]


def replicated(num_shards=3):
    return [make_table("copied", ["copied"], routing=Routing.REPLICATED, num_shards=num_shards, rows=10_000)]


def both(**options):
    """Ids 3, 4, 3 of the table in columns and 5, 6 of the other."""
    return LookupRequest(
        collection="clicks",
        values_N=np.array([3, 4, 3, 5, 6]),
        lengths_FB=np.array([3, 2]),
        outputs=OUTPUTS,
        **options,
    )


def whole_rows():
    return np.concatenate([row_of("wide", np.array([3, 4, 3]), DIM), row_of("whole", np.array([5, 6]), DIM)])


@pytest.mark.parametrize("offload_ids", [0, 1_000_000])
@pytest.mark.parametrize("slow", [0, 2])
async def test_columns_are_joined_whichever_piece_comes_first(slow, offload_ids):
    async with stack(in_columns(), offload_ids=offload_ids) as it:
        it.shards[slow].delay_s = 0.02
        reply = await it.send(both())
        assert np.array_equal(reply.outputs[Output.EMBEDDINGS], whole_rows())
        assert np.array_equal(reply.outputs[Output.ROW_IDS], row_id_of(np.array([3, 4, 3, 5, 6])))
        assert not reply.outputs[Output.MISSING].any()
        assert [shard.requests[0].ids_N.tolist() for shard in it.shards] == [[3, 4], [5, 6], [3, 4]]


@pytest.mark.parametrize("lost", [0, 2])
async def test_a_row_that_lacks_a_piece_is_zeros_from_end_to_end(lost):
    async with stack(in_columns()) as it:
        it.shards[lost].failure = ShardFailed("connection refused")
        outputs = (await it.send(both(on_shard_failure=OnShardFailure.ZERO))).outputs
        assert outputs[Output.MISSING].tolist() == [True, True, True, False, False]
        assert not outputs[Output.EMBEDDINGS][:3].any()
        assert np.array_equal(outputs[Output.EMBEDDINGS][3:], whole_rows()[3:])
        assert outputs[Output.ROW_IDS][:3].tolist() == [-1, -1, -1]
        assert not outputs[Output.HITS][:3].any()


async def test_whoever_asks_for_columns_needs_every_shard_that_holds_some():
    async with stack(in_columns()) as it:
        it.shards[0].failure = ShardFailed("connection refused")
        with pytest.raises(Unavailable, match=r"shard 0 \(clicks_shard_0\)"):
            await it.send(both())
        others = LookupRequest(collection="clicks", values_N=np.array([5]), lengths_FB=np.array([0, 1]))
        reply = await it.send(others)
        assert np.array_equal(reply.outputs[Output.EMBEDDINGS], row_of("whole", np.array([5]), DIM))


async def test_a_replicated_table_is_answered_while_one_of_its_shards_answers():
    async with stack(replicated()) as it:
        for lost in range(3):
            for first in range(10):
                reply = await it.ask([first, first + 1])
                assert np.array_equal(reply.outputs[Output.EMBEDDINGS], row_of("copied", np.arange(first, first + 2)))
            it.shards[lost].failure = DEAD
            await it.healths[lost].probe()
        with pytest.raises(Unavailable, match="its process died"):
            await it.ask([1])


async def test_many_ids_of_a_replicated_table_are_spread_and_few_are_not():
    async with stack(replicated()) as it:
        ids = np.arange(6_000)
        reply = await it.ask(ids)
        assert np.array_equal(reply.outputs[Output.EMBEDDINGS], row_of("copied", ids))
        assert [shard.requests[0].ids_N.size for shard in it.shards] == [2_000] * 3
        for first in range(60):
            await it.ask([first, first + 1])
        assert sum(len(shard.requests) - 1 for shard in it.shards) == 60
        assert min(len(shard.requests) for shard in it.shards) > 5


@settings(max_examples=40)
@given(st.data(), cases(most_requests=6))
def test_an_interleaved_stream_of_any_requests_gets_each_its_own_answer(data, case):
    order = data.draw(st.permutations(range(len(case.requests)))) * 2
    delays = data.draw(st.lists(st.sampled_from([0, 0.0005]), min_size=8, max_size=8))

    async def run():
        async with stack(list(case.manifest.tables), case.version.num_shards, slot_s=0.0002) as it:
            for shard, delay_s in zip(it.shards, delays, strict=False):
                shard.delay_s = delay_s
            return await asyncio.gather(*(it.send(case.requests[index].request) for index in order))

    for index, reply in zip(order, asyncio.run(run()), strict=True):
        for output, expected in case.lookup(case.requests[index]).items():
            assert reply.outputs[output].tobytes() == expected.tobytes()


@pytest.mark.parametrize("end", ["answered", "failed", "late", "left"])
async def test_a_batch_is_let_go_of_as_soon_as_it_has_ended(end):
    """Its buffers are large, and the collector counts objects, not bytes."""

    def fail(request):
        raise ShardFailed("it failed")

    async with stack(in_columns()) as it:
        if end == "failed":
            it.shards[1].answer = fail
        elif end != "answered":
            it.shards[1].hang = True
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                asked = asyncio.create_task(it.send(both(timeout_s=0.05)))
                if end == "left":
                    await asyncio.wait({asked}, timeout=0.01)
                    asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                del asked
            async with asyncio.timeout(5):
                while [thing for thing in gc.get_objects() if type(thing) in {PreparedBatch, ValidRequest}]:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()
