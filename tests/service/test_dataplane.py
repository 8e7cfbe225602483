"""The dataplane over shards that answer by a rule, late, wrongly or not at all."""

import asyncio
import time

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from export.contract import OutOfRange, Routing
from service.batcher import Batcher
from service.dataplane import DataPlane, Served
from service.errors import DeadlineExceeded, Internal, InvalidArgument, NotFound, Overloaded, TooLarge, Unavailable
from service.metrics import Metrics
from service.settings import Settings
from service.shards import ShardFailed
from service.types import LookupRequest, OnShardFailure, Output, OutputDtype
from service.validate import predict_reply_bytes
from tests.manifests import RuleShard, make_table, make_version, row_of
from tests.service.stack import NUM_SHARDS, ids_on, managed, stack, until

ANY_OUTPUT = frozenset(Output) - {Output.WEIGHTS, Output.INDICES}
"""What every request may ask for, whatever it sends and whichever collection it asks."""


async def test_ids_that_are_equal_travel_once():
    async with stack() as it:
        reply = await it.ask([5, 5, 5, 7])
        assert np.array_equal(reply.outputs[Output.EMBEDDINGS], row_of("user", np.array([5, 5, 5, 7])))
        assert sum(request.ids_N.size for shard in it.shards for request in shard.requests) == 2
        assert it.sample("kjtserve_ids_total", collection="clicks", table="user") == 4
        assert it.sample("kjtserve_unique_ids_total", collection="clicks", table="user") == 2


async def test_requests_that_arrive_together_share_a_batch_and_its_dedup():
    async with stack(num_shards=1, slot_s=60) as it:
        it.shards[0].delay_s = 0.02
        replies = await asyncio.gather(*(it.ask([1, 2, 3 + i]) for i in range(10)))
        for i, reply in enumerate(replies):
            assert np.array_equal(reply.outputs[Output.EMBEDDINGS], row_of("user", np.array([1, 2, 3 + i])))
        sent = [request.ids_N.size for request in it.shards[0].requests]
        assert sum(sent) == 12
        assert len(sent) == 1


async def test_only_the_outputs_asked_for_come_back():
    async with stack() as it:
        reply = await it.ask([1, 2], outputs=frozenset({Output.HITS}))
        assert set(reply.outputs) == {Output.HITS}


async def test_fp16_is_the_rounded_fp32():
    async with stack() as it:
        reply = await it.ask([1, 999_983], output_dtype=OutputDtype.FP16)
        exact = row_of("user", np.array([1, 999_983]))
        assert reply.outputs[Output.EMBEDDINGS].dtype == np.float16
        assert np.array_equal(reply.outputs[Output.EMBEDDINGS], exact.astype(np.float16))


@pytest.mark.parametrize("offload_ids", [0, 1_000_000])
async def test_threads_or_not_the_answer_is_the_same(offload_ids):
    ids = list(range(500)) * 2
    async with stack(offload_ids=offload_ids) as it:
        reply = await it.ask(ids)
        assert np.array_equal(reply.outputs[Output.EMBEDDINGS], row_of("user", np.array(ids)))


async def test_no_ids_is_an_ordinary_request_that_asks_no_shard():
    async with stack() as it:
        reply = await it.ask([], outputs=ANY_OUTPUT)
        assert reply.outputs[Output.EMBEDDINGS].shape == (0, 3)
        assert reply.outputs[Output.UNIQUE_EMBEDDINGS].shape == (0, 3)
        assert not any(shard.requests for shard in it.shards)


async def test_a_batch_of_no_samples_is_an_ordinary_request():
    async with stack() as it:
        request = LookupRequest(
            collection="clicks", values_N=np.empty(0, np.int64), lengths_FB=np.empty((1, 0), np.int64)
        )
        with it.plane.admit() as permit:
            reply = await it.plane.lookup(request, permit)
        assert [lengths.shape for lengths in reply.lengths_E] == [(0,)]


async def test_the_input_hash_runs_before_dedup_and_routing():
    tables = [make_table("user", ["user"], routing=Routing.HASH, num_shards=2, input_hash="h.pt2")]
    async with stack(tables, 2, hashes={"h.pt2": lambda ids: torch.remainder(ids, 10)}) as it:
        reply = await it.ask([3, 13, 23, 4])
        assert np.array_equal(reply.outputs[Output.EMBEDDINGS], row_of("user", np.array([3, 3, 3, 4])))
        assert it.sample("kjtserve_unique_ids_total", collection="clicks", table="user") == 2


async def test_a_dead_shard_fails_those_who_need_it_naming_it_and_nobody_else():
    async with stack() as it:
        it.shards[1].failure = ShardFailed("connection refused")
        good, bad = await asyncio.gather(
            it.ask(ids_on(0, 2) + ids_on(2, 2)), it.ask(ids_on(1, 1)), return_exceptions=True
        )
        assert good.outputs[Output.EMBEDDINGS].shape == (4, 3)
        assert isinstance(bad, Unavailable)
        assert "shard 1 (clicks_shard_1)" in str(bad)
        assert it.sample("kjtserve_shard_errors_total", collection="clicks", shard="1", code="unavailable") == 1


async def test_zero_fills_in_for_a_dead_shard_where_the_request_says_so():
    async with stack() as it:
        it.shards[1].failure = ShardFailed("connection refused")
        ids = ids_on(0, 1) + ids_on(1, 2) + ids_on(2, 1)
        reply = await it.ask(ids, outputs=ANY_OUTPUT, on_shard_failure=OnShardFailure.ZERO)
        assert reply.outputs[Output.MISSING].tolist() == [False, True, True, False]
        assert not reply.outputs[Output.EMBEDDINGS][1:3].any()
        assert np.array_equal(reply.outputs[Output.EMBEDDINGS][[0, 3]], row_of("user", np.array(ids)[[0, 3]]))
        assert reply.outputs[Output.ROW_IDS][1:3].tolist() == [-1, -1]
        assert not reply.outputs[Output.HITS][1:3].any()


async def test_a_shard_that_fails_fast_is_told_at_once_and_the_slow_ones_are_called_off():
    async with stack() as it:
        it.shards[0].failure, it.shards[0].delay_s = ShardFailed("gone"), 0.01
        it.shards[1].delay_s = it.shards[2].delay_s = 2.0
        started = time.monotonic()
        with pytest.raises(Unavailable):
            await it.ask(ids_on(0, 1) + ids_on(1, 1) + ids_on(2, 1))
        assert time.monotonic() - started < 1.0
        await until(lambda: it.shards[1].cancelled == it.shards[2].cancelled == 1)


async def test_a_hanging_shard_holds_up_nobody_who_does_not_need_it():
    async with stack() as it:
        it.shards[1].hang = True
        stuck = [asyncio.create_task(it.ask(ids_on(1, 1), timeout_s=30)) for _ in range(20)]
        await asyncio.sleep(0)
        started = time.monotonic()
        for _ in range(5):
            await it.ask(ids_on(0, 3))
        assert time.monotonic() - started < 5.0
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        await until(lambda: it.plane.inflight_requests == 0)


async def test_a_deadline_is_kept_naming_the_shard_which_stops_working():
    async with stack() as it:
        it.shards[1].delay_s = 3600
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"shard 1 \(clicks_shard_1\) did not answer within 0\.100 s"):
            await it.ask(ids_on(0, 1) + ids_on(1, 1), timeout_s=0.1)
        assert time.monotonic() - started < 1.0
        await until(lambda: it.shards[1].cancelled == 1)
        assert 0 < it.shards[1].timeouts_s[0] <= 0.1
        assert it.sample("kjtserve_shard_errors_total", collection="clicks", shard="1", code="deadline_exceeded") == 1
        assert it.sample("kjtserve_shard_request_seconds_count", collection="clicks", shard="1") == 1


async def test_zero_fills_in_for_a_late_shard_before_the_deadline():
    async with stack() as it:
        it.shards[1].delay_s = 3600
        ids = ids_on(0, 1) + ids_on(1, 2)
        reply = await it.ask(ids, outputs=ANY_OUTPUT, on_shard_failure=OnShardFailure.ZERO, timeout_s=0.1)
        assert reply.outputs[Output.MISSING].tolist() == [False, True, True]
        assert np.array_equal(reply.outputs[Output.EMBEDDINGS][:1], row_of("user", np.array(ids[:1])))
        assert not reply.outputs[Output.EMBEDDINGS][1:].any()
        unique, inverse = reply.outputs[Output.UNIQUE_EMBEDDINGS], reply.outputs[Output.INVERSE]
        assert np.array_equal(unique[inverse], reply.outputs[Output.EMBEDDINGS])


async def test_each_request_of_a_batch_has_its_own_deadline_and_its_own_declaration():
    async with stack(slot_s=60) as it:
        it.shards[1].delay_s = 0.4
        ids = ids_on(0, 1) + ids_on(1, 1)
        zero, short, patient = await asyncio.gather(
            it.ask(ids, timeout_s=0.1, on_shard_failure=OnShardFailure.ZERO, outputs=ANY_OUTPUT),
            it.ask(ids, timeout_s=0.1),
            it.ask(ids, timeout_s=10),
            return_exceptions=True,
        )
        assert len(it.shards[1].requests) == 1, "they share a batch"
        assert zero.outputs[Output.MISSING].tolist() == [False, True]
        assert isinstance(short, DeadlineExceeded)
        assert np.array_equal(patient.outputs[Output.EMBEDDINGS], row_of("user", np.array(ids)))


async def test_nobody_works_for_a_request_that_a_shut_gate_turns_away():
    async with stack() as it:
        it.shards[2].failure = ShardFailed("its process died", process_died=True)
        with pytest.raises(Unavailable):
            await it.ask(ids_on(2, 1))
        ids = ids_on(0, 1) + ids_on(2, 1)
        with pytest.raises(Unavailable):
            await it.ask(ids)
        assert not it.shards[0].requests
        await it.ask(ids, on_shard_failure=OnShardFailure.ZERO)
        assert len(it.shards[0].requests) == 1


async def test_a_shut_gate_refuses_without_a_call_and_counts_none():
    async with stack() as it:
        it.shards[2].failure = ShardFailed("its process died", process_died=True)
        for _ in range(5):
            with pytest.raises(Unavailable, match="its process died"):
                await it.ask(ids_on(2, 1))
        assert len(it.shards[2].requests) == 1
        assert it.sample("kjtserve_shard_errors_total", collection="clicks", shard="2", code="unavailable") == 1
        assert it.sample("kjtserve_shard_request_seconds_count", collection="clicks", shard="2") == 1


async def test_whatever_a_client_raises_costs_only_those_who_need_that_shard():
    async with stack() as it:
        it.shards[1].failure = ValueError("nobody foresaw this")
        good, bad = await asyncio.gather(it.ask(ids_on(0, 2)), it.ask(ids_on(1, 1)), return_exceptions=True)
        assert good.outputs[Output.EMBEDDINGS].shape == (2, 3)
        assert isinstance(bad, Internal)
        assert it.plane.statistics("clicks").fail_count == 1


async def test_a_caller_who_leaves_does_not_take_the_others_along():
    async with stack(num_shards=1, slot_s=60) as it:
        it.shards[0].delay_s = 0.05
        leaving, staying = asyncio.create_task(it.ask([1])), asyncio.create_task(it.ask([2]))
        await until(lambda: it.shards[0].requests)
        leaving.cancel()
        assert np.array_equal((await staying).outputs[Output.EMBEDDINGS], row_of("user", np.array([2])))
        assert it.shards[0].cancelled == 0


async def test_when_all_callers_have_left_the_shard_call_is_cancelled():
    async with stack(num_shards=1) as it:
        it.shards[0].delay_s = 60
        task = asyncio.create_task(it.ask([1]))
        await until(lambda: it.shards[0].requests)
        task.cancel()
        await until(lambda: it.shards[0].cancelled == 1)
        assert it.plane.inflight_requests == 0


async def test_too_many_requests_are_refused_before_any_work():
    async with stack(num_shards=1, max_inflight_requests=2) as it:
        it.shards[0].delay_s = 60
        tasks = [asyncio.create_task(it.ask([1])) for _ in range(2)]
        await until(lambda: it.plane.inflight_requests == 2)
        with pytest.raises(Overloaded):
            await it.ask([2])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_reply_that_does_not_fit_beside_the_others_is_refused_before_any_work():
    async with stack(num_shards=1, max_inflight_bytes=8000) as it:
        it.shards[0].delay_s = 60
        first = asyncio.create_task(it.ask(list(range(70))))
        await until(lambda: it.shards[0].requests)
        with pytest.raises(Overloaded):
            await it.ask(list(range(70)))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"ids": [1], "collection": "nobody"}, NotFound, "nobody"),
        ({"ids": [1], "version": 9}, NotFound, "version 9"),
        ({"ids": [1], "keys": ("user", "other")}, NotFound, "other"),
        ({"ids": [1], "keys": ("user", "user")}, InvalidArgument, "more than once"),
        ({"ids": [1], "keys": ()}, InvalidArgument, "user"),
        ({"ids": [1], "timeout_s": 0.0}, InvalidArgument, "timeout"),
        ({"ids": [1], "timeout_s": float("nan")}, InvalidArgument, "timeout"),
        ({"ids": list(range(101))}, TooLarge, "101 ids"),
    ],
)
async def test_a_bad_request_is_named_and_asks_no_shard(options, error, words):
    async with stack(max_ids=100) as it:
        with pytest.raises(error, match=words):
            await it.ask(**options)
        assert not any(shard.requests for shard in it.shards)
        await it.ask([1])


@pytest.mark.parametrize(
    ("values", "lengths", "words"),
    [
        ([1, 2], [3], "3 for key 'user'"),
        ([1, 2], [1], "add up to 1"),
        ([1, 2], [3, -1], "-1 for key 'user', sample 1"),
        ([1, 2], [2**62, 2**62, 2**62, 2**62, 2], str(2**62)),
        ([1, 2], [[1, 1], [0, 0]], "shape"),
        ([1, 2], [[[2]]], "shape"),
        ([], [-1, 1], "-1"),
    ],
)
async def test_lengths_that_lie_are_named(values, lengths, words):
    async with stack() as it:
        request = LookupRequest(
            collection="clicks", values_N=np.array(values, np.int64), lengths_FB=np.array(lengths, np.int64)
        )
        with it.plane.admit() as permit, pytest.raises(InvalidArgument, match=words):
            await it.plane.lookup(request, permit)
        assert not any(shard.requests for shard in it.shards)


@pytest.mark.parametrize("bad", [-1, 100, 2**63 - 1, -(2**63)])
async def test_a_plain_table_refuses_an_id_without_a_row_unless_told_otherwise(bad):
    reject = [make_table("t", ["f"], routing=Routing.ROWS, num_shards=2)]
    zero = [make_table("t", ["f"], routing=Routing.ROWS, num_shards=2, out_of_range=OutOfRange.ZERO)]
    async with stack(reject, 2) as it:
        with pytest.raises(InvalidArgument, match=f"id {bad} at place 1 of key 'f'"):
            await it.ask([5, bad])
    async with stack(zero, 2) as it:
        await it.ask([5, bad])
        assert sum(request.ids_N.size for shard in it.shards for request in shard.requests) == 2


async def test_a_reply_over_the_limit_is_refused_before_fan_out():
    async with stack(max_reply_bytes=100) as it:
        with pytest.raises(TooLarge, match="the limit is 100"):
            await it.ask(list(range(50)))
        assert not any(shard.requests for shard in it.shards)


async def test_a_flood_of_empty_samples_is_too_large():
    async with stack(max_ids=100) as it:
        request = LookupRequest(collection="clicks", values_N=np.empty(0, np.int64), lengths_FB=np.zeros(101, np.int64))
        with it.plane.admit() as permit, pytest.raises(TooLarge, match="lengths: 101 entries"):
            await it.plane.lookup(request, permit)


async def test_the_deadline_counts_from_when_the_request_was_there():
    async with stack() as it:
        request = LookupRequest(collection="clicks", values_N=np.array([1]), lengths_FB=np.array([1]), timeout_s=0.5)
        with it.plane.admit() as permit, pytest.raises(DeadlineExceeded):
            permit.received_at = asyncio.get_running_loop().time() - 0.6
            await it.plane.lookup(request, permit)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("keys", [("user",) * 65_536, tuple(f"k{i}" for i in range(65_536))])
async def test_a_flood_of_keys_is_refused_at_once_in_a_few_words(keys):
    async with stack() as it:
        with pytest.raises((InvalidArgument, NotFound)) as failure:
            await it.ask([1], keys=keys)
        assert len(str(failure.value)) < 500


@pytest.mark.parametrize("outputs", [ANY_OUTPUT, frozenset({Output.EMBEDDINGS}), frozenset({Output.HITS})])
@pytest.mark.parametrize("batch_size", [0, 1, 50])
async def test_the_predicted_size_is_the_size(outputs, batch_size):
    tables = [make_table(f"t{i}", [f"f{i}"], routing=Routing.HASH, num_shards=2) for i in range(20)]
    async with stack(tables, 2) as it:
        lengths = np.zeros((20, batch_size), dtype=np.int64)
        lengths[:, :1] = 3
        values = np.arange(int(lengths.sum()), dtype=np.int64)
        request = LookupRequest(collection="clicks", values_N=values, lengths_FB=lengths, outputs=outputs)
        with it.plane.admit() as permit:
            reply = await it.plane.lookup(request, permit)
        predicted = predict_reply_bytes(
            outputs, request.output_dtype, num_ids=values.size, dim=3, num_lengths=lengths.size
        )
        sent = sum(array.nbytes for array in reply.outputs.values())
        if Output.OUTPUT_LENGTHS not in outputs:
            sent += 4 * sum(lengths.size for lengths in reply.lengths_E)  # they count in any case
        assert predicted == sent


async def test_fp16_and_fp32_share_a_batch():
    async with stack(num_shards=1, slot_s=60) as it:
        it.shards[0].delay_s = 0.02
        half, whole = await asyncio.gather(it.ask([1, 2, 1], output_dtype=OutputDtype.FP16), it.ask([2, 3]))
        assert len(it.shards[0].requests) == 1
        assert np.array_equal(half.outputs[Output.EMBEDDINGS], row_of("user", np.array([1, 2, 1])).astype(np.float16))
        assert np.array_equal(whole.outputs[Output.EMBEDDINGS], row_of("user", np.array([2, 3])))


async def test_the_version_that_was_served_last_is_the_default():
    async with stack() as it:
        manifest, older = make_version(managed(), NUM_SHARDS, version=7)
        shard = RuleShard(manifest, 0)
        served = Served(version=older, health=(), batcher=Batcher(shard.lookup, max_weight=1))
        it.plane.serve(served)
        assert it.plane.collection("clicks").default_version == 7
        assert it.plane.collection("clicks").versions == (1, 7)


async def test_readiness_names_the_shard_and_what_ails_it():
    async with stack() as it:
        assert it.plane.readiness().ready
        it.shards[2].failure = ShardFailed("Stub process is not healthy", process_died=True)
        with pytest.raises(Unavailable):
            await it.ask(ids_on(2, 1))
        readiness = it.plane.readiness("clicks")
        assert not readiness.ready
        assert "clicks_shard_2" in readiness.reasons[0]
        it.plane.drain()
        assert it.plane.readiness().reasons == ("shutting down",)


async def test_nothing_served_is_not_ready():
    plane = DataPlane(Settings(), Metrics(CollectorRegistry()))
    assert not plane.readiness().ready


async def test_statistics_count_what_was_answered():
    async with stack() as it:
        await it.ask([1, 1, 2])
        with pytest.raises(InvalidArgument):
            await it.ask([1], timeout_s=-1)
        counts = it.plane.statistics("clicks")
        assert (counts.success_count, counts.fail_count, counts.ids_count) == (1, 1, 3)
