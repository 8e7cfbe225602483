"""Owns asking the shards of a batch and answering its requests as their shards come in; must not know the edges.

A request is answered when the shards *it* needs have answered, so a slow or dead shard costs only those who need it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import structlog

from service.batch import PreparedBatch, assemble_reply, place_failure, place_reply, prepare_batch
from service.batcher import Entry
from service.catalog import ServedVersion
from service.errors import DeadlineExceeded, ErrorCode, Internal, LookupFailed, Overloaded, Unavailable
from service.health import ShardHealth
from service.metrics import Metrics
from service.shards import ShardClient, ShardFailed, ShardReply
from service.types import LookupReply, OnShardFailure
from service.validate import ValidRequest

log = structlog.get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A validated request and when it has to be answered."""

    valid: ValidRequest
    deadline: float
    """On the event loop's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A shard as the fan-out uses it."""

    client: ShardClient
    health: ShardHealth


class Fanout:
    """Runs batches of one served version.

    Args:
        version: What answers.
        shards: One for each of the version's shards.
        metrics: Where calls are counted.
        executor: Where tensor work of large batches runs.
        offload_ids: Ids over which a batch counts as large.
    """

    def __init__(
        self,
        version: ServedVersion,
        shards: Sequence[Shard],
        *,
        metrics: Metrics,
        executor: Executor,
        offload_ids: int,
    ) -> None:
        self._version = version
        self._shards = tuple(shards)
        self._metrics = metrics
        self._executor = executor
        self._offload_ids = offload_ids

    async def run(self, entries: Sequence[Entry[Pending, LookupReply]]) -> None:
        """Answer a batch; sets every entry's reply."""
        requests = [entry.item.valid for entry in entries]
        num_ids = sum(request.num_ids for request in requests)
        batch = await self._compute(num_ids, lambda: prepare_batch(self._version, requests))
        self._count(batch, num_ids)
        flight = _Flight(batch, entries)
        for index in flight.complete():
            await self._answer(flight, index)
        async with asyncio.TaskGroup() as group:
            for shard in sorted(flight.awaited):
                group.create_task(self._ask(flight, shard))

    async def _ask(self, flight: "_Flight", shard: int) -> None:
        """Ask one shard, then answer the requests that waited for nothing else."""
        batch = flight.batch
        try:
            reply = await self._call(flight, shard)
        except ShardFailed as exc:
            self._metrics.shard_errors.labels(self._version.collection, str(shard), exc.code.value).inc()
            self._shards[shard].health.report(exc)
            place_failure(batch, shard)
            flight.fail(shard, self._explain(shard, exc))
        else:
            await self._compute(reply.embeddings_ND.shape[0], lambda: place_reply(batch, shard, reply))
        flight.awaited.discard(shard)
        for index in flight.complete():
            await self._answer(flight, index)

    async def _call(self, flight: "_Flight", shard: int) -> ShardReply:
        health = self._shards[shard].health
        if health.reason is not None:
            raise ShardFailed(health.reason)
        timeout_s = flight.latest_deadline - asyncio.get_running_loop().time()
        started = time.perf_counter()
        try:
            return await self._shards[shard].client.lookup(flight.batch.shard_request(shard), timeout_s=timeout_s)
        finally:
            self._metrics.shard_request_seconds.labels(self._version.collection, str(shard)).observe(
                time.perf_counter() - started
            )

    async def _answer(self, flight: "_Flight", index: int) -> None:
        reply = await self._compute(flight.batch.requests[index].num_ids, lambda: assemble_reply(flight.batch, index))
        if not flight.entries[index].reply.done():
            flight.entries[index].reply.set_result(reply)

    async def _compute(self, num_ids: int, work: Callable[[], T]) -> T:
        """Run array work: at once when it is small, in a thread when it would hold up the event loop."""
        if num_ids <= self._offload_ids:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _count(self, batch: PreparedBatch, num_ids: int) -> None:
        self._metrics.batch_ids.observe(num_ids)
        for table, ids, unique in zip(self._version.tables, batch.ids_T, batch.unique_T, strict=True):
            self._metrics.ids.labels(self._version.collection, table.name).inc(ids)
            self._metrics.unique_ids.labels(self._version.collection, table.name).inc(unique)

    def _explain(self, shard: int, failure: ShardFailed) -> LookupFailed:
        model = self._version.models_S[shard]
        if failure.code is ErrorCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"shard {shard} ({model}): {failure}")
        if failure.code is ErrorCode.OVERLOADED:
            return Overloaded(f"shard {shard} ({model}): {failure}")
        if failure.code is ErrorCode.INTERNAL:
            log.error("shard_reply_broken", model=model, error=str(failure))
            return Internal(f"shard {shard} ({model}): {failure}")
        return Unavailable(f"shard {shard} ({model}) is not available: {failure}")


class _Flight:
    """Which requests of a batch in flight still wait, and for which shards."""

    def __init__(self, batch: PreparedBatch, entries: Sequence[Entry[Pending, LookupReply]]) -> None:
        self.batch = batch
        self.entries = entries
        self.latest_deadline = max(entry.item.deadline for entry in entries)
        self.awaited = set[int]().union(*batch.shards_R)
        self._open = set(range(len(entries)))

    def complete(self) -> list[int]:
        """Requests that wait for no shard any more; each is returned once."""
        done = [index for index in sorted(self._open) if not self.batch.shards_R[index] & self.awaited]
        self._open.difference_update(done)
        return done

    def fail(self, shard: int, failure: LookupFailed) -> None:
        """Give up the requests that need ``shard`` and did not ask for zeros in its place."""
        for index in sorted(self._open):
            declared = self.batch.requests[index].request.on_shard_failure
            if shard in self.batch.shards_R[index] and declared is OnShardFailure.FAIL:
                self._open.discard(index)
                if not self.entries[index].reply.done():
                    self.entries[index].reply.set_exception(failure)
